"""A WebSocket after its opening handshake, on the server's side: reading, pings, closing.

`websocket.py` knows frames and messages; this file moves them over an exchange that was upgraded
(`connection.py`), answers pings and closes, and runs the closing handshake against the clock.

RFC 6455 sections 5.5.1 to 5.5.3 (Close, Ping, Pong), 7.1 (closing), 7.4 (codes).
Read next: `access.py`.
"""

import asyncio
import contextlib

import websocket
from connection import Exchange
from watching import ClientGone

# For the peer to answer our Close with its own, before the connection is dropped. With the time to
# linger after that (`Settings.linger_s`) it has to fit in the time of a shutdown (`GOODBYE_S`).
CLOSE_S = 2.5


class Duplex:
    """Messages in and out. One task may read while others send."""

    def __init__(self, exchange: Exchange, max_message_bytes: int = 1024 * 1024) -> None:
        self.exchange = exchange
        self._ended = False  # the peer said Close, broke a rule, or is gone
        self._peer = websocket.Connection(
            websocket.Side.SERVER, max_message_bytes=max_message_bytes
        )

    async def accept(self) -> None:
        """Answer the opening handshake. Raises `http1.ProtocolError` when it is none."""
        request = self.exchange.request
        websocket.check_request(request)
        await self.exchange.content()  # none, but the parser has to be told
        self.exchange.heartbeat = self._peer.ping(b"")
        self._peer.feed(self.exchange.upgrade(websocket.response_fields(request)))

    def send(self, data: str | bytes) -> None:
        """Send one message; nothing is sent once either side has begun to close."""
        self.write(self.frame(data))

    @staticmethod
    def frame(data: str | bytes) -> bytes:
        """How a message goes on the wire: a server's frames have no mask."""
        if isinstance(data, str):
            return websocket.encode_frame(websocket.TEXT, data.encode())
        return websocket.encode_frame(websocket.BINARY, data)

    @property
    def open(self) -> bool:
        """Whether neither side has begun to close."""
        return self._peer.state is websocket.State.OPEN

    def write(self, frame: bytes) -> None:
        """Send a message's frame; nothing is sent once either side has begun to close."""
        if self.open:
            self.exchange.write(frame)

    async def receive(self) -> str | bytes | None:
        """The next message; None when there will be none. Pings and closes are answered here.

        Bytes that break the protocol are answered with a Close that names the fault.
        """
        while not self._ended:
            try:
                event = self._peer.next_event()
            except websocket.ProtocolError as error:
                # RFC 6455 section 7.1.7: what follows is not looked at, not even a Close.
                self._send_close(error.close_code, str(error))
                self._ended = True
                break
            match event:
                case None:
                    self._ended = not await self._read()
                case websocket.Message(data):
                    return data
                case websocket.Ping(payload):
                    self.exchange.write(self._peer.pong(payload))
                case websocket.Close(code):
                    # RFC 6455 section 5.5.1: the code is typically echoed.
                    self._send_close(code, "")
                    self._ended = True
        return None

    async def _read(self) -> bool:
        data = await self.exchange.connection.read()
        self.exchange.heard()
        self._peer.feed(data)
        return bool(data)

    def _send_close(self, code: int, reason: str) -> None:
        if close := self._peer.close(code, reason):  # empty when one was sent before
            with contextlib.suppress(ClientGone):
                self.exchange.write(close)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Run the closing handshake: our Close, what the peer still sends, its Close."""
        self._send_close(code, reason)
        with contextlib.suppress(TimeoutError, ClientGone):
            async with asyncio.timeout(CLOSE_S):
                while await self.receive() is not None:
                    pass
