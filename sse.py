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
- `str.splitlines` cuts at U+2028, U+0085 and more, where no line of this format ends.
- Every `data` line adds to the event, with an LF between; an event without one is not dispatched.
- What follows the last blank line is dropped, however complete it looks.

The parser decodes the lines of a read together. That is sound because UTF-8 never uses a byte below
0x80 inside a longer character, and a decoder that replaces a broken sequence never takes such a
byte with it: no line is cut or joined by being decoded with its neighbours.

Follows the HTML standard, sections 9.2.5 "Parsing an event stream" and 9.2.6 "Interpreting an
event stream" (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Not here: connecting (`asking.py`, `wire.py`); reconnecting, which is a browser's part; what the
data holds (`dialects.py`).
Read next: `http1.py`, the messages that carry these bytes.
"""

import re
from dataclasses import dataclass

# An event is held in memory until its blank line. Large enough for a base64 image in one event.
MAX_EVENT_BYTES = 16 * 1024 * 1024

# Thirty million years. A longer number is no time to wait, and `int` refuses very long ones.
MAX_RETRY_DIGITS = 18

_BOM = "\ufeff"
_CR, _LF = b"\r\n"  # as numbers, which `in` finds in bytes several times faster
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


@dataclass(slots=True)  # Frozen, it would take twice the time to make.
class Event:
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

    `max_event_bytes` bounds the data of one event together with the line being read, each with its
    line ends, which is all that is ever held. One instance is good for one response.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.last_event_id = ""
        self.retry: int | None = None
        self.comments = 0
        self._max_event_bytes = max_event_bytes
        self._room_bytes = max_event_bytes  # beside what is held; below zero, no more is parsed
        # Where the last read stopped.
        self._at_start = True
        self._after_cr = False
        self._line = bytearray()
        # The standard's three buffers; of data, the lines, and how many of them
        # are subtracted from `_room_bytes` already.
        self._data: list[str] = []
        self._counted = 0
        self._type = ""
        self._id = ""

    @property
    def in_event(self) -> bool:
        """Whether part of an event is held, or was too long: an end here would lose something."""
        if self._line or self._data or self._type or self._room_bytes < 0:
            return True
        return self._id != self.last_event_id

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes, in time linear in its length.

        EventTooLong is the only error, and costs no event before it: the read that holds both
        returns the events, and the next call raises, as does every one after.
        """
        if self._after_cr or _CR in data:
            data = self._with_lf_alone(data)
        if len(data) > self._room_bytes:
            return self._feed_within_bound(data)
        if self._line:
            # A long line grows in a buffer and is copied out once: linear time however it is cut.
            if _LF not in data:
                self._line += data
                self._room_bytes -= len(data)
                return []
            data = bytes(self._line) + data
            self._room_bytes += len(self._line)
            self._line.clear()
        try:
            text = data.decode()  # in half the time: it looks for no error handler
        except UnicodeDecodeError:
            text = data.decode("utf-8", "replace")
        lines = text.split("\n")
        rest = lines.pop()
        if rest:
            # Kept as bytes: it may stop inside a character. ASCII is sooner encoded than found.
            begun = rest.encode() if rest.isascii() else data.rpartition(b"\n")[2]
            self._line += begun
            self._room_bytes -= len(begun)
        if self._at_start and lines:
            self._at_start = False
            lines[0] = lines[0].removeprefix(_BOM)
        return self._parse_lines(lines)

    def _with_lf_alone(self, data: bytes) -> bytes:
        """Return a read whose lines all end with LF."""
        if self._after_cr and data:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        if data.endswith(b"\r"):
            self._after_cr = True
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _feed_within_bound(self, data: bytes) -> list[Event]:
        """Feed line by line what may be too much for one event, up to the line that is."""
        events: list[Event] = []
        after_cr, self._after_cr = self._after_cr, False  # That is after the last line.
        for line in data.splitlines(keepends=True):
            if len(line) > self._room_bytes:
                self._room_bytes = -1
                break
            events += self.feed(line)
        self._after_cr = after_cr
        if self._room_bytes < 0 and not events:
            raise EventTooLong(f"an event of more than {self._max_event_bytes} bytes")
        return events

    def _parse_lines(self, lines: list[str]) -> list[Event]:
        """Interpret whole lines, which come without their LF (section 9.2.6)."""
        events: list[Event] = []
        data: str | None = None  # the last line of data; those before it are in `_data`
        for line in lines:
            if line == "":
                # "Dispatch the event": the id stays for later events, the type doesn't.
                if self._data:
                    data = self._take_data(data)
                if data is not None:
                    events.append(Event(self._type or "message", data, self._id))
                    data = None
                self.last_event_id = self._id
                self._type = ""
                continue
            # Nearly all lines; `_process_field` would do the same to them, in more time.
            name, _, value = line.partition(": ")
            if name == "data":
                if data is not None:
                    self._data.append(data)
                data = value
            elif name == "event":
                self._type = value
            elif name == "id" and "\0" not in value:
                self._id = value
            else:
                data = self._process_field(line, data)
        if data is not None:
            self._hold_data(data)
        return events

    def _process_field(self, line: str, data: str | None) -> str | None:
        """Process any line but a blank one; return the last line of data up to here."""
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            if data is not None:
                self._data.append(data)
            return value
        if name == "event":
            self._type = value
        elif name == "id":
            if "\0" not in value:
                self._id = value
        elif name == "retry":
            if value.isascii() and value.isdigit():
                digits = value.lstrip("0") or "0"
                if len(digits) <= MAX_RETRY_DIGITS:
                    self.retry = int(digits)
        elif not name:  # The line starts with a colon: a comment.
            self.comments += 1
        return data

    def _hold_data(self, last: str) -> None:
        """Keep the data of an event that goes on in the next read."""
        self._data.append(last)
        self._room_bytes -= sum(len(line.encode()) + 1 for line in self._data[self._counted :])
        self._counted = len(self._data)

    def _take_data(self, last: str | None) -> str:
        """Return the data of an event that ends, of all its lines."""
        lines = self._data
        if last is not None:
            lines.append(last)
        self._data, self._counted = [], 0
        self._room_bytes = self._max_event_bytes - len(self._line)
        return "\n".join(lines)
