"""The experiments on neighbours: what one client does to the streams of the others.

    stall         eight streams run, and a prompt of 1,500 tokens arrives
    not-reading   four streams run, beside them a client that reads nothing

As in `load_experiments.py`, each has a goal beside what was measured, ways that are compared take
turns, and the spread is printed with each median.

Not here: the other experiments, and the command that runs these, too (`experiments.py`). Read next:
`hops.py`.
"""

import asyncio
import json
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import http1
import measures
from bench import REPLY_S, Bench, ExperimentError, experiment
from client import Options
from recording import Recording, Streams, checked
from report import Finding, seconds, span, times
from workload import ENGLISH, counting, median

# A long prompt

RUNNING = 8
STALL_ROUNDS = 2
LONG_CHARACTERS = 7000  # of English prose, some 1,500 tokens
USUAL_S = 1.0  # how long the streams are watched before the prompt arrives


@dataclass(frozen=True)
class LongPrompt:
    """What a long prompt met and caused, in seconds."""

    usual: float  # the median gap before it came
    largest: float  # the largest gap while it was prefilled
    chunk: float  # the model's longest pass over a part of it
    first_text: float
    tokens: int


@experiment("stall")
async def stall(bench: Bench) -> Finding:
    """Eight streams run and a prompt of 1,500 tokens arrives: read in chunks, and in one go."""
    bench.expect(2 * STALL_ROUNDS, "stall")
    urls = await bench.dated_server(), await bench.dated_server("--prefill-chunk=2048")
    chunked: list[LongPrompt] = []
    whole: list[LongPrompt] = []
    for number in range(STALL_ROUNDS):
        for url, arrivals in zip(urls, (chunked, whole), strict=True):
            arrivals.append(await _arrive(bench, url, number))
            bench.step()
    # Both against the time that the goal allows: the usual gap, and one chunk of 128 tokens.
    chunks = [arrival.chunk for arrival in chunked]
    return Finding(
        [
            "prefill",
            "usual gap",
            "longest pass over the prompt",
            "largest gap",
            "against usual gap + one chunk",
            "ratio, lowest to highest",
            "first text of the long one",
        ],
        [
            _stall_row("in chunks of 128 (default)", chunked, chunks),
            _stall_row("in one go", whole, chunks),
        ],
        f"{STALL_ROUNDS} arrivals a row, in turn, each among {RUNNING} streams; medians",
        [
            f"The prompt has {span([a.tokens for a in (*chunked, *whole)])} tokens. The largest gap"
            f" is that of any of the {RUNNING} streams.",
            "One chunk: the longest pass over a chunk of the default size, in the same round.",
            "Goal: in chunks, at most the usual gap and one chunk, a ratio of about 1.",
        ],
        bench.model,
    )


async def _arrive(bench: Bench, url: str, number: int) -> LongPrompt:
    """Let a long prompt arrive among streams; no two prompts begin alike, so none is reused."""
    text = f"{number}. " + " ".join(text["human"] for text in ENGLISH)
    async with Streams(f"{url}/stream", RUNNING, counting) as streams:
        since = time.perf_counter()
        await asyncio.sleep(USUAL_S)
        await bench.get(f"{url}/passes")
        async with Recording() as session:
            asked = {"prompt": text[:LONG_CHARACTERS], "max_tokens": 1, "usage": True}
            reply = checked(await session.ask(f"{url}/stream", asked, Options(timeout=REPLY_S)))
            began = session.began
        passes = json.loads(await bench.get(f"{url}/passes"))["passes"]
        await streams.more(2)  # the gap that the end of the prefill falls into ends, too
    await bench.idle(url)
    first_text = reply.first_text or 0.0
    return LongPrompt(
        median(streams.gaps(since, began)),
        # A gap may have begun before the prompt came: one that is usual in length.
        max(streams.gaps(began, began + first_text)),
        max((end - start for name, start, end in passes if name == "prefill"), default=0.0),
        first_text,
        (reply.usage or {})["prompt_tokens"],
    )


def _stall_row(how: str, arrivals: Sequence[LongPrompt], chunks: Sequence[float]) -> list[str]:
    goals = [arrival.usual + chunk for arrival, chunk in zip(arrivals, chunks, strict=True)]
    if not all(goals):
        raise ExperimentError("the streams came in one burst: no usual gap to compare with")
    ratios = [arrival.largest / goal for arrival, goal in zip(arrivals, goals, strict=True)]
    return [
        how,
        seconds(median([arrival.usual for arrival in arrivals])),
        seconds(median([arrival.chunk for arrival in arrivals])),
        seconds(median([arrival.largest for arrival in arrivals])),
        times(median(ratios)),
        f"{times(min(ratios))} to {times(max(ratios))}",
        seconds(median([arrival.first_text for arrival in arrivals])),
    ]


# A client that does not read

NEIGHBOURS = 4
READING_ROUNDS = 2
STALL_S = 2
WATCH_S = 0.25  # between two looks at memory and queues
# Requests before the one for a stream; nobody reads the answers, so the kernel's buffers are full.
PAGES = 16
ALONE, FIFTH, READS_NOT = "nobody", "a fifth that reads", "one that reads not"


@dataclass
class Window:
    """What was seen in a stretch of time."""

    gaps: Sequence[float]  # of the neighbours
    memory: int | None  # the most, in bytes
    queued: int  # the most that waited for clients, in bytes
    freed: float = 0.0  # when the last token of the one that does not read came, in seconds
    generated: int = 0  # its tokens by then


@experiment("not-reading")
async def not_reading(bench: Bench) -> Finding:
    """Four streams run, alone, beside a fifth, and beside a client that reads nothing."""
    bench.expect(3 * READING_ROUNDS, "not-reading")
    url = await bench.server(f"--stall={STALL_S}")
    ways: dict[str, list[Window]] = {ALONE: [], FIFTH: [], READS_NOT: []}
    for _ in range(READING_ROUNDS):
        for way, windows in ways.items():
            windows.append(await _window(bench, url, way))
            bench.step()
    alone, fifth, beside = ways.values()
    freed = [window.freed for window in beside]
    return Finding(
        [
            "beside the four",
            "usual gap",
            "p95 gap",
            "p95 against alone",
            "ratio, lowest to highest",
            "memory at most",
            "queued at most",
        ],
        [_window_row(way, windows, alone) for way, windows in ways.items()],
        f"{READING_ROUNDS} windows a row, in turn, medians;"
        f" {span([len(window.gaps) for window in (*alone, *fifth, *beside)])} gaps a window",
        [
            f"With --stall {STALL_S} the one that reads not had its last token after"
            f" {span(freed, 1)} s, and"
            f" {span([window.generated for window in beside])} tokens; goal: after {STALL_S} s.",
            "Goal: the p95 gap of the others within 10% of a run without it (at most 1.10x). A step"
            " of five rows is longer than one of four whoever reads: see the second row.",
            "It asks for pages first and reads none: its stream finds the kernel's buffers full.",
        ],
        bench.model,
    )


async def _window(bench: Bench, url: str, way: str) -> Window:
    async with Streams(f"{url}/stream", NEIGHBOURS, counting) as streams:
        since = time.perf_counter()
        company = asyncio.create_task(_company(bench, url, way))
        memory: list[int] = []
        queued = []
        while not company.done():
            memory += filter(None, [bench.memory(url)])
            queued.append(queued_bytes((await bench.get(f"{url}/metrics")).decode()))
            await asyncio.wait([company], timeout=WATCH_S)
        until = time.perf_counter()
        freed, generated = company.result()
    await bench.idle(url)
    gaps = streams.gaps(since, until)
    return Window(gaps, max(memory, default=None), max(queued), freed, generated)


async def _company(bench: Bench, url: str, way: str) -> tuple[float, int]:
    """Be the fifth for a while; when the last token of one that reads not came, and its tokens."""
    if way == ALONE:
        await asyncio.sleep(STALL_S)
    elif way == FIFTH:
        async with Streams(f"{url}/stream", 1, lambda _: counting(NEIGHBOURS)):
            await asyncio.sleep(STALL_S)
    else:
        return await _read_nothing(bench, url)
    return 0.0, 0


async def _read_nothing(bench: Bench, url: str) -> tuple[float, int]:
    parts = urlsplit(url)
    before = await bench.newest(url)
    content = json.dumps(counting(NEIGHBOURS)).encode()
    host = [("Host", parts.netloc)]
    pages = http1.encode_request("GET", "/metrics", host) * PAGES
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the least that the kernel allows
        peer.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(peer, (parts.hostname, parts.port))
        await loop.sock_sendall(
            peer, pages + http1.encode_request("POST", "/stream", host, content)
        )
        await asyncio.sleep(STALL_S)  # the log is not to be asked often beside the others
        entry = await bench.follow(url, before, lambda entry: entry["finish_reason"] is not None)
    if entry["finish_reason"] != "cancelled":
        raise ExperimentError(f"a reply that nobody read ended by {entry['finish_reason']}")
    return entry["timings"]["last_token"], entry["completion_tokens"]


def queued_bytes(text: str) -> int:
    """Return what waits for clients, by the text of `/metrics`."""
    found = re.search(r"^server_client_queued_bytes (\d+)", text, re.MULTILINE)
    if found is None:
        raise ExperimentError("/metrics does not tell what is queued for clients")
    return int(found[1])


def _window_row(way: str, windows: Sequence[Window], alone: Sequence[Window]) -> list[str]:
    tails = [_p95(window) for window in windows]
    ratios = [tail / _p95(other) for tail, other in zip(tails, alone, strict=True)]
    memory = [window.memory / 2**20 for window in windows if window.memory]
    return [
        way,
        seconds(median([measures.percentile(window.gaps, 50) for window in windows])),
        seconds(median(tails)),
        times(median(ratios)),
        f"{times(min(ratios))} to {times(max(ratios))}",
        f"{max(memory):,.0f} MiB" if memory else "n/a",
        f"{max(window.queued for window in windows):,} bytes",
    ]


def _p95(window: Window) -> float:
    return median([measures.percentile(window.gaps, 95)])
