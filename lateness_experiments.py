"""The interpreter lock: how late is the event loop while the model runs in the same process?

Three things decide how long the event loop waits until it can write an event that is ready:

    the lock       a thread that wants the interpreter asks for it after the *switch interval*;
                   the one that has it gives it up at the next bytecode, or at once where PyTorch
                   leaves Python for an operation of its own
    the operation  not every call leaves Python: while one runs that doesn't, nobody is let in
    the cores      PyTorch computes on all of them, and the loop's thread needs one, too

`dated.py` has the loop beat once a millisecond and notes how late each beat is: what an event that
is ready would have waited. A beat is never early, and its timer is kept in whole milliseconds. What
of it the thread waited for a core, ready to run, is the kernel's own count: it tells the third
cause from the first two.

Not here: how late events on a schedule are at the client (`delivery_experiments.py`).
Read next: `load_experiments.py`.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import measures
from bench import Bench, experiment
from engine import NICENESS
from recording import Streams
from report import Finding
from workload import counting, median

RUNNING = 8  # streams
ROUNDS = 3
WATCH_S = 2.5
CHOSEN_MS = 0.5  # the server's switch interval
# Streams, switch interval, niceness of the generation thread: none at all, the server's choice,
# and then one other choice at a time: a tenth of the interval, Python's default, no niceness.
CONDITIONS = (
    (0, CHOSEN_MS, NICENESS),
    (RUNNING, CHOSEN_MS, NICENESS),
    (RUNNING, 0.05, NICENESS),
    (RUNNING, 5.0, NICENESS),
    (RUNNING, CHOSEN_MS, 0),
    (RUNNING, 5.0, 0),
)


@dataclass
class Beats:
    """What was seen under one condition, round by round."""

    late: list[list[float]] = field(default_factory=list)
    waited: list[list[float]] = field(default_factory=list)  # for a core
    rates: list[float] = field(default_factory=list)  # tokens a second of all streams

    def row(self, streams: int, switch_ms: float, niceness: int) -> list[str]:
        """Return the condition's line in the table."""
        return [
            str(streams),
            f"{switch_ms:g} ms",
            str(niceness),
            *(rank(self.late, percent) for percent in (50, 95, 99)),
            f"{max(map(max, self.late)) * 1000:.1f} ms",
            rank(self.waited, 99),
            f"{median(self.rates):.0f}" if streams else "n/a",
            f"{sum(map(len, self.late)):,}",
        ]


def rank(rounds: Sequence[Sequence[float]], percent: int) -> str:
    """Return a percentile, of rounds the median."""
    return f"{median([measures.percentile(each, percent) for each in rounds]) * 1000:.2f} ms"


@experiment("loop-lateness")
async def loop_lateness(bench: Bench) -> Finding:
    """How late a 1 ms heartbeat of the event loop is, while the model decodes beside it."""
    found = {condition: Beats() for condition in CONDITIONS}
    bench.expect(ROUNDS * len(found), "loop-lateness")
    nice = await bench.dated_server()
    urls = {NICENESS: nice, 0: await bench.dated_server("--niceness=0")}
    for _ in range(ROUNDS):
        for (streams, switch_ms, niceness), beats in found.items():
            await _watch(bench, urls[niceness], streams, switch_ms, beats)
            bench.step()
    chosen = found[RUNNING, CHOSEN_MS, NICENESS]
    return Finding(
        [
            "streams", "switch interval", "niceness", "late: p50", "p95", "p99", "most",
            "waited for a core: p99", "tokens/s", "beats",
        ],
        [beats.row(*condition) for condition, beats in found.items()],
        f"{ROUNDS} windows of {WATCH_S:g} s a row, in turn; percentiles are medians of theirs",
        [
            f"The server sets {CHOSEN_MS:g} ms and a niceness of {NICENESS} for the generation"
            f" thread; Python's default is 5 ms. With {RUNNING} streams p99 is"
            f" {rank(chosen.late, 99)}, goal: under 3 ms.",
            "The first row is the timer and the machine without the model: what else runs on it"
            " makes every row later.",
            "What was not waited for a core was waited for the interpreter, or is the timer's.",
        ],
        bench.model,
    )  # fmt: skip


async def _watch(bench: Bench, url: str, streams: int, switch_ms: float, beats: Beats) -> None:
    """Look at the beats of one window."""
    async with Streams(f"{url}/stream", streams, counting) as running:
        await bench.get(f"{url}/beats?switch_ms={switch_ms}")
        since = time.perf_counter()
        await asyncio.sleep(WATCH_S)
        until = time.perf_counter()
        seen: dict[str, list[float]] = json.loads(await bench.get(f"{url}/beats"))
    await bench.idle(url)
    beats.late.append(seen["late"])
    beats.waited.append(seen["waited"])
    beats.rates.append(len(running.gaps(since, until)) / (until - since))
