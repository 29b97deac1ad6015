"""One accepted connection: requests in, answers out.

`http1.py` knows the bytes of HTTP; this file knows its life in time: keep-alive and pipelining,
deadlines, and how to close without losing the last answer.

    accept -> head -> handler(exchange) -> next head ... -> close
               |          |
               |          +-- content()      read the request's content (answers Expect first)
               |          +-- respond() or respond_empty()            a whole answer, or
               |          +-- start() write(frame(...)) ... finish()    a stream, or
               |          +-- upgrade()      HTTP ends here, WebSocket begins, or
               |          +-- cut_short()    half of a whole answer, as `cut` ends a stream
               +-- 400 408 414 431 ... for what is no request

RFC 9112 sections 9.3 (persistence), 9.3.2 (pipelining), 9.5 (failures), 9.6 (closing in two
steps); RFC 9110 section 10.1.1 (Expect).

Not here: who is still there to read (`watching.py`), routes (`routes.py`) and replies
(`delivery.py`), the client's half (`roundtrip.py`).
Read next: `duplex.py`.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import http1
from watching import (
    ClientGone,
    Settings,
    Watched,
    WatchedReader,
    limit_silence,
    limit_unsent,
    reset_on_close,
)

log = logging.getLogger("connection")

READ_BYTES = 64 * 1024
# A closing connection reads and drops so much of what its client still sends: enough for the
# largest request anybody sends by mistake, no invitation to send for ever.
LINGER_BYTES = 8 * 1024 * 1024


class Exchange(Watched):
    """One request and its answer.

    Exactly one of `respond`, `respond_empty`, `start` ... `finish`, and `upgrade` answers it, or a
    fault on demand: `cut_short`. Writing raises `ClientGone` once it is known that nobody reads;
    see `watch`.
    """

    def __init__(self, connection: "Connection", request: http1.Request) -> None:
        super().__init__(connection.reader, connection.writer, connection.settings)
        self.request = request
        self.keep_alive = request.keep_alive
        self.status: int | None = None
        self.continued = False  # 100 Continue was sent
        self.content_read = False
        self.connection = connection
        # Before the head an interim response is a harmless thing to write, but not to HTTP/1.0
        # (RFC 9110 section 15.2).
        self._probe = b"" if request.version < (1, 1) else http1.encode_head(102, ())

    # The request's content.

    async def content(self) -> bytes:
        """Read the whole content. Raises `http1.ProtocolError`, with 413 when it is too long."""
        return await self.connection.read_content(self)

    # A whole answer.

    def respond(
        self, status: int, body: bytes, content_type: str, fields: http1.Pairs = ()
    ) -> None:
        """Write a complete answer with a `Content-Length`."""
        fields = [*fields, ("Content-Type", content_type), ("Content-Length", str(len(body)))]
        head = self._head(status, fields)
        self.write(head if self.request.method == "HEAD" else head + body)
        self.finished = True

    def respond_empty(self, status: int, fields: http1.Pairs = ()) -> None:
        """Write an answer that has no content: by `Content-Length: 0`, by its status or to HEAD."""
        # RFC 9110 section 8.6: to HEAD only the length that the answer to GET would have.
        needless = status == 204 or self.request.method == "HEAD"
        length = () if needless else (("Content-Length", "0"),)
        self.write(self._head(status, [*fields, *length]))
        self.finished = True

    def cut_short(self, status: int, body: bytes, content_type: str, fields: http1.Pairs) -> None:
        """Write half of an answer and break the connection (a fault on demand)."""
        fields = [*fields, ("Content-Type", content_type), ("Content-Length", str(len(body)))]
        self.write(self._head(status, fields) + body[: len(body) // 2])
        self.cut()

    # A streamed answer.

    def start(
        self, status: int, fields: http1.Pairs, heartbeat: bytes = b"", probe: bytes = b""
    ) -> None:
        """Write the head of a stream; from here on `heartbeat` breaks silences.

        `probe` is what to ask with whether the client is still there; by default the same.
        """
        if self.request.version >= (1, 1):
            self.frame = http1.encode_chunk
            fields = [*fields, ("Transfer-Encoding", "chunked")]
        else:
            # RFC 9112 section 6.3, rule 8: an HTTP/1.0 body may end with the connection.
            self.keep_alive = False
            self._to_the_close = True
        self.write(self._head(status, fields))
        self.heartbeat = heartbeat
        self._probe = self.frame(probe or heartbeat)
        self._tick()

    def finish(self) -> None:
        """End a stream: the last chunk, or the end of the connection."""
        if not self._to_the_close:
            self.write(http1.LAST_CHUNK)
        self.finished = True

    def cut(self) -> None:
        """End a stream so that no client can take it for a complete one."""
        self.keep_alive = False
        self._on_gone = None  # it is our own doing: nobody has lost a client
        self.break_off()
        self.finished = True

    def upgrade(self, fields: http1.Pairs) -> bytes:
        """Answer 101; what the client has sent behind its request is returned."""
        # `finished` from the start: HTTP's part is over, and how the rest ends is the WebSocket's.
        self.upgraded = self.finished = True
        self.keep_alive = False
        self.status = 101
        self.write(http1.encode_head(101, list(fields)))
        self._probe = b""  # a WebSocket is never half-closed by a client that reads on
        self._tick()
        return self.connection.parser.take_unread()

    # What all of them do.

    def _head(self, status: int, fields: http1.Pairs) -> bytes:
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


Handler = Callable[[Exchange], Coroutine[Any, Any, None]]


class Connection:
    """Reads requests from one client and has `handler` answer them, one after the other.

    `run` returns when the connection is closed.
    """

    def __init__(
        self,
        reader: WatchedReader,
        writer: asyncio.StreamWriter,
        handler: Handler,
        settings: Settings,
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.handler = handler
        self.settings = settings
        self.parser = http1.RequestParser(settings.limits)
        self.exchange: Exchange | None = None
        self.closing = False
        self._patience: asyncio.Timeout | None = None
        peer = writer.get_extra_info("socket")
        limit_unsent(peer)
        if not settings.naive:
            limit_silence(peer, settings.stall_s)

    async def run(self) -> None:
        """Serve until either side has had enough."""
        try:
            while not self.closing and await self._serve_one():
                pass
            await self._close()
        except (OSError, ClientGone):
            self.writer.transport.abort()
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        """Drop the connection now, and what is not finished on it."""
        if self.exchange is not None:
            self.exchange.break_off()
        if self.writer.transport.get_write_buffer_size():  # of an answer that is finished
            reset_on_close(self.writer)
        self.writer.transport.abort()

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
            self.reader.on_end = self.reader.on_data = None
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
            # What is here already is returned without a pause: a flood must let others in between.
            # Not after the read: who is cancelled here has taken nothing.
            await asyncio.sleep(0)
            return await self.reader.read(READ_BYTES)
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
            if self.reader.at_eof() and self.parser.idle:
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

    def _refuse(self, error: http1.ProtocolError, more: http1.Pairs = ()) -> None:
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
        """Our own fault: 500 while that can still be said, else a cut.

        The last resort of any handler; the server's own says the 500 in its dialect before this.
        """
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
            self.abort()
            return
        if not transport.can_write_eof():  # TLS closes both halves at once
            transport.close()
            return
        with contextlib.suppress(OSError, TimeoutError):
            transport.write_eof()
            async with asyncio.timeout(self.settings.linger_s):
                dropped = 0
                while (data := await self.reader.read(READ_BYTES)) and dropped < LINGER_BYTES:
                    dropped += len(data)
        transport.abort()


def error_body(message: str, type: str, field: str | None = None) -> bytes:
    """The native form of a refusal."""
    error = {"message": message, "type": type, "field": field}
    return json.dumps({"error": error}).encode()
