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
Read next: `parts_experiments.py`.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import measures
from bench import Bench, experiment
from recording import Streams
from report import Finding
from workload import counting, median

RUNNING = 8  # streams
ROUNDS = 2
WATCH_S = 2.0
# Python's default, the server's choice, and a tenth of it.
SWITCH_MS = (5.0, 0.5, 0.05)
CHOSEN_MS = 0.5


@dataclass
class Beats:
    """What was seen under one condition, round by round."""

    late: list[list[float]] = field(default_factory=list)
    waited: list[list[float]] = field(default_factory=list)  # for a core
    rates: list[float] = field(default_factory=list)  # tokens a second of all streams

    def rest(self) -> list[list[float]]:
        """Return how late the beats would have been, had there been a core at once."""
        rounds = zip(self.late, self.waited, strict=True)
        return [
            [max(0.0, late - waited) for late, waited in zip(*each, strict=True)] for each in rounds
        ]

    def row(self, streams: int, switch_ms: float) -> list[str]:
        """Return the condition's line in the table."""
        return [
            str(streams),
            f"{switch_ms:g} ms",
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
    conditions = [(0, CHOSEN_MS), *((RUNNING, switch_ms) for switch_ms in SWITCH_MS)]
    found = {condition: Beats() for condition in conditions}
    bench.expect(ROUNDS * len(found), "loop-lateness")
    url = await bench.dated_server()
    for _ in range(ROUNDS):
        for (streams, switch_ms), beats in found.items():
            await _watch(bench, url, streams, switch_ms, beats)
            bench.step()
    chosen = found[RUNNING, CHOSEN_MS]
    return Finding(
        [
            "streams", "switch interval", "late: p50", "p95", "p99", "most",
            "waited for a core: p99", "tokens/s", "beats",
        ],
        [beats.row(*condition) for condition, beats in found.items()],
        f"{ROUNDS} windows of {WATCH_S:g} s a row, in turn; percentiles are medians of theirs",
        [
            f"The server sets {CHOSEN_MS:g} ms; Python's default is 5 ms. With {RUNNING} streams"
            f" p99 is {rank(chosen.late, 99)}, goal: under 3 ms; p99 of what is left without the"
            f" wait for a core: {rank(chosen.rest(), 99)}.",
            "The first row is the timer and the machine without the model: what else runs on it"
            " makes every row later.",
            "What is left was waited for the interpreter, or is the timer's own.",
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
