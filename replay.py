"""Replies that can be resumed: numbered events, kept for a while, followed by whoever comes.

    generation --> fill() --> events 1, 2, 3 ... --> follow(after=0)   the first connection
                              (kept)             --> follow(after=2)   after Last-Event-ID: ID:2

A resumable reply is not tied to the connection that asked for it. When nobody follows it any
more, it has a grace time in which somebody may come back; then it is cancelled. After its end the
events are kept for `keep_s`, so that a client that lost the last ones can still fetch them.

An `EventSource` does all of this by itself: it remembers the last id, reconnects, and sends it.

WHATWG HTML section 9.2.3 (reconnection, Last-Event-ID).
Read next: `connection.py`.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from generation import BadRequest, Generation

# What to write for an event, once its id is known; and whether it is the last.
Tell = tuple[Callable[[str | None], Any], bool]

# The id of a reply and the number of an event in it. Matched in full, ASCII digits only.
EVENT_ID = re.compile(r"(reply-[0-9a-f]{1,32}):([0-9]{1,9})", re.ASCII)


def parse_event_id(text: str) -> tuple[str, int]:
    """Split a `Last-Event-ID` into reply and number; `BadRequest` when it is none of ours."""
    match = EVENT_ID.fullmatch(text)
    if match is None:
        raise BadRequest("Last-Event-ID is not an id of this server", "Last-Event-ID")
    return match[1], int(match[2])


class Replay:
    """One resumable reply: its events so far, and those who follow it."""

    def __init__(self, generation: Generation, grace_s: float) -> None:
        self.generation = generation
        self.events: list[bytes] = []
        self.complete = False
        self._grace_s = grace_s
        self._followers = 0
        self._more = asyncio.Event()
        self._abandonment: asyncio.TimerHandle | None = None

    async def fill(self, told: AsyncIterator[Tell]) -> None:
        """Take in the reply's events as they are made; each is told its id."""
        try:
            with self.generation:
                async for tell, _ in told:
                    self.events.append(tell(f"{self.generation.id}:{len(self.events) + 1}"))
                    self.wake()
        finally:
            self.complete = True
            self.wake()
            self._forget_abandonment()

    def wake(self) -> None:
        """Have every follower look again: for new events, and whether it is still wanted."""
        self._more.set()
        self._more = asyncio.Event()

    async def follow(self, after: int, wanted: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield the events that come after number `after`: first those kept, then live ones.

        Ends with the reply, or when it is woken and not `wanted` any more.
        """
        self._followers += 1
        self._forget_abandonment()
        try:
            while wanted():
                while after < len(self.events):
                    after += 1
                    yield self.events[after - 1]
                if self.complete:
                    return
                await self._more.wait()
        finally:
            self._followers -= 1
            if not self._followers and not self.complete:
                loop = asyncio.get_running_loop()
                self._abandonment = loop.call_later(self._grace_s, self._abandon)

    def _abandon(self) -> None:
        self.generation.cancel("nobody came back for it")

    def _forget_abandonment(self) -> None:
        if self._abandonment is not None:
            self._abandonment.cancel()
            self._abandonment = None


class ReplayStore:
    """The replies that can be resumed now, by id. The oldest finished ones make room for new."""

    def __init__(self, keep_s: float, most: int = 1000) -> None:
        self._keep_s = keep_s
        self._most = most
        self._replays: dict[str, Replay] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._replays)

    def get(self, id: str) -> Replay | None:
        """The reply of this id, unless it is unknown or expired."""
        return self._replays.get(id)

    def add(self, replay: Replay, told: AsyncIterator[Tell]) -> None:
        """Begin to fill a reply, independently of any connection."""
        if len(self._replays) >= self._most:
            self._drop_oldest_complete()
        id = replay.generation.id
        self._replays[id] = replay
        task = asyncio.create_task(replay.fill(told), name=f"fill {id}")
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._filled(task, id))

    def _filled(self, task: asyncio.Task[None], id: str) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()  # an error here is a bug: let the loop report it
        loop = asyncio.get_running_loop()
        loop.call_later(self._keep_s, self._replays.pop, id, None)

    def _drop_oldest_complete(self) -> None:
        oldest = next((id for id, replay in self._replays.items() if replay.complete), None)
        if oldest is not None:
            del self._replays[oldest]
