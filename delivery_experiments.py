"""What it costs to deliver one event: the limit, this server, and what people would use instead.

    python experiments.py delivery
    python delivery_experiments.py --streams 200 --only sse --rounds 3     while changing something

Each server is a process of its own, started anew for each row, on the same schedule: words at an
even pace, no two streams in step but by chance. `drainer.py`, another process, opens the streams
and tells what the server's process used while all of them ran. The limit is `compare/bare.py`,
which sends ready-made events and does nothing else; the others in `compare/` are the same two
endpoints as their frameworks' users would write them.

CPU time per event hardly minds what else the machine does, and its ratio to the bare loop's still
less. Lateness minds very much: it is that of this machine in this minute, beside the bare loop's.

Not here: the client (`drainer.py`). Read next: `load_experiments.py`.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import drainer
from bench import HERE, Bench, ExperimentError, experiment
from drainer import Drained
from report import Finding, markdown_table, times
from workload import median

# More than any row has streams, and the flag of a real deployment.
OURS = ("server.py", "--model=simulated", "--jitter-ms=0", "--connections=20000")
START_S = 20.0


@dataclass(frozen=True)
class Subject:
    """A server to measure: how to ask it for a stream, how to start it, what it needs."""

    name: str
    way: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    program: str = sys.executable
    sizes: tuple[int, ...] = (1, 200, 2000)

    def missing(self) -> list[str]:
        """Return what would have to be installed."""
        modules = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return [*modules, *([] if shutil.which(self.program) else [self.program])]


BARE = Subject("bare loop", "sse", ("compare/bare.py",), sizes=(1, 200, 2000, 10000))
SUBJECTS = {
    "bare": BARE,
    "sse": Subject("this server, SSE", "sse", OURS, sizes=BARE.sizes),
    "close": Subject("this server, SSE to the close", "close", OURS),
    "ws": Subject("this server, WebSocket", "ws", OURS),
}


@dataclass(frozen=True)
class Size:
    """So many streams, an event each so often, all over after so long; and how often measured."""

    streams: int
    every_ms: int
    lasts_s: float
    rounds: int = 1


# From 200 on the same 10,000 events a second, so that only the number of streams grows; and time
# enough to open them all.
SIZES = {
    size.streams: size
    for size in (
        Size(1, 20, 1.5),
        Size(200, 20, 2.3, rounds=2),
        Size(2000, 200, 6.0),
        Size(10000, 1000, 24.0),
    )
}


class Skipped(ExperimentError):
    """A row that cannot be measured on this machine; the message says why."""


async def measure(subject: Subject, size: Size) -> Drained:
    """Start a server, drain its streams, stop it."""
    if missing := subject.missing():
        raise Skipped(f"not installed: {', '.join(missing)} (see requirements-compare.txt)")
    if refused := drainer.allow_files(size.streams):
        raise Skipped(refused)  # the limit is inherited by the processes started from here
    async with _started(subject, f"--delay-ms={size.every_ms}") as (url, pid):
        return await _drain(subject, url, pid, size)


@contextlib.asynccontextmanager
async def _started(subject: Subject, *flags: str) -> AsyncIterator[tuple[str, int]]:
    script, *arguments = subject.command
    process = await asyncio.create_subprocess_exec(
        *(subject.program, str(HERE / script), "--port=0", *arguments, *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            url = (await process.stdout.readline()).decode().strip()
        if not url:
            raise Skipped(f"{script} did not start")
        yield url, process.pid
    except TimeoutError:
        raise Skipped(f"{script} did not start within {START_S:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _drain(subject: Subject, url: str, pid: int, size: Size) -> Drained:
    asked = (
        f"--streams={size.streams}",
        f"--every-ms={size.every_ms}",
        f"--lasts-s={size.lasts_s}",
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(HERE / "drainer.py"), url, f"--way={subject.way}", f"--pid={pid}"),
        *asked,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, told = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise Skipped(told.decode().strip().removeprefix("drainer.py: ").rpartition("\n")[2])
    return Drained(**json.loads(out))


HEADER = [
    "streams",
    "server",
    "CPU an event",
    "against the bare loop",
    "late: p50",
    "p95",
    "p99",
    "memory a stream",
    "whole streams",
]


@dataclass
class Row:
    """What was measured of one server at one size, round by round."""

    subject: Subject
    size: Size
    drained: list[Drained]
    skipped: str | None = None

    @property
    def cpu(self) -> list[float]:
        """CPU seconds an event, round by round."""
        return [one.window_cpu_s / one.window_events for one in self.drained]

    def cells(self, bare: "Row | None") -> list[str]:
        """Return the row's line in the table."""
        start = [f"{self.size.streams:,}", self.subject.name]
        if self.skipped is not None:
            return [*start, f"skipped: {self.skipped}", *["-"] * (len(HEADER) - 3)]
        ratio = "n/a"
        if bare is not None and bare.drained:
            ratio = times(median([a / b for a, b in zip(self.cpu, bare.cpu, strict=False)]))
        late = [median(ranks) for ranks in zip(*(one.late for one in self.drained), strict=True)]
        memory = median([one.memory for one in self.drained]) / self.size.streams / 1024
        return [
            *start,
            f"{median(self.cpu) * 1e6:.1f} us",
            ratio,
            *(f"{value * 1000:.1f} ms" for value in late),
            f"{memory:.1f} KiB" if self.size.streams >= 200 else "n/a",
            f"{sum(one.whole for one in self.drained):,} of"
            f" {self.size.streams * len(self.drained):,}",
        ]


async def measure_rows(
    subjects: Sequence[Subject], size: Size, rounds: int, step: Callable[[], None]
) -> list[Row]:
    """Measure servers in turn, so that a slow minute of the machine falls on all of them."""
    rows = [Row(subject, size, []) for subject in subjects]
    for _ in range(rounds):
        for row in rows:
            if row.skipped is None:
                try:
                    row.drained.append(await measure(row.subject, size))
                except Skipped as skipped:
                    row.skipped = str(skipped)
            step()
    return rows


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return all rows as lines of a table, each against the bare loop of its size."""
    bare = {row.size.streams: row for row in rows if row.subject is BARE}
    return [row.cells(bare.get(row.size.streams)) for row in rows]


@experiment("delivery")
async def delivery(bench: Bench) -> Finding:
    """CPU time, lateness and memory of delivering an event, beside a bare loop and frameworks."""
    plan = [
        (size, [subject for subject in SUBJECTS.values() if size.streams in subject.sizes])
        for size in SIZES.values()
    ]
    bench.expect(sum(size.rounds * len(of_size) for size, of_size in plan), "delivery")
    rows: list[Row] = []
    for size, of_size in plan:
        rows += await measure_rows(of_size, size, size.rounds, bench.step)
    return Finding(HEADER, table(rows), "n", [], "simulated")


# The command


def main(arguments: list[str] | None = None) -> int:
    """Measure some servers at one size and print the table."""
    parser = argparse.ArgumentParser(description="What it costs to deliver one event.")
    add = parser.add_argument
    add("--streams", type=int, choices=SIZES, default=200)
    add(
        "--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="the bare loop is added"
    )
    add("--rounds", type=int, default=1)
    args = parser.parse_args(arguments)
    subjects = [SUBJECTS[name] for name in dict.fromkeys(["bare", *args.only])]
    rows = asyncio.run(
        measure_rows(subjects, SIZES[args.streams], max(1, args.rounds), lambda: None)
    )
    print(markdown_table(HEADER, table(rows)))
    return 0 if all(row.drained for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
