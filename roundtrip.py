"""One request and its reply over a raw connection: every byte counted, every event dated.

    wire           bytes read and written, each read dated as it happens          (transport)
    http1, websocket                                                              (framing)
    contents       content decoded and cut into events                            (media type)
    readings       what an event says: text, end, error, usage: a `Meaning`       (dialect)
    RoundTrip      drives the four and writes down what happens in a `Reply`      (measures)

The clock is monotonic and starts when the request's first byte is handed to the socket. On a
WebSocket that is the opening handshake, and `Reply.opened` tells when it was over. An event is
dated by the read that completed it: half an event is no event, and the events that one read
completes have one date.

A reply is complete only if it says so twice: by an end of its own (the dialect's end marker, or at
least a finish reason), and by the end of the message that carries it (the last chunk, all of
Content-Length, end-of-file where that is the framing: RFC 9112 section 8). Plain text has no end of
its own; over TLS close_notify tells its end from a cut. A message of a WebSocket cannot be cut
unnoticed, so there `done` is enough. Everything else is a failure with a category, and keeps the
text so far.

Not here: br and zstd, following redirects, retries: a measuring client shows what happened. Over
TLS the bytes counted are those inside it.

Read next: `asking.py`, which opens the connections. Before: `measures.py`, `readings.py`,
`contents.py`, `wire.py`, `target.py`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import http1
import websocket
from contents import (
    DECODED,
    MAX_EVENT_BYTES,
    NDJSON_TYPES,
    Decompressor,
    EventStream,
    Item,
    Lines,
    PlainText,
    Splitter,
)
from measures import MAX_ARRIVALS, Arrival, ByteCount, Event, Failure, Mode, Reply
from readings import DialectError, Meaning, Reader, error_words
from target import Options, Target, encode_request
from wire import Failed, Wire

# One whole reply, as sent and as decoded: no model writes as much; a broken server may.
MAX_REPLY_BYTES = 64 * 1024 * 1024
MAX_EVENTS = 2**18

# How long the end of the message (last chunk, closing handshake) may follow the end marker.
LINGER_S = 5.0

_SPLITTERS: dict[Mode, Callable[[], Splitter]] = {
    Mode.SSE: EventStream,
    Mode.NDJSON: Lines,
    Mode.TEXT: PlainText,
}


def _mode_of(media_type: str) -> Mode | None:
    """Return how content of a type streams; None for what is a whole document."""
    if media_type == "text/event-stream":
        return Mode.SSE
    if media_type in NDJSON_TYPES:
        return Mode.NDJSON
    return Mode.TEXT if media_type in ("text/plain", "application/octet-stream") else None


def _coding_of(response: http1.Response) -> str:
    codings = [c for c in response.fields.tokens("content-encoding") if c != "identity"]
    return ", ".join(codings)


def _refusal(response: http1.Response, mode: Mode) -> tuple[Failure, str] | None:
    """Say why a final response holds no reply, judging by its head; None when it may."""
    fields = response.fields
    status = f"{response.status} {response.reason}".rstrip()
    media_type = _media_type(response)
    coding = _coding_of(response)
    if 300 <= response.status < 400 and "location" in fields:
        return Failure.REDIRECT, f"{status} to {fields.get('location')}"
    if response.status != 200:
        return Failure.STATUS, status
    if mode is Mode.WEBSOCKET:
        return Failure.STATUS, f"{status}, not 101"
    if coding and coding not in DECODED:
        return Failure.CODING, f"{coding} is not decoded here"
    if mode is Mode.JSON:
        fits, failure = media_type == "application/json", Failure.NOT_A_REPLY
    else:
        streams = _mode_of(media_type)
        fits = streams is not None if mode is Mode.STREAM else streams is mode
        failure = Failure.NOT_A_STREAM
    return None if fits else (failure, f"content of type {media_type or 'unknown'}")


def _media_type(response: http1.Response) -> str:
    return (response.fields.get("content-type") or "").partition(";")[0].strip().lower()


class RoundTrip:
    """One request, and its reply as it is read into a `Reply`."""

    def __init__(
        self, target: Target, body: Mapping[str, Any], options: Options, reply: Reply
    ) -> None:
        options.check(target, reply.mode)
        self._body = json.dumps(body, allow_nan=False)
        self._options = options
        self._reply = reply
        self._reader = Reader(options.dialect)
        self._http = http1.ResponseParser()
        self._splitter: Splitter = EventStream()
        self._decompressor: Decompressor | None = None
        self._document = bytearray()  # the content of a whole document or a refusal
        self._websocket = websocket.Connection(
            websocket.Side.CLIENT, max_message_bytes=MAX_EVENT_BYTES
        )
        self._fed = self._decoded = 0  # bytes given to a parser, and out of a decompressor
        self._message_bytes = 0
        self._began: float | None = None  # the first byte of the response being read
        self._arrived: tuple[float, int, float | None] | None = None  # the read being parsed
        self._pieces = 0
        self._give_up_at: float | None = None
        self._key = websocket.new_key()
        method, self._request = encode_request(target, body, options, reply.mode, self._key)
        self._http.expect(method)

    async def run(self, wire: Wire) -> bool:
        """Return whether the connection can carry another request; raise what ended this one."""
        self._wire = wire
        self._before = wire.received, wire.sent, wire.reads
        try:
            wire.start_clock()
            wire.send(self._request)
            if self._options.leave_after == 0:
                self._leave()
            response = await self._read_response()
            if response.status == 101:
                await self._read_messages(response)
                return False
            await self._read_content(response)
            ends_here = self._http.framing == "close" or self._reply.left is not None
            return response.keep_alive and not ends_here and not self._unread
        finally:
            self._count()

    # Reading

    async def _read(self) -> bytes:
        """Return what was read next, b"" at end-of-file; leave or give up when it is time."""
        reply = self._reply
        self._note_arrival()
        leave_at = self._options.leave_at if reply.left is None else None
        dates = [date for date in (leave_at, self._give_up_at) if date is not None]
        data = await self._wire.read(min(dates, default=None))
        if data is None:
            if leave_at is None or self._wire.now() < leave_at:
                raise Failed(Failure.TIMEOUT, f"not over {LINGER_S:g} s after its end marker")
            self._leave()
            return await self._read()
        if self._began is None:
            self._began = self._wire.at
        if data:
            self._arrived = self._wire.at, len(data), self._wire.late
        self._fed += len(data)
        if self._fed > MAX_REPLY_BYTES:
            raise Failed(Failure.PROTOCOL, f"the reply exceeds {MAX_REPLY_BYTES} bytes")
        return data

    def _note_arrival(self) -> None:
        """Note the read that was parsed last, and how much content was complete after it."""
        if self._arrived is not None and len(self._reply.arrivals) < MAX_ARRIVALS:
            at, size, late = self._arrived
            content = self._message_bytes or self._http.content_bytes
            self._reply.arrivals.append(Arrival(at, size, content, late))
        self._arrived = None

    @property
    def _unread(self) -> int:
        http = self._http
        return self._fed - http.head_bytes - http.framing_bytes - http.content_bytes

    async def _next_event(self) -> http1.Response | http1.Content | http1.End | None:
        while (event := self._http.next_event()) is None:
            data = await self._read()
            if data:
                self._http.feed(data)
            elif self._fed:
                self._http.feed_eof()
            else:
                raise Failed(Failure.TRUNCATED, "the server closed without an answer")
        return event

    async def _read_response(self) -> http1.Response:
        """Return the head of the final response, or of a 101; note the interim ones."""
        reply = self._reply
        while True:
            response = await self._next_event()
            if isinstance(response, http1.Response):
                if not response.interim or response.status == 101:
                    break
                reply.interim.append(response.status)
                self._began = self._wire.at if self._unread else None
        reply.first_byte = self._began
        reply.status = response.status
        reply.version = "{}.{}".format(*response.version)
        reply.fields = tuple(response.fields)
        return response

    async def _read_content(self, response: http1.Response) -> None:
        reply = self._reply
        coding = _coding_of(response)
        reply.coding = coding or None
        refusal = _refusal(response, reply.mode)
        if coding in DECODED:
            self._decompressor = Decompressor(coding)
        if refusal:
            self._give_up_soon()
            try:
                await self._drain(self._document.extend)
            finally:  # however its content ends
                reply.fail(refusal[0], refusal[1] + self._words_of_refusal())
        elif reply.mode is Mode.JSON:
            await self._drain(self._document.extend)
            try:
                self._take(self._reader.read_body(bytes(self._document)), len(self._document))
            except DialectError as exc:
                raise Failed(Failure.NOT_A_REPLY, str(exc)) from None
        else:
            await self._read_stream(response)

    async def _read_stream(self, response: http1.Response) -> None:
        reply = self._reply
        if reply.mode is Mode.STREAM:
            reply.mode = _mode_of(_media_type(response)) or Mode.SSE
        self._splitter = _SPLITTERS[reply.mode]()
        if reply.mode is Mode.TEXT:
            self._reader = Reader("plain")
        await self._drain(self._take_content)
        if self._http.framing != "close" or reply.mode is not Mode.NDJSON:
            self._take_items(self._splitter.finish())
        if reply.end is None:
            self._end_without_marker()

    def _end_without_marker(self) -> None:
        if self._http.framing == "close" and self._wire.cut:  # RFC 9112 section 9.8
            raise Failed(Failure.TRUNCATED, "TLS ended without close_notify")
        if self._reply.mode is Mode.TEXT:
            return
        unfinished = self._splitter.unfinished
        if unfinished is not None:
            raise Failed(
                Failure.NO_END_MARKER,
                f"the stream ended inside an event: no blank line after {unfinished!r}",
            )
        # A finish reason is a last word, too; that the marker is missing is for the diagnosis.
        if self._reply.finish_reason is None:
            raise Failed(Failure.NO_END_MARKER, "the stream ended without [DONE] or its like")

    async def _drain(self, take: Callable[[bytes], object]) -> None:
        while not isinstance(event := await self._next_event(), http1.End):
            if isinstance(event, http1.Content):
                for data in self._undo(event.data):
                    take(data)
        if self._decompressor and self._decoded and not self._decompressor.complete:
            raise Failed(Failure.TRUNCATED, f"the {self._reply.coding} data has no end")
        self._reply.close = self._wire.at

    def _undo(self, data: bytes) -> Iterator[bytes]:
        """Yield the content without its coding."""
        if self._decompressor is None:
            yield data
            return
        for decoded in self._decompressor.feed(data):
            self._decoded += len(decoded)
            if self._decoded > MAX_REPLY_BYTES:
                raise Failed(Failure.PROTOCOL, f"the reply exceeds {MAX_REPLY_BYTES} bytes")
            yield decoded

    def _take_content(self, data: bytes) -> None:
        self._take_items(self._splitter.feed(data))

    def _take_items(self, items: list[Item]) -> None:
        for event_type, data in items:
            self._take(self._reader.read(event_type, data), len(data.encode()))

    async def _read_messages(self, response: http1.Response) -> None:
        reply, connection = self._reply, self._websocket
        if reply.mode is not Mode.WEBSOCKET:
            raise Failed(Failure.PROTOCOL, "101 to a request that asked for no upgrade")
        websocket.check_response(response, self._key)
        self._wire.send(connection.message(self._body))
        reply.opened = self._wire.at
        data = self._http.take_unread()
        while True:
            connection.feed(data)
            self._take_messages()
            try:
                data = await self._read()
            except Failed:
                if reply.end is None:
                    raise
                return  # done was said in a whole message; the closing handshake adds nothing
            if not data:
                break
        reply.close = self._wire.at
        if reply.end is None:
            raise Failed(Failure.TRUNCATED, "the connection ended without done or Close")

    def _take_messages(self) -> None:
        connection = self._websocket
        try:
            while (event := connection.next_event()) is not None:
                match event:
                    case websocket.Message(str() as data):
                        size = len(data.encode())
                        self._message_bytes += size
                        self._take(self._reader.read("message", data), size)
                    case websocket.Message():
                        raise websocket.ProtocolError("a binary message", 1003)
                    case websocket.Ping(payload):
                        self._reply.pings += 1
                        self._wire.send(connection.pong(payload))
                    case websocket.Close(code, reason):
                        self._take_close(code, reason)
        except websocket.ProtocolError as exc:
            self._wire.send(connection.close(exc.close_code, str(exc)))
            raise

    # What was read

    def _take(self, meaning: Meaning, size: int) -> None:
        reply = self._reply
        if meaning.text and reply.end is not None:
            raise Failed(Failure.PROTOCOL, "text after the end marker")
        if len(reply.events) == MAX_EVENTS:
            raise Failed(Failure.PROTOCOL, f"the reply exceeds {MAX_EVENTS} events")
        reply.events.append(Event(self._wire.at, meaning.text, meaning.reasoning, size))
        if meaning.text:
            self._take_piece(meaning.text)
            if not meaning.end and meaning.finish_reason is None and meaning.usage is None:
                return  # nearly all of them
        reply.pings += meaning.heartbeat
        if meaning.usage:
            reply.usage = (reply.usage or {}) | meaning.usage
        reply.finish_reason = meaning.finish_reason or reply.finish_reason
        reply.timings = meaning.timings or reply.timings
        if meaning.error is not None:
            reply.fail(Failure.IN_BAND, meaning.error)
        if meaning.end and reply.end is None:
            reply.end = self._wire.at
            self._give_up_soon()
            if reply.mode is Mode.WEBSOCKET:
                self._wire.send(self._websocket.close())

    def _take_piece(self, text: str) -> None:
        options = self._options
        self._pieces += 1
        if options.on_piece:
            options.on_piece(text)
        if self._pieces == options.stop_after:
            self._wire.send(self._websocket.message(json.dumps({"stop": True})))
        if self._pieces == options.leave_after:
            self._leave()

    def _take_close(self, code: int, reason: str) -> None:
        self._reply.close_code = code
        self._wire.send(self._websocket.close(code))
        self._give_up_soon()
        if self._reply.end is None:
            raise Failed(Failure.NO_END_MARKER, f"closed with {code} before done: {reason}")

    def _leave(self) -> None:
        how = self._options.leave
        self._reply.left = self._wire.now()
        self._wire.leave(how)
        if how != "half-close":
            raise Failed(Failure.CANCELLED, f"left by {how} after {self._pieces} pieces")

    def _give_up_soon(self) -> None:
        self._give_up_at = self._wire.at + LINGER_S

    def _words_of_refusal(self) -> str:
        """Return the server's own words, unless they are a page for a browser."""
        words = error_words(self._document.decode("utf-8", "replace").strip())
        return f": {words}" if words and not words.startswith("<") else ""

    def _count(self) -> None:
        reply, wire, http = self._reply, self._wire, self._http
        self._note_arrival()
        reply.dialect = self._reader.dialect
        reply.comments = self._splitter.comments
        received, sent, reads = self._before
        total = wire.received - received
        reply.sent, reply.reads = wire.sent - sent, wire.reads - reads
        framing, payload = http.framing_bytes, http.content_bytes
        if reply.opened is not None:
            framing, payload = self._unread - self._message_bytes, self._message_bytes
        unparsed = total - http.head_bytes - framing - payload
        reply.received = ByteCount(http.head_bytes, framing, payload, unparsed)
