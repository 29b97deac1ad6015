"""The stand-in engine: its schedule on a clock of the test's own, and its faults on every route."""

import asyncio
import contextlib
import gc
import heapq
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import FakeModel
from serving import Running, eventually, serving

import simulated
from client import Failure, Options, Reply, ask
from engine import Engine
from generation import BadRequest, EngineDown, Generation, SamplingParams
from simulated import FAULTS, WORDS, SimulatedEngine

HALF_A_TICK = 0.5 / simulated.TICKS_PER_S + 1e-5


class Clock:
    """In place of the event loop: time passes when `run` lets it, from one timer to the next."""

    def __init__(self) -> None:
        self.now = 100.0
        self.numbers = itertools.count()  # of timers, for those of one moment
        self.timers: list[tuple[float, int, Callable[[], None], Clock.Timer]] = []

    class Timer:
        cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[..., None], *args: Any) -> "Clock.Timer":
        timer = Clock.Timer()
        heapq.heappush(self.timers, (when, next(self.numbers), lambda: call(*args), timer))
        return timer

    def call_soon(self, call: Callable[..., None], *args: Any) -> "Clock.Timer":
        return self.call_at(self.now, call, *args)

    def run(self, until: float = float("inf"), lateness: float = 0) -> None:
        """Call what is due up to a moment, each thing late by so much."""
        while self.timers and self.timers[0][0] <= until:
            when, _, call, timer = heapq.heappop(self.timers)
            if not timer.cancelled:
                self.now = max(self.now, when + lateness)
                call()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    yield clock
    assert not [timer for *_, timer in clock.timers if not timer.cancelled], "a timer is left"


def params(max_tokens: int = 20, seed: int | None = 1, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, **more)


Heard = list[tuple[float, str]]


def listen(clock: Clock, generation: Generation) -> Heard:
    """Date each piece by the clock, as it is delivered."""
    heard: Heard = []
    deliver = generation.deliver

    def dated(piece: str, finish_reason: str | None = None) -> None:
        if piece:
            heard.append((clock.now, piece))
        deliver(piece, finish_reason)

    generation.deliver = dated  # type: ignore[method-assign]
    return heard


def schedule(clock: Clock, engine: SimulatedEngine, prompt: Any = "a b", **asked: Any) -> Heard:
    """Times since submit, and words, of a reply that nobody slows down."""
    begun = clock.now
    heard = listen(clock, engine.submit(prompt, params(**asked)))
    clock.run()
    return [(round(at - begun, 9), piece) for at, piece in heard]


class TestSchedule:
    def test_one_seed_one_schedule(self, clock: Clock) -> None:
        assert schedule(clock, SimulatedEngine()) == schedule(clock, SimulatedEngine())
        engine = SimulatedEngine()
        assert schedule(clock, engine) == schedule(clock, engine)

    def test_the_reply_does_not_depend_on_how_many_came_before(self, clock: Clock) -> None:
        engine = SimulatedEngine()
        alone = schedule(clock, SimulatedEngine())
        for _ in range(5):
            engine.submit("others", params(seed=None))
        assert schedule(clock, engine) == alone

    def test_without_a_seed_replies_differ_and_the_run_repeats(self, clock: Clock) -> None:
        runs = []
        for _ in range(2):
            engine = SimulatedEngine()
            runs.append([schedule(clock, engine, seed=None) for _ in range(2)])
        assert runs[0] == runs[1]
        assert runs[0][0] != runs[0][1]

    @pytest.mark.parametrize(
        "other",
        [
            lambda clock: schedule(clock, SimulatedEngine(seed=43)),
            lambda clock: schedule(clock, SimulatedEngine(), seed=2),
            lambda clock: schedule(clock, SimulatedEngine(), prompt="a c"),
        ],
        ids=["server's seed", "request's seed", "prompt"],
    )
    def test_what_it_depends_on(self, clock: Clock, other: Callable[[Clock], Heard]) -> None:
        assert other(clock) != schedule(clock, SimulatedEngine())

    def test_33_plus_or_minus_8_evenly_spread(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(simulated, "TICKS_PER_S", 10**7)
        times = [at for at, _ in schedule(clock, SimulatedEngine(), max_tokens=8000)]
        gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
        assert min(gaps) >= 0.025 - 1e-6
        assert max(gaps) <= 0.041 + 1e-6
        assert sum(gaps) / len(gaps) == pytest.approx(0.033, abs=0.0003)
        for tenth in range(10):  # as many in each tenth of the range: 800, give or take 4 sigma
            low = 0.025 + tenth * 0.0016
            assert sum(low <= gap < low + 0.0016 for gap in gaps) == pytest.approx(800, abs=110)

    def test_words_of_one_tick_come_by_one_wake_up(self, clock: Clock) -> None:
        """None is early or late by more than half a tick, and none of a moment is alone."""
        engine = SimulatedEngine(delay_ms=10.3, jitter_ms=0)
        heard = [listen(clock, engine.submit("a", params(20))) for _ in range(5)]
        assert len(clock.timers) == 1
        clock.run()
        assert [len(each) for each in heard] == [20] * 5
        for each in heard:
            for number, (at, _) in enumerate(each, start=1):
                away = at - 100 - number * 0.0103
                assert abs(away) <= HALF_A_TICK

    def test_delays(self, clock: Clock) -> None:
        engine = SimulatedEngine(delay_ms=10, jitter_ms=0, first_delay_ms=500)
        times = [at for at, _ in schedule(clock, engine, max_tokens=3)]
        assert times == pytest.approx([0.51, 0.52, 0.53], abs=HALF_A_TICK)

    def test_lateness_does_not_add_up(self, clock: Clock) -> None:
        generation = SimulatedEngine(delay_ms=10, jitter_ms=0).submit("a", params(100))
        heard = listen(clock, generation)
        clock.run(lateness=0.004)
        assert heard[-1][0] == pytest.approx(100 + 1.0 + 0.004)

    def test_after_a_standstill_the_schedule_is_caught_up_with(self, clock: Clock) -> None:
        generation = SimulatedEngine(delay_ms=10, jitter_ms=0).submit("a", params(100))
        heard = listen(clock, generation)
        clock.run(100.055)
        clock.now = 100.5
        clock.run()
        assert heard[-1][0] == pytest.approx(101)

    def test_a_word_a_token(self, clock: Clock) -> None:
        pieces = [piece for _, piece in schedule(clock, SimulatedEngine(), max_tokens=50)]
        assert len(pieces) == 50
        assert pieces[0] == pieces[0].capitalize()
        assert all(piece[0] == " " and piece[1:] in WORDS for piece in pieces[1:])


class TestReply:
    def test_end_usage_and_timings(self, clock: Clock) -> None:
        engine = SimulatedEngine()
        generation = engine.submit("three short words", params(2))
        assert engine.running == 1
        clock.run()
        assert generation.finish_reason == "length"
        assert generation.usage == {"prompt_tokens": 3, "completion_tokens": 2}
        times = generation.timings.as_dict()
        assert times["queued"] == times["prefill"] == 0
        assert 0 <= times["first_token"] <= times["last_token"]
        assert (engine.running, engine.waiting, engine.cache_bytes) == (0, 0, 0)

    def test_messages(self) -> None:
        engine = SimulatedEngine()
        messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": "so  kind"}]
        assert engine.encode(messages) == engine.encode("Be so kind")
        assert len(engine.encode(messages)) == 3

    @pytest.mark.parametrize("content", [None, 5, ["a"]])
    def test_messages_without_text(self, content: object) -> None:
        with pytest.raises(BadRequest):
            SimulatedEngine().encode([{"role": "user", "content": content}])

    @pytest.mark.parametrize("prompt", ["", " \n", []])
    def test_an_empty_prompt(self, clock: Clock, prompt: Any) -> None:
        with pytest.raises(BadRequest, match="empty"):
            SimulatedEngine().submit(prompt, params())

    @pytest.mark.parametrize(("field", "value"), [("schema", {}), ("logprobs", 0)])
    def test_what_only_a_model_can_do(self, clock: Clock, field: str, value: Any) -> None:
        with pytest.raises(BadRequest, match="the simulated engine") as caught:
            SimulatedEngine().submit("a", SamplingParams(**{field: value}))
        assert caught.value.field == field

    def test_a_stop_string(self, clock: Clock) -> None:
        """It may span words; what may become one is held, and no more than that."""
        words = "".join(piece for _, piece in schedule(clock, SimulatedEngine(), max_tokens=9))
        third = words.split()[2]
        stop = words[words.index(third) - 2 : words.index(third) + 2]
        generation = SimulatedEngine().submit("a b", params(9, stop=("zebra", stop)))
        heard = listen(clock, generation)
        clock.run()
        text = "".join(piece for _, piece in heard)
        assert text == words[: words.index(stop)]
        assert (generation.finish_reason, generation.matched_stop) == ("stop", stop)
        assert generation.completion_tokens == 3

    @pytest.mark.parametrize("end", ["length", "cancelled", "error"])
    def test_what_was_held_for_a_stop_string_is_not_lost(self, clock: Clock, end: str) -> None:
        words = [piece for _, piece in schedule(clock, SimulatedEngine(), max_tokens=2)]
        faults = {"fail_after": 2} if end == "error" else {}
        asked = params(2 if end == "length" else 9, stop=(f"{words[1]}!",))
        generation = SimulatedEngine().submit("a b", asked, faults)
        heard = listen(clock, generation)
        clock.run(clock.now + 0.09 if end == "cancelled" else math.inf)
        if end == "cancelled":
            assert [piece for _, piece in heard] == words[:1]
            generation.cancel()
            clock.run()
        assert "".join(piece for _, piece in heard) == "".join(words)
        assert generation.finish_reason == end

    def test_cancel(self, clock: Clock) -> None:
        engine = SimulatedEngine(delay_ms=10, jitter_ms=0)
        generation = engine.submit("a", params(100))
        clock.run(100.055)
        generation.cancel("left")
        assert generation.finish_reason is None  # heard of later, as with the real engine
        clock.run()
        assert (generation.finish_reason, generation.completion_tokens) == ("cancelled", 5)
        assert engine.running == 0

    def test_pause(self, clock: Clock) -> None:
        """No word while paused; then the next at once, and the same words as ever."""
        engine = SimulatedEngine(delay_ms=10, jitter_ms=0)
        alone = schedule(clock, engine, max_tokens=10)
        begun = clock.now
        generation = engine.submit("a b", params(10))
        heard = listen(clock, generation)
        clock.run(begun + 0.035)
        generation.pause(True)
        generation.pause(True)
        clock.run()
        assert len(heard) == 3
        clock.now = begun + 5
        generation.pause(False)
        generation.pause(False)
        clock.run()
        assert [piece for _, piece in heard] == [piece for _, piece in alone]
        assert heard[3][0] == begun + 5
        assert heard[-1][0] == pytest.approx(begun + 5.06)

    def test_a_pause_that_ends_before_the_next_word_changes_nothing(self, clock: Clock) -> None:
        engine = SimulatedEngine(delay_ms=10, jitter_ms=0)
        generation = engine.submit("a b", params(5))
        heard = listen(clock, generation)
        generation.pause(True)
        generation.pause(False)
        clock.run()
        expected = [100.01, 100.02, 100.03, 100.04, 100.05]
        assert [at for at, _ in heard] == pytest.approx(expected, abs=HALF_A_TICK)

    def test_cancel_while_paused(self, clock: Clock) -> None:
        engine = SimulatedEngine()
        generation = engine.submit("a", params(5))
        generation.pause(True)
        clock.run()
        generation.cancel()
        generation.pause(False)
        clock.run()
        assert (generation.finish_reason, engine.running) == ("cancelled", 0)

    def test_close(self, clock: Clock) -> None:
        engine = SimulatedEngine()
        generation = engine.submit("a", params(5))
        engine.close()
        clock.run()
        assert generation.finish_reason == "cancelled"
        with pytest.raises(EngineDown):
            engine.submit("a", params())

    @pytest.mark.parametrize("after", [0, 1, 5])
    def test_fail(self, clock: Clock, after: int) -> None:
        generation = SimulatedEngine().submit("a", params(10), {"fail_after": after})
        clock.run()
        assert (generation.finish_reason, generation.completion_tokens) == ("error", after)

    @pytest.mark.parametrize("after", [0, 1, 5])
    def test_stall(self, clock: Clock, after: int) -> None:
        generation = SimulatedEngine().submit("a", params(10), {"stall_after": after})
        clock.run()
        assert (generation.finish_reason, generation.completion_tokens) == (None, after)
        generation.pause(True)
        generation.pause(False)  # a slow client that catches up does not wake it
        clock.run()
        assert generation.completion_tokens == after
        generation.cancel()
        clock.run()
        assert generation.finish_reason == "cancelled"


# On every route, seen by the project's own client.

BODY = {"prompt": "One, two,", "max_tokens": 6, "seed": 7}
ROUTES = {
    "chunked": ("/stream", Options(timeout=10)),
    "closed": ("/stream", Options(timeout=10, http_version="1.0")),
    "get": ("/stream", Options(timeout=10, method="GET")),
    "websocket": ("/ws", Options(timeout=10)),
    "json": ("/complete", Options(timeout=10)),
}


async def asked(running: Running, route: str, **faults: int) -> Reply:
    path, options = ROUTES[route]
    return await ask(f"http://127.0.0.1:{running.port}{path}", {**BODY, **faults}, options)


def test_a_failed_word_costs_no_other_reply_its_words(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(Clock, "call_exception_handler", told.append, raising=False)
    engine = SimulatedEngine(jitter_ms=0)
    broken, sound = (engine.submit("a", params(5)) for _ in range(2))
    monkeypatch.setattr(broken, "deliver", lambda *_: 1 / 0)
    heard = listen(clock, sound)
    clock.run()
    assert len(heard) == 5
    assert [type(context["exception"]) for context in told] == [ZeroDivisionError]


class TestNothingStays:
    """A reply that is over is freed at once, not when the garbage collector comes by."""

    @pytest.fixture(autouse=True)
    def _no_collector(self) -> Iterator[None]:
        gc.collect()
        gc.disable()
        yield
        gc.enable()

    async def test_of_one_that_was_read(self) -> None:
        generation = SimulatedEngine(delay_ms=0, jitter_ms=0).submit("a", SamplingParams(3))
        assert len([piece async for piece in generation]) == 3
        gone = weakref.ref(generation)
        del generation
        await eventually(lambda: gone() is None)

    @pytest.mark.parametrize("error", [ConnectionError, None])
    async def test_of_one_whose_reader_left(self, error: type[Exception] | None) -> None:
        generation = SimulatedEngine(delay_ms=0, jitter_ms=0).submit("a", SamplingParams(9))

        def take(piece: str) -> bool:
            if error is not None:
                raise error
            return False

        with contextlib.suppress(ConnectionError), generation:
            await generation.pour(take)
        gone = weakref.ref(generation)
        del generation
        await eventually(lambda: gone() is None)


@pytest.mark.parametrize("route", ROUTES)
class TestFaults:
    """The end law: whatever is asked for, no client takes the reply for complete."""

    async def test_none(self, route: str) -> None:
        async with serving() as running:
            reply = await asked(running, route)
        assert reply.complete
        assert len(reply.text.split()) == 6

    @pytest.mark.parametrize("after", [0, 3, 5])
    async def test_fail(self, route: str, after: int) -> None:
        async with serving() as running:
            reply = await asked(running, route, fail_after=after)
        if route == "json":
            assert (reply.failure, reply.status, reply.text) == (Failure.STATUS, 500, "")
        else:
            assert reply.failure is Failure.IN_BAND
            assert len(reply.pieces) == after
        assert "failed" in reply.error

    @pytest.mark.parametrize("after", [0, 3, 6])
    async def test_truncate(self, route: str, after: int) -> None:
        async with serving() as running:
            reply = await asked(running, route, truncate_after=after)
            assert reply.failure is Failure.TRUNCATED
            assert len(reply.pieces) == (0 if route == "json" else after)
            assert (await asked(running, route)).complete
            assert running.server.engine.running == 0

    async def test_a_cut_is_nobody_s_leaving(self, route: str) -> None:
        async with serving() as running:
            await asked(running, route, truncate_after=3)
            await eventually(lambda: not running.server._connections)
            (entry,) = running.server.entries
            assert not entry.client_left

    async def test_truncate_after_the_end_is_no_fault(self, route: str) -> None:
        async with serving() as running:
            assert (await asked(running, route, truncate_after=7)).complete

    async def test_stall(self, route: str) -> None:
        """Nothing comes and nothing ends; who leaves ends it."""
        path, _ = ROUTES[route]
        options = Options(timeout=10, leave_at=0.05, http_version=ROUTES[route][1].http_version)
        async with serving() as running:
            url = f"http://127.0.0.1:{running.port}{path}"
            reply = await ask(url, {**BODY, "stall_after": 2}, options)
            assert reply.failure is Failure.CANCELLED
            (entry,) = running.server.entries
            await eventually(lambda: entry.generation.finish_reason == "cancelled")
            assert entry.client_left

    async def test_garbage(self, route: str) -> None:
        async with serving() as running:
            reply = await asked(running, route, garbage_after=3)
        if route == "json":
            assert (reply.failure, reply.status) == (Failure.STATUS, 400)
            assert "garbage_after" in reply.error
        elif route == "closed":
            # No framing to break, and lines that are no field are ignored (WHATWG 9.2.6).
            assert reply.complete
            assert len(reply.text.split()) == 6
        else:
            assert reply.failure is Failure.PROTOCOL
            assert len(reply.pieces) == 3

    @pytest.mark.parametrize("size", [1, 3, 1000])
    async def test_split(self, route: str, size: int) -> None:
        """However it is cut into writes, it is the same reply."""
        async with serving() as running:
            reply = await asked(running, route, split_at=size)
            if route == "json":
                assert (reply.failure, reply.status) == (Failure.STATUS, 400)
                return
            assert reply.complete
            assert reply.text == (await asked(running, "json")).text
            if size == 1:
                assert reply.reads > 100  # or they would not be seen apart


class TestFields:
    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("fault", FAULTS)
    async def test_the_real_engine_has_no_faults(self, route: str, fault: str) -> None:
        async with serving(Engine(FakeModel())) as running:
            reply = await asked(running, route, **{fault: 1})
            assert not reply.complete
            assert f"unknown field '{fault}'" in reply.error
            assert not running.server.entries

    @pytest.mark.parametrize("value", [-1, 1.5, "1", True, [], 10**10])
    async def test_bad_numbers(self, value: object) -> None:
        async with serving() as running:
            for fault in FAULTS:
                answer = await running.ask("POST", "/stream", {**BODY, fault: value})
                assert answer.status == 400
                assert answer.json()["error"]["field"] == fault

    async def test_null_is_absent(self) -> None:
        async with serving() as running:
            answer = await running.ask("POST", "/stream", {**BODY, **dict.fromkeys(FAULTS)})
        assert len(answer.text().split()) == 6
