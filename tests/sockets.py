"""A WebSocket client for tests, over a `serving.Peer`: what it sends can also be wrong."""

import asyncio
import json
from typing import Any

from serving import Peer

import websocket

OPENING = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec_WebSocket_Version": "13",
    "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
MASK = b"\1\2\3\4"


async def open_websocket(peer: Peer, **fields: str) -> "WebClient":
    """Play the opening handshake."""
    peer.request("GET", "/ws", **OPENING, **fields)
    head, _ = await peer.head()
    assert head.status == 101, head
    return WebClient(peer)


class WebClient:
    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.connection = websocket.Connection(websocket.Side.CLIENT)
        self.connection.feed(peer.parser.take_unread())

    def say(self, message: Any) -> None:
        """Send JSON as a text message."""
        self.peer.send(self.connection.message(json.dumps(message)))

    def frame(self, opcode: int, payload: bytes, fin: bool = True) -> None:
        """Send a frame, whatever the rules say about it."""
        self.peer.send(websocket.encode_frame(opcode, payload, fin=fin, mask=MASK))

    async def event(self) -> Any:
        """The next message or control frame; None at the end of the connection."""
        async with asyncio.timeout(10):
            while (event := self.connection.next_event()) is None:
                try:
                    data = await self.peer.reader.read(65536)
                except ConnectionError:
                    return None
                if not data:
                    return None
                self.connection.feed(data)
            return event

    async def told(self) -> Any:
        """The next message, which must be JSON in text."""
        event = await self.event()
        assert isinstance(event, websocket.Message), event
        assert isinstance(event.data, str)
        return json.loads(event.data)

    async def reply(self) -> tuple[str, dict[str, Any]]:
        """The joined text, and the message that ended it."""
        text = ""
        while True:
            message = await self.told()
            if set(message) != {"text"}:
                return text, message
            text += message["text"]

    async def closed(self) -> int | None:
        """Wait for the server's Close, skipping messages; answer it; the code, None for a cut."""
        while (event := await self.event()) is not None:
            if isinstance(event, websocket.Close):
                if self.connection.state is not websocket.State.CLOSED:
                    self.peer.send(self.connection.close(event.code))
                assert await self.event() is None  # RFC 6455 section 7.1.1: the server closes first
                self.peer.close()
                return event.code
        return None
