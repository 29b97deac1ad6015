"""A reply over a WebSocket: one request in, pieces out, and the client is heard all the while.

    client --- {"prompt": ...} ------> parsed as on `/stream`, or refused in a message
           <-- {"text": "Two"} ...     the same telling, in frames
           --- {"stop": true} ------>  at any time, also before the first piece
           <-- {"done": true, ...}     then the closing handshake

Not here: frames and messages (`websocket.py`), pings and closing (`duplex.py`).
Read next: `options.py`, what the flags say of all this.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import asks
from asks import Ask
from connection import Exchange
from delivery import Delivery
from dialects import SocketMessages
from duplex import Duplex
from generation import BadRequest, NotTaken
from telling import Entry, to_the_end
from watching import ClientGone

# The longest message where HTTP's content has no limit.
MESSAGE_BYTES = 16 * 1024 * 1024


class Conversing:
    """The handler of `/ws`."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    async def converse(self, exchange: Exchange) -> None:
        """`GET /ws`: one request in, pieces out, `{"stop": true}` in at any time."""
        limits = exchange.connection.settings.limits
        duplex = Duplex(exchange, limits.content_bytes or MESSAGE_BYTES)
        await duplex.accept()
        try:
            ask = await self._ask(exchange, duplex)
            if ask is None:
                return
            entry = await self._delivery.submit("/ws", ask)
        except TimeoutError:
            away = (1001, "") if self._delivery.stopping else (1008, "no request came")
            await duplex.close(*away)
            return
        except NotTaken as error:
            duplex.send(SocketMessages().refusal(str(error), error.type, error.field))
            await duplex.close()
            return
        await self._reply(exchange, duplex, entry, ask)

    async def _ask(self, exchange: Exchange, duplex: Duplex) -> Ask | None:
        """What the first message asks for; None when none comes, TimeoutError when not in time."""
        async with exchange.connection.patience(self._delivery.policy.request_s):
            message = await duplex.receive()
        if message is None:
            return None
        ask = self._delivery.streamed.parse(_body(message))
        if ask.resume:
            raise BadRequest("resume is for /stream", "resume")
        if ask.events != "plain":
            raise BadRequest("events is for event streams", "events")
        return ask

    async def _reply(self, exchange: Exchange, duplex: Duplex, entry: Entry, ask: Ask) -> None:
        """Send pieces and listen at the same time, until the reply or the client ends."""
        delivery = self._delivery
        with entry.generation as generation:
            delivery.watch(exchange, entry)
            listening = asyncio.create_task(self._listen(duplex, entry))
            try:
                outlet = delivery.outlet(exchange, duplex, generation, ask.simulation)
                telling = delivery.tell(entry, ask, SocketMessages(), outlet)
                whole = await to_the_end(exchange, outlet, telling)
            finally:
                listening.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await listening
        if whole:
            await duplex.close(1001 if delivery.stopping else 1000)

    async def _listen(self, duplex: Duplex, entry: Entry) -> None:
        while True:
            try:
                message = await duplex.receive()
            except ClientGone:
                return  # the watch on the exchange knows
            if message is None:
                # Closed, closing or broken: in each case nobody waits for the rest.
                duplex.exchange.said_goodbye("the client closed the WebSocket")
                return
            with contextlib.suppress(BadRequest):
                if _body(message).get("stop") is True:
                    entry.generation.cancel("the client said stop")


def _body(message: str | bytes) -> Mapping[str, Any]:
    if isinstance(message, bytes):
        raise BadRequest("send the request as a text message")
    return asks.parse_content(message.encode())
