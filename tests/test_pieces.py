"""Hold-back and grouping, on pieces that a test hands over one by one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generation import Generation, GenerationError
from pieces import Banned, BannedPhrase, Pieces, grouped, held_back

NONE = Banned(())


def said(*pieces: str, error: str | None = None, left: bool = False) -> Generation:
    """A reply that has made these pieces, then its end, an error, or nothing yet."""
    generation = Generation(1)
    for piece in pieces:
        generation.deliver(piece)
    if not left:
        generation.error = error
        generation.deliver("", "error" if error else "stop")
    return generation


async def read(pieces: Pieces) -> tuple[list[str], str | None]:
    """What came, and the error that ended it."""
    came: list[str] = []
    try:
        async for piece in pieces:
            came.append(piece)
    except GenerationError as error:
        return came, error.type
    return came, None


class TestBanned:
    @pytest.mark.parametrize(
        ("phrase", "text", "start"),
        [
            ("bad", "so bad", 3),
            ("bad", "ba d", None),
            ("BAD", "so bad", 3),
            ("bad", "SO BAD", 3),
            ("strasse", "Die Straße", 4),  # ß folds to two letters
            ("STRAẞE", "strasse", 0),
            ("ﬃ", "OFFICE", 1),  # one character, folds to three
            ("ΣΊΣΥΦΟΣ", "σίσυφος", 0),  # a final sigma is a sigma
            ("i\u0307", "İ", 0),  # the dotted capital folds to a letter and a dot
            ("坏话", "说坏话", 1),
        ],
    )
    def test_any_case_of_letters(self, phrase: str, text: str, start: int | None) -> None:
        assert Banned([phrase]).find(text.casefold()) == start

    def test_the_phrase_that_begins_first_counts(self) -> None:
        assert Banned(["worse", "a worse word"]).find("say a worse word") == 4

    def test_a_file(self, tmp_path: Path) -> None:
        """One phrase a line; an editor's byte order mark or line ends hide none."""
        path = tmp_path / "phrases"
        path.write_bytes("\ufeffFirst\r\n\r\n  second one \n\n".encode())
        banned = Banned.read(str(path))
        assert banned.find("the first") == 4
        assert banned.find("a second one") == 2
        assert banned.find("a thing \r\n") is None

    @pytest.mark.parametrize("phrases", [[], ["", "  "]])
    def test_none(self, phrases: list[str]) -> None:
        assert not Banned(phrases)

    @pytest.mark.parametrize("phrases", [[], ["x"], ["abc", "x"]])
    def test_little_is_kept(self, phrases: list[str]) -> None:
        """What is kept of a text is one short of the longest phrase, however long it gets."""
        banned = Banned(phrases)
        longest = max(map(len, phrases), default=1)
        assert len(banned.tail("." * 1000)) == longest - 1
        assert banned.tail("a") == ("a" if longest > 1 else "")


class TestHeldBack:
    @pytest.mark.parametrize("tokens", [0, 1, 3, 10])
    async def test_each_piece_once_so_many_more_have_come(self, tokens: int) -> None:
        generation = said(left=True)
        pieces = held_back(generation, tokens, NONE)
        reading = asyncio.ensure_future(anext(pieces))
        for number in range(tokens):
            generation.deliver(str(number))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not reading.done()
        generation.deliver("last")
        assert await reading == ("0" if tokens else "last")
        generation.deliver("", "length")
        assert "".join([p async for p in pieces]).endswith("last" if tokens else "")

    @pytest.mark.parametrize("tokens", [0, 1, 2, 100])
    async def test_nothing_is_lost_at_the_end(self, tokens: int) -> None:
        assert await read(held_back(said("a", "b", "c"), tokens, NONE)) == (["a", "b", "c"], None)

    @pytest.mark.parametrize("tokens", [0, 1, 2, 100])
    async def test_an_error_comes_after_what_was_safe(self, tokens: int) -> None:
        pieces = held_back(said("a", "b", "c", error="broken"), tokens, Banned(["x"]))
        assert await read(pieces) == (["a", "b", "c"], "model_error")

    @pytest.mark.parametrize("phrase", ["bad word", "BAD word", "d w", "bad word."])
    @pytest.mark.parametrize("cut", [1, 2, 3, 5, 100])
    async def test_never_whole(self, phrase: str, cut: int) -> None:
        """However the text is cut into pieces; what comes before the phrase is kept."""
        text = "A good start, then a bad word. And more."
        parts = [text[i : i + cut] for i in range(0, len(text), cut)]
        before = text[: text.casefold().index(phrase.casefold())]
        for tokens in (0, 1, len(phrase) // cut + 1, 100):
            came, error = await read(held_back(said(*parts), tokens, Banned([phrase])))
            told = "".join(came)
            assert error == "content_filter"
            assert phrase.casefold() not in told.casefold()
            assert told.startswith(before)
            if tokens * cut >= len(phrase):
                assert told == before
            assert "" not in came

    async def test_longer_than_the_window(self) -> None:
        """Its beginning has been sent by then; the whole of it never is."""
        came, error = await read(held_back(said(*"a long phrase!"), 2, Banned(["long phrase"])))
        assert ("".join(came), error) == ("a long phr", "content_filter")

    async def test_a_phrase_that_begins_inside_a_folded_character(self) -> None:
        """ß folds to ss: what holds the first half of the phrase is not sent either."""
        came, error = await read(held_back(said("na", "ß", "t"), 9, Banned(["st"])))
        assert (came, error) == (["na"], "content_filter")

    async def test_the_generation_stops_at_once(self) -> None:
        """The stop law: before the error has been read, and what was safe before it too."""
        generation = said("safe ", "bad", left=True)
        pieces = held_back(generation, 5, Banned(["bad"]))
        assert await anext(pieces) == "safe "
        assert generation.cancel_reason is not None

    async def test_nothing_is_remembered_beyond_need(self) -> None:
        """A phrase that ended long ago in pieces that were sent is none any more."""
        pieces = ["ba", *["."] * 50, "d"]
        assert (await read(held_back(said(*pieces), 0, Banned(["bad"]))))[1] is None

    @given(
        st.text("abß", max_size=30),
        st.lists(st.text("abs", min_size=1, max_size=4), max_size=3),
        st.lists(st.integers(1, 4), min_size=1),
        st.integers(0, 6),
    )
    def test_laws(self, text: str, phrases: list[str], cuts: Sequence[int], tokens: int) -> None:
        """What is told is a beginning of the text, holds no phrase, and is all without one."""
        parts, start = [], 0
        while start < len(text):
            size = cuts[len(parts) % len(cuts)]
            parts.append(text[start : start + size])
            start += size

        async def law() -> None:
            came, error = await read(held_back(said(*parts), tokens, Banned(phrases)))
            told = "".join(came)
            assert text.startswith(told)
            assert not any(phrase in told.casefold() for phrase in phrases)
            assert (error is None) == (not any(p in text.casefold() for p in phrases))
            if error is None:
                assert told == text

        asyncio.run(law())


class TestGrouped:
    @pytest.mark.parametrize(
        ("tokens", "groups"),
        [(1, ["a", "b", "c", "d", "e"]), (2, ["ab", "cd", "e"]), (5, ["abcde"]), (9, ["abcde"])],
    )
    async def test_tokens(self, tokens: int, groups: list[str]) -> None:
        assert await read(grouped(said(*"abcde"), tokens, None)) == (groups, None)

    async def test_a_window_begins_with_its_first_piece(self) -> None:
        """Nothing is due while nothing is held, however long that takes."""
        generation = said(left=True)
        pieces = grouped(generation, None, 20)
        first = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0.05)
        assert not first.done()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        generation.deliver("a")
        generation.deliver("b")
        assert await first == "ab"
        assert loop.time() - begun >= 0.019  # a timer may be early by the clock's resolution
        generation.deliver("c", "stop")
        assert await read(pieces) == (["c"], None)

    async def test_a_window_that_is_over_is_over_however_fast_pieces_come(self) -> None:
        async def endless() -> AsyncGenerator[str, None]:
            while True:
                yield "x"

        pieces = grouped(endless(), None, 1)
        assert set(await asyncio.wait_for(anext(pieces), 10)) == {"x"}
        await pieces.aclose()

    async def test_both_whichever_comes_first(self) -> None:
        by_number = grouped(said(*"abcde", left=True), 2, 3_600_000)
        assert [await anext(by_number), await anext(by_number)] == ["ab", "cd"]
        await by_number.aclose()
        by_time = grouped(said("a", left=True), 1000, 1)
        assert await anext(by_time) == "a"
        await by_time.aclose()

    @pytest.mark.parametrize(("tokens", "window_ms"), [(3, None), (None, 3_600_000), (99, 9e9)])
    @pytest.mark.parametrize("error", [None, "broken"])
    async def test_nothing_is_lost(
        self, tokens: int | None, window_ms: float | None, error: str | None
    ) -> None:
        came, kind = await read(grouped(said(*"abcde", error=error), tokens, window_ms))
        assert "".join(came) == "abcde"
        assert kind == (error and "model_error")

    async def test_over_held_back(self) -> None:
        """The two together: safe text is grouped, the phrase is not sent, nothing is lost."""
        held = held_back(said(*"so far so bad word"), 4, Banned(["bad"]))
        came, error = await read(grouped(held, 4, None))
        assert ("".join(came), error) == ("so far so ", "content_filter")


class TestClosing:
    """Leaving at any place reaches the generation, and leaves no task behind."""

    @pytest.mark.parametrize("begun", [False, True])
    @pytest.mark.parametrize("kind", ["held", "grouped", "both"])
    async def test_stops_the_generation(self, kind: str, begun: bool) -> None:
        generation = said("a", "b", "c", left=True)
        pieces: Pieces = generation
        if kind != "grouped":
            pieces = held_back(pieces, 1, NONE)
        if kind != "held":
            pieces = grouped(pieces, 2, None)
        await anext(pieces)
        if begun:  # one is waiting for the next piece when the reader is cancelled
            reading = asyncio.ensure_future(anext(pieces))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await pieces.aclose()
        assert generation.cancel_reason == "abandoned"
        assert asyncio.all_tasks() == {asyncio.current_task()}

    async def test_an_error_that_comes_while_closing_is_nobody_s(self) -> None:
        generation = said("a", left=True)
        pieces = grouped(generation, None, 1)
        assert await anext(pieces) == "a"  # the window is over; the next piece is waited for
        generation.error = "broken"
        generation.deliver("", "error")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await pieces.aclose()


async def test_banned_phrase_has_safe_words() -> None:
    assert "bad" not in str(BannedPhrase())
