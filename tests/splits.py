"""Every way a parser's input can arrive: whole, byte by byte, at each two-way split, at random.

A parser that is right must give the same events for all of them.
"""

import random
from collections.abc import Iterator

# Beyond this length every two-way split would cost quadratic time; a seeded sample stands for them.
ALL_SPLITS_UP_TO = 600


def splits(raw: bytes, seed: int = 0) -> Iterator[list[bytes]]:
    """Yield lists of fragments whose concatenation is `raw`."""
    yield [raw]
    yield [raw[i : i + 1] for i in range(len(raw))]
    draw = random.Random(seed)
    every = range(1, len(raw))
    cuts = every if len(raw) <= ALL_SPLITS_UP_TO else draw.sample(every, 100)
    for cut in cuts:
        yield [raw[:cut], raw[cut:]]
    for _ in range(5):
        yield list(_random_fragments(raw, draw))


def _random_fragments(raw: bytes, draw: random.Random) -> Iterator[bytes]:
    start = 0
    while start < len(raw):
        end = start + draw.choice((1, 2, 3, 7, 50, 500))
        yield raw[start:end]
        start = end
