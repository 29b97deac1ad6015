"""Writing to a client, and who is still there to read.

    write() --> transport --> the kernel --> the client     `volley.py` lies before the transport
       |            |             |             +-- left?      FIN or reset; else a probe is asked
       |            |             +-- vanished? nothing is acknowledged for `stall_s`
       |            +-- slow?     `queued_bytes` wait, or nothing was taken for `stall_s`
       +-- silent?  a heartbeat after `heartbeat_s`

Who left?  A client that closes its connection sends the same FIN as one that only says "this was
my last request" (`printf ... | nc` does). So end-of-file is a question, and the answer comes from
writing something harmless, a comment line on an event stream or an interim 102 before a head: a
peer that is gone answers it with a reset, at once; one that half-closed reads on. A client that
vanished without a word (a cable pulled) answers nothing: what is sent to it is not acknowledged,
nor are the kernel's own questions while nothing is sent, and after `stall_s` the kernel gives up.
One that sends far ahead of its answer is not read to its end, so the kernel is asked now and then.

Who is slow?  What is written and not yet taken by the peer is counted by the transport. Past
`queued_bytes`, or after `stall_s` without progress, the exchange is lost like one whose client
left.

How an exchange ends, in these words:

    reader.ended     the client sent its last byte, or the connection broke: the question above
    said_goodbye()   the client said that it wants no more; the connection stays open
    lost()           nobody reads any more, whatever the reason: the connection is dropped,
    gone             and this is the reason; from here on writing raises `ClientGone`
    cut()            we break the connection, so that no client takes the answer for whole
    finished         the answer is complete, or was cut; of a WebSocket from its beginning
    close()          the exchange is over: its timers stop, the connection may go on

RFC 9112 section 9.5 (failures); RFC 9293 section 3.8.4 (keep-alives).
Read next: `connection.py`, whose exchanges are watched so.
"""

import asyncio
import contextlib
import math
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import SupportsIndex, cast

import http1
import ticks
import volley

# After a probe the reset comes within a round trip: seconds, looked for at these moments.
PROBE_LOOKS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0)
# How often to look for the end of a client that has sent more than is read ahead of an answer; and
# every so many looks to ask it.
AHEAD_LOOK_S = 0.5
PROBE_AHEAD_LOOKS = 10
# Unsent bytes that the kernel takes over from us; what is above stays in the transport's buffer,
# where it can be counted. Linux and macOS; elsewhere the kernel's buffer comes on top.
UNSENT_BYTES = 16 * 1024

TOO_MUCH = "too slow: too many bytes waited for it"


class ClientGone(Exception):
    """Nobody reads this exchange any more: the client left, or was too slow."""


@dataclass(frozen=True)
class Settings:
    """Deadlines in seconds and bounds in bytes, each with the reason it exists."""

    head_s: float = 10.0  # from a request's first byte to the end of its head
    content_s: float = 30.0  # from the head to the end of the content
    idle_s: float = 75.0  # between two requests of a connection
    stall_s: float = 30.0  # without the client taking one byte of what waits for it
    heartbeat_s: float = 15.0  # of silence before a heartbeat (0: none); proxies cut at 60 and less
    linger_s: float = 2.0  # for the client to read a last answer (RFC 9112 section 9.6)
    queued_bytes: int = 1024 * 1024  # written for a client and not yet taken by it
    naive: bool = False  # do not watch the client at all: what that costs is an experiment
    limits: http1.Limits = field(default_factory=http1.Limits)


class WatchedReader(asyncio.StreamReader):
    """A stream reader that tells of the end when it happens, not when it is read.

    During an answer nobody reads from the client, so its leaving would go unnoticed. `on_end` is
    called at end-of-file and when the connection breaks (`exception()` is then the reason).
    """

    ended = False
    on_end: Callable[[], None] | None = None
    on_data: Callable[[], None] | None = None

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        """Also tell `on_data`."""
        super().feed_data(data)
        if self.on_data is not None:
            self.on_data()

    def feed_eof(self) -> None:
        """Also tell `on_end`."""
        super().feed_eof()
        self._note_end()

    def set_exception(self, exc: Exception) -> None:
        """Also tell `on_end`."""
        super().set_exception(exc)
        self._note_end()

    def _note_end(self) -> None:
        self.ended = True
        if self.on_end is not None:
            self.on_end()


class Watched:
    """What is written to a client, and who is still there to take it.

    Writing raises `ClientGone` once it is known that nobody reads; see `watch`.
    """

    open = True  # as a `Sender`: what is lost raises when it is written to

    def __init__(
        self, reader: WatchedReader, writer: asyncio.StreamWriter, settings: Settings
    ) -> None:
        loop = asyncio.get_running_loop()
        # What each event needs comes first: its references then lie together in memory.
        self.gone: str | None = None
        self._volley = volley.of(loop)
        self._last_write = time.monotonic()
        self._transport = cast(asyncio.Transport, writer.transport)
        self._settings = settings
        self._written = 0  # only while something waits: what is taken at once needs no count
        self.reader = reader
        self.writer = writer
        self.heartbeat = b""  # what to write after a silence; nothing where there is no such thing
        self.keep_alive = False
        self.upgraded = False
        self.finished = False
        self._to_the_close = False  # the answer ends where the connection does
        # How a part of a stream goes on the wire.
        self.frame: Callable[[bytes], bytes] = bytes
        self._high_water = self._transport.get_write_buffer_limits()[1]
        self._probe = b""  # what to ask with whether the client is still there
        self._taken = -self.queued  # of the answer before this one
        self._last_progress = self._last_write
        self._pinged: float | None = None
        self._ticks = ticks.of(loop)
        self._next_tick = 0
        self._ahead_timer: asyncio.TimerHandle | None = None
        self._on_gone: Callable[[str], None] | None = None

    def write(self, data: bytes) -> None:
        """Send bytes, those of a volley at its end; `ClientGone` when nobody takes them."""
        if self.gone is None:
            writes = self._volley.writes
            if writes is not None:
                writes.append((self, data))
                return
            self.send(data, time.monotonic())
        if self.gone is not None:
            raise ClientGone(self.gone)

    def send(self, data: bytes, now: float) -> None:
        """Hand bytes to the transport. Who takes none of them is lost, which the next write says.

        With `Settings.naive` nobody is lost here.
        """
        self._last_write = now
        transport = self._transport
        if transport.is_closing():
            self._fail("the client's connection broke")
            return
        transport.write(data)
        if waiting := transport.get_write_buffer_size():
            self._written += len(data)
            if waiting > self._settings.queued_bytes:
                self._fail(TOO_MUCH)

    def _fail(self, why: str) -> None:
        if not self._settings.naive:
            self.lost(why)

    @property
    def queued(self) -> int:
        """Bytes written that the client has not taken."""
        return self._transport.get_write_buffer_size()

    @property
    def behind(self) -> bool:
        """Whether more waits for the client than the transport's high-water mark (64 KiB)."""
        return self._transport.get_write_buffer_size() > self._high_water

    async def drained(self) -> None:
        """Wait until the client has taken most of what was written (or is gone)."""
        with contextlib.suppress(OSError):
            await self.writer.drain()

    # Who left, who is slow.

    def watch(self, on_gone: Callable[[str], None]) -> None:
        """Call `on_gone` with the reason as soon as it is known that nobody reads this answer.

        An answer that is made at once needs no watching: it is written, whoever reads it.
        """
        if self._settings.naive:
            return
        self._on_gone = on_gone
        self.reader.on_end = self._peer_ended
        if self.reader.ended:
            self._peer_ended()
        else:
            self.reader.on_data = self._came_ahead
            self._came_ahead()

    def _came_ahead(self) -> None:
        """Something came during the answer: perhaps so much that reading was paused."""
        if self._ahead_timer is None and not self._transport.is_reading():
            self._look_ahead(1)

    def _look_ahead(self, look: int) -> None:
        """See whether a client left that has sent so much ahead that its end is not read.

        The end may be known to the kernel, behind unread bytes; or not even have been sent, which
        only an answer to a probe tells, now and then.
        """
        self._ahead_timer = None
        if self.gone is not None or self.finished or self.reader.ended:
            return
        if self._transport.is_reading():
            return
        if ends_unread(self.writer.get_extra_info("socket")):
            self._peer_ended()
            return
        if look % PROBE_AHEAD_LOOKS == 0 and self._probe and not self._is_tls():
            self._peer_ended()
        loop = asyncio.get_running_loop()
        self._ahead_timer = loop.call_later(AHEAD_LOOK_S, self._look_ahead, look + 1)

    def said_goodbye(self, why: str) -> None:
        """The client has said that it wants no more; the connection itself is still open."""
        if self._on_gone is not None:
            self._on_gone(why)

    def _peer_ended(self) -> None:
        """The connection broke, or the client has sent its last byte."""
        if self.gone is not None:
            return
        if isinstance(self.reader.exception(), TimeoutError):
            self.lost("the client vanished: it acknowledged nothing for too long")
        elif self.reader.exception() is not None:
            self.lost("the client's connection broke")
        elif self._transport.is_closing() or not self._probe or self._is_tls():
            self.lost("the client closed its connection")
        else:
            with contextlib.suppress(ClientGone):  # too slow for even that: it has been told
                self.write(self._probe)
                self._look_for_reset(0)

    def _look_for_reset(self, look: int) -> None:
        """See whether the peer answered the probe with a reset.

        asyncio stops polling a socket whose end-of-file was read, so the error is asked for.
        """
        if self.gone is not None or self._transport.is_closing():
            return
        peer: socket.socket = self.writer.get_extra_info("socket")
        if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.lost("the client closed its connection")
        elif look < len(PROBE_LOOKS_S):
            loop = asyncio.get_running_loop()
            loop.call_later(PROBE_LOOKS_S[look], self._look_for_reset, look + 1)

    def _is_tls(self) -> bool:
        return self.writer.get_extra_info("ssl_object") is not None

    def lost(self, why: str) -> None:
        """Nobody reads any more: drop the connection and tell whoever works for this exchange."""
        if self.gone is None:
            self.gone = why
            self.keep_alive = False
            self.break_off()
            if self._on_gone is not None:
                self._on_gone(why)

    def break_off(self) -> None:
        """Drop the connection, so that no client takes what came for a complete answer."""
        if self._to_the_close and not self.finished:
            reset_on_close(self.writer)
        self._transport.abort()

    def _tick(self) -> None:
        """The stream's one timer: breaks silences, and ends what makes no progress."""
        if self.gone is not None or (self.finished and not self.upgraded):
            return
        now = time.monotonic()
        taken = self._written - self.queued
        if taken > self._taken or not self.queued:
            self._taken, self._last_progress = taken, now
        if now - self._last_progress >= self._settings.stall_s and not self._settings.naive:
            self.lost("too slow: nothing was taken for too long")
            return
        if self._pinged is not None and now - self._pinged >= self._settings.stall_s:
            self.lost("no answer to a ping")
            return
        silence_s = (self.heartbeat and self._settings.heartbeat_s) or math.inf
        if now - self._last_write >= silence_s:
            with contextlib.suppress(ClientGone):
                self._beat(now)
        silence_left = silence_s - (now - self._last_write)
        wait = max(0.001, min(silence_left, self._settings.stall_s / 4))
        self._next_tick = self._ticks.add(self, wait, self._tick)

    def _beat(self, now: float) -> None:
        self.write(self.frame(self.heartbeat))
        if self.upgraded and self._pinged is None:
            self._pinged = now  # a ping has to be answered; a comment line is not

    def heard(self) -> None:
        """Something came from the other end of a WebSocket: it is alive."""
        self._pinged = None

    def close(self) -> None:
        """Stop the timers: the exchange is over."""
        self._ticks.drop(self, self._next_tick)
        if self._ahead_timer is not None:
            self._ahead_timer.cancel()


def reset_on_close(writer: asyncio.StreamWriter) -> None:
    """Where the end of the connection would be taken for the end of the body: a reset is not."""
    if not writer.transport.is_closing():
        # SO_LINGER with a time of zero: close() sends a reset in place of a FIN.
        peer: socket.socket = writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def ends_unread(peer: socket.socket) -> bool:
    """Whether a FIN has come, be it behind bytes that nobody has read; only Linux knows."""
    if not hasattr(select, "POLLRDHUP"):
        return False
    poll = select.poll()
    poll.register(peer, select.POLLRDHUP)
    return bool(poll.poll(0))


def limit_silence(peer: socket.socket | None, stall_s: float) -> None:
    """Have the kernel break a connection whose other end is silent for `stall_s`.

    A client that vanished takes nothing, but a token's few bytes wait in the kernel, where they
    count as taken: TCP_USER_TIMEOUT (Linux) is for what is not acknowledged. While nothing is
    written, before a buffered reply, the kernel asks: RFC 9293 section 3.8.4, keep-alives.
    """
    if peer is None:
        return
    stall_s = min(stall_s, 32767)  # the most that the kernel takes
    options = {
        "TCP_USER_TIMEOUT": int(stall_s * 1000),
        "TCP_KEEPIDLE": int(stall_s / 2),
        "TCP_KEEPINTVL": int(stall_s / 4),
    }
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(1, value))


def limit_unsent(peer: socket.socket | None) -> None:
    """Have the kernel take over few bytes that it can't send yet: see `UNSENT_BYTES`."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None and peer is not None:
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)
