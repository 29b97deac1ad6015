"""The client role of Autobahn|Testsuite, played with the project's own WebSocket client.

usage: conformance_client.py ws://HOST:PORT AGENT

Asks the fuzzing server how many cases there are, echoes every message of each until the server
closes, then has the report on AGENT written.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import http1
import websocket

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
READ_BYTES = 64 * 1024

# How long a server may take to close the TCP connection that it should close first.
LINGER_S = 5


class Client:
    """A client's end of an open WebSocket over an asyncio stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._connection = websocket.Connection(
            websocket.Side.CLIENT, max_message_bytes=MAX_MESSAGE_BYTES
        )

    async def open(self, host: str, target: str) -> None:
        """Play the opening handshake."""
        key = websocket.new_key()
        fields = [("Host", host), *websocket.request_fields(key)]
        self._writer.write(http1.encode_request("GET", target, fields))
        parser = http1.ResponseParser()
        parser.expect("GET")
        while (response := parser.next_event()) is None:
            if data := await self._reader.read(READ_BYTES):
                parser.feed(data)
            else:
                parser.feed_eof()
        assert isinstance(response, http1.Response)
        websocket.check_response(response, key)
        self._connection.feed(parser.take_unread())

    async def messages(self) -> AsyncIterator[str | bytes]:
        """Yield the data of each message until either side closes, and answer everything else."""
        while True:
            try:
                for event in iter(self._connection.next_event, None):
                    match event:
                        case websocket.Message(data):
                            yield data
                        case websocket.Ping(payload):
                            self._writer.write(self._connection.pong(payload))
                        case websocket.Close(code):
                            self._writer.write(self._connection.close(code))
            except websocket.ProtocolError as error:
                self._writer.write(self._connection.close(error.close_code, str(error)))
            if self._connection.state is websocket.State.CLOSED:
                return
            await self._writer.drain()
            data = await self._reader.read(READ_BYTES)
            if not data:
                return
            self._connection.feed(data)

    async def send(self, data: str | bytes) -> None:
        """Write one message, once the server has taken what came before."""
        self._writer.write(self._connection.message(data))
        await self._writer.drain()

    async def wait_closed(self) -> None:
        """Let the server close the TCP connection first (RFC 6455 section 7.1.1), then close."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(LINGER_S):
                while await self._reader.read(READ_BYTES):
                    pass
        self._writer.close()


@contextlib.asynccontextmanager
async def connect(url: str, target: str) -> AsyncIterator[Client]:
    """Open a WebSocket to `target` on the server of `url`, and close it at the end."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    client = Client(reader, writer)
    try:
        await client.open(parts.netloc, target)
        yield client
    finally:
        await client.wait_closed()


async def case_count(url: str) -> int:
    async with connect(url, "/getCaseCount") as client:
        [count] = [data async for data in client.messages()]
        return int(count)


async def run_case(url: str, case: int, agent: str) -> None:
    with contextlib.suppress(ConnectionError):  # several cases end with a cut
        async with connect(url, f"/runCase?case={case}&agent={agent}") as client:
            async for data in client.messages():
                await client.send(data)


async def main(url: str, agent: str) -> None:
    agent = quote(agent, safe="")
    for case in range(1, await case_count(url) + 1):
        await run_case(url, case, agent)
    async with connect(url, f"/updateReports?agent={agent}") as client:
        async for _ in client.messages():
            pass


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
