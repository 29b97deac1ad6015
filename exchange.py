"""One request and its reply over a raw connection: every byte counted, every event dated.

    wire           bytes read and written, each read dated as it happens          (transport)
    http1, sse, websocket                                                         (framing)
    read_native    what an event says: text, end, error, usage: a `Meaning`       (dialect)
    Exchange       drives the three and writes down what happens in a `Reply`     (measures)

The clock is monotonic and starts when the request's first byte is handed to the socket. On a
WebSocket that is the opening handshake, and `Reply.opened` tells when it was over. An event is
dated by the read that completed it: half an event is no event, and the events that one read
completes have one date.

A reply is complete only if it says so twice: by its dialect's end marker, and by the end of the
message that carries it (the last chunk, all of Content-Length, end-of-file where that is the
framing: RFC 9112 section 8). A message of a WebSocket cannot be cut unnoticed, so there `done` is
enough. Everything else is a failure with a category, and keeps the text so far.

Not here: content codings (identity is asked for, anything else is reported), following redirects,
retries: a measuring client shows what happened. Over TLS the bytes counted are those inside it.

Read next: `client.py`, which opens the connections. Before: `measures.py`,
`wire.py`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn
from urllib.parse import quote, urlencode, urlsplit

import http1
import sse
import websocket
from measures import ByteCount, Event, Failure, Mode, Reply
from wire import Failed, Leave, Wire

# One event or message, and one whole reply: no model writes as much; a broken server may.
MAX_EVENT_BYTES = 16 * 1024 * 1024
MAX_REPLY_BYTES = 64 * 1024 * 1024

# How long the end of the message (last chunk, closing handshake) may follow the end marker.
LINGER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to ask, and when to leave.

    `leave_after` pieces (0: right after the request) or `leave_at` seconds, the client leaves:
    "close" closes the socket, "reset" makes the kernel send RST, "half-close" sends FIN and reads
    on to the end. `stop_after` pieces of a WebSocket reply it sends `{"stop": true}` and reads on.
    """

    mode: Mode | None = None  # None: by the URL, see `Target.mode`
    method: Literal["POST", "GET"] = "POST"  # GET: the body's members go into the query
    http_version: Literal["1.1", "1.0"] = "1.1"
    fields: tuple[tuple[str, str], ...] = ()  # added, or put in place of our own of that name
    timeout: float | None = 600.0  # for everything, connecting included
    on_piece: Callable[[str], None] | None = None
    leave_after: int | None = None
    leave_at: float | None = None
    leave: Leave = "close"
    stop_after: int | None = None

    def check(self, target: "Target", mode: Mode) -> None:
        """Raise ValueError for a combination that no connection can carry out."""
        if self.stop_after is not None and mode is not Mode.WEBSOCKET:
            raise ValueError("stop_after needs a WebSocket")
        if self.http_version == "1.0" and mode is Mode.WEBSOCKET:
            raise ValueError("a WebSocket is opened with HTTP/1.1")
        if self.leave == "half-close" and target.tls:
            raise ValueError("TLS connections cannot be half-closed")


# Where to


@dataclass(frozen=True)
class Target:
    """A URL, taken apart."""

    scheme: str
    host: str
    port: int
    authority: str
    path: str
    query: str

    @classmethod
    def parse(cls, url: str) -> "Target":
        """Parse an http, https, ws or wss URL; ValueError says what is wrong with it."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ValueError(f"not an http, https, ws or wss URL: {url!r}")
        if parts.username is not None:
            raise ValueError("credentials belong in a field, not in the URL")
        host = parts.hostname.encode("idna").decode("ascii")
        name = f"[{host}]" if ":" in host else host
        authority = name if parts.port is None else f"{name}:{parts.port}"
        port = parts.port or (443 if parts.scheme in ("https", "wss") else 80)
        keep = "%/:@!$&'()*+,;=-._~?"
        path, query = quote(parts.path or "/", safe=keep), quote(parts.query, safe=keep)
        return cls(parts.scheme, host, port, authority, path, query)

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.scheme in ("https", "wss")

    @property
    def mode(self) -> Mode:
        """The mode that the URL suggests by its scheme or route; an event stream otherwise."""
        last = self.path.rpartition("/")[2]
        if self.scheme in ("ws", "wss") or last == "ws":
            return Mode.WEBSOCKET
        return Mode.JSON if last in ("complete", "wait", "blocking") else Mode.SSE


# Dialect: what an event says


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one event says, in whichever dialect it said it."""

    text: str = ""
    end: bool = False
    error: str | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None


class DialectError(ValueError):
    """An event is not what its dialect allows there."""


def read_native(event_type: str, data: str) -> Meaning:
    """Return the meaning of an event of `/stream` (plain, named, bare) or a message of `/ws`.

    Events of unknown types mean nothing, as `EventSource` has it. Usage ends nothing: some servers
    send it with every piece.
    """
    if event_type not in ("message", "token", "done", "error"):
        return Meaning()
    if data == "[DONE]":
        return Meaning(end=True)
    if event_type == "error":
        return Meaning(end=True, error=_error_words(data))
    if event_type == "message" and data.startswith('"'):
        return Meaning(text=_parse(data))
    record = _parse_object(data)
    if record.get("error") is not None:
        return Meaning(end=True, error=_error_words(data))
    text, finish_reason = record.get("text"), record.get("finish_reason")
    if not isinstance(text, str | None):
        raise DialectError(f"text is not a string: {data}")
    usage, timings = record.get("usage"), record.get("timings")
    return Meaning(
        text=text or "",
        end=event_type == "done" or record.get("done") is True,
        finish_reason=finish_reason if isinstance(finish_reason, str) else None,
        usage=usage if isinstance(usage, dict) else None,
        timings=timings if isinstance(timings, dict) else None,
    )


def read_native_body(content: bytes) -> Meaning:
    """Return the meaning of a whole JSON reply; DialectError when it is none."""
    data = content.decode("utf-8", "replace")
    meaning = read_native("message", data)
    if meaning.error is None and not isinstance(_parse_object(data).get("text"), str):
        raise DialectError(f"no text in it: {data}")
    return replace(meaning, end=True)


def _parse_object(data: str) -> dict[str, Any]:
    value = _parse(data)
    if not isinstance(value, dict):
        raise DialectError(f"not a JSON object: {data}")
    return value


def _parse(data: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError) as exc:
        raise DialectError(f"not JSON ({exc}): {data}") from None


def _error_words(data: str) -> str:
    """Return the message of an error, wherever common dialects put it; else all of it."""
    try:
        record = _parse_object(data)
    except DialectError:
        return data
    error = record.get("error", record)
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else data


# One request and its reply

_MEDIA_TYPES = {Mode.JSON: "application/json", Mode.SSE: "text/event-stream"}


def _refusal(response: http1.Response, mode: Mode) -> tuple[Failure, str] | None:
    """Say why a final response holds no reply, judging by its head; None when it may."""
    fields = response.fields
    status = f"{response.status} {response.reason}".rstrip()
    media_type = (fields.get("content-type") or "").partition(";")[0].strip().lower()
    codings = [coding for coding in fields.tokens("content-encoding") if coding != "identity"]
    if 300 <= response.status < 400 and "location" in fields:
        return Failure.REDIRECT, f"{status} to {fields.get('location')}"
    if response.status != 200:
        return Failure.STATUS, status
    if mode is Mode.WEBSOCKET:
        return Failure.STATUS, f"{status}, not 101"
    if codings:
        return Failure.CODING, f"{', '.join(codings)} where identity was asked for"
    if media_type != _MEDIA_TYPES[mode]:
        failure = Failure.NOT_A_STREAM if mode is Mode.SSE else Failure.NOT_A_REPLY
        return failure, f"content of type {media_type or 'unknown'}"
    return None


def _query_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class Exchange:
    """One request, and its reply as it is read into a `Reply`."""

    def __init__(
        self, target: Target, body: Mapping[str, Any], options: Options, reply: Reply
    ) -> None:
        options.check(target, reply.mode)
        self._body = json.dumps(body, allow_nan=False)
        self._options = options
        self._reply = reply
        self._http = http1.ResponseParser()
        self._events = sse.Parser(max_event_bytes=MAX_EVENT_BYTES)
        self._content = bytearray()  # of a document or refusal; of a stream the last bytes
        self._key = websocket.new_key()
        self._websocket = websocket.Connection(
            websocket.Side.CLIENT, max_message_bytes=MAX_EVENT_BYTES
        )
        self._fed = 0  # bytes given to a parser
        self._message_bytes = 0
        self._began: float | None = None  # the first byte of the response being read
        self._pieces = 0
        self._give_up_at: float | None = None
        self._request = self._encode_request(target, body)

    def _encode_request(self, target: Target, body: Mapping[str, Any]) -> bytes:
        options, mode = self._options, self._reply.mode
        method = "GET" if mode is Mode.WEBSOCKET else options.method
        content = self._body.encode() if method == "POST" else b""
        queries = [target.query] if target.query else []
        fields = [("Host", target.authority), ("User-Agent", "client.py")]
        if mode is Mode.WEBSOCKET:
            fields += websocket.request_fields(self._key)
        else:
            # RFC 9110 section 12.5.3: without Accept-Encoding any coding is acceptable.
            fields += [("Accept", _MEDIA_TYPES[mode]), ("Accept-Encoding", "identity")]
            if method == "POST":
                fields.append(("Content-Type", "application/json"))
            elif body:
                queries.append(urlencode({k: _query_value(v) for k, v in body.items()}))
        own = http1.Fields(fields).without(*(name for name, _ in options.fields))
        resource = "?".join([target.path, *filter(None, ["&".join(queries)])])
        self._http.expect(method)
        raw = http1.encode_request(method, resource, [*own, *options.fields], content)
        return raw.replace(b" HTTP/1.1\r\n", f" HTTP/{options.http_version}\r\n".encode(), 1)

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
        self._fed += len(data)
        if self._fed > MAX_REPLY_BYTES:
            raise Failed(Failure.PROTOCOL, f"the reply exceeds {MAX_REPLY_BYTES} bytes")
        return data

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
        refusal = _refusal(response, reply.mode)
        if refusal:
            self._give_up_soon()
            try:
                await self._drain(self._content.extend)
            finally:  # however its content ends
                reply.fail(refusal[0], refusal[1] + self._words_of_refusal())
        elif reply.mode is Mode.SSE:
            await self._drain(self._take_stream)
            if reply.end is None:
                raise Failed(Failure.NO_END_MARKER, self._missing_end())
        else:
            await self._drain(self._content.extend)
            try:
                self._take(read_native_body(bytes(self._content)))
            except DialectError as exc:
                raise Failed(Failure.NOT_A_REPLY, str(exc)) from None

    async def _drain(self, take: Callable[[bytes], None]) -> None:
        while not isinstance(event := await self._next_event(), http1.End):
            if isinstance(event, http1.Content):
                take(event.data)
        self._reply.close = self._wire.at

    def _take_stream(self, data: bytes) -> None:
        self._content = (self._content + data)[-64:]
        for event in self._events.feed(data):
            self._take(read_native(event.type, event.data))

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
                        self._message_bytes += len(data.encode())
                        self._take(read_native("message", data))
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

    def _take(self, meaning: Meaning) -> None:
        reply = self._reply
        if meaning.text and reply.end is not None:
            raise Failed(Failure.PROTOCOL, "text after the end marker")
        reply.events.append(Event(self._wire.at, meaning.text))
        reply.usage = meaning.usage or reply.usage
        reply.finish_reason = meaning.finish_reason or reply.finish_reason
        reply.timings = meaning.timings or reply.timings
        if meaning.error is not None:
            reply.fail(Failure.IN_BAND, meaning.error)
        if meaning.text:
            self._take_piece(meaning.text)
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
        words = _error_words(self._content.decode("utf-8", "replace").strip())
        return f": {words}" if words and not words.startswith("<") else ""

    def _missing_end(self) -> str:
        if not self._events.in_event:
            return "the stream ended without [DONE]"
        line = re.split(rb"[\r\n]+", self._content.rstrip(b"\r\n"))[-1].decode("utf-8", "replace")
        return f"the stream ended inside an event: no blank line after {line!r}"

    def _count(self) -> None:
        reply, wire, http = self._reply, self._wire, self._http
        received, sent, reads = self._before
        total = wire.received - received
        reply.sent, reply.reads = wire.sent - sent, wire.reads - reads
        reply.comments = self._events.comments
        framing, payload = http.framing_bytes, http.content_bytes
        if reply.opened is not None:
            framing, payload = self._unread - self._message_bytes, self._message_bytes
        unparsed = total - http.head_bytes - framing - payload
        reply.received = ByteCount(http.head_bytes, framing, payload, unparsed)
