"""One reply as the generation thread sees it: its ids, its text, its row, its schema.

A token becomes text late: half a character waits for the rest (`detokenizer.py`), and what may
become a stop string waits until it is one or can't be any more. What is told of the tokens
themselves, their log probabilities, must wait with it. Both are counted in characters of the reply:

    text       The price is 5 €\\n\\nUser:      known: all that the detokenizer has given out
    tokens     The| price| is| 5| |€..|\\n\\n|..
    piece      --------------->|              sent:  less what may become the stop string
    told of    The| price| is| 5| |€..|       those that begin before the end of what was sent

Read next: `engine.py`, which runs them.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from detokenizer import Detokenizer, StopStrings
from generation import Generation, SamplingParams, TokenLogprob


class Constraint(Protocol):
    """What keeps one reply to a form: `constraint.SchemaConstraint` is the real one."""

    @property
    def finished(self) -> bool:
        """Whether the reply is complete and nothing may follow."""

    def allowed(self) -> Any:
        """The ids that may come next, as the model's `choose` takes them."""

    def in_time(self, token: int, left: int) -> int:
        """`token`, or what to take in its place to be complete within `left` ids, it included."""

    def accept(self, token: int) -> None:
        """Take note of the id that was chosen."""


@dataclass(eq=False, slots=True)
class Run:
    """What the thread knows of one generation."""

    generation: Generation
    prompt: list[int]
    params: SamplingParams
    random: random.Random
    detokenizer: Detokenizer
    stops: StopStrings
    constraint: Constraint | None = None
    ids: list[int] = field(default_factory=list)  # prompt, then what was sampled
    row: int = -1
    prefilled: int = 0
    known: int = 0  # characters of the reply, those included that are held for a stop string
    sent: int = 0
    # Tokens not yet told of, each with where in the reply it begins.
    untold: deque[tuple[int, TokenLogprob]] = field(default_factory=deque)

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt is in the cache (else it is prefilling)."""
        return self.prefilled == len(self.prompt)

    @property
    def complete(self) -> bool:
        """Whether the schema's document is complete."""
        return self.constraint is not None and self.constraint.finished

    def add(self, token: int) -> str:
        """Take in a token of the reply; return the text that is safe to send."""
        if self.constraint is not None:
            self.constraint.accept(token)
        text = self.detokenizer.add(token)
        self.known += len(text)
        return self.stops.add(text)

    def flush(self) -> str:
        """Give out what was held: half a character, or the beginning of a stop string."""
        return self.stops.add(self.detokenizer.finish()) + self.stops.finish()

    def take_told(self, piece: str) -> list[TokenLogprob]:
        """Return what is to be told of the tokens that begin in `piece`, which is being sent."""
        self.sent += len(piece)
        told = []
        while self.untold and self.untold[0][0] < self.sent:
            told.append(self.untold.popleft()[1])
        return told
