"""The experiment on the cache: how many replies fit in memory, and what each costs a step.

For each token of a sequence a transformer keeps one key and one value a layer:

    bytes a token = 2 x layers x key/value heads x size of a head x bytes of a number
                    2 x 32     x 8               x 128            x 2   =  128 KiB

So a sequence of 4,096 tokens takes 512 MiB, and 128 of them fill 64 GiB. A decode step reads all
weights once and every row's cache, which is why the first row of a batch costs most, and why rows
cost the more the longer they are. The formula is laid beside what a process grows by when rows are
filled, and the steps beside the clock.

Not here: the cache itself (`lm.py`). Read next: `recording.py`.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import Bench, experiment, resident_bytes
from figures import Curves, Panel
from report import Finding, milliseconds, times
from workload import median

KIB, MIB, GIB = 2**10, 2**20, 2**30
MEMORY = 64 * GIB  # for caches, beside the weights


@dataclass(frozen=True)
class Shape:
    """What of a model the cache depends on, with numbers of two bytes."""

    name: str
    layers: int
    heads: int
    size: int
    context: int = 4096

    @property
    def token(self) -> int:
        """Bytes of cache that one token takes."""
        return 2 * self.layers * self.heads * self.size * 2

    @property
    def sequence(self) -> int:
        """Bytes of cache that a full context takes."""
        return self.token * self.context


LLAMA_3_8B = Shape("Llama 3 8B", 32, 8, 128)
SMOLLM2 = Shape("SmolLM2-135M (the default)", 30, 3, 64, 2048)
SHAPES = (
    Shape("Llama 2 7B", 32, 32, 128),
    LLAMA_3_8B,
    Shape("Llama 3 70B", 80, 8, 128),
    Shape("Qwen2.5-1.5B", 28, 2, 128),
    SMOLLM2,
)
PUBLISHED = {LLAMA_3_8B: "128 KiB, 512 MiB, 128 in 64 GiB"}

# The published step: 8.03 billion weights of two bytes, read at 2 TB/s.
LLAMA_3_8B_WEIGHTS = 8.03e9 * 2
BANDWIDTH = 2e12

# Measured: many tokens, against what else a process takes and gives back; in arrays below 4 MiB,
# which the system hands out in small pages.
FILLED_ROWS, FILLED_TOKENS = 8, 512
STEP_ROWS = (1, 4, 16)
STEP_CONTEXTS = (64, 256)
STEPS = 7
CHUNK = 128
TOKEN_ID = 65  # any id: what a step takes does not depend on what it reads


@experiment("kv")
async def kv(bench: Bench) -> Finding:
    """The cache: by formula and by the process's memory; and what it adds to a step."""
    bench.expect(2, "kv")
    name, formula, grown, tokens = await bench.with_model(measure_growth, bench.flags)
    steps = await bench.with_model(measure_steps)
    rows = [_shape_row(shape, PUBLISHED.get(shape, "not measured")) for shape in SHAPES]
    measured = "the process's memory is told by Linux only"
    if grown is not None:
        measured = (
            f"{grown / tokens:,.0f} bytes a token by the growth of the process,"
            f" {times(grown / tokens / formula)} of it ({FILLED_ROWS} rows of {FILLED_TOKENS}"
            " tokens)"
        )
    return Finding(
        ["model", "layers, heads, size", "a token", "a sequence", "in 64 GiB", "published"],
        rows,
        f"exact; measured: {len(steps)} conditions of {STEPS} steps, medians",
        [
            f"{name}: {formula:,} bytes a token by the formula, {measured}.",
            "Numbers of two bytes. Computed steps read the weights and every row's cache once, at"
            " 2 TB/s; on a processor with few cores computing takes longer than reading.",
        ],
        name,
        [_step_curves(steps)],
        tables=[
            (
                ["step of", "active rows", "tokens a row", "cache read", "a step", "published"],
                [
                    _computed_row(1, "8 ms"),
                    _computed_row(64, "25 ms"),
                    *(
                        [name, *_step_cells(active, length, formula, step), "not measured"]
                        for (active, length), step in steps.items()
                    ),
                ],
            )
        ],
    )


def _shape_row(shape: Shape, published: str) -> list[str]:
    return [
        shape.name,
        f"{shape.layers}, {shape.heads}, {shape.size}",
        f"{shape.token / KIB:,.4g} KiB",
        f"{shape.sequence / MIB:,.4g} MiB for {shape.context:,}",
        f"{MEMORY // shape.sequence:,}",
        published,
    ]


def computed_step(active: int) -> float:
    """Return the seconds that a step of the published model takes, if it only has to read."""
    return (LLAMA_3_8B_WEIGHTS + active * LLAMA_3_8B.sequence) / BANDWIDTH


def _computed_row(active: int, published: str) -> list[str]:
    shape = LLAMA_3_8B
    cells = _step_cells(active, shape.context, shape.token, computed_step(active))
    return [f"{shape.name}, computed", *cells, published]


def _step_cells(active: int, length: int, token: int, step: float) -> list[str]:
    read = f"{active * length * token / MIB:,.0f} MiB"
    return [str(active), f"{length:,}", read, milliseconds(step)]


def _step_curves(steps: Mapping[tuple[int, int], float]) -> Curves:
    return Curves(
        "kv-steps",
        "One decode step, by active rows and their length",
        "active rows",
        [
            Panel(
                "ms a step",
                {
                    f"{context} tokens a row": [
                        (active, step * 1000)
                        for (active, length), step in steps.items()
                        if length == context
                    ]
                    for context in STEP_CONTEXTS
                },
            )
        ],
    )


# In the model's own process


def measure_growth(model: Any, flags: Mapping[str, str]) -> tuple[str, int, int | None, int]:
    """Fill rows that nobody has touched.

    Returns the model's name, the bytes a token by formula, the bytes that the process grew by (None
    where it can't be known), and the number of tokens.
    """
    del model  # its rows may be in use already
    fresh = fresh_model(flags)
    fill(fresh, [0], FILLED_TOKENS)  # whatever else a pass needs is there after it
    gc.collect()
    before = resident_bytes("self")
    rows = range(1, FILLED_ROWS + 1)
    fill(fresh, rows, FILLED_TOKENS)
    after = resident_bytes("self")
    grown = None if before is None or after is None else after - before
    return fresh.name, fresh.bytes_per_token, grown, FILLED_ROWS * FILLED_TOKENS


def fresh_model(flags: Mapping[str, str]) -> Any:
    """Load the model once more, with a small cache of its own."""
    import lm  # torch and transformers are for the model's own process

    return lm.LanguageModel.load(
        flags["model"],
        device=flags["device"],
        dtype=flags["dtype"],
        rows=FILLED_ROWS + 1,
        context=FILLED_TOKENS,
    )


def measure_steps(model: Any) -> dict[tuple[int, int], float]:
    """Return the median seconds of a decode step, by active rows and tokens a row."""
    numbers = [number for number in STEP_ROWS if number <= model.rows]
    rows = range(max(numbers))
    for row in rows:
        model.truncate(row, 0)
    fill(model, rows, max(STEP_CONTEXTS))
    found: dict[tuple[int, int], float] = {}
    for length in sorted(STEP_CONTEXTS, reverse=True):  # rows are only ever cut
        taken: dict[int, list[float]] = {number: [] for number in numbers}
        for _ in range(STEPS):
            for number, of_number in taken.items():
                of_number.append(_step(model, number, length))
        found |= {(number, length): median(of_number) for number, of_number in taken.items()}
    for row in rows:
        model.truncate(row, 0)
    return dict(sorted(found.items(), key=lambda item: item[0][::-1]))


def _step(model: Any, number: int, length: int) -> float:
    """Time the step that appends the last of `length` tokens to so many rows."""
    rows = range(number)
    for row in rows:
        model.truncate(row, length - 1)
    began = time.perf_counter()
    model.decode(rows, [TOKEN_ID] * number).best(0)  # on a GPU, computed once it is looked at
    return time.perf_counter() - began


def fill(model: Any, rows: Sequence[int], tokens: int) -> None:
    """Append so many tokens to empty rows, chunk by chunk as the engine does."""
    for row in rows:
        for start in range(0, tokens, CHUNK):
            model.prefill(row, [TOKEN_ID] * min(CHUNK, tokens - start))
