"""HTTP/1.1 messages: bytes to events and values to bytes, with no socket and no clock.

    POST /stream HTTP/1.1 CRLF          request line (an answer has a status line here)
    Host: example.org CRLF              field lines
    Transfer-Encoding: chunked CRLF
    CRLF                                the head ends here, the content starts
    5;x=1 CRLF                          chunk size in hexadecimal, chunk extension
    hello CRLF                          chunk data
    0 CRLF                              last chunk
    CRLF                                (trailer section,) end of the message

The hard part is framing: where a message ends. Two programs that disagree about it let one
peer's bytes be run as another's request, so whatever the grammar does not allow is refused, never
repaired. A parser is fed and asked: `feed` only appends, `next_event` takes one event out or returns
None when it needs more bytes. Sound messages before a violation are therefore never lost, a
pipelined request waits until the caller asks for it, and an error stays: every later call raises it
again. The events of one message are a head (`Request` or `Response`), any number of `Content`, `End`.

When `next_event` has returned None, what the parser still holds is one unfinished line, which
`Limits` bounds; until then it holds what the caller has fed, so a caller that does not pull must
not feed.

Covered: RFC 9112 sections 2 to 9 as far as they concern bytes, RFC 9110 sections 5 (fields), 7.2
(Host), 8.6 (Content-Length), 10.1.1 (Expect), RFC 3986 (targets, hosts). Where the RFCs leave a
choice, the strict one: CRLF alone ends a line, obs-fold is refused, a repeated Content-Length is
refused in a request (a response may repeat the same number), and so is a Content-Length beside a
Transfer-Encoding in either.

Not here: content codings (gzip) and transfer codings other than chunked, which nobody sends
unasked; HTTP/0.9 and HTTP/2; tunnels and other protocols after an upgrade, which get the unread
bytes from `take_unread`. Timeouts and answers belong to `server.py`. Read `websocket.py` next.
"""

import ipaddress
import re
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Generic, Literal, TypeVar
from urllib.parse import parse_qsl, unquote

# --- Grammar: each pattern is named for its rule and only ever used with fullmatch ---------------

# RFC 9110 section 5.6
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_QUOTED_STRING = rb'"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*"'
_BWS = rb"[ \t]*"
TOKEN = re.compile(_TOKEN)
# RFC 9110 section 5.5. OWS around the value is cut off afterwards, which keeps this linear.
FIELD_VALUE = re.compile(rb"[\t -~\x80-\xff]*")
FIELD_LINE = re.compile(rb"(%b):([\t -~\x80-\xff]*)" % _TOKEN)

# RFC 3986. The possessive `++` and `*+` keep a long refused target from being tried every way.
_PCT = rb"%[0-9A-Fa-f]{2}"
_REG_NAME = rb"(?:[A-Za-z0-9\-._~!$&'()*+,;=]++|%b)*+" % _PCT
_PATH = rb"(?:/(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/]++|%b)*+)" % _PCT
_QUERY = rb"(?:\?(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?]++|%b)*+)" % _PCT
_IP_LITERAL = rb"\[(?:([0-9A-Fa-f:.]+)|v[0-9A-Fa-f]+\.[A-Za-z0-9\-._~!$&'()*+,;=:]+)\]"
HOST = re.compile(rb"(?:%b|(?P<name>%b))(?::(?P<port>[0-9]*))?" % (_IP_LITERAL, _REG_NAME))

# RFC 9112 section 3. The method's length is bounded so that garbage is refused at once.
_METHOD_BYTES = 32
METHOD_START = re.compile(rb"%b(?: .*)?" % _TOKEN, re.DOTALL)
TARGET_END = re.compile(rb"[ \r\n]")
REQUEST_LINE = re.compile(rb"(%b) ([^ ]+) HTTP/([0-9])\.([0-9])" % _TOKEN)
ORIGIN_FORM = re.compile(rb"%b%b?" % (_PATH, _QUERY))
ABSOLUTE_FORM = re.compile(rb"(?i:https?)://([^/?]+)%b?%b?" % (_PATH, _QUERY))

# RFC 9112 section 4. A missing space before an absent reason phrase is a common fault, and harmless.
STATUS_LINE = re.compile(rb"HTTP/([0-9])\.([0-9]) ([0-9]{3})(?: ([\t -~\x80-\xff]*))?")

# RFC 9112 section 7.1; leading zeros are kept out of the group.
CHUNK = re.compile(
    rb"0*([0-9A-Fa-f]+)(?:%b;%b%b(?:%b=%b(?:%b|%b))?)*"
    % (_BWS, _BWS, _TOKEN, _BWS, _BWS, _TOKEN, _QUOTED_STRING)
)
DIGITS = re.compile(rb"[0-9]+")
BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")

# No real content is longer; a longer number is a fault or an attack on somebody's counter.
_LARGEST_CONTENT = 2**63 - 1

# These decide framing or routing, which is over when a trailer arrives (RFC 9110 section 6.5.1).
_NEVER_TRAILERS = ("content-length", "host", "transfer-encoding")

Framing = Literal["none", "length", "chunked", "close"]


class ProtocolError(Exception):
    """The peer broke the protocol or a limit; `status` is the answer, the text is safe to show."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Truncated(ProtocolError):
    """The peer closed the connection in the middle of a message (RFC 9112 section 8)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a message may cost; each is enforced while its bytes arrive."""

    target_bytes: int = 8 * 1024  # 414
    head_bytes: int = 16 * 1024  # 431: start line and field lines, with every CRLF
    field_count: int = 100  # 431: of the head, and of the trailer section
    content_bytes: int | None = 1024 * 1024  # 413; None: no limit
    chunk_line_bytes: int = 1024  # 413: one chunk size with its extensions
    chunk_excess_bytes: int = 16 * 1024  # 413: extensions and leading zeros of a whole message
    trailer_bytes: int = 8 * 1024  # 431


# A client chose whom to ask, and some good servers' heads (cookies, policies) are large.
RESPONSE_LIMITS = Limits(head_bytes=64 * 1024, content_bytes=None)


# --- Values -------------------------------------------------------------------------------------


class Fields:
    """Field lines in order, as (name, value) pairs of Latin-1 text; immutable, names in any case."""

    __slots__ = ("_pairs", "_values")

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._pairs = tuple(pairs)
        self._values: dict[str, list[str]] = {}
        for name, value in self._pairs:
            self._values.setdefault(name.lower(), []).append(value)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fields) and self._pairs == other._pairs

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return f"Fields({list(self._pairs)})"

    def get(self, name: str, default: str | None = None) -> str | None:
        """Return the value of the first line of that name."""
        return self._values.get(name.lower(), (default,))[0]

    def get_all(self, name: str) -> list[str]:
        """Return the value of every line of that name, in order."""
        return list(self._values.get(name.lower(), ()))

    def tokens(self, name: str) -> list[str]:
        """Return the members of a comma-separated list over all lines, in lower case.

        Empty members are skipped (RFC 9110 section 5.6.1.2). For lists of tokens: a comma inside a
        quoted string is taken for a separator.
        """
        members = ",".join(self._values.get(name.lower(), ())).lower().split(",")
        return [token for member in members if (token := member.strip(" \t"))]

    def without(self, *names: str) -> "Fields":
        """Return a copy that lacks the fields of these names."""
        dropped = {name.lower() for name in names}
        return Fields(pair for pair in self._pairs if pair[0].lower() not in dropped)


def _persists(version: tuple[int, int], fields: Fields) -> bool:
    """Tell whether the connection outlives the message (RFC 9112 section 9.3)."""
    options = fields.tokens("connection")
    return "close" not in options and (version >= (1, 1) or "keep-alive" in options)


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request. `target` is as received; the parser has checked its form."""

    method: str
    target: str
    fields: Fields
    version: tuple[int, int] = (1, 1)

    def _split_target(self) -> tuple[str, str, str]:
        """Return authority (absolute-form's, or ""), path and query, still percent-encoded."""
        path, _, query = self.target.partition("?")
        _, is_absolute, rest = path.partition("://")
        if path.startswith("/") or not is_absolute:
            return "", path, query
        authority, _, path = rest.partition("/")
        return authority, "/" + path, query

    @property
    def host(self) -> str:
        """The authority asked for: an absolute-form's goes before Host (RFC 9112 section 3.2.2)."""
        return self._split_target()[0] or self.fields.get("host") or ""

    @property
    def path(self) -> str:
        """The percent-decoded path; "*" for asterisk-form. ProtocolError: not UTF-8."""
        return _percent_decoded(self._split_target()[1])

    @property
    def query(self) -> list[tuple[str, str]]:
        """The pairs of the query as HTML forms write them: "+" is a space. ProtocolError: bad."""
        return parse_query(self._split_target()[2])

    @property
    def keep_alive(self) -> bool:
        """Whether the client lets the connection persist."""
        return _persists(self.version, self.fields)

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for a 100 before its content; HTTP/1.0 never does."""
        return self.version >= (1, 1) and "100-continue" in self.fields.tokens("expect")

    @property
    def expects_other(self) -> bool:
        """Whether an expectation is unknown: answer 417 (RFC 9110 section 10.1.1)."""
        return any(member != "100-continue" for member in self.fields.tokens("expect"))


@dataclass(frozen=True, slots=True)
class Response:
    """The head of a response, final or interim."""

    status: int
    reason: str
    fields: Fields
    version: tuple[int, int] = (1, 1)

    @property
    def interim(self) -> bool:
        """Whether the final response is still to come (RFC 9110 section 15.2)."""
        return 100 <= self.status < 200

    @property
    def keep_alive(self) -> bool:
        """Whether the server lets the connection persist; "close" framing ends it in any case."""
        return _persists(self.version, self.fields)


@dataclass(frozen=True, slots=True)
class Content:
    """A part of the content, without its framing, as it arrived; never empty."""

    data: bytes


@dataclass(frozen=True, slots=True)
class End:
    """The message is complete. Trailers never join the head's fields."""

    trailers: Fields = Fields()


def _percent_decoded(text: str) -> str:
    if BAD_ESCAPE.search(text):
        raise ProtocolError("bad percent-encoding in the request target")
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise ProtocolError("the request target is not UTF-8") from None


def parse_query(query: str) -> list[tuple[str, str]]:
    """Decode application/x-www-form-urlencoded text; ProtocolError on bad escapes or UTF-8."""
    if BAD_ESCAPE.search(query):
        raise ProtocolError("bad percent-encoding in the query")
    try:
        return parse_qsl(query, keep_blank_values=True, errors="strict")
    except UnicodeDecodeError:
        raise ProtocolError("the query is not UTF-8") from None


# --- Checks of a head ---------------------------------------------------------------------------


def _version(major: bytes, minor: bytes) -> tuple[int, int]:
    """Return the version to serve; a later 1.x is served as 1.1 (RFC 9110 section 2.5)."""
    if major != b"1":
        raise ProtocolError("HTTP version not supported", 505)
    return (1, 0) if minor == b"0" else (1, 1)


def _is_host(text: bytes, *, named: bool = False, port: bool = False) -> bool:
    """Match uri-host [ ":" port ] (RFC 9110 section 7.2); `named` and `port` refuse empty ones."""
    match = HOST.fullmatch(text)
    if match is None or (named and match["name"] == b""):
        return False
    if port and not (match["port"] and len(match["port"]) <= 5 and 0 < int(match["port"]) < 65536):
        return False
    if match[1] is None:
        return True
    try:
        ipaddress.IPv6Address(match[1].decode())
    except ValueError:
        return False
    return True


def _check_target(method: bytes, target: bytes) -> None:
    """Check the form of the request target (RFC 9112 section 3.2)."""
    if method == b"CONNECT":
        sound = _is_host(target, named=True, port=True)  # RFC 9110 section 9.3.6
    elif target == b"*":
        sound = method == b"OPTIONS"
    elif absolute := ABSOLUTE_FORM.fullmatch(target):
        sound = _is_host(absolute[1], named=True)  # RFC 9110 section 4.2.1
    else:
        sound = ORIGIN_FORM.fullmatch(target) is not None
    if not sound:
        raise ProtocolError("invalid request target (percent-encode what is no URI character)")


def _check_host(version: tuple[int, int], fields: Fields) -> None:
    """RFC 9112 section 3.2: one Host in HTTP/1.1, whatever the target's form, and a valid one."""
    hosts = fields.get_all("host")
    if len(hosts) > 1 or (not hosts and version >= (1, 1)):
        raise ProtocolError("a request needs exactly one Host")
    if hosts and not _is_host(hosts[0].encode("latin-1")):
        raise ProtocolError("invalid Host")


def _check_transfer_encoding(version: tuple[int, int], fields: Fields) -> None:
    """RFC 9112 section 6.1 and section 6.3, rules 3 and 4: chunked, alone, or refused."""
    codings = fields.tokens("transfer-encoding")
    if "content-length" in fields:
        raise ProtocolError("both Transfer-Encoding and Content-Length")
    if version < (1, 1):
        raise ProtocolError("Transfer-Encoding in HTTP/1.0")
    if codings[-1:] != ["chunked"] or codings.count("chunked") > 1:
        raise ProtocolError("chunked is not the final transfer coding")
    if len(codings) > 1:
        raise ProtocolError("transfer coding not implemented", 501)


def _content_length(values: Collection[str]) -> int:
    """RFC 9112 section 6.3, rule 5: one number, in ASCII digits."""
    digits = "".join(values).encode("latin-1")
    if len(values) != 1 or not DIGITS.fullmatch(digits):
        raise ProtocolError("invalid Content-Length")
    # Twenty digits pass every limit; int() of thousands would be slow, or raise.
    return int(digits.lstrip(b"0")[:20] or b"0")


# --- Parsers ------------------------------------------------------------------------------------


class State(Enum):
    """Where in a message the next byte falls, in the grammar's order."""

    START_LINE = auto()
    FIELD_LINES = auto()
    CONTENT = auto()
    CONTENT_UNTIL_CLOSE = auto()
    CHUNK_SIZE = auto()
    CHUNK_DATA = auto()
    CHUNK_DATA_END = auto()
    TRAILER_SECTION = auto()
    END = auto()
    SWITCHED = auto()


Head = TypeVar("Head", Request, Response)


class Parser(ABC, Generic[Head]):
    """What requests and responses share: one short method a state.

    `head_bytes`, `framing_bytes` (chunk lines, trailers) and `content_bytes` count what has been
    consumed since the beginning: their sum and the unread bytes are all that was fed.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.framing: Framing = "none"  # of the current or last message
        self.head_bytes = 0
        self.framing_bytes = 0
        self.content_bytes = 0
        self._buffer = bytearray()
        self._searched = 0  # no line end before this index
        self._at_eof = False
        self._error: ProtocolError | None = None
        self._begin_message()

    def _begin_message(self) -> None:
        self._state = State.START_LINE
        self._pairs: list[tuple[str, str]] = []
        self._room = self.limits.head_bytes  # for the head, later for the trailer section
        self._excess_room = self.limits.chunk_excess_bytes
        limit = self.limits.content_bytes
        self._content_room = _LARGEST_CONTENT if limit is None else limit
        self._remaining = 0  # of the content or of the chunk

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Append what was read; nothing is looked at before `next_event`."""
        self._buffer += data

    def feed_eof(self) -> None:
        """Note that the peer will send no more; a message cut short then raises Truncated."""
        self._at_eof = True

    def take_unread(self) -> bytes:
        """Take the bytes that no event has used, for the protocol after an upgrade."""
        unread = bytes(self._buffer)
        self._buffer.clear()
        self._searched = 0
        return unread

    @property
    def idle(self) -> bool:
        """Whether the parser is between messages and holds not one byte of the next one."""
        return self._state is State.START_LINE and not self._buffer

    def next_event(self) -> Head | Content | End | None:
        """Take the next event out, or return None when more bytes are needed.

        A head is given as soon as it is sound, even when its content is then refused, so that the
        caller knows what the refusal answers. ProtocolError, raised again by every later call.
        """
        if self._error is not None:
            raise self._error
        try:
            while True:
                state = self._state
                if (event := self._step(state)) is not None:
                    return event
                if self._state is state:  # neither moved nor gave an event: it needs bytes
                    break
            if self._at_eof and not self.idle and state is not State.SWITCHED:
                raise Truncated("connection closed in the middle of a message")
        except ProtocolError as error:
            self._error = error
            raise
        return None

    def _step(self, state: State) -> Head | Content | End | None:
        match state:
            case State.START_LINE:
                return self._start_line()
            case State.FIELD_LINES:
                return self._field_lines()
            case State.CONTENT:
                return self._content()
            case State.CHUNK_SIZE:
                return self._chunk_size()
            case State.CHUNK_DATA:
                return self._chunk_data()
            case State.CHUNK_DATA_END:
                return self._chunk_data_end()
            case State.TRAILER_SECTION:
                return self._trailer_section()
            case State.CONTENT_UNTIL_CLOSE:
                return self._content_until_close()
            case State.END:
                return self._end()
            case State.SWITCHED:
                return None

    @abstractmethod
    def _start_line(self) -> None:
        """Consume the request line or status line."""

    @abstractmethod
    def _head(self, fields: Fields) -> Head:
        """Check the head as a whole, decide the framing and the next state (section 6.3)."""

    def _field_lines(self) -> Head | None:
        """*( field-line CRLF ) CRLF, RFC 9112 section 5."""
        while (line := self._head_line()) is not None:
            if not line:
                return self._head(Fields(self._pairs))
            self._add_field(line)
        return None

    def _content(self) -> Content | None:
        """Content of a known length, RFC 9112 section 6.2."""
        if self._remaining > self._content_room:
            raise ProtocolError("content too large", 413)
        if not self._remaining:
            self._state = State.END
            return None
        return self._take_content(self._remaining)

    def _content_until_close(self) -> Content | None:
        """Content that the end of the connection ends, RFC 9112 section 6.3, rule 8."""
        if self._buffer and not self._content_room:
            raise ProtocolError("content too large", 413)
        if self._at_eof and not self._buffer:
            self._state = State.END
            return None
        content = self._take_content(self._content_room)
        self._content_room -= len(content.data) if content else 0
        return content

    def _chunk_size(self) -> None:
        """chunk-size [ chunk-ext ] CRLF, RFC 9112 section 7.1; extensions are checked and dropped."""
        line = self._line(self.limits.chunk_line_bytes, "chunk line too long", 413)
        if line is None:
            return
        self.framing_bytes += len(line) + 2
        chunk = CHUNK.fullmatch(line)
        if chunk is None:
            raise ProtocolError("invalid chunk size or extension")
        self._excess_room -= len(line) - len(chunk[1])
        if self._excess_room < 0:
            raise ProtocolError("too many bytes of chunk extensions", 413)
        self._remaining = int(chunk[1], 16)
        if self._remaining > self._content_room:
            raise ProtocolError("content too large", 413)
        self._content_room -= self._remaining
        if self._remaining:
            self._state = State.CHUNK_DATA
        else:
            self._pairs = []
            self._room = self.limits.trailer_bytes
            self._state = State.TRAILER_SECTION

    def _chunk_data(self) -> Content | None:
        """What has arrived of the chunk: content is passed on, not gathered."""
        if not self._remaining:
            self._state = State.CHUNK_DATA_END
            return None
        return self._take_content(self._remaining)

    def _chunk_data_end(self) -> None:
        """The CRLF after chunk-data: looked at, not skipped."""
        if self._buffer[:2] == b"\r\n":
            del self._buffer[:2]
            self.framing_bytes += 2
            self._state = State.CHUNK_SIZE
        elif self._buffer and self._buffer != b"\r":
            raise ProtocolError("chunk data not followed by CRLF")

    def _trailer_section(self) -> None:
        """*( field-line CRLF ) CRLF, RFC 9112 section 7.1.2."""
        while (line := self._line(self._room, "trailer section too large", 431)) is not None:
            self._room -= len(line) + 2
            self.framing_bytes += len(line) + 2
            if not line:
                self._state = State.END
                return
            self._add_field(line)

    def _end(self) -> End:
        trailers = Fields(self._pairs).without(*_NEVER_TRAILERS) if self._pairs else Fields()
        self._begin_message()
        return End(trailers)

    def _line(self, room: int, too_long: str, status: int) -> bytes | None:
        """Take one line, without its CRLF; None before its end has arrived."""
        buffer = self._buffer
        end = buffer.find(b"\n", self._searched)
        if (end if end >= 0 else len(buffer) - 1) >= room:
            raise ProtocolError(too_long, status)
        if end < 0:
            self._searched = len(buffer)
            return None
        if buffer[end - 1 : end] != b"\r":
            raise ProtocolError("line not ended by CRLF")  # RFC 9112 section 2.2
        line = bytes(buffer[: end - 1])
        del buffer[: end + 1]
        self._searched = 0
        return line

    def _head_line(self) -> bytes | None:
        line = self._line(self._room, "head too large", 431)
        if line is not None:
            self._room -= len(line) + 2
            self.head_bytes += len(line) + 2
        return line

    def _add_field(self, line: bytes) -> None:
        """field-line = field-name ":" OWS field-value OWS; an obs-fold has no name, so it fails."""
        field = FIELD_LINE.fullmatch(line)
        if field is None:
            raise ProtocolError("invalid field line")
        if len(self._pairs) >= self.limits.field_count:
            raise ProtocolError("too many fields", 431)
        name, value = field.groups()
        self._pairs.append((name.decode("latin-1"), value.strip(b" \t").decode("latin-1")))

    def _take_content(self, size: int) -> Content | None:
        data = bytes(self._buffer[:size])
        if not data:
            return None
        del self._buffer[:size]
        self._remaining -= len(data)
        self.content_bytes += len(data)
        return Content(data)


class RequestParser(Parser[Request]):
    """The server's side: requests of one connection, one after the other."""

    def __init__(self, limits: Limits = Limits()) -> None:
        super().__init__(limits)

    def _start_line(self) -> None:
        """request-line = method SP request-target SP HTTP-version, RFC 9112 section 3."""
        self._skip_empty_lines()
        self._check_start()
        line = self._head_line()
        if line is None:
            return
        match = REQUEST_LINE.fullmatch(line)
        if match is None:
            raise ProtocolError("invalid request line")
        method, target, major, minor = match.groups()
        self._version = _version(major, minor)
        _check_target(method, target)
        self._method, self._target = method.decode("ascii"), target.decode("ascii")
        self._state = State.FIELD_LINES

    def _skip_empty_lines(self) -> None:
        """RFC 9112 section 2.2: some clients send a CRLF too many; they count as head."""
        while self._buffer[:2] == b"\r\n":
            self._head_line()

    def _check_start(self) -> None:
        """Refuse what cannot become a request line before its end arrives."""
        buffer = self._buffer
        if not buffer or buffer == b"\r":
            return
        if not METHOD_START.fullmatch(buffer, 0, _METHOD_BYTES + 1):
            raise ProtocolError("invalid method")
        space = buffer.find(b" ", 0, _METHOD_BYTES + 1)
        if space < 0 and len(buffer) > _METHOD_BYTES:
            raise ProtocolError("method not implemented", 501)  # RFC 9112 section 3
        longest = space + 1 + self.limits.target_bytes
        if len(buffer) > longest and not TARGET_END.search(buffer, space + 1, longest + 1):
            raise ProtocolError("request target too long", 414)

    def _head(self, fields: Fields) -> Request:
        _check_host(self._version, fields)
        if "transfer-encoding" in fields:
            _check_transfer_encoding(self._version, fields)
            self.framing, self._state = "chunked", State.CHUNK_SIZE
        elif "content-length" in fields:
            self._remaining = _content_length(fields.get_all("content-length"))
            self.framing, self._state = "length", State.CONTENT
        else:
            self.framing, self._state = "none", State.END
        self._pairs = []
        return Request(self._method, self._target, fields, self._version)


class ResponseParser(Parser[Response]):
    """The client's side. Its errors carry 502, what a gateway answers for a bad server."""

    def __init__(self, limits: Limits = RESPONSE_LIMITS) -> None:
        super().__init__(limits)
        self._expected: deque[str] = deque()

    def expect(self, method: str) -> None:
        """Announce a request that was sent: its method decides how its response is framed."""
        self._expected.append(method)

    @property
    def idle(self) -> bool:
        """Whether no response is under way and none is owed."""
        return super().idle and not self._expected

    def next_event(self) -> Response | Content | End | None:
        """See Parser.next_event. Interim responses come without Content and End."""
        try:
            return super().next_event()
        except ProtocolError as error:
            error.status = 502
            raise

    def _start_line(self) -> None:
        """status-line = HTTP-version SP status-code SP [ reason-phrase ], RFC 9112 section 4."""
        buffer = self._buffer
        if buffer and not self._expected:
            raise ProtocolError("response without a request")  # RFC 9112 section 9.2
        if buffer[:5] != b"HTTP/"[: len(buffer)]:
            raise ProtocolError("not an HTTP response")
        line = self._head_line()
        if line is None:
            return
        match = STATUS_LINE.fullmatch(line)
        if match is None:
            raise ProtocolError("invalid status line")
        major, minor, status, reason = match.groups()
        self._version = _version(major, minor)
        self._status, self._reason = int(status), (reason or b"").decode("latin-1")
        self._state = State.FIELD_LINES

    def _head(self, fields: Fields) -> Response:
        response = Response(self._status, self._reason, fields, self._version)
        if response.interim and response.status != 101:
            self._begin_message()
            return response
        method = self._expected.popleft()
        if response.status == 101 or (method == "CONNECT" and 200 <= response.status < 300):
            self.framing, self._state = "none", State.SWITCHED
        elif method == "HEAD" or response.status in (204, 304):
            self.framing, self._state = "none", State.END
        elif "transfer-encoding" in fields:
            _check_transfer_encoding(self._version, fields)
            self.framing, self._state = "chunked", State.CHUNK_SIZE
        elif "content-length" in fields:
            self._remaining = _content_length(set(fields.tokens("content-length")))
            self.framing, self._state = "length", State.CONTENT
        else:
            self.framing, self._state = "close", State.CONTENT_UNTIL_CLOSE
        self._pairs = []
        return response


# --- Encoders: our own mistakes are ValueError, so nobody can inject a field ----------------------

LAST_CHUNK = b"0\r\n\r\n"

# The phrases of RFC 9110, whatever the version of Python says.
_REASONS = {status.value: status.phrase for status in HTTPStatus} | {
    413: "Content Too Large",
    414: "URI Too Long",
    416: "Range Not Satisfiable",
    422: "Unprocessable Content",
}


def _encode_fields(fields: Iterable[tuple[str, str]]) -> bytes:
    lines = []
    framing = 0
    for name, value in fields:
        raw_name, raw_value = name.encode("latin-1"), value.encode("latin-1")
        if not TOKEN.fullmatch(raw_name) or not FIELD_VALUE.fullmatch(raw_value):
            raise ValueError(f"invalid field {name!r}: {value!r}")
        framing += name.lower() in ("content-length", "transfer-encoding")
        lines.append(b"%b: %b\r\n" % (raw_name, raw_value))
    if framing > 1:
        raise ValueError("more than one field says how long the content is")
    return b"".join(lines) + b"\r\n"


def _with_length(fields: Iterable[tuple[str, str]], content: bytes) -> list[tuple[str, str]]:
    """Add Content-Length where the caller has not framed the content."""
    pairs = list(fields)
    given = Fields(pairs)
    if "transfer-encoding" not in given and "content-length" not in given:
        return [*pairs, ("Content-Length", str(len(content)))]
    if content and given.get("content-length") != str(len(content)):
        raise ValueError("content does not agree with its framing fields")
    return pairs


def encode_request(
    method: str, target: str, fields: Iterable[tuple[str, str]], content: bytes = b""
) -> bytes:
    """Return a request; Content-Length is added where content or method calls for it.

    With a Content-Length or Transfer-Encoding of the caller's and no content, it is the head alone.
    """
    raw_method, raw_target = method.encode("ascii"), target.encode("ascii")
    if not TOKEN.fullmatch(raw_method) or not re.fullmatch(rb"[!-~]+", raw_target):
        raise ValueError(f"invalid request line: {method!r} {target!r}")
    if content or method in ("POST", "PUT", "PATCH"):  # RFC 9110 section 8.6
        fields = _with_length(fields, content)
    return b"%b %b HTTP/1.1\r\n" % (raw_method, raw_target) + _encode_fields(fields) + content


def encode_head(
    status: int,
    fields: Iterable[tuple[str, str]],
    reason: str | None = None,
    version: tuple[int, int] = (1, 1),
) -> bytes:
    """Return the head of a response; its content is the caller's to frame and send."""
    phrase = (_REASONS.get(status, "") if reason is None else reason).encode("latin-1")
    if not 100 <= status <= 999 or not FIELD_VALUE.fullmatch(phrase):
        raise ValueError(f"invalid status line: {status} {reason!r}")
    return b"HTTP/%d.%d %d %b\r\n" % (*version, status, phrase) + _encode_fields(fields)


def encode_response(
    status: int,
    fields: Iterable[tuple[str, str]],
    content: bytes = b"",
    *,
    head_only: bool = False,
) -> bytes:
    """Return a whole response with its Content-Length; `head_only` leaves the content out (HEAD)."""
    if status < 200 or status in (204, 304):  # RFC 9112 section 6.3, rule 1
        if content:
            raise ValueError(f"a {status} has no content")
        return encode_head(status, fields)
    head = encode_head(status, _with_length(fields, content))
    return head if head_only else head + content


def encode_chunk(data: bytes) -> bytes:
    """Return one chunk; nothing for no data, since an empty chunk would end the content."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def format_date(seconds: float) -> str:
    """Return Unix time as an IMF-fixdate (RFC 9110 section 5.6.7), in English in every locale."""
    t = time.gmtime(seconds)
    day = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")[t.tm_wday]
    months = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
    clock = f"{t.tm_hour:02}:{t.tm_min:02}:{t.tm_sec:02}"
    return f"{day}, {t.tm_mday:02} {months[t.tm_mon - 1]} {t.tm_year:04} {clock} GMT"
