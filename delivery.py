"""From a request to its reply, in any dialect: as one JSON body, or as a stream of events.

    ask        content -> dialect.parse -> Ask
    submit     Ask -> token ids (off the event loop) -> engine.submit -> Entry, with a Generation
    tell       its pieces -> held back, grouped -> `telling.py`, to an outlet

    complete   waits for the whole reply, answers with one JSON body
    stream     head at once, then each piece as an event the moment the engine hands it over

Both ways watch the connection: when nobody reads any more, the generation is cancelled. Whatever
can be known to be wrong is raised before the head is written, as a real 4xx; after it, an error is
told in-band, in safe words, and never looks like an end.

Not here: replies that outlive their connection (`resuming.py`), WebSockets (`conversing.py`).
Read next: `resuming.py`.
"""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import asks
import page
from access import Access, Refusal
from asks import Ask
from connection import Exchange
from dialects import Dialect, Events, Native, to_json
from engine import AnyEngine, Engine, Prompt, token_ids
from generation import BadRequest, EngineDown, Filtered, Generation, GenerationError
from messages import Messages
from metrics import Metrics
from outlet import Faulty, Outlet, Sender, ToClient
from pieces import Banned, Pieces, grouped, held_back
from replay import ReplayStore
from simulated import FIELDS, ON_THE_WIRE, SimulatedEngine
from telling import Entry, Numbered, broken_off, tell, to_the_end
from upstream import UpstreamEngine

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
# What `Policy.slow_client` may say.
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


class Delivery:
    """The handlers of everything that generates, over one engine."""

    def __init__(self, engine: AnyEngine, access: Access, policy: Policy, metrics: Metrics) -> None:
        self.engine = engine
        self.policy = policy
        self.entries: deque[Entry] = deque(maxlen=LOG_ENTRIES)
        self.replays = ReplayStore(policy.keep_s)
        self._running: dict[str, Entry] = {}  # the log may have forgotten them
        self.stopping = False
        self.access = access
        self._metrics = metrics
        # A model has a stand-in beside it, for whoever asks for one: it costs nothing.
        self.stand_in: SimulatedEngine | None = SimulatedEngine() if policy.stand_in else None
        if isinstance(engine, SimulatedEngine):
            self.stand_in = engine
        names = FIELDS if self.stand_in is engine else ()
        self.streamed = Native(stream=True, simulation_names=names, stand_in_names=FIELDS)
        self.buffered = Native(stream=False, simulation_names=names, stand_in_names=FIELDS)

    # The two ways to answer over HTTP, by route or by what the request asks for.

    async def reply(self, exchange: Exchange, dialect: Dialect) -> None:
        """Answer a request for a reply in this dialect."""
        await self.answer(exchange, dialect, await self.ask(exchange, dialect))

    async def answer(self, exchange: Exchange, dialect: Dialect, ask: Ask) -> None:
        """Answer as the request asks for: with events, or with one JSON body."""
        if ask.stream:
            await self._stream(exchange, dialect, ask)
        else:
            await self._complete(exchange, dialect, ask)

    async def complete(self, exchange: Exchange) -> None:
        """The whole reply as one JSON body."""
        await self.reply(exchange, self.buffered)

    # From a request to its generation.

    async def ask(self, exchange: Exchange, dialect: Dialect) -> Ask:
        """What a request in this dialect asks for."""
        body = await self._body(exchange)
        try:
            return dialect.parse(body)
        except BadRequest as error:
            if error.type != "model_not_found":
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

    async def submit(self, route: str, ask: Ask) -> Entry:
        """Tokenize and submit; whatever can be known to be wrong is raised here."""
        engine: AnyEngine | None = self.stand_in if ask.simulated else self.engine
        if engine is None:
            raise BadRequest("there is no simulated engine beside this one", "model")
        ids = await self._tokenize(ask.prompt, engine)
        if ask.params.logprobs is not None and self.policy.banned:
            raise BadRequest("log probabilities would tell what a filter holds back", "logprobs")
        try:
            generation = await self._hand_to(engine, ids, ask)
        except BadRequest as error:
            if error.field != "schema":
                raise
            raise BadRequest(f"{ask.schema_field}: {error}", ask.schema_field) from error
        generation.on_finish = self._finished
        entry = self._running[generation.id] = Entry(route, generation)
        self.entries.append(entry)
        return entry

    async def _hand_to(self, engine: AnyEngine, ids: list[int], ask: Ask) -> Generation:
        if ask.params.schema is not None and isinstance(engine, Engine):
            # A large one takes a second to compile; the engine then finds it compiled.
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, engine.compile, ask.params.schema)
        if self.stopping:
            raise EngineDown("the server is shutting down")
        if ask.resume:
            self.replays.check_room()
        if isinstance(engine, UpstreamEngine):
            listed = ask.model in engine.listed
            return engine.submit(ids, ask.params, ask.model if listed else None)
        if isinstance(engine, SimulatedEngine):
            return engine.submit(ids, ask.params, ask.simulation)
        return engine.submit(ids, ask.params)

    async def submit_checked(self, exchange: Exchange, ask: Ask) -> Entry:
        """Submit a reply, and wait until it is known that the request is good.

        That takes time where another server has to say so, but no longer than a heartbeat: then
        the client has to hear something, and a refusal that comes later is told in-band.
        """
        entry = await self.submit(exchange.request.path, ask)
        generation = entry.generation
        if generation.accepted is None:
            return entry
        self.watch(exchange, entry)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(exchange.connection.settings.heartbeat_s or None):
                await generation.accepted.wait()
        if generation.failure is not None:
            raise _refused(generation.failure)
        return entry

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

    def tell(
        self,
        entry: Entry,
        ask: Ask,
        events: Events,
        outlet: Outlet,
        numbered: Numbered = Numbered.NONE,
    ) -> Coroutine[Any, Any, None]:
        """Tell a reply to an outlet: its pieces as the request and the filter have them."""
        return tell(entry, self._pieces(entry.generation, ask), events, outlet, numbered)

    def outlet(
        self,
        exchange: Exchange,
        sender: Sender,
        generation: Generation | None,
        simulation: Mapping[str, int] | None,
    ) -> ToClient:
        """What to tell a client through; `generation` is what its slowness slows down, if any."""
        faults = {name: n for name, n in (simulation or {}).items() if name in ON_THE_WIRE}
        if faults:
            return Faulty(exchange, sender, self.policy.slow_client, generation, faults)
        return ToClient(exchange, sender, self.policy.slow_client, generation)

    # One JSON body.

    async def _complete(self, exchange: Exchange, dialect: Dialect, ask: Ask) -> None:
        entry = await self.submit(exchange.request.path, ask)
        with entry.generation as generation:
            self.watch(exchange, entry)
            text = await self.text(entry, ask, dialect)
        fields = [*self.access.fields(exchange.request), ("Reply-Id", generation.id)]
        body = to_json(dialect.body(ask, generation, text)).encode()
        cut_after = (ask.simulation or {}).get("truncate_after")
        if cut_after is not None and cut_after <= generation.completion_tokens:
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
        if why := broken_off(generation):
            raise Refusal(503, *why)
        return "".join(texts)

    # Server-sent events.

    async def _stream(self, exchange: Exchange, dialect: Dialect, ask: Ask) -> None:
        entry = await self.submit_checked(exchange, ask)
        events = dialect.events(ask, entry.generation)
        with entry.generation as generation:
            self.start(exchange, generation, events.heartbeat)
            self.watch(exchange, entry)
            # Only an `EventSource` uses GET, and it reconnects after the end: the end's id tells
            # it apart from one that begins (see `resuming.py`).
            numbered = Numbered.END if exchange.request.method == "GET" else Numbered.NONE
            outlet = self.outlet(exchange, exchange, generation, ask.simulation)
            telling = self.tell(entry, ask, events, outlet, numbered)
            if await to_the_end(exchange, outlet, telling):
                exchange.finish()

    def start(self, exchange: Exchange, generation: Generation, heartbeat: bytes) -> None:
        """Send the head now, not with the first token: the client knows that it is served."""
        fields = [*STREAM_FIELDS, *self.access.fields(exchange.request)]
        fields.append(("Reply-Id", generation.id))
        exchange.start(200, fields, heartbeat if self.policy.heartbeats else b"", heartbeat)

    # Replies that are under way or logged, and what is no reply.

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

    def answer_json(self, exchange: Exchange, body: Mapping[str, Any], status: int = 200) -> None:
        """Answer with JSON."""
        fields = self.access.fields(exchange.request)
        exchange.respond(status, to_json(body).encode(), JSON, fields)


def _refused(error: GenerationError) -> Refusal:
    """A failure that comes while it can still be said with a status."""
    return Refusal(error.status, str(error), error.type, fields=error.fields)
