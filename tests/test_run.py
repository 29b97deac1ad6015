"""Log probabilities come with the pieces that hold the text of their tokens."""

import asyncio
import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from fakes import EOS, FakeModel
from hypothesis import given
from hypothesis import strategies as st

from detokenizer import Detokenizer, StopStrings
from engine import Engine
from generation import BadRequest, Generation, SamplingParams, TokenLogprob
from run import Run

Told = list[tuple[str, bytes]]


def scripted(*ids: int) -> Any:
    """A model that says these ids after a prompt of one byte, then the end."""

    def script(history: Sequence[int]) -> int:
        said = len(history) - 1
        return ids[said] if said < len(ids) else EOS

    return FakeModel(script=script)


async def told(model: FakeModel, **params: Any) -> Told:
    """Each piece, with the bytes of the tokens that are told of once it has been taken."""
    engine = Engine(model)
    engine.start()
    try:
        generation = engine.submit("x", SamplingParams(**{"logprobs": 0, **params}))
        pairs = [
            (piece, b"".join(each.raw for each in generation.take_logprobs()))
            async for piece in generation
        ]
        assert generation.take_logprobs() == []
    finally:
        engine.close()
    return pairs


class TestWithThePieces:
    async def test_each_with_its_token(self) -> None:
        assert await told(scripted(*b"abc")) == [("a", b"a"), ("b", b"b"), ("c", b"c")]

    async def test_halves_of_a_character_with_the_character(self) -> None:
        pairs = await told(scripted(*"a你b".encode()))
        assert pairs == [("a", b"a"), ("你", "你".encode()), ("b", b"b")]

    async def test_half_a_character_at_the_end(self) -> None:
        pairs = await told(scripted(*"a你".encode()[:3]))
        assert pairs == [("a", b"a"), ("\ufffd", b"\xe4\xbd")]
        pairs = await told(scripted(*"a你".encode()), max_tokens=3)
        assert pairs == [("a", b"a"), ("\ufffd", b"\xe4\xbd")]

    async def test_what_may_become_a_stop_string_is_not_told_of_yet(self) -> None:
        pairs = await told(scripted(*b"abaabac"), stop=("abac",))
        assert pairs == [("aba", b"aba")]
        pairs = await told(scripted(*b"xaab"), stop=("aac",))
        assert pairs == [("x", b"x"), ("aab", b"aab")]
        pairs = await told(scripted(*b"xaaab"), stop=("aac",))
        assert pairs == [("x", b"x"), ("a", b"a"), ("aab", b"aab")]

    async def test_nor_the_stop_string_itself(self) -> None:
        assert await told(scripted(*b"ab\n\nUser"), stop=("\n\n",)) == [("a", b"a"), ("b", b"b")]

    async def test_what_was_held_at_the_end_is_told_of(self) -> None:
        assert await told(scripted(*b"ab\n"), stop=("\n\n",)) == [
            ("a", b"a"),
            ("b", b"b"),
            ("\n", b"\n"),
        ]

    async def test_a_schema_s_document_is_told_of_whole(self) -> None:
        pairs = await told(FakeModel(), schema={"const": ["é"]}, stop=("]!",))
        assert "".join(piece for piece, _ in pairs) == '["é"]'
        assert b"".join(raw for _, raw in pairs) == '["é"]'.encode()

    async def test_of_a_reply_that_is_cancelled_what_was_held_is_told_of(self) -> None:
        model = scripted(*b"ab\n" * 50)
        model.step = threading.Semaphore(3)  # "a", "b", "\n", which is held
        engine = Engine(model)
        engine.start()
        generation = engine.submit("x", SamplingParams(logprobs=0, stop=("\n\n",)))
        pieces = [await anext(generation), await anext(generation)]
        loop = asyncio.get_running_loop()
        for _ in range(4):
            await loop.run_in_executor(None, model.entered.acquire)
        generation.cancel()
        model.step.release(100)
        pieces += [piece async for piece in generation]
        assert "".join(pieces) == "ab\n"
        assert [each.token for each in generation.take_logprobs()] == ["a", "b", "\n"]
        engine.close()

    async def test_only_of_the_pieces_that_were_taken(self) -> None:
        generation = Generation(1)
        generation.deliver("a", None, [TokenLogprob("a", b"a", -1.0)])
        generation.deliver("b", "stop", [TokenLogprob("b", b"b", -1.0)])
        assert generation.take_logprobs() == []
        assert await anext(generation) == "a"
        assert [each.token for each in generation.take_logprobs()] == ["a"]
        assert await anext(generation) == "b"
        assert [each.token for each in generation.take_logprobs()] == ["b"]

    async def test_none_unless_asked_for(self) -> None:
        model = scripted(*b"abc")
        model.logprobs = model.token = None
        assert await told(model, logprobs=None) == [("a", b""), ("b", b""), ("c", b"")]


# Tokens of several characters, of halves, without text, and some that spell a stop string.
TOKENS = ["a", "ab", "b\n", "\n", "\n\nc", "é", "😀!", ""]
PIECES = [text.encode() for text in TOKENS] + [b"\xf0\x9f", b"\x98", b"\x80a", b"\xff"]
STOPS = [(), ("\n\n",), ("ba",), ("aab", "!a"), ("éé",)]


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=30), st.sampled_from(STOPS))
def test_the_text_so_far_begins_the_tokens_told_of_so_far(
    ids: list[int], stops: tuple[str, ...]
) -> None:
    def text(some: Sequence[int]) -> str:
        return b"".join(PIECES[id] for id in some).decode(errors="replace")

    run = Run(None, [], None, None, Detokenizer(text), StopStrings(stops))
    sent, entries = "", []
    for number, id in enumerate([*ids, None]):
        if id is not None:
            run.untold.append((run.known, TokenLogprob(str(id), PIECES[id], 0.0)))
        if run.stops.matched is None:
            piece = run.flush() if id is None else run.add(id)
            tokens = run.take_told(piece)
            assert piece or not tokens
            sent += piece
            entries += [int(each.token) for each in tokens]
        assert entries == ids[: len(entries)], number
        assert text(entries).startswith(sent[:-1])  # A half at the edge differs: it is U+FFFD.
        assert len(text(entries)) >= len(sent)
        # All but the last begin before the end of what was sent: none is told of too soon.
        assert not entries or len(text(entries[:-1]).rstrip("\ufffd")) < max(len(sent), 1)


class TestWhatIsTold:
    async def ask(self, logprobs: int) -> list[TokenLogprob]:
        engine = Engine(scripted(*b"ab"))
        engine.start()
        generation = engine.submit("x", SamplingParams(logprobs=logprobs))
        async for _ in generation:
            pass
        engine.close()
        return generation.take_logprobs()

    async def test_token_bytes_and_probability(self) -> None:
        assert await self.ask(0) == [
            TokenLogprob("a", b"a", -math.log(256)),
            TokenLogprob("b", b"b", -math.log(256)),
        ]

    async def test_alternatives(self) -> None:
        first, second = await self.ask(3)
        assert [each.token for each in first.top] == ["a", "b", "c"]
        assert [each.raw for each in second.top] == [b"a", b"b", b"c"]
        assert {each.logprob for each in first.top} == {-math.log(256)}
        assert all(each.top == () for each in first.top)


@pytest.mark.parametrize("value", [-1, 21, True, 1.0, "5"])
def test_a_number_of_alternatives_out_of_range(value: object) -> None:
    with pytest.raises(BadRequest, match="logprobs must be an integer from 0 to 20") as caught:
        SamplingParams(logprobs=value)
    assert caught.value.field == "logprobs"


@pytest.mark.parametrize("value", [[], "{}", True, 5])
def test_a_schema_is_an_object(value: object) -> None:
    with pytest.raises(BadRequest, match="schema must be an object") as caught:
        SamplingParams(schema=value)
    assert caught.value.field == "schema"


def test_parameters_with_a_schema_can_be_hashed() -> None:
    assert hash(SamplingParams(schema={})) == hash(SamplingParams(schema={"type": "object"}))
    assert SamplingParams(schema={}) != SamplingParams(schema={"type": "object"})
