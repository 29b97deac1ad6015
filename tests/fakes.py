"""A model that tests can script, slow down, stop at a step, and break."""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

EOS = 256


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
    ) -> int:
        assert logits[index] == list(history), "the cache does not hold the history"
        if self.fail_choose(history):
            raise ValueError("a fault in choose")
        if self.script is not None:
            return self.script(history)
        draw = 0 if params.greedy else random.randrange(26)
        return 97 + (sum(i * id for i, id in enumerate(history[-9:], 1)) + draw) % 26

    def truncate(self, row: int, length: int) -> None:
        del self.cache[row][length:]
