"""A reply's content cut into events: decoded if it was compressed, then by its media type.

    bytes  ->  Decompressor  ->  sse | ndjson | text  ->  [(type, data), (type, data), ...]

    text/event-stream       an event a blank line                       (sse.py)
    application/x-ndjson    an event a line: a JSON value and an LF
    text/plain and others   no events at all: what one read completed of one chunk is taken as one

gzip and deflate are undone as the bytes come, so that a compressed stream can be dated like any
other: an event exists once the compressor has let its last byte go. br and zstd are not in the
standard library; that they were used is reported.

Not here: what the data says (`readings.py`, before this one). Read next: `wire.py`.
"""

import codecs
import zlib
from collections.abc import Iterator
from typing import Protocol

import sse

# One event or message: no model writes as much; a broken server may.
MAX_EVENT_BYTES = 16 * 1024 * 1024

# What is taken out of a decompressor at once: a kilobyte of zeros can hold a megabyte.
INFLATE_BYTES = 256 * 1024

# Media types whose lines are JSON values.
NDJSON_TYPES = (
    "application/x-ndjson",
    "application/ndjson",
    "application/jsonl",
    "application/jsonlines",
    "application/x-jsonlines",
    "application/stream+json",
)
DECODED = ("gzip", "x-gzip", "deflate")

Item = tuple[str, str]  # an event's type and its data


class ContentError(ValueError):
    """The content is not what its head says."""


class Splitter(Protocol):
    """Content in, events out."""

    @property
    def comments(self) -> int:
        """Heartbeats that were no events."""

    def feed(self, data: bytes) -> list[Item]:
        """Return the events that `data` completes."""

    def finish(self) -> list[Item]:
        """The content is over: return what that completes."""

    @property
    def unfinished(self) -> str | None:
        """The last line of an event that lacks its end, None outside of one."""


class EventStream:
    """Server-sent events."""

    def __init__(self) -> None:
        self._parser = sse.Parser(max_event_bytes=MAX_EVENT_BYTES)
        self._last_bytes = b""

    @property
    def comments(self) -> int:
        """Comment lines."""
        return self._parser.comments

    def feed(self, data: bytes) -> list[Item]:
        """Return the events that a blank line has completed."""
        self._last_bytes = (self._last_bytes + data[-64:])[-64:]
        return [(event.type, event.data) for event in self._parser.feed(data)]

    def finish(self) -> list[Item]:
        """Return nothing: what lacks its blank line is no event."""
        return []

    @property
    def unfinished(self) -> str | None:
        """The line after which a blank line is missing."""
        if not self._parser.in_event:
            return None
        lines = self._last_bytes.replace(b"\r", b"\n").rstrip(b"\n").split(b"\n")
        return lines[-1].decode("utf-8", "replace")


class Lines:
    """Newline-delimited JSON: an empty line is a heartbeat."""

    def __init__(self) -> None:
        self.comments = 0
        self._line = bytearray()

    def feed(self, data: bytes) -> list[Item]:
        """Return the lines that an LF has completed."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._line) + lines[0]
            self._line.clear()
        self._line += rest
        if len(self._line) > MAX_EVENT_BYTES:
            raise ContentError(f"a line of more than {MAX_EVENT_BYTES} bytes")
        told = [line.strip().decode("utf-8", "replace") for line in lines]
        self.comments += told.count("")
        return [("message", line) for line in told if line]

    def finish(self) -> list[Item]:
        """Return the last line, which may lack its LF."""
        return self.feed(b"\n") if self._line.strip() else []

    @property
    def unfinished(self) -> str | None:
        """The line that lacks its LF."""
        return self._line.decode("utf-8", "replace") if self._line.strip() else None


class PlainText:
    """Plain text: what has come is what there is, but for half a character."""

    comments = 0
    unfinished = None

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> list[Item]:
        """Return the text of one read as one event."""
        text = self._decoder.decode(data)
        return [("message", text)] if text else []

    def finish(self) -> list[Item]:
        """Return U+FFFD for half a character."""
        text = self._decoder.decode(b"", True)
        return [("message", text)] if text else []


class Decompressor:
    """Undoes gzip or deflate, some at a time."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        # 47: gzip or zlib, by its header. RFC 9110 section 8.4.1.2 has zlib for deflate.
        self._inflate = zlib.decompressobj(47)
        self._begun = b""  # the first two bytes: a header, or raw deflate

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what `data` lets out; ContentError when it is not so coded."""
        if len(self._begun) < 2:
            self._begun = data = self._begun + data
            if len(data) < 2:
                return
            if self._coding == "deflate" and not _has_header(data):  # some servers send it so
                self._inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        out = b""
        while data or len(out) == INFLATE_BYTES:
            try:
                out = self._inflate.decompress(data, INFLATE_BYTES)
            except zlib.error as exc:
                raise ContentError(f"not {self._coding}: {exc}") from None
            data = self._inflate.unconsumed_tail or self._inflate.unused_data
            if self._inflate.eof and data:  # several gzip members may follow each other
                self._inflate = zlib.decompressobj(47)
            if out:
                yield out

    @property
    def complete(self) -> bool:
        """Whether the compressed data has come to its own end."""
        return self._inflate.eof


def _has_header(data: bytes) -> bool:
    """Whether data begins as zlib's (RFC 1950 section 2.2: method 8, a check by 31) or gzip's."""
    zlibs = data[0] & 15 == 8 and int.from_bytes(data[:2], "big") % 31 == 0
    return zlibs or data[:2] == b"\x1f\x8b"
