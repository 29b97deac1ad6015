"""How a reply is told: each piece as an event the moment that it is there, then its one end.

The last part of a token's way, all in one turn of the event loop:

    Volley.together        volley.py       what one pass has made, for many replies:
      Generation.deliver   generation.py   a piece comes from the engine
        Teller.take        here            the dialect makes an event of it, the outlet's `frame`
                                           a chunk or a WebSocket's frame of that; of a short
                                           piece the bytes are kept from the last time
          ToClient.put     outlet.py       says whether the client keeps up
            Watched.write  watching.py     the bytes are held until those of all replies are made,
    Watched.send           watching.py     and each goes to its transport

`Teller.take` is the `_take` of `Generation`, set by `tell` -> `pieces.pour` -> `Generation.pour`.

It takes more than one turn, or is no part of a volley, in these cases:

    hold-back, grouping   a generator of `pieces.py` stands before `Teller.take`, and wakes a task
    resume, background    a `Replay` (`replay.py`) in `ToClient`'s place, which others follow
    faults on demand      `outlet.Faulty` writes from `ready`, which takes the time of the fault
    a client behind       but for "buffer", pieces wait in the `Generation` until `ready` returns
    another server        `upstream.py` delivers each piece when it comes, alone

`tell` is what stands around that call: what a dialect writes before the first piece, the waiting
for a client that is behind, and how it ended, which every stream says exactly once.

Not here: where the pieces come from (`delivery.py` begins a reply).
Read next: `outlet.py`, where the events go.
"""

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from connection import Exchange
from dialects import Events
from generation import SHUTDOWN, Filtered, Generation, GenerationError
from outlet import Cut, Outlet
from pieces import Pieces, pour
from replay import ABANDONED

# The bytes of short pieces are made once and kept, for so many of each kind of event and framing.
KEPT_PIECES = 4096
KEPT_CHARACTERS = 32


@dataclass(slots=True)
class Entry:
    """One reply's line in `/log`."""

    route: str
    generation: Generation
    client_left: bool = False
    told: int = 0  # the number of the last event told; pieces count where each is numbered
    page: dict[str, float | None] | None = None  # what the page measured of it

    @property
    def last_id(self) -> str:
        """The id of the event that was told last: number 0 before any that has one."""
        return f"{self.generation.id}:{self.told}"

    def as_dict(self) -> dict[str, Any]:
        """The line as JSON tells it; `finish_reason` is null while the reply runs."""
        generation = self.generation
        return {
            "id": generation.id,
            "route": self.route,
            **generation.usage,
            "finish_reason": generation.finish_reason,
            "client_left": self.client_left,
            "cancel_reason": generation.cancel_reason,
            "timings": generation.timings.as_dict(),
            "page": self.page,
        }


class Numbered(Enum):
    """Which events of a stream are given an id."""

    NONE = auto()
    END = auto()
    ALL = auto()


class Teller:
    """Takes a reply's pieces, and puts each where it is told as an event."""

    __slots__ = ("_entry", "_events", "_kept", "_outlet")

    def __init__(self, entry: Entry, events: Events, outlet: Outlet) -> None:
        self._entry = entry
        self._events = events
        self._outlet = outlet
        self._kept = events.unnumbered and _kept(events.unnumbered, outlet.frame)

    def take(self, piece: str) -> bool:
        """Tell a piece the moment that it is there."""
        if self._kept is not None and len(piece) <= KEPT_CHARACTERS:
            return self._outlet.put(self._kept(piece))
        return self._outlet.put(self._outlet.frame(self._events.piece(piece)))

    def take_numbered(self, piece: str) -> bool:
        """The same with an id."""
        self._entry.told += 1
        event = self._events.piece(piece, self._entry.last_id)
        return self._outlet.put(self._outlet.frame(event))


@functools.cache
def _kept(
    event: Callable[[str], bytes | str], frame: Callable[[Any], bytes]
) -> Callable[[str], bytes]:
    """What makes the bytes of a short piece, once for all replies: most words come again."""

    @functools.lru_cache(KEPT_PIECES)
    def encode(piece: str) -> bytes:
        return frame(event(piece))

    return encode


async def tell(
    entry: Entry,
    pieces: Pieces,
    events: Events,
    outlet: Outlet,
    numbered: Numbered = Numbered.NONE,
) -> None:
    """Tell a reply: put an event for each piece the moment it is there, then for the one end.

    The caller awaits `outlet.ready` before it puts anything behind the end.
    """
    generation = entry.generation
    teller = Teller(entry, events, outlet)
    take = teller.take_numbered if numbered is Numbered.ALL else teller.take
    if begin := events.begin():
        entry.told += 1
        outlet.put(outlet.frame(begin))
        await outlet.ready()
    tell_end = functools.partial(events.end, generation)
    try:
        await pour(pieces, take, outlet.ready)
    except GenerationError as error:
        generation.filtered = isinstance(error, Filtered)
        tell_end = functools.partial(events.error, str(error), error.type)
    if why := broken_off(generation):
        tell_end = functools.partial(events.error, *why)
    entry.told += 1
    end = tell_end(None if numbered is Numbered.NONE else entry.last_id)
    outlet.put(outlet.frame(end))


async def to_the_end(exchange: Exchange, outlet: Outlet, telling: Awaitable[None]) -> bool:
    """Tell to the end, and have it written; False when a fault asked for a cut."""
    try:
        await telling
        await outlet.ready()
    except Cut:
        exchange.cut()
        return False
    return True


# Not by the client's own wish: such a reply must not look like one that has ended.
BROKEN_OFF = {
    SHUTDOWN: ("the server is shutting down", "unavailable"),
    ABANDONED: ("nobody followed the reply any more", "abandoned"),
}


def broken_off(generation: Generation) -> tuple[str, str] | None:
    """Message and type of the error that a cancelled reply has to end in, if any."""
    if generation.finish_reason != "cancelled":
        return None
    return BROKEN_OFF.get(generation.cancel_reason or "")
