"""What the protocols written out here cost, beside the libraries that people use for the same.

    python experiments.py parts

    events            sse.Parser            httpx-sse; the decoder of OpenAI's SDK
    requests          http1.RequestParser   h11
    messages          websocket.Connection  websockets without its sockets
    token ids         Detokenizer           DecodeStream of tokenizers, which is written in Rust

Both are given the same bytes, in turns, and the ratio is the median of those of the turns: a busy
minute falls on both. Time is that of the processor, so that what else runs on the machine is not
counted. What both have to do is the same, from the bytes that were read to the events,
requests, messages or texts that a program works with.

Not here: what delivery as a whole costs. Read next: `page_experiments.py`.
"""

import codecs
import functools
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import http1
import sse
import websocket
from bench import Bench, ExperimentError, experiment
from detokenizer import Detokenizer
from report import Finding, times
from workload import ENGLISH, median

LIBRARIES = ("httpx_sse", "openai", "h11", "websockets", "tokenizers")
ROUNDS = 15
EVENTS = 2000
READ_BYTES = 1400  # of one packet in an Ethernet
REQUESTS = 200
MESSAGES = 1000
TOKENS = (500, 4000)
MASK = b"\x37\xfa\x21\x3d"


@dataclass(frozen=True)
class Part:
    """The same work in two ways; each returns how many things it made, which must be equal."""

    name: str
    theirs_name: str
    ours: Callable[[], int]
    theirs: Callable[[], int]
    size_bytes: int | None = None  # of all of it; None: told by the piece
    goal: str = ""

    def row(self) -> list[str]:
        """Measure both in turns."""
        ours, theirs = [], []
        for _ in range(ROUNDS):
            ours.append(_timed(self.ours))
            theirs.append(_timed(self.theirs))
        made = {count for _, count in (*ours, *theirs)}
        if len(made) != 1:
            raise RuntimeError(f"{self.name}: not the same number of things: {sorted(made)}")
        ratio = median([b / a for (a, _), (b, _) in zip(ours, theirs, strict=True)])
        n = made.pop()
        return [
            self.name,
            self.theirs_name,
            self._cost(median([seconds for seconds, _ in ours]), n),
            self._cost(median([seconds for seconds, _ in theirs]), n),
            times(ratio),
            self.goal or "-",
            f"{n:,}",
        ]

    def _cost(self, seconds: float, n: int) -> str:
        each = f"{seconds / n * 1e6:.2f} us"
        if self.size_bytes is None:
            return each
        return f"{self.size_bytes / seconds / 1e6:.0f} MB/s, {each}"


def _timed(work: Callable[[], int]) -> tuple[float, int]:
    began = time.process_time()
    count = work()
    return time.process_time() - began, count


@experiment("parts")
async def parts(bench: Bench) -> Finding:
    """The parsers of this project beside those that people use: the same bytes, in turns."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ExperimentError(f"parts needs {', '.join(missing)}: requirements-dev.txt has them")
    bench.expect(None)
    rows = [part.row() for part in (*event_parts(), request_part(), *message_parts())]
    rows += await bench.with_model(token_rows, " ".join(text["human"] for text in ENGLISH))
    return Finding(
        ["part", "beside", "ours", "theirs", "ours is as fast, times", "goal", "n"],
        rows,
        f"medians of {ROUNDS} turns; n is how many things a turn makes",
        [
            f"Reads are of {READ_BYTES:,} bytes (a packet) or of one event each.",
            "Unmasking in C is what `websockets` does where its extension is built.",
        ],
    )


# Events

CHAT_CHUNK = (
    '{"id": "chatcmpl-4d3f0a91", "object": "chat.completion.chunk", "created": 1764490000,'
    ' "model": "default", "choices": [{"index": 0, "delta": {"content": " word%d"},'
    ' "logprobs": null, "finish_reason": null}]}'
)
FORMS: dict[str, Callable[[int], bytes]] = {
    "plain": lambda i: sse.encode(f'{{"text": " word{i % 100}"}}'),
    "named": lambda i: sse.encode(f'{{"text": " word{i % 100}"}}', event="token"),
    "numbered": lambda i: sse.encode(f'{{"text": " word{i % 100}"}}', id=f"reply-4d3f:{i}"),
    "OpenAI's": lambda i: sse.encode(CHAT_CHUNK % (i % 100)),
}


def event_parts() -> Iterator[Part]:
    """Event streams of several forms, in packets and event by event."""
    for form, encode in FORMS.items():
        events = [encode(i) for i in range(EVENTS)]
        whole = b"".join(events)
        packets = [whole[i : i + READ_BYTES] for i in range(0, len(whole), READ_BYTES)]
        for how, reads, goal in (
            ("in packets", packets, "2x httpx-sse"),
            ("an event a read", events, "2 us"),
        ):
            for name, theirs in (("httpx-sse", by_httpx_sse), ("openai", by_openai)):
                yield Part(
                    f"{form} events, {how}",
                    name,
                    functools.partial(by_sse, reads),
                    functools.partial(theirs, reads),
                    len(whole),
                    goal if name == "httpx-sse" else "",
                )


def by_sse(reads: Sequence[bytes]) -> int:
    """Parse with `sse.py`."""
    parser = sse.Parser()
    return sum(len(parser.feed(data)) for data in reads)


def by_httpx_sse(reads: Sequence[bytes]) -> int:
    """Parse as `httpx_sse.EventSource` does, whose text comes from such a decoder."""
    from httpx_sse._decoders import SSEDecoder, SSELineDecoder

    text = codecs.getincrementaldecoder("utf-8")("replace")
    lines, events = SSELineDecoder(), SSEDecoder()
    count = 0
    for data in reads:
        for line in lines.decode(text.decode(data)):
            count += events.decode(line.rstrip("\n")) is not None
    return count


def by_openai(reads: Sequence[bytes]) -> int:
    """Parse with the decoder of OpenAI's SDK."""
    from openai._streaming import SSEDecoder

    return sum(1 for _ in SSEDecoder().iter_bytes(iter(reads)))


# Requests


def request_part() -> Part:
    """The request that OpenAI's SDK for Python sends for a chat of one message."""
    message = {"role": "user", "content": "Tell me a story about a bridge."}
    content = json.dumps({"model": "default", "messages": [message], "stream": True}).encode()
    fields = [
        ("Host", "127.0.0.1:8765"),
        ("Accept-Encoding", "gzip, deflate"),
        ("Connection", "keep-alive"),
        ("Accept", "application/json"),
        ("Content-Type", "application/json"),
        ("User-Agent", "OpenAI/Python 3.57.0"),
        ("X-Stainless-Lang", "python"),
        ("X-Stainless-Package-Version", "3.57.0"),
        ("X-Stainless-OS", "Linux"),
        ("X-Stainless-Arch", "x64"),
        ("X-Stainless-Runtime", "CPython"),
        ("X-Stainless-Runtime-Version", "3.11.7"),
        ("Authorization", "Bearer none"),
        ("X-Stainless-Async", "false"),
        ("x-stainless-retry-count", "0"),
        ("x-stainless-read-timeout", "600"),
    ]
    raw = http1.encode_request("POST", "/v1/chat/completions", fields, content)
    ours, theirs = functools.partial(by_http1, raw), functools.partial(by_h11, raw)
    return Part("a request of OpenAI's SDK", "h11", ours, theirs, len(raw) * REQUESTS, "2x")


def by_http1(raw: bytes) -> int:
    """Parse with `http1.py`."""
    parser = http1.RequestParser()
    count = 0
    for _ in range(REQUESTS):
        parser.feed(raw)
        while not isinstance(parser.next_event(), http1.End):
            pass
        count += 1
    return count


def by_h11(raw: bytes) -> int:
    """Parse with h11, each on a connection of its own: it reads the next only after an answer."""
    import h11

    count = 0
    for _ in range(REQUESTS):
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(raw)
        while not isinstance(connection.next_event(), h11.EndOfMessage):
            pass
        count += 1
    return count


# Messages


def message_parts() -> Iterator[Part]:
    """Small and large messages of a client; unmasking in Python, and in C where that is built."""
    small = websocket.encode_frame(websocket.TEXT, b"x" * 20, mask=MASK)
    large = websocket.encode_frame(websocket.BINARY, os.urandom(2**20), mask=MASK)
    for name, frame, number in (("20 bytes", small, MESSAGES), ("1 MiB", large, 1)):
        for how in ("in C", "in Python"):
            yield Part(
                f"a message of {name}",
                f"websockets, unmasking {how}",
                functools.partial(by_websocket, frame, number),
                functools.partial(by_websockets, frame, number, how),
                len(frame) * number,
                "the limit" if (name, how) == ("1 MiB", "in C") else "1x",
            )


def by_websocket(frame: bytes, number: int) -> int:
    """Parse with `websocket.py`."""
    connection = websocket.Connection(websocket.Side.SERVER, max_message_bytes=2**21)
    count = 0
    for _ in range(number):
        connection.feed(frame)
        while connection.next_event() is not None:
            count += 1
    return count


def by_websockets(frame: bytes, number: int, how: str) -> int:
    """Parse with `websockets`, which unmasks in C if it can."""
    from websockets import frames, utils
    from websockets.protocol import OPEN, Protocol, Side

    swapped: Any = frames
    built = swapped.apply_mask
    if how == "in Python":
        swapped.apply_mask = utils.apply_mask
    try:
        connection = Protocol(Side.SERVER, state=OPEN, max_size=2**21)
        count = 0
        for _ in range(number):
            connection.receive_data(frame)
            count += len(connection.events_received())
        return count
    finally:
        swapped.apply_mask = built


# Token ids


def token_rows(model: Any, text: str) -> list[list[str]]:
    """Detokenize texts of several lengths (run beside the model)."""
    from tokenizers.decoders import DecodeStream

    ids = model.encode(text)
    longer = ids * (max(TOKENS) // len(ids) + 1)
    tokenizer = model._tokenizer._marked  # what `model.text` asks

    def ours(ids: Sequence[int]) -> int:
        detokenizer = Detokenizer(model.text)
        pieces = [detokenizer.add(id) for id in ids]
        return len(ids) if "".join(pieces) + detokenizer.finish() else 0

    def theirs(ids: Sequence[int]) -> int:
        stream = DecodeStream(skip_special_tokens=True)
        pieces = [stream.step(tokenizer, id) or "" for id in ids]
        return len(ids) if "".join(pieces) else 0

    parts = [
        Part(
            f"a token of {length:,}",
            "DecodeStream",
            functools.partial(ours, longer[:length]),
            functools.partial(theirs, longer[:length]),
            goal="0.33x, flat",
        )
        for length in TOKENS
    ]
    return [part.row() for part in parts]
