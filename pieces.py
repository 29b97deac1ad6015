"""Pieces on their way from the engine to the wire: held back, grouped, or neither.

A generation yields a piece a token, and by default each is sent at once. Two things may be asked
to stand in between, each a generator over pieces that a reader can follow alone:

    held_back   the last w pieces wait, so that a banned phrase that completes among them was
                never sent: w tokens later to the reader, w x (time per output token)
    grouped     k pieces, or what comes within some milliseconds, make one event: fewer bytes and
                wake-ups; the first piece of a group waits for the others, (k - 1) x (time per
                output token)

Both keep the end law: what they hold is given out at the end, and an error passes through after
what was safe to send.

Read next: `replay.py`.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence

from generation import GenerationError


class BannedPhrase(GenerationError):
    """The reply was about to say something that it must not."""

    type = "content_filter"

    def __init__(self) -> None:
        super().__init__("the reply was stopped by a filter")


class Banned:
    """Phrases that must never be sent whole, in any case of letters."""

    def __init__(self, phrases: Sequence[str]) -> None:
        self._phrases = tuple(phrase.casefold() for phrase in phrases if phrase.strip())
        longest = max(map(len, self._phrases), default=1)
        # Case folding makes text at most three times as long; what is kept is folded already.
        self._keep = longest - 1

    def __bool__(self) -> bool:
        return bool(self._phrases)

    @classmethod
    def read(cls, path: str) -> "Banned":
        """Read a file with a phrase a line; blank lines do not count. Raises OSError."""
        with open(path, encoding="utf-8") as file:
            return cls([line.strip() for line in file])

    def tail(self, text: str) -> str:
        """As much of the end of a folded text as a phrase could still begin in."""
        return text[len(text) - self._keep :] if self._keep and len(text) > self._keep else text

    def within(self, text: str) -> bool:
        """Whether a phrase is complete in a folded text."""
        return any(phrase in text for phrase in self._phrases)


async def held_back(pieces: AsyncIterator[str], tokens: int, banned: Banned) -> AsyncIterator[str]:
    """Yield each piece once `tokens` more have come, unless a banned phrase completes first.

    Raises `BannedPhrase`; nothing that was held then is sent.
    """
    held: deque[str] = deque()
    recent = ""  # folded text, long enough for any phrase that completes in the next piece
    async for piece in pieces:
        held.append(piece)
        recent += piece.casefold()
        if banned.within(recent):
            raise BannedPhrase
        recent = banned.tail(recent)
        if len(held) > tokens:
            yield held.popleft()
    for piece in held:
        yield piece


async def grouped(
    pieces: AsyncIterator[str], tokens: int | None, window_ms: float | None
) -> AsyncIterator[str]:
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
            if coming is not None or (tokens is not None and len(held) >= tokens):
                yield "".join(held)
                held, deadline = [], None
    except StopAsyncIteration:
        if held:
            yield "".join(held)
    except GenerationError:
        if held:
            yield "".join(held)
        raise
    finally:
        if coming is not None:
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await coming
