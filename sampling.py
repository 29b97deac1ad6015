"""From one line of logits to one token id: the penalty, the filters and the draw.

    logits -> repetition penalty -> allowed ids -> temperature -> top-k -> top-p -> one draw -> id

The order is the field's, and transformers': the penalty (Keskar et al. 2019, CTRL, section 4.1),
the ids that a schema allows, if there is one (`constraint.py`), then for those alone the
temperature, the k likeliest ids, and the nucleus, the smallest set of likeliest ids that together
have at least the probability p (Holtzman et al. 2020, section 3.1).

The draw is one number from the request's own generator, put through the inverse of the cumulative
distribution. There is no global seed: what a request draws depends on its own seed alone.

Not here: presence and frequency penalties, `min_p`, beam search; where logits come from (`lm.py`).

Read next: `constraint.py`.
"""

import random
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

# Sorting a whole vocabulary takes milliseconds, and a few hundred ids hold nearly all the
# probability: ids above ever lower floors, relative to the likeliest, are tried instead.
FLOORS = (1e-2, 1e-4, 1e-6, 0.0)


class Sampling(Protocol):
    """What `choose` reads of a request's parameters."""

    @property
    def temperature(self) -> float:
        """0 is greedy."""

    @property
    def top_k(self) -> int:
        """0 keeps every id."""

    @property
    def top_p(self) -> float:
        """1 keeps every id."""

    @property
    def repetition_penalty(self) -> float:
        """1 changes nothing."""


def choose(
    line: Floats,
    params: Sampling,
    history: Sequence[int],
    random: random.Random,
    allowed: Ids | None = None,
) -> int:
    """Return the next id; draw exactly one number from `random`, or none at temperature 0.

    `line` holds every id's logit and is left as it is; `history` the ids so far, prompt included;
    `allowed` the ids to choose from, ascending, None for all.
    """
    if params.repetition_penalty != 1:
        line = penalized(line, history, params.repetition_penalty)
    if allowed is None:
        return drawn(line, params, random)
    return int(allowed[drawn(line[allowed], params, random)])


def drawn(line: Floats, params: Sampling, random: random.Random) -> int:
    """Return the place of the choice in a line of logits."""
    if params.temperature == 0:
        return int(line.argmax())  # The lowest id of equals.
    # The highest becomes 0 before the division, so that no temperature overflows it.
    with np.errstate(over="ignore"):
        mass = np.exp((line - line.max()) / np.float64(params.temperature), dtype=np.float32)
    # The ids stay in their own order, whatever their probability: a difference in the last bit of
    # a logit then moves the border between two ids by as much, and never swaps their places.
    ids = kept(mass, params.top_k, params.top_p)
    cumulated = np.cumsum(mass if ids is None else mass[ids], dtype=np.float64)
    place = np.searchsorted(cumulated, random.random() * cumulated[-1], side="right")
    # Rounding can carry the product to the very end, past the last id that has any probability.
    place = min(place, np.searchsorted(cumulated, cumulated[-1], side="left"))
    return int(place if ids is None else ids[place])


def logprobs(line: Floats, token: int, count: int) -> list[tuple[int, float]]:
    """Return `token`, then the `count` likeliest ids, each with its log probability.

    The probabilities are the softmax of the logits as they are. Of equals the lowest id is first.
    """
    line = line - line.max()
    total = np.log(np.exp(line).sum(dtype=np.float64))
    border = np.partition(line, len(line) - count)[len(line) - count] if count else np.inf
    ids = np.flatnonzero(line >= border)  # All equals of the last, of which the lowest stay.
    top = ids[np.argsort(-line[ids], kind="stable")][:count]
    return [(int(id), float(line[id] - total)) for id in (token, *top)]


def penalized(line: Floats, history: Sequence[int], penalty: float) -> Floats:
    """Return the logits with every id of the history made less likely (more, below 1)."""
    line = line.copy()
    seen = np.fromiter(set(history), np.intp)
    scores = line[seen]
    line[seen] = np.where(scores > 0, scores / penalty, scores * penalty)
    return line


def kept(mass: Floats, top_k: int, top_p: float) -> Ids | None:
    """Return the ids, ascending, that top-k and then top-p keep; None for all of them.

    `mass` is the distribution, scaled so that the likeliest id has 1.
    """
    limited = 0 < top_k < len(mass)
    if not limited and top_p >= 1:
        return None
    total = float(mass.sum(dtype=np.float64))
    for floor in FLOORS:
        ids = np.flatnonzero(mass >= floor)
        if limited and len(ids) >= top_k:
            break
        if not limited and mass[ids].sum(dtype=np.float64) >= top_p * total:
            break
    ids = ids[np.argsort(-mass[ids], kind="stable")]  # Stable: the lowest id of equals first.
    if limited:
        ids = ids[:top_k]
    if top_p < 1:
        cumulated = np.cumsum(mass[ids], dtype=np.float64)
        # The nucleus is a share of what top-k has left.
        share = top_p * (cumulated[-1] if limited else total)
        ids = ids[: np.searchsorted(cumulated, share, side="left") + 1]
    return np.sort(ids)
