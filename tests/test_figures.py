"""The figures: what is drawn says what it stands on, and twice the same is the same bytes."""

import itertools
import xml.etree.ElementTree as ElementTree

import pytest
from require import require

import figures
from figures import Curves, Histograms, Panel, Staircase, Trade

STAIRS = [(index * 0.033, index) for index in range(1, 200)]
FIGURES = [
    Staircase("stairs", "Arrivals", {"/stream": STAIRS, "/complete": [(6.6, 199)]}),
    Histograms("gaps", "Gaps", {"direct": [0.033] * 9, "buffered": [0.0, 0.0001, 1.5]}),
    Histograms(
        "hops", "Gaps", {f"hop {hop}": [0.0001 * 2**n for n in range(14)] for hop in range(14)}
    ),
    Curves(
        "load",
        "Load",
        "clients",
        [
            Panel("ms", {"first": [(1, 5), (16, 80)], "last": [(1, 9), (16, 90)]}, ("reader", 180)),
            Panel("tokens/s", {"all": [(1, 40), (16, 290)]}),
        ],
    ),
    Trade("trade", "Trade", "bytes", "ms", {"k = 1": (900, 0), "k = 4": (300, 49.5)}),
    Trade("kinds", "Trade", "bytes", "ms", {"a": (9, 0), "b": (3, 4)}, [["a", "b"], ["a"]]),
]
FOOTER = ["n = 3 & more", "a <machine>", "python experiments.py x"]


# What each of them has to say beside its title and footer.
LABELS = {
    "stairs": ["/stream", "/complete", "seconds since the request", "characters that have come"],
    "gaps": ["direct (n = 9)", "buffered (n = 3)"],
    "hops": [f"hop {hop} (n = 14)" for hop in range(14)],
    "load": ["first", "last", "reader", "clients", "ms", "tokens/s"],
    "trade": ["k = 1", "k = 4", "bytes", "ms"],
    "kinds": ["a", "b"],
}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_is_small_the_same_twice_and_says_what_it_stands_on(figure):
    require("matplotlib")
    once, again = figures.draw(figure, FOOTER), figures.draw(figure, FOOTER)
    assert once == again
    assert len(once) < 60_000
    assert "<dc:date>" not in once
    texts = {text.strip() for text in ElementTree.fromstring(once).itertext()}
    assert {figure.title, *FOOTER, *LABELS[figure.name]} <= texts


@pytest.mark.parametrize("values", [[], [0.0], [1.0], [0.0, 0.1, 33.0, 4000.0], [10, 10]])
def test_bins_hold_all_that_is_above_zero(values):
    edges = figures.bins(values)
    assert len(edges) > 1
    assert all(
        edges[0] <= value * (1 + 1e-9) and value <= edges[-1] * (1 + 1e-9)
        for value in values
        if value
    )
    steps = [later / earlier for earlier, later in itertools.pairwise(edges)]
    assert steps == pytest.approx([10 ** (1 / 12)] * len(steps))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ([0], [1, 8])),
        ([1, 3, 8], ([1], [1, 8])),
        ([3, 3], ([0, 2, 0], [1, 2, 4, 8])),
        ([0, 5, 6], ([0, 2], [1, 4, 8])),
        ([0.9, 9], ([1, 0, 1], [1, 2, 4, 8])),
    ],
)
def test_outline(values, expected):
    assert figures.outline(values, [1, 2, 4, 8]) == expected
