"""A server with a fixed schedule, as a process of its own: what instruments are held against.

    python tests/clocked.py --first-ms 200 --gap-ms 20 --events 100

Every stream has its first event so long after its request and one more each gap, by the clock and
not by the event before. Paths that end in `/chat/completions` speak OpenAI's dialect, others the
project's own. Prints its URL.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import http1
import sse

HEAD = http1.encode_head(
    200, [("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked")]
)


def openai(delta: dict, reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return chunk({"choices": [choice]})


def chunk(more: dict) -> bytes:
    record = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "clocked",
    }
    return sse.encode(json.dumps(record | more))


class Stream(asyncio.Protocol):
    """One connection: each request on it is answered by a stream."""

    options: argparse.Namespace

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.parser = http1.RequestParser()
        self.target = ""

    def data_received(self, data: bytes) -> None:
        self.parser.feed(data)
        while (event := self.parser.next_event()) is not None:
            if isinstance(event, http1.Request):
                self.target = event.path
            elif isinstance(event, http1.End):
                self.answer()

    def answer(self) -> None:
        options, loop = self.options, asyncio.get_running_loop()
        chat = self.target.endswith("/chat/completions")
        usage = {"prompt_tokens": 5, "completion_tokens": options.events}
        if chat:
            piece = openai({"content": " word"})
            end = openai({}, "stop") + chunk({"choices": [], "usage": usage})
            begin = HEAD + http1.encode_chunk(openai({"role": "assistant", "content": ""}))
        else:
            piece = sse.encode(json.dumps({"text": " word"}))
            end = sse.encode(json.dumps({"usage": usage, "finish_reason": "stop"}))
            begin = HEAD
        self.transport.write(begin)
        self.piece = http1.encode_chunk(piece)
        self.end = http1.encode_chunk(end + sse.encode("[DONE]")) + http1.LAST_CHUNK
        first = loop.time() + options.first_ms / 1000
        loop.call_at(first, self.write, first, 0)

    def write(self, first: float, number: int) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(self.piece)
        number += 1
        if number == self.options.events:
            self.transport.write(self.end)
            return
        due = first + number * self.options.gap_ms / 1000
        asyncio.get_running_loop().call_at(due, self.write, first, number)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-ms", type=float, default=200)
    parser.add_argument("--gap-ms", type=float, default=20)
    parser.add_argument("--events", type=int, default=100)
    Stream.options = parser.parse_args()
    server = await asyncio.get_running_loop().create_server(Stream, "127.0.0.1", 0, backlog=1000)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
