"""From a request to its reply, in any dialect, by three ways of delivery.

    reply      content -> dialect.parse -> Ask; then one of the first two below
    begin      Ask -> token ids (off the event loop) -> engine.submit
    tell       pieces -> held back, grouped -> what the dialect writes for each, and for the end
    complete   waits for the whole reply, answers with one JSON body
    stream     head at once, then each piece as an event the moment the engine hands it over
    websocket  the same pieces as messages, and {"stop": true} heard at any time

All three watch the connection: when nobody reads any more, the generation is cancelled. Whatever
can be known to be wrong is raised before the head is written, as a real 4xx; after it, an error is
told in-band, in safe words, and never looks like an end.

A stream that was asked for with `resume` belongs to no connection: it fills a `Replay`, which this
connection follows like any later one. Each generator here closes the one that it reads from, so
that leaving at any place reaches the generation at once.

Read next: `options.py`, what the flags say of all this.
"""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Awaitable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

import asks
import page
import sse
from access import Access, Refusal
from asks import Ask, Prompt
from connection import Exchange
from dialects import Dialect, Events, Frames, Native, Plain, to_json
from engine import Engine, token_ids
from generation import (
    BadRequest,
    EngineDown,
    Filtered,
    Generation,
    GenerationError,
    QueueFull,
    SamplingParams,
)
from messages import Messages
from metrics import Metrics
from outlet import Cut, Faulty, Outlet, Sender, ToClient
from pieces import Banned, Pieces, grouped, held_back, pour
from replay import ABANDONED, Replay, ReplayStore, parse_event_id
from session import Session
from simulated import FIELDS, SimulatedEngine
from upstream import UpstreamEngine
from watching import ClientGone

JSON = "application/json"
STREAM_FIELDS = (
    ("Content-Type", "text/event-stream; charset=utf-8"),
    # no-transform: a proxy that compresses would hold events back to fill its window.
    ("Cache-Control", "no-cache, no-transform"),
    # nginx and others buffer a response unless told not to, one by one.
    ("X-Accel-Buffering", "no"),
)
# curl's default type comes with JSON in practice; a browser form can send neither JSON nor this
# without the browser naming its origin.
ACCEPTED_TYPES = ("", JSON, "application/x-www-form-urlencoded")
LOG_ENTRIES = 500
# A prompt up to this is tokenized within half a millisecond: a thread's two hops take as long.
SHORT_CHARACTERS = 2000


class AnyEngine(Protocol):
    """What is asked of an engine, real or simulated. See `engine.Engine`."""

    failure: str | None
    context: int

    @property
    def waiting(self) -> int: ...  # noqa: D102

    @property
    def running(self) -> int: ...  # noqa: D102

    @property
    def cache_bytes(self) -> int: ...  # noqa: D102

    @property
    def closed(self) -> bool: ...  # noqa: D102

    def encode(self, prompt: str | list[dict[str, Any]]) -> list[int]: ...  # noqa: D102

    def submit(self, prompt: Any, params: SamplingParams) -> Generation: ...  # noqa: D102

    def start(self) -> None: ...  # noqa: D102

    def cancel_all(self, reason: str) -> None: ...  # noqa: D102

    def close(self, timeout: float) -> None: ...  # noqa: D102


# The longest WebSocket message where HTTP's content has no limit.
MESSAGE_BYTES = 16 * 1024 * 1024
SLOW_CLIENT = ("buffer", "pause", "drop")
# What breaks a silence of an event stream; an event that says nothing where a dialect has one.
SSE_HEARTBEAT = ("comment", "event", "off")


@dataclass(frozen=True)
class Policy:
    """What the flags say about delivery.

    `slow_client`: what to do while more than the transport's high-water mark waits for a client:
    "buffer" lets it grow to the connection's bound, "pause" takes the row out of the batch until
    the client has caught up, "drop" ends the stream. None of it is for resumable replies: those
    wait in the `Replay`, whoever follows.
    """

    slow_client: str = "buffer"
    banned: Banned = field(default_factory=lambda: Banned(()))
    keep_s: float = 60.0  # a finished resumable reply is kept for so long
    grace_s: float = 10.0  # one that nobody follows is generated on for so long
    request_s: float = 30.0  # for a WebSocket's request to come
    heartbeats: bool = True  # on event streams, a WebSocket has its own
    stand_in: bool = True  # words on a schedule beside the model, for whoever asks for them


@dataclass(slots=True)
class Entry:
    """One reply's line in `/log`."""

    route: str
    generation: Generation
    client_left: bool = False
    told: int = 0  # events that were numbered, and the last
    page: dict[str, float | None] | None = None  # what the page measured of it

    @property
    def last_id(self) -> str:
        """The id of the event that was told last: number 0 before any that has one."""
        return f"{self.generation.id}:{self.told}"

    def as_dict(self) -> dict[str, Any]:
        """The line as JSON tells it; `finish_reason` is null while the reply runs."""
        generation = self.generation
        return {
            "id": generation.id,
            "route": self.route,
            **generation.usage,
            "finish_reason": generation.finish_reason,
            "client_left": self.client_left,
            "cancel_reason": generation.cancel_reason,
            "timings": generation.timings.as_dict(),
            "page": self.page,
        }


class Numbered(Enum):
    """Which events of a stream are given an id."""

    NONE = auto()
    END = auto()
    ALL = auto()


class Teller:
    """Takes a reply's pieces, and puts each where it is told as an event."""

    __slots__ = ("_entry", "_events", "_numbered", "_outlet")

    def __init__(self, entry: Entry, events: Events, outlet: Outlet, numbered: bool) -> None:
        self._entry = entry
        self._events = events
        self._outlet = outlet
        self._numbered = numbered

    def take(self, piece: str) -> bool:
        """Tell a piece the moment that it is there."""
        if not self._numbered:
            return self._outlet.put(self._events.piece(piece))
        self._entry.told += 1
        return self._outlet.put(self._events.piece(piece, self._entry.last_id))


class Delivery:
    """The handlers of everything that generates, over one engine."""

    def __init__(self, engine: AnyEngine, access: Access, policy: Policy, metrics: Metrics) -> None:
        self.engine = engine
        self.policy = policy
        self.entries: deque[Entry] = deque(maxlen=LOG_ENTRIES)
        self.replays = ReplayStore(policy.keep_s)
        self._running: dict[str, Entry] = {}  # the log may have forgotten them
        self.stopping = False
        self._access = access
        self._metrics = metrics
        # A model has a stand-in beside it, for whoever asks for one: it costs nothing.
        self.stand_in: SimulatedEngine | None = SimulatedEngine() if policy.stand_in else None
        if isinstance(engine, SimulatedEngine):
            self.stand_in = engine
        names = FIELDS if self.stand_in is engine else ()
        self.streamed = Native(stream=True, fault_names=names, stand_in_names=FIELDS)
        self.buffered = Native(stream=False, fault_names=names, stand_in_names=FIELDS)

    # From a request to its generation.

    async def _body(self, exchange: Exchange) -> Mapping[str, Any]:
        """The request's JSON object, or what its query says."""
        request = exchange.request
        if request.method == "GET":
            return asks.parse_query(request.query)
        media_type = (request.fields.get("content-type") or "").partition(";")[0].strip().lower()
        if media_type not in ACCEPTED_TYPES:
            raise Refusal(400, f"send the request as {JSON}")
        coding = request.fields.get("content-encoding", "identity")
        if coding != "identity":
            identity = (("Accept-Encoding", "identity"),)  # RFC 9110 section 15.5.16
            raise Refusal(415, "send the content without a coding", fields=identity)
        return asks.parse_content(await exchange.content())

    async def _tokenize(self, prompt: Prompt, engine: AnyEngine) -> list[int]:
        loop = asyncio.get_running_loop()
        try:
            encode = functools.partial(token_ids, prompt, engine.encode)
            # A long one takes a while: not on the event loop, where everyone waits.
            short = asks.length(prompt) <= SHORT_CHARACTERS
            return encode() if short else await loop.run_in_executor(None, encode)
        except ValueError as error:
            field = "prompt" if isinstance(prompt, str) else "messages"
            raise BadRequest(str(error), field) from error

    async def _begin(self, route: str, ask: Ask) -> Entry:
        """Tokenize and submit; whatever can be known to be wrong is raised here."""
        engine: AnyEngine | None = self.stand_in if ask.simulated else self.engine
        if engine is None:
            raise BadRequest("there is no simulated engine beside this one", "model")
        ids = await self._tokenize(ask.prompt, engine)
        if ask.params.logprobs is not None and self.policy.banned:
            raise BadRequest("log probabilities would tell what a filter holds back", "logprobs")
        try:
            generation = await self._submit(engine, ids, ask)
        except BadRequest as error:
            if error.field != "schema":
                raise
            raise BadRequest(f"{ask.schema_field}: {error}", ask.schema_field) from error
        generation.on_finish = self._finished
        entry = self._running[generation.id] = Entry(route, generation)
        self.entries.append(entry)
        return entry

    async def _submit(self, engine: AnyEngine, ids: list[int], ask: Ask) -> Generation:
        if ask.params.schema is not None and isinstance(engine, Engine):
            # A large one takes a second to compile; the engine then finds it compiled.
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, engine.compile, ask.params.schema)
        if self.stopping:
            raise EngineDown("the server is shutting down")
        if ask.resume:
            self.replays.make_room()
        if isinstance(engine, UpstreamEngine):
            listed = ask.model in engine.listed
            return engine.submit(ids, ask.params, ask.model if listed else None)
        if isinstance(engine, SimulatedEngine):
            return engine.submit(ids, ask.params, ask.faults)
        return engine.submit(ids, ask.params)

    def _finished(self, generation: Generation) -> None:
        self._running.pop(generation.id, None)
        self._metrics.finished(generation)

    def watch(self, exchange: Exchange, *entries: Entry) -> None:
        """Cancel when nobody reads any more."""

        def on_gone(why: str) -> None:
            for entry in entries:
                entry.client_left = True
                entry.generation.cancel(why)

        exchange.watch(on_gone)

    # From a generation to what is told of it.

    def _pieces(self, generation: Generation, ask: Ask) -> Pieces:
        pieces: Pieces = generation
        if ask.hold_back or self.policy.banned:
            pieces = held_back(pieces, ask.hold_back, self.policy.banned)
        if ask.flush_ms is not None or ask.flush_tokens is not None:
            pieces = grouped(pieces, ask.flush_tokens, ask.flush_ms)
        return pieces

    async def tell(
        self,
        entry: Entry,
        ask: Ask,
        events: Events,
        outlet: Outlet,
        numbered: Numbered = Numbered.NONE,
    ) -> None:
        """Tell a reply: put an event for each piece the moment it is there, then for the one end.

        Before the one after the end is put, `outlet.ready` is still to be awaited.
        """
        generation = entry.generation
        teller = Teller(entry, events, outlet, numbered is Numbered.ALL)
        if begin := events.begin():
            entry.told += 1
            outlet.put(begin)
            await outlet.ready()
        tell_end = functools.partial(events.end, generation)
        try:
            await pour(self._pieces(generation, ask), teller.take, outlet.ready)
        except GenerationError as error:
            generation.filtered = isinstance(error, Filtered)
            tell_end = functools.partial(events.error, str(error), error.type)
        if broken_off := _broken_off(generation):
            tell_end = functools.partial(events.error, *broken_off)
        entry.told += 1
        outlet.put(tell_end(None if numbered is Numbered.NONE else entry.last_id))

    def outlet(
        self,
        exchange: Exchange,
        sender: Sender,
        generation: Generation | None,
        faults: Mapping[str, int] | None,
    ) -> ToClient:
        """What to tell a client through; `generation` is what its slowness slows down, if any."""
        if faults:
            return Faulty(exchange, sender, self.policy.slow_client, generation, faults)
        return ToClient(exchange, sender, self.policy.slow_client, generation)

    @staticmethod
    async def write(exchange: Exchange, outlet: Outlet, telling: Awaitable[None]) -> bool:
        """Tell to the end; False when a fault asked for a cut."""
        try:
            await telling
            await outlet.ready()
        except Cut:
            exchange.cut()
            return False
        return True

    # The two ways to answer over HTTP, by route or by what the request asks for.

    async def reply(self, exchange: Exchange, dialect: Dialect) -> None:
        """Answer a request for a reply in this dialect."""
        await self.answer(exchange, dialect, await self.ask(exchange, dialect))

    async def ask(self, exchange: Exchange, dialect: Dialect) -> Ask:
        """What a request in this dialect asks for."""
        body = await self._body(exchange)
        try:
            return dialect.parse(body)
        except BadRequest as error:
            if error.code != "model_not_found":
                raise
        await self.list_models()  # there may be a new one
        return dialect.parse(body)

    async def list_models(self) -> None:
        """Have the names of the models up to date, where another server has them."""
        if isinstance(self.engine, UpstreamEngine):
            try:
                await self.engine.list_models()
            except GenerationError as error:
                raise _refused(error) from error

    async def answer(self, exchange: Exchange, dialect: Dialect, ask: Ask) -> None:
        """Answer as the request asks for: with events, or with one JSON body."""
        if ask.stream:
            await self._stream(exchange, dialect, ask)
        else:
            await self._complete(exchange, dialect, ask)

    async def complete(self, exchange: Exchange) -> None:
        """The whole reply as one JSON body."""
        await self.reply(exchange, self.buffered)

    async def stream(self, exchange: Exchange) -> None:
        """Server-sent events, a piece an event."""
        last_event_id = exchange.request.fields.get("last-event-id")
        if last_event_id:
            # A client that reconnects repeats its request; it must not start a second reply.
            await self._resume(exchange, *parse_event_id(last_event_id))
        else:
            await self.reply(exchange, self.streamed)

    # One JSON body.

    async def _complete(self, exchange: Exchange, dialect: Dialect, ask: Ask) -> None:
        entry = await self._begin(exchange.request.path, ask)
        with entry.generation as generation:
            self.watch(exchange, entry)
            text = await self.text(entry, ask, dialect)
        fields = [*self._access.fields(exchange.request), ("Reply-Id", generation.id)]
        body = to_json(dialect.body(ask, generation, text)).encode()
        if ask.faults and ask.faults.get("truncate_after", 10**9) <= generation.completion_tokens:
            exchange.cut_short(200, body, JSON, fields)
        else:
            exchange.respond(200, body, JSON, fields)

    async def text(self, entry: Entry, ask: Ask, dialect: Dialect) -> str:
        """All of a reply's text, once it is there. `Refusal` when the reply fails."""
        generation, texts = entry.generation, []
        try:
            async with aclosing(self._pieces(generation, ask)) as pieces:
                async for piece in pieces:
                    texts.append(piece)
        except Filtered as error:
            if not dialect.filter_is_an_end:
                raise _refused(error) from error
            generation.filtered = True
        except GenerationError as error:
            raise _refused(error) from error
        if broken_off := _broken_off(generation):
            raise Refusal(503, *broken_off)
        return "".join(texts)

    # Server-sent events.

    async def _stream(self, exchange: Exchange, dialect: Dialect, ask: Ask) -> None:
        entry = await self.begin(exchange, ask)
        events = dialect.events(ask, entry.generation)
        if ask.resume:
            replay = Replay(entry.generation, self.policy.grace_s)
            self.replays.add(replay, self.tell(entry, ask, events, replay, Numbered.ALL))
            # An `EventSource` can't read the head, and reconnects: it is told the id as an event.
            begin = begun(entry.generation.id) if exchange.request.method == "GET" else b""
            await self.follow(exchange, replay, 0, entry, ask.faults, begin)
            return
        with entry.generation as generation:
            self.start(exchange, generation, events.heartbeat)
            self.watch(exchange, entry)
            # Only an `EventSource` uses GET, and it reconnects after the end: the end's id tells
            # it apart from one that begins (see `_resume`).
            numbered = Numbered.END if exchange.request.method == "GET" else Numbered.NONE
            outlet = self.outlet(exchange, exchange, generation, ask.faults)
            telling = self.tell(entry, ask, events, outlet, numbered)
            if await self.write(exchange, outlet, telling):
                exchange.finish()

    async def begin(self, exchange: Exchange, ask: Ask) -> Entry:
        """Begin a reply that is streamed; what can be known to be wrong is raised here."""
        entry = await self._begin(exchange.request.path, ask)
        await self._accepted(exchange, entry)
        return entry

    async def _accepted(self, exchange: Exchange, entry: Entry) -> None:
        """Wait until it is known that the request is good, where another server has to say so.

        But no longer than a heartbeat: then the client has to hear something, and a refusal that
        comes later is told in-band.
        """
        generation = entry.generation
        if generation.accepted is None:
            return
        self.watch(exchange, entry)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(exchange.connection.settings.heartbeat_s or None):
                await generation.accepted.wait()
        if generation.failure is not None:
            raise _refused(generation.failure)

    def start(self, exchange: Exchange, generation: Generation, heartbeat: bytes) -> None:
        """Send the head now, not with the first token: the client knows that it is served."""
        fields = [*STREAM_FIELDS, *self._access.fields(exchange.request)]
        fields.append(("Reply-Id", generation.id))
        exchange.start(200, fields, heartbeat if self.policy.heartbeats else b"", heartbeat)

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

    async def _resume(self, exchange: Exchange, id: str, after: int) -> None:
        entry = self.find(id)
        replay = self.replays.get(id)
        if replay is None:
            if entry is not None and entry.generation.finish_reason and after == entry.told:
                exchange.respond_empty(204, self._access.fields(exchange.request))
                return
            raise Refusal(404, "this reply is unknown, or no longer kept", "not_found")
        if after > len(replay.events):
            raise BadRequest("Last-Event-ID is ahead of the reply", "Last-Event-ID")
        if replay.complete and after == len(replay.events):
            # WHATWG HTML section 9.2.3: 204 stops an EventSource from reconnecting.
            exchange.respond_empty(204, self._access.fields(exchange.request))
            return
        if exchange.request.method == "HEAD":
            exchange.respond_empty(200, [*STREAM_FIELDS, *self._access.fields(exchange.request)])
            return
        await self.follow(exchange, replay, after, entry or Entry("/stream", replay.generation))

    async def follow(
        self,
        exchange: Exchange,
        replay: Replay,
        after: int,
        entry: Entry,
        faults: Mapping[str, int] | None = None,
        begin: bytes = b"",
    ) -> None:
        """Write a resumable reply's events from number `after` on, behind `begin`."""

        def on_gone(why: str) -> None:
            entry.client_left = True
            replay.wake()  # the generation goes on for a grace time, this follower does not

        self.start(exchange, replay.generation, Plain.heartbeat)
        exchange.watch(on_gone)
        if begin:
            exchange.write(exchange.frame(begin))

        outlet = self.outlet(exchange, exchange, None, faults)
        telling = replay.follow(after, outlet, lambda: exchange.gone is None)
        if await self.write(exchange, outlet, telling):
            exchange.finish()

    def find(self, id: str) -> Entry | None:
        """The entry of a reply's id, if it is running or in the log."""
        logged = (entry for entry in self.entries if entry.generation.id == id)
        return self._running.get(id) or next(logged, None)

    async def cancel(self, exchange: Exchange) -> None:
        """`POST /cancel/ID`: stop a reply from another connection."""
        entry = self.find(exchange.request.path.rpartition("/")[2])
        if entry is None:
            raise Refusal(404, "this reply is unknown", "not_found")
        running = entry.generation.finish_reason is None
        entry.generation.cancel("cancelled by id")
        self.answer_json(exchange, {"id": entry.generation.id, "cancelled": running})

    async def mark(self, exchange: Exchange) -> None:
        """`POST /log/ID`: take in what the page measured; answer with the reply's line."""
        marks = page.parse_marks(await self._body(exchange))
        entry = self.find(exchange.request.path.rpartition("/")[2])
        if entry is None:
            raise Refusal(404, "this reply is unknown", "not_found")
        entry.page = marks
        self.answer_json(exchange, entry.as_dict())

    async def count_tokens(self, exchange: Exchange, dialect: Messages) -> None:
        """`POST /v1/messages/count_tokens`: what the model would have to read."""
        if isinstance(self.engine, UpstreamEngine):
            message = "tokens can't be counted here: the server behind this one has the tokenizer"
            raise Refusal(501, message, "not_supported")
        ids = await self._tokenize(dialect.prompt(await self._body(exchange)), self.engine)
        self.answer_json(exchange, {"input_tokens": len(ids)})

    def answer_json(self, exchange: Exchange, body: Mapping[str, Any]) -> None:
        """Answer with JSON."""
        fields = self._access.fields(exchange.request)
        exchange.respond(200, to_json(body).encode(), JSON, fields)

    # WebSocket.

    async def websocket(self, exchange: Exchange) -> None:
        """One request in, pieces out, `{"stop": true}` in at any time."""
        limits = exchange.connection.settings.limits
        session = Session(exchange, limits.content_bytes or MESSAGE_BYTES)
        await session.accept()
        frames = Frames()
        try:
            async with exchange.connection.patience(self.policy.request_s):
                message = await session.receive()
            if message is None:
                return
            ask = self.streamed.parse(_message_body(message))
            if ask.resume:
                raise BadRequest("resume is for /stream", "resume")
            if ask.events != "plain":
                raise BadRequest("events is for event streams", "events")
            entry = await self._begin("/ws", ask)
        except TimeoutError:
            await session.close(*((1001, "") if self.stopping else (1008, "no request came")))
            return
        except (BadRequest, QueueFull, EngineDown) as error:
            session.send(frames.refusal(*refusal_words(error)))
            await session.close()
            return
        await self._converse(exchange, session, entry, ask)

    async def _converse(self, exchange: Exchange, session: Session, entry: Entry, ask: Ask) -> None:
        """Send pieces and listen at the same time, until the reply or the client ends."""
        with entry.generation as generation:
            self.watch(exchange, entry)
            listening = asyncio.create_task(self._listen(session, entry))
            try:
                outlet = self.outlet(exchange, session, generation, ask.faults)
                telling = self.tell(entry, ask, Frames(), outlet)
                whole = await self.write(exchange, outlet, telling)
            finally:
                listening.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await listening
        if whole:
            await session.close(1001 if self.stopping else 1000)

    async def _listen(self, session: Session, entry: Entry) -> None:
        while True:
            try:
                message = await session.receive()
            except ClientGone:
                return  # the watch on the exchange knows
            if message is None:
                # Closed, closing or broken: in each case nobody waits for the rest.
                session.exchange.left("the client closed the WebSocket")
                return
            with contextlib.suppress(BadRequest):
                if _message_body(message).get("stop") is True:
                    entry.generation.cancel("the client said stop")


# What an `EventSource` waits before it reconnects; its own default is some seconds.
RETRY_MS = 1000


def begun(id: str) -> bytes:
    """The event before the first piece: a client that is cut off even then comes back for the
    same reply, as number 0 of it was seen, and one that wants to stop it knows its name."""
    return sse.encode(to_json({"id": id}), event="begin", id=f"{id}:0", retry=RETRY_MS)


# Not by the client's own wish: such a reply must not look like one that has ended.
BROKEN_OFF = {
    "shutdown": ("the server is shutting down", "unavailable"),
    ABANDONED: ("nobody followed the reply any more", "abandoned"),
}


def _broken_off(generation: Generation) -> tuple[str, str] | None:
    """Message and type of the error that a cancelled reply has to end in, if any."""
    if generation.finish_reason != "cancelled":
        return None
    return BROKEN_OFF.get(generation.cancel_reason or "")


def _message_body(message: str | bytes) -> Mapping[str, Any]:
    if isinstance(message, bytes):
        raise BadRequest("send the request as a text message")
    return asks.parse_content(message.encode())


def _refused(error: GenerationError) -> Refusal:
    """A failure that comes while it can still be said with a status."""
    return Refusal(error.status, str(error), error.type, fields=error.fields)


def refusal_words(error: Exception) -> tuple[str, str, str | None]:
    """Message, type and field of a refusal by the engine or the dialect."""
    if isinstance(error, BadRequest):
        return str(error), error.code or "invalid_request_error", error.field
    return str(error), "overloaded" if isinstance(error, QueueFull) else "unavailable", None
