"""Start the server in the test's own event loop, and speak to it byte by byte."""

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

from fakes import FakeModel

import http1
import server
from access import Access
from engine import Engine
from options import Options
from simulated import SimulatedEngine
from watching import Settings

HOST = ("Host", "test")
# Only a test that hangs waits for so long; a busy machine needs seconds for one step of a model.
PATIENCE_S = 60


@asynccontextmanager
async def serving(
    engine: Any = None,
    *,
    settings: Settings | None = None,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> AsyncIterator["Running"]:
    """A server on a free port; the engine is a fast simulated one unless given."""
    engine = engine or SimulatedEngine(delay_ms=1, jitter_ms=0)
    parts = {name: options.pop(name) for name in ("origins", "api_keys") if name in options}
    chosen = Options(access=Access(**parts), settings=settings or Settings(), **options)
    running = Running(server.Server(engine, chosen), server.bind("127.0.0.1", 0))
    await running.server.serve(running.listener, tls)
    try:
        yield running
    finally:
        if isinstance(engine, Engine) and isinstance(engine.model, FakeModel) and engine.model.step:
            engine.model.step.release(100_000)
        await running.server.stop(goodbye_s=1)


class Running:
    def __init__(self, app: server.Server, listener: socket.socket) -> None:
        self.server = app
        self.listener = listener
        self.port: int = listener.getsockname()[1]

    def connect(
        self, receive_buffer: int | None = None, port: int | None = None
    ) -> AbstractAsyncContextManager["Peer"]:
        return connected(port or self.port, receive_buffer)

    async def ask(self, method: str, target: str, body: Any = None, **fields: str) -> "Answer":
        """One request on a connection of its own."""
        async with self.connect() as peer:
            return await peer.ask(method, target, body, **fields)


@asynccontextmanager
async def connected(port: int, receive_buffer: int | None = None) -> AsyncIterator["Peer"]:
    """A client's connection to a port of this machine."""
    peer = socket.socket()
    if receive_buffer is not None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    peer.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", port))
    except OSError:
        peer.close()
        raise
    # A small limit: a test that does not read shall not read ahead either.
    reader, writer = await asyncio.open_connection(sock=peer, limit=4096)
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()


class Answer:
    def __init__(self, head: http1.Response, content: bytes, interim: list[int]) -> None:
        self.head = head
        self.status = head.status
        self.fields = head.fields
        self.content = content
        self.interim = interim

    def json(self) -> Any:
        return json.loads(self.content)

    def events(self) -> list[str]:
        """The data of each event of a stream."""
        blocks = self.content.decode().split("\n\n")
        return [b.partition("data: ")[2] for b in blocks if "data: " in b]

    def text(self) -> str:
        told = [json.loads(e) for e in self.events() if e != "[DONE]"]
        return "".join(event.get("text", "") for event in told)


def error_of(answer: Answer) -> dict[str, Any]:
    """The error of a refusal, after checking its form."""
    assert answer.fields.get("content-type") == "application/json"
    assert "x-accel-buffering" not in answer.fields
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "field"}
    assert error["message"]
    return error


class Peer:
    """A client that sends what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.parser = http1.ResponseParser()
        self.content = b""

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def request(self, method: str, target: str, body: Any = None, **fields: str) -> None:
        content = b"" if body is None else body if isinstance(body, bytes) else _json(body)
        self.parser.expect(method)
        pairs = [HOST, *((name.replace("_", "-"), value) for name, value in fields.items())]
        self.send(http1.encode_request(method, target, pairs, content))

    async def ask(self, method: str, target: str, body: Any = None, **fields: str) -> Answer:
        self.request(method, target, body, **fields)
        return await self.answer()

    async def answer(self) -> Answer:
        """Read one whole answer."""
        head, interim = await self.head()
        while not isinstance(event := await self.event(), http1.End):
            assert isinstance(event, http1.Content)
        content, self.content = self.content, b""
        return Answer(head, content, interim)

    async def head(self) -> tuple[http1.Response, list[int]]:
        interim: list[int] = []
        while True:
            event = await self.event()
            assert isinstance(event, http1.Response), event
            if not event.interim or event.status == 101:
                return event, interim
            interim.append(event.status)

    async def event(self) -> Any:
        """The next thing the server says; content is also kept in `content`."""
        async with asyncio.timeout(PATIENCE_S):
            while (event := self.parser.next_event()) is None:
                data = await self.reader.read(65536)
                if data:
                    self.parser.feed(data)
                else:
                    self.parser.feed_eof()
                    if self.parser.idle:
                        return None
        if isinstance(event, http1.Content):
            self.content += event.data
        return event

    async def until(self, mark: bytes) -> None:
        """Read the content until it holds this."""
        while mark not in self.content:
            assert await self.event() is not None

    async def closed(self) -> bytes:
        """Read to the end of the connection; what still came."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    def half_close(self) -> None:
        self.writer.write_eof()

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        peer = self.writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()


def quick(**deadlines: float) -> Settings:
    """Settings with deadlines that a test can wait for."""
    return replace(Settings(), **deadlines)


async def eventually(condition: Any, patience_s: float = 5) -> None:
    """Wait until `condition()` holds."""
    async with asyncio.timeout(patience_s):
        while not condition():
            await asyncio.sleep(0.002)
