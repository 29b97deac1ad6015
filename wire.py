"""One TCP or TLS connection of the measuring client: bytes out, dated bytes in.

    data_received(b"...")  ->  [(date, bytes), (date, bytes), ...]  ->  await read()

This is an asyncio protocol and not a pair of streams for three reasons. A `StreamReader` joins two
reads into one, and only tells the time when its task gets to run; here each read keeps its bytes
and its date. After a reset it drops what came before. And it ends a connection in one way only,
while a measuring client has to leave as real clients do: with FIN, with RST, or half.

How wrong is a date? The kernel notes when it got each packet (Linux: SO_TIMESTAMPNS); `late` is
the time from there to the date: the wake-up, and whatever else this process had to do first.

Not here: what the bytes mean (`roundtrip.py`). Read next: `target.py`.
"""

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, cast

from measures import Failure

# What one read may give, and how many are held for a slow consumer before the socket has to fill.
READ_BYTES = 16 * 1024
MAX_HELD_READS = 64

# How long a connection may take to close before it is aborted.
CLOSE_S = 1.0

# How long reads that wait already are taken without a look at what else there is to do.
TURN_S = 0.02

# Linux: what to ask for, and the two numbers (seconds, nanoseconds) that come with each read.
SO_TIMESTAMPNS = 35
TIMESPEC = struct.Struct("@qq" if struct.calcsize("P") == 8 else "@ll")

Leave = Literal["close", "reset", "half-close"]
W = TypeVar("W", bound="Wire")


class Failed(Exception):
    """The round trip is over, for this reason."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class StampedSocket(socket.socket):
    """A socket that keeps the kernel's date of the last bytes read, where there is one."""

    stamp_ns: int | None = None  # on the clock of `time.time_ns`
    _stamps = False

    def want_stamps(self) -> None:
        """Have the kernel date what comes, if it can."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                self.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
                self._stamps = True

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Read as ever, and keep the date. (This is what asyncio calls.)"""
        if not self._stamps:  # not every system has `recvmsg`
            return super().recv(size, flags)
        # A small one: it is made for each read, and all of it is parsed before anything else runs.
        data, ancillary, _, _ = self.recvmsg(min(size, READ_BYTES), 64, flags)
        self._keep(ancillary)
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Read as ever, and keep the date. (This is what asyncio calls for TLS.)"""
        if not self._stamps:
            return super().recv_into(buffer, nbytes, flags)
        into = memoryview(buffer)[: nbytes or None]
        size, ancillary, _, _ = self.recvmsg_into([into], 64, flags)
        self._keep(ancillary)
        return size

    def _keep(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        self.stamp_ns = None
        for _, kind, data in ancillary:  # nothing else was asked for
            if kind == SO_TIMESTAMPNS and len(data) == TIMESPEC.size:
                seconds, nanoseconds = TIMESPEC.unpack(data)
                self.stamp_ns = seconds * 1_000_000_000 + nanoseconds

    @property
    def late(self) -> float | None:
        """Seconds since the kernel had the last bytes read."""
        if self.stamp_ns is None:
            return None
        return max(0, time.time_ns() - self.stamp_ns) / 1e9


class Read(NamedTuple):
    """What one read gave, b"" at end-of-file, or the error that ended the connection."""

    moment: float
    data: bytes | Exception
    late: float | None = None


class Wire(asyncio.Protocol):
    """One connection; each read is dated by the callback that received it."""

    def __init__(self) -> None:
        self.received = self.sent = self.reads = 0
        self.at = 0.0  # the date of the read that `read` returned last
        self.late: float | None = None  # and the error of that date
        self.cut = False  # TLS ended without saying so (close_notify)
        self._origin = 0.0
        self._half_closed = False
        self._held: deque[Read] = deque()  # dated, and not yet read
        self._reader: asyncio.Future[None] | None = None  # who waits for the next
        self._paused = False
        self._turn = 0.0  # when the loop last had the chance to do something else
        self._lost = asyncio.Event()
        self._stamped: StampedSocket | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, and see to it that nothing is held back."""
        self.transport = cast(asyncio.Transport, transport)
        # Nagle's algorithm would hold a small write (the prompt after the 101) for a round trip.
        self.socket = cast(socket.socket, transport.get_extra_info("socket"))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def stamped_by(self, connected: StampedSocket) -> None:
        """Take the dates' errors from this socket."""
        self._stamped = connected

    def data_received(self, data: bytes) -> None:
        """Date one read; stop reading while too many are waiting."""
        self.hold(data)
        if len(self._held) >= MAX_HELD_READS:
            self._paused = True
            self.transport.pause_reading()

    def hold(self, data: bytes) -> None:
        """Date one read and keep it for `read`."""
        moment = time.perf_counter()
        late = self._stamped.late if self._stamped else None
        self.reads += 1
        self.received += len(data)
        self._keep(Read(moment, data, late))

    def _keep(self, read: Read) -> None:
        self._held.append(read)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def eof_received(self) -> bool:
        """Date the server's end-of-file, and keep our half open (TLS has no halves)."""
        encrypted = self.transport.get_extra_info("ssl_object")
        if encrypted is not None:
            try:
                encrypted.read(1)  # nothing, once close_notify has come
            except ssl.SSLError:  # it wants to read on
                self.cut = True
        self._keep(Read(time.perf_counter(), b""))
        return self.transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:
        """Date the end of the connection."""
        self._keep(Read(time.perf_counter(), exc or b""))
        self._lost.set()

    @property
    def idle(self) -> bool:
        """Whether the connection is open and nothing has come unasked."""
        return not self._held and not self.transport.is_closing()

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
            read = await self._next(delay)
        except TimeoutError:
            return None
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        self.at = read.moment - self._origin
        self.late = read.late
        if isinstance(read.data, Exception):
            raise Failed(Failure.TRUNCATED, f"connection lost: {os_words(read.data)}")
        return read.data

    async def _next(self, delay: float | None) -> Read:
        """Return the next read; one that is there already is returned without waiting, mostly.

        A server that floods us always has one there, and time-outs and Ctrl-C need their turn.
        """
        if self._held:
            now = time.perf_counter()
            if now - self._turn > TURN_S:
                await asyncio.sleep(0)
                self._turn = time.perf_counter()
        elif delay is None:
            await self._arrival()
        else:
            async with asyncio.timeout(delay):
                await self._arrival()
        return self._held.popleft()

    async def _arrival(self) -> None:
        """Wait for a read."""
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None
        self._turn = time.perf_counter()

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


async def connect(
    factory: Callable[[], W], host: str, port: int, context: ssl.SSLContext | None
) -> W:
    """Open a connection, trying each address of the host in turn; OSError, ssl.SSLError."""
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failed: OSError | None = None
    for family, kind, protocol, _, address in addresses:
        connected = StampedSocket(family, kind, protocol)
        try:
            connected.setblocking(False)
            connected.want_stamps()
            await loop.sock_connect(connected, address)
            _, wire = await loop.create_connection(
                factory, sock=connected, ssl=context, server_hostname=host if context else None
            )
        except OSError as exc:  # of which ssl.SSLError is one
            connected.close()
            failed = exc
            if isinstance(exc, ssl.SSLError):
                break
        except BaseException:
            connected.close()
            raise
        else:
            wire.stamped_by(connected)
            return wire
    raise failed or OSError(f"no address of {host}")
