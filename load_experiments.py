"""The experiments of the engine under load: many clients at once, long chats, the first token.

    load          without a server, and with 1 to 32 clients: tokens a second, waits, queue
    chat          a chat sends its history again with each turn
    added         what the server adds to the first token, beyond the model

Each has a goal, which stands beside what was measured. Conditions that are compared take turns, and
the spread is printed with each median: on a machine that does other things, too, it is wide, and
then no figure is to be trusted.

Not here: what one client does to the others. Read next: `neighbour_experiments.py`.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import measures
from bench import REPLY_S, Bench, experiment
from client import Options
from figures import Curves, Panel
from generation import SamplingParams
from measures import Reply
from recording import Recording, Streams, checked, record
from report import Finding, seconds, span, times
from workload import ENGLISH, PROMPTS, SAMPLING, TEXTS, body, counting, median

Pass = tuple[str, float, float]  # of the model: which, when it began, when it ended


# Many clients

CLIENTS = (1, 2, 4, 8, 16, 32)
MANY = 16  # as many as the server has rows; the rest wait in its queue
LOAD_ROUNDS = 1
LOAD_TOKENS = 64  # a reply
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
    params = SamplingParams(**{**SAMPLING, "max_tokens": LOAD_TOKENS})
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
        f"{LOAD_ROUNDS} rounds of all in turn, {LOAD_TOKENS} tokens a reply, medians",
        _load_notes(loads, bare),
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
        reply = await record(f"{url}/stream", body(prompt, max_tokens=LOAD_TOKENS, usage=True))
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


def _load_notes(loads: Mapping[int, Load], bare: Sequence[float]) -> list[str]:
    most = loads[max(CLIENTS)]
    return [
        f"One client against the bare loop: {_ratio(loads[1].rates, bare)}, goal: at least 0.95x.",
        f"{MANY} clients against one: {_ratio(loads[MANY].rates, loads[1].rates)},"
        " goal: at least 6x.",
        f"The reader's limit is {READER_MS} ms a token (published); with {max(CLIENTS)} clients"
        f" a token takes {seconds(most.per_token)}, {times(READER_MS / 1000 / most.per_token)}"
        " as fast as that.",
        f"The server has {MANY} rows: who comes when all are taken waits in its queue.",
        "Tokens/s: of all replies of a round, from the requests to the last text.",
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


# A chat

TURNS = 5
CHATS = 2
TURN_TOKENS = 4


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

STREAMS = 8  # that run while others are asked for
ADDED_ROUNDS = 2
ADDED_REPLIES = 20  # a round
PAUSE_S = 0.05  # at most, before each request, so that it falls on any moment of a step


@experiment("added")
async def added(bench: Bench) -> Finding:
    """Time to the first text in which the model does nothing: idle, and with streams running."""
    bench.expect(2 * ADDED_ROUNDS * ADDED_REPLIES, "added")
    url = await bench.dated_server()
    found: dict[int, list[tuple[float, float]]] = {0: [], STREAMS: []}
    for _ in range(ADDED_ROUNDS):
        for count, values in found.items():
            async with Streams(f"{url}/stream", count, counting):
                values += await _added(bench, url)
            await bench.idle(url)
    goals = {0: "not set", STREAMS: "2 ms, 10 ms"}
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
            f"Requests come on a connection that is open, at random moments;"
            f" {ADDED_ROUNDS * ADDED_REPLIES}"
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
