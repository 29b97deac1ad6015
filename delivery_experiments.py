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

Not here: the client (`drainer.py`). Read next: `lateness_experiments.py`.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

import drainer
from bench import HERE, Bench, ExperimentError, experiment
from drainer import Drained
from report import Finding, markdown_table, times
from simulated import TICKS_PER_S
from workload import median

# More than any row has streams, and the flag of a real deployment.
OURS = ("server.py", "--model=simulated", "--jitter-ms=0", "--connections=20000")
START_S = 20.0
PATIENT = 3
ROUNDS = 3


@dataclass(frozen=True)
class Subject:
    """A server to measure: how to ask it for a stream, how to start it, what it needs."""

    name: str
    way: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    program: str = sys.executable
    sizes: tuple[int, ...] = (1, 200, 2000)

    @property
    def foreign(self) -> bool:
        """Whether this is somebody's framework, not the limit and not this server."""
        return bool(self.needs) or self.program != sys.executable

    def missing(self) -> list[str]:
        """Return what would have to be installed."""
        modules = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return [*modules, *([] if shutil.which(self.program) else [self.program])]


ON_UVICORN = ("uvicorn", "uvloop", "httptools")
EVEN = "--jitter-ms=0"
BARE = Subject("bare loop", "sse", ("compare/bare.py",), sizes=(1, 200, 2000, 10000))
TICK_MS = 1000 // TICKS_PER_S
IN_TICKS = ("compare/bare.py", f"--tick-ms={TICK_MS}")
ALONE = ("compare/bare_asyncio.py", f"--tick-ms={TICK_MS}")
SUBJECTS = {
    "bare": BARE,
    "ticks": Subject("bare loop, in our ticks", "sse", IN_TICKS, sizes=(200,)),
    "asyncio": Subject("asyncio alone, in our ticks", "sse", ALONE, sizes=(200,)),
    "sse": Subject("this server, SSE", "sse", OURS, sizes=BARE.sizes),
    "close": Subject("this server, SSE to the close", "close", OURS),
    "ws": Subject("this server, WebSocket", "ws", OURS),
    "aiohttp": Subject("aiohttp", "sse", ("compare/with_aiohttp.py", EVEN), ("aiohttp",)),
    "node": Subject("Node's http", "sse", ("compare/with_node.mjs", EVEN), program="node"),
    "starlette": Subject(
        "Starlette on uvicorn",
        "sse",
        ("compare/with_starlette.py", EVEN),
        ("starlette", *ON_UVICORN),
    ),
    "fastapi": Subject(
        "FastAPI's SSE on uvicorn",
        "sse",
        ("compare/with_fastapi.py", EVEN),
        ("fastapi", *ON_UVICORN),
        sizes=(1, 200),  # of 2,000 it opened half in 14 seconds
    ),
}


@dataclass(frozen=True)
class Size:
    """So many streams, an event each so often, all over after so long."""

    streams: int
    every_ms: int
    lasts_s: float


GOAL = (BARE.name, SUBJECTS["sse"].name)  # at 200 streams: a ratio of at most 1.6

# From 200 on the same 10,000 events a second, so that only the number of streams grows; and time
# enough to open them all.
SIZES = {
    size.streams: size
    for size in (
        Size(1, 20, 1.2),
        Size(200, 20, 2.0),
        Size(2000, 200, 3.5),
        Size(10000, 1000, 8.0),
    )
}


class Skipped(ExperimentError):
    """A row that cannot be measured on this machine; the message says why."""


class TooShort(Skipped):
    """It could be with more time."""


async def measure(subject: Subject, size: Size) -> Drained:
    """Start a server, drain its streams, stop it."""
    if missing := subject.missing():
        raise Skipped(f"not installed: {', '.join(missing)} (see requirements-compare.txt)")
    if refused := drainer.allow_files(size.streams):
        raise Skipped(refused)  # the limit is inherited by the processes started from here
    async with _started(subject, f"--delay-ms={size.every_ms}") as (url, pid):
        try:
            return await _drain(subject, url, pid, size)
        except TooShort:  # a machine that is slow or busy: once more, with time
            return await _drain(subject, url, pid, replace(size, lasts_s=PATIENT * size.lasts_s))


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
        skipped = TooShort if process.returncode == 2 else Skipped
        raise skipped(told.decode().strip().removeprefix("drainer.py: ").rpartition("\n")[2])
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

    def against(self, other: "Row | None") -> float | None:
        """Return the ratio of CPU an event to another row's; None where either has none."""
        if other is None or not self.drained or not other.drained:
            return None
        return median(self.cpu) / median(other.cpu)

    @property
    def late(self) -> list[float]:
        """p50, p95 and p99 of lateness in seconds; of rounds the median."""
        return [median(ranks) for ranks in zip(*(one.late for one in self.drained), strict=True)]

    @property
    def memory(self) -> float:
        """Bytes a stream that the server's process has grown by."""
        return median([one.memory for one in self.drained]) / self.size.streams

    def cells(self, bare: "Row | None") -> list[str]:
        """Return the row's line in the table."""
        start = [f"{self.size.streams:,}", self.subject.name]
        if self.skipped is not None:
            return [*start, f"skipped: {self.skipped}", *["-"] * (len(HEADER) - 3)]
        ratio = self.against(bare)
        asked = self.size.streams * len(self.drained)
        return [
            *start,
            f"{median(self.cpu) * 1e6:.1f} us",
            "n/a" if ratio is None else times(ratio),
            *(f"{value * 1000:.1f} ms" for value in self.late),
            # Of a few streams the growth is that of the process, whoever they are.
            f"{self.memory / 1024:.1f} KiB" if self.size.streams >= 200 else "n/a",
            f"{sum(one.whole for one in self.drained):,} of {asked:,}",
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
    plan = _plan()
    bench.expect(sum(rounds * len(subjects) for _, rounds, subjects in plan), "delivery")
    rows: list[Row] = []
    for size, rounds, subjects in plan:
        rows += await measure_rows(subjects, size, rounds, bench.step)
    seconds = ", ".join(f"{size.lasts_s:g} s at {size.streams:,}" for size in SIZES.values())
    return Finding(
        HEADER,
        table(rows),
        f"10,000 events a second from 200 streams on, 50 from one; one run lasts {seconds}; at"
        f" 200 the bare loop and this server's SSE are medians of {ROUNDS} runs in turn",
        [*goals(rows), *NOTES, f"Beside: {', '.join(versions())}."],
        "simulated",
    )


def _plan() -> list[tuple[Size, int, list[Subject]]]:
    """Who is measured at each size, and how often: the goal's ratio scatters in a single run."""
    plan = []
    for size in SIZES.values():
        subjects = [subject for subject in SUBJECTS.values() if size.streams in subject.sizes]
        if size.streams == 200:
            goal = [subject for subject in subjects if subject.name in GOAL]
            plan.append((size, ROUNDS, goal))
            subjects = [subject for subject in subjects if subject not in goal]
        plan.append((size, 1, subjects))
    return plan


NOTES = (
    "CPU an event: of the server's process, kernel time included, while all streams run. The ratio"
    " to the bare loop holds whatever the machine does besides; lateness doesn't.",
    "Late: from when the schedule has an event due to the read that brings it, the bare loop's row"
    " included: it tells what of it is the kernel's, the timer's (whole milliseconds) and the"
    " reading client's. A WebSocket's schedule counts from its handshake, which comes before the"
    " request: it is late by the time that the request takes.",
    f"This server's words come in ticks of {TICK_MS} ms, each in the nearest, as a step"
    " of a model brings the tokens of all its streams: some are early by half of that. The others"
    " wake up for each word that is due, as often as timers of whole milliseconds let them; waking"
    " up costs as much as several events, so a bare loop in the same ticks stands beside, and"
    " asyncio alone: its transports with ready-made bytes, below which no server on them can get.",
    "Memory: what the server's process has grown by; the kernel's socket buffers come on top.",
    f"A run that leaves no time to measure, its streams opening too slowly, is made once more and"
    f" {PATIENT} times as long.",
    "Whole: every event came, and the end. All but FastAPI's and Node's write the same bytes; those"
    " leave out a space in their JSON.",
)


def goals(rows: Sequence[Row]) -> list[str]:
    """Say what this server's rows come to, beside what they are to come to."""
    at = {(row.subject.name, row.size.streams): row for row in rows if row.drained}
    ours = SUBJECTS["sse"].name
    lines = []
    if row := at.get((ours, 200)):
        others = [r for r in rows if r.subject.foreign and r.size.streams == 200 and r.drained]
        least = min((median(other.cpu) for other in others), default=None)
        told = "no framework" if least is None else f"{least * 1e6:.1f} us of the best framework"
        ratio = row.against(at.get((BARE.name, 200)))
        same = row.against(at.get((SUBJECTS["ticks"].name, 200)))
        alone = row.against(at.get((SUBJECTS["asyncio"].name, 200)))
        lines.append(
            f"At 200 streams: {'n/a' if ratio is None else times(ratio)} of the bare loop, goal: at"
            f" most 1.6x; {'n/a' if same is None else times(same)} of one in the same ticks,"
            f" {'n/a' if alone is None else times(alone)} of asyncio alone;"
            f" {median(row.cpu) * 1e6:.1f} us beside {told}, goal: below."
        )
    if row := at.get((ours, 10000)):
        lines.append(
            f"At 10,000 streams: p99 {row.late[2] * 1000:.0f} ms late, goal: under 250 ms;"
            f" {row.memory / 1000:.1f} KB a stream, goal: at most 20 KB; "
            f"{row.size.streams - row.drained[0].whole:,} streams not whole, goal: none."
        )
    for name in (BARE.name, ours):
        grown = [
            (n, at[name, n].against(at.get((name, 200)))) for n in (2000, 10000) if (name, n) in at
        ]
        told = ", ".join(f"{times(ratio)} at {n:,}" for n, ratio in grown if ratio is not None)
        if told:
            goal = "" if name == BARE.name else "; goal: at most 1.5x at 10,000"
            lines.append(f"CPU an event against 200 streams, {name}: {told}{goal}.")
    return lines


def versions() -> list[str]:
    """Return what of others was measured, with versions."""
    names = sorted({name for subject in SUBJECTS.values() for name in subject.needs})
    told = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            told.append(f"{name} {importlib.metadata.version(name)}")
    if node := shutil.which("node"):
        done = subprocess.run([node, "--version"], capture_output=True, text=True, check=False)
        told.append(f"Node {done.stdout.strip()}")
    return told or ["nothing of others is installed"]


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
