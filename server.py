"""The streaming server: routes, replies by three ways of delivery, and `main`.

    python server.py                      the default model on http://127.0.0.1:8765
    python server.py --model simulated    words on a schedule, nothing to install

The path of one reply, told by the names in this file:

    route        method and path to a handler; a refusal is a real 4xx, before any stream begins
    begin        content -> dialects.Ask -> token ids (off the event loop) -> engine.submit
    complete     waits for the whole reply, answers with one JSON body
    stream       head at once, then each piece as an event the moment the engine hands it over
    websocket    the same pieces as messages, and {"stop": true} heard at any time

All three watch the connection: when nobody reads any more, the generation is cancelled.
`--naive` starts a server that does not watch, to show what that costs.

Not here: bytes (`http1.py`, `sse.py`, `websocket.py`), connections (`connection.py`,
`session.py`), tokens (`engine.py`). Read next: `client.py`, the other end of the wire.
"""

import argparse
import asyncio
import contextlib
import functools
import hmac
import logging
import os
import signal
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import dialects
import http1
import websocket
from connection import ClientGone, Connection, Exchange, Settings, WatchedReader, error_body
from dialects import Ask, to_json
from engine import Engine
from generation import (
    BadRequest,
    EngineDown,
    Generation,
    GenerationError,
    QueueFull,
    SamplingParams,
)
from session import Session
from simulated import FAULTS, SimulatedEngine

log = logging.getLogger("server")

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
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
SCHEMES = ("http", "https")  # of a page that was served by this server, or by a proxy before it
GENERATING = ("/complete", "/stream")  # where a GET costs something, and HEAD must not
LOG_ENTRIES = 500
# How long streams may take to say goodbye at shutdown.
GRACE_S = 5.0


class AnyEngine(Protocol):
    """What the server asks of an engine, real or simulated."""

    failure: str | None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""

    @property
    def running(self) -> int:
        """Replies under way."""

    def encode(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """See `LanguageModel.encode`."""

    def submit(self, prompt: Any, params: SamplingParams) -> Generation:
        """See `Engine.submit`."""

    def start(self) -> None:
        """See `Engine.start`."""

    def cancel_all(self, reason: str) -> None:
        """See `Engine.cancel_all`."""

    def close(self, timeout: float) -> None:
        """See `Engine.close`."""


@dataclass(frozen=True)
class Options:
    """What the flags set, beside the connection's own settings."""

    model: str = "simulated"
    origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    settings: Settings = field(default_factory=Settings)
    max_connections: int = 1000


class Refusal(Exception):
    """A request that gets a 4xx or 5xx instead of a reply; the words are safe to show."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        field: str | None = None,
        fields: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.field = field
        self.fields = fields


@dataclass(slots=True)
class Entry:
    """One request's line in `/log`."""

    route: str
    generation: Generation
    client_left: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The line as JSON tells it; `finish_reason` is null while the reply runs."""
        generation = self.generation
        return {
            "id": generation.id,
            "route": self.route,
            **generation.usage,
            "finish_reason": generation.finish_reason,
            "client_left": self.client_left,
            "timings": generation.timings.as_dict(),
        }


class Server:
    """Routes and handlers over one engine. `serve` a bound socket, then `stop`."""

    def __init__(self, engine: AnyEngine, options: Options) -> None:
        self.engine = engine
        self.options = options
        self.entries: deque[Entry] = deque(maxlen=LOG_ENTRIES)
        self.stopping = False
        self._fault_names = FAULTS if isinstance(engine, SimulatedEngine) else ()
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        complete, stream, ws = self._complete, self._stream, self._websocket
        self._routes: dict[str, dict[str, Handler]] = {
            "/complete": {"GET": complete, "POST": complete},
            "/wait": {"POST": complete},
            "/blocking": {"POST": complete},
            "/stream": {"GET": stream, "POST": stream},
            "/ws": {"GET": ws},
            "/log": {"GET": self._log},
            "/health": {"GET": self._health},
            "/": {"GET": self._index},
        }

    # Starting and stopping.

    async def serve(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Start the engine and accept connections on a bound socket."""
        self.engine.start()
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            return asyncio.StreamReaderProtocol(WatchedReader(loop=loop), self._accept, loop=loop)

        handshake_s = self.options.settings.head_s if tls else None
        self._listener = await loop.create_server(
            protocol, sock=listener, ssl=tls, ssl_handshake_timeout=handshake_s, backlog=1024
        )

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Accept no more, let every stream say its end, then drop what is left."""
        self.stopping = True
        if self._listener is not None:
            self._listener.close()  # not wait_closed: from 3.12 on it waits for every connection
        self.engine.cancel_all("shutdown")
        for connection in list(self._connections):
            connection.shut_down()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for connection in list(self._connections):
            connection.writer.transport.abort()
        self.engine.close(grace_s)

    async def _accept(self, wire: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert isinstance(wire, WatchedReader)
        connection = Connection(wire, writer, self.handle, self.options.settings)
        if len(self._connections) >= self.options.max_connections or self.stopping:
            await connection.turn_away()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(connection)
        self._tasks.add(task)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            self._tasks.discard(task)

    # From a request to its handler.

    async def handle(self, exchange: Exchange) -> None:
        """Answer one request: find its handler, or say why not."""
        try:
            await self._route(exchange)(exchange)
        except Refusal as refusal:
            self._refuse(exchange, refusal)
        except http1.ProtocolError as error:
            fields = websocket.UPGRADE_REQUIRED_FIELDS if error.status == 426 else ()
            self._refuse(exchange, Refusal(error.status, str(error), fields=fields))
        except BadRequest as error:
            self._refuse(
                exchange,
                Refusal(400, str(error), error.code or "invalid_request_error", error.field),
            )
        except QueueFull as error:
            self._refuse(
                exchange, Refusal(429, str(error), "overloaded", None, (("Retry-After", "1"),))
            )
        except EngineDown as error:
            self._refuse(exchange, Refusal(503, str(error), "unavailable"))

    def _route(self, exchange: Exchange) -> "Handler":
        request = exchange.request
        if request.expects_other:
            raise Refusal(417, "only 100-continue can be expected")
        if request.target == "*":
            return self._allowed  # RFC 9110 section 9.3.7: about the server as a whole
        methods = self._routes.get(request.path)
        if methods is None:
            raise Refusal(404, f"there is nothing at {request.path[:100]!r}", "not_found")
        if request.method == "OPTIONS":
            return functools.partial(self._allowed, methods=methods)
        # RFC 9110 section 9.3.2: HEAD is answered like GET, but must start no generation here.
        name = "GET" if request.method == "HEAD" else request.method
        if name not in methods:
            allow = (("Allow", _allow(methods)),)
            raise Refusal(405, f"{request.method} is not for this address", fields=allow)
        self._check_origin(request)
        self._check_key(request)
        if request.method == "HEAD" and request.path in (*GENERATING, "/ws"):
            return self._head
        return methods[name]

    def _check_origin(self, request: http1.Request) -> None:
        """A web page may use this server only if it came from it, or its origin is allowed.

        Browsers name the page's origin with all but plain GETs, and its site with all.
        """
        origin = request.fields.get("origin")
        if origin is None:
            # An image or a link says nothing of its page but that it was another one's.
            site = request.fields.get("sec-fetch-site") or "none"
            elsewhere = site not in ("none", "same-origin") and request.path in GENERATING
            if not elsewhere:
                return
            origin = "null"
        if self._allows(origin):
            return
        # RFC 6454 section 6.2: scheme "://" host [":" port], or the word null.
        if origin.lower() not in (f"{scheme}://{request.host.lower()}" for scheme in SCHEMES):
            raise Refusal(403, "this origin is not allowed here (see --cors)", "forbidden")

    def _allows(self, origin: str) -> bool:
        return "*" in self.options.origins or origin in self.options.origins

    def _check_key(self, request: http1.Request) -> None:
        if not self.options.api_keys or request.path in ("/", "/health"):
            return
        scheme, _, bearer = (request.fields.get("authorization") or "").partition(" ")
        given = bearer if scheme.lower() == "bearer" else request.fields.get("x-api-key") or ""
        # Every key is compared, each in constant time.
        matches = [
            hmac.compare_digest(given.encode(), key.encode()) for key in self.options.api_keys
        ]
        if not any(matches):
            raise Refusal(
                401,
                "a valid API key is needed",
                "authentication_error",
                None,
                (("WWW-Authenticate", "Bearer"),),
            )

    def _refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        if exchange.status is not None:
            raise refusal
        body = error_body(str(refusal), refusal.type, refusal.field)
        exchange.respond(
            refusal.status, body, JSON, [*refusal.fields, *self._cors(exchange.request)]
        )

    def _cors(self, request: http1.Request) -> list[tuple[str, str]]:
        """The fields that let an allowed page on another origin read the answer."""
        origin = request.fields.get("origin")
        if origin is None or not self._allows(origin):
            return []
        return [("Access-Control-Allow-Origin", origin), ("Vary", "Origin")]

    async def _allowed(self, exchange: Exchange, methods: Mapping[str, Any] | None = None) -> None:
        """OPTIONS: what can be done here; and the preflight that a browser asks with it."""
        request = exchange.request
        fields = self._cors(request)
        if "access-control-request-method" in request.fields:
            self._check_origin(request)
            fields.append(("Access-Control-Allow-Methods", "GET, POST, OPTIONS"))
            fields.append(("Access-Control-Max-Age", "600"))
            asked = request.fields.get("access-control-request-headers")
            if asked:
                fields.append(("Access-Control-Allow-Headers", asked))
        if methods is not None:
            fields.append(("Allow", _allow(methods)))
        exchange.respond_empty(204, fields)

    async def _head(self, exchange: Exchange) -> None:
        """HEAD where GET would start something."""
        if exchange.request.path == "/ws":
            websocket.check_request(replace(exchange.request, method="GET"))
        is_stream = exchange.request.path == "/stream"
        exchange.respond_empty(200, STREAM_FIELDS if is_stream else [("Content-Type", JSON)])

    # From a request to its generation.

    async def _ask(self, exchange: Exchange) -> Ask:
        request = exchange.request
        if request.method == "GET":
            return dialects.parse_native(dialects.parse_query(request.query), self._fault_names)
        media_type = (request.fields.get("content-type") or "").partition(";")[0].strip().lower()
        if media_type not in ACCEPTED_TYPES:
            raise Refusal(400, f"send the request as {JSON}")
        content = await exchange.content()
        return dialects.parse_native(dialects.parse_content(content), self._fault_names)

    async def _begin(self, route: str, ask: Ask) -> Entry:
        """Tokenize and submit; whatever can be known to be wrong is raised here."""
        if self.stopping:
            raise EngineDown("the server is shutting down")
        loop = asyncio.get_running_loop()
        try:
            # A long prompt takes long to tokenize: not on the event loop, where everyone waits.
            ids = await loop.run_in_executor(None, self.engine.encode, ask.prompt)
        except ValueError as error:
            field = "prompt" if isinstance(ask.prompt, str) else "messages"
            raise BadRequest(str(error), field) from error
        if isinstance(self.engine, SimulatedEngine):
            generation = self.engine.submit(ids, ask.params, ask.faults)
        else:
            generation = self.engine.submit(ids, ask.params)
        entry = Entry(route, generation)
        self.entries.append(entry)
        return entry

    def _watch(self, exchange: Exchange, entry: Entry) -> None:
        def on_gone(why: str) -> None:
            entry.client_left = True
            entry.generation.cancel(why)

        exchange.watch(on_gone)

    # The three ways of delivery.

    async def _complete(self, exchange: Exchange) -> None:
        """The whole reply as one JSON body."""
        entry = await self._begin(exchange.request.path, await self._ask(exchange))
        with entry.generation as generation:
            self._watch(exchange, entry)
            try:
                text = "".join([piece async for piece in generation])
            except GenerationError as error:
                raise Refusal(500, str(error), "model_error") from error
        if generation.cancel_reason == "shutdown":
            raise Refusal(503, "the server is shutting down", "unavailable")
        body = to_json(dialects.reply_json(generation, text)).encode()
        exchange.respond(200, body, JSON, self._cors(exchange.request))

    async def _stream(self, exchange: Exchange) -> None:
        """Server-sent events, a piece an event."""
        ask = await self._ask(exchange)
        entry = await self._begin("/stream", ask)
        events = dialects.events(ask)
        with entry.generation as generation:
            # The head leaves now, not with the first token: the client knows that it is served.
            exchange.start(200, [*STREAM_FIELDS, *self._cors(exchange.request)], events.heartbeat)
            self._watch(exchange, entry)
            try:
                async for piece in generation:
                    exchange.send(events.piece(piece))
            except GenerationError as error:
                exchange.send(events.error(str(error), "model_error"))
            else:
                if generation.cancel_reason == "shutdown":
                    exchange.send(events.error("the server is shutting down", "unavailable"))
                else:
                    exchange.send(events.end(generation))
        exchange.finish()

    async def _websocket(self, exchange: Exchange) -> None:
        """One request in, pieces out, `{"stop": true}` in at any time."""
        session = Session(exchange)
        await session.accept()
        frames = dialects.Frames()
        try:
            async with exchange.connection.patience(self.options.settings.content_s):
                message = await session.receive()
            if message is None:
                return
            ask = dialects.parse_native(_message_body(message), self._fault_names)
            entry = await self._begin("/ws", ask)
        except TimeoutError:
            await session.close(*((1001, "") if self.stopping else (1008, "no request came")))
            return
        except (BadRequest, QueueFull, EngineDown) as error:
            type, field = _refusal_words(error)
            session.send(frames.error(str(error), type, field))
            await session.close()
            return
        await self._converse(exchange, session, entry, frames)

    async def _converse(
        self, exchange: Exchange, session: Session, entry: Entry, frames: dialects.Frames
    ) -> None:
        """Send pieces and listen at the same time, until the reply or the client ends."""
        with entry.generation as generation:
            self._watch(exchange, entry)
            listening = asyncio.create_task(self._listen(session, entry))
            try:
                async for piece in generation:
                    session.send(frames.piece(piece))
                if generation.cancel_reason == "shutdown":
                    session.send(frames.error("the server is shutting down", "unavailable"))
                else:
                    session.send(frames.end(generation))
            except GenerationError as error:
                session.send(frames.error(str(error), "model_error"))
            finally:
                listening.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await listening
        await session.close(1001 if self.stopping else 1000)

    async def _listen(self, session: Session, entry: Entry) -> None:
        while True:
            try:
                message = await session.receive()
            except ClientGone:
                return
            if message is None:
                # Closed, closing or broken: in each case nobody waits for the rest.
                if not self.options.settings.naive:
                    entry.client_left = True
                    entry.generation.cancel("the client closed the WebSocket")
                return
            with contextlib.suppress(BadRequest):
                if _message_body(message).get("stop") is True:
                    entry.generation.cancel("the client said stop")

    # Everything else.

    async def _log(self, exchange: Exchange) -> None:
        lines = [entry.as_dict() for entry in self.entries]
        exchange.respond(200, to_json({"requests": lines}).encode(), JSON)

    async def _health(self, exchange: Exchange) -> None:
        failure = self.engine.failure
        state = {
            "status": "ok" if failure is None else failure,
            "model": self.options.model,
            "running": self.engine.running,
            "waiting": self.engine.waiting,
        }
        exchange.respond(200 if failure is None else 503, to_json(state).encode(), JSON)

    async def _index(self, exchange: Exchange) -> None:
        host = exchange.request.host
        lines = [f"{' '.join(methods):10} {path}" for path, methods in self._routes.items()]
        example = f'curl -N http://{host}/stream -d \'{{"prompt": "One, two,"}}\''
        exchange.respond(200, "\n".join([*lines, "", example, ""]).encode(), TEXT)


Handler = Callable[[Exchange], Coroutine[Any, Any, None]]


def _allow(methods: Mapping[str, Any]) -> str:
    names = {*methods, "OPTIONS"} | ({"HEAD"} if "GET" in methods else set())
    return ", ".join(sorted(names))


def _message_body(message: str | bytes) -> dict[str, Any]:
    if isinstance(message, bytes):
        raise BadRequest("send the request as a text message")
    return dialects.parse_content(message.encode())


def _refusal_words(error: Exception) -> tuple[str, str | None]:
    if isinstance(error, BadRequest):
        return error.code or "invalid_request_error", error.field
    return "overloaded" if isinstance(error, QueueFull) else "unavailable", None


# --- The command -------------------------------------------------------------------------------


_LIMITS, _SETTINGS = http1.Limits(), Settings()

# name, default (its type is the flag's), help
FLAGS: tuple[tuple[str, Any, str], ...] = (
    ("--host", "127.0.0.1", "the address to serve on"),
    ("--port", 8765, "0 takes a free one and prints it"),
    ("--model", "default", "a folder, a .gguf file, a hub id, or 'simulated'"),
    ("--device", "auto", "cuda, mps or cpu"),
    ("--dtype", "auto", "float32, bfloat16 or float16"),
    ("--rows", 16, "replies that are generated at the same time"),
    ("--context", 2048, "tokens of prompt and reply together"),
    ("--prefill-chunk", 128, "tokens of a prompt between two steps of the others"),
    ("--queue", 64, "requests that may wait; then 429"),
    ("--heartbeat", _SETTINGS.heartbeat_s, "seconds of silence before one"),
    ("--stall", _SETTINGS.stall_s, "seconds without progress before a client is dropped"),
    ("--queued-bytes", _SETTINGS.queued_bytes, "bytes that may wait for one client"),
    ("--head-time", _SETTINGS.head_s, "seconds for a request's head to arrive"),
    ("--content-time", _SETTINGS.content_s, "seconds for its content to arrive"),
    ("--idle-time", _SETTINGS.idle_s, "seconds between two requests of a connection"),
    ("--target-bytes", _LIMITS.target_bytes, "the longest request target (414)"),
    ("--head-bytes", _LIMITS.head_bytes, "the longest head (431)"),
    ("--content-bytes", _LIMITS.content_bytes, "the longest content (413)"),
    ("--connections", 1000, "at the same time; then 503"),
    ("--cert", "", "a PEM file: serve https and wss"),
    ("--key", "", "the certificate's private key, when in a file of its own"),
    ("--seed", 42, "simulated: of the schedule"),
    ("--delay-ms", 33.0, "simulated: between two words"),
    ("--jitter-ms", 8.0, "simulated: more or less"),
    ("--first-delay-ms", 0.0, "simulated: before the first word"),
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="A streaming server for a language model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default, text in FLAGS:
        parser.add_argument(name, type=type(default), default=default, help=text)
    parser.add_argument("--naive", action="store_true", help="do not notice that a client left")
    for name, metavar in (("--cors", "ORIGIN"), ("--api-key", "KEY")):
        text = "may be repeated" + ("; * for any" if name == "--cors" else "")
        parser.add_argument(name, action="append", default=[], metavar=metavar, help=text)
    return parser.parse_args(arguments)


def make_options(args: argparse.Namespace) -> Options:
    """Sort the flags into the options of `Server`."""
    limits = http1.Limits(
        target_bytes=args.target_bytes,
        head_bytes=args.head_bytes,
        content_bytes=args.content_bytes,
    )
    settings = Settings(
        head_s=args.head_time,
        content_s=args.content_time,
        idle_s=args.idle_time,
        stall_s=args.stall,
        heartbeat_s=args.heartbeat,
        queued_bytes=args.queued_bytes,
        naive=args.naive,
        limits=limits,
    )
    return Options(args.model, tuple(args.cors), tuple(args.api_key), settings, args.connections)


def make_engine(args: argparse.Namespace) -> AnyEngine:
    """Load the model, or set up the stand-in."""
    if args.model == "simulated":
        return SimulatedEngine(
            args.seed,
            delay_ms=args.delay_ms,
            jitter_ms=args.jitter_ms,
            first_delay_ms=args.first_delay_ms,
        )
    import lm  # torch and transformers take a second to import; the simulated model has no need

    model = lm.LanguageModel.load(
        args.model, device=args.device, dtype=args.dtype, rows=args.rows, context=args.context
    )
    row_mib = model.context * model.bytes_per_token / 2**20
    print(
        f"{model.name}: {model.dtype} on {model.device}; {model.rows} rows of {model.context}"
        f" tokens, {model.bytes_per_token:,} bytes a token, {row_mib:.0f} MiB a row",
        file=sys.stderr,
    )
    return Engine(model, prefill_chunk=args.prefill_chunk, max_waiting=args.queue)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    if os.name == "posix":  # elsewhere the option lets two servers share a port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


async def run(server: Server, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
    """Serve until a signal comes; a second one ends the process at once."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, on_signal)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(on_signal))
    await server.serve(listener, tls)
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    print(f"http{'s' if tls else ''}://{host}:{port}", flush=True)
    await stop.wait()
    await server.stop()


def main() -> int:
    """Bind first, so that a port in use is known before the model is loaded."""
    args = parse_arguments()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    try:
        tls = None
        if args.cert:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(args.cert, args.key or None)
        listener = bind(args.host, args.port)
    except (OSError, OverflowError) as error:
        print(f"cannot serve on {args.host}:{args.port}: {error}", file=sys.stderr)
        return 1
    try:
        engine = make_engine(args)
    except Exception as error:
        if type(error).__name__ != "ModelError":
            raise
        print(error, file=sys.stderr)
        return 1
    # A forward pass holds the interpreter for long stretches; the event loop should not have to
    # wait 5 ms, Python's default, to be let in between.
    sys.setswitchinterval(0.0005)
    try:
        asyncio.run(run(Server(engine, make_options(args)), listener, tls))
    except OSError as error:  # another server listens: it bound the same port while we loaded
        print(f"cannot serve on {args.host}:{args.port}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # while the model loads; after that a signal has its handler
        sys.exit(130)
