"""Where the telling of a reply goes: a client that keeps up or does not, with faults or without.

    tell --- put(frame(event)) ---> Outlet --- write ---> the socket, in this turn of the loop
         <-- False ---------           the client is behind, or a fault takes its time:
         --- await ready() ->          until more may follow

A put writes in the turn of the loop in which the engine hands the piece over. Only when it answers
False does a task have to wait, and only then are pieces kept in the `Generation`.

Faults on the wire are for clients that have to be tested: `simulated.py` lists them.

Read next: `replay.py`, whose outlet remembers.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from connection import Exchange
from generation import Generation

# Neither a chunk size, nor an event, nor a frame that a server may send, nor UTF-8.
GARBAGE = b"\xff\xfe\x00garbage\r\n\r\n"
# Between two parts of a split write, so that they are read as two.
SPLIT_S = 0.001


class Outlet(Protocol):
    """What `telling.tell` writes to."""

    @property
    def frame(self) -> Callable[[Any], bytes]:
        """What makes of an event or a message the bytes that `put` takes."""

    def put(self, data: bytes) -> bool:
        """Write what was framed; False when `ready` is to be awaited before the next.

        What is part of a volley is not counted yet: False then comes with the next one.
        """

    async def ready(self) -> None:
        """Wait until more may follow."""


class Sender(Protocol):
    """An `Exchange` that streams, or a WebSocket's `Duplex`."""

    @property
    def frame(self) -> Callable[[Any], bytes]:
        """How an event or a message goes on the wire: the same function for all of a kind."""

    @property
    def open(self) -> bool:
        """Whether more may be written: not to a WebSocket that is closing."""

    def write(self, data: bytes) -> None:
        """Write what was framed; nothing when it is not open."""


class ToClient:
    """Writes to one client.

    While it is behind by more than the transport's high-water mark, `slow_client` says what to do
    (see `delivery.Policy`). `generation` is what a pause stops; None where what is told is kept
    anyway: then the client is just waited for.
    """

    __slots__ = ("_buffers", "_exchange", "_generation", "_sender", "_slow_client", "frame")

    def __init__(
        self,
        exchange: Exchange,
        sender: Sender,
        slow_client: str,
        generation: Generation | None,
    ) -> None:
        self._exchange = exchange
        self._sender = sender
        self.frame = sender.frame
        self._slow_client = slow_client
        self._generation = generation
        self._buffers = generation is not None and slow_client == "buffer"

    def put(self, data: bytes) -> bool:
        """Write; False to a client that is behind, unless its bytes may pile up."""
        self._sender.write(data)
        return self._buffers or not self._exchange.behind

    async def ready(self) -> None:
        """Wait for a client that is behind, or leave it behind."""
        if self._buffers or not self._exchange.behind:
            return
        if self._generation is None:
            await self._exchange.drained()
        elif self._slow_client == "drop":
            self._exchange.lost("too slow: it fell behind")
        else:
            self._generation.pause(True)
            await self._exchange.drained()
            self._generation.pause(False)


class Cut(Exception):
    """The connection is to be cut here, without an end."""


class Faulty(ToClient):
    """Writes to one client, until a fault is due."""

    __slots__ = ("_faults", "_held", "_number")

    def __init__(
        self,
        exchange: Exchange,
        sender: Sender,
        slow_client: str,
        generation: Generation | None,
        faults: Mapping[str, int],
    ) -> None:
        super().__init__(exchange, sender, slow_client, generation)
        self._faults = faults
        self._held: deque[bytes] = deque()
        self._number = 0  # of what was written so far

    def put(self, data: bytes) -> bool:
        """Keep it for `ready`, which has the time that faults take."""
        self._held.append(data)
        return False

    async def ready(self) -> None:
        """Write what was put, faults included. Raises `Cut` when one is due."""
        while self._held:
            if self._number == self._faults.get("truncate_after"):
                raise Cut
            if self._number == self._faults.get("garbage_after"):
                self._exchange.write(GARBAGE)
            self._number += 1
            data = self._held.popleft()
            if not self._sender.open:
                continue
            size = self._faults.get("split_at") or max(1, len(data))
            for start in range(0, len(data), size):
                if start:
                    await asyncio.sleep(SPLIT_S)
                self._exchange.write(data[start : start + size])
            await super().ready()
