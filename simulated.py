"""A stand-in for the model: words on a seeded schedule, and faults on demand.

The same `submit` and `Generation` as `engine.py`, with nothing installed but Python. A token is a
word; each word comes `delay_ms` plus or minus `jitter_ms` (evenly spread) after the one before,
the first one `first_delay_ms` later still. The same prompt and seed give the same words on the
same schedule, on any machine: what differs between two ways of delivery is then the delivery. A
stop string ends the reply as it would a model's.

A request can ask for a schedule of its own (`delay_ms`, `jitter_ms`, `first_delay_ms`), and for
faults. The first two strike after so many words, the next two after so many events, of which a
provider's opening one is the first:

    fail_after      the generation fails: an error in words, on the wire as for any failure
    stall_after     nothing more comes, and no end either
    truncate_after  the connection is cut, without an end
    garbage_after   bytes that are no valid event, frame or chunk
    split_at        every write is cut into parts of so many bytes

Those two are made by `SimulatedEngine`, the others by `outlet.Faulty`, at the socket.

Not here: rows, batches, sampling; `schema` and `logprobs`, which are refused: words drawn from a
list fit no schema and have no probabilities worth telling. Read next: `asks.py`.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Mapping
from typing import Any

from detokenizer import StopStrings
from engine import Prompt, Turns, token_ids
from generation import (
    MAX_TOKENS,
    SHUTDOWN,
    BadRequest,
    EngineDown,
    Generation,
    SamplingParams,
)

WORDS = """
a and as at before between by carried clear day each every first for from gone half in into it its
kept late light little long made moment more morning never next of on once one open other over
piece reader river same sent slow small so soon still the then there they through time to token
under until up water when which while wind with without word work
""".split()  # noqa: SIM905 (a list of so many literals is no better)

SPACED = [f" {word}" for word in WORDS]

# How finely words are timed, to the nearest tick: waking up costs as much as five words.
TICKS_PER_S = 250
ROUNDING = 1e-3  # of a tick: two sums of the same delays are the same time

SCHEDULE = ("delay_ms", "jitter_ms", "first_delay_ms")
ON_THE_WIRE = ("truncate_after", "garbage_after", "split_at")
FAULTS = ("fail_after", "stall_after", *ON_THE_WIRE)
# What a request may ask of this engine and of no other.
FIELDS = (*SCHEDULE, *FAULTS)


class SimulatedEngine:
    """Replies of `max_tokens` words, each on its own schedule, without limit to their number."""

    name = "simulated"
    context = MAX_TOKENS
    failure: str | None = None

    def __init__(
        self,
        seed: int = 42,
        *,
        delay_ms: float = 33.0,
        jitter_ms: float = 8.0,
        first_delay_ms: float = 0.0,
    ) -> None:
        self.seed = seed
        self.delay_ms = delay_ms
        self.jitter_ms = jitter_ms
        self.first_delay_ms = first_delay_ms
        self.clock = Clock()
        self._numbers = itertools.count(1)
        self._schedules: set[Schedule] = set()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Nobody ever waits."""
        return 0

    @property
    def cache_bytes(self) -> int:
        """There is no cache."""
        return 0

    @property
    def running(self) -> int:
        """Replies under way."""
        return len(self._schedules)

    def start(self) -> None:
        """Nothing to start: the event loop's own clock drives the words."""

    def encode(self, prompt: str | Turns) -> list[int]:
        """One id a word; the ids mean nothing but their number and their text's checksum."""
        if not isinstance(prompt, str):
            prompt = " ".join(_content(message) for message in prompt)
        return [sum(word.encode()) for word in prompt.split()]

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        asked: Mapping[str, int] | None = None,
    ) -> Generation:
        """As `Engine.submit`; `asked` has any of `FIELDS`, as in the module's docstring."""
        if self._closed:
            raise EngineDown("the server is shutting down")
        ids = token_ids(prompt, self.encode)
        if not ids:
            raise BadRequest("the prompt is empty", "prompt")
        if params.schema is not None:
            raise BadRequest("the simulated engine can't follow a schema", "schema")
        if params.logprobs is not None:
            raise BadRequest("the simulated engine has no probabilities", "logprobs")
        number = next(self._numbers)
        draw = random.Random(f"{self.seed}/{number if params.seed is None else params.seed}/{ids}")
        schedule = Schedule(self, len(ids), params, draw, asked or {})
        self._schedules.add(schedule)
        schedule.start()
        return schedule.generation

    def close(self, timeout: float = 0) -> None:
        """Cancel everything."""
        self._closed = True
        self.cancel_all(SHUTDOWN)

    @property
    def closed(self) -> bool:
        """There is no thread to wait for."""
        return self._closed

    def cancel_all(self, reason: str) -> None:
        """Cancel what runs."""
        for schedule in list(self._schedules):
            schedule.generation.cancel(reason)

    def forget(self, schedule: "Schedule") -> None:
        """Called by a schedule that has ended."""
        self._schedules.discard(schedule)


class Clock:
    """Has schedules make their words: all of one tick by one wake-up of the event loop.

    So the words of many replies come together, like the tokens that one pass of a model makes.
    """

    def __init__(self) -> None:
        self._due: dict[int, list[Schedule]] = {}

    def add(self, schedule: "Schedule", when: float) -> None:
        """Have a schedule make its next word in the tick nearest to then."""
        tick = int(when * TICKS_PER_S + 0.5 + ROUNDING)
        due = self._due.get(tick)
        if due is None:
            due = self._due[tick] = []
            asyncio.get_running_loop().call_at(tick / TICKS_PER_S, self._tick, tick)
        due.append(schedule)

    def _tick(self, tick: int) -> None:
        now = time.monotonic()
        for schedule in self._due.pop(tick):
            schedule.word(now)


class Schedule:
    """One reply's words and their times."""

    __slots__ = (
        "_clock",
        "_delay_s",
        "_draw",
        "_due",
        "_engine",
        "_fail_after",
        "_jitter_s",
        "_loop",
        "_max_tokens",
        "_on_clock",
        "_stall_after",
        "_stops",
        "generation",
    )

    def __init__(
        self,
        engine: SimulatedEngine,
        prompt_tokens: int,
        params: SamplingParams,
        draw: random.Random,
        asked: Mapping[str, int],
    ) -> None:
        self.generation = Generation(prompt_tokens, self._flags_changed)
        self._engine = engine
        self._clock = engine.clock
        delays = (asked.get(name, getattr(engine, name)) / 1000 for name in SCHEDULE)
        self._delay_s, self._jitter_s, first_delay_s = delays
        self._max_tokens = params.max_tokens
        self._draw = draw
        self._fail_after = asked.get("fail_after")
        self._stall_after = asked.get("stall_after")
        self._stops = StopStrings(params.stop) if params.stop else None
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + first_delay_s
        self._on_clock = False

    def start(self) -> None:
        """Put the first word on the clock."""
        timings = self.generation.timings
        timings.queued = timings.prefill = 0.0
        self._next()

    def _next(self) -> None:
        # From the time it was due, not from now: lateness does not add up.
        self._due += self._delay_s + self._jitter_s * (2 * self._draw.random() - 1)
        self._on_clock = True
        self._clock.add(self, self._due)

    def word(self, now: float) -> None:
        """Make the next word, or what a fault has in its place."""
        generation = self.generation
        number = generation.completion_tokens
        if generation.finish_reason is not None:
            return
        if generation.paused:
            self._on_clock = False
            return
        if number == self._fail_after:
            generation.error = "the simulated model failed, as asked"
            self._end("", "error")
            return
        if number == self._stall_after:
            return
        piece = SPACED[int(self._draw.random() * len(SPACED))]
        if number == 0:
            piece = piece.strip().capitalize()
        if self._stops is not None:
            piece = self._stops.add(piece)
        generation.completion_tokens = number + 1
        timings = generation.timings
        timings.last_token = now - generation.submitted
        if number == 0:
            timings.first_token = timings.last_token
        if self._stops is not None and self._stops.matched is not None:
            self._end(piece, "stop")
        elif number + 1 == self._max_tokens:
            self._end(piece, "length")
        else:
            generation.deliver(piece)
            self._next()

    def _flags_changed(self) -> None:
        if self.generation.cancel_reason is not None:
            # Not from inside cancel(): the consumer hears of it as from the real engine, later.
            self._loop.call_soon(self._end, "", "cancelled")
        elif not self.generation.paused and not self._on_clock:
            self._due = self._loop.time()
            self.word(time.monotonic())

    def _end(self, piece: str, finish_reason: str) -> None:
        if self.generation.finish_reason is None:
            self._engine.forget(self)
            if self._stops is not None:
                self.generation.matched_stop = self._stops.matched
                piece += self._stops.finish()
            self.generation.deliver(piece, finish_reason)


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise BadRequest("each message needs a text content", "messages")
    return content
