"""Many requests as a plan says: how many, how many at once, how often, to one URL or to two.

    --concurrency 2     a---- c-- d---     two workers, each asks again when it has its answer
                        b-------- e---
    --rate 10           a  b  c  d  e      one starts each 100 ms, whatever is under way
    --against URL       AB BA AB BA        both paths in turn, alternating which is first

Taking turns is what makes two paths comparable: a slow minute of the machine falls on both. A rate
does not wait for answers, so that a slow server gets no fewer requests than a fast one.

Not here: what is made of the replies (`tally.py`). Read next: `client.py`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asking import Session
from measures import Failure, Reply
from target import Options


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to ask and how often. `concurrency` None: one worker, or no bound where a rate is."""

    urls: tuple[str, ...]  # one, or two that take turns
    bodies: tuple[Mapping[str, Any], ...]  # one for each URL
    options: tuple[Options, ...]  # likewise
    n: int = 1
    warmup: int = 0
    concurrency: int | None = None
    rate: float | None = None  # a second
    keep_alive: bool = False
    insecure: bool = False


Taken = Callable[[int, Reply], None]  # which URL, and its reply


async def run(plan: Plan, take: Taken) -> None:
    """Carry out the plan, handing on each reply when it is over; ValueError for a bad request.

    Cancelled, it hands on the replies under way as cancelled, too.
    """
    for number in range(plan.warmup):
        await _Worker(plan, lambda which, reply: None).turns(iter((number,)))
    if plan.rate is None:
        await _closed_loop(plan, take)
    else:
        await _open_loop(plan, plan.rate, take)


async def _closed_loop(plan: Plan, take: Taken) -> None:
    numbers = iter(range(plan.n))
    async with _all_of_them() as group:
        for _ in range(min(plan.n, plan.concurrency or 1)):
            group.create_task(_Worker(plan, take).turns(numbers))


async def _open_loop(plan: Plan, rate: float, take: Taken) -> None:
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(plan.concurrency or plan.n)
    began = loop.time()
    async with _all_of_them() as group:
        for number in range(plan.n):
            await asyncio.sleep(began + number / rate - loop.time())
            await room.acquire()
            task = group.create_task(_Worker(plan, take).turns(iter((number,))))
            task.add_done_callback(lambda _: room.release())


@contextlib.asynccontextmanager
async def _all_of_them() -> AsyncIterator[asyncio.TaskGroup]:
    """Give a task group whose first error is raised as itself, without its wrapping."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


class _Worker:
    """Asks one request after the other, over new connections or over the same one."""

    def __init__(self, plan: Plan, take: Taken) -> None:
        self._plan = plan
        self._take = take
        self._sessions = [Session(insecure=plan.insecure) for _ in plan.urls]

    async def turns(self, numbers: Iterator[int]) -> None:
        """Take turns until the numbers are used up."""
        try:
            for number in numbers:
                await self.turn(number)
        finally:
            for session in self._sessions:
                await session.close()

    async def turn(self, number: int) -> None:
        """Ask every URL once, beginning with another one each time."""
        count = len(self._plan.urls)
        for which in ((number + i) % count for i in range(count)):
            await self._ask(which)

    async def _ask(self, which: int) -> None:
        plan, session = self._plan, self._sessions[which]
        try:
            reply = await session.ask(plan.urls[which], plan.bodies[which], plan.options[which])
        except asyncio.CancelledError:
            if session.reply is not None:
                session.reply.fail(Failure.CANCELLED, "interrupted")
                self._take(which, session.reply)
            raise
        self._take(which, reply)
        if not plan.keep_alive:
            await session.close()
