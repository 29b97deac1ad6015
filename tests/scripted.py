"""A server that follows a script: it reads a request, then writes known bytes in known pieces."""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import http1

Step = bytes | asyncio.Event | Callable[["Peer"], Awaitable[None]]


class Peer:
    """The server's end of one connection, and what went through it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.request_bytes = b""
        self.written = 0
        self.requests: list[tuple[http1.Request, bytes]] = []
        self.ended: asyncio.Future[bytes | OSError] = asyncio.get_running_loop().create_future()

    async def read_request(self) -> bool:
        """Read one request; False at end-of-file."""
        parser = http1.RequestParser()
        head, content = None, b""
        while True:
            match parser.next_event():
                case http1.Request() as head:
                    pass
                case http1.Content(data):
                    content += data
                case http1.End():
                    self.requests.append((head, content))
                    return True
                case None:
                    data = await self.reader.read(65536)
                    if not data:
                        return False
                    self.request_bytes += data
                    parser.feed(data)

    async def write(self, data: bytes) -> None:
        self.written += len(data)
        self.writer.write(data)
        await self.writer.drain()

    async def play(self, script: Sequence[Step]) -> None:
        for step in script:
            if isinstance(step, bytes):
                await self.write(step)
            elif isinstance(step, asyncio.Event):
                await step.wait()
            else:
                await step(self)


async def reset(peer: Peer) -> None:
    """Step: drop the connection with RST, which a linger time of zero asks for."""
    linger = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
    peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    peer.writer.transport.abort()


async def until_client_ends(peer: Peer) -> None:
    """Step: read what the client still says and note how it ended."""
    try:
        peer.ended.set_result(await peer.reader.read())
    except OSError as error:
        peer.ended.set_result(error)


async def until(condition: Callable[[], object]) -> None:
    """Let everything else run until the condition holds."""
    while not condition():  # what is waited for knows no asyncio.Event
        await asyncio.sleep(0)


class Server:
    """Where it listens, and its connections in order."""

    def __init__(self) -> None:
        self.address = ""
        self.peers: list[Peer] = []

    @property
    def peer(self) -> Peer:
        (peer,) = self.peers
        return peer

    def url(self, path: str = "/stream", scheme: str = "http") -> str:
        return f"{scheme}://{self.address}{path}"


@contextlib.asynccontextmanager
async def scripted(*scripts: Sequence[Step], **listen: object) -> AsyncIterator[Server]:
    """Serve a script for each request, on any number of connections; close after the last."""
    server, remaining, tasks = Server(), list(scripts), set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        peer = Peer(reader, writer)
        server.peers.append(peer)
        try:
            while remaining and await peer.read_request():
                await peer.play(remaining.pop(0))
        except OSError:
            pass  # the client has left
        finally:
            writer.close()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0, **listen)
    host, port = listener.sockets[0].getsockname()
    server.address = f"{host}:{port}"
    try:
        yield server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
