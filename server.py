"""The streaming server: from a connection to a handler, starting and stopping, and the command.

    python server.py                      the default model on http://127.0.0.1:8765
    python server.py --model simulated    words on a schedule, nothing to install
    python server.py --upstream URL       in front of any OpenAI-compatible server, the same

A request comes from `connection.py` as an exchange; here it is looked up in the routes, and given
to its handler or refused.

Shutdown has three steps: accept no more; cancel every generation, so that each stream tells its
client the reason and ends properly; after `GOODBYE_S`, drop what is left.

Not here: what is at which address (`routes.py`), what the flags say (`options.py`).
Read next: `page.py`, which serves the reader's side of it.
"""

import argparse
import asyncio
import contextlib
import errno
import functools
import gc
import logging
import os
import signal
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import http1
import websocket
from about import About
from access import GENERATING, Refusal, allow
from connection import Connection, Exchange, Handler
from delivery import JSON, STREAM_FIELDS, Delivery
from dialects import to_json
from engine import AnyEngine, Engine
from generation import SHUTDOWN, NotTaken
from metrics import Metrics
from options import Options, make_engine, make_options, make_tls, parse_arguments
from routes import Routes
from telling import Entry
from watching import ClientGone, WatchedReader
from weights import ModelError

log = logging.getLogger("server")

# Connections that the kernel accepts for us while we are busy.
BACKLOG = 1024
# Connections beyond `--connections` that are told so at the same time; more are just dropped.
TURNED_AWAY = 100
# Files that are no connection: the model's, threads' and the event loop's own, outbound ones.
OTHER_FILES = 100
# How long streams may take to say goodbye at shutdown.
GOODBYE_S = 5.0


class Server:
    """Routes over one engine. `serve` a bound socket, then `stop`."""

    def __init__(self, engine: AnyEngine, options: Options) -> None:
        self.engine = engine
        self.options = options
        counted = Metrics()
        self.delivery = Delivery(engine, options.access, options.policy, counted)
        self._connections: set[Connection] = set()  # those that are served
        self._tasks: dict[asyncio.Task[None], Connection] = {}
        self._listener: asyncio.Server | None = None
        served = options.served(engine)
        about = About(self.delivery, options, served, counted, self._connections)
        self.routes = Routes(self.delivery, about, served, options)

    @property
    def entries(self) -> deque[Entry]:
        """The log: the newest replies, oldest first."""
        return self.delivery.entries

    # Starting and stopping.

    async def serve(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Start the engine and accept connections on a bound socket. Raises OSError."""
        # Another server may have bound the port as well, and listen since: known before we start.
        listener.listen(BACKLOG)
        self.engine.start()
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            return asyncio.StreamReaderProtocol(WatchedReader(loop=loop), self._accept, loop=loop)

        handshake_s = self.options.settings.head_s if tls else None
        self._listener = await loop.create_server(
            protocol, sock=listener, ssl=tls, ssl_handshake_timeout=handshake_s, backlog=BACKLOG
        )

    async def stop(self, goodbye_s: float = GOODBYE_S) -> None:
        """Accept no more, let every stream tell its end, then drop what is left."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + goodbye_s
        self.delivery.stopping = True
        if self._listener is not None:
            self._listener.close()  # not wait_closed: from 3.12 on it waits for every connection
        self.engine.cancel_all(SHUTDOWN)
        if self.delivery.stand_in is not None:
            self.delivery.stand_in.close()
        for connection in list(self._tasks.values()):
            connection.shut_down()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=goodbye_s)
        for connection in list(self._tasks.values()):
            connection.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)  # for them to see it
        # The thread finishes its step; a second signal is still heard meanwhile.
        self.engine.close(0)
        while not self.engine.closed and loop.time() < deadline:  # noqa: ASYNC110 (a thread)
            await asyncio.sleep(0.01)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert isinstance(reader, WatchedReader)
        connection = Connection(reader, writer, self.handle, self.options.settings)
        full = len(self._connections) >= self.options.max_connections
        if len(self._tasks) >= self.options.max_connections + TURNED_AWAY:
            writer.transport.abort()  # each that is told takes a file and two seconds
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = connection
        try:
            if full or self.delivery.stopping:
                await connection.turn_away()
            else:
                self._connections.add(connection)
                await connection.run()
        finally:
            self._connections.discard(connection)
            del self._tasks[task]

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
        except NotTaken as error:
            words = str(error), error.type, error.field, error.fields
            self._refuse(exchange, Refusal(error.status, *words))
        except ClientGone:
            raise
        except Exception:
            if exchange.status is not None:
                raise  # too late for words: the connection is cut
            # In the dialect's words; the last resort, should this fail too, is `Connection._fail`.
            log.exception("a handler failed")
            exchange.keep_alive = False
            self._refuse(exchange, Refusal(500, "internal error", "server_error"))

    def _route(self, exchange: Exchange) -> Handler:
        request = exchange.request
        if request.expects_other:
            raise Refusal(417, "only 100-continue can be expected")
        if request.target == "*":
            return self._allowed  # RFC 9110 section 9.3.7: about the server as a whole
        methods = self.routes.at(request.path)
        # A preflight is answered everywhere: without it a page could not even read the 404.
        preflight = "access-control-request-method" in request.fields
        if request.method == "OPTIONS" and (methods or preflight):
            return functools.partial(self._allowed, methods=methods)
        if methods is None:
            raise Refusal(404, f"there is nothing at {request.path[:100]!r}", "not_found")
        # RFC 9110 section 9.3.2: HEAD is answered like GET.
        name = "GET" if request.method == "HEAD" else request.method
        if name not in methods:
            allowed = (("Allow", allow(methods)),)
            raise Refusal(405, f"{request.method} is not for this address", fields=allowed)
        self.options.access.check_origin(request)
        if request.path not in ("/", "/health"):
            self.options.access.check_key(request)
        if request.method == "HEAD" and request.path in (*GENERATING, "/ws"):
            return self._head
        return methods[name]

    def _refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        if exchange.status is not None:
            raise refusal
        dialect = self.routes.dialect(exchange.request)
        error = dialect.refusal(refusal.status, str(refusal), refusal.type, refusal.field)
        body = to_json(error).encode()
        fields = [*refusal.fields, *self.options.access.fields(exchange.request)]
        exchange.respond(refusal.status, body, JSON, fields)

    async def _allowed(self, exchange: Exchange, methods: Mapping[str, Any] | None = None) -> None:
        """OPTIONS: what can be done here; and the preflight that a browser asks with it."""
        fields = self.options.access.preflight_fields(exchange.request, methods)
        exchange.respond_empty(204, fields)

    async def _head(self, exchange: Exchange) -> None:
        """HEAD where GET would start something."""
        if exchange.request.path == "/ws":
            websocket.check_request(replace(exchange.request, method="GET"))
        is_stream = exchange.request.path == "/stream"
        fields = STREAM_FIELDS if is_stream else [("Content-Type", JSON)]
        exchange.respond_empty(200, [*fields, *self.options.access.fields(exchange.request)])


# --- The command -------------------------------------------------------------------------------


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises OSError."""
    if port > 65535:  # getaddrinfo would take it modulo 65536
        raise OSError(f"there is no port {port}")
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


def allow_connections(connections: int) -> int:
    """Raise the limit of open files to what so many connections need; how many it allows.

    At the limit `accept` would fail, over and over, until somebody leaves.
    """
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + TURNED_AWAY + OTHER_FILES
    if soft == resource.RLIM_INFINITY:
        return connections
    if needed > soft:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):  # some systems have a lower bound still
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return max(1, min(connections, soft - TURNED_AWAY - OTHER_FILES))


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


def within_open_files(options: Options) -> Options:
    """The same with fewer connections, and a word about it, where the system allows no more."""
    asked = options.max_connections
    allowed = allow_connections(asked)
    if allowed < asked:
        text = f"--connections {asked}: open files are limited, to {allowed} here"
        print(text, file=sys.stderr)
    return replace(options, max_connections=allowed)


def spare_the_loop() -> None:
    """Set up the interpreter so that the event loop seldom waits for it; after all is loaded."""
    # PyTorch leaves the interpreter to others while it computes. What the generation thread
    # does in Python, the event loop should not have to wait for 5 ms long, Python's default.
    sys.setswitchinterval(0.0005)
    # Each open stream is some hundred objects that live long, and are looked through whenever
    # so many new ones have been made: with thousands of streams every 700 is too often.
    gc.set_threshold(10_000, 20, 20)
    # What was imported and loaded stays. With PyTorch it is 400,000 objects, and every look
    # through all of them would stop the event loop for a fifth of a second.
    gc.collect()
    gc.freeze()


def main(
    make_engine: Callable[[argparse.Namespace], AnyEngine] = make_engine,
    make_server: Callable[[AnyEngine, Options], Server] = Server,
) -> int:
    """Bind first, so that a port in use is known before the model is loaded.

    What is made by the parameters can be something around the usual one (`dated.py`).
    """
    args = parse_arguments()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    try:
        options, tls = make_options(args), make_tls(args)
    except OSError as error:  # it names the flag
        print(error, file=sys.stderr)
        return 1
    try:
        listener = bind(args.host, args.port)
    except OSError as error:
        hint = " (--port 0 takes a free one)" if error.errno == errno.EADDRINUSE else ""
        print(f"cannot serve on {args.host}:{args.port}: {error}{hint}", file=sys.stderr)
        return 1
    options = within_open_files(options)
    with listener:
        if options.proxy:
            options = options.bound(args.host, listener.getsockname()[1], tls is not None)
        try:
            engine = make_engine(args)
        except ModelError as error:
            print(error, file=sys.stderr)
            return 1
        if isinstance(engine, Engine):
            options = replace(options, model=engine.model.name)
        spare_the_loop()
        try:
            asyncio.run(run(make_server(engine, options), listener, tls))
        except OSError as error:
            print(f"cannot serve on {args.host}:{args.port}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # while the model loads; after that a signal has its handler
        sys.exit(130)
