"""One TCP or TLS connection of the measuring client: bytes out, dated bytes in.

    data_received(b"...")  ->  [(date, bytes), (date, bytes), ...]  ->  await read()

This is an asyncio protocol and not a pair of streams for three reasons. A `StreamReader` joins two
reads into one, and only tells the time when its task gets to run; here each read keeps its bytes
and its date. After a reset it drops what came before. And it ends a connection in one way only,
while a measuring client has to leave as real clients do: with FIN, with RST, or half.

Not here: what the bytes mean (`exchange.py`, which is to be read next).
"""

import asyncio
import os
import socket
import ssl
import struct
import time
from typing import Literal, cast

from measures import Failure

# Reads held for a slow consumer (of up to 256 KiB each) before the socket is left to fill.
MAX_HELD_READS = 16

# How long a connection may take to close before it is aborted.
CLOSE_S = 1.0

Leave = Literal["close", "reset", "half-close"]


class Failed(Exception):
    """The exchange is over, for this reason."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class Wire(asyncio.Protocol):
    """One connection; each read is dated by the callback that received it."""

    def __init__(self) -> None:
        self.received = self.sent = self.reads = 0
        self.at = 0.0  # the date of the read that `read` returned last
        self._origin = 0.0
        self._half_closed = False
        self._queue: asyncio.Queue[tuple[float, bytes | Exception]] = asyncio.Queue()
        self._lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, and see to it that nothing is held back."""
        self.transport = cast(asyncio.Transport, transport)
        # Nagle's algorithm would hold a small write (the prompt after the 101) for a round trip.
        self.socket = cast(socket.socket, transport.get_extra_info("socket"))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Date one read; stop reading while too many are waiting."""
        self.reads += 1
        self.received += len(data)
        self._queue.put_nowait((time.perf_counter(), data))
        if self._queue.qsize() >= MAX_HELD_READS:
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        """Date the server's end-of-file, and keep our half open (TLS has no halves)."""
        self._queue.put_nowait((time.perf_counter(), b""))
        return self.transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:
        """Date the end of the connection."""
        self._queue.put_nowait((time.perf_counter(), exc or b""))
        self._lost.set()

    @property
    def idle(self) -> bool:
        """Whether the connection is open and nothing has come unasked."""
        return self._queue.empty() and not self.transport.is_closing()

    def start_clock(self) -> None:
        """Let this moment be the origin of all dates."""
        self._origin = time.perf_counter()

    def now(self) -> float:
        """Return this moment's date."""
        return time.perf_counter() - self._origin

    def send(self, data: bytes) -> None:
        """Hand bytes to the socket, unless our half is closed already."""
        if not self._half_closed:
            self.sent += len(data)
            self.transport.write(data)

    async def read(self, until: float | None) -> bytes | None:
        """Return what the next read gave, b"" at end-of-file, None once `until` has passed."""
        delay = None if until is None else until - self.now()
        if delay is not None and delay <= 0:
            return None
        try:
            async with asyncio.timeout(delay):
                moment, data = await self._queue.get()
        except TimeoutError:
            return None
        self.transport.resume_reading()
        self.at = moment - self._origin
        if isinstance(data, Exception):
            raise Failed(Failure.TRUNCATED, f"connection lost: {os_words(data)}")
        return data

    def leave(self, how: Leave) -> None:
        """Close the connection, or our half of it."""
        if how == "half-close":
            self._half_closed = True
            self.transport.write_eof()
        elif how == "close":
            self.transport.close()
        else:
            # A linger time of zero: the kernel drops what is unsent and sends RST, not FIN.
            numbers = "hh" if os.name == "nt" else "ii"
            linger = struct.pack(numbers, 1, 0)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.transport.abort()

    async def close(self) -> None:
        """Close and wait for it, but not for a peer that does not read."""
        self.transport.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._lost.wait()
        except TimeoutError:
            self.transport.abort()


def os_words(exc: BaseException) -> str:
    """Return what went wrong in the system's words, without numbers and addresses."""
    # ssl and getaddrinfo have error numbers of their own.
    own = isinstance(exc, ssl.SSLError | socket.gaierror)
    if isinstance(exc, OSError) and exc.errno and not own:
        return os.strerror(exc.errno)
    return str(exc) or type(exc).__name__
