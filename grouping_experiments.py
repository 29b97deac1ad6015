"""The experiments on what may stand between a token and the wire, and what it costs.

    batching     several tokens make one event: fewer bytes, and each token waits for the last
    hold-back    the last tokens wait, so that a banned phrase was never sent
    padding      the size of an event tells the length of its token, unless it is padded

The first two ask the simulated engine, whose schedule is known: then what a token waited for can be
laid beside what it should, k - 1 times the time of a token, and half of that on average. The last
asks the model, for tokens as they are.

Not here: how it is done (`pieces.py`; `obfuscation` in `completions.py`). Read next:
`cache_experiments.py`.
"""

import asyncio
import http.client
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import client
from bench import REPLY_S, Bench, ExperimentError, experiment
from client import Options
from figures import Trade
from labs import asked, schedule
from measures import Event, Reply
from report import Finding, milliseconds
from workload import PROMPTS, body, median

WORD_MS = 33
STAGGER_S = 0.047  # between two requests: no multiple of the schedule's 33 ms

# Several tokens an event

GROUPED_WORDS = 120  # a multiple of all group sizes
GROUPED_REPLIES = 3
GROUPINGS: tuple[tuple[str, dict[str, int]], ...] = (
    ("k = 1", {}),
    ("k = 4", {"flush_tokens": 4}),
    ("k = 8", {"flush_tokens": 8}),
    ("20 ms", {"flush_ms": 20}),
    ("50 ms", {"flush_ms": 50}),
)


@dataclass(frozen=True)
class Hold:
    """How long tokens waited to be sent, in milliseconds."""

    first: float  # of a group
    average: float  # of all


@experiment("batching", waits=True)
async def batching(bench: Bench) -> Finding:
    """Several tokens in one event: bytes and events against how long the tokens are held."""
    bench.expect(len(GROUPINGS) * GROUPED_REPLIES, "batching")
    url = await bench.simulated(*schedule(WORD_MS))
    requests = [
        asked(GROUPED_WORDS) | {"seed": number} | how
        for _, how in GROUPINGS
        for number in range(GROUPED_REPLIES)
    ]
    replies = await staggered(bench, f"{url}/stream", requests)
    by_grouping = {
        name: replies[index * GROUPED_REPLIES : (index + 1) * GROUPED_REPLIES]
        for index, (name, _) in enumerate(GROUPINGS)
    }
    alone = by_grouping["k = 1"]
    holds = {name: _median_hold(alone, grouped) for name, grouped in by_grouping.items()}
    sizes = {
        name: median([reply.received.total for reply in grouped])
        for name, grouped in by_grouping.items()
    }
    rows = [
        [
            name,
            f"{sizes[name]:,.0f}",
            f"{sizes[name] / median([reply.text_bytes for reply in alone]):.1f}x",
            f"{median([len(reply.pieces) for reply in by_grouping[name]]):.0f}",
            _both(holds[name]),
            _both(expected_hold(WORD_MS, **how)),
            "99 and 49.5 ms" if name == "k = 4" else "not measured",
        ]
        for name, how in GROUPINGS
    ]
    held = "held: first of a group and average"
    return Finding(
        ["group", "bytes", "per byte of text", "events", held, "by schedule", "published"],
        rows,
        f"{GROUPED_REPLIES} replies a row of {GROUPED_WORDS} words, {WORD_MS} ms a word, medians",
        [
            "Held: how much later a token came than in the reply that is not grouped (k = 1).",
            "By schedule: (k - 1) d and d (k - 1) / 2 for groups of k tokens that come every d. A"
            " window holds a group's first token to its end, and those that come in it less.",
        ],
        "simulated",
        [_batching_trade(sizes, holds)],
    )


def _batching_trade(sizes: Mapping[str, float], holds: Mapping[str, Hold]) -> Trade:
    return Trade(
        "batching",
        "Several tokens in one event: bytes against time",
        f"bytes on the wire, {GROUPED_WORDS} words",
        "a token is held, on average, ms",
        {name: (sizes[name], holds[name].average) for name, _ in GROUPINGS},
        [["k = 1", "k = 4", "k = 8"], ["20 ms", "50 ms"]],
    )


async def staggered(bench: Bench, url: str, requests: Sequence[dict[str, Any]]) -> list[Reply]:
    """Ask for all side by side, but none in the moment of another: they wait most of the time."""

    async def ask(number: int, request: dict[str, Any]) -> Reply:
        await asyncio.sleep(number * STAGGER_S)
        return await bench.ask(url, request)

    return await asyncio.gather(*(ask(*pair) for pair in enumerate(requests)))


def expected_hold(word_ms: float, flush_tokens: int = 1, flush_ms: float | None = None) -> Hold:
    """Return what the schedule says of groups of so many tokens, or of a window."""
    if flush_ms is None:
        wait = (flush_tokens - 1) * word_ms
        return Hold(wait, wait / 2)
    together = int(flush_ms // word_ms) + 1
    return Hold(flush_ms, flush_ms - word_ms * (together - 1) / 2)


def measured_hold(alone: Sequence[Event], grouped: Sequence[Event]) -> Hold:
    """Compare a reply's words, by when they came, with those of the same reply in groups."""
    dates = [event.at for event in alone for _ in event.text.split()]
    groups = [(event.at, len(event.text.split())) for event in grouped if event.text]
    if sum(count for _, count in groups) != len(dates):
        raise ExperimentError("two replies to one request have not the same words")
    first: list[float] = []
    holds: list[float] = []
    for at, count in groups:
        waits = [at - date for date in dates[len(holds) : len(holds) + count]]
        first.append(waits[0] * 1000)
        holds += [wait * 1000 for wait in waits]
    return Hold(median(first), sum(holds) / len(holds))


def _median_hold(alone: Sequence[Reply], grouped: Sequence[Reply]) -> Hold:
    pairs = zip(alone, grouped, strict=True)
    holds = [measured_hold(one.events, other.events) for one, other in pairs]
    return Hold(median([hold.first for hold in holds]), median([hold.average for hold in holds]))


def _both(hold: Hold) -> str:
    return f"{hold.first:.1f} and {hold.average:.1f} ms"


# Held back

HELD_WORDS = 40
PHRASE = slice(20, 23)  # which words of the reply are the banned phrase
HELD_BACK = (0, 1, 2, 10)
HELD_REPLIES = 5


@experiment("hold-back", waits=True)
async def hold_back(bench: Bench) -> Finding:
    """The last tokens wait: what that costs, and whether a banned phrase is ever seen."""
    bench.expect(len(HELD_BACK) * HELD_REPLIES + 1 + len(HELD_BACK), "hold-back")
    url = await bench.simulated(*schedule(WORD_MS))
    words = (await bench.ask(f"{url}/complete", asked(HELD_WORDS))).text.split()
    phrase = " ".join(words[PHRASE])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "banned.txt"
        file.write_text(f"{phrase}\n", encoding="utf-8")
        filtered = await bench.simulated(*schedule(WORD_MS), f"--banned={file}")
    requests = [asked(HELD_WORDS, hold_back=w) for w in HELD_BACK for _ in range(HELD_REPLIES)]
    replies = iter(await staggered(bench, f"{url}/stream", requests))
    first = {
        tokens: median([reply.first_text for reply in islice(replies, HELD_REPLIES)])
        for tokens in HELD_BACK
    }
    rows = []
    for tokens in HELD_BACK:
        request = asked(HELD_WORDS, hold_back=tokens)
        reply = await client.ask(f"{filtered}/stream", request, Options(timeout=REPLY_S))
        bench.step()
        later_s = first[tokens] - first[0]
        rows.append([str(tokens), *_held_cells(tokens, first[tokens], later_s, reply, phrase)])
    return Finding(
        [
            "held back",
            "first text",
            "later by",
            "by schedule",
            "words of the phrase seen",
            "phrase seen",
            "the reply ended with",
            "published",
        ],
        rows,
        f"{HELD_REPLIES} replies a row, medians, without a banned phrase; 1 with it, exact;"
        f" {WORD_MS} ms a token",
        [
            f'Banned are the words {PHRASE.start + 1} to {PHRASE.stop} of the reply: "{phrase}".'
            " What is held back has to be as long as the phrase without its last word: else its"
            " beginning is out before its end is known."
        ],
        "simulated",
    )


def _held_cells(
    tokens: int, first_s: float, later_s: float, filtered: Reply, phrase: str
) -> list[str]:
    seen = max(0, len(filtered.text.split()) - PHRASE.start)
    return [
        milliseconds(first_s),
        milliseconds(later_s),
        f"{tokens * WORD_MS} ms",
        f"{seen} of {PHRASE.stop - PHRASE.start}",
        "no" if phrase not in filtered.text else "yes",
        str(filtered.error or filtered.finish_reason),
        "330 ms; never seen" if tokens == 10 else "not measured",
    ]


# What the size of an event tells


PADDED_TOKENS = 50  # a reply


@experiment("padding")
async def padding(bench: Bench) -> Finding:
    """The lengths of tokens, read off the sizes of events: as they are, and padded."""
    bench.expect(2 * len(PROMPTS), "padding")
    url = await bench.server()
    rows = []
    ways = {"as it is": False, "padded (`--pad`)": True}
    # All at once, in one batch.
    asked = [_chat(bench, url, prompt, pads) for pads in ways.values() for prompt in PROMPTS]
    replies = await asyncio.gather(*asked)
    for number, name in enumerate(ways):
        contents = replies[number * len(PROMPTS) : (number + 1) * len(PROMPTS)]
        seen = [pair for content in contents for pair in sizes_and_lengths(content)]
        exact, off = recovered(seen)
        rows.append([name, f"{len(seen)}", f"{exact:.0%}", f"{off:.1f} bytes"])
    published = "29% of openings reconstructed, 55% of topics inferred", "not measured"
    return Finding(
        ["events of /v1/chat/completions", "tokens", "lengths right", "off by", "published"],
        [[*row, was] for row, was in zip(rows, published, strict=True)],
        f"{len(PROMPTS)} replies a row, exact",
        [
            "Who watches an encrypted stream sees sizes, not text. The format is public, so a size"
            " less what all events have in common is the length of a token; here that constant is"
            " the one that is right most often, the best that a watcher can guess.",
            "As they are, only tokens with a line end, a quotation mark or a backslash are guessed"
            " wrong: JSON writes those in two bytes.",
            "Published is what became of the lengths of unpadded tokens: Weiss et al. 2024 trained"
            " a model to guess the text from them. That step is not repeated here.",
            "Off by: the mean of how far the guessed lengths are from the right ones.",
        ],
        bench.model,
    )


async def _chat(bench: Bench, url: str, prompt: str, pads: bool) -> bytes:
    request = body(prompt, max_tokens=PADDED_TOKENS)
    request["messages"] = [{"role": "user", "content": request.pop("prompt")}]
    options = {"include_obfuscation": pads}
    content = await asyncio.to_thread(
        _post,
        f"{url}/v1/chat/completions",
        {**request, "stream": True, "stream_options": options},
    )
    bench.step()
    return content


def _post(url: str, request: Mapping[str, Any]) -> bytes:
    """Return the content of a whole event stream, as it is."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=REPLY_S)
    try:
        fields = {"Content-Type": "application/json"}
        connection.request("POST", parts.path, json.dumps(request), fields)
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ExperimentError(f"{url}: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise ExperimentError(f"{url}: {response.status} {content.decode(errors='replace')}")
    return content


def sizes_and_lengths(content: bytes) -> list[tuple[int, int]]:
    """Return the size of each event that has text, and the bytes of that text."""
    found = []
    for event in content.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        choices = json.loads(data)["choices"] if data not in (b"", b"[DONE]") else []
        text = choices[0]["delta"].get("content") if choices else None
        if text:
            found.append((len(event), len(text.encode())))
    return found


def recovered(seen: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Guess each length as its event's size less a constant; the share right, and the mean error.

    The constant is the one that is right most often.
    """
    differences = [size - length for size, length in seen]
    constant = max(sorted(set(differences)), key=differences.count)
    errors = [abs(difference - constant) for difference in differences]
    return errors.count(0) / len(errors), sum(errors) / len(errors)
