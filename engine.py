"""The generation thread: requests in, pieces of text out, many at a time.

One thread runs the model for everybody, in steps. A pass takes tokens through the model once; a
step is at most two passes: a chunk of one prompt, for one row, then one token for every live row.
Those rows go together because a pass over sixteen costs less than twice as much as over one (the
weights are read from memory once either way). Between two passes requests join and leave.

    event loop                                generation thread
    ----------                                -----------------
    submit(prompt, params) -- waiting -->     admit    to a free cache row, first come first served
         |                                    prefill  one chunk of one prompt
    Generation                                decode   one token for every live row
         | pour(take)                         choose   sample; text, stop strings, finish
         <------ one call_soon_threadsafe a pass: [(generation, piece, end, logprobs), ...]
    cancel() ------- a flag ------------->    read before each pass, and by _sample after it

A request is waiting, then has a row and is prefilling, then decoding (or paused), then finished:
"stop" (end-of-sequence token, stop string, or a schema's document is complete), "length",
"cancelled" or "error".

What the thread promises: after `cancel` at most the pass under way is finished for that row; an
error in one row ends that row alone; an error in the pass itself ends every row in it, in words,
and the thread goes on; nobody waits for ever.

Not here: tensors (`lm.py` has them; the `LanguageModel` protocol below is all that is needed, so
that tests drive this file with a fake), sockets, clocks other than for the timings.

Read next: `simulated.py`, the same interface without a model.
"""

import asyncio
import contextlib
import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import volley
from detokenizer import Detokenizer, StopStrings
from generation import BadRequest, EngineDown, Generation, QueueFull, SamplingParams, TokenLogprob
from run import Constraint, Run

log = logging.getLogger("engine")

# Of one prompt, between two decode passes: see `Engine`.
PREFILL_CHUNK = 128
# Requests beyond the rows.
MAX_WAITING = 64

Turns = list[dict[str, Any]]  # of a chat
# Plain text to continue, a chat, or token ids as they are.
Prompt = str | Turns | list[int]


def token_ids(prompt: Prompt, encode: Callable[[str | Turns], list[int]]) -> list[int]:
    """The prompt's ids: as given, or encoded here and now."""
    if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
        return cast(list[int], prompt)
    return encode(cast(str | Turns, prompt))


class LanguageModel(Protocol):
    """What the engine asks of a model. `lm.LanguageModel` is the real one.

    A row is one sequence's place in the cache. `prefill` and `decode` append to rows and return
    logits that only the model looks into; `logits` `index` i belongs to the i-th row of the call.
    """

    name: str
    rows: int
    context: int
    bytes_per_token: int
    vocabulary: int  # ids are 0 to one less
    eos_ids: frozenset[int]

    def encode(self, prompt: str | Turns) -> list[int]:
        """Plain text or chat messages to token ids; `ValueError` when it can't. Thread-safe."""

    def text(self, ids: Sequence[int]) -> str:
        """Decode ids, special tokens skipped."""

    def prefill(self, row: int, ids: Sequence[int]) -> Any:
        """Append `ids` to a row; the logits of the last one."""

    def decode(self, rows: Sequence[int], ids: Sequence[int]) -> Any:
        """Append one id to each of `rows` in one forward pass; one line of logits for each."""

    def choose(
        self,
        logits: Any,
        index: int,
        params: SamplingParams,
        history: Sequence[int],
        random: random.Random,
        allowed: Any = None,
    ) -> int:
        """Sample one token; `history` is prompt and reply so far, `allowed` by a constraint."""

    def constraint(self, schema: Mapping[str, Any]) -> Constraint:
        """What keeps one reply to a JSON schema; `ValueError` when nothing can. Thread-safe."""

    def logprobs(self, logits: Any, index: int, token: int, count: int) -> list[tuple[int, float]]:
        """A token and its log probability, then the `count` likeliest ones and theirs."""

    def token(self, id: int) -> tuple[str, bytes]:
        """A token as text, or a special one's name; and the bytes that it adds to a reply."""

    def truncate(self, row: int, length: int) -> None:
        """Keep the first `length` ids of a row."""


class AnyEngine(Protocol):
    """What the server asks of an engine: the one below, the simulated one, or another server.

    `submit` has these two parameters in all of them, and one more in two: the simulated one takes
    faults, another server the name of a model. `Delivery._hand_to` calls each as it is.
    """

    failure: str | None
    context: int

    @property
    def waiting(self) -> int: ...  # noqa: D102

    @property
    def running(self) -> int: ...  # noqa: D102

    @property
    def cache_bytes(self) -> int: ...  # noqa: D102

    @property
    def closed(self) -> bool: ...  # noqa: D102

    def encode(self, prompt: str | Turns) -> list[int]: ...  # noqa: D102

    def submit(self, prompt: Any, params: SamplingParams) -> Generation: ...  # noqa: D102

    def start(self) -> None: ...  # noqa: D102

    def cancel_all(self, reason: str) -> None: ...  # noqa: D102

    def close(self, timeout: float) -> None: ...  # noqa: D102


Parcel = tuple[Generation, str, str | None, Sequence[TokenLogprob]]


class Engine:
    """Runs a model for many requests at once. See the module's docstring.

    `prefill_chunk`: tokens of one prompt that go through the model between two decode passes;
    a running stream never waits longer than that. `max_waiting`: beyond the rows in use, so many
    requests may wait. `reuse`: whether a prompt that begins like an earlier one is spared the
    chunks that are in the cache already. `submit` and `close` belong to the event loop that called
    `start`.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        prefill_chunk: int = PREFILL_CHUNK,
        max_waiting: int = MAX_WAITING,
        reuse: bool = True,
    ) -> None:
        self.model = model
        self.context = model.context
        self.prefill_chunk = prefill_chunk
        self.max_waiting = max_waiting
        self.reuse = reuse
        self.failure: str | None = None
        self._wake = threading.Condition()
        self._runs: set[Run] = set()  # all that wait or have a row, so that none is forgotten
        self._waiting: deque[Run] = deque()
        self._rows: list[Run | None] = [None] * model.rows
        # What each row's cache holds from whole prefill chunks: see _pick_row.
        self._cached: list[list[int]] = [[] for _ in range(model.rows)]
        self._closing = False
        self._changed = False
        self._parcels: list[Parcel] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    # The event loop's calls.

    def start(self) -> None:
        """Start the thread; pieces are delivered to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, prompt: Prompt, params: SamplingParams) -> Generation:
        """Queue a request.

        `prompt` is token ids, plain text or chat messages; the latter two are tokenized here and
        now, so encode long ones off the event loop first; and `compile` a schema that may be large.
        Raises `BadRequest`, `QueueFull`, `EngineDown`.
        """
        ids = self._checked(prompt)
        constraint = None if params.schema is None else self.compile(params.schema)
        generation = Generation(len(ids), self._notify)
        run = Run(
            generation,
            ids,
            params,
            random.Random(params.seed),
            Detokenizer(self.model.text),
            StopStrings(params.stop),
            constraint,
            ids=list(ids),
        )
        with self._wake:
            if self.failure is not None or self._closing:
                raise EngineDown(self.failure or "the server is shutting down")
            if len(self._waiting) >= self.max_waiting + self._rows.count(None):
                raise QueueFull(f"{self.max_waiting} requests are waiting already")
            self._runs.add(run)
            self._waiting.append(run)
            self._changed = True
            self._wake.notify()
        return generation

    def _checked(self, prompt: Prompt) -> list[int]:
        ids = token_ids(prompt, self.model.encode)
        if not ids:
            raise BadRequest("the prompt is empty", "prompt")
        if len(ids) >= self.model.context:
            raise BadRequest(
                f"the prompt has {len(ids)} tokens; the context holds {self.model.context}"
                " and the reply needs at least one",
                "prompt",
                "context_length_exceeded",
            )
        if min(ids) < 0 or max(ids) >= self.model.vocabulary:
            raise BadRequest(f"token ids are 0 to {self.model.vocabulary - 1}", "prompt")
        return ids

    def encode(self, prompt: str | Turns) -> list[int]:
        """Tokenize; slow for long prompts, and safe to call from any thread."""
        return self.model.encode(prompt)

    def compile(self, schema: Mapping[str, Any]) -> Constraint:
        """Compile a schema, or find it compiled; slow for large ones, safe in any thread."""
        try:
            return self.model.constraint(schema)
        except ValueError as error:
            raise BadRequest(str(error), "schema") from error

    def cancel_all(self, reason: str) -> None:
        """Cancel what waits and what runs."""
        with self._wake:
            runs = list(self._runs)
        for run in runs:
            run.generation.cancel(reason)

    def close(self, timeout: float = 10) -> None:
        """Cancel everything and stop the thread; waits up to `timeout` seconds for its step."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def closed(self) -> bool:
        """Whether the thread has ended, or never began."""
        return not self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold a row."""
        return len(self._rows) - self._rows.count(None)

    @property
    def cache_bytes(self) -> int:
        """Cache memory that holds the tokens of running requests."""
        tokens = sum(len(run.ids) for run in list(self._rows) if run is not None)
        return tokens * self.model.bytes_per_token

    def _notify(self) -> None:
        with self._wake:
            self._changed = True
            self._wake.notify()

    # The thread.

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._step()
        except BaseException:
            log.exception("the generation thread died")
            self.failure = "the generation thread died"
            self._end_all("error", self.failure)
        else:
            self._end_all("cancelled", None)
        self._hand_over()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when it is time to end."""
        with self._wake:
            while not (self._closing or self._changed or self._busy()):
                self._wake.wait()
            self._changed = False
            return not self._closing

    def _busy(self) -> bool:
        if self._waiting and None in self._rows:
            return True
        return any(run is not None and not self._idle(run) for run in self._rows)

    @staticmethod
    def _idle(run: Run) -> bool:
        return run.generation.paused and run.decoding

    def _step(self) -> None:
        """At most two passes: a chunk of one prompt, then a token for every live row.

        What each makes is handed over at once, and who left during one has no part in the next.
        """
        for run_pass in (self._prefill, self._decode):
            self._sweep()
            self._admit()
            run_pass()
            self._hand_over()

    def _sweep(self) -> None:
        """End what was cancelled, wherever it is."""
        with self._wake:
            cancelled = [run for run in self._waiting if run.generation.cancel_reason]
            for run in cancelled:
                self._waiting.remove(run)
        held = (run for run in self._rows if run is not None and run.generation.cancel_reason)
        for run in itertools.chain(cancelled, list(held)):
            self._finish(run, self._rest(run), "cancelled")

    def _admit(self) -> None:
        while self._waiting and None in self._rows:
            with self._wake:
                run = self._waiting.popleft()
            run.row, run.prefilled = self._pick_row(run.prompt)
            self.model.truncate(run.row, run.prefilled)
            self._cached[run.row] = run.prompt[: run.prefilled]
            self._rows[run.row] = run
            run.generation.timings.queued = self._since_submit(run)

    def _pick_row(self, prompt: list[int]) -> tuple[int, int]:
        """Choose the free row whose cache begins most like this prompt; and how much of it serves.

        Only whole prefill chunks are reused. A chunk's arithmetic depends on the chunk and on
        what precedes it, never on when it was done, so a reused chunk is equal bit for bit to one
        computed anew: the same request gives the same text with or without reuse.
        """

        def served(row: int) -> int:
            if not self.reuse:
                return 0
            # At least one token must go through the model, to give logits.
            pairs = zip(self._cached[row], prompt[:-1], strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            return same - same % self.prefill_chunk

        free = [row for row, run in enumerate(self._rows) if run is None]
        best = max(free, key=lambda row: (served(row), -len(self._cached[row])))
        return best, served(best)

    def _prefill(self) -> None:
        """Take one chunk of the oldest prompt that is not yet in the cache."""
        runs = [run for run in self._rows if run is not None and not run.decoding]
        if not runs:
            return
        run = min(runs, key=lambda run: run.generation.submitted)
        chunk = run.prompt[run.prefilled : run.prefilled + self.prefill_chunk]
        try:
            logits = self.model.prefill(run.row, chunk)
            run.prefilled += len(chunk)
            if len(chunk) == self.prefill_chunk:
                self._cached[run.row] = run.prompt[: run.prefilled]
            if run.decoding:
                run.generation.timings.prefill = self._since_submit(run)
                self._sample(run, logits, 0)
        except Exception as error:
            self._fail([run], error)

    def _decode(self) -> None:
        """One token for every row whose prompt is in the cache."""
        runs = [
            run for run in self._rows if run is not None and run.decoding and not self._idle(run)
        ]
        if not runs:
            return
        try:
            logits = self.model.decode([run.row for run in runs], [run.ids[-1] for run in runs])
        except Exception as error:
            self._fail(runs, error)
            return
        for index, run in enumerate(runs):
            try:
                self._sample(run, logits, index)
            except Exception as error:
                self._fail([run], error)

    def _sample(self, run: Run, logits: Any, index: int) -> None:
        if run.generation.cancel_reason is not None:
            return  # it left during this pass: what the pass found out is for nobody
        allowed = None if run.constraint is None else run.constraint.allowed()
        token = self.model.choose(logits, index, run.params, run.ids, run.random, allowed)
        if run.constraint is not None:
            token = run.constraint.in_time(token, self._left(run))
        if run.params.logprobs is not None and token not in self.model.eos_ids:
            run.untold.append((run.known, self._logprob(logits, index, token, run.params.logprobs)))
        run.ids.append(token)
        generation = run.generation
        generation.completion_tokens += 1
        generation.timings.last_token = self._since_submit(run)
        if generation.timings.first_token is None:
            generation.timings.first_token = generation.timings.last_token
        piece, finish_reason = self._piece(run, token)
        if finish_reason is not None:
            self._finish(run, piece, finish_reason)
        elif piece:
            self._parcels.append((generation, piece, None, run.take_told(piece)))

    def _logprob(self, logits: Any, index: int, token: int, count: int) -> TokenLogprob:
        (_, logprob), *top = self.model.logprobs(logits, index, token, count)
        alternatives = (TokenLogprob(*self.model.token(id), each) for id, each in top)
        return TokenLogprob(*self.model.token(token), logprob, tuple(alternatives))

    def _piece(self, run: Run, token: int) -> tuple[str, str | None]:
        """The text that this token makes safe to send, and the reason to finish, if any."""
        if token in self.model.eos_ids:
            return run.flush(), "stop"
        piece = run.add(token)
        if run.stops.matched is None and not run.complete and self._left(run) > 0:
            return piece, None
        if run.stops.matched is None:
            piece += run.flush()  # which may complete a stop string
        stopped = run.complete or run.stops.matched is not None
        return piece, "stop" if stopped else "length"

    def _left(self, run: Run) -> int:
        """How many tokens the reply may still have."""
        sampled = len(run.ids) - len(run.prompt)
        return min(run.params.max_tokens - sampled, self.model.context - len(run.ids))

    def _finish(self, run: Run, piece: str, finish_reason: str) -> None:
        if run.row >= 0:
            self._rows[run.row] = None
            self.model.truncate(run.row, len(self._cached[run.row]))
        with self._wake:
            self._runs.discard(run)
        run.generation.matched_stop = run.stops.matched
        self._parcels.append((run.generation, piece, finish_reason, run.take_told(piece)))

    def _fail(self, runs: list[Run], error: Exception) -> None:
        log.error("a generation failed", exc_info=error)
        for run in runs:
            run.generation.error = "the model failed on this request"
            self._cached[run.row] = []
            self._finish(run, self._rest(run), "error")

    @staticmethod
    def _rest(run: Run) -> str:
        """What was held of a reply that ends here; a fault in that text shall end no other."""
        try:
            return run.flush()
        except Exception:
            log.exception("the rest of a reply was lost")
            return ""

    def _end_all(self, finish_reason: str, error: str | None) -> None:
        with self._wake:
            runs, self._runs = self._runs, set()
            self._waiting.clear()
        self._rows = [None] * len(self._rows)
        for run in runs:
            run.generation.error = error
            self._parcels.append((run.generation, "", finish_reason, ()))

    def _hand_over(self) -> None:
        """Bring all that a pass made to the event loop in one crossing."""
        parcels, self._parcels = self._parcels, []
        if parcels and self._loop is not None:
            # A loop that was closed in the meantime has nobody waiting on it.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_deliver, parcels)

    @staticmethod
    def _since_submit(run: Run) -> float:
        return time.monotonic() - run.generation.submitted


def _deliver(parcels: Iterable[Parcel]) -> None:
    with volley.of(asyncio.get_running_loop()).together():
        for generation, piece, finish_reason, logprobs in parcels:
            generation.deliver(piece, finish_reason, logprobs)
