"""Timers of many streams, those of the same moment in one timer of the event loop.

    ticks.add(owner, wait_s, call)   the first of a tick   -> loop.call_at(tick)
    ticks.add(owner, wait_s, call)   another of that tick  -> nothing more
                                     <- at the tick: call, call

An event loop keeps its timers in a heap: with 10,000 streams it costs more to sort one in and out
than to do what it is for. And each wake-up takes some 70 us of the processor on a virtual machine,
whatever is done then.

Read next: `volley.py`.
"""

import asyncio
import math
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

# How fine: what is due is called up to 20 ms later, never earlier.
PER_S = 50

Call = Callable[[], None]


class Ticks:
    """The timers of one event loop that need not be exact."""

    def __init__(self) -> None:
        self._due: dict[int, dict[object, Call]] = {}

    def add(self, owner: object, wait_s: float, call: Call) -> int:
        """Call in `wait_s`, or up to a tick later; return what `drop` wants to know."""
        loop = asyncio.get_running_loop()
        tick = math.ceil((loop.time() + wait_s) * PER_S)
        if tick not in self._due:
            self._due[tick] = {}
            loop.call_at(tick / PER_S, self._call, tick)
        self._due[tick][owner] = call
        return tick

    def drop(self, owner: object, tick: int) -> None:
        """Forget an owner's call at a tick, if it is still to come."""
        # The tick itself stays. To cancel its timer it would have to be kept here, and it knows the
        # loop, which would then never be let go.
        self._due.get(tick, {}).pop(owner, None)

    def _call(self, tick: int) -> None:
        calls = self._due[tick]
        while calls:
            # Each is taken out before it is called: a failed one costs no other its turn.
            _, call = calls.popitem()
            try:
                call()
            except Exception as error:
                context = {"message": "a timer failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)
        del self._due[tick]


Made = TypeVar("Made")


def per_loop(make: Callable[[], Made]) -> Callable[[asyncio.AbstractEventLoop], Made]:
    """Return what finds the one object of a kind that an event loop has, for as long as it has."""
    made: WeakKeyDictionary[asyncio.AbstractEventLoop, Made] = WeakKeyDictionary()

    def of(loop: asyncio.AbstractEventLoop) -> Made:
        found = made.get(loop)
        if found is None:
            found = made[loop] = make()
        return found

    return of


of = per_loop(Ticks)
