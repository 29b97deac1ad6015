"""What the Python servers here have to deliver: the words and the schedule of `simulated.py`.

The same request gives the same words at the same times as from this project's server with
`--model simulated`, so what differs is the delivery. It is written as an async generator, which is
what their frameworks' users would have in the place of a model.
"""

import argparse
import asyncio
import itertools
import json
import random
import socket
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

WORDS: list[str] = json.loads((Path(__file__).parent / "words.json").read_text("utf-8"))
FAILURE = {"message": "the simulated model failed, as asked", "type": "model_error"}
BACKLOG = 1024


class Failed(Exception):
    """The reply fails here, as `fail_after` asked."""


class Cut(Exception):
    """The connection is to be cut here, as `truncate_after` asked."""


@dataclass
class Ask:
    """A request for a reply."""

    prompt: str
    max_tokens: int = 100
    seed: int | None = None
    fail_after: int | None = None
    truncate_after: int | None = None

    @classmethod
    def parse(cls, content: Any) -> Self:
        """Return what a request's JSON asks for. ValueError says what is wrong."""
        if not isinstance(content, Mapping):
            raise ValueError("send a JSON object")
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(content) - names):
            raise ValueError(f"unknown field: {', '.join(map(str, unknown))}")
        if not isinstance(content.get("prompt"), str) or not content["prompt"].split():
            raise ValueError("prompt must be a text")
        if any(type(content[name]) is not int for name in set(content) - {"prompt"}):
            raise ValueError(f"{', '.join(sorted(names - {'prompt'}))} must be whole numbers")
        ask = cls(**content)
        if ask.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        return ask


class Words:
    """Replies on a schedule; `running` counts those under way."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.running = 0
        self._args = args
        self._numbers = itertools.count(1)

    async def reply(self, ask: Any) -> AsyncGenerator[str, None]:
        """Yield a reply word by word. `ask` has the attributes of `Ask`; raises Failed."""
        ids = [sum(word.encode()) for word in ask.prompt.split()]
        number = next(self._numbers)
        seed = number if ask.seed is None else ask.seed
        draw = random.Random(f"{self._args.seed}/{seed}/{ids}")
        clock = asyncio.get_running_loop().time
        due = clock() + self._args.first_delay_ms / 1000
        self.running += 1
        try:
            for index in range(ask.max_tokens):
                due += (self._args.delay_ms + self._args.jitter_ms * draw.uniform(-1, 1)) / 1000
                await asyncio.sleep(due - clock())
                if index == ask.fail_after:
                    raise Failed
                word = WORDS[int(draw.random() * len(WORDS))]
                yield f" {word}" if index else word.capitalize()
        finally:
            self.running -= 1


def parse_arguments(description: str) -> argparse.Namespace:
    """Read the flags that all of these servers take."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--port", type=int, default=8770, help="0 takes a free one (%(default)s)")
    add("--seed", type=int, default=42, help="of the schedule (%(default)s)")
    add("--delay-ms", type=float, default=33.0, help="between two words (%(default)s)")
    add("--jitter-ms", type=float, default=8.0, help="more or less (%(default)s)")
    add("--first-delay-ms", type=float, default=0.0, help="before the first (%(default)s)")
    return parser.parse_args()


def listen(port: int) -> socket.socket:
    """Return a listening socket, its address printed."""
    listener = socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    return listener
