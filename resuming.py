"""`/stream`, with replies that outlive their connection: how they begin, and are come back to.

    POST /stream {"resume": true}    the reply fills a `Replay`, which this connection follows
    GET  /stream/ID                  what comes after Last-Event-ID, or all of it
    .... /stream                     with Last-Event-ID: the same, of the reply that it names

A stream that was asked for with `resume` belongs to no connection: the one that asked follows its
`Replay` (`replay.py`) like any later one, and whoever leaves only stops following. The third line
is what an `EventSource` does by itself: it repeats its request, and must not get a second reply.

WHATWG HTML section 9.2.3 (reconnection, Last-Event-ID, 204).
Read next: `conversing.py`, the same over a WebSocket.
"""

from collections.abc import Mapping

import sse
from access import Refusal
from asks import Ask
from connection import Exchange
from delivery import STREAM_FIELDS, Delivery
from dialects import Plain, to_json
from generation import BadRequest
from replay import Replay, parse_event_id
from telling import Entry, Numbered, to_the_end

# What an `EventSource` waits before it reconnects; its own default is some seconds.
RETRY_MS = 1000


class Resuming:
    """The handlers of `/stream` and `/stream/ID`."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    async def stream(self, exchange: Exchange) -> None:
        """`/stream`: server-sent events, a piece an event."""
        last_event_id = exchange.request.fields.get("last-event-id")
        if last_event_id:
            await self._resume(exchange, *parse_event_id(last_event_id))
            return
        dialect = self._delivery.streamed
        ask = await self._delivery.ask(exchange, dialect)
        if ask.resume:
            await self._keep(exchange, ask)
        else:
            await self._delivery.answer(exchange, dialect, ask)

    async def resume(self, exchange: Exchange) -> None:
        """`GET /stream/ID`: what follows `Last-Event-ID`, or all of it."""
        id = exchange.request.path.rpartition("/")[2]
        last_event_id = exchange.request.fields.get("last-event-id")
        after = 0
        if last_event_id:
            reply, after = parse_event_id(last_event_id)
            if reply != id:
                raise BadRequest("Last-Event-ID is of another reply", "Last-Event-ID")
        await self._resume(exchange, id, after)

    async def _keep(self, exchange: Exchange, ask: Ask) -> None:
        """Have a new reply told to a `Replay`, and follow it."""
        delivery = self._delivery
        entry = await delivery.submit_checked(exchange, ask)
        events = delivery.streamed.events(ask, entry.generation)
        replay = Replay(entry.generation, delivery.policy.grace_s)
        delivery.replays.add(replay, delivery.tell(entry, ask, events, replay, Numbered.ALL))
        # An `EventSource` can't read the head, and reconnects: it is told the id as an event.
        first = begin_event(entry.generation.id) if exchange.request.method == "GET" else b""
        await follow(delivery, exchange, replay, 0, entry, ask.simulation, first)

    async def _resume(self, exchange: Exchange, id: str, after: int) -> None:
        delivery = self._delivery
        access_fields = delivery.access.fields(exchange.request)
        entry = delivery.find(id)
        replay = delivery.replays.get(id)
        if replay is None:
            if entry is not None and entry.generation.finish_reason and after == entry.told:
                exchange.respond_empty(204, access_fields)
                return
            raise Refusal(404, "this reply is unknown, or no longer kept", "not_found")
        if after > len(replay.events):
            raise BadRequest("Last-Event-ID is ahead of the reply", "Last-Event-ID")
        if replay.complete and after == len(replay.events):
            # WHATWG HTML section 9.2.3: 204 stops an EventSource from reconnecting.
            exchange.respond_empty(204, access_fields)
            return
        if exchange.request.method == "HEAD":
            exchange.respond_empty(200, [*STREAM_FIELDS, *access_fields])
            return
        entry = entry or Entry("/stream", replay.generation)
        await follow(delivery, exchange, replay, after, entry)


async def follow(
    delivery: Delivery,
    exchange: Exchange,
    replay: Replay,
    after: int,
    entry: Entry,
    simulation: Mapping[str, int] | None = None,
    first: bytes = b"",
) -> None:
    """Write a resumable reply's events from number `after` on, behind `first`."""

    def on_gone(why: str) -> None:
        entry.client_left = True
        replay.wake()  # the generation goes on for a grace time, this follower does not

    delivery.start(exchange, replay.generation, Plain.heartbeat)
    exchange.watch(on_gone)
    if first:
        exchange.write(exchange.frame(first))

    outlet = delivery.outlet(exchange, exchange, None, simulation)
    telling = replay.follow(after, outlet, lambda: exchange.gone is None)
    if await to_the_end(exchange, outlet, telling):
        exchange.finish()


def begin_event(id: str) -> bytes:
    """The event before the first piece: a client that is cut off even then comes back for the
    same reply, as number 0 of it was seen, and one that wants to stop it knows its name."""
    return sse.encode(to_json({"id": id}), event="begin", id=f"{id}:0", retry=RETRY_MS)
