"""The experiments of the engine under load: many at once, one too long, one that does not read.

    load          without a server, and with 1 to 32 clients: tokens a second, waits, queue
    stall         eight streams run, and a prompt of 1,500 tokens arrives
    not-reading   four streams run, beside them a client that reads nothing
    chat          a chat sends its history again with each turn
    added         what the server adds to the first token, beyond the model

Each has a goal, which stands beside what was measured. Conditions that are compared take turns, and
the spread is printed with each median: on a machine that does other things, too, it is wide, and
then no figure is to be trusted.

Not here: the other experiments, and the command that runs these, too (`experiments.py`). This is
the last file of the tour.
"""

import asyncio
import json
import random
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import http1
import measures
from bench import REPLY_S, Bench, ExperimentError, experiment
from client import Options
from figures import Curves, Panel
from generation import SamplingParams
from measures import Reply
from recording import Recording, Streams, checked, record
from report import Finding, seconds, span, times
from workload import ENGLISH, PROMPTS, SAMPLING, TEXTS, TOKENS, body, median

Pass = tuple[str, float, float]  # of the model: which, when it began, when it ended


def counting(index: int) -> dict[str, Any]:
    """Return a request for a reply that runs on: a model that counts does not come to an end."""
    numbers = ", ".join(str(index * 7 + number) for number in range(1, 9))
    return {"prompt": f"{numbers},", "max_tokens": 1900, "temperature": 0}


# Many clients

CLIENTS = (1, 2, 4, 8, 16, 32)
MANY = 16  # as many as the server has rows; the rest wait in its queue
LOAD_ROUNDS = 3
READER_MS = 180  # a token, for a reader of English prose: 5.5 tokens a second


@dataclass
class Load:
    """What so many clients at once have seen, in all rounds."""

    clients: int
    replies: list[Reply] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # tokens a second, a round each

    def client(self, name: str) -> float:
        """Return the median of a measure of `Reply`, in seconds."""
        return median([getattr(reply, name) for reply in self.replies])

    def server(self, name: str, percent: int = 50) -> float:
        """Return a percentile of one of the server's timings, in seconds since it was asked."""
        told = [(reply.timings or {}).get(name) for reply in self.replies]
        known = [value for value in told if value is not None]
        return median([measures.percentile(known, percent)])

    @property
    def per_token(self) -> float:
        """The median time per output token, in seconds."""
        return median([reply.time_per_output_token().seconds for reply in self.replies])


@experiment("load")
async def load(bench: Bench) -> Finding:
    """The model without a server, and behind it from one client to 32 at once."""
    bench.expect(LOAD_ROUNDS * (1 + sum(CLIENTS)) + 1 + MANY, "load")
    url = await bench.server()
    params = SamplingParams(**SAMPLING)
    prompts = [TEXTS[index % len(TEXTS)]["prompt"] for index in range(max(CLIENTS))]
    # The first passes of a model are slower, and so are the first that touch a row's memory.
    await bench.with_model(bare_loop, PROMPTS[0], params)
    await _ask_together(bench, url, prompts[:MANY])
    bare: list[float] = []
    loads = {clients: Load(clients) for clients in CLIENTS}
    for index in range(LOAD_ROUNDS):
        bare.append(await bench.with_model(bare_loop, PROMPTS[index % len(PROMPTS)], params))
        for clients, seen in loads.items():
            first = index % len(PROMPTS) if clients == 1 else 0
            replies = await _ask_together(bench, url, prompts[first : first + clients])
            seen.replies += replies
            seen.rates.append(_tokens_per_second(replies))
    alone = ["none: a bare loop", *["n/a"] * 4, seconds(1 / median(bare))]
    most = loads[max(CLIENTS)]
    return Finding(
        [
            "clients",
            "queued: median, p95",
            "first token, by the server",
            "first text, by the client",
            "all: server, client",
            "time per output token",
            "tokens/s",
            "lowest to highest",
        ],
        [
            [*alone, f"{median(bare):.1f}", span(bare, 1)],
            *(_load_row(seen) for seen in loads.values()),
        ],
        f"{LOAD_ROUNDS} rounds of all in turn, {TOKENS} tokens a reply, medians",
        [
            f"One client against the bare loop: {_ratio(loads[1].rates, bare)},"
            " goal: at least 0.95x.",
            f"{MANY} clients against one: {_ratio(loads[MANY].rates, loads[1].rates)},"
            " goal: at least 6x.",
            f"The reader's limit is {READER_MS} ms a token (published); with {max(CLIENTS)} clients"
            f" a token takes {seconds(most.per_token)}, {times(READER_MS / 1000 / most.per_token)}"
            " as fast as that.",
            f"The server has {MANY} rows: who comes when all are taken waits in its queue.",
            "Tokens/s: of all replies of a round, from the requests to the last text.",
        ],
        bench.model,
        [_load_curves(loads.values())],
    )


def bare_loop(model: Any, prompt: str, params: SamplingParams) -> float:
    """Generate one reply without engine or server; return tokens a second, the prompt included."""
    began = time.perf_counter()
    ids = model.encode(prompt)
    draws = random.Random(params.seed)
    length = len(ids)
    logits = model.prefill(0, ids)
    while True:
        ids.append(model.choose(logits, 0, params, ids, draws))
        if ids[-1] in model.eos_ids or len(ids) - length == params.max_tokens:
            break
        logits = model.decode([0], [ids[-1]])
    model.text(ids[length:])
    model.truncate(0, 0)
    return (len(ids) - length) / (time.perf_counter() - began)


async def _ask_together(bench: Bench, url: str, prompts: Sequence[str]) -> list[Reply]:
    async def ask(prompt: str) -> Reply:
        reply = await record(f"{url}/stream", body(prompt, usage=True))
        bench.step()
        return reply

    return await asyncio.gather(*map(ask, prompts))


def _tokens_per_second(replies: Sequence[Reply]) -> float:
    """Return the tokens of replies that were asked for at once over the time to the last text."""
    last = max(reply.last_text or 0 for reply in replies)
    return sum(reply.completion_tokens or 0 for reply in replies) / last


def _load_row(seen: Load) -> list[str]:
    queued = seen.server("queued"), seen.server("queued", 95)
    whole = seen.server("last_token"), seen.client("last_text")
    return [
        str(seen.clients),
        ", ".join(map(seconds, queued)),
        seconds(seen.server("first_token")),
        seconds(seen.client("first_text")),
        ", ".join(map(seconds, whole)),
        seconds(seen.per_token),
        f"{median(seen.rates):.1f}",
        span(seen.rates, 1),
    ]


def _load_curves(loads: Iterable[Load]) -> Curves:
    loads = list(loads)

    def points(measure: Callable[[Load], float], scale: float = 1000) -> list[tuple[float, float]]:
        return [(seen.clients, measure(seen) * scale) for seen in loads]

    return Curves(
        "load",
        "One model, more and more clients at once",
        "clients",
        [
            Panel(
                "first text, ms",
                {
                    "by the client": points(lambda seen: seen.client("first_text")),
                    "by the server": points(lambda seen: seen.server("first_token")),
                    "queued, p95": points(lambda seen: seen.server("queued", 95)),
                },
            ),
            Panel(
                "ms per output token",
                {"median": points(lambda seen: seen.per_token)},
                (f"a reader: {READER_MS} ms", READER_MS),
            ),
            Panel("tokens/s", {"all": points(lambda seen: median(seen.rates), 1)}),
        ],
    )


def _ratio(rates: Sequence[float], base: Sequence[float]) -> str:
    """Compare round by round, a slow one being slow in both; and the fastest with the fastest."""
    ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
    fastest = times(max(rates) / max(base))
    return f"{times(median(ratios))} (by round {', '.join(map(times, ratios))}; fastest {fastest})"


# A long prompt

RUNNING = 8
STALL_ROUNDS = 5
LONG_CHARACTERS = 7000  # of English prose, some 1,500 tokens
USUAL_S = 1.0  # how long the streams are watched before the prompt arrives


@dataclass(frozen=True)
class Arrival:
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
    chunked: list[Arrival] = []
    whole: list[Arrival] = []
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


async def _arrive(bench: Bench, url: str, number: int) -> Arrival:
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
    return Arrival(
        median(streams.gaps(since, began)),
        # A gap may have begun before the prompt came: one that is usual in length.
        max(streams.gaps(began, began + first_text)),
        max((end - start for name, start, end in passes if name == "prefill"), default=0.0),
        first_text,
        (reply.usage or {})["prompt_tokens"],
    )


def _stall_row(how: str, arrivals: Sequence[Arrival], chunks: Sequence[float]) -> list[str]:
    pairs = zip(arrivals, chunks, strict=True)
    ratios = [arrival.largest / (arrival.usual + chunk) for arrival, chunk in pairs]
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
READING_ROUNDS = 5
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


# A chat

TURNS = 5
CHATS = 5
TURN_TOKENS = 16


@experiment("chat")
async def chat(bench: Bench) -> Finding:
    """A chat of five turns, each sent with all before it: with prefix reuse and without."""
    bench.expect(CHATS * TURNS * 2, "chat")
    # One row: the second server would else take a new one each time, of memory yet untouched.
    reusing = await bench.server("--rows=1")
    anew = await bench.server("--rows=1", "--no-reuse")
    turns: list[list[tuple[Reply, Reply]]] = [[] for _ in range(TURNS)]
    for number in range(CHATS):
        # Chats differ from the first message on: nothing is left of one for the next.
        messages = [{"role": "system", "content": f"This is chat {number}. Answer in one line."}]
        for index, pairs in enumerate(turns):
            text = ENGLISH[(number * TURNS + index) % len(ENGLISH)]["human"]
            messages.append({"role": "user", "content": text})
            # Who is asked first changes from turn to turn.
            order = (reusing, anew) if (number + index) % 2 else (anew, reusing)
            replies = {url: await _turn(bench, url, messages) for url in order}
            pairs.append((replies[reusing], replies[anew]))
            messages.append({"role": "assistant", "content": replies[reusing].text})
    same = sum(reused.text == fresh.text for pairs in turns for reused, fresh in pairs)
    return Finding(
        [
            "turn",
            "prompt tokens",
            "first text with reuse",
            "without",
            "with against without",
            "ratio, lowest to highest",
        ],
        [_turn_row(index, pairs) for index, pairs in enumerate(turns, 1)],
        f"{CHATS} chats, {TURN_TOKENS} tokens a reply, both servers in turn; medians",
        [
            f"The same text with reuse and without: {same} of {CHATS * TURNS} replies.",
            "Only whole chunks of the prompt (128 tokens) are reused: so a reused chunk is bit for"
            " bit what it would be if it were computed again.",
        ],
        bench.model,
    )


async def _turn(bench: Bench, url: str, messages: Sequence[dict[str, str]]) -> Reply:
    asked = {**SAMPLING, "messages": messages, "max_tokens": TURN_TOKENS, "usage": True}
    reply = await record(f"{url}/stream", asked)
    bench.step()
    return reply


def _turn_row(number: int, pairs: Sequence[tuple[Reply, Reply]]) -> list[str]:
    reused, fresh = zip(*pairs, strict=True)
    firsts = [(median([a.first_text]), median([b.first_text])) for a, b in pairs]
    ratios = [with_reuse / without for with_reuse, without in firsts]
    return [
        str(number),
        span([(reply.usage or {})["prompt_tokens"] for reply in reused]),
        seconds(median([reply.first_text for reply in reused])),
        seconds(median([reply.first_text for reply in fresh])),
        times(median(ratios)),
        f"{times(min(ratios))} to {times(max(ratios))}",
    ]


# What the server adds

ADDED_ROUNDS = 3
ADDED_REPLIES = 20  # a round
PAUSE_S = 0.05  # at most, before each request, so that it falls on any moment of a step


@experiment("added")
async def added(bench: Bench) -> Finding:
    """Time to the first text in which the model does nothing: idle, and with streams running."""
    bench.expect(2 * ADDED_ROUNDS * ADDED_REPLIES, "added")
    url = await bench.dated_server()
    found: dict[int, list[tuple[float, float]]] = {0: [], RUNNING: []}
    for _ in range(ADDED_ROUNDS):
        for count, values in found.items():
            async with Streams(f"{url}/stream", count, counting):
                values += await _added(bench, url)
            await bench.idle(url)
    goals = {0: "not set", RUNNING: "2 ms, 10 ms"}
    return Finding(
        ["streams running", "first text", "added: median", "p95", "p99", "goal: median, p99"],
        [
            [
                str(count),
                seconds(median([first for first, _ in values])),
                *(f"{percent * 1000:.2f} ms" for percent in _ranks([own for _, own in values])),
                goals[count],
            ]
            for count, values in found.items()
        ],
        f"{ADDED_ROUNDS * ADDED_REPLIES} replies a row, in rounds of {ADDED_REPLIES} in turn",
        [
            "Added: first text as the client sees it, less the time in which the model ran"
            " (prefill, decode, choose, for whomever): queue, threads, HTTP, sockets, and the"
            " client's own part.",
            f"Requests come on a connection that is open, at random moments; {ADDED_REPLIES * 3}"
            " values make the p99 the largest.",
        ],
        bench.model,
    )


async def _added(bench: Bench, url: str) -> list[tuple[float, float]]:
    """Ask for single tokens; for each the first text, and what of it was not the model's."""
    draws = random.Random(1)
    asked: list[tuple[float, float]] = []
    await bench.get(f"{url}/passes")
    async with Recording() as session:
        for number in range(ADDED_REPLIES):
            await asyncio.sleep(draws.random() * PAUSE_S)
            prompt = {"prompt": f"The {number} old lighthouses stood", "max_tokens": 1}
            options = Options(timeout=REPLY_S)
            reply = checked(await session.ask(f"{url}/stream", prompt, options))
            asked.append((session.began, median([reply.first_text])))
            bench.step()
    passes = json.loads(await bench.get(f"{url}/passes"))["passes"]
    return [(first, first - within(passes, began, began + first)) for began, first in asked]


def within(passes: Iterable[Pass], since: float, until: float) -> float:
    """Return how long the model ran between two dates; one pass runs at a time."""
    return sum(max(0.0, min(ended, until) - max(began, since)) for _, began, ended in passes)


def _ranks(values: Sequence[float]) -> list[float]:
    return [median([measures.percentile(values, percent)]) for percent in (50, 95, 99)]
