"""Replies as tables and JSON: one reply in full, or many as percentiles.

                               n        p50        p95        p99        max
    first text                20    31.8 ms    39.3 ms    40.1 ms    40.1 ms
    inter-event gaps       2,380    33.0 ms    44.9 ms    47.2 ms    51.0 ms

A `Tally` takes the numbers out of each reply and lets the reply go, so that ten thousand of them
fit in memory. Only complete replies have latencies: a refusal is fast and would make the server
look fast. Failures are counted by category, each with an example of the server's words.

Not here: what the numbers mean (`measures.py`) and what they show (`diagnosis.py`, before this
one). Read next: `plans.py`.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import diagnosis
import measures
from diagnosis import Diagnosis, Kind
from measures import Failure, Reply, Spread, printable

Rows = list[tuple[str, str]]

# What is measured of each complete reply, in the order of time.
DATES: dict[str, Callable[[Reply], float | None]] = {
    "connect": lambda reply: reply.connect,
    "first byte": lambda reply: reply.first_byte,
    "first generated": lambda reply: reply.first_generated,
    "first text": lambda reply: reply.first_text,
    "time per output token": lambda reply: reply.time_per_output_token().seconds,
    "last text": lambda reply: reply.last_text,
    "end marker": lambda reply: reply.end,
    "close": lambda reply: reply.close,
}
COUNTS: dict[str, Callable[[Reply], float | None]] = {
    "bytes received": lambda reply: reply.received.total,
    "head bytes": lambda reply: reply.received.head,
    "framing bytes": lambda reply: reply.received.framing,
    "payload bytes": lambda reply: reply.received.payload,
    "text bytes": lambda reply: reply.text_bytes,
    "reads": lambda reply: reply.reads,
    "text events": lambda reply: len(reply.pieces),
    "tokens": lambda reply: reply.completion_tokens,
}
GAPS = "inter-event gaps"


class Tally:
    """What many replies of one URL have in common."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.samples = {name: array("d") for name in (*DATES, GAPS, *COUNTS)}
        self.dating_errors = array("d")
        self.failures: Counter[Failure] = Counter()
        self.words: dict[Failure, str] = {}  # of the first failure of a category
        self.kinds: list[list[Kind]] = []
        self.examples: dict[Kind, Diagnosis] = {}
        self.ends: Counter[str] = Counter()  # the complete ones, by their finish reason
        self.complete = 0
        self.counted_events = False  # some reply had no usage to count its tokens by

    @property
    def n(self) -> int:
        """All replies, failed ones too."""
        return len(self.kinds)

    def add(self, reply: Reply) -> None:
        """Take the numbers out of a reply."""
        found = diagnosis.diagnose(reply)
        self.kinds.append([each.kind for each in found])
        for each in found:
            self.examples.setdefault(each.kind, each)
        self.dating_errors.extend(a.late for a in reply.arrivals if a.late is not None)
        if reply.failure is not None:
            self.failures[reply.failure] += 1
            self.words.setdefault(reply.failure, reply.error or "")
            return
        self.complete += 1
        self.ends[reply.finish_reason or "no finish reason"] += 1
        for name, measure in (DATES | COUNTS).items():
            value = measure(reply)
            if value is not None:
                self.samples[name].append(value)
        self.samples[GAPS].extend(measures.gaps(reply.events))
        self.counted_events |= reply.completion_tokens is None and bool(reply.events)

    def spread(self, name: str) -> Spread:
        """Return how a measure is spread over the complete replies."""
        return measures.spread(self.samples[name])

    @property
    def verdict(self) -> Kind | None:
        """The verdict on most replies, None without any."""
        return diagnosis.verdict(self.kinds) if self.kinds else None


# Words for people


def reply_table(reply: Reply) -> str:
    """Return a reply's measures as aligned lines; dates in milliseconds."""
    size, token, gap = reply.received, reply.time_per_output_token(), reply.gaps()
    ranks = {"p50": gap.p50, "p95": gap.p95, "p99": gap.p99, "max": gap.max}
    gap_words = ", ".join(f"{name} {ms(value)}" for name, value in ranks.items())
    generated = [("first generated", f"{ms(reply.first_generated)} (reasoning)")]
    rows = [
        ("reply", f"failed: {reply.failure}: {reply.error}" if reply.failure else "complete"),
        ("response", _response_words(reply)),
        ("connect", "reused" if reply.connect is None else ms(reply.connect)),
        ("first byte", ms(reply.first_byte)),
        *(generated if reply.first_generated != reply.first_text else []),
        ("first text", ms(reply.first_text)),
        ("last text", ms(reply.last_text)),
        ("end marker", ms(reply.end)),
        ("close", ms(reply.close)),
        ("time per output token", f"{ms(token.seconds)} ({token.count} by {token.counted})"),
        (GAPS, f"{gap_words} (n = {gap.n})"),
        ("events", f"{len(reply.events)}, with text {len(reply.pieces)}, in {reply.reads} reads"),
        ("heartbeats", f"{reply.comments} comments, {reply.pings} pings"),
        ("tokens", _token_words(reply)),
        ("bytes received", f"{size.total}, of which text {reply.text_bytes}"),
        ("", f"head {size.head}, framing {size.framing}, payload {size.payload}"),
        ("bytes sent", str(reply.sent)),
        ("finish reason", printable(reply.finish_reason or "n/a")),
    ]
    if size.unparsed:
        rows.append(("bytes left unparsed", str(size.unparsed)))
    rows.append(("error of the dates", dating_error_words(_dating_error(reply))))
    return _aligned(rows)


def _response_words(reply: Reply) -> str:
    words = f"{reply.status or 'none'}, HTTP/{reply.version or '?'}, {reply.mode}"
    if reply.events and reply.mode is not measures.Mode.TEXT:
        words += f", dialect {reply.dialect}"
    return words + (f", {printable(reply.coding)}" if reply.coding else "")


def _token_words(reply: Reply) -> str:
    if reply.completion_tokens is not None:
        return f"{reply.completion_tokens} by usage"
    return f"not told; {len(reply.pieces)} text events"


def _dating_error(reply: Reply) -> Spread:
    return measures.spread(a.late for a in reply.arrivals if a.late is not None)


def dating_error_words(spread: Spread) -> str:
    """Say how late reads were dated, as far as the kernel tells."""
    if not spread.n:
        return "not known: the kernel dates no reads here"
    return f"p50 {ms(spread.p50)}, p95 {ms(spread.p95)}, max {ms(spread.max)} (n = {spread.n})"


def tally_table(tally: Tally) -> str:
    """Return the measures of many replies as a table of percentiles."""
    lines = [f"{tally.url}", f"{'':<22}{'n':>8}{'p50':>12}{'p95':>12}{'p99':>12}{'max':>12}"]
    generated = tally.samples["first generated"] != tally.samples["first text"]
    for name in DATES:
        if name != "first generated" or generated:
            lines.append(_percentiles(name, tally.spread(name), ms))
        if name == "time per output token":  # gaps tell its spread
            lines.append(_percentiles(GAPS, tally.spread(GAPS), ms))
    lines += [
        _percentiles(
            name, tally.spread(name), lambda value: "n/a" if value is None else f"{value:,.0f}"
        )
        for name in COUNTS
    ]
    rows = [("replies", f"{tally.n}, complete {tally.complete}")]
    if tally.ends:
        told = ", ".join(f"{printable(why)} {count}" for why, count in tally.ends.most_common())
        rows.append(("ended by", told))
    rows += [
        (f"failed: {failure}", f"{count}, such as: {tally.words[failure]}")
        for failure, count in tally.failures.most_common()
    ]
    if tally.counted_events:
        rows.append(("tokens", "not told by every reply; its text events stand for them"))
    rows.append(("error of the dates", dating_error_words(measures.spread(tally.dating_errors))))
    return "\n".join([*lines, _aligned(rows)])


def _percentiles(name: str, spread: Spread, show: Callable[[float | None], str]) -> str:
    values = (spread.p50, spread.p95, spread.p99, spread.max)
    return f"{name:<22}{spread.n:>8,}" + "".join(f"{show(value):>12}" for value in values)


def diagnoses_words(diagnoses: Sequence[Diagnosis]) -> str:
    """Return what was found in one reply, a line each."""
    return "\n".join(f"-> {printable(str(each))}" for each in diagnoses)


def verdict_words(tally: Tally) -> str:
    """Return what was found in many replies, most frequent first, each with one's evidence."""
    counts = Counter(kind for found in tally.kinds for kind in found)
    return "\n".join(
        f"-> {count} of {tally.n} replies: {printable(str(tally.examples[kind]))}"
        for kind, count in counts.most_common()
    )


def _aligned(rows: Rows) -> str:
    return "\n".join(f"{name:<21} {value}" for name, value in rows)


def ms(seconds: float | None) -> str:
    """Return a time in milliseconds, with its unit."""
    return "n/a" if seconds is None else f"{seconds * 1000:,.1f} ms"


# JSON for programs


def reply_record(reply: Reply) -> dict[str, Any]:
    """Return a reply's measures; times in seconds, null where undefined."""
    token, gap, size = reply.time_per_output_token(), reply.gaps(), reply.received
    found = diagnosis.diagnose(reply)
    return {
        "url": reply.url,
        "complete": reply.complete,
        "failure": reply.failure,
        "error": reply.error,
        "status": reply.status,
        "http_version": reply.version,
        "mode": reply.mode,
        "dialect": reply.dialect,
        "content_coding": reply.coding,
        **{_key(name, "_s"): measure(reply) for name, measure in DATES.items()},
        "time_per_output_token_counted_by": token.counted,
        "inter_event_gaps_s": asdict(gap),
        "bytes": {
            "received": size.total,
            "head": size.head,
            "framing": size.framing,
            "payload": size.payload,
            "unparsed": size.unparsed,
            "text": reply.text_bytes,
            "sent": reply.sent,
        },
        "reads": reply.reads,
        "events": len(reply.events),
        "text_events": len(reply.pieces),
        "comments": reply.comments,
        "pings": reply.pings,
        "dating_error_s": asdict(_dating_error(reply)),
        "tokens": reply.completion_tokens,
        "usage": reply.usage,
        "finish_reason": reply.finish_reason,
        "timings": reply.timings,
        "diagnosis": [asdict(each) for each in found],
    }


def tally_record(tally: Tally) -> dict[str, Any]:
    """Return the measures of many replies; times in seconds."""
    names = {name: _key(name, "_s") for name in (*DATES, GAPS)}
    names |= {name: _key(name) for name in COUNTS}
    counts = Counter(kind for found in tally.kinds for kind in found)
    return {
        "url": tally.url,
        "replies": tally.n,
        "complete": tally.complete,
        "finish_reasons": dict(tally.ends),
        "failures": {str(failure): count for failure, count in tally.failures.items()},
        "percentiles": {key: asdict(tally.spread(name)) for name, key in names.items()},
        "tokens_counted_by": "events" if tally.counted_events else "usage",
        "dating_error_s": asdict(measures.spread(tally.dating_errors)),
        "verdict": tally.verdict,
        "diagnosis": [
            asdict(tally.examples[kind]) | {"replies": count}
            for kind, count in counts.most_common()
        ],
    }


def _key(name: str, unit: str = "") -> str:
    return name.replace(" ", "_").replace("-", "_") + unit
