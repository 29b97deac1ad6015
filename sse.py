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

The parser looks for line ends in bytes and decodes whole lines. That is sound because UTF-8 never
uses a byte below 0x80 inside a longer character, and a decoder that replaces a broken sequence
never takes such a byte with it: no line is cut or joined by being decoded with its neighbours.

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

# What most events are, up to their blank line, in one match; or else any one line, which may be
# that of a blank line. It makes no difference what was matched as which, but for speed: the fields
# of the first kind are not empty, so that one which is absent changes nothing.
_LINES = re.compile(r"(?:event: ?+(.++)\n)?(?:id: ?+([^\n\0]++)\n)?data: ?+(.++)\n\n|(.*+)\n")


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
        # The standard's three buffers; of data, the lines, and what they hold as bytes.
        self._data: list[str] = []
        self._data_bytes = 0
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
        end = data.rfind(b"\n") + 1
        if b"\r" in data:
            end = max(end, data.rfind(b"\r") + 1)
            self._after_cr = data.endswith(b"\r")
        if end:
            lines, data = data[:end], data[end:]
            # A long line grows in a buffer and is copied out once: linear time however it is cut.
            if self._line:
                lines = bytes(self._line) + lines
                self._line.clear()
            if self._at_start:
                self._at_start = False
                lines = lines.removeprefix(_BOM)
            if self._data_bytes + len(lines) <= self._max_event_bytes:
                self._parse_lines(lines, events)
            else:
                self._parse_within_bound(lines, events)
        if data:
            self._line += data
            if self._data_bytes + len(self._line) > self._max_event_bytes:
                self._refuse()

    def _parse_within_bound(self, lines: bytes, events: list[Event]) -> None:
        for line in lines.splitlines(keepends=True):
            if self._data_bytes + len(line.rstrip(b"\r\n")) > self._max_event_bytes:
                self._refuse()
            self._parse_lines(line, events)

    def _refuse(self) -> NoReturn:
        self._overlong = True
        raise EventTooLong(f"an event of more than {self._max_event_bytes} bytes")

    def _parse_lines(self, lines: bytes, events: list[Event]) -> None:
        """Take in whole lines: most events by one match of `_LINES`, the rest line by line."""
        text = lines.decode("utf-8", "replace")
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        for type, id, data, line in _LINES.findall(text):
            if line:
                self._process_field(line)
                continue
            if type:
                self._type = type
            if id:
                self._id = id
            if data or self._data:
                whole = self._take_data(data) if self._data else data
                events.append(Event(self._type or "message", whole, self._id))
            # Section 9.2.6, "dispatch the event": the id stays for later events, the type doesn't.
            self.last_event_id = self._id
            self._type = ""

    def _process_field(self, line: str) -> None:
        """Section 9.2.6, "process the field"; a line that starts with a colon is a comment."""
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
            self._data_bytes += len(value.encode()) + 1
        elif name == "event":
            self._type = value
        elif name == "id":
            if "\0" not in value:
                self._id = value
        elif name == "retry":
            if value.isascii() and value.isdigit():
                digits = value.lstrip("0") or "0"
                if len(digits) <= MAX_RETRY_DIGITS:
                    self.retry = int(digits)
        elif not name:
            self.comments += 1

    def _take_data(self, last: str) -> str:
        """All lines of data: those held, and one that was matched with its blank line."""
        data = "\n".join([*self._data, last] if last else self._data)
        self._data.clear()
        self._data_bytes = 0
        return data
