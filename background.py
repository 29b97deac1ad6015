"""Replies in the background: `/v1/responses` with `background: true`, and what can be done with it.

    POST /v1/responses                                   begins a reply that no connection owns
    GET  /v1/responses/ID                                the response object as it is now
    GET  /v1/responses/ID?stream=true&starting_after=N   the events after number N, then live ones
    POST /v1/responses/ID/cancel                         stops it; the response object

It is a `Replay` (`replay.py`) that holds each event by itself, so that an event's sequence number
is its place. Nobody needs to follow it: it goes on to its end, which `max_output_tokens` and the
context bound, and is kept for a while after that. The response object is read from its events:
the first one says what was asked for, the last one all that came of it.

OpenAI API reference: Background mode.
Read next: `messages.py`.
"""

import json
import math
import re

from access import Refusal
from asks import Ask
from connection import Exchange
from delivery import STREAM_FIELDS, Delivery
from dialects import Dialect
from generation import BadRequest
from replay import Replay
from resuming import follow
from telling import Entry

RESPONSE_ID = re.compile(r"resp_([0-9a-f]{1,32})", re.ASCII)


class BackgroundReply(Replay):
    """One that was begun here (the store has native ones, too), with each event by itself."""

    def put(self, data: bytes) -> bool:
        """Keep the next events, which may be told several at once."""
        # JSON has no line ends: only the end of an event is an empty line.
        for event in data.split(b"\n\n")[:-1]:
            super().put(event + b"\n\n")
        return True


class Background:
    """The handlers of `/v1/responses`."""

    def __init__(self, delivery: Delivery, dialect: Dialect) -> None:
        self._delivery = delivery
        self._dialect = dialect

    async def create(self, exchange: Exchange) -> None:
        """`POST /v1/responses`, in the background or not."""
        ask = await self._delivery.ask(exchange, self._dialect)
        if ask.background:
            await self._keep(exchange, ask)
        else:
            await self._delivery.answer(exchange, self._dialect, ask)

    async def _keep(self, exchange: Exchange, ask: Ask) -> None:
        entry = await self._delivery.submit_checked(exchange, ask)
        events = self._dialect.events(ask, entry.generation)
        replay = BackgroundReply(entry.generation, grace_s=math.inf)
        telling = self._delivery.tell(entry, ask, events, replay)
        self._delivery.replays.add(replay, telling)
        if ask.stream:
            await follow(self._delivery, exchange, replay, 0, entry, ask.simulation)
        else:
            await self._tell(exchange, replay)

    async def retrieve(self, exchange: Exchange) -> None:
        """`GET /v1/responses/ID`: the response, or its events."""
        replay = self._find(exchange)
        query = dict(exchange.request.query)
        if query.get("stream", "false") not in ("true", "false"):
            raise BadRequest("stream must be true or false", "stream")
        if query.get("stream") != "true":
            await self._tell(exchange, replay)
            return
        after = query.get("starting_after")
        if after is not None and not re.fullmatch("[0-9]{1,9}", after):
            raise BadRequest("starting_after must be a sequence number", "starting_after")
        # Numbers begin at 0: after number N there are N + 1 events less.
        seen = 0 if after is None else int(after) + 1
        if replay.complete and seen > len(replay.events):
            raise BadRequest("starting_after is ahead of the response", "starting_after")
        if exchange.request.method == "HEAD":
            exchange.respond_empty(200, STREAM_FIELDS)
            return
        generation = replay.generation
        entry = self._delivery.find(generation.id) or Entry("/v1/responses", generation)
        await follow(self._delivery, exchange, replay, seen, entry)

    async def cancel(self, exchange: Exchange) -> None:
        """`POST /v1/responses/ID/cancel`; of one that has ended, what came of it."""
        replay = self._find(exchange)
        replay.generation.cancel("cancelled by id")
        await replay.reached(math.inf)
        await self._tell(exchange, replay)

    def _find(self, exchange: Exchange) -> BackgroundReply:
        name = exchange.request.path.split("/")[3]
        match = RESPONSE_ID.fullmatch(name)
        replay = self._delivery.replays.get(f"reply-{match[1]}") if match else None
        if not isinstance(replay, BackgroundReply):
            message = "this response is unknown, or no longer kept; those in the background are"
            raise Refusal(404, message, "not_found")
        return replay

    async def _tell(self, exchange: Exchange, replay: Replay) -> None:
        """Answer with the response object as the newest event that has it tells it."""
        await replay.reached(1)
        newest = replay.events[-1 if replay.whole else 0]
        data = newest.partition(b"\ndata: ")[2]
        self._delivery.answer_json(exchange, json.loads(data)["response"])
