"""Why a stream came as it came: from a reply's dates to a verdict in plain words, with evidence.

    dates of the text events                                        verdict
    |  |  |  |  |  |  |  |  |  |     one by one                     streams well
                           ||||||    one burst, at the end          held until the end
         ||||      ||||      ||||    bursts, silence between        buffered by a hop
                |  |  |  |  |  |     head at once, text late        head early, text late
    |  |  |  |           |  |  |     a gap far above the others     stalls
    |         |         |         |  above 180 ms a token           slower than a reader

A *burst* is what comes between two silences. A burst is *packed* if it holds several events within
milliseconds: no model writes so fast, so they were written before, one by one, and held. A fast
server is no hop: at 500 events a second several events share a read, but then there is no silence
before them. Where most of the text came packed, it was buffered.

A buffer that passes blocks on when they are full leaves its size in the bytes: every burst but the
last holds the same number of them, and the end of a block cuts an event in two.

A reply can have several diagnoses: how it was paced, how it ended, whether it was compressed. They
are in order of weight, and the first is the verdict. Only dates and counts go in; so a verdict on
made-up dates is exact, and tests are tables.

Not here: the dates (`roundtrip.py`), several replies and printing (`tally.py`).
Read next: `tally.py`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from measures import Event, Failure, Mode, Reply, percentile

# Silent reading at 238 words a minute (Brysbaert 2019) and 1.38 tokens a word: 183 ms a token.
READER_S = 0.180
# The same in characters, a space with each word: an event of unknown tokens may be a sentence.
READER_CHARACTER_S = 0.042

# A gap that ends a burst; and the silence before most of them that counts: shorter ones are not
# noticed by a reader, and are made by batches, radio and schedulers.
PAUSE_S = 0.050
SILENCE_S = 0.150
# A burst is packed if it has so many events, takes no more than so much for each, and either has
# several in each read or reads that follow quicker than any model writes (3,000 tokens a second).
PACKED_EVENTS = 5
PACKED_S = 0.0005
PACKED_READ_EVENTS = 4
QUICK_S = 0.0002
# Reads of plain text have no events: this much text in one read counts as one, since a server that
# writes word by word does not write as much at once, and one that writes sentences is no hop.
PLAIN_EVENT_CHARACTERS = 32
# An event of more is not what a model wrote in one step.
LARGE_EVENT_CHARACTERS = 200
# The share of the text events that must come packed, and of those that do so after a silence.
PACKED_SHARE = 0.8
SILENT_SHARE = 0.6
# The last burst proves nothing, unless it is longer than so many blocks.
REST_BLOCKS = 3
# Fewer text events prove nothing.
FEWEST_EVENTS = 8
# A gap is a stall if it is so long, and so many times the median gap.
STALL_S = 1.0
STALL_FACTOR = 8
# Text is late if it comes so long after the head, and the head in the first half of the wait.
LATE_S = 0.5

BLOCKS = tuple(1024 << power for power in range(9))  # 1 KiB to 256 KiB


class Kind(StrEnum):
    """What can be found, in order of weight."""

    REFUSED = "refused"
    FAILED = "failed"
    CUT = "cut"
    HELD = "held until the end"
    BUFFERED = "buffered by a hop"
    HEARTBEATS = "heartbeats only"
    NOT_A_STREAM = "not a stream"
    STALLS = "stalls"
    SLOW = "slower than a reader"
    LATE = "head early, text late"
    NO_MARKER = "no end marker"
    COMPRESSED = "compressed"
    SHORT = "too short to tell"
    WELL = "streams well"


_WEIGHT = {kind: weight for weight, kind in enumerate(Kind)}

# The kinds that mean: the text was there, and something kept it.
KEPT = frozenset({Kind.HELD, Kind.BUFFERED})

# The kinds that leave open whether anything was kept.
UNJUDGED = frozenset(
    {Kind.REFUSED, Kind.FAILED, Kind.CUT, Kind.HEARTBEATS, Kind.NOT_A_STREAM, Kind.SHORT}
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing found: what it is, what that means, and the numbers that show it."""

    kind: Kind
    words: str
    evidence: str = ""

    def __str__(self) -> str:
        shown = f" ({self.evidence})" if self.evidence else ""
        return f"{self.kind}: {self.words}{shown}"


@dataclass(frozen=True, slots=True)
class Burst:
    """Text events between two silences: how many, when, and how long it was silent before."""

    count: int
    reads: int  # that completed them
    step: float  # from one of these reads to the next, as a rule
    began: float
    ended: float
    silence: float

    def packed(self, fewest: int = PACKED_EVENTS) -> bool:
        """Whether no model can have written them in that time."""
        at_once = self.count >= PACKED_READ_EVENTS * self.reads or self.step <= QUICK_S
        quick = at_once and self.ended - self.began <= PACKED_S * self.count
        return quick and self.count >= fewest


def diagnose(reply: Reply) -> list[Diagnosis]:
    """Return what there is to say about a reply, the weightiest first; never empty."""
    diagnoses = [_ending(reply), _coding(reply), *_pacing(reply)]
    found = [each for each in diagnoses if each is not None]
    if not found:
        return [Diagnosis(Kind.SHORT, "it was left before it could be judged")]
    return sorted(found, key=lambda each: _WEIGHT[each.kind])


def kinds(reply: Reply) -> list[Kind]:
    """Return only the kinds of what was found."""
    return [each.kind for each in diagnose(reply)]


# How it ended


def _ending(reply: Reply) -> Diagnosis | None:
    why = f"{reply.failure}: {reply.error}"
    match reply.failure:
        case None:
            return _marker(reply)
        case Failure.CANCELLED:
            return None
        case Failure.NOT_A_STREAM:
            words = 'the reply is a whole document; was a stream asked for ("stream": true)?'
            return Diagnosis(Kind.NOT_A_STREAM, words, why)
        case Failure.TRUNCATED:
            words = "the connection broke before the message was over: a crash, a time-out of a hop"
            return Diagnosis(Kind.CUT, words, why)
        case Failure.NO_END_MARKER:
            words = (
                "the message ended as if complete, without an end marker or a finish reason:"
                " the server failed, a hop hid a cut, or the server never says that it is done"
            )
            return Diagnosis(Kind.CUT, words, why)
        case Failure.IN_BAND | Failure.PROTOCOL | Failure.TIMEOUT:
            return Diagnosis(Kind.FAILED, "it did not come to its end", why)
        case _:
            return Diagnosis(Kind.REFUSED, "there is no reply to judge", why)


def _marker(reply: Reply) -> Diagnosis | None:
    if reply.end is not None or reply.mode is Mode.TEXT:
        return None
    return Diagnosis(
        Kind.NO_MARKER,
        "a client that waits for [DONE] would take this for a cut",
        f"the last word was finish reason {reply.finish_reason!r}",
    )


def _coding(reply: Reply) -> Diagnosis | None:
    if not reply.coding:
        return None
    words = "a compressor keeps pieces back until it has enough, unless it is flushed after each"
    shown = f"Content-Encoding: {reply.coding}"
    dates = [arrival.at for arrival in reply.arrivals if arrival.content]
    if reply.failure is Failure.CODING and dates:  # its bytes have dates where its text has none
        shown += f"; its bytes came in {len(dates)} reads, {_ms(dates[0])} to {_ms(dates[-1])}"
    return Diagnosis(Kind.COMPRESSED, words, shown)


# How it was paced


def _pacing(reply: Reply) -> list[Diagnosis]:
    events = [event for event in reply.events if event.text or event.reasoning]
    if not events:
        return _without_text(reply)
    if reply.mode is Mode.JSON:
        return [Diagnosis(Kind.NOT_A_STREAM, "one document, as asked for: all text at once")]
    if reply.left is not None and len(events) < FEWEST_EVENTS:
        return []
    parts = _parts(events) if reply.mode is Mode.TEXT else events
    bursts = bursts_of(parts)
    # Where blocks are seen in the bytes, two events in each are as good a proof as five.
    proofs = [PACKED_EVENTS, 2] if whole_blocks(burst_sizes(reply)) else [PACKED_EVENTS]
    for fewest in proofs:
        packed = [burst for burst in bursts if burst.packed(fewest)]
        if len(parts) >= FEWEST_EVENTS and _is_kept(bursts, packed):
            return [_kept(reply, len(parts), bursts, packed)]
    diagnoses = [each for each in (_late(reply), _stalls(reply), _slow(reply)) if each]
    if not any(each.kind is Kind.STALLS for each in diagnoses):
        diagnoses.append(_steady(events))
    return diagnoses


def _without_text(reply: Reply) -> list[Diagnosis]:
    beats = reply.comments + reply.pings
    if beats:
        words = (
            "the connection is alive and no text comes: queued, stuck, or text this reader misses"
        )
        return [
            Diagnosis(Kind.HEARTBEATS, words, f"{beats} heartbeats, {len(reply.events)} events")
        ]
    if reply.failure is None:
        seen = f"{len(reply.events)} events"
        return [Diagnosis(Kind.SHORT, "the reply is complete and has no text", seen)]
    return []


def _parts(events: Sequence[Event]) -> list[Event]:
    """Return reads of plain text as so many events as their lengths stand for."""
    counts = [max(1, len(event.text) // PLAIN_EVENT_CHARACTERS) for event in events]
    return [event for event, count in zip(events, counts, strict=True) for _ in range(count)]


def bursts_of(events: Sequence[Event]) -> list[Burst]:
    """Return the text events as bursts; the first silence begins with the request."""
    dates = [event.at for event in events]
    starts = [0, *(i for i, (a, b) in enumerate(pairwise(dates), 1) if b - a >= PAUSE_S)]
    bursts, before = [], 0.0
    for start, end in pairwise([*starts, len(dates)]):
        group = dates[start:end]
        reads = sorted(set(group))
        step = percentile((b - a for a, b in pairwise(reads)), 50) or 0.0
        silence = group[0] - before
        bursts.append(Burst(len(group), len(reads), step, group[0], group[-1], silence))
        before = group[-1]
    return bursts


def _is_kept(bursts: Sequence[Burst], packed: Sequence[Burst]) -> bool:
    """Whether most of the events came packed, after silences that count."""
    total = sum(burst.count for burst in bursts)
    rest = bursts[-1]
    # The end of a stream is seldom a full block; what comes behind the last full one is no proof.
    if len(packed) >= 2 and rest is not packed[-1]:
        total -= rest.count if rest.count <= REST_BLOCKS * packed[-1].count else 0
    after_silence = sum(burst.count for burst in packed if burst.silence >= SILENCE_S)
    share = sum(burst.count for burst in packed) / max(1, total)
    return share >= PACKED_SHARE and after_silence >= SILENT_SHARE * total


def _kept(reply: Reply, total: int, bursts: Sequence[Burst], packed: Sequence[Burst]) -> Diagnosis:
    last = bursts[-1]
    plain = reply.mode is Mode.TEXT
    unit = f"pieces of {PLAIN_EVENT_CHARACTERS} characters" if plain else "text events"
    if last is packed[-1] and last.count >= 0.9 * total:
        head = "with them" if _head_with_text(reply) else f"at {_ms(reply.first_byte)}"
        words = "something collects the whole reply before it passes it on"
        return Diagnosis(
            Kind.HELD,
            words,
            f"{last.count} of {total} {unit} within {_ms(last.ended - last.began)},"
            f" after {_ms(last.silence)} of silence; the head came {head}",
        )
    sizes = burst_sizes(reply)
    silence = percentile([burst.silence for burst in packed], 50) or 0.0
    count = percentile([burst.count for burst in packed], 50)
    shown = f"{len(packed)} bursts of about {count} {unit}, {_ms(silence)} of silence before each"
    silences = [burst.silence for burst in packed]
    block = block_size(sizes)
    # Bursts that are nearer to equal intervals than to equal sizes were made by a clock.
    timed = _even(silences) and not whole_blocks(sizes) and _ratio(silences) < _ratio(sizes)
    if block and not timed:
        held = (
            f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
        )
        shown += f"; each holds {held} bytes: blocks of {block // 1024} KiB"
    elif _even(silences):
        shown += "; whatever they hold, they come at the same intervals: a window of time"
    elif sizes:
        shown += f"; {min(sizes):,} to {max(sizes):,} bytes each, no common block size"
    return Diagnosis(
        Kind.BUFFERED,
        "something collects pieces and passes them on in blocks, a hop if not the server",
        shown,
    )


def _even(silences: Sequence[float]) -> bool:
    """Whether at least three silences, but the first, are alike."""
    return len(silences) > 3 and _ratio(silences) <= 1.2


def _ratio(values: Sequence[float]) -> float:
    """Return how many times the smallest the largest value is, but for the first one."""
    return max(values[1:]) / min(values[1:]) if len(values) > 1 else 1.0


def burst_sizes(reply: Reply) -> list[int]:
    """Return the content bytes of each burst of reads but the last, which is seldom full."""
    ends, total = [], 0
    last = 0.0
    for arrival in reply.arrivals:
        if arrival.content and arrival.at - last >= PAUSE_S and total:
            ends.append(total)
        if arrival.content:
            last, total = arrival.at, arrival.content
    return [b - a for a, b in pairwise([0, *ends])]


def block_size(sizes: Sequence[int]) -> int | None:
    """Return the buffer that bursts of these sizes filled; None if they have none in common.

    The first burst may be smaller: a head shared its buffer. Bursts of whole blocks are multiples
    of one. Else the framing between two hops may have taken up to a third of a block, so that it
    is the smallest power of two that holds each.
    """
    full = sizes[1:] if len(sizes) > 2 else sizes
    if not full or max(full) > BLOCKS[-1]:
        return None
    whole = _power(full)
    if whole >= BLOCKS[0]:
        return whole
    block = next(size for size in BLOCKS if size >= max(full))
    alike = min(full) >= 0.9 * max(full) and max(full) >= 0.66 * block
    return block if alike else None


def whole_blocks(sizes: Sequence[int]) -> bool:
    """Whether at least three bursts, but the first, hold whole blocks: no chance does that."""
    return len(sizes) > 3 and _power(sizes[1:]) >= BLOCKS[0]


def _power(sizes: Sequence[int]) -> int:
    """Return the largest power of two that divides them all."""
    common = math.gcd(*sizes)
    return common & -common


def _head_with_text(reply: Reply) -> bool:
    first, head = reply.first_text, reply.first_byte
    return first is not None and head is not None and first - head < SILENCE_S


def _late(reply: Reply) -> Diagnosis | None:
    head, first = reply.first_byte, reply.first_generated
    if head is None or first is None or first - head < LATE_S or head > first / 2:
        return None
    words = "the server answered at once and wrote later: queued, or a long prefill"
    return Diagnosis(Kind.LATE, words, f"head at {_ms(head)}, first text at {_ms(first)}")


def _stalls(reply: Reply) -> Diagnosis | None:
    dates = [event.at for event in reply.events if event.text or event.reasoning]
    gaps = [(later - earlier, earlier) for earlier, later in pairwise(dates)]
    usual = percentile([gap for gap, _ in gaps], 50) or 0.0
    stalls = [(gap, at) for gap, at in gaps if gap >= max(STALL_S, STALL_FACTOR * usual)]
    if not stalls or len(gaps) < FEWEST_EVENTS:
        return None
    longest, at = max(stalls)
    words = "it flows, then it stops for a while: look at the server's load, or at a lossy network"
    return Diagnosis(
        Kind.STALLS,
        words,
        f"{len(stalls)} of {len(gaps)} gaps, the longest {_ms(longest)} at {_ms(at)};"
        f" the median gap is {_ms(usual)}",
    )


def _slow(reply: Reply) -> Diagnosis | None:
    token = reply.time_per_output_token()
    if token.seconds is None or token.seconds <= READER_S or token.count < FEWEST_EVENTS:
        return None
    if token.counted == "events" and not _slow_to_read(reply):
        return None
    words = f"a reader waits for it; silent reading takes {_ms(READER_S)} a token"
    counted = f"{_ms(token.seconds)} a token, counted by {token.counted}"
    return Diagnosis(Kind.SLOW, words, counted)


def _slow_to_read(reply: Reply) -> bool:
    """Whether the text after the first piece comes slower than it is read."""
    first, last = reply.first_text, reply.last_text
    characters = sum(map(len, reply.pieces[1:]))
    return first is not None and last is not None and last - first > READER_CHARACTER_S * characters


def _steady(events: Sequence[Event]) -> Diagnosis:
    span = events[-1].at - events[0].at
    burst, *more = bursts_of(events)
    at_once = burst.reads == 1 or burst.packed(fewest=1)
    if len(events) < FEWEST_EVENTS or (at_once and not more):
        words = "ask for a longer reply"
        characters = sum(len(event.text) for event in events)
        if characters > LARGE_EVENT_CHARACTERS * len(events):
            words = f"the server itself wrote {characters:,} characters in so few events"
        shown = f"{len(events)} text events within {_ms(span)}"
        return Diagnosis(Kind.SHORT, words, shown)
    gaps = [later.at - earlier.at for earlier, later in pairwise(events)]
    shown = (
        f"{len(events)} text events over {_ms(span)}, {len(gaps) / span:,.0f} a second,"
        f" the longest gap {_ms(max(gaps))}"
    )
    return Diagnosis(Kind.WELL, "text comes as it is written", shown)


# Several replies, and two paths


def verdict(replies: Sequence[Sequence[Kind]]) -> Kind:
    """Return the verdict on most of these replies, of equals the weightiest.

    Held and buffered are two looks of one thing (by the length of the reply): they vote together.
    """
    counts = Counter(found[0] for found in replies)
    kept = sum(counts[kind] for kind in KEPT)
    votes = {kind: kept if kind in KEPT else count for kind, count in counts.items()}
    return min(counts, key=lambda kind: (-votes[kind], -counts[kind], _WEIGHT[kind]))


def compare(first: Kind, second: Kind) -> str:
    """Say where it goes wrong, from the verdicts on a path and on the one it was run against."""
    if first in UNJUDGED or second in UNJUDGED:
        return f"the paths can't be compared; the first: {first}; the second: {second}"
    kept = first in KEPT, second in KEPT
    if kept == (True, True):
        return "both are held back: in the server itself, or in a hop that both paths share"
    if kept == (True, False):
        return "the hop is on the first path and not on the second: what lies between them buffers"
    if kept == (False, True):
        return "the hop is on the second path (--against) and not on the first"
    if first == second:
        return f"both paths behave alike: {first}"
    return f"neither path buffers; the first: {first}; the second: {second}"


def _ms(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{seconds * 1000:,.1f} ms"
