"""Server-sent events: bytes to events and back.

An event stream is UTF-8 text cut into lines, a few lines to an event, a blank line after each:

    : a comment, which every client skips         comment    ":" anything
    event: token                                  field      name ":" [ one space ] value
    id: 7
    data: {"text": "Two"}
                                                  blank      dispatches the event above

The grammar is forgiving (no input is an error) and has more corners than it shows:

- A line ends with LF, CR LF or CR, mixed at will. A reader that waits after a CR to see whether an
  LF follows holds an event back for no reason; so a CR ends the line now, and one LF after it is
  skipped whenever it comes.
- Reads cut the stream anywhere: inside a character, a CR LF, the byte order mark.
- `str.splitlines` cuts at U+2028, U+0085 and more; `bytes.splitlines` at CR, LF and CR LF alone.
- Every `data` line adds to the event, with an LF between; an event without one is not dispatched.
- What follows the last blank line is dropped, however complete it looks.

The parser works on bytes and decodes late. That is sound because UTF-8 never uses a byte below 0x80
inside a longer character, and a decoder that replaces a broken sequence never takes such a byte
with it: line ends, colons and names mean the same before decoding as after.

Follows the HTML standard, sections 9.2.5 "Parsing an event stream" and 9.2.6 "Interpreting an
event stream" (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Not here: connecting and reconnecting (client.py); what the data holds (dialects.py). Next to read:
http1.py, the messages that carry these bytes.
"""

import re
from typing import NamedTuple, NoReturn

# An event is held in memory until its blank line. Large enough for a base64 image in one event.
MAX_EVENT_BYTES = 16 * 1024 * 1024

# Thirty million years. A longer number is no time to wait, and `int` refuses very long ones.
MAX_RETRY_DIGITS = 18

_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(r"\r\n|\r|\n")


# Events to bytes


def encode(
    data: str, *, event: str | None = None, id: str | None = None, retry: int | None = None
) -> bytes:
    r"""Encode one event; each line of `data` becomes a field of its own.

    The three line ends all reach the reader as LF: the format has no other. ValueError for what it
    cannot carry at all: CR or LF in `event`, CR, LF or NUL in `id`, `retry` (milliseconds) below
    zero or beyond 18 digits, and lone surrogates anywhere (a UnicodeEncodeError).
    """
    head = ""
    if event is not None:
        head += f"event: {_checked('event', event, refused=_LINE_BREAKING)}\n"
    if id is not None:
        # A reader ignores an id that holds NUL.
        head += f"id: {_checked('id', id, refused=_LINE_BREAKING | {chr(0)})}\n"
    if retry is not None:
        if not 0 <= retry < 10**MAX_RETRY_DIGITS:
            raise ValueError(f"retry must be 0 to {MAX_RETRY_DIGITS} digits of milliseconds")
        head += f"retry: {retry:d}\n"
    # Always one space after the colon: a reader takes one away, so data that starts with its own
    # space keeps it.
    return f"{head}data: {_each_line(data, 'data: ')}\n\n".encode()


def encode_comment(text: str = "") -> bytes:
    """Encode a comment, the stream's heartbeat: bytes that no reader makes an event of."""
    return f": {_each_line(text, ': ')}\n\n".encode() if text else b":\n\n"


_LINE_BREAKING = frozenset("\r\n")


def _checked(field: str, value: str, refused: frozenset[str]) -> str:
    if not refused.isdisjoint(value):
        raise ValueError(f"{field} must not hold any of {sorted(refused)}: {value!r}")
    return value


def _each_line(text: str, prefix: str) -> str:
    if "\n" in text or "\r" in text:
        return _LINE_END.sub(f"\n{prefix}", text)
    return text


# Bytes to events


class Event(NamedTuple):
    """One dispatched event; `type` is "message" where the stream named none."""

    type: str
    data: str
    last_event_id: str


class EventTooLong(ValueError):
    """An event passed the parser's bound before its blank line. Nothing after it is parsed."""


class Parser:
    """The reader's half: `feed` it every read as it comes; there is no end to announce.

    last_event_id   what a reconnecting client would send as Last-Event-ID
    retry           reconnection time in milliseconds, None until the stream sets one
    comments        comment lines seen

    `max_event_bytes` bounds the data of one event together with the line being read, which is all
    that is ever held. One instance is good for one response.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.last_event_id = ""
        self.retry: int | None = None
        self.comments = 0
        self._max_event_bytes = max_event_bytes
        self._overlong = False
        # Where the last read stopped.
        self._at_start = True
        self._after_cr = False
        self._line = bytearray()
        # The standard's three buffers. An LF follows each value of `_data`: empty is no data.
        self._data = bytearray()
        self._type = ""
        self._id = ""

    @property
    def in_event(self) -> bool:
        """Whether part of an event is held, or was too long: an end here would lose something."""
        if self._line or self._data or self._type or self._overlong:
            return True
        return self._id != self.last_event_id

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes, in time linear in its length.

        EventTooLong is the only error, and costs no event before it: the read that holds both
        returns the events, and the next call raises, as does every one after.
        """
        events: list[Event] = []
        try:
            self._parse(data, events)
        except EventTooLong:
            if not events:
                raise
        return events

    def _parse(self, data: bytes, events: list[Event]) -> None:
        if self._overlong:
            self._refuse()
        if self._after_cr and data:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        # A long line grows in a buffer and is copied out once: linear time however it is cut.
        if b"\n" not in data and b"\r" not in data:
            self._line += data
        else:
            if self._line:
                data = bytes(self._line) + data
                self._line.clear()
            if self._at_start:
                self._at_start = False
                data = data.removeprefix(_BOM)
            data = self._parse_plain_events(data, events)
            if data:
                self._parse_lines(data, events)
        if len(self._data) + len(self._line) > self._max_event_bytes:
            self._refuse()

    def _parse_plain_events(self, data: bytes, events: list[Event]) -> bytes:
        """Take the events of `data` if each is one `data: ` line that LF ends; return the rest.

        Only a short cut, for speed: `_parse_lines` makes the same events of the same bytes.
        """
        if not data.startswith(b"data: ") or b"\r" in data or self.in_event:
            return data
        end = data.rfind(b"\n\n")
        if end < 0 or end > self._max_event_bytes:
            return data
        text = data[len("data: ") : end].decode("utf-8", "replace")
        values = text.split("\n\ndata: ")
        if text.count("\n") != 2 * (len(values) - 1):
            return data  # some line end stands elsewhere than between two plain events
        id = self.last_event_id
        for value in values:
            events.append(Event("message", value, id))
        return data[end + len("\n\n") :]

    def _parse_lines(self, data: bytes, events: list[Event]) -> None:
        lines = data.splitlines()
        self._after_cr = data.endswith(b"\r")
        if lines and not data.endswith((b"\r", b"\n")):
            self._line += lines.pop()
        for line in lines:
            if len(self._data) + len(line) > self._max_event_bytes:
                self._refuse()
            if line:
                self._process_field(line)
            else:
                self._dispatch(events)

    def _refuse(self) -> NoReturn:
        self._overlong = True
        raise EventTooLong(f"an event of more than {self._max_event_bytes} bytes")

    def _process_field(self, line: bytes) -> None:
        """Section 9.2.6, "process the field"; a line that starts with a colon is a comment."""
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data += value
            self._data += b"\n"
        elif name == b"event":
            self._type = value.decode("utf-8", "replace")
        elif name == b"id":
            if b"\0" not in value:
                self._id = value.decode("utf-8", "replace")
        elif name == b"retry":
            if value.isdigit():  # of bytes, these are the ASCII digits alone
                digits = value.lstrip(b"0") or b"0"
                if len(digits) <= MAX_RETRY_DIGITS:
                    self.retry = int(digits)
        elif not name:
            self.comments += 1

    def _dispatch(self, events: list[Event]) -> None:
        """Section 9.2.6, "dispatch the event": the id stays for later events, the type does not."""
        self.last_event_id = self._id
        if self._data:
            data = self._data[:-1].decode("utf-8", "replace")
            events.append(Event(self._type or "message", data, self._id))
            self._data.clear()
        self._type = ""
