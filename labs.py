"""The experiments on a schedule: what streaming does to the wait, with the model taken out of it.

    lab          40 calls at once: who waits for the whole reply, and who reads it as it comes
    timestamps   one short reply, moment by moment
    pairs        the same reply both ways, in turn, beside its schedule
    faults       replies that fail or are cut: are they told from whole ones?
    felt         how much sooner streaming feels, by what share of the time the first word takes

All of them ask the simulated engine (`simulated.py`) over real HTTP. Its words come on a seeded
schedule, on any machine the same, so that what is measured can be laid beside what was published
elsewhere: what differs is delivery.

Not here: the same of a real model (`experiments.py`). Read next: `grouping_experiments.py`.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import client
import measures
from bench import REPLY_S, Bench, ExperimentError, experiment
from client import Options
from figures import Staircase
from generation import SamplingParams
from measures import Reply
from recording import Recording
from report import Finding, milliseconds, times
from simulated import SimulatedEngine
from workload import arrivals, median

PROMPT = "Why does the first word come sooner?"
SEED = 42
WORD_MS, JITTER_MS = 33, 8  # between two words, more or less

# One word each, and a JSON string an event: what the published bytes count.
BARE = {"events": "bare"}
HTTP_1_0 = Options(http_version="1.0", timeout=REPLY_S)
HTTP_1_1 = Options(timeout=REPLY_S)


def schedule(word_ms: float, jitter_ms: float = 0, first_ms: float | None = None) -> list[str]:
    """Return a server's flags for words on this schedule, the first after `first_ms`."""
    before = 0 if first_ms is None else first_ms - word_ms
    flags = {"delay-ms": word_ms, "jitter-ms": jitter_ms, "first-delay-ms": before, "seed": SEED}
    return [f"--{name}={value:g}" for name, value in flags.items()]


def asked(words: int, **more: Any) -> dict[str, Any]:
    """Return a request for a reply of so many words."""
    return {"prompt": PROMPT, "max_tokens": words, "seed": SEED, **more}


# Forty calls at once

LAB_WORDS = 120
LAB_CALLS = 20  # a mode
LAB_PUBLISHED = {
    "wait": "3,974.8 (4,062.2); 3,974.8 (4,062.2) ms",
    "stream": "31.8 (39.3); 3,980.7 (4,062.3) ms",
}


@experiment("lab")
async def lab(bench: Bench) -> Finding:
    """Forty calls at once, half of them for whole replies and half for streams."""
    bench.expect(2 * LAB_CALLS, "lab")
    url = await bench.simulated(*schedule(WORD_MS, JITTER_MS))
    # Each call has a seed of its own, a call for a stream the same as one for a whole reply.
    seeds = [{"seed": SEED + number} for number in range(LAB_CALLS)]
    ways = (f"{url}/complete", asked(LAB_WORDS)), (f"{url}/stream", asked(LAB_WORDS, usage=True))
    calls = [(address, body | seed) for seed in seeds for address, body in ways]
    replies = await at_once(bench, calls)
    wait, stream = replies[::2], replies[1::2]
    summary = {mode: lab_summary(of_mode) for mode, of_mode in (("wait", wait), ("stream", stream))}
    sooner = summary["wait"]["first_text_ms"] - summary["stream"]["first_text_ms"]
    return Finding(
        ["call", "first text: median, p95", "all text: median, p95", "published"],
        [
            *(_lab_row(mode, of_mode) for mode, of_mode in summary.items()),
            ["stream, by the server's clock", _server_first(stream), "not dated", "31.8 (39.3) ms"],
        ],
        f"{LAB_CALLS} calls a row, all {2 * LAB_CALLS} at once; {LAB_WORDS} words a reply,"
        f" {WORD_MS} ms a word, {JITTER_MS} ms more or less, seed {SEED}",
        [
            f"First text sooner by {sooner:,.0f} ms (published: 3,943 ms).",
            "The schedule is drawn anew here: 120 x 33 ms are 3,960 ms, and a sum of 120 draws"
            " lies within 3% of that 19 times in 20.",
            "The server's clock starts when it begins with a request: by the client's, a request"
            " also waits for the others of its moment, which is the machine's affair.",
            "[timeline.json](timeline.json) has the dates of every call, and of every word of one.",
        ],
        "simulated",
        [
            Staircase(
                "lab",
                f"The same {LAB_WORDS} words, asked for whole and as a stream",
                {"stream": arrivals(stream[0]), "wait": arrivals(wait[0])},
            )
        ],
        {"timeline.json": timeline(wait, stream)},
        summary,
    )


async def at_once(bench: Bench, calls: Sequence[tuple[str, dict[str, Any]]]) -> list[Reply]:
    """Ask for all in the same moment, over connections that are open by then.

    Streams are dated as they come and read when they are over: reading takes no time from others.
    """
    async with AsyncExitStack() as stack:
        kinds = [Recording if url.endswith("/stream") else client.Session for url, _ in calls]
        sessions = [await stack.enter_async_context(kind()) for kind in kinds]
        for session, (url, _) in zip(sessions, calls, strict=True):
            await session.ask(url, asked(1), HTTP_1_1)
        pairs = zip(sessions, calls, strict=True)
        asking = [bench.ask(url, body, session=session) for session, (url, body) in pairs]
        return await asyncio.gather(*asking)


def lab_summary(replies: Sequence[Reply]) -> dict[str, float]:
    """Return median and p95 of first text and of all text, in milliseconds."""
    first = [reply.first_text or 0.0 for reply in replies]
    total = [reply.last_text or 0.0 for reply in replies]
    named = {"first_text": first, "total": total}
    return {
        f"{name}{suffix}_ms": round(median([measures.percentile(values, percent)]) * 1000, 1)
        for name, values in named.items()
        for suffix, percent in (("", 50), ("_p95", 95))
    }


def _lab_row(mode: str, summary: Mapping[str, float]) -> list[str]:
    return [
        mode,
        f"{summary['first_text_ms']:,} ms, {summary['first_text_p95_ms']:,} ms",
        f"{summary['total_ms']:,} ms, {summary['total_p95_ms']:,} ms",
        LAB_PUBLISHED[mode],
    ]


def _server_first(replies: Sequence[Reply]) -> str:
    first = [(reply.timings or {}).get("first_token") for reply in replies]
    if None in first:
        raise ExperimentError("the server does not tell when a reply's first token came")
    ranks = measures.spread(date for date in first if date is not None)
    return f"{milliseconds(ranks.p50)}, {milliseconds(ranks.p95)}"


def timeline(wait: Sequence[Reply], stream: Sequence[Reply]) -> str:
    """Return the calls as JSON: dates in milliseconds since the request."""

    def ms(date: float | None) -> float | None:
        return None if date is None else round(date * 1000, 1)

    def call(mode: str, number: int, reply: Reply) -> dict[str, Any]:
        dates: dict[str, Any] = {"mode": mode, "seed": SEED + number}
        dates |= {"first_text_ms": ms(reply.first_text), "total_ms": ms(reply.last_text)}
        if number == 0:
            dates["events_ms"] = [ms(event.at) for event in reply.events if event.text]
        return dates

    modes = (("wait", wait), ("stream", stream))
    calls = [call(mode, *pair) for mode, replies in modes for pair in enumerate(replies)]
    about = {"words": LAB_WORDS, "word_ms": WORD_MS, "jitter_ms": JITTER_MS, "seed": SEED}
    lines = ",\n  ".join(json.dumps(one) for one in calls)
    return f'{{"schedule": {json.dumps(about)}, "calls": [\n  {lines}\n]}}\n'


# One reply, moment by moment

# 18 events of 10 bytes and their word, `data: [DONE]` and a blank line (14), are 276 bytes if the
# text has 82; and `{"text":"..."}` around 82 is 93.
TIMED_WORDS, TIMED_BYTES = 18, 82
TIMED_REPLIES = 5
SEEDS = 500  # to look through: of the texts of 18 words, one in some 60 has so many bytes


async def seed_of(words: int, size: int) -> int:
    """Return the first seed whose reply of so many words has so many bytes."""
    engine = SimulatedEngine(SEED, delay_ms=0, jitter_ms=0)
    for seed in range(SEEDS):
        params = SamplingParams(max_tokens=words, seed=seed)
        pieces = [piece async for piece in engine.submit(PROMPT, params)]
        if len("".join(pieces).encode()) == size:
            return seed
    raise ExperimentError(f"no reply of {words} words has {size} bytes")


@experiment("timestamps", waits=True)
async def timestamps(bench: Bench) -> Finding:
    """One reply of 18 words, whole and as a stream: when its parts come, and how large they are."""
    bench.expect(2 * TIMED_REPLIES, "timestamps")
    url = await bench.simulated(*schedule(WORD_MS))
    body = asked(TIMED_WORDS, **BARE) | {"seed": await seed_of(TIMED_WORDS, TIMED_BYTES)}
    ways: dict[str, list[Reply]] = {"complete": [], "stream": []}
    async with client.Session() as session:  # so that no reply has to wait for a connection
        await session.ask(f"{url}/stream", asked(1), HTTP_1_1)
        for _ in range(TIMED_REPLIES):
            for route, replies in ways.items():
                replies.append(await bench.ask(f"{url}/{route}", body, session=session))
    published = {"complete": "93 bytes", "stream": "276 bytes; head within 2 ms"}
    header = ["reply", "head", "first text", "last text", "close"]
    return Finding(
        [*header, "bytes of the body", "complete", "error", "published"],
        [[route, *_moments(replies), published[route]] for route, replies in ways.items()],
        f"{TIMED_REPLIES} replies a row, in turn, medians; {TIMED_WORDS} words,"
        f" one each {WORD_MS} ms",
        [
            "Each event is a JSON string (`events: bare`). The published whole reply was written"
            ' without a space after its colon, `{"text":"..."}`, and is a byte shorter.',
            f"By the schedule the last word comes after {TIMED_WORDS * WORD_MS} ms.",
        ],
        "simulated",
    )


def _moments(replies: Sequence[Reply]) -> list[str]:
    dates = (
        [reply.first_byte for reply in replies],
        [reply.first_text for reply in replies],
        [reply.last_text for reply in replies],
        [reply.close for reply in replies],
    )
    return [
        *(milliseconds(median(of_date)) for of_date in dates),
        f"{median([reply.received.payload for reply in replies]):,.0f}",
        "yes" if all(reply.complete for reply in replies) else "no",
        next((reply.error for reply in replies if reply.error), "none"),
    ]


# Pairs

FRAGMENTS = 31
FIRST_MS, FRAGMENT_MS = 400, 80
PAIRS = 12
STAGGER_S = 0.13  # between two pairs: no multiple of the schedule's 80 ms


@experiment("pairs", waits=True)
async def pairs(bench: Bench) -> Finding:
    """The same reply whole and as a stream, one after the other, beside the schedule of both."""
    bench.expect(2 * (PAIRS + 1), "pairs")
    url = await bench.simulated(*schedule(FRAGMENT_MS, 0, FIRST_MS))
    await _pair(bench, url, 0)
    # All of them wait most of the time, so they run side by side, each begun a bit later.
    both = await asyncio.gather(
        *(_pair(bench, url, number, number * STAGGER_S) for number in range(PAIRS))
    )
    stream, blocking = ([pair[which] for pair in both] for which in range(2))
    first, whole = ([reply.first_text for reply in replies] for replies in (stream, blocking))
    by_schedule = FIRST_MS + (FRAGMENTS - 1) * FRAGMENT_MS
    return Finding(
        ["call", "first text: median, p95", "all text: median, p95", "schedule", "published"],
        [
            [
                "stream",
                *_middle_and_tail(stream),
                f"{FIRST_MS} ms; {by_schedule:,} ms",
                "402, 404 ms; 2,836, 2,841 ms",
            ],
            [
                "blocking",
                *_middle_and_tail(blocking),
                f"{by_schedule:,} ms",
                "2,824, 2,829 ms",
            ],
        ],
        f"{PAIRS} pairs after one to warm up; {FRAGMENTS} fragments, the first after {FIRST_MS} ms,"
        f" then one each {FRAGMENT_MS} ms",
        [
            f"First text sooner by {times(median(whole) / median(first))} (published: 7.0x).",
            "The two of a pair run one after the other, and every second pair the other way round.",
        ],
        "simulated",
    )


async def _pair(bench: Bench, url: str, number: int, delay_s: float = 0) -> tuple[Reply, Reply]:
    """Ask for a stream and for a whole reply; which goes first changes from pair to pair."""
    await asyncio.sleep(delay_s)
    routes = ["stream", "complete"]
    order = routes if number % 2 == 0 else routes[::-1]
    replies = {route: await bench.ask(f"{url}/{route}", asked(FRAGMENTS)) for route in order}
    return replies["stream"], replies["complete"]


def _middle_and_tail(replies: Sequence[Reply]) -> list[str]:
    first = measures.spread(reply.first_text or 0.0 for reply in replies)
    total = measures.spread(reply.last_text or 0.0 for reply in replies)
    return [f"{milliseconds(one.p50)}, {milliseconds(one.p95)}" for one in (first, total)]


# Replies that do not end well

FAULTS = ("fail_after", "truncate_after")
FAULTY_WORDS, GOOD_WORDS = 10, 3
FAULT_ROUTES = (  # as the report has it, route, how to ask
    ("/stream", "stream", HTTP_1_1),
    ("/stream, to the close", "stream", HTTP_1_0),
    ("/ws", "ws", HTTP_1_1),
    ("/complete", "complete", HTTP_1_1),
)


@experiment("faults", waits=True)
async def faults(bench: Bench) -> Finding:
    """A model that fails and a connection that is cut, after three words: what the client sees."""
    bench.expect(len(FAULTS) * len(FAULT_ROUTES), "faults")
    url = await bench.simulated(*schedule(WORD_MS))
    published = {"fail_after": "error event", "truncate_after": "end without done"}
    rows = []
    for fault in FAULTS:
        for name, route, options in FAULT_ROUTES:
            body = asked(FAULTY_WORDS, **{fault: GOOD_WORDS})
            reply = await client.ask(f"{url}/{route}", body, options)
            bench.step()
            said = "not measured" if route != "stream" else published[fault]
            rows.append([f"{fault}={GOOD_WORDS}", name, *_verdict(reply), said])
    rejected = sum(row[2] == "rejected" for row in rows)
    return Finding(
        ["fault", "reply", "taken as", "words", "what the client saw", "published"],
        rows,
        "1 reply a row, exact",
        [
            f"Rejected: {rejected} of {len(rows)} (published: both). Of a whole reply nothing is"
            " sent before all of it is there, so no words are seen of one that fails."
        ],
        "simulated",
    )


def _verdict(reply: Reply) -> list[str]:
    words = str(len(reply.text.split()))
    if reply.failure is None:
        return ["whole", words, "nothing"]
    return ["rejected", words, f"{reply.failure}: {reply.error}"]


# How it feels

FELT_MS = 3000
FELT_WORDS = 41
SHARES = (0.05, 0.1, 0.2, 0.5, 0.9)  # of the time that the first word takes
FELT_REPLIES = 3


@experiment("felt", waits=True)
async def felt(bench: Bench) -> Finding:
    """A reply of three seconds: how much sooner its first word is read, by when that comes."""
    bench.expect(len(SHARES) * 2 * FELT_REPLIES, "felt")
    urls = await asyncio.gather(*(bench.simulated(*felt_schedule(share)) for share in SHARES))
    coming = [_felt_row(bench, *pair) for pair in zip(urls, SHARES, strict=True)]
    return Finding(
        [
            "share of the total",
            "by schedule",
            "stream: first text",
            "all text",
            "felt",
            "published",
        ],
        await asyncio.gather(*coming),
        f"{FELT_REPLIES} replies a way and row, medians; {FELT_WORDS} words in {FELT_MS:,} ms",
        [
            "Felt: the wait for the whole reply against the wait for the first word of a stream. It"
            " is the inverse of the share that the first word takes: who has to wait for the model"
            " to begin gains little by a stream."
        ],
        "simulated",
    )


def felt_schedule(share: float) -> list[str]:
    """Return a server's flags for `FELT_WORDS` in `FELT_MS`, this share of it for the first."""
    rest_ms = FELT_MS * (1 - share) / (FELT_WORDS - 1)
    return schedule(rest_ms, 0, FELT_MS * share)


async def _felt_row(bench: Bench, url: str, share: float) -> list[str]:
    coming = [
        bench.ask(f"{url}/{route}", asked(FELT_WORDS))
        for route in ("stream", "complete")
        for _ in range(FELT_REPLIES)
    ]
    replies = await asyncio.gather(*coming)
    first, whole = (
        median([reply.first_text for reply in half])
        for half in (replies[:FELT_REPLIES], replies[FELT_REPLIES:])
    )
    return [
        f"{share:.0%}",
        f"{FELT_MS * share:,.0f} of {FELT_MS:,} ms",
        milliseconds(first),
        milliseconds(whole),
        times(whole / first),
        "10x" if share == 0.1 else "not measured",
    ]
