"""Replies that can be resumed: numbered events, kept for a while, followed by whoever comes.

    tell() --> put() --> events 1, 2, 3 ... --> follow(after=0)   the first connection
                         (kept)             --> follow(after=2)   after Last-Event-ID: ID:2

A resumable reply is not tied to the connection that asked for it. When nobody follows it any
more, it has a grace time in which somebody may come back; then it is cancelled. After its end the
events are kept for `keep_s`, so that a client that lost the last ones can still fetch them. A slow
follower holds up nobody: what it has not taken yet waits here, where it is kept anyway.

Memory is bounded by the number of replies: a finished one makes room for a new one, and when all
of them are running there is no room.

An `EventSource` does all of this by itself: it remembers the last id, reconnects, and sends it.

WHATWG HTML section 9.2.3 (reconnection, Last-Event-ID).
Read next: `ticks.py`.
"""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from generation import BadRequest, Generation, QueueFull
from outlet import Outlet

ABANDONED = "nobody came back for it"

# The id of a reply and the number of an event in it. Matched in full, ASCII digits only.
EVENT_ID = re.compile(r"(reply-[0-9a-f]{1,32}):([0-9]{1,9})", re.ASCII)
# Events replayed in one go, before others on the event loop have their turn.
TURN = 100


def parse_event_id(text: str) -> tuple[str, int]:
    """Split a `Last-Event-ID` into reply and number; `BadRequest` when it is none of ours."""
    match = EVENT_ID.fullmatch(text)
    if match is None:
        raise BadRequest("Last-Event-ID is not an id of this server", "Last-Event-ID")
    return match[1], int(match[2])


class Replay:
    """One resumable reply: its events so far, and those who follow it.

    `grace_s` is how long it goes on while nobody does: infinite where nobody needs to.
    """

    def __init__(self, generation: Generation, grace_s: float) -> None:
        self.generation = generation
        self.events: list[bytes] = []
        self.complete = False
        self.whole = False  # its end was told, which is not so when a fault of ours ended it
        self._grace_s = grace_s
        self._followers = 0
        self._more = asyncio.Event()
        self._abandonment: asyncio.TimerHandle | None = None

    async def fill(self, telling: Awaitable[None]) -> None:
        """Run `telling`, which puts the reply here: a `Replay` is an `Outlet`."""
        self._wait_for_followers()
        try:
            with self.generation:
                await telling
                self.whole = True
        finally:
            self.complete = True
            self.wake()
            self._forget_abandonment()

    frame = bytes  # as it is: each follower has a framing of its own

    def put(self, data: bytes) -> bool:
        """Keep the next event."""
        self.events.append(data)
        self.wake()
        return True

    async def ready(self) -> None:
        """There is always room for one more."""

    def wake(self) -> None:
        """Have every follower look again: for new events, and whether it is still wanted."""
        self._more.set()
        self._more = asyncio.Event()

    async def follow(self, after: int, outlet: Outlet, wanted: Callable[[], bool]) -> None:
        """Put the events that come after number `after`: first those kept, then live ones.

        Ends with the reply, or when it is woken and not `wanted` any more. RuntimeError when the
        reply broke off without an end, which must not look like one.
        """
        self._followers += 1
        self._forget_abandonment()
        try:
            while wanted():
                while after < len(self.events):
                    after += 1
                    if not outlet.put(outlet.frame(self.events[after - 1])):
                        await outlet.ready()
                    if after % TURN == 0:
                        await asyncio.sleep(0)
                if self.complete:
                    break
                await self._more.wait()
            if wanted() and not self.whole:
                raise self._broken_off()
        finally:
            self._followers -= 1
            self._wait_for_followers()

    async def reached(self, number: float) -> None:
        """Wait for so many events, or the end. RuntimeError when it broke off before."""
        while len(self.events) < number and not self.complete:
            await self._more.wait()
        if len(self.events) < number and not self.whole:
            raise self._broken_off()

    def _broken_off(self) -> RuntimeError:
        return RuntimeError(f"{self.generation.id} broke off without an end")

    def _wait_for_followers(self) -> None:
        """With none, give the reply up after the grace time, unless one comes."""
        self._forget_abandonment()
        if not self._followers and not self.complete and self._grace_s < math.inf:
            loop = asyncio.get_running_loop()
            self._abandonment = loop.call_later(self._grace_s, self._abandon)

    def _abandon(self) -> None:
        self.generation.cancel(ABANDONED)

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

    def check_room(self) -> None:
        """`QueueFull` when so many are running that one more could make none of them room."""
        if len(self._replays) >= self._most and self._oldest_complete() is None:
            raise QueueFull(f"{self._most} resumable replies are running already")

    def _oldest_complete(self) -> str | None:
        return next((id for id, replay in self._replays.items() if replay.complete), None)

    def add(self, replay: Replay, telling: Coroutine[Any, Any, None]) -> None:
        """Begin to fill a reply, independently of any connection; the oldest finished makes room.

        See `check_room`, which comes first: a reply that is refused then costs no other its place.
        """
        oldest = self._oldest_complete()
        if len(self._replays) >= self._most and oldest is not None:
            del self._replays[oldest]
        id = replay.generation.id
        self._replays[id] = replay
        task = asyncio.create_task(replay.fill(telling), name=f"fill {id}")
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._filled(task, id))

    def _filled(self, task: asyncio.Task[None], id: str) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()  # an error here is a bug: let the loop report it
        loop = asyncio.get_running_loop()
        loop.call_later(self._keep_s, self._replays.pop, id, None)
