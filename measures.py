"""The measures of a streamed reply: pure functions over dated events.

A reply is a list of events, each with the date at which its last byte was read, in seconds since
the request's first byte was handed to the socket:

     request        first byte    first text                    last text   end marker    close
        |---------------|-------------|------ gap ------|-- gap --|-------------|-----------|
        0           head of the   "Two"              " plus"   " two"        [DONE]     last chunk
                      response

Three rules keep the numbers honest. *Only reply text counts*: an event without text (a role, a
heartbeat, usage, the end marker) never is the first or the last text, nor one end of a gap. *An
event is not a token*: a server may group several tokens in one event, so gaps are inter-event gaps,
and the time per output token says what it counted. *No number is better than a wrong one*: what is
undefined is None, never zero, infinity or NaN. Two events completed by one read do have the same
date and a gap of zero; the number of reads printed beside them tells why.

Percentiles are nearest-rank: the smallest value with at least p percent of all values at or below
it. They are always values that were seen, and are defined for one value as for a thousand.

Not here: clocks and sockets (`wire.py`), what counts as text in which dialect (`readings.py`),
several replies together and how they are printed (`tally.py`). Read next: `readings.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

# A server that counts more tokens has miscounted; a quotient by some such numbers overflows.
MAX_COUNT = 2**53

# Reads that are kept with their dates; the number of reads goes on.
MAX_ARRIVALS = 2**18

# Of a server's own words, this much is repeated in an error.
MAX_ERROR_CHARACTERS = 300


class Event(NamedTuple):
    """One event, message or body: `at` is the date of the read that completed it.

    `size` is the number of bytes of its data. Reasoning is what was generated and is not reply
    text (`readings.py`).
    """

    at: float
    text: str = ""
    reasoning: str = ""
    size: int = 0


class Arrival(NamedTuple):
    """One read: its date, its size, and the content (bytes) that was complete after it.

    `late` is the time from when the kernel had the last of its bytes to its date, where the
    kernel tells: the error of the date.
    """

    at: float
    size: int
    content: int
    late: float | None = None


@dataclass(frozen=True, slots=True)
class ByteCount:
    """Bytes received, each in exactly one class; `Reply` says which is which."""

    head: int = 0
    framing: int = 0
    payload: int = 0
    unparsed: int = 0

    @property
    def total(self) -> int:
        """All that the socket gave."""
        return self.head + self.framing + self.payload + self.unparsed


@dataclass(frozen=True, slots=True)
class Spread:
    """How `n` values are spread; all None when there are none."""

    n: int
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True)
class TimePerOutputToken:
    """Seconds for each token after the first, and the count it stands on."""

    seconds: float | None  # None: fewer than two tokens, or all text came at one date
    count: int
    counted: str  # "usage": tokens as the server counted them; "events": text events


def first_text(events: Iterable[Event]) -> float | None:
    """Return the date of the first event that holds reply text."""
    return next((event.at for event in events if event.text), None)


def last_text(events: Sequence[Event]) -> float | None:
    """Return the date of the last event that holds reply text."""
    return first_text(reversed(events))


def gaps(events: Iterable[Event]) -> list[float]:
    """Return the times between successive text events."""
    dates = [event.at for event in events if event.text]
    return [later - earlier for earlier, later in pairwise(dates)]


def percentile(values: Iterable[float], percent: int) -> float | None:
    """Return the nearest-rank percentile, None without values; `percent` is from 1 to 100."""
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)  # rounded up, in integers: 0.99 is not exact
    return ordered[rank - 1] if ordered else None


def spread(values: Iterable[float]) -> Spread:
    """Return the percentiles of `values` and their number."""
    ordered = sorted(values)
    p50, p95, p99, largest = (percentile(ordered, percent) for percent in (50, 95, 99, 100))
    return Spread(len(ordered), p50, p95, p99, largest)


def time_per_output_token(
    events: Sequence[Event], completion_tokens: int | None
) -> TimePerOutputToken:
    """Return (last text - first text) / (tokens - 1), counting events if the tokens are unknown.

    Usage counts the tokens of reasoning, too, so with it the times run over both.
    The tokens of the first event are not known, so it stands for one: a server that groups tokens
    looks slightly faster than it is.
    """
    counted = "events" if completion_tokens is None else "usage"
    by_usage = completion_tokens is not None
    dates = [event.at for event in events if event.text or (by_usage and event.reasoning)]
    count = len(dates) if completion_tokens is None else completion_tokens
    span = dates[-1] - dates[0] if dates else 0.0
    return TimePerOutputToken(
        span / (count - 1) if count > 1 and span > 0 else None, count, counted
    )


class Mode(StrEnum):
    """How the reply is delivered."""

    JSON = "json"
    SSE = "sse"
    NDJSON = "ndjson"
    TEXT = "text"
    WEBSOCKET = "websocket"
    STREAM = "stream"  # any of them but JSON, as the response's content type says


class Failure(StrEnum):
    """Why a reply is not complete."""

    CONNECT = "cannot connect"
    TLS = "TLS"
    STATUS = "HTTP status"
    REDIRECT = "redirect not followed"
    CODING = "content coding"
    NOT_A_STREAM = "not a stream"
    NOT_A_REPLY = "not a reply"
    TRUNCATED = "truncated"
    NO_END_MARKER = "no end marker"
    IN_BAND = "in-band error"
    PROTOCOL = "protocol"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled by us"


@dataclass
class Reply:
    """One reply: what it said, when, in how many bytes, and how it ended.

    Dates are seconds since the request's first byte was handed to the socket. `received` puts
    every byte in one class:

    - head: status lines and field lines, of interim responses too;
    - framing: HTTP chunk sizes, their line ends and the trailer section. On a WebSocket all that
      follows the head and is not a whole message's data: frame headers, control frames;
    - payload: HTTP content, for an event stream with its `data: ` and blank lines (`overhead`
      counts these in), on a WebSocket the data of messages;
    - unparsed: what belongs to no message: half a head at a cut, bytes that we left unread.
    """

    url: str
    mode: Mode
    status: int | None = None
    version: str | None = None
    fields: tuple[tuple[str, str], ...] = ()  # of the final response
    interim: list[int] = field(default_factory=list)  # statuses of the 1xx responses before it
    coding: str | None = None  # the content coding that was undone
    dialect: str = "native"  # "auto" if no event told
    connect: float | None = None  # duration; None on a connection that was open already
    first_byte: float | None = None  # of the final response, not of an interim one
    opened: float | None = None  # WebSocket: the 101 has come and the prompt was sent
    left: float | None = None  # we closed, reset or half-closed
    end: float | None = None  # the end marker: [DONE], done, an error, or the whole JSON body
    close: float | None = None  # last chunk, last byte of the content, or end-of-file
    close_code: int | None = None  # of the server's Close frame
    events: list[Event] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)  # the first MAX_ARRIVALS reads
    comments: int = 0  # comment lines of an event stream: heartbeats
    pings: int = 0  # of a WebSocket, or events that say so
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    timings: dict[str, Any] | None = None
    received: ByteCount = field(default_factory=ByteCount)
    sent: int = 0
    reads: int = 0
    failure: Failure | None = None
    error: str | None = None

    @property
    def complete(self) -> bool:
        """Whether the whole reply has come and nothing went wrong."""
        return self.failure is None

    @property
    def pieces(self) -> list[str]:
        """The texts of the events that hold any."""
        return [event.text for event in self.events if event.text]

    @property
    def text(self) -> str:
        """The reply's text, or what has come of it."""
        return "".join(self.pieces)

    @property
    def text_bytes(self) -> int:
        """The size of the text in UTF-8."""
        return len(self.text.encode("utf-8", "surrogatepass"))

    @property
    def first_text(self) -> float | None:
        """Client first text: the first complete event or body with reply text."""
        return first_text(self.events)

    @property
    def last_text(self) -> float | None:
        """The date of the last reply text: the total time of the reply."""
        return last_text(self.events)

    @property
    def first_generated(self) -> float | None:
        """The first text or reasoning: what the model wrote first, whoever was to read it."""
        return next((event.at for event in self.events if event.text or event.reasoning), None)

    @property
    def completion_tokens(self) -> int | None:
        """The number of tokens as the server counted them, if it did."""
        usage = self.usage or {}
        count = usage.get("completion_tokens", usage.get("output_tokens"))
        return count if type(count) is int and 0 <= count < MAX_COUNT else None

    @property
    def reasoning_tokens(self) -> int:
        """How many of these tokens were reasoning, as far as the server says (OpenAI's forms)."""
        usage = self.usage or {}
        details = usage.get("completion_tokens_details", usage.get("output_tokens_details"))
        count = details.get("reasoning_tokens") if isinstance(details, dict) else None
        return count if type(count) is int and 0 <= count < MAX_COUNT else 0

    def time_per_output_token(self) -> TimePerOutputToken:
        """Return the time per output token, by usage if there is any, else by events.

        Reasoning that was counted and not sent took its time before the first text: it is left out.
        """
        tokens = self.completion_tokens
        if tokens is not None and not any(event.reasoning for event in self.events):
            tokens = max(0, tokens - self.reasoning_tokens)
        return time_per_output_token(self.events, tokens)

    def gaps(self) -> Spread:
        """Return the spread of the inter-event gaps."""
        return spread(gaps(self.events))

    def fail(self, failure: Failure, message: str) -> None:
        """Record the first failure; those that follow from it are not news.

        The message may hold a server's words: it is shortened, and control characters escaped.
        """
        if self.failure is None:
            self.failure = failure
            words = message[:MAX_ERROR_CHARACTERS] + "..." * (len(message) > MAX_ERROR_CHARACTERS)
            self.error = printable(words)


def printable(words: str) -> str:
    """Escape what could steer a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)
