"""One accepted connection: requests in, answers out, and who is still there to read them.

`http1.py` knows the bytes of HTTP; this file knows its life in time: keep-alive and pipelining,
deadlines, a client that leaves, one that is slow, and how to close without losing the last answer.

    accept -> head -> handler(exchange) -> next head ... -> close
               |          |
               |          +-- content()      read the request's content (answers Expect first)
               |          +-- respond()      a whole answer, or
               |          +-- start() send() send() ... finish()      a stream, or
               |          +-- upgrade()      HTTP ends here, WebSocket begins
               +-- 400 408 414 431 ... for what is no request

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

RFC 9112 sections 9.3 (persistence), 9.3.2 (pipelining), 9.5 (failures), 9.6 (closing in two
steps); RFC 9110 section 10.1.1 (Expect).

Not here: routes and replies (`server.py`), the client's half (`client.py`).
Read next: `session.py`.
"""

import asyncio
import contextlib
import json
import logging
import math
import select
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, cast

import http1

log = logging.getLogger("connection")

READ_BYTES = 64 * 1024
# A closing connection reads and drops so much of what its client still sends: enough for the
# largest request anybody sends by mistake, no invitation to send for ever.
LINGER_BYTES = 8 * 1024 * 1024
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

Fields = Iterable[tuple[str, str]]


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
        self._tell()

    def set_exception(self, exc: Exception) -> None:
        """Also tell `on_end`."""
        super().set_exception(exc)
        self._tell()

    def _tell(self) -> None:
        self.ended = True
        if self.on_end is not None:
            self.on_end()


class Exchange:
    """One request and its answer.

    Exactly one of `respond`, `start` ... `finish`, and `upgrade` answers it. Writing raises
    `ClientGone` once it is known that nobody reads; see `watch`.
    """

    def __init__(self, connection: "Connection", request: http1.Request) -> None:
        self.request = request
        self.heartbeat = b""  # what to write after a silence; nothing where there is no such thing
        self.gone: str | None = None
        self.status: int | None = None
        self.upgraded = False
        self.finished = False
        self.continued = False  # 100 Continue was sent
        self.content_read = False
        self.keep_alive = request.keep_alive
        self.connection = connection
        self.writer = connection.writer
        self.wire = connection.wire
        self._settings = connection.settings
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, connection.writer.transport)
        self._high_water = self._transport.get_write_buffer_limits()[1]
        self._chunked = False
        # How a part of a stream goes on the wire.
        self.frame: Callable[[bytes], bytes] = bytes
        # Before the head an interim response is a harmless thing to write, but not to HTTP/1.0
        # (RFC 9110 section 15.2).
        self._probe = b"" if request.version < (1, 1) else http1.encode_head(102, ())
        self._written = 0
        self._taken = 0
        self._last_write = self._last_progress = time.monotonic()
        self._pinged: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ahead_timer: asyncio.TimerHandle | None = None
        self._on_gone: Callable[[str], None] | None = None

    # The request's content.

    async def content(self) -> bytes:
        """Read the whole content. Raises `http1.ProtocolError`, with 413 when it is too long."""
        return await self.connection.read_content(self)

    # A whole answer.

    def respond(self, status: int, body: bytes, content_type: str, fields: Fields = ()) -> None:
        """Write a complete answer with a `Content-Length`."""
        fields = [*fields, ("Content-Type", content_type), ("Content-Length", str(len(body)))]
        head = self._head(status, fields)
        self.write(head if self.request.method == "HEAD" else head + body)
        self.finished = True

    def respond_empty(self, status: int, fields: Fields = ()) -> None:
        """Write an answer that has no content: by `Content-Length: 0`, by its status or to HEAD."""
        # RFC 9110 section 8.6: to HEAD only the length that the answer to GET would have.
        needless = status == 204 or self.request.method == "HEAD"
        length = () if needless else (("Content-Length", "0"),)
        self.write(self._head(status, [*fields, *length]))
        self.finished = True

    def cut_short(self, status: int, body: bytes, content_type: str, fields: Fields) -> None:
        """Write half of an answer and break the connection (a fault on demand)."""
        fields = [*fields, ("Content-Type", content_type), ("Content-Length", str(len(body)))]
        self.write(self._head(status, fields) + body[: len(body) // 2])
        self.cut()

    # A streamed answer.

    def start(
        self, status: int, fields: Fields, heartbeat: bytes = b"", probe: bytes = b""
    ) -> None:
        """Write the head of a stream; from here on `heartbeat` breaks silences.

        `probe` is what to ask with whether the client is still there; by default the same.
        """
        if self.request.version >= (1, 1):
            self._chunked = True
            self.frame = http1.encode_chunk
            fields = [*fields, ("Transfer-Encoding", "chunked")]
        else:
            # RFC 9112 section 6.3, rule 8: an HTTP/1.0 body may end with the connection.
            self.keep_alive = False
        self.write(self._head(status, fields))
        self.heartbeat = heartbeat
        self._probe = self.frame(probe or heartbeat)
        self._tick()

    def send(self, data: bytes) -> None:
        """Write a part of a stream, at once. An empty part writes nothing (RFC 9112 section 7.1:
        a chunk of size zero would end the body)."""
        if data:
            self.write(self.frame(data))

    def finish(self) -> None:
        """End a stream: the last chunk, or the end of the connection."""
        if self._chunked:
            self.write(http1.LAST_CHUNK)
        self.finished = True

    def cut(self) -> None:
        """End a stream so that no client can take it for a complete one."""
        self.keep_alive = False
        self.finished = True
        if not (self._chunked or self._transport.is_closing()):
            # The end of the connection would be the end of the body; a reset is not.
            _reset_on_close(self.writer)
        self._transport.abort()

    def upgrade(self, fields: Fields) -> bytes:
        """Answer 101; what the client has sent behind its request is returned."""
        self.upgraded = self.finished = True
        self.keep_alive = False
        self.status = 101
        self.write(http1.encode_head(101, list(fields)))
        self._probe = b""  # a WebSocket is never half-closed by a client that reads on
        self._tick()
        return self.connection.parser.take_unread()

    # What all of them do.

    def write(self, data: bytes) -> None:
        """Hand bytes to the transport; raises `ClientGone` when nobody takes them."""
        transport = self._transport
        self._last_write = time.monotonic()
        if self.gone is None and not transport.is_closing():
            transport.write(data)
            self._written += len(data)
            if transport.get_write_buffer_size() <= self._settings.queued_bytes:
                return
        if not self._settings.naive:
            broke = transport.is_closing()
            self.lost("the client's connection broke" if broke else TOO_MUCH)
            raise ClientGone(self.gone)

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

    def _head(self, status: int, fields: Fields) -> bytes:
        if self.status is not None:
            raise RuntimeError("this exchange has its answer already")
        self.status = status
        self.keep_alive = self.keep_alive and self.connection.may_persist(self)
        fields = [("Date", http1.format_date(time.time())), *fields]
        if not self.keep_alive:
            fields.append(("Connection", "close"))
        elif self.request.version < (1, 1):
            fields.append(("Connection", "keep-alive"))
        return http1.encode_head(status, fields)

    # Who left, who is slow.

    def watch(self, on_gone: Callable[[str], None]) -> None:
        """Call `on_gone` with the reason as soon as it is known that nobody reads this answer.

        An answer that is made at once needs no watching: it is written, whoever reads it.
        """
        if self._settings.naive:
            return
        self._on_gone = on_gone
        self.wire.on_end = self._peer_ended
        if self.wire.ended:
            self._peer_ended()
        else:
            self.wire.on_data = self._came_ahead
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
        if self.gone is not None or self.finished or self.wire.ended:
            return
        if self._transport.is_reading():
            return
        if ends_unread(self.writer.get_extra_info("socket")):
            self._peer_ended()
            return
        if look % PROBE_AHEAD_LOOKS == 0 and self._probe and not self._is_tls():
            self._peer_ended()
        later = self._loop.call_later(AHEAD_LOOK_S, self._look_ahead, look + 1)
        self._ahead_timer = later

    def left(self, why: str) -> None:
        """The client has said that it wants no more; the connection itself is still open."""
        if self._on_gone is not None:
            self._on_gone(why)

    def _peer_ended(self) -> None:
        """The connection broke, or the client has sent its last byte."""
        if self.gone is not None:
            return
        if isinstance(self.wire.exception(), TimeoutError):
            self.lost("the client vanished: it acknowledged nothing for too long")
        elif self.wire.exception() is not None:
            self.lost("the client's connection broke")
        elif self._transport.is_closing() or not self._probe or self._is_tls():
            self.lost("the client closed its connection")
        else:
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
            self._loop.call_later(PROBE_LOOKS_S[look], self._look_for_reset, look + 1)

    def _is_tls(self) -> bool:
        return self.writer.get_extra_info("ssl_object") is not None

    def lost(self, why: str) -> None:
        """Nobody reads any more: drop the connection and tell whoever works for this exchange."""
        if self.gone is None:
            self.gone = why
            self.keep_alive = False
            self._transport.abort()
            if self._on_gone is not None:
                self._on_gone(why)

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
        self._timer = self._loop.call_later(wait, self._tick)

    def _beat(self, now: float) -> None:
        self.write(self.frame(self.heartbeat))
        if self.upgraded and self._pinged is None:
            self._pinged = now  # a ping has to be answered; a comment line is not

    def heard(self) -> None:
        """Something came from the other end of a WebSocket: it is alive."""
        self._pinged = None

    def close(self) -> None:
        """Stop the timers: the exchange is over."""
        for timer in (self._timer, self._ahead_timer):
            if timer is not None:
                timer.cancel()


Handler = Callable[[Exchange], Coroutine[Any, Any, None]]


class Connection:
    """Reads requests from one client and has `handler` answer them, one after the other.

    `run` returns when the connection is closed.
    """

    def __init__(
        self,
        wire: WatchedReader,
        writer: asyncio.StreamWriter,
        handler: Handler,
        settings: Settings,
    ) -> None:
        self.wire = wire
        self.writer = writer
        self.handler = handler
        self.settings = settings
        self.parser = http1.RequestParser(settings.limits)
        self.exchange: Exchange | None = None
        self.closing = False
        self._patience: asyncio.Timeout | None = None
        self._limit_unsent()
        if not settings.naive:
            limit_silence(writer.get_extra_info("socket"), settings.stall_s)

    def _limit_unsent(self) -> None:
        option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
        peer = self.writer.get_extra_info("socket")
        if option is not None and peer is not None:
            with contextlib.suppress(OSError):
                peer.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)

    async def run(self) -> None:
        """Serve until either side has had enough."""
        try:
            while not self.closing and await self._serve_one():
                pass
            await self._close()
        except (OSError, ClientGone):
            self.writer.transport.abort()
        except asyncio.CancelledError:
            self.writer.transport.abort()
            raise

    async def turn_away(self) -> None:
        """Tell a client that there is no room for it."""
        try:
            busy = http1.ProtocolError("too many connections", 503)
            self._refuse(busy, [("Retry-After", "1")])
            await self._close()
        except OSError:
            self.writer.transport.abort()

    def shut_down(self) -> None:
        """Serve no further request; what still waits for its client to speak ends now."""
        self.closing = True
        if self.exchange is None:
            self.writer.transport.close()  # after what the client has not taken yet
        elif self._patience is not None and not self._patience.expired():
            self._patience.reschedule(0)

    @contextlib.asynccontextmanager
    async def patience(self, patience_s: float) -> AsyncIterator[None]:
        """Limit the time for what the client has to send; TimeoutError, at shutdown at once."""
        try:
            async with asyncio.timeout(0 if self.closing else patience_s) as self._patience:
                yield
        finally:
            self._patience = None

    async def _serve_one(self) -> bool:
        """Read and answer one request; whether another may follow."""
        try:
            request = await self._read_head()
        except http1.ProtocolError as error:
            self._refuse(error)
            return False
        if request is None:
            return False
        exchange = self.exchange = Exchange(self, request)
        try:
            await self.handler(exchange)
            if not exchange.finished:
                raise RuntimeError(f"the handler of {request.target} left no complete answer")
        except ClientGone:
            return False
        except Exception:
            log.exception("a handler failed")
            self._fail(exchange)
        finally:
            exchange.close()
            self.wire.on_end = self.wire.on_data = None
            self.exchange = None
        # Requests that are here already would be answered without a pause: others first.
        await asyncio.sleep(0)
        return exchange.keep_alive

    async def _read_head(self) -> http1.Request | None:
        """Wait for a request's head; None when the client sends no more."""
        if self.parser.idle and not await self._fill(self.settings.idle_s):
            return None
        deadline = asyncio.get_running_loop().time() + self.settings.head_s
        try:
            async with asyncio.timeout_at(deadline):
                event = await self._next_event()
        except TimeoutError:
            if self.parser.idle:  # nothing but empty lines so far
                return None
            raise http1.ProtocolError("the head took too long to arrive", 408) from None
        if event is None:
            return None
        if not isinstance(event, http1.Request):
            raise RuntimeError("a request was to be next")
        return event

    async def _fill(self, patience_s: float) -> bool:
        """Read something, or end-of-file; False when neither came in time."""
        try:
            async with asyncio.timeout(patience_s):
                await self._read()
        except TimeoutError:
            return False
        return True

    async def read(self) -> bytes:
        """What the client sends next, b"" at its end; `ClientGone` when the connection broke."""
        try:
            data = await self.wire.read(READ_BYTES)
            # What is here already is returned without a pause: a flood must let others in between.
            await asyncio.sleep(0)
            return data
        except OSError as error:  # a reset, a route that is gone, a TLS alert
            raise ClientGone("the client's connection broke") from error

    async def _read(self) -> None:
        data = await self.read()
        if data:
            self.parser.feed(data)
        else:
            self.parser.feed_eof()

    async def _next_event(self) -> http1.Request | http1.Content | http1.End | None:
        """The parser's next event; None at the end of the connection between two requests."""
        while (event := self.parser.next_event()) is None:
            if self.wire.at_eof() and self.parser.idle:
                return None
            await self._read()
        return event

    async def read_content(self, exchange: Exchange) -> bytes:
        """Read one request's content to its end (used by `Exchange.content`)."""
        content = bytearray()  # a list of its parts would be many times as large as small chunks
        try:
            async with self.patience(self.settings.content_s):
                while not isinstance(event := self.parser.next_event(), http1.End):
                    if isinstance(event, http1.Content):
                        content += event.data
                    elif event is None:
                        # RFC 9110 section 10.1.1: only when the content is really waited for.
                        if exchange.request.expects_continue and not exchange.continued:
                            exchange.continued = True
                            exchange.write(http1.encode_head(100, ()))
                        await self._read()
        except TimeoutError:
            if self.closing:
                raise http1.ProtocolError("the server is shutting down", 503) from None
            raise http1.ProtocolError("the content took too long to arrive", 408) from None
        exchange.content_read = True
        return bytes(content)

    def may_persist(self, exchange: Exchange) -> bool:
        """Whether the next request can be found behind this one (asked when a head is written).

        An answer that did not wait for the request's content leaves it on the wire, where it must
        not be taken for a request (RFC 9112 section 9.3): either it is here already and skipped,
        or the connection ends.
        """
        if self.closing:
            return False
        if exchange.content_read:
            return True
        try:
            while (event := self.parser.next_event()) is not None:
                if isinstance(event, http1.End):
                    return True
        except http1.ProtocolError:
            pass
        return False

    def _refuse(self, error: http1.ProtocolError, more: Fields = ()) -> None:
        """Answer what is no request: there is no exchange, and none can follow."""
        body = error_body(str(error), "invalid_request_error")
        fields = [
            ("Date", http1.format_date(time.time())),
            *more,
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        head = http1.encode_head(error.status, fields)
        # RFC 9110 section 9.3.2: no content to HEAD, if it is known to be one.
        self.writer.write(head if self.parser.method == "HEAD" else head + body)

    def _fail(self, exchange: Exchange) -> None:
        """Our own fault: 500 while that can still be said, else a cut."""
        if exchange.status is None:
            exchange.keep_alive = False
            exchange.respond(500, error_body("internal error", "server_error"), "application/json")
        else:
            exchange.cut()

    async def _flushed(self) -> bool:
        """Wait until the client has taken everything; False when it stopped taking."""
        transport = self.writer.transport
        transport.set_write_buffer_limits(high=0)  # drain() then waits for the last byte
        while before := transport.get_write_buffer_size():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.stall_s):
                    await self.writer.drain()
            if transport.get_write_buffer_size() >= before:
                return False
        return True

    async def _close(self) -> None:
        """Close in two steps, so that the last answer is not lost to a reset.

        RFC 9112 section 9.6: bytes that arrive on a closed socket make the kernel answer with a
        reset, which may destroy what the client has not read yet. So only our half is closed
        first, and what still comes is read and dropped, for a while.
        """
        transport = self.writer.transport
        if transport.is_closing() or not await self._flushed():
            transport.abort()
            return
        if not transport.can_write_eof():  # TLS closes both halves at once
            transport.close()
            return
        with contextlib.suppress(OSError, TimeoutError):
            transport.write_eof()
            async with asyncio.timeout(self.settings.linger_s):
                dropped = 0
                while (data := await self.wire.read(READ_BYTES)) and dropped < LINGER_BYTES:
                    dropped += len(data)
        transport.abort()


def error_body(message: str, type: str, field: str | None = None) -> bytes:
    """The native form of a refusal."""
    error = {"message": message, "type": type, "field": field}
    return json.dumps({"error": error}).encode()


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


def _reset_on_close(writer: asyncio.StreamWriter) -> None:
    peer = writer.get_extra_info("socket")
    # SO_LINGER with a time of zero: close() sends a reset instead of a FIN.
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
