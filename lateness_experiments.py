"""The interpreter lock: how late is the event loop while the model runs in the same process?

The generation thread holds the interpreter for most of a step, and the event loop has to have it
for every event it writes. Three things decide how long the loop waits:

    the lock       a thread that wants the interpreter asks for it after the *switch interval*;
                   the one that has it gives it up at the next bytecode, or at once where PyTorch
                   leaves Python for an operation of its own
    the operation  not every call leaves Python: while one runs that doesn't, nobody is let in
    the cores      PyTorch computes on all of them, and the loop's thread needs one, too

`dated.py` has the loop beat once a millisecond and notes how late each beat is: what an event that
is ready would have waited. A beat is never early, and its timer is kept in whole milliseconds.

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
from recording import Streams
from report import Finding
from workload import counting, median

RUNNING = 8  # streams
ROUNDS = 3
WATCH_S = 2.5
# Python's default, the server's choice, and a tenth of it.
SWITCH_MS = (5.0, 0.5, 0.05)
CHOSEN_MS = 0.5


@dataclass
class Beats:
    """What was seen under one condition, round by round."""

    late: list[list[float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # tokens a second of all streams

    def rank(self, percent: int) -> str:
        """Return a percentile, of rounds the median."""
        ranks = median([measures.percentile(late, percent) for late in self.late])
        return f"{ranks * 1000:.2f} ms"

    def row(self, streams: int, switch_ms: float) -> list[str]:
        """Return the condition's line in the table."""
        return [
            str(streams),
            f"{switch_ms:g} ms",
            *(self.rank(percent) for percent in (50, 95, 99)),
            f"{max(map(max, self.late)) * 1000:.1f} ms",
            f"{median(self.rates):.0f}" if streams else "n/a",
            f"{sum(map(len, self.late)):,}",
        ]


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
            "streams", "switch interval", "late: p50", "p95", "p99", "most", "tokens/s",
            "beats",
        ],
        [beats.row(*condition) for condition, beats in found.items()],
        f"{ROUNDS} windows of {WATCH_S:g} s a row, in turn; percentiles are medians of theirs",
        [
            f"The server sets {CHOSEN_MS:g} ms; Python's default is 5 ms. With {RUNNING} streams"
            f" p99 is {chosen.rank(99)}, goal: under 3 ms.",
            "The first row is the timer and the machine without the model: what else runs on it"
            " makes every row later.",
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
        late: Sequence[float] = json.loads(await bench.get(f"{url}/beats"))["late"]
    await bench.idle(url)
    beats.late.append(list(late))
    beats.rates.append(len(running.gaps(since, until)) / (until - since))
