"""What runs the experiments: their register, the processes they measure, and the command.

    experiments.py (this process)
      |-- client.py, as a module              measures
      |-- python server.py --port 0 ...       one for each set of flags, shared by the experiments
      |-- python dated.py --port 0 ...        the same, for those that ask when the model ran
      |-- python proxy.py --port 0 ...        likewise
      `-- with_model(function, ...)           a bare model, in a process that the client's event
                                              loop does not share an interpreter with

Each is started when first asked for and stopped when the bench is left, however it is left. They
are idle when not asked, and only one is asked at a time, so they take no time from each other; but
for experiments that only wait for schedules (`WAITING`), which leave the processor to each other.

An experiment is a function from a `Bench` to a `Finding`, registered by `@experiment("name")`.

Not here: what is asked and what is made of the answers (`experiments.py`). Read next:
`workload.py`.
"""

import argparse
import asyncio
import contextlib
import datetime
import functools
import http.client
import inspect
import itertools
import json
import multiprocessing
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar
from urllib.parse import urlsplit

import client
import figures
import report
from measures import Failure, Reply
from report import Finding
from weights import ModelError

try:
    from tqdm import tqdm
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install -r requirements.txt (is the environment active?)")

P = ParamSpec("P")
T = TypeVar("T")

HERE = Path(__file__).parent
REPORT = HERE / "results" / "report.md"

# A first start downloads the model's weights and converts them.
START_S = 900.0
# A server lets streams say goodbye for five seconds.
STOP_S = 10.0
# Replies take seconds, also on a slow machine: what takes longer will not come.
REPLY_S = 120.0
# How long a server may take to notice, or to come as far as an experiment waits for.
NOTICE_S = 120.0
POLL_S = 0.01

DEFAULT_OPTIONS = client.Options()

# As the flags of `server.py` have them.
DEFAULT_FLAGS = {"model": "default", "device": "auto", "dtype": "auto"}

Experiment = Callable[["Bench"], Awaitable[Finding]]

EXPERIMENTS: dict[str, Experiment] = {}
# Those that wait for schedules and leave the processor idle: neighbours among them run together.
WAITING: set[str] = set()


def experiment(name: str, *, waits: bool = False) -> Callable[[Experiment], Experiment]:
    """Register a function as the experiment of this name; `waits` puts it in `WAITING`."""

    def register(function: Experiment) -> Experiment:
        EXPERIMENTS[name] = function
        if waits:
            WAITING.add(name)
        return function

    return register


class ExperimentError(Exception):
    """An experiment cannot be carried out; the message says why in one line."""


class Bench:
    """Starts what experiments ask for, and stops it: an asynchronous context manager.

    `flags` go to every server: which model, in which number type, on which device.
    """

    def __init__(self, flags: Mapping[str, str] | None = None, *, quiet: bool = False) -> None:
        self.flags = DEFAULT_FLAGS | dict(flags or {})
        self.model = self.flags["model"]  # the server tells what that is
        self._quiet = quiet
        self._urls: dict[tuple[str, ...], str] = {}
        self._warmed: set[str] = set()
        self._pids: dict[str, int] = {}
        self._stack = AsyncExitStack()
        self._starting = asyncio.Lock()  # who asks for the same server waits for it
        self._pool: ProcessPoolExecutor | None = None
        self._bar: ContextVar[Any] = ContextVar("bar", default=None)  # each experiment has its own

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.expect(None)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        await self._stack.aclose()

    # Progress

    def expect(self, steps: int | None, name: str = "") -> None:
        """Show a bar of so many steps, each a reply or a call of `with_model`; None removes it."""
        if (shown := self._bar.get()) is not None:
            shown.close()
        # tqdm's None: shown on a terminal only
        hidden = True if self._quiet else None
        self._bar.set(None if steps is None else tqdm(total=steps, desc=name, disable=hidden))

    def step(self) -> None:
        """Count one step as done."""
        if (bar := self._bar.get()) is not None:
            bar.update()

    # Processes

    async def server(self, *flags: str) -> str:
        """Return the URL of a server with these flags added, started and warmed up."""
        return await self._serve("server.py", *flags)

    async def dated_server(self, *flags: str) -> str:
        """Return the URL of a server that dates its model's passes: see `dated.py`."""
        return await self._serve("dated.py", *flags)

    async def simulated(self, *flags: str) -> str:
        """Return the URL of a server whose words come on a schedule, whatever `flags` says."""
        return await self._warm(await self._start("server.py", "--model=simulated", *flags))

    async def _serve(self, script: str, *flags: str) -> str:
        settings = [f"--{name}={value}" for name, value in self.flags.items()]
        return await self._warm(await self._start(script, *settings, *flags))

    async def _warm(self, url: str) -> str:
        """See to it that a server has answered: what it does first is slower than the rest."""
        if url not in self._warmed:
            self._warmed.add(url)
            await self.ask(f"{url}/complete", {"prompt": "Once upon a time", "max_tokens": 8})
        return url

    async def proxy(self, upstream: str, *flags: str) -> str:
        """Return the URL of a proxy in front of `upstream`."""
        return await self._start("proxy.py", "--upstream", upstream, *flags)

    async def _start(self, *command: str) -> str:
        async with self._starting:
            if command not in self._urls:
                self._urls[command] = await self._start_another(*command)
            return self._urls[command]

    async def _start_another(self, script: str, *arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(HERE / script), "--port", "0", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self._stack.push_async_callback(_stop, process)
        told: list[str] = []
        listening = asyncio.create_task(self._listen(process, told))
        self._stack.callback(listening.cancel)
        url = await _url(script, process, listening, told)
        self._pids[url] = process.pid
        return url

    def memory(self, url: str) -> int | None:
        """Return the bytes of memory that a server's process has; None where Linux is not."""
        return resident_bytes(self._pids[url])

    async def _listen(self, process: asyncio.subprocess.Process, told: list[str]) -> None:
        """Pass on what a process says to people, and learn from it which model runs."""
        assert process.stderr is not None
        async for raw in process.stderr:
            line = raw.decode(errors="replace").rstrip()
            told[:] = [line]
            if found := re.fullmatch(r"(\S+): (\w+ on \S+); \d+ rows.*", line):
                self.model = f"{found[1]}, {found[2]}"
            elif not self._quiet:
                tqdm.write(line, file=sys.stderr)

    # Asking

    async def ask(
        self,
        url: str,
        body: Mapping[str, Any],
        options: client.Options = DEFAULT_OPTIONS,
        session: client.Session | None = None,
    ) -> Reply:
        """Ask, over a connection of its own if no session is given.

        Raises ExperimentError unless the reply is complete, or we left.
        """
        ask = client.ask if session is None else session.ask
        reply = await ask(url, body, replace(options, timeout=REPLY_S))
        if reply.failure not in (None, Failure.CANCELLED):
            raise ExperimentError(f"{url}: {reply.failure}: {reply.error}")
        self.step()
        return reply

    async def get(self, url: str, method: str = "GET") -> bytes:
        """Return what a server tells at an address of its own."""
        try:
            return await asyncio.to_thread(_get, url, method)
        except (OSError, http.client.HTTPException) as error:
            raise ExperimentError(f"{url}: {error or type(error).__name__}") from error

    async def newest(self, url: str) -> dict[str, Any]:
        """Return what a server's log says of the newest request; it runs or has ended."""
        entries: list[dict[str, Any]] = json.loads(await self.get(f"{url}/log"))["requests"]
        return entries[-1] if entries else {"id": None}

    async def idle(self, url: str) -> None:
        """Wait until a server has nothing to do."""
        try:
            async with asyncio.timeout(NOTICE_S):
                while True:
                    if not json.loads(await self.get(f"{url}/health"))["running"]:
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ExperimentError(f"{url} was busy for {NOTICE_S:g} s") from None

    async def follow(
        self, url: str, before: dict[str, Any], until: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any]:
        """Wait for a newer request than `before`, and then for `until` to hold of it."""
        try:
            async with asyncio.timeout(NOTICE_S):
                while True:
                    entry = await self.newest(url)
                    if entry["id"] != before["id"] and until(entry):
                        return entry
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ExperimentError(f"{url}/log: waited for {NOTICE_S:g} s in vain") from None

    # A bare model

    async def with_model(
        self, function: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return `function(model, ...)`, run in a process of its own beside the model."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")  # no fork of a process with threads
            self._pool = ProcessPoolExecutor(1, context, initializer=_ignore_interrupts)
        call = functools.partial(_call, dict(self.flags), function, *args, **kwargs)
        try:
            result: T = await asyncio.get_running_loop().run_in_executor(self._pool, call)
        except ModelError as error:
            raise ExperimentError(str(error)) from error
        except BrokenProcessPool as error:
            raise ExperimentError("the process that held the model has died") from error
        self.step()
        return result


def resident_bytes(pid: int | Literal["self"]) -> int | None:
    """Return the bytes of memory that a process has; None where Linux is not."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        if found := re.search(r"^VmRSS:\s*(\d+) kB$", status, re.MULTILINE):
            return int(found[1]) * 1024
    return None


async def _url(
    script: str,
    process: asyncio.subprocess.Process,
    listening: "asyncio.Task[None]",
    told: list[str],
) -> str:
    """Return the line that a process prints when it serves."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = (await process.stdout.readline()).decode().strip()
    except TimeoutError:
        raise ExperimentError(f"{script} did not start within {START_S:g} s") from None
    if not line:
        await listening
        raise ExperimentError(f"{script} did not start: {' '.join(told) or 'it gave no reason'}")
    return line


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _get(url: str, method: str) -> bytes:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=NOTICE_S)
    try:
        connection.request(method, parts.path)
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise http.client.HTTPException(f"{response.status} {response.reason}")
        return content
    finally:
        connection.close()


# In the model's own process


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too; the parent ends it


@functools.cache
def _load(model: str, device: str, dtype: str) -> Any:
    import lm  # torch and transformers take a second to import

    return lm.LanguageModel.load(model, device=device, dtype=dtype)


def _call(flags: dict[str, str], function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    model = _load(flags["model"], flags["device"], flags["dtype"])
    return function(model, *args, **kwargs)


# The command


def main(arguments: list[str] | None = None) -> int:
    """Run experiments; 0 if all could be carried out, 1 if not, 130 after Ctrl-C."""
    args = _parse_arguments(arguments)
    if args.list:
        for name in EXPERIMENTS:
            print(f"{name:<15}{_title(name)}")
        return 0
    # A SIGTERM stops the servers, too.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return asyncio.run(_run(args))
    except KeyboardInterrupt:
        return 130


async def _run(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    flags = {name: getattr(args, name) for name in DEFAULT_FLAGS}
    changed = [f" --{n} {value}" for n, value in flags.items() if value != DEFAULT_FLAGS[n]]
    failures = 0
    async with Bench(flags) as bench:
        for names in _together(args.names or list(EXPERIMENTS)):
            # Figures and tables when all have ended: drawing would delay what others date.
            found = await asyncio.gather(*(_try(bench, name) for name in names))
            for name, outcome in zip(names, found, strict=True):
                if isinstance(outcome, ExperimentError):
                    failures += 1
                    print(f"experiments.py: {name}: {outcome}", file=sys.stderr)
                else:
                    command = f"python experiments.py {name}{''.join(changed)}"
                    tell(name, *outcome, command, args.report)
    took = report.seconds(time.perf_counter() - began)
    print(f"experiments.py: all took {took}, {failures} failed", file=sys.stderr)
    return 1 if failures else 0


def _together(names: Sequence[str]) -> list[list[str]]:
    """Return the same names, in the same order, as groups of those that run at the same time."""
    groups = itertools.groupby(enumerate(names), lambda at: -1 if at[1] in WAITING else at[0])
    return [[name for _, name in group] for _, group in groups]


async def _try(bench: Bench, name: str) -> tuple[Finding, float] | ExperimentError:
    try:
        return await run_experiment(bench, name)
    except ExperimentError as error:
        return error


async def run_experiment(bench: Bench, name: str) -> tuple[Finding, float]:
    """Run one experiment; return what it found, and how many seconds it took."""
    began = time.perf_counter()
    try:
        finding = await EXPERIMENTS[name](bench)
    finally:
        bench.expect(None)
    return finding, time.perf_counter() - began


def tell(name: str, finding: Finding, took_s: float, command: str, path: Path) -> None:
    """Print what an experiment found and write it into the report at `path`."""
    finding, drawn = _drawn(finding, command)
    took = report.seconds(took_s)
    now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, in {took}"
    provenance = [now, report.machine(), report.versions(), f"`{command}`"]
    text = report.section(name, _title(name), finding, provenance)
    print(f"{text}\n", flush=True)
    report.record(path, [text], list(EXPERIMENTS), {**finding.files, **drawn})
    if finding.result is not None:
        print(f"RESULT {json.dumps(finding.result)}", flush=True)


def _drawn(finding: Finding, command: str) -> tuple[Finding, dict[str, str]]:
    """Return what is to be reported, and its figures' files; without matplotlib there are none."""
    if not finding.figures:
        return finding, {}
    if not figures.available():
        why = "No figures: matplotlib is not installed (`pip install -r requirements-dev.txt`)."
        return replace(finding, figures=(), notes=[*finding.notes, why]), {}
    footer = [
        "; ".join(report.stands_on(finding)),
        f"{report.machine()}; {report.versions()}",
        command,
    ]
    drawn = {report.file_name(figure): figures.draw(figure, footer) for figure in finding.figures}
    return finding, drawn


def _title(name: str) -> str:
    return inspect.getdoc(EXPERIMENTS[name]) or ""


def _parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what streaming buys, and report it.")
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="which (default: all)")
    add("--list", action="store_true", help="say which there are")
    for name, value in DEFAULT_FLAGS.items():
        add(f"--{name}", default=value, help="as for server.py (%(default)s)")
    add(
        "--report",
        type=Path,
        default=REPORT,
        help="the file whose section it replaces (%(default)s)",
    )
    args = parser.parse_args(arguments)
    unknown = [name for name in args.names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"no experiment {', '.join(unknown)}: choose from {', '.join(EXPERIMENTS)}")
    return args
