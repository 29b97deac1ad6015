"""A stand-in for the model: words on a seeded schedule, and faults on demand.

The same `submit` and `Generation` as `engine.py`, with nothing installed but Python. A token is a
word; each word comes `delay_ms` plus or minus `jitter_ms` (evenly spread) after the one before,
the first one `first_delay_ms` later still, and each in the nearest 4 ms. The same prompt and seed
give the same words on the same schedule, on any machine: what differs between two ways of delivery
is then the delivery. A stop string ends the reply as it would a model's.

A request can ask for a schedule of its own (`delay_ms`, `jitter_ms`, `first_delay_ms`), and for
faults. The first two strike after so many words, the next two after so many events:

    fail_after      the generation fails: an error in words, on the wire as for any failure
    stall_after     nothing more comes, and no end either
    truncate_after  the connection is cut, without an end
    garbage_after   bytes that are no valid event, frame or chunk
    split_at        every write is cut into parts of so many bytes

The first two are made by `SimulatedEngine`, the others by `outlet.Faulty`, at the socket.

Not here: rows, batches, sampling; `schema` and `logprobs`, which are refused: words drawn from a
list fit no schema and have no probabilities worth telling. Read next: `asks.py`.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import volley
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

WORD_COUNT = len(WORDS)
SPACED = [f" {word}" for word in WORDS]

# How finely words are timed, to the nearest tick: waking up costs as much as five words.
TICKS_PER_S = 250
# Added, so that `int` takes the nearest tick; the thousandth, so that two sums of the same delays
# have the same.
NEAREST = 0.5 + 1e-3

SCHEDULE = ("delay_ms", "jitter_ms", "first_delay_ms")
ON_THE_WIRE = ("truncate_after", "garbage_after", "split_at")
FAULTS = ("fail_after", "stall_after", *ON_THE_WIRE)
# What a request may ask of this engine and of no other.
FIELDS = (*SCHEDULE, *FAULTS)

# Sent the time, it makes a word and yields the tick of the next, or `NEVER`.
Words = Generator[int, float, None]
NEVER = -1


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
        schedule = Schedule(self, len(ids), params, draw.random, asked or {})
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


class Clock(dict[int, list[Words]]):
    """The replies whose next word is due in a tick: all of one by one wake-up of the event loop.

    So the words of many replies come together, like the tokens that one pass of a model makes.
    """

    def __missing__(self, tick: int) -> list[Words]:
        """Set the timer of a tick when it gets its first word."""
        asyncio.get_running_loop().call_at(tick / TICKS_PER_S, self._tick, tick)
        due = self[tick] = []
        return due

    def _tick(self, tick: int) -> None:
        with volley.of(asyncio.get_running_loop()).together():
            self.go_on(self.pop(tick), time.monotonic())

    def go_on(self, due: Iterable[Words], now: float) -> None:
        """Have replies make a word each, and the next in its tick."""
        for words in due:
            try:
                tick = words.send(now)
            except StopIteration:
                continue
            except Exception as error:  # a bug: it costs no other reply its words
                context = {"message": "a word failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)
                continue
            if tick != NEVER:
                self[tick].append(words)


class Schedule:
    """One reply's words and their times."""

    __slots__ = ("_clock", "_engine", "_loop", "_paused", "_stops", "_words", "generation")

    def __init__(
        self,
        engine: SimulatedEngine,
        prompt_tokens: int,
        params: SamplingParams,
        draw: Callable[[], float],
        asked: Mapping[str, int],
    ) -> None:
        self.generation = Generation(prompt_tokens, self._flags_changed)
        self._engine = engine
        self._clock = engine.clock
        self._loop = asyncio.get_running_loop()
        self._paused = False
        self._stops = StopStrings(params.stop) if params.stop else None
        self._words = self._make_words(params, draw, asked)

    def start(self) -> None:
        """Put the first word on the clock."""
        timings = self.generation.timings
        timings.queued = timings.prefill = 0.0
        self._clock[next(self._words)].append(self._words)

    def _make_words(
        self, params: SamplingParams, draw: Callable[[], float], asked: Mapping[str, int]
    ) -> Words:
        """Make a word, or what a fault has in its place, each time; see `Words`."""
        generation, timings, stops = self.generation, self.generation.timings, self._stops
        # Words are counted from 1 here: 0 is never.
        fails_at, stalls_at = (asked.get(name, -1) + 1 for name in ("fail_after", "stall_after"))
        delay, jitter, first_delay = (
            asked.get(name, getattr(self._engine, name)) / 1000 * TICKS_PER_S for name in SCHEDULE
        )
        least, spread = delay - jitter, 2 * jitter
        due = self._loop.time() * TICKS_PER_S + first_delay + NEAREST
        for left in reversed(range(params.max_tokens)):
            # From when it was due, not from now: lateness does not add up.
            due += least + spread * draw()
            now = yield int(due)
            if generation.paused:
                self._paused = True
                now = yield NEVER  # but `_flags_changed` may have it go on
                due = self._loop.time() * TICKS_PER_S + NEAREST
            piece = SPACED[int(draw() * WORD_COUNT)]
            number = generation.completion_tokens + 1
            if number in (1, fails_at, stalls_at):
                if number == fails_at:
                    generation.error = "the simulated model failed, as asked"
                    self._end("", "error")
                    return
                if number == stalls_at:
                    yield NEVER
                if number == 1:
                    piece = piece.strip().capitalize()
                    timings.first_token = now - generation.submitted
            generation.completion_tokens = number
            timings.last_token = now - generation.submitted
            if stops is not None:
                piece = stops.add(piece)
                if stops.matched is not None:
                    self._end(piece, "stop")
                    return
            if left:
                generation.deliver(piece)
        self._end(piece, "length")

    def _flags_changed(self) -> None:
        if self.generation.cancel_reason is not None:
            # Not from inside cancel(): the consumer hears of it as from the real engine, later.
            self._loop.call_soon(self._cancel)
        elif self._paused and not self.generation.paused:
            self._paused = False
            self._clock.go_on([self._words], time.monotonic())

    def _cancel(self) -> None:
        self._words.close()
        self._end("", "cancelled")

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
