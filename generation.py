"""One reply in the making: how it is asked for, what comes of it, and how it can go wrong.

The words that the engine and the server have in common. `SamplingParams` is checked when it is
made, so that a bad number is a 400 that names its field and never reaches the model. `Generation`
is the consumer's end of the queue between the generation thread and the event loop. All its methods
run on the event loop; the thread itself reads `cancel_reason` and `paused`, and writes
`completion_tokens`, `timings`, `matched_stop` and `error`.

Read next: `run.py`, the same reply as the thread sees it.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

# Above every context: who asks for so many sets no limit, and an engine whose context is so large
# knows of none.
MAX_TOKENS = 1_000_000
# More would cost time at each piece and serves nobody; the providers allow 4.
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 500
# As many alternatives to a token as OpenAI gives.
MAX_LOGPROBS = 20
# Why a reply is cancelled when the server stops.
SHUTDOWN = "shutdown"
# Below this the division of the logits would overflow before it changed any choice.
GREEDY_BELOW = 0.01


# Takes a piece, at once; False when it wants no more for now.
Take = Callable[[str], bool]


class NotTaken(Exception):
    """No reply was begun; the text is safe to show, and the rest is what an answer says with it."""

    status: int
    type: str
    field: str | None = None
    fields: tuple[tuple[str, str], ...] = ()


class BadRequest(NotTaken, ValueError):
    """The request can't be right. `field` names what is wrong."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, field: str | None = None, type: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.type = type or self.type


class QueueFull(NotTaken):
    """As many requests wait as are allowed to: try again later."""

    status = 429
    type = "overloaded"
    fields = (("Retry-After", "1"),)


class EngineDown(NotTaken):
    """There is no generation thread any more."""

    status = 503
    type = "unavailable"


class GenerationError(Exception):
    """The reply can't go on; the text is safe to show.

    `status` and `fields` are for an answer whose head is not written yet.
    """

    type = "model_error"
    status = 500
    fields: tuple[tuple[str, str], ...] = ()


class Filtered(GenerationError):
    """A filter stopped the reply; the dialects that have a word for that tell it as an end."""

    type = "content_filter"
    status = 422


def _number(name: str, value: object, low: float, high: float) -> None:
    # bool is an int to Python, and json.loads lets NaN and Infinity through: both are refused.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest(f"{name} must be a number from {low:g} to {high:g}", name)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"{name} must be an integer from {low} to {high}", name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token, and when to stop.

    `temperature` 0 (or below 0.01) is greedy. `top_k` 0 and `top_p` 1 are off. `seed` None draws
    from the operating system. `logprobs` asks for log probabilities, of each token and of so many
    alternatives to it: `Generation.take_logprobs`. With a JSON `schema` the reply is one JSON
    document that fits it: `constraint.py`. Raises `BadRequest` that names the field.
    """

    max_tokens: int = 100
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 0.9
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    schema: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _number("temperature", self.temperature, 0, 2)
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)
        _integer("top_k", self.top_k, 0, 1_000_000)
        _number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise BadRequest("top_p must be above 0", "top_p")
        _number("repetition_penalty", self.repetition_penalty, 0.1, 10)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1)
        self._check_stop()
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.schema is not None and not isinstance(self.schema, Mapping):
            raise BadRequest("schema must be an object", "schema")

    def _check_stop(self) -> None:
        if not isinstance(self.stop, tuple) or len(self.stop) > MAX_STOPS:
            raise BadRequest(f"stop must be a list of at most {MAX_STOPS} strings", "stop")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS:
                raise BadRequest(f"each stop must be 1 to {MAX_STOP_CHARACTERS} characters", "stop")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of the probability that the model gave it.

    `raw` holds its bytes, which may be half a character; `token` the same as text, with U+FFFD for
    halves. Of a special token `token` is the name, and `raw` is empty: it has no text. `top` holds
    the likeliest tokens in its place, likeliest first, as many as were asked for: the token itself
    may be among them or, being less likely, not.

    The distribution is the model's own, the softmax of its logits: before the temperature, the
    repetition penalty, the filters and the schema, which decide what is drawn. So do OpenAI and, by
    default, vLLM (`logprobs_mode=raw_logprobs`).
    """

    token: str
    raw: bytes
    logprob: float
    top: tuple["TokenLogprob", ...] = ()


@dataclass(slots=True)
class Timings:
    """Seconds from `submit` to each milestone; None until it is reached."""

    queued: float | None = None
    prefill: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """The four, rounded to microseconds, for JSON."""
        names = ("queued", "prefill", "first_token", "last_token")
        values = (getattr(self, name) for name in names)
        rounded = (None if value is None else round(value, 6) for value in values)
        return dict(zip(names, rounded, strict=True))


class Generation:
    """One reply in the making: iterate over its pieces, or cancel it.

    `async for piece in generation` yields non-empty strings and ends when the reply does;
    `finish_reason` then says why. Raises `GenerationError` when the model failed. `pour` is the
    same without a task to wake for each piece. Leaving a `with generation:` block cancels what is
    still running.
    """

    def __init__(self, prompt_tokens: int, notify: Callable[[], None] | None = None) -> None:
        # What each token needs comes first: its references then lie together in memory.
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.paused = False
        self.submitted = time.monotonic()
        self.timings = Timings()
        self._take: Take | None = None  # where pieces go while `pour` waits
        # Whoever knows the id may cancel or resume the reply: it can't be guessed.
        self.id = f"reply-{secrets.token_hex(8)}"
        self.prompt_tokens = prompt_tokens
        self.error: str | None = None
        self.failure: GenerationError | None = None  # when there is more to say than `error`
        # Of an engine that asks another server: set when that takes the request, or at the end.
        self.accepted: asyncio.Event | None = None
        self.matched_stop: str | None = None
        self.filtered = False  # cut short because it was about to say what it must not
        self.cancel_reason: str | None = None
        self.duration: float | None = None  # seconds from `submitted` to the end
        self.on_finish: Callable[[Generation], None] | None = None  # called once, at the end
        self._notify = notify  # wakes the engine when a flag above has changed
        self._pieces: deque[tuple[str, Sequence[TokenLogprob]]] = deque()
        self._logprobs: list[TokenLogprob] = []
        self._waiter: asyncio.Future[bool] | None = None

    @property
    def usage(self) -> dict[str, int]:
        """Tokens read and tokens sampled (an end-of-sequence token counts as sampled)."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds between two tokens after the first; None below two tokens."""
        first, last = self.timings.first_token, self.timings.last_token
        if first is None or last is None or self.completion_tokens < 2:
            return None
        return (last - first) / (self.completion_tokens - 1)

    def cancel(self, reason: str = "cancelled") -> None:
        """Stop generating; the first reason given is kept. Harmless after the end."""
        if self.finish_reason is None and self.cancel_reason is None:
            self.cancel_reason = reason
            self._wake_engine()

    def pause(self, paused: bool) -> None:
        """Leave the batch until `pause(False)`: for a client that does not keep up."""
        self.paused = paused
        self._wake_engine()

    def _wake_engine(self) -> None:
        if self._notify is not None:
            self._notify()

    def take_logprobs(self) -> list[TokenLogprob]:
        """What `SamplingParams.logprobs` asked for, of the tokens in the pieces taken so far.

        Each token is told of once, in order, as soon as a piece has been taken that holds the first
        of its text; so the text so far always begins, or is, the text of the tokens told of so far.
        What is not sent is not told of: tokens that wait for the rest of a character or may become
        a stop string, those of a stop string, and the end-of-sequence token. A token that lies on
        the edge of a stop string is told of whole.
        """
        taken, self._logprobs = self._logprobs, []
        return taken

    def deliver(
        self,
        piece: str,
        finish_reason: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        """Take in what one pass made for this reply (called by the engine, on the event loop).

        `logprobs` tells of the tokens that begin in `piece`.
        """
        if piece and self._take is not None:
            # Straight to whoever pours: what goes wrong there is raised there.
            if logprobs:
                self._logprobs += logprobs
            try:
                if not self._take(piece):
                    self._take = None
                    self._wake_consumer(False)
            except Exception as error:
                self._take = None
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_exception(error)
        elif piece:
            self._pieces.append((piece, logprobs))
            self._wake_consumer(True)
        if finish_reason is not None:
            self.finish_reason = finish_reason
            self._notify = None  # the engine's part of the reply is not kept by ours
            self.duration = time.monotonic() - self.submitted
            if self.on_finish is not None:
                # Not from here: what goes wrong in it must not cost the consumer its end.
                asyncio.get_running_loop().call_soon(self.on_finish, self)
            self._wake_consumer(True)

    def _wake_consumer(self, result: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(result)

    async def pour(self, take: Take) -> bool:
        """Have `take` called with each piece, from here on in the moment that it is delivered.

        That saves the wake-up of a task for each. True at the end of the reply; False when `take`
        wants no more for now: what comes then is kept for the next call. Raises what `take`
        raises, and `GenerationError` when the model failed.
        """
        while self._pieces:
            piece, logprobs = self._pieces.popleft()
            self._logprobs += logprobs
            if not take(piece):
                return False
        if self._ended():
            return True
        self._take = take
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            return await self._waiter and self._ended()
        finally:
            # What was raised knows this frame: kept by the waiter, it would be a cycle, and they
            # would all stay until the garbage collector comes.
            self._take = self._waiter = None

    def _ended(self) -> bool:
        if self.finish_reason == "error":
            raise self.failure or GenerationError(self.error or "the model failed")
        return self.finish_reason is not None

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while not self._pieces:
            if self._ended():
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        piece, logprobs = self._pieces.popleft()
        self._logprobs += logprobs
        return piece

    async def aclose(self) -> None:
        """Cancel what is still running: a reply is closed like any asynchronous generator."""
        self.cancel("abandoned")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel("abandoned")
