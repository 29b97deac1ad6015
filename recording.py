"""Streams that are recorded as they come and read when they are over.

    Recorder(Wire)       dates every read, keeps it, and hands it on when the reply is over
    Recording(Session)   asks through one, so `ask` returns the same `Reply` as ever, later
    Streams              several that run for as long as a block lasts, and the gaps in them

A client on the machine that it measures takes time from the server, the more the more it does with
each piece. This one does next to nothing: the reads have their dates, and what they say can wait.

Not here: what is measured with it (`load_experiments.py`). Read next: `dated.py`.
"""

import asyncio
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Self

import http1
from bench import POLL_S, REPLY_S, ExperimentError
from client import Options, Session
from measures import Reply
from wire import Wire

# A stream has settled when so many reads have come: its head, and a few pieces.
SETTLED_READS = 6


class Recorder(Wire):
    """A connection whose reads wait until the message that they belong to is whole."""

    def __init__(self) -> None:
        super().__init__()
        self._over = asyncio.Event()
        self._last_bytes = b""

    @property
    def began(self) -> float:
        """When the last request was sent, on `time.perf_counter`'s clock."""
        return self._origin

    def start_clock(self) -> None:
        """Begin a new recording."""
        super().start_clock()
        self._over.clear()
        self._last_bytes = b""

    def data_received(self, data: bytes) -> None:
        """Date one read, and see whether it is the last one."""
        self.hold(data)
        refused = not self._last_bytes and not data.startswith(b"HTTP/1.1 200 ")
        self._last_bytes = (self._last_bytes + data)[-len(http1.LAST_CHUNK) :]
        if refused or self._last_bytes == http1.LAST_CHUNK:
            self._over.set()

    def eof_received(self) -> bool:
        """Nothing more will come."""
        self._over.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        self._over.set()
        super().connection_lost(exc)

    async def read(self, until: float | None) -> bytes | None:
        """Return what the next read gave, once all of them are known."""
        await self._over.wait()
        return await super().read(None if self._held else until)


class Recording(Session):
    """A session whose replies are recorded. Only for streams over HTTP/1.1, read to the end."""

    recorder: Recorder | None = None

    @property
    def began(self) -> float:
        """When the last request was sent, on `time.perf_counter`'s clock."""
        if self.recorder is None:
            raise RuntimeError("nothing was asked")
        return self.recorder.began

    def protocol(self) -> Wire:
        """Return a recorder for a new connection."""
        self.recorder = Recorder()
        return self.recorder


async def record(url: str, body: Mapping[str, Any]) -> Reply:
    """Return one reply, recorded; ExperimentError unless it is complete."""
    async with Recording() as session:
        return checked(await session.ask(url, body, Options(timeout=REPLY_S)))


def checked(reply: Reply) -> Reply:
    """Return a complete reply; ExperimentError for any other."""
    if reply.failure is not None:
        raise ExperimentError(f"{reply.url}: {reply.failure}: {reply.error}")
    return reply


class Streams:
    """Keeps `count` streams running while its block lasts; `body(i)` is what the i-th asks for.

    The block begins when all have settled. A stream that comes to its end is asked for again.
    """

    def __init__(self, url: str, count: int, body: Callable[[int], Mapping[str, Any]]) -> None:
        self._url = url
        self._bodies = [body(index) for index in range(count)]
        self._sessions = [Recording() for _ in range(count)]
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving = False
        self._dates: list[list[float]] = []  # of the pieces, reply by reply

    async def __aenter__(self) -> Self:
        pairs = zip(self._sessions, self._bodies, strict=True)
        self._tasks = [asyncio.create_task(self._keep(*pair)) for pair in pairs]
        try:
            await self.more(SETTLED_READS)
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._leave()

    async def more(self, reads: int) -> None:
        """Wait until so many more reads have come on every stream."""
        goals = [self._reads(session) + reads for session in self._sessions]
        try:
            async with asyncio.timeout(REPLY_S):
                pairs = list(zip(self._sessions, goals, strict=True))
                while any(self._reads(session) < goal for session, goal in pairs):
                    for task in self._tasks:
                        if task.done():
                            task.result()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ExperimentError(f"{self._url}: a stream has stalled") from None

    @staticmethod
    def _reads(session: Recording) -> int:
        return session.recorder.reads if session.recorder else 0

    async def _keep(self, session: Recording, body: Mapping[str, Any]) -> None:
        async with session:
            while not self._leaving:
                reply = await session.ask(self._url, body, Options(timeout=None))
                if not self._leaving:
                    checked(reply)
                if pieces := [event for event in reply.events if event.text]:
                    self._dates.append([session.began + event.at for event in pieces])

    async def _leave(self) -> None:
        """Break every connection: what has come of the replies is then read."""
        self._leaving = True
        for session in self._sessions:
            if session.recorder is not None:
                session.recorder.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def gaps(self, since: float, until: float) -> list[float]:
        """Return, after the block, the gaps between pieces that began between two dates."""
        pairs = (pair for dates in self._dates for pair in pairwise(dates))
        return [later - earlier for earlier, later in pairs if since <= earlier < until]
