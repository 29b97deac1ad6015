"""A model that tests can script, slow down, stop at a step, and break."""

import json
import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

EOS = 256


class FakeConstraint:
    """Keeps a reply to one JSON document, the `const` of its schema, byte by byte."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        if "const" not in schema:
            raise ValueError("the fake constraint needs a const")
        self.rest = json.dumps(schema["const"], ensure_ascii=False).encode()

    @property
    def finished(self) -> bool:
        return not self.rest

    def allowed(self) -> list[int]:
        return [self.rest[0]]

    def in_time(self, token: int, left: int) -> int:
        return token

    def accept(self, token: int) -> None:
        assert token == self.rest[0]
        self.rest = self.rest[1:]


class FakeModel:
    """Bytes are tokens. Cached ids are kept per row, so that a wrong row or length shows.

    `script` maps a history to the next id; the default depends on the whole cached history and on
    the draw, so that any mix-up of rows, histories or random states changes the text. With `step`
    set to a semaphore every forward pass waits for one release.
    """

    name = "fake"

    def __init__(
        self,
        rows: int = 4,
        context: int = 256,
        script: Callable[[Sequence[int]], int] | None = None,
    ) -> None:
        self.rows = rows
        self.context = context
        self.bytes_per_token = 100
        self.vocabulary = EOS + 1
        self.eos_ids = frozenset({EOS})
        self.cache: list[list[int]] = [[] for _ in range(rows)]
        self.script = script
        self.calls: list[tuple[str, Any]] = []
        self.step: threading.Semaphore | None = None
        self.entered = threading.Semaphore(0)
        self.fail_prefill: Callable[[Sequence[int]], bool] = lambda ids: False
        self.fail_decode: Callable[[], bool] = lambda: False
        self.fail_choose: Callable[[Sequence[int]], bool] = lambda history: False

    def encode(self, prompt: Any) -> list[int]:
        text = prompt if isinstance(prompt, str) else "".join(m["content"] for m in prompt)
        return list(text.encode())

    def text(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def prefill(self, row: int, ids: Sequence[int]) -> list[list[int]]:
        self._pass("prefill", (row, list(ids)))
        if self.fail_prefill(ids):
            raise ValueError("a fault in prefill")
        self.cache[row] += ids
        return [list(self.cache[row])]

    def decode(self, rows: Sequence[int], ids: Sequence[int]) -> list[list[int]]:
        self._pass("decode", list(rows))
        if self.fail_decode():
            raise RuntimeError("a fault in decode")
        assert len(set(rows)) == len(rows)
        for row, id in zip(rows, ids, strict=True):
            self.cache[row].append(id)
        return [list(self.cache[row]) for row in rows]

    def _pass(self, kind: str, what: Any) -> None:
        self.calls.append((kind, what))
        self.entered.release()
        if self.step is not None:
            self.step.acquire()

    def choose(
        self,
        logits: list[list[int]],
        index: int,
        params: Any,
        history: Sequence[int],
        random: random.Random,
        allowed: Sequence[int] | None = None,
    ) -> int:
        assert logits[index] == list(history), "the cache does not hold the history"
        if self.fail_choose(history):
            raise ValueError("a fault in choose")
        if self.script is not None:
            choice = self.script(history)
        else:
            draw = 0 if params.temperature == 0 else random.randrange(26)
            choice = 97 + (sum(i * id for i, id in enumerate(history[-9:], 1)) + draw) % 26
        return choice if allowed is None else allowed[choice % len(allowed)]

    def constraint(self, schema: Mapping[str, Any]) -> FakeConstraint:
        return FakeConstraint(schema)

    def logprobs(self, logits: Any, index: int, token: int, count: int) -> list[tuple[int, float]]:
        """Every byte has a 256th of the probability."""
        return [(id, -math.log(256)) for id in (token, *range(97, 97 + count))]

    def token(self, id: int) -> tuple[str, bytes]:
        raw = bytes([id]) if id < 256 else b""
        return raw.decode(errors="replace") or "<end>", raw

    def truncate(self, row: int, length: int) -> None:
        del self.cache[row][length:]
