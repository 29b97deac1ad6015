"""Pieces on their way from the engine to the wire: held back, grouped, or neither.

A generation makes a piece a token, and by default each is sent at once: `pour` hands it from the
engine's crossing straight to whoever writes. Two things may be asked to stand in between, each a
generator over pieces that a reader can follow alone:

    held_back   the last w pieces wait, so that a banned phrase that completes among them was
                never sent: w tokens later to the reader, w x (time per output token)
    grouped     k pieces, or what comes within some milliseconds, make one event: fewer bytes and
                wake-ups; the first piece of a group waits for the others, (k - 1) x (time per
                output token)

Both keep the end law: what they hold is given out at the end, and an error passes through after
what was safe to send. Both are closed by `aclose`, and close what they read from: the generation
then stops.

Read next: `telling.py`, where they are told.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from generation import Filtered, Generation, GenerationError, Take


class Pieces(Protocol):
    """What can stand between: a `Generation`, or one of the generators below."""

    def __aiter__(self) -> AsyncIterator[str]: ...

    def __anext__(self) -> Awaitable[str]: ...

    def aclose(self) -> Awaitable[None]: ...  # noqa: D102


class BannedPhrase(Filtered):
    """The reply was about to say something that it must not."""

    def __init__(self) -> None:
        super().__init__("the reply was stopped by a filter")


class Banned:
    """Phrases that must never be sent whole, in any case of letters."""

    def __init__(self, phrases: Sequence[str]) -> None:
        self._phrases = tuple(phrase.casefold() for phrase in phrases if phrase.strip())
        self._keep = max(map(len, self._phrases), default=1) - 1

    def __bool__(self) -> bool:
        return bool(self._phrases)

    @classmethod
    def read(cls, path: str) -> "Banned":
        """Read a file with a phrase a line, blank lines apart. Raises OSError, UnicodeError."""
        with open(path, encoding="utf-8-sig") as file:  # an editor's mark is part of no phrase
            return cls([line.strip() for line in file])

    def tail(self, text: str) -> str:
        """As much of the end of a folded text as a phrase could still begin in."""
        return text[-self._keep :] if self._keep else ""

    def find(self, text: str) -> int | None:
        """Where the first phrase that is complete in a folded text begins; None without one."""
        starts = [start for phrase in self._phrases if (start := text.find(phrase)) >= 0]
        return min(starts, default=None)


async def pour(pieces: Pieces, take: Take, ready: Callable[[], Awaitable[None]]) -> None:
    """Have `take` called with each piece; after it returned False, once `ready` is.

    From a generation itself they come in the very moment that the engine hands them over.
    """
    if isinstance(pieces, Generation):
        while not await pieces.pour(take):
            await ready()
        return
    async with aclosing(pieces):
        async for piece in pieces:
            if not take(piece):
                await ready()


async def held_back(pieces: Pieces, tokens: int, banned: Banned) -> AsyncGenerator[str, None]:
    """Yield each piece once `tokens` more have come, unless a banned phrase completes first.

    Then what was held of the phrase, and all behind it, is never sent: `BannedPhrase` is raised,
    and the generation stops.
    """
    held: deque[str] = deque()
    recent = ""  # folded text, long enough for any phrase that completes in the next piece
    failure: GenerationError | None = None
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                held.append(piece)
                recent += piece.casefold()
                start = banned.find(recent)
                if start is not None:
                    held = deque([_without_end("".join(held), len(recent) - start)])
                    raise BannedPhrase
                recent = banned.tail(recent)
                if len(held) > tokens:
                    yield held.popleft()
    except GenerationError as error:
        failure = error
    for piece in filter(None, held):
        yield piece
    if failure is not None:
        raise failure


def _without_end(text: str, folded: int) -> str:
    """Cut so many folded characters off the end of a text; a character may fold to three."""
    end = len(text)
    while end and folded > 0:
        end -= 1
        folded -= len(text[end].casefold())
    return text[:end]


async def grouped(
    pieces: Pieces, tokens: int | None, window_ms: float | None
) -> AsyncGenerator[str, None]:
    """Join pieces: `tokens` of them, or those of `window_ms` from a group's first piece."""
    loop = asyncio.get_running_loop()
    held: list[str] = []
    deadline: float | None = None
    coming: asyncio.Future[str] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(pieces))
            wait = None if deadline is None else max(0.0, deadline - loop.time())
            await asyncio.wait([coming], timeout=wait)
            if coming.done():
                arrived, coming = coming, None
                held.append(arrived.result())
                if window_ms is not None and deadline is None:
                    deadline = loop.time() + window_ms / 1000
            late = deadline is not None and loop.time() >= deadline
            if held and (late or len(held) == tokens):
                yield "".join(held)
                held, deadline = [], None
    except (StopAsyncIteration, GenerationError) as end:
        if held:
            yield "".join(held)
        if isinstance(end, GenerationError):
            raise
    finally:
        if coming is not None:
            coming.cancel()
            # However it ends, it is nobody's any more.
            await asyncio.gather(coming, return_exceptions=True)
        await pieces.aclose()
