"""Outlets: a client that is behind, by each policy, and the faults that are asked for."""

import asyncio
from typing import Any

import pytest

from access import Access
from delivery import Delivery, Policy
from generation import Generation, GenerationError
from metrics import Metrics
from outlet import GARBAGE, Cut, Faulty, ToClient
from pieces import pour
from simulated import SimulatedEngine
from watching import ClientGone


class Written:
    """In place of an exchange: what was written, and how the client keeps up."""

    open = True

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.behind = False
        self.gone: str | None = None
        self.caught_up = asyncio.Event()

    def frame(self, data: bytes) -> bytes:
        return data

    def write(self, data: bytes) -> None:
        if self.gone is not None:
            raise ClientGone(self.gone)
        self.parts.append(data)

    async def drained(self) -> None:
        await self.caught_up.wait()
        self.behind = False

    def lost(self, why: str) -> None:
        self.gone = why


def client(policy: str, generation: Generation | None) -> tuple[Any, ToClient]:
    exchange: Any = Written()
    return exchange, ToClient(exchange, exchange, policy, generation)


class TestToClient:
    @pytest.mark.parametrize("policy", ["buffer", "pause", "drop"])
    async def test_one_that_keeps_up(self, policy: str) -> None:
        exchange, outlet = client(policy, Generation(1))
        assert outlet.put(b"a")
        await outlet.ready()
        assert exchange.parts == [b"a"]

    async def test_buffer(self) -> None:
        exchange, outlet = client("buffer", Generation(1))
        exchange.behind = True
        assert outlet.put(b"a")
        await outlet.ready()
        assert exchange.gone is None

    async def test_pause(self) -> None:
        generation = Generation(1)
        exchange, outlet = client("pause", generation)
        exchange.behind = True
        assert not outlet.put(b"a")
        waiting = asyncio.ensure_future(outlet.ready())
        await asyncio.sleep(0)
        assert generation.paused
        exchange.caught_up.set()
        await waiting
        assert not generation.paused

    async def test_drop(self) -> None:
        exchange, outlet = client("drop", Generation(1))
        exchange.behind = True
        assert not outlet.put(b"a")
        await outlet.ready()
        with pytest.raises(ClientGone, match="too slow"):
            outlet.put(b"b")

    @pytest.mark.parametrize("policy", ["buffer", "pause", "drop"])
    async def test_what_is_kept_anyway_waits(self, policy: str) -> None:
        exchange, outlet = client(policy, None)
        exchange.behind = True
        assert not outlet.put(b"a")
        waiting = asyncio.ensure_future(outlet.ready())
        await asyncio.sleep(0)
        assert not waiting.done()
        exchange.caught_up.set()
        await waiting
        assert exchange.gone is None


class TestPour:
    """The engine's pieces go to the outlet in the moment of their delivery."""

    async def test_at_once_and_in_order(self) -> None:
        generation, taken = Generation(1), list[str]()
        generation.deliver("early")
        pouring = asyncio.ensure_future(generation.pour(lambda piece: not taken.append(piece)))
        await asyncio.sleep(0)
        assert taken == ["early"]
        generation.deliver("now")
        assert taken == ["early", "now"]  # without a turn of the event loop
        generation.deliver("last", "stop")
        assert taken[-1] == "last"
        assert await pouring

    @pytest.mark.parametrize("waiting", [False, True])
    async def test_who_wants_no_more_for_now(self, waiting: bool) -> None:
        generation, taken = Generation(1), list[str]()

        def take(piece: str) -> bool:
            taken.append(piece)
            return len(taken) > 1

        if not waiting:
            generation.deliver("a")
        pouring = asyncio.ensure_future(generation.pour(take))
        await asyncio.sleep(0)
        if waiting:
            generation.deliver("a")
        generation.deliver("b")  # before the task has had its turn
        generation.deliver("c", "length")
        assert taken == ["a"]
        assert not await pouring
        assert await generation.pour(take)
        assert taken == ["a", "b", "c"]

    async def test_what_goes_wrong_in_the_consumer_is_raised_there(self) -> None:
        generation, others = Generation(1), list[str]()

        def take(piece: str) -> bool:
            raise ClientGone(piece)

        pouring = asyncio.ensure_future(generation.pour(take))
        await asyncio.sleep(0)
        generation.deliver("a")
        generation.deliver("b")
        generation.deliver("", "cancelled")
        with pytest.raises(ClientGone, match="a"):
            await pouring
        assert await generation.pour(lambda piece: not others.append(piece))
        assert others == ["b"]

    async def test_a_failed_reply(self) -> None:
        generation = Generation(1)
        pouring = asyncio.ensure_future(generation.pour(lambda _: True))
        await asyncio.sleep(0)
        generation.error = "broken"
        generation.deliver("", "error")
        with pytest.raises(GenerationError, match="broken"):
            await pouring

    async def test_a_consumer_that_left_takes_nothing(self) -> None:
        generation, taken = Generation(1), list[str]()
        pouring = asyncio.ensure_future(generation.pour(lambda piece: not taken.append(piece)))
        await asyncio.sleep(0)
        pouring.cancel()
        await asyncio.gather(pouring, return_exceptions=True)
        generation.deliver("a", "stop")
        assert taken == []

    async def test_an_outlet_that_is_slow(self) -> None:
        """Every piece waits until the outlet is ready, and none is lost or told twice."""
        generation, taken = Generation(1), list[str]()

        async def ready() -> None:
            if len(taken) < 4:
                generation.deliver("." * len(taken), "stop" if len(taken) == 3 else None)

        generation.deliver("a")
        await pour(generation, taken.append, ready)  # type: ignore[arg-type] (None is not True)
        assert taken == ["a", ".", "..", "..."]


class TestFaulty:
    @pytest.mark.parametrize(
        ("faults", "written", "cut"),
        [
            ({}, [b"abc", b"de"], False),
            ({"truncate_after": 0}, [], True),
            ({"truncate_after": 1}, [b"abc"], True),
            ({"truncate_after": 2}, [b"abc", b"de"], False),
            ({"garbage_after": 0}, [GARBAGE, b"abc", b"de"], False),
            ({"garbage_after": 1}, [b"abc", GARBAGE, b"de"], False),
            ({"split_at": 2}, [b"ab", b"c", b"de"], False),
            ({"split_at": 1, "truncate_after": 1}, [b"a", b"b", b"c"], True),
            ({"split_at": 99}, [b"abc", b"de"], False),
            ({"split_at": 0}, [b"abc", b"de"], False),
        ],
    )
    async def test_table(self, faults: dict[str, int], written: list[bytes], cut: bool) -> None:
        exchange: Any = Written()
        outlet = Faulty(exchange, exchange, "buffer", Generation(1), faults)
        was_cut = False
        try:
            for data in (b"abc", b"de"):
                assert not outlet.put(data)
                await outlet.ready()
        except Cut:
            was_cut = True
        assert (exchange.parts, was_cut) == (written, cut)

    async def test_an_empty_write_is_none(self) -> None:
        """A message to a WebSocket that is closing is no bytes at all."""
        exchange: Any = Written()
        outlet = Faulty(exchange, exchange, "buffer", Generation(1), {"fail_after": 9})
        outlet.put(b"")
        outlet.put(b"a")
        await outlet.ready()
        assert exchange.parts == [b"a"]


@pytest.mark.parametrize("asked", [{}, {"delay_ms": 5, "jitter_ms": 0}, {"fail_after": 3}])
async def test_a_schedule_of_ones_own_is_no_fault_on_the_wire(asked: dict[str, int]) -> None:
    """What is asked of the engine alone is written at once, like anybody's reply."""
    delivery = Delivery(SimulatedEngine(), Access(), Policy(), Metrics())
    exchange: Any = Written()
    assert type(delivery.outlet(exchange, exchange, Generation(1), asked)) is ToClient
    faulty = delivery.outlet(exchange, exchange, Generation(1), {**asked, "split_at": 1})
    assert type(faulty) is Faulty
