"""Timers that many streams share."""

import asyncio
import gc
import weakref

import pytest

import ticks


@pytest.fixture
async def shared():
    return ticks.Ticks()


async def test_never_early_and_late_by_a_tick_at_most(shared):
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    began = loop.time()
    tick = shared.add("a", 0.03, lambda: done.set_result(loop.time()))
    assert 0.03 <= tick / ticks.PER_S - began <= 0.03 + 1 / ticks.PER_S + 1e-6
    assert await done >= tick / ticks.PER_S - 1e-3  # the loop's clock has a resolution


async def test_those_of_a_tick_come_by_one_timer(shared, monkeypatch):
    loop = asyncio.get_running_loop()
    timers, called = [], []
    monkeypatch.setattr(loop, "time", lambda: 100.001)

    def call_at(when, call, tick):
        timers.append((when, call, tick))

    monkeypatch.setattr(loop, "call_at", call_at)
    for number in range(5):
        shared.add(number, 0.005, lambda number=number: called.append(number))
    shared.add("later", 0.5, lambda: called.append("later"))
    assert [when for when, *_ in timers] == [100.02, 100.52]
    _, call, tick = timers[0]
    call(tick)
    assert sorted(called) == [0, 1, 2, 3, 4]


async def test_one_that_is_dropped_is_not_called(shared):
    called = []
    tick = shared.add("a", 0.01, lambda: called.append("a"))
    shared.add("b", 0.01, lambda: called.append("b"))
    shared.drop("a", tick)
    shared.drop("never there", tick)
    shared.drop("a", 0)
    await asyncio.sleep(0.05)
    assert called == ["b"]
    shared.drop("b", tick)  # harmless when it is over


async def test_one_may_drop_another_of_its_tick(shared):
    called = []
    tick = shared.add("a", 0.01, lambda: (called.append("a"), shared.drop("b", tick)))
    shared.add("b", 0.01, lambda: (called.append("b"), shared.drop("a", tick)))
    await asyncio.sleep(0.05)
    assert len(called) == 1
    assert shared._due == {}


async def test_one_that_fails_costs_no_other_its_turn(shared):
    loop = asyncio.get_running_loop()
    told, called = [], []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    shared.add("a", 0.01, lambda: called.append("a"))
    shared.add("b", 0.01, lambda: 1 / 0)
    shared.add("c", 0.01, lambda: called.append("c"))
    await asyncio.sleep(0.05)
    assert sorted(called) == ["a", "c"]
    assert [type(error) for error in told] == [ZeroDivisionError]


async def test_one_that_comes_again(shared):
    called = []

    def call():
        called.append(1)
        if len(called) < 3:
            shared.add("a", 0.001, call)

    shared.add("a", 0.001, call)
    await asyncio.sleep(0.1)
    assert len(called) == 3


def test_a_loop_that_is_gone_leaves_nothing():
    async def look():
        loop = asyncio.get_running_loop()
        assert ticks.of(loop) is ticks.of(loop)
        ticks.of(loop).add("a", 60, print)
        return weakref.ref(ticks.of(loop))

    gone = asyncio.run(look())
    gc.collect()
    assert gone() is None
