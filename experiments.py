"""The experiments: what streaming buys and what breaks it, measured beside what was published.

    python experiments.py                       # all of them, in less than ten minutes
    python experiments.py three-ways proxy      # some
    python experiments.py --list

One function an experiment, in the order of the report. It is given a `bench`, asks its servers, and
returns a `Finding`: a table with a published column, and notes. To add one, write it:

    @experiment("name")
    async def name(bench: Bench) -> Finding:
        \"\"\"What is measured, as the report shall say it.\"\"\"

Published figures were measured with Qwen2.5-1.5B-Instruct on an Apple M4, by others. Times are
medians (nearest-rank), and ways that are compared take turns, so that a slow minute of the machine
falls on all of them.

Not here: processes, progress and the command (`bench.py`), tables and the report (`report.py`), the
clock (`wire.py`) and what a measure means (`measures.py`), and the experiments of the files that
this one imports at its end, which this command runs, too. Read next: `labs.py`.
"""

import asyncio
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import client
import dialects
import websocket
from bench import Bench, experiment, main
from client import Options
from detokenizer import REPLACEMENT, Detokenizer
from figures import Staircase
from measures import Reply
from report import Finding, seconds, span, times
from workload import ENGLISH, PROMPTS, TOKENS, arrivals, body, median

# How many pieces a client takes before it leaves or says stop.
LEAVE_AFTER = 10

# Silent reading of English prose: Brysbaert 2019, a meta-analysis of 190 studies.
READER_WORDS_PER_MINUTE = 238


# The same text in three ways

TO_THE_CLOSE = Options(http_version="1.0")  # content without chunks, delimited by the close
WAYS = (  # way, route, how to ask, published times and bytes
    ("/complete", "complete", Options(), "4.68 / 4.68 s; 596 B, 1.2x"),
    ("/stream, chunked", "stream", Options(), "not measured"),
    ("/stream, to the close", "stream", TO_THE_CLOSE, "0.13 / 4.75 s; 2,626 B, 5.4x"),
    ("/ws", "ws", Options(), "0.13 / 5.12 s; 2,038 B, 4.2x"),
)


@experiment("three-ways")
async def three_ways(bench: Bench) -> Finding:
    """The same text whole, as server-sent events and over a WebSocket: when, in how many bytes."""
    prompts = PROMPTS[:2]
    bench.expect(len(WAYS) * len(prompts), "three-ways")
    url = await bench.server()
    replies: dict[str, list[Reply]] = {way: [] for way, *_ in WAYS}
    for prompt in prompts:
        for way, route, options, _ in WAYS:
            replies[way].append(await bench.ask(f"{url}/{route}", body(prompt), options))
    return Finding(
        ["way", "first text", "all text", "bytes on the wire", "per byte of text", "published"],
        [_way_row(way, replies[way], published) for way, _, _, published in WAYS],
        f"{len(prompts)} prompts, {TOKENS} tokens each, times are medians, bytes are means",
        _way_notes(list(replies.values())),
        bench.model,
        [
            Staircase(
                "three-ways",
                f"One reply of {TOKENS} tokens, in each way",
                {way: arrivals(of_way[0]) for way, of_way in replies.items()},
            )
        ],
    )


def _way_row(way: str, replies: Sequence[Reply], published: str) -> list[str]:
    received = sum(reply.received.total for reply in replies)
    return [
        way,
        seconds(median([reply.first_text for reply in replies])),
        seconds(median([reply.last_text for reply in replies])),
        f"{received / len(replies):,.0f}",
        times(received / max(1, sum(reply.text_bytes for reply in replies))),
        published,
    ]


def _way_notes(ways: Sequence[Sequence[Reply]]) -> list[str]:
    buffered, *streamed = ways
    same = sum(len({reply.text for reply in way}) == 1 for way in zip(*ways, strict=True))
    totals = [median([reply.last_text for reply in way]) for way in ways]
    fastest = [min(reply.last_text or 0 for reply in way) for way in ways]
    first = max(median([reply.first_text for reply in way]) for way in streamed)
    sizes = [reply.text_bytes for reply in buffered]
    return [
        f"The same text in all ways: {same} of {len(buffered)} prompts (published: yes).",
        f"Text: {sum(sizes) / len(sizes):,.0f} bytes a reply (published: 488).",
        f"First text of the streams: at most {first / totals[0]:.1%} of the buffered total.",
        f"Totals: the medians within {_apart(totals)} of each other, the fastest reply of each way"
        f" within {_apart(fastest)} (what else the machine does can only slow a reply).",
    ]


def _apart(values: Sequence[float]) -> str:
    return f"{max(values) / min(values) - 1:.1%}"


# Leaving


@experiment("leave")
async def leave(bench: Bench) -> Finding:
    """What is still generated when the client has left, by a server that watches or does not."""
    prompts = PROMPTS[:1]
    bench.expect(2 * len(prompts), "leave")
    rows = []
    for server, flags, published in (("watching", (), "10"), ("--naive", ("--naive",), "100")):
        url = await bench.server(*flags)
        left = [await _leave_stream(bench, url, prompt) for prompt in prompts]
        rows.append(["/stream", server, *_spans(left), published])
        left = [await _leave_complete(bench, url, prompt) for prompt in prompts]
        rows.append(["/complete", server, *_spans(left), "not measured"])
    note = (
        f"/stream is left after {LEAVE_AFTER} pieces, /complete once the server's log says"
        f" {TOKENS // 2} tokens; what was generated in the end is the log's word, too."
    )
    header = ["route", "server", "tokens when the client left", "tokens generated", "published"]
    n = f"{len(prompts)} reply a row, of {TOKENS} tokens if nobody leaves"
    return Finding(header, rows, n, [note], bench.model)


async def _leave_stream(bench: Bench, url: str, prompt: str) -> tuple[int, int]:
    """Leave a stream; return the pieces received, and the tokens generated in the end."""
    before = await bench.newest(url)
    reply = await bench.ask(f"{url}/stream", body(prompt), Options(leave_after=LEAVE_AFTER))
    entry = await bench.follow(url, before, _ended)
    return len(reply.pieces), entry["completion_tokens"]


async def _leave_complete(bench: Bench, url: str, prompt: str) -> tuple[int, int]:
    """Leave a buffered reply half way; return the tokens generated by then, and in the end."""
    before = await bench.newest(url)
    asking = asyncio.create_task(client.ask(f"{url}/complete", body(prompt)))
    try:
        half = await bench.follow(
            url, before, lambda entry: _ended(entry) or entry["completion_tokens"] >= TOKENS // 2
        )
    finally:
        asking.cancel()  # which closes its connection
        await asyncio.gather(asking, return_exceptions=True)
    entry = await bench.follow(url, before, _ended)
    return half["completion_tokens"], entry["completion_tokens"]


def _ended(entry: dict[str, Any]) -> bool:
    return entry["finish_reason"] is not None


def _spans(pairs: Sequence[tuple[int, int]]) -> list[str]:
    return [span(values) for values in zip(*pairs, strict=True)]


@experiment("stop")
async def stop(bench: Bench) -> Finding:
    """What a server still generates when a WebSocket client says stop and stays to hear the end."""
    prompts = PROMPTS[:3]
    bench.expect(len(prompts), "stop")
    url = await bench.server()
    how = Options(stop_after=LEAVE_AFTER)
    replies = [await bench.ask(f"{url}/ws", body(prompt), how) for prompt in prompts]
    tokens = [reply.completion_tokens or 0 for reply in replies]
    pieces = [len(reply.pieces) for reply in replies]
    reasons = sorted({str(reply.finish_reason) for reply in replies})
    return Finding(
        ["stop said after", "pieces received", "tokens generated", "finish reason", "published"],
        [[f"{LEAVE_AFTER} pieces", span(pieces), span(tokens), ", ".join(reasons), "10"]],
        f"{len(prompts)} replies, of {TOKENS} tokens if nobody says stop",
        model=bench.model,
    )


# A gateway in between


@experiment("proxy")
async def proxy(bench: Bench) -> Finding:
    """A stream through a gateway that waits for blocks of 8 KiB, and through one told not to."""
    prompts = PROMPTS[:2]
    bench.expect(3 * len(prompts), "proxy")
    url = await bench.server()
    paths = {
        ("direct", "not measured"): url,
        ("buffering", "4.91 / 4.91 s; 100; 2,583"): await bench.proxy(url),
        ("--honor", "0.20 / 5.03 s; 100; 2,583"): await bench.proxy(url, "--honor"),
    }
    replies: dict[tuple[str, str], list[Reply]] = {path: [] for path in paths}
    for prompt in prompts:
        # At the same time: a slow moment of the machine then falls on all paths alike.
        asked = (bench.ask(f"{origin}/stream", body(prompt)) for origin in paths.values())
        for path, reply in zip(paths, await asyncio.gather(*asked), strict=True):
            replies[path].append(reply)
    same = all(
        len({(reply.text, reply.received.payload) for reply in of_prompt}) == 1
        for of_prompt in zip(*replies.values(), strict=True)
    )
    return Finding(
        ["path", "first text", "end", "pieces", "bytes of content", "published"],
        [_path_row(path, of_path, published) for (path, published), of_path in replies.items()],
        f"{len(prompts)} prompts, {TOKENS} tokens each, by all paths at once; medians",
        [f"The same content by every path: {'yes' if same else 'no'}."],
        bench.model,
    )


def _path_row(path: str, replies: Sequence[Reply], published: str) -> list[str]:
    return [
        path,
        seconds(median([reply.first_text for reply in replies])),
        seconds(median([reply.end for reply in replies])),
        f"{median([len(reply.pieces) for reply in replies]):,.0f}",
        f"{median([reply.received.payload for reply in replies]):,.0f}",
        published,
    ]


# The size of a piece

PIECE = "Two"
ANTHROPIC_EVENT = (
    "event: content_block_delta\n"
    'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Two"}}\n\n'
)
OPENAI_EVENT = (
    'data: {"id":"chatcmpl-9xKbT2mWq4RfYc7LhVnZs8AeJdPu1","object":"chat.completion.chunk",'
    '"created":1724000000,"model":"gpt-4o-2024-08-06","system_fingerprint":"fp_3aa7262c27",'
    '"choices":[{"index":0,"delta":{"content":"Two"},"logprobs":null,"finish_reason":null}]}\n\n'
)


@experiment("bytes")
async def piece_bytes(bench: Bench) -> Finding:
    """One piece, "Two", three bytes of text, in four formats, without HTTP's own framing."""
    frame = websocket.encode_frame(websocket.TEXT, dialects.SocketMessages().piece(PIECE).encode())
    formats = (
        ("server-sent event of this server", dialects.Plain().piece(PIECE), "23"),
        ("Anthropic content_block_delta", ANTHROPIC_EVENT.encode(), "118"),
        ("OpenAI chat chunk of 2024", OPENAI_EVENT.encode(), "257"),
        ("WebSocket frame of this server", frame, "17"),
    )
    return Finding(
        ["format", "bytes", "per byte of text", "published"],
        [[name, str(len(raw)), f"{len(raw) / len(PIECE):.0f}x", was] for name, raw, was in formats],
        "1 piece, exact",
        [
            "The first and the last are made by this server's own encoders, the other two written"
            " out with the fields that such an event has. In an OpenAI chunk the model's name"
            " (here gpt-4o-2024-08-06) and the id make a difference of some bytes."
        ],
    )


# Characters split between tokens

SENTENCE = "Phở bò nóng hổi 🍜, cà phê sữa đá 🧊 🎉"


@experiment("split-chars")
async def split_chars(bench: Bench) -> Finding:
    """One Vietnamese sentence with emoji, decoded one token at a time and incrementally."""
    bench.expect(1, "split-chars")
    name, alone, pieces = await bench.with_model(decode_both_ways, SENTENCE)
    return Finding(
        ["decoded", "tokens", "broken pieces", "joined text equal", "published"],
        [
            _decoded_row("each token alone", alone, SENTENCE, "20 tokens, 6 broken"),
            _decoded_row("incrementally", pieces, SENTENCE, "20 tokens, 0 broken, equal"),
        ],
        "1 sentence, exact",
        [f"The sentence: {SENTENCE}", "Broken: a piece that shows U+FFFD for half a character."],
        f"{name} (its tokenizer)",
    )


def decode_both_ways(model: Any, sentence: str) -> tuple[str, list[str], list[str]]:
    """Return the model's name, the text of each token alone, and the detokenizer's pieces."""
    ids = model.encode(sentence)
    detokenizer = Detokenizer(model.text)
    pieces = [detokenizer.add(token_id) for token_id in ids]
    pieces[-1] += detokenizer.finish()
    return model.name, [model.text([token_id]) for token_id in ids], pieces


def _decoded_row(how: str, pieces: Sequence[str], sentence: str, published: str) -> list[str]:
    broken = sum(REPLACEMENT in piece for piece in pieces)
    equal = "yes" if "".join(pieces) == sentence else "no"
    return [how, str(len(pieces)), str(broken), equal, published]


# A reader's speed


@experiment("reading-speed")
async def reading_speed(bench: Bench) -> Finding:
    """How fast a person reads, how fast the model writes, and what a reader waits for."""
    texts = [text["human"] for text in ENGLISH]
    prompts = PROMPTS[:1]
    bench.expect(len(prompts) + 1, "reading-speed")
    tokens = sum(await bench.with_model(count_tokens, texts))
    url = await bench.server()
    replies = [await bench.ask(f"{url}/stream", body(p, usage=True)) for p in prompts]
    words = sum(len(text.split()) for text in texts)
    generated = 1 / median([reply.time_per_output_token().seconds for reply in replies])
    return Finding(
        ["measure", "measured", "published"],
        reading_rows(tokens / words, generated),
        f"{len(texts)} texts of {words:,} words for tokens per word, {len(replies)} replies for"
        " the speed (median)",
        [
            "Tokens per word: the English continuation texts of prompts.json, since the reader"
            f" is one of English prose: {READER_WORDS_PER_MINUTE} words a minute (Brysbaert 2019)."
        ],
        bench.model,
    )


def reading_rows(tokens_per_word: float, generated: float) -> list[list[str]]:
    """Return the table for a model that generates so many tokens a second."""
    words_per_second = READER_WORDS_PER_MINUTE / 60
    read = words_per_second * tokens_per_word
    rows = [
        ["tokens per word", f"{tokens_per_word:.2f}", "1.38"],
        ["read, tokens/s", f"{read:.1f}", "5.5"],
        ["generated, tokens/s", f"{generated:.1f}", "21"],
        ["generated against read", times(generated / read), "3.9x"],
    ]
    for words, published in ((50, "3.2 s, 13 s"), (300, "19.5 s, 76 s")):
        wait, reading = words * tokens_per_word / generated, words / words_per_second
        what = f"{words} words: wait for all of it, time to read it"
        rows.append([what, f"{wait:.1f} s, {reading:.1f} s", published])
    return rows


def count_tokens(model: Any, texts: Sequence[str]) -> list[int]:
    """Return the number of tokens of each text."""
    return [len(model.encode(text)) for text in texts]


# These register their experiments when imported; the report has this order.
for file in (
    "labs",
    "grouping_experiments",
    "cache_experiments",
    "load_experiments",
    "neighbour_experiments",
    "hop_experiments",
    "leaving",
    "parts_experiments",
    "delivery_experiments",
    "lateness_experiments",
    "page_experiments",
):
    importlib.import_module(file)

if __name__ == "__main__":
    sys.exit(main())
