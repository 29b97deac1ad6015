"""The generation thread, driven by a model of bytes."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fakes import EOS, FakeModel

from engine import Engine
from generation import (
    BadRequest,
    EngineDown,
    Generation,
    GenerationError,
    QueueFull,
    SamplingParams,
)


@asynccontextmanager
async def running(model: FakeModel, **options: Any) -> AsyncIterator[Engine]:
    engine = Engine(model, **options)
    engine.start()
    try:
        yield engine
    finally:
        if model.step is not None:
            model.step.release(10_000)
        engine.close()


async def collect(generation: Generation) -> str:
    return "".join([piece async for piece in generation])


async def passes(model: FakeModel, number: int = 1) -> None:
    """Wait until the model has entered so many more forward passes."""
    for _ in range(number):
        await asyncio.get_running_loop().run_in_executor(None, model.entered.acquire)


def params(max_tokens: int = 20, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **{"seed": 1, **others})


def scripted(*ids: int) -> Any:
    """A model that says these ids after a prompt of one byte, then the end."""

    def script(history: Sequence[int]) -> int:
        said = len(history) - 1
        return ids[said] if said < len(ids) else EOS

    return script


class TestSamplingParams:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("max_tokens", 0),
            ("max_tokens", -1),
            ("max_tokens", 1.5),
            ("max_tokens", 10**18),
            ("max_tokens", "5"),
            ("max_tokens", True),
            ("temperature", -1),
            ("temperature", 1e9),
            ("temperature", float("nan")),
            ("temperature", float("inf")),
            ("temperature", "0.7"),
            ("temperature", True),
            ("top_p", 0),
            ("top_p", 1.1),
            ("top_p", float("nan")),
            ("top_k", -5),
            ("top_k", 10**9),
            ("top_k", 1.0),
            ("repetition_penalty", 0),
            ("seed", 2**64),
            ("seed", -1),
            ("seed", "x"),
            ("seed", 1.0),
            ("stop", ("",)),
            ("stop", ("a",) * 17),
            ("stop", ("x" * 501,)),
            ("stop", (5,)),
            ("stop", "abc"),
        ],
    )
    def test_refuses_by_name(self, field: str, value: object) -> None:
        with pytest.raises(BadRequest, match=field) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field

    @pytest.mark.parametrize("temperature", [0, 0.0, 1e-9, 0.005])
    def test_greedy_below_what_could_change_a_choice(self, temperature: float) -> None:
        assert SamplingParams(temperature=temperature).temperature == 0

    def test_accepts_the_limits(self) -> None:
        SamplingParams(max_tokens=1, temperature=2, top_p=1, seed=2**64 - 1, stop=("x",) * 16)


class TestReply:
    async def test_text_usage_and_timings(self) -> None:
        model = FakeModel(script=scripted(*b"Hello"))
        async with running(model) as engine:
            generation = engine.submit("x", params())
            assert await collect(generation) == "Hello"
        assert generation.finish_reason == "stop"
        assert generation.usage == {"prompt_tokens": 1, "completion_tokens": 6}  # with the end
        times = generation.timings.as_dict()
        assert 0 <= times["queued"] <= times["prefill"] <= times["first_token"]
        assert times["first_token"] <= times["last_token"]

    async def test_each_token_is_a_piece_of_its_own(self) -> None:
        async with running(FakeModel(script=scripted(*b"Hello"))) as engine:
            pieces = [piece async for piece in engine.submit("x", params())]
        assert pieces == ["H", "e", "l", "l", "o"]

    @pytest.mark.parametrize("max_tokens", [1, 2, 5])
    async def test_length(self, max_tokens: int) -> None:
        async with running(FakeModel()) as engine:
            generation = engine.submit("x", params(max_tokens))
            assert len(await collect(generation)) == max_tokens
        assert generation.finish_reason == "length"
        assert generation.completion_tokens == max_tokens

    async def test_end_of_sequence_at_the_last_token_is_stop(self) -> None:
        async with running(FakeModel(script=scripted(*b"abc"))) as engine:
            generation = engine.submit("x", params(4))
            assert await collect(generation) == "abc"
        assert generation.finish_reason == "stop"

    async def test_half_a_character_at_the_end_is_flushed_as_the_whole_decode_gives_it(
        self,
    ) -> None:
        model = FakeModel(script=scripted(*"a😀".encode()[:3], EOS))
        async with running(model) as engine:
            text = await collect(engine.submit("x", params()))
        assert text == model.text("a😀".encode()[:3])

    async def test_no_piece_has_half_a_character(self) -> None:
        text = "ď 你好 😀 👩‍👩‍👧 🇩🇪"
        async with running(FakeModel(script=scripted(*text.encode()))) as engine:
            pieces = [piece async for piece in engine.submit("x", params(100))]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece or piece == "" for piece in pieces)

    async def test_stop_string_is_not_part_of_the_text(self) -> None:
        async with running(FakeModel(script=scripted(*b"alpha beta gamma"))) as engine:
            generation = engine.submit("x", params(stop=("beta g",)))
            assert await collect(generation) == "alpha "
        assert (generation.finish_reason, generation.matched_stop) == ("stop", "beta g")

    @pytest.mark.parametrize("max_tokens", [5, 20])
    async def test_text_held_for_a_stop_string_is_not_lost(self, max_tokens: int) -> None:
        async with running(FakeModel(script=scripted(*b"pleas"))) as engine:
            assert await collect(engine.submit("x", params(max_tokens, stop=("ease!",)))) == "pleas"

    async def test_stop_string_completed_by_the_final_flush(self) -> None:
        model = FakeModel(script=scripted(*"x😀".encode()[:2], EOS))
        async with running(model) as engine:
            generation = engine.submit("x", params(2, stop=("\ufffd",)))
            assert await collect(generation) == "x"
        assert generation.finish_reason == "stop"

    async def test_prompt_one_below_the_context_runs_to_the_limit(self) -> None:
        async with running(FakeModel(context=16)) as engine:
            generation = engine.submit("x" * 15, params(50))
            assert len(await collect(generation)) == 1
        assert generation.finish_reason == "length"


class TestRefusals:
    async def test_over_long_prompt_names_both_numbers(self) -> None:
        async with running(FakeModel(context=16)) as engine:
            with pytest.raises(BadRequest, match=r"16 tokens.*16") as caught:
                engine.submit("x" * 16, params())
        assert caught.value.type == "context_length_exceeded"

    @pytest.mark.parametrize("prompt", ["", []])
    async def test_empty_prompt(self, prompt: Any) -> None:
        async with running(FakeModel()) as engine:
            with pytest.raises(BadRequest, match="empty"):
                engine.submit(prompt, params())

    async def test_queue_full(self) -> None:
        model = FakeModel(rows=1)
        model.step = threading.Semaphore(0)
        async with running(model, max_waiting=2) as engine:
            running_one = engine.submit("x", params())
            await passes(model)
            waiting = [engine.submit("x", params()) for _ in range(2)]
            with pytest.raises(QueueFull, match="2 requests"):
                engine.submit("x", params())
            model.step.release(1000)
            for generation in (running_one, *waiting):
                await collect(generation)

    async def test_closed(self) -> None:
        async with running(FakeModel()) as engine:
            pass
        with pytest.raises(EngineDown):
            engine.submit("x", params())


class TestBatch:
    PROMPTS = ("a", "some words", "q" * 70, "é 你好", "zz", "b" * 33, "the end")

    async def test_alone_and_in_company_the_text_is_the_same(self) -> None:
        async with running(FakeModel(rows=1)) as engine:
            alone = [
                await collect(engine.submit(prompt, params(5 + 3 * i, temperature=1)))
                for i, prompt in enumerate(self.PROMPTS)
            ]
        async with running(FakeModel(rows=3), prefill_chunk=16) as engine:
            together = [
                engine.submit(prompt, params(5 + 3 * i, temperature=1))
                for i, prompt in enumerate(self.PROMPTS)
            ]
            assert await asyncio.gather(*map(collect, together)) == alone

    async def test_rows_share_a_forward_pass(self) -> None:
        model = FakeModel(rows=4)
        model.step = threading.Semaphore(0)
        async with running(model) as engine:
            generations = [engine.submit("x", params(10)) for _ in range(4)]
            model.step.release(10_000)
            await asyncio.gather(*map(collect, generations))
        assert max(len(rows) for kind, rows in model.calls if kind == "decode") == 4

    async def test_without_a_seed_replies_differ(self) -> None:
        async with running(FakeModel(rows=8)) as engine:
            same = [engine.submit("x", params(30, seed=None, temperature=1)) for _ in range(8)]
            assert len(set(await asyncio.gather(*map(collect, same)))) > 1
            greedy = [engine.submit("x", params(30, seed=None, temperature=0)) for _ in range(8)]
            assert len(set(await asyncio.gather(*map(collect, greedy)))) == 1

    async def test_first_come_first_served(self) -> None:
        model = FakeModel(rows=1)
        order: list[int] = []

        async def run(i: int, generation: Generation) -> None:
            await collect(generation)
            order.append(i)

        async with running(model) as engine:
            generations = [engine.submit("x" * 100, params(3))]
            generations += [engine.submit("x", params(1)) for _ in range(50)]
            await asyncio.gather(*(run(i, g) for i, g in enumerate(generations)))
        assert order == sorted(order)

    async def test_a_long_prompt_lets_the_others_step_between_its_chunks(self) -> None:
        model = FakeModel(rows=2, context=2000)
        model.step = threading.Semaphore(0)
        async with running(model, prefill_chunk=16) as engine:
            first = engine.submit("x", params(200))
            await passes(model)
            long = engine.submit("y" * 160, params(1))
            model.step.release(10_000)
            await collect(long)
            first.cancel()
        kinds = [kind for kind, _ in model.calls]
        start = kinds.index("prefill", 1)
        until = len(kinds) - kinds[::-1].index("prefill")
        assert kinds[start:until].count("prefill") == 10
        assert "prefill prefill" not in " ".join(kinds[start:until])

    async def test_a_prompt_that_begins_like_an_earlier_one_is_not_prefilled_again(self) -> None:
        model = FakeModel(rows=2, context=2000)
        async with running(model, prefill_chunk=16) as engine:
            chat = "a first turn that is some forty letters. "
            reply = await collect(engine.submit(chat, params(10)))
            await collect(engine.submit("another", params(3)))
            model.calls.clear()
            second = await collect(engine.submit(chat + reply + " and a second", params(10)))
            prefilled = sum(len(what[1]) for kind, what in model.calls if kind == "prefill")
            assert prefilled == len(chat + reply + " and a second") - 32
        async with running(FakeModel(rows=1, context=2000)) as engine:
            fresh = await collect(engine.submit(chat + reply + " and a second", params(10)))
        assert second == fresh

    async def test_without_reuse_every_prompt_is_prefilled_whole(self) -> None:
        model = FakeModel(rows=1)
        async with running(model, prefill_chunk=16, reuse=False) as engine:
            prompt = "x" * 40
            first = await collect(engine.submit(prompt, params(5)))
            assert await collect(engine.submit(prompt, params(5))) == first
        prefilled = [len(what[1]) for kind, what in model.calls if kind == "prefill"]
        assert prefilled == [16, 16, 8] * 2

    async def test_the_same_prompt_again_still_gives_logits(self) -> None:
        async with running(FakeModel(rows=1), prefill_chunk=16) as engine:
            prompt = "x" * 32
            first = await collect(engine.submit(prompt, params(5)))
            assert await collect(engine.submit(prompt, params(5))) == first


class TestCancel:
    async def test_decoding_at_most_one_step_more(self) -> None:
        model = FakeModel()
        model.step = threading.Semaphore(0)
        async with running(model) as engine:
            generation = engine.submit("x", params(100))
            model.step.release(5)
            await passes(model, 6)  # the sixth is under way
            generation.cancel("left")
            model.step.release(100)
            await collect(generation)
            assert generation.completion_tokens == 5
            assert generation.finish_reason == "cancelled"
            assert engine.running == 0
            assert len(model.calls) == 6

    async def test_prefilling_no_token(self) -> None:
        model = FakeModel()
        model.step = threading.Semaphore(0)
        async with running(model, prefill_chunk=16) as engine:
            generation = engine.submit("x" * 64, params(100))
            await passes(model)
            generation.cancel("left")
            model.step.release(100)
            assert await collect(generation) == ""
            assert generation.completion_tokens == 0
        assert len(model.calls) == 1

    async def test_in_the_last_chunk_no_decode_step_follows(self) -> None:
        model = FakeModel()
        model.step = threading.Semaphore(0)
        async with running(model) as engine:
            generation = engine.submit("x", params(100))
            await passes(model)
            generation.cancel("left")
            model.step.release(100)
            await collect(generation)
        assert [kind for kind, _ in model.calls] == ["prefill"]

    async def test_waiting_never_started(self) -> None:
        model = FakeModel(rows=1)
        model.step = threading.Semaphore(0)
        async with running(model) as engine:
            first = engine.submit("a", params(5))
            await passes(model)
            second = engine.submit("b", params(5))
            second.cancel("left")
            model.step.release(1000)
            assert len(await collect(first)) == 5
            assert await collect(second) == ""
        assert first.finish_reason == "length"
        assert sum(kind == "prefill" for kind, _ in model.calls) == 1

    async def test_paused_row_is_freed(self) -> None:
        model = FakeModel(rows=1)
        model.step = threading.Semaphore(0)
        async with running(model) as engine:
            generation = engine.submit("x", params(100))
            await passes(model)
            generation.pause(True)
            generation.cancel("too slow")
            model.step.release(1000)
            await collect(generation)
            assert engine.running == 0

    async def test_one_of_two_leaves_the_other_unchanged(self) -> None:
        async with running(FakeModel(rows=1)) as engine:
            alone = await collect(engine.submit("keep", params(60, temperature=1)))
        async with running(FakeModel(rows=2)) as engine:
            kept = engine.submit("keep", params(60, temperature=1))
            leaving = engine.submit("leave", params(60))
            await anext(leaving)
            leaving.cancel()
            assert await collect(kept) == alone

    async def test_the_first_reason_counts_and_the_end_is_final(self) -> None:
        async with running(FakeModel()) as engine:
            generation = engine.submit("x", params(1000))
            generation.cancel("first")
            generation.cancel("second")
            await collect(generation)
            assert generation.cancel_reason == "first"
            done = engine.submit("x", params(1))
            await collect(done)
            done.cancel()
            assert (done.finish_reason, done.cancel_reason) == ("length", None)

    async def test_leaving_the_block_cancels(self) -> None:
        async with running(FakeModel(context=10_000)) as engine:
            with engine.submit("x", params(9000)) as generation:
                await anext(generation)
            await collect(generation)
        assert generation.finish_reason == "cancelled"
        assert generation.completion_tokens < 9000

    async def test_a_storm_leaves_nothing_behind(self) -> None:
        async with running(FakeModel(rows=3), prefill_chunk=16, max_waiting=400) as engine:
            before = await collect(engine.submit("fresh", params(10)))
            references = []
            for _ in range(3):
                generations = [engine.submit("y" * (1 + i % 60), params(50)) for i in range(100)]
                references += map(weakref.ref, generations)
                for i, generation in enumerate(generations):
                    if i % 3:
                        generation.cancel()
                    if i % 7 == 0:
                        await asyncio.sleep(0)
                await asyncio.gather(*map(collect, generations))
                del generations, generation
            assert (engine.running, engine.waiting) == (0, 0)
            assert await collect(engine.submit("fresh", params(10))) == before
            gc.collect()
            assert not any(reference() for reference in references)


class TestPause:
    async def test_a_paused_row_leaves_the_batch_and_comes_back(self) -> None:
        model = FakeModel(rows=2)
        async with running(FakeModel(rows=1)) as engine:
            alone = await collect(engine.submit("slow", params(40, temperature=1)))
        model.step = threading.Semaphore(0)
        async with running(model) as engine:
            slow = engine.submit("slow", params(40, temperature=1))
            await passes(model)
            slow.pause(True)
            other = engine.submit("other", params(10))
            model.step.release(1000)
            await collect(other)
            assert slow.completion_tokens == 1
            slow.pause(False)
            assert await collect(slow) == alone


class TestErrors:
    async def test_a_failing_prefill_ends_that_one(self) -> None:
        model = FakeModel(rows=2)
        model.fail_prefill = lambda ids: bytes(ids) == b"bad"
        async with running(model) as engine:
            good, bad = engine.submit("good", params(30)), engine.submit("bad", params(30))
            with pytest.raises(GenerationError, match="the model failed"):
                await collect(bad)
            assert len(await collect(good)) == 30
            assert bad.finish_reason == "error"
            assert engine.running == 0

    async def test_a_failing_choice_ends_that_one(self) -> None:
        model = FakeModel(rows=2)
        model.fail_choose = lambda history: bytes(history[:3]) == b"bad" and len(history) > 5
        async with running(model) as engine:
            good, bad = engine.submit("good", params(30)), engine.submit("bad", params(30))
            with pytest.raises(GenerationError):
                await collect(bad)
            assert len(await collect(good)) == 30

    async def test_a_failing_decode_ends_all_in_it_and_the_thread_goes_on(self) -> None:
        model = FakeModel(rows=2)
        faults = iter([False, False, True])
        model.fail_decode = lambda: next(faults, False)
        model.step = threading.Semaphore(0)
        async with running(model) as engine:
            both = [engine.submit(text, params(30)) for text in ("a", "b")]
            model.step.release(1000)
            ends = await asyncio.gather(*map(collect, both), return_exceptions=True)
            assert all(isinstance(end, GenerationError) for end in ends)
            assert len(await collect(engine.submit("c", params(30)))) == 30

    async def test_the_words_of_an_error_hold_no_internals(self) -> None:
        model = FakeModel()
        model.fail_prefill = lambda ids: True
        async with running(model) as engine:
            with pytest.raises(GenerationError) as caught:
                await collect(engine.submit("x", params()))
        assert "fault" not in str(caught.value)

    async def test_a_dying_thread_tells_everybody(self) -> None:
        model = FakeModel(rows=1)

        def die(row: int, length: int) -> None:
            raise SystemError("cannot free the row")

        model.step = threading.Semaphore(0)
        async with running(model) as engine:
            generations = [engine.submit("x", params()) for _ in range(3)]
            await passes(model)
            model.truncate = die  # type: ignore[method-assign]
            model.step.release(1000)
            for generation in generations:
                with pytest.raises(GenerationError):
                    await collect(generation)
            assert engine.failure is not None
            with pytest.raises(EngineDown):
                engine.submit("x", params())

    async def test_closing_ends_what_waits_and_what_runs(self) -> None:
        model = FakeModel(rows=1, context=10_000)
        async with running(model) as engine:
            generations = [engine.submit("x", params(5000)) for _ in range(3)]
            await anext(generations[0])
            engine.close()
            for generation in generations:
                await collect(generation)
                assert generation.finish_reason == "cancelled"


async def test_one_crossing_a_pass() -> None:
    """All pieces of a forward pass come over in one call."""
    model = FakeModel(rows=4)
    async with running(model) as engine:
        loop = asyncio.get_running_loop()
        crossings = 0
        call = loop.call_soon_threadsafe

        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal crossings
            crossings += threading.current_thread().name == "generation"
            return call(*args, **kwargs)

        loop.call_soon_threadsafe = count  # type: ignore[method-assign]
        await asyncio.gather(*(collect(engine.submit("x", params(50))) for _ in range(4)))
    assert crossings <= len(model.calls) + 1


async def test_a_waiting_consumer_that_is_cancelled_can_come_back() -> None:
    model = FakeModel(script=scripted(*b"Hello"))
    model.step = threading.Semaphore(0)
    async with running(model) as engine:
        generation = engine.submit("x", params())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(generation), 0.01)
        model.step.release(100)
        assert await collect(generation) == "Hello"
