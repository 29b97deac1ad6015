"""A volley: what one pass of the model, or one tick of the simulated clock, writes to its clients.

    with of(loop).together():            engine._deliver, simulated.Clock._tick
        generation.deliver(...)          -> ... -> Watched.write: held
        generation.deliver(...)          -> ... -> Watched.write: held
                                         at the end: Watched.send to one client after the other

To make an event is Python's work, to send it the kernel's. Taking turns, each finds what it needs
pushed out of the processor's caches by the other; and a client on the same machine, done with the
last event before the next is made, is woken up for each: at 200 streams that took the processor
from the server 430 times in 1,000 events on two cores, and 6 times with volleys. The first client
waits for the events of all others to be made, some microseconds each.

Read next: `watching.py`, which does the sending.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

import ticks


class Recipient(Protocol):
    """Who is written to: `watching.Watched`."""

    def send(self, data: bytes, now: float) -> None:
        """Hand bytes to the transport."""


class Volley:
    """The volley that is under way on an event loop; `writes` is None while none is."""

    def __init__(self) -> None:
        self.writes: list[tuple[Recipient, bytes]] | None = None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Hold what is written within, and send it at the end, in the same order."""
        if self.writes is not None:
            yield  # it is part of the one around it
            return
        writes = self.writes = []
        try:
            yield
        finally:
            self.writes = None
            now = time.monotonic()
            for recipient, data in writes:
                try:
                    recipient.send(data, now)
                except Exception as error:  # a bug: it costs no other client its bytes
                    context = {"message": "a write failed", "exception": error}
                    asyncio.get_running_loop().call_exception_handler(context)


of = ticks.per_loop(Volley)
