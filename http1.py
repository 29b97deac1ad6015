"""HTTP/1.1 messages: bytes to events and values to bytes, with no socket and no clock.

    POST /stream HTTP/1.1 CRLF          request line (a response has a status line here)
    Host: example.org CRLF              field lines
    Transfer-Encoding: chunked CRLF
    CRLF                                the head ends here, the content starts
    5;x=1 CRLF                          chunk size in hexadecimal, chunk extension
    hello CRLF                          chunk data
    0 CRLF                              last chunk
    CRLF                                (trailer section,) end of the message

The hard part is framing: where a message ends. Two programs that disagree about it let one peer's
bytes be run as another's request, so what the grammar does not allow is refused, never repaired.

A parser is fed and asked: `feed` only appends, `next_event` takes one event out or returns None
when it needs more bytes. So sound messages before a violation are never lost, a pipelined request
waits until it is asked for, and an error stays: every later call raises it again. The events of
a message are its head (`Request` or `Response`), any number of `Content`, and `End`. When
`next_event` returns None, the parser holds less than one line or field section, which `Limits`
bounds; before that it holds what it was fed, so who does not pull should not read on.

Covered: RFC 9112 sections 2 to 9 where they concern bytes; RFC 9110 sections 5 (fields), 7.2
(Host), 8.6 (Content-Length), 10.1.1 (Expect); RFC 3986 (targets, hosts). Where the RFCs leave a
choice, the strict one: CRLF alone ends a line; obs-fold, characters outside a URI in the target,
and a Content-Length that is repeated or beside a Transfer-Encoding are refused. (A response may
repeat the same Content-Length.)

Not here: content codings, and transfer codings other than chunked, which nobody sends unasked;
HTTP/0.9 and HTTP/2; what follows an upgrade, which gets the bytes of `take_unread`. Timeouts and
answers belong to `connection.py`. Read next: `websocket.py`.
"""

import ipaddress
import re
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum, auto
from http import HTTPStatus
from typing import Generic, Literal, TypeVar
from urllib.parse import unquote

# Grammar: patterns named for their rules, matched in full (*_END are searched for)
# The possessive `++` and `*+` never give back what they took: what is refused costs linear time.

# RFC 9110 section 5.6.
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_QUOTED_STRING = rb'"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*+"'
_BWS = rb"[ \t]*+"
TOKEN = re.compile(_TOKEN)
# RFC 9110 section 5.5: field-vchar, SP and HTAB. The white space around a value is cut off later.
_FIELD_VALUE = rb"[\t -~\x80-\xff]*+"
FIELD_VALUE = re.compile(_FIELD_VALUE)
FIELD_LINES = re.compile(rb"(?:%b:%b\r\n)*+" % (_TOKEN, _FIELD_VALUE))
SECTION_END = re.compile(rb"\n\r?\n")  # finds a wrong line end too, so that it is refused at once

# RFC 3986.
_PCT_ENCODED = rb"%[0-9A-Fa-f]{2}"
_REG_NAME = rb"(?:[A-Za-z0-9\-._~!$&'()*+,;=]++|%b)*+" % _PCT_ENCODED
_IP_LITERAL = rb"\[(?:(?P<v6>[0-9A-Fa-f:.]+)|v[0-9A-Fa-f]+\.[A-Za-z0-9\-._~!$&'()*+,;=:]+)\]"
_PATH = rb"(?:/(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/]++|%b)*+)" % _PCT_ENCODED
_QUERY = rb"(?:\?(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?]++|%b)*+)" % _PCT_ENCODED
HOST = re.compile(rb"(?P<host>%b|%b)(?::(?P<port>[0-9]*))?" % (_IP_LITERAL, _REG_NAME))

# RFC 9112 sections 3 and 4. The method is bounded so that garbage is refused before its end.
_METHOD_BYTES = 32
REQUEST_START = re.compile(rb"(?:%b(?: .*)?|\r)?" % _TOKEN, re.DOTALL)
_HTTP_VERSION = rb"HTTP/(?P<major>[0-9])\.(?P<minor>[0-9])"
REQUEST_LINE = re.compile(rb"(?P<method>%b) (?P<target>[^ ]+) %b" % (_TOKEN, _HTTP_VERSION))
TARGET_END = re.compile(rb"[ \r\n]")
ORIGIN_FORM = re.compile(rb"%b%b?" % (_PATH, _QUERY))
ABSOLUTE_FORM = re.compile(rb"(?i:https?)://([^/?]+)%b?%b?" % (_PATH, _QUERY))
# Many servers leave out the space before an empty reason phrase, which harms nobody.
STATUS_LINE = re.compile(
    rb"%b (?P<status>[0-9]{3})(?: (?P<reason>%b))?" % (_HTTP_VERSION, _FIELD_VALUE)
)

# RFC 9112 section 7.1.
_CHUNK_EXT = rb"%b;%b%b(?:%b=%b(?:%b|%b))?" % (
    *(_BWS, _BWS, _TOKEN),
    *(_BWS, _BWS, _TOKEN, _QUOTED_STRING),
)
CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]++)(?:%b)*+" % _CHUNK_EXT)
DIGITS = re.compile(rb"[0-9]+")
BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")

_LARGEST_CONTENT = 2**63 - 1  # what counters elsewhere can hold; no sound message is longer

Framing = Literal["none", "length", "chunked", "close"]
Pairs = Iterable[tuple[str, str]]  # of field names and values


class ProtocolError(Exception):
    """The peer broke the protocol or a limit; `status` is the answer, the text is safe to show."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Truncated(ProtocolError):
    """The peer closed the connection in the middle of a message (RFC 9112 section 8)."""


# Values


@dataclass(frozen=True, slots=True)
class Limits:
    """What one message may cost; each limit acts while the bytes arrive."""

    target_bytes: int = 8 * 1024  # 414
    head_bytes: int = 16 * 1024  # 431; the trailer section may have as much again
    field_count: int = 100  # 431; the same
    content_bytes: int | None = 1024 * 1024  # 413; None: no limit
    chunk_line_bytes: int = 1024  # 413; a chunk size with its extensions
    chunk_excess_bytes: int = 16 * 1024  # 413; extensions and leading zeros of all its chunks


class Fields:
    """Field lines in order: (name, value) pairs of Latin-1 text, looked up in any case."""

    __slots__ = ("_pairs", "_values")

    def __init__(self, pairs: Pairs = ()) -> None:
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
        """Return the values of all lines of that name, in order."""
        return list(self._values.get(name.lower(), ()))

    def tokens(self, name: str) -> list[str]:
        """Return the members of a comma-separated list of tokens over all lines, in lower case.

        Empty members are skipped (RFC 9110 section 5.6.1.2). Quoted strings are not understood.
        """
        members = ",".join(self.get_all(name)).lower().split(",")
        return [token for member in members if (token := member.strip(" \t"))]

    def without(self, *names: str) -> "Fields":
        """Return a copy that lacks the fields of these names."""
        dropped = {name.lower() for name in names}
        return Fields(pair for pair in self._pairs if pair[0].lower() not in dropped)


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request. The target is as received; a parser has checked its form."""

    method: str
    target: str
    fields: Fields
    version: tuple[int, int] = (1, 1)

    def _split_target(self) -> tuple[str, str, str]:
        """Return authority (absolute-form's, or ""), path and query, still percent-encoded."""
        path, _, query = self.target.partition("?")
        if path.startswith("/") or "://" not in path:
            return "", path, query
        authority, _, path = path.partition("://")[2].partition("/")
        return authority, "/" + path, query

    @property
    def host(self) -> str:
        """The authority asked for: an absolute-form's goes before Host (RFC 9112 section 3.2.2)."""
        return self._split_target()[0] or self.fields.get("host") or ""

    @property
    def path(self) -> str:
        """The percent-decoded path, or "*"; ProtocolError if it is not UTF-8."""
        return _percent_decoded(self._split_target()[1])

    @property
    def query(self) -> list[tuple[str, str]]:
        """The query's pairs as forms write them, "+" for a space; ProtocolError if not UTF-8."""
        parts = self._split_target()[2].replace("+", " ").split("&")
        pairs = (part.partition("=") for part in parts if part)
        return [(_percent_decoded(name), _percent_decoded(value)) for name, _, value in pairs]

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may persist."""
        return _persists(self.version, self.fields)

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for a 100 before it sends content; in HTTP/1.0 never."""
        return self.version >= (1, 1) and "100-continue" in self.fields.tokens("expect")

    @property
    def expects_other(self) -> bool:
        """Whether there is an expectation to answer with 417 (RFC 9110 section 10.1.1)."""
        return any(member != "100-continue" for member in self.fields.tokens("expect"))


@dataclass(frozen=True, slots=True)
class Response:
    """The head of a response, interim or final."""

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
        """Whether the connection may persist, if the parser's `framing` is not "close"."""
        return _persists(self.version, self.fields)


@dataclass(frozen=True, slots=True)
class Content:
    """A part of the content as it arrived, free of its framing, never empty."""

    data: bytes


@dataclass(frozen=True, slots=True)
class End:
    """The message is complete.

    Its trailers are kept apart from the head's fields, and frame nothing (RFC 9110 section 6.5.1).
    """

    trailers: Fields = field(default_factory=Fields)


def _percent_decoded(text: str) -> str:
    if BAD_ESCAPE.search(text):
        raise ProtocolError("bad percent-encoding in the request target")
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise ProtocolError("the request target is not UTF-8") from None


def _persists(version: tuple[int, int], fields: Fields) -> bool:
    """RFC 9112 section 9.3."""
    options = fields.tokens("connection")
    return "close" not in options and (version >= (1, 1) or "keep-alive" in options)


# Checks of a head


def _parse_host(text: bytes) -> tuple[bytes, bytes] | None:
    """Return uri-host and port of uri-host [ ":" port ], RFC 9110 section 7.2; None if invalid."""
    match = HOST.fullmatch(text)
    if match is None:
        return None
    if match["v6"] is not None:
        try:
            ipaddress.IPv6Address(match["v6"].decode("ascii"))
        except ValueError:
            return None
    return match["host"], match["port"] or b""


def _check_target(method: bytes, target: bytes) -> None:
    """The four forms of RFC 9112 section 3.2."""
    if method == b"CONNECT":  # RFC 9110 section 9.3.6: an empty or invalid port is refused
        host, port = _parse_host(target) or (b"", b"")
        sound = host != b"" and len(port) <= 5 and 0 < int(port or b"0") < 65536
    elif target == b"*":
        sound = method == b"OPTIONS"
    elif absolute := ABSOLUTE_FORM.fullmatch(target):
        host, _ = _parse_host(absolute[1]) or (b"", b"")
        sound = host != b""  # RFC 9110 section 4.2.1
    else:
        sound = ORIGIN_FORM.fullmatch(target) is not None
    if not sound:
        raise ProtocolError("invalid request target: only URI characters, others percent-encoded")


def _check_host(version: tuple[int, int], fields: Fields) -> None:
    """RFC 9112 section 3.2: one Host in HTTP/1.1, beside an absolute-form too, and valid."""
    hosts = fields.get_all("host")
    if len(hosts) > 1 or (not hosts and version >= (1, 1)):
        raise ProtocolError("a request needs exactly one Host")
    if hosts and _parse_host(hosts[0].encode("latin-1")) is None:
        raise ProtocolError("invalid Host")


def _check_transfer_encoding(version: tuple[int, int], fields: Fields) -> None:
    """RFC 9112 section 6.1 and section 6.3, rules 3 and 4."""
    codings = fields.tokens("transfer-encoding")
    if "content-length" in fields:
        raise ProtocolError("both Transfer-Encoding and Content-Length")
    if version < (1, 1):
        raise ProtocolError("Transfer-Encoding in HTTP/1.0")
    if "chunked" not in codings[-1:] or codings.count("chunked") > 1:
        raise ProtocolError("chunked is not the final transfer coding")
    if len(codings) > 1:
        raise ProtocolError("transfer coding not implemented", 501)


def _parse_content_length(values: Collection[str]) -> int:
    """RFC 9112 section 6.3, rule 5."""
    digits = "".join(values).encode("latin-1")
    if len(values) != 1 or not DIGITS.fullmatch(digits):
        raise ProtocolError("invalid Content-Length")
    # The first twenty digits pass every limit; int() is slow on thousands and may raise.
    return int(digits.lstrip(b"0")[:20] or b"0")


# Parsers


class State(StrEnum):
    """What the next byte belongs to, in the grammar's order; each has the method that reads it."""

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
    """What requests and responses share.

    Every byte consumed since the start is counted in one of `head_bytes`, `framing_bytes` (chunk
    lines, trailers) and `content_bytes`. `framing` is that of the current or last message.
    """

    default_limits = Limits()
    _error_status: int | None = None  # stands for every error's own, if set

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or self.default_limits
        self.framing: Framing = "none"
        self.head_bytes = self.framing_bytes = self.content_bytes = 0
        self._buffer = bytearray()
        self._version = (1, 1)
        self._searched = 0  # the end being looked for does not start before this index
        self._at_eof = False
        self._error: ProtocolError | None = None
        self._begin_message()

    def _begin_message(self) -> None:
        limits = self.limits
        self._state = State.START_LINE
        self._head_room = limits.head_bytes
        limit = limits.content_bytes
        self._content_room = _LARGEST_CONTENT if limit is None else limit
        self._excess_room = limits.chunk_excess_bytes
        # Bytes of the content or of the chunk still to come; until the close, how many may come.
        self._remaining = 0
        self._trailers = Fields()

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Append what was read; `next_event` looks at it."""
        self._buffer += data

    def feed_eof(self) -> None:
        """Note that the peer will send no more."""
        self._at_eof = True

    def take_unread(self) -> bytes:
        """Take out the bytes that belong to no event, for the protocol after an upgrade."""
        unread = bytes(self._buffer)
        self._buffer.clear()
        self._searched = 0
        return unread

    @property
    def idle(self) -> bool:
        """Whether this is between two messages and not one byte of the next is here."""
        return self._state is State.START_LINE and not self._buffer

    def next_event(self) -> Head | Content | End | None:
        """Return the next event, or None when more bytes are needed or, at the end, none is left.

        A sound head is returned even when its content is refused by the call after that, so that
        the caller knows what the refusal answers. Raises ProtocolError, and Truncated at the end.
        """
        if self._error is not None:
            raise self._error
        try:
            return self._advance()
        except ProtocolError as error:
            error.status = self._error_status or error.status
            self._error = error
            raise

    def _advance(self) -> Head | Content | End | None:
        while True:
            state = self._state
            event: Head | Content | End | None = getattr(self, f"_{state}")()
            if event is not None:
                return event
            if self._state is state:  # neither an event nor another state: it needs bytes
                break
        if self._at_eof and not self.idle and state is not State.SWITCHED:
            raise Truncated("connection closed in the middle of a message")
        return None

    @abstractmethod
    def _start_line(self) -> None:
        """Read the request line or status line."""

    @abstractmethod
    def _head(self, fields: Fields) -> Head:
        """Check the fields and decide the framing (RFC 9112 section 6.3)."""

    def _is_framed(self, fields: Fields, lengths: Collection[str]) -> bool:
        """RFC 9112 section 6.3, rules 3 to 6: whether the fields tell where the content ends."""
        if "transfer-encoding" in fields:
            _check_transfer_encoding(self._version, fields)
            self.framing, self._state = "chunked", State.CHUNK_SIZE
        elif "content-length" in fields:
            self._remaining = _parse_content_length(lengths)
            self.framing, self._state = "length", State.CONTENT
        else:
            return False
        return True

    def _field_lines(self) -> Head | None:
        before = len(self._buffer)
        fields = self._field_section()
        self.head_bytes += before - len(self._buffer)
        return None if fields is None else self._head(fields)

    def _content(self) -> Content | None:
        """RFC 9112 section 6.2."""
        if self._remaining > self._content_room:
            raise ProtocolError("content too large", 413)
        content = self._take_content()
        if not self._remaining:
            self._state = State.END
        return content

    def _content_until_close(self) -> Content | None:
        """RFC 9112 section 6.3, rule 8."""
        if self._buffer and not self._remaining:
            raise ProtocolError("content too large", 413)
        if self._at_eof and not self._buffer:
            self._state = State.END
        return self._take_content()

    def _chunk_size(self) -> None:
        """chunk-size [ chunk-ext ] CRLF, RFC 9112 section 7.1. Extensions are checked, not kept."""
        line = self._line(self.limits.chunk_line_bytes, "chunk size line too long", 413)
        if line is None:
            return
        self.framing_bytes += len(line) + 2
        match = CHUNK_SIZE.fullmatch(line)
        if match is None:
            raise ProtocolError("invalid chunk size or chunk extension")
        self._remaining = int(match[1], 16)
        self._excess_room -= len(line) - len(f"{self._remaining:x}")
        if self._excess_room < 0:
            raise ProtocolError("too many bytes of chunk extensions", 413)
        if self._remaining > self._content_room:
            raise ProtocolError("content too large", 413)
        self._content_room -= self._remaining
        self._state = State.CHUNK_DATA if self._remaining else State.TRAILER_SECTION

    def _chunk_data(self) -> Content | None:
        """Give out what has arrived of the chunk: content is passed on, not gathered."""
        content = self._take_content()
        if not self._remaining:
            self._state = State.CHUNK_DATA_END
        return content

    def _chunk_data_end(self) -> None:
        """The CRLF after chunk-data is looked at, not skipped."""
        if self._buffer[:2] == b"\r\n":
            del self._buffer[:2]
            self.framing_bytes += 2
            self._state = State.CHUNK_SIZE
        elif self._buffer and self._buffer != b"\r":
            raise ProtocolError("no CRLF after the chunk data")

    def _trailer_section(self) -> None:
        """RFC 9112 section 7.1.2."""
        before = len(self._buffer)
        self._head_room = self.limits.head_bytes
        trailers = self._field_section()
        self.framing_bytes += before - len(self._buffer)
        if trailers is not None:
            self._trailers, self._state = trailers, State.END

    def _end(self) -> End:
        end = End(self._trailers)
        self._begin_message()
        return end

    def _switched(self) -> None:
        """No longer HTTP: nothing is read."""

    def _line(self, room: int, too_long: str, status: int) -> bytes | None:
        """Take one line without its CRLF, or return None before its end is here."""
        buffer = self._buffer
        end = buffer.find(b"\n", self._searched)
        if (len(buffer) if end < 0 else end + 1) > room:
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
        line = self._line(self._head_room, "head too large", 431)
        if line is not None:
            self._head_room -= len(line) + 2
            self.head_bytes += len(line) + 2
        return line

    def _match_start_line(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """Take the start line, or return None before its end is here."""
        line = self._head_line()
        if line is None:
            return None
        match = pattern.fullmatch(line)
        if match is None:
            raise ProtocolError("invalid start line")
        if match["major"] != b"1":
            raise ProtocolError("HTTP version not supported", 505)
        # RFC 9110 section 2.5: a later minor version is treated as the latest known.
        self._version = (1, 0) if match["minor"] == b"0" else (1, 1)
        self._state = State.FIELD_LINES
        return match

    def _field_section(self) -> Fields | None:
        """Take *( field-line CRLF ) CRLF, RFC 9112 section 5; return None before its end is here.

        One pattern refuses obs-fold, white space before the colon and every wrong line end.
        """
        buffer = self._buffer
        if buffer.startswith((b"\r\n", b"\n")):
            size, end = 0, buffer.index(b"\n") + 1
        elif match := SECTION_END.search(buffer, self._searched):
            size, end = match.start() + 1, match.end()
        else:
            size = end = 0
        if (end or len(buffer)) > self._head_room:
            raise ProtocolError("field section too large", 431)
        if not end:
            self._searched = max(0, len(buffer) - 2)
            return None
        section = bytes(buffer[:size])
        if section.count(b"\n") > self.limits.field_count:
            raise ProtocolError("too many fields", 431)
        if not FIELD_LINES.fullmatch(section) or buffer[size:end] != b"\r\n":
            raise ProtocolError("invalid field line")
        del buffer[:end]
        self._searched = 0
        lines = (line.partition(":") for line in section.decode("latin-1").split("\r\n")[:-1])
        return Fields((name, value.strip(" \t")) for name, _, value in lines)

    def _take_content(self) -> Content | None:
        data = bytes(self._buffer[: self._remaining])
        if not data:
            return None
        del self._buffer[: len(data)]
        self._remaining -= len(data)
        self.content_bytes += len(data)
        return Content(data)


class RequestParser(Parser[Request]):
    """The server's side: the requests of one connection, one after the other."""

    _method = ""

    @property
    def method(self) -> str:
        """The method of the newest request line, also of a request refused for the rest."""
        return self._method

    def _start_line(self) -> None:
        """request-line = method SP request-target SP HTTP-version, RFC 9112 section 3."""
        while self._buffer[:2] == b"\r\n":  # RFC 9112 section 2.2: skipped, at the head's expense
            self._head_line()
        self._method = ""
        self._check_start()
        if match := self._match_start_line(REQUEST_LINE):
            _check_target(match["method"], match["target"])
            self._method, self._target = match["method"].decode(), match["target"].decode()

    def _check_start(self) -> None:
        """Refuse what cannot become a request line, before its end is here."""
        buffer = self._buffer
        if not REQUEST_START.fullmatch(buffer, 0, _METHOD_BYTES + 1):
            raise ProtocolError("invalid method")
        target = buffer.find(b" ", 0, _METHOD_BYTES + 1) + 1
        if not target:
            if len(buffer) > _METHOD_BYTES:
                raise ProtocolError("method not implemented", 501)  # RFC 9112 section 3
            return
        longest = target + self.limits.target_bytes
        if len(buffer) > longest and not TARGET_END.search(buffer, target, longest + 1):
            raise ProtocolError("request target too long", 414)

    def _head(self, fields: Fields) -> Request:
        _check_host(self._version, fields)
        if not self._is_framed(fields, fields.get_all("content-length")):
            self.framing, self._state = "none", State.END
        return Request(self._method, self._target, fields, self._version)


class ResponseParser(Parser[Response]):
    """The client's side. Its errors have status 502, a gateway's word for a bad response.

    Interim responses have no Content and no End. A 101, or success after CONNECT, ends HTTP.
    """

    # The client chose whom to ask, and good servers' heads (cookies, policies) may be large.
    default_limits = Limits(head_bytes=64 * 1024, content_bytes=None)
    _error_status = 502

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self._expected: deque[str] = deque()

    def expect(self, method: str) -> None:
        """Announce a request that is sent: its method decides how the response is framed."""
        self._expected.append(method)

    @property
    def idle(self) -> bool:
        """Whether no response is under way and none is owed."""
        return super().idle and not self._expected

    def _start_line(self) -> None:
        """status-line = HTTP-version SP status-code SP [ reason-phrase ], RFC 9112 section 4."""
        buffer = self._buffer
        if buffer and not self._expected:
            raise ProtocolError("response without a request")  # RFC 9112 section 9.2
        if buffer[:5] != b"HTTP/"[: len(buffer)]:
            raise ProtocolError("not an HTTP response")
        if match := self._match_start_line(STATUS_LINE):
            self._status = int(match["status"])
            self._reason = (match["reason"] or b"").decode("latin-1")

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
        elif not self._is_framed(fields, set(fields.tokens("content-length"))):
            self._remaining = self._content_room
            self.framing, self._state = "close", State.CONTENT_UNTIL_CLOSE
        return response


# Encoders: our own mistakes are ValueError, so no text can inject a field

LAST_CHUNK = b"0\r\n\r\n"

_REASONS = {status.value: status.phrase for status in HTTPStatus} | {
    413: "Content Too Large",  # RFC 9110's words; older versions of Python have others
    422: "Unprocessable Content",
}


def _encode_fields(fields: Pairs) -> bytes:
    lines = []
    framing = 0
    for name, value in fields:
        raw_name, raw_value = name.encode("latin-1"), value.encode("latin-1")
        if not TOKEN.fullmatch(raw_name) or not FIELD_VALUE.fullmatch(raw_value):
            raise ValueError(f"invalid field {name!r}")  # its value may be a secret
        framing += name.lower() in ("content-length", "transfer-encoding")
        lines.append(b"%b: %b\r\n" % (raw_name, raw_value))
    if framing > 1:
        raise ValueError("more than one field frames the content")
    return b"".join(lines) + b"\r\n"


def _framed(fields: Pairs, content: bytes) -> Fields:
    """Add Content-Length, unless the caller's fields frame the content already."""
    given = Fields(fields)
    if "transfer-encoding" in given or "content-length" in given:
        return given
    return Fields([*given, ("Content-Length", str(len(content)))])


def encode_request(method: str, target: str, fields: Pairs, content: bytes = b"") -> bytes:
    """Return a request, with a Content-Length where content or method call for one.

    Fields that frame the content already are left alone: then it may follow in pieces.
    """
    raw_method, raw_target = method.encode("ascii"), target.encode("ascii")
    if not TOKEN.fullmatch(raw_method) or not re.fullmatch(rb"[!-~]+", raw_target):
        raise ValueError(f"invalid request line: {method!r} {target!r}")
    if content or method in ("POST", "PUT", "PATCH"):  # RFC 9110 section 8.6
        fields = _framed(fields, content)
    return b"%b %b HTTP/1.1\r\n%b%b" % (raw_method, raw_target, _encode_fields(fields), content)


def encode_head(
    status: int, fields: Pairs, reason: str | None = None, version: tuple[int, int] = (1, 1)
) -> bytes:
    """Return the head of a response, whose content the caller frames and sends."""
    phrase = (_REASONS.get(status, "") if reason is None else reason).encode("latin-1")
    if not 100 <= status <= 999 or not FIELD_VALUE.fullmatch(phrase):
        raise ValueError(f"invalid status line: {status} {reason!r}")
    return b"HTTP/%d.%d %d %b\r\n%b" % (*version, status, phrase, _encode_fields(fields))


def encode_response(
    status: int, fields: Pairs, content: bytes = b"", *, head_only: bool = False
) -> bytes:
    """Return a whole response with its Content-Length; `head_only` is for the answer to a HEAD."""
    if status < 200 or status in (204, 304):  # RFC 9112 section 6.3, rule 1
        if content:
            raise ValueError(f"a {status} has no content")
        return encode_head(status, fields)
    return encode_head(status, _framed(fields, content)) + (b"" if head_only else content)


def encode_chunk(data: bytes) -> bytes:
    """Return one chunk, or nothing for no data: an empty chunk would end the content."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def format_date(seconds: float) -> str:
    """Return Unix time as an IMF-fixdate (RFC 9110 section 5.6.7), the same in every locale."""
    t = time.gmtime(seconds)
    day = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")[t.tm_wday]
    months = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
    clock = f"{t.tm_hour:02}:{t.tm_min:02}:{t.tm_sec:02}"
    return f"{day}, {t.tm_mday:02} {months[t.tm_mon - 1]} {t.tm_year:04} {clock} GMT"
