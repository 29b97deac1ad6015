"""Pieces of text from token ids, and stop strings."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from require import require

from detokenizer import REPLACEMENT, Detokenizer, StopStrings

HARD = "ď 你好 😀 👩‍👩‍👧 🇩🇪 한국어 \ufffd é\n"


def pieces(decode, ids):
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]


def assert_law(decode, ids):
    sent = pieces(decode, ids)
    assert "".join(sent) == decode(ids)
    return sent


# Fake tokenizers, one of each kind. Ids 0 to 255 are bytes; above them stand longer tokens.

SPECIAL = 256
LONGER = ["Hello", " world", "你好", "\ufffd", "ab\ufffd", " ", "  ", "é"]
HALVES = [b"\xe4\xbd", b"\xbd\xa0", b"a\xf0\x9f", b"\x98\x80b", b"\xff\xff", b"\xa0a"]
VOCABULARY = SPECIAL + 1 + len(LONGER) + len(HALVES)


def check_vocabulary(ids):
    if not all(0 <= token_id < VOCABULARY for token_id in ids):
        raise LookupError("no such id")


def token_bytes(token_id):
    if token_id < SPECIAL:
        return bytes([token_id])
    if token_id == SPECIAL:
        return b""
    return [*(text.encode() for text in LONGER), *HALVES][token_id - SPECIAL - 1]


def byte_level(ids):
    check_vocabulary(ids)
    return b"".join(map(token_bytes, ids)).decode("utf-8", "replace")


def one_mark_per_byte(ids):
    """As SentencePiece itself decodes byte tokens: each byte that is no UTF-8 is one U+FFFD."""
    check_vocabulary(ids)
    text = b"".join(map(token_bytes, ids)).decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", REPLACEMENT, text)


def fallback(ids):
    """As `tokenizers` decodes byte fallback: a run of byte tokens is UTF-8 as a whole or not."""
    check_vocabulary(ids)
    text, run = "", b""
    for token_id in ids:
        if token_id < SPECIAL:
            run += token_bytes(token_id)
        elif token_id != SPECIAL:
            text += decode_run(run) + token_bytes(token_id).decode("utf-8", "replace")
            run = b""
    return text + decode_run(run)


def decode_run(run):
    try:
        return run.decode()
    except UnicodeDecodeError:
        return REPLACEMENT * len(run)


def fallback_with_strip(ids):
    return fallback(ids).removeprefix(" ")


def no_spaces_first(ids):
    return byte_level(ids).removeprefix(" ")


KINDS = [byte_level, one_mark_per_byte, fallback, fallback_with_strip, no_spaces_first]
kinds = pytest.mark.parametrize("decode", KINDS)
any_id = st.integers(0, VOCABULARY - 1)
# Few distinct ids, so that characters complete and runs grow long.
few_ids = st.lists(any_id, min_size=1, max_size=4).flatmap(
    lambda some: st.lists(st.sampled_from(some), max_size=80)
)
any_ids = st.lists(any_id, max_size=80) | few_ids


def longer(text):
    return SPECIAL + 1 + LONGER.index(text)


class TestPieceLaw:
    @kinds
    @given(ids=any_ids)
    def test_any_ids(self, decode, ids):
        assert_law(decode, ids)

    @kinds
    @given(text=st.text(st.characters(codec="utf-8")), cut=st.integers(0, 3))
    def test_any_text_cut_anywhere(self, decode, text, cut):
        raw = text.encode()
        assert_law(decode, raw[: len(raw) - cut])

    @kinds
    def test_twenty_thousand_random_ids(self, decode):
        draw = random.Random(7)
        assert_law(decode, [draw.randrange(VOCABULARY) for _ in range(20_000)])

    @kinds
    @pytest.mark.parametrize("raw", [b"\xff", b"\xe4", b"\xa0", b"\xf0\x9f", "\ufffd".encode()])
    @pytest.mark.parametrize("after", [b"", b"\xbd\xa0", b"a"])
    def test_bytes_that_never_become_a_character(self, decode, raw, after):
        assert_law(decode, raw * 100 + after)

    @kinds
    def test_long_run_of_characters(self, decode):
        assert_law(decode, ("你好😀한" * 100).encode())

    @kinds
    @given(ids=any_ids)
    def test_special_tokens_change_nothing(self, decode, ids):
        among = [each for token_id in ids for each in (token_id, SPECIAL, SPECIAL)]
        assert [*filter(None, pieces(decode, among))] == [*filter(None, pieces(decode, ids))]

    def test_special_tokens_within_a_character(self):
        ids = [0xE4, *[SPECIAL] * 100, 0xBD, SPECIAL, 0xA0]
        assert "".join(assert_law(byte_level, ids)) == "你"


class TestPieces:
    def test_no_half_character_in_any_piece(self):
        text = HARD.replace("\ufffd", "")
        sent = assert_law(byte_level, text.encode())
        assert not any(REPLACEMENT in piece for piece in sent)
        assert [piece for piece in sent if piece] == list(text)

    def test_a_character_is_sent_by_the_token_that_completes_it(self):
        ids = [0xF0, 0x9F, 0x98, 0x80, 0x61, 0xE4, 0xBD, 0xA0]
        assert pieces(byte_level, ids) == ["", "", "", "😀", "a", "", "", "你", ""]

    def test_whole_tokens_are_sent_at_once(self):
        ids = [longer("Hello"), longer(" world"), longer("你好")]
        assert pieces(byte_level, ids) == ["Hello", " world", "你好", ""]

    def test_lead_byte_that_comes_with_the_next_character(self):
        # Field report: E7, then the rest of that character together with others.
        table = [b"a", b"\xe7", b"\xa4\xbe\xe5\x8c\xba"]

        def decode(ids):
            return b"".join(table[token_id] for token_id in ids).decode("utf-8", "replace")

        assert pieces(decode, [0, 1, 2]) == ["a", "", "社区", ""]

    def test_half_a_character_at_the_end_is_flushed_as_decode_shows_it(self):
        assert pieces(byte_level, [0x61, 0xF0, 0x9F, 0x98]) == ["a", "", "", "", REPLACEMENT]
        assert pieces(one_mark_per_byte, [0x61, 0xF0, 0x9F])[-1] == REPLACEMENT * 2

    def test_invalid_bytes_are_held_for_three_characters_at_most(self):
        detokenizer = Detokenizer(byte_level)
        sent = 0
        for count in range(1, 200):
            sent += len(detokenizer.add(0xFF))
            assert count - sent <= 3

    def test_first_space_is_dropped_once(self):
        ids = [longer(" world"), longer(" world"), longer(" "), longer(" "), longer("Hello")]
        assert pieces(no_spaces_first, ids) == ["world", " world", " ", " ", "Hello", ""]

    def test_byte_fallback_run_is_held_until_it_cannot_be_spoiled(self):
        run = [longer("Hello"), 0x0A, 0xE4, 0xBD, 0xA0, longer(" world")]
        assert pieces(fallback, run) == ["Hello", "", "", "", "", "\n你 world", ""]
        spoiled = [longer("Hello"), 0x0A, 0xE4, longer(" world")]
        assert pieces(fallback, spoiled) == ["Hello", "", "", REPLACEMENT * 2 + " world", ""]

    def test_finish_starts_afresh(self):
        detokenizer = Detokenizer(byte_level)
        assert detokenizer.add(0xE4) == ""
        assert detokenizer.finish() == REPLACEMENT
        assert detokenizer.finish() == ""
        assert detokenizer.add(0xA0) + detokenizer.finish() == REPLACEMENT

    def test_no_ids(self):
        assert Detokenizer(byte_level).finish() == ""


class TestCost:
    """Counted in ids handed to `decode`, not in seconds."""

    @staticmethod
    def cost(ids, decode):
        counted = 0

        def counting(window):
            nonlocal counted
            counted += len(window)
            return decode(window)

        detokenizer = Detokenizer(counting)
        detokenizer.add(0x61)  # pays for the look at the vocabulary
        counted, costs = 0, []
        for token_id in ids:
            before = counted
            detokenizer.add(token_id)
            costs.append(counted - before)
        return costs

    @pytest.mark.parametrize("decode", [byte_level, one_mark_per_byte, no_spaces_first])
    @pytest.mark.parametrize(
        "ids",
        [
            b"plain text " * 1000,
            ("你😀" * 1000).encode(),
            b"\xff" * 5000,
            b"\xe4" * 5000,
            b" " * 5000,
        ],
        ids=["ascii", "characters", "invalid", "lead", "spaces"],
    )
    def test_each_token_costs_the_same(self, decode, ids):
        assert max(self.cost(ids, decode)) <= 40

    def test_run_of_byte_tokens_is_decoded_once(self):
        costs = self.cost([*"你".encode() * 2000, longer("Hello")], fallback)
        assert max(costs[:-1]) <= 4
        assert costs[-1] <= 6010

    def test_a_plain_token_costs_one_short_call_once_it_is_known(self):
        first, *others = self.cost([longer("Hello")] * 100, byte_level)
        assert first == 3
        assert set(others) == {2}


# Real tokenizers. `tokenizers` itself is the oracle.

PIECES = ["▁", "▁▁", "▁Hello", "▁world", "how", "a", "é", "你", "▁你", ".", "😀", "\n", "\u200d"]


def byte_fallback_tokenizer(with_strip, seed):
    tokenizers = require("tokenizers")
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    if seed:
        random.Random(seed).shuffle(tokens)
    tokens = ["<unk>", "<s>", "</s>", *tokens]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    steps = [
        tokenizers.decoders.Replace("▁", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
    ]
    if with_strip:
        steps.append(tokenizers.decoders.Strip(" ", 1, 0))
    tokenizer.decoder = tokenizers.decoders.Sequence(steps)
    return tokenizer


def byte_level_tokenizer():
    tokenizers = require("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([HARD, "the quick brown fox, the lazy dog " * 5], trainer)
    return tokenizer


def metaspace_tokenizer():
    tokenizers = require("tokenizers")
    vocabulary = [(piece, -1.0) for piece in ["<unk>", *PIECES]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, unk_id=0))
    tokenizer.add_special_tokens(["<unk>"])
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    return tokenizer


@pytest.fixture(
    params=["byte-level", "fallback", "fallback-strip", "fallback-strip-shuffled", "metaspace"]
)
def tokenizer(request):
    if request.param == "byte-level":
        return byte_level_tokenizer()
    if request.param == "metaspace":
        return metaspace_tokenizer()
    return byte_fallback_tokenizer("strip" in request.param, seed="shuffled" in request.param)


class TestRealTokenizers:
    @staticmethod
    def decoder(tokenizer):
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)

    def test_twenty_thousand_random_ids(self, tokenizer):
        draw = random.Random(11)
        size = tokenizer.get_vocab_size()
        assert_law(self.decoder(tokenizer), [draw.randrange(size) for _ in range(20_000)])

    def test_short_random_ids(self, tokenizer):
        decode, draw = self.decoder(tokenizer), random.Random(12)
        for _ in range(1000):
            some = [draw.randrange(tokenizer.get_vocab_size()) for _ in range(draw.randint(1, 6))]
            assert_law(decode, [draw.choice(some) for _ in range(draw.randint(1, 40))])

    def test_text(self, tokenizer):
        assert_law(self.decoder(tokenizer), tokenizer.encode(HARD * 20).ids)

    def test_sentencepiece_keeps_spaces_between_words(self):
        tokenizer = byte_fallback_tokenizer(with_strip=True, seed=0)
        ids = [tokenizer.token_to_id(token) for token in ["▁Hello", "▁world", "▁", "how"]]
        assert pieces(self.decoder(tokenizer), ids) == ["Hello", " world", " ", "how", ""]

    def test_sentencepiece_byte_tokens(self):
        tokenizer = byte_fallback_tokenizer(with_strip=True, seed=0)
        ids = [tokenizer.token_to_id(token) for token in ["▁", "<0xE4>", "<0xBD>", "<0xA0>", "."]]
        assert "".join(assert_law(self.decoder(tokenizer), ids)) == "你."


# Stop strings


def stream(stops, sent):
    """Return the pieces that leave the filter, the flush last, and what matched."""
    stop = StopStrings(stops)
    return [*(stop.add(piece) for piece in sent), stop.finish()], stop.matched


class TestStopStrings:
    @pytest.mark.parametrize(
        ("stops", "sent", "expected", "matched"),
        [
            pytest.param(stops, sent, expected, matched, id=name)
            for name, stops, sent, expected, matched in [
                (
                    "80-nothing-of-it-is-sent",
                    ["DEFGHIJ"],
                    ["DEF", "G", "HI", "J"],
                    [""] * 5,
                    "DEFGHIJ",
                ),
                (
                    "80-last-character-late",
                    ["\nUser:"],
                    ["a", "\nUser", ":"],
                    ["a", "", "", ""],
                    "\nUser:",
                ),
                ("81-within-a-piece", ["STOP"], ["xxSTOPyy"], ["xx", ""], "STOP"),
                (
                    "81-across-pieces",
                    ["beta gamma"],
                    ["alpha be", "ta gam", "ma delta"],
                    ["alpha ", "", "", ""],
                    "beta gamma",
                ),
                (
                    "82-held-text-is-released",
                    ["assistant!"],
                    ["ple", "as"],
                    ["ple", "", "as"],
                    None,
                ),
                ("83-zero-hold", ["Z" * 10], ["hello", " world"], ["hello", " world", ""], None),
                ("83-only-a-proper-prefix", ["ab"], ["xa", "xa", "c"], ["x", "ax", "ac", ""], None),
                ("84-ends-earliest", ["abcd", "bc"], ["a", "bcd"], ["", "a", ""], "bc"),
                ("84-longest-of-those", ["c", "abc", "bc"], ["xab", "c"], ["x", "", ""], "abc"),
                ("84-order-is-nothing", ["abc", "c", "bc"], ["xab", "c"], ["x", "", ""], "abc"),
                ("84-prefix-of-another", ["stop", "sto"], ["stop"], ["", ""], "sto"),
                ("85-none", [], ["a", "b"], ["a", "b", ""], None),
                ("nothing-after-a-match", ["."], ["a.b", "c", "."], ["a", "", "", ""], "."),
                ("falls-back", ["aab"], ["aaa", "ab"], ["a", "a", ""], "aab"),
                ("falls-back-far", ["ababac"], ["abab", "abac"], ["", "ab", ""], "ababac"),
                ("empty-pieces", ["ab"], ["", "a", "", "b"], ["", "", "", "", ""], "ab"),
                ("unicode", ["\n你"], ["好\n", "你"], ["好", "", ""], "\n你"),
                ("twice-the-same", ["b", "b"], ["ab"], ["a", ""], "b"),
            ]
        ],
    )
    def test_pieces(self, stops, sent, expected, matched):
        assert stream(stops, sent) == (expected, matched)

    @pytest.mark.parametrize("stops", [[""], ["a", ""]])
    def test_empty_stop_string_is_refused(self, stops):
        with pytest.raises(ValueError, match="empty"):
            StopStrings(stops)

    def test_finish_forgets_what_was_held(self):
        stop = StopStrings(["ab"])
        assert stop.add("a") == ""
        assert stop.finish() == "a"
        assert stop.finish() == ""
        assert stop.add("b") == "b"

    @given(
        st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
        st.lists(st.text("abc", max_size=5), max_size=12),
    )
    def test_law_cut_at_the_first_stop(self, stops, sent):
        got, matched = stream(stops, sent)
        text = "".join(sent)
        ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if ends:
            end, length, first = min(ends)
            assert matched == first
            assert "".join(got) == text[: end + length]
        else:
            assert matched is None
            assert "".join(got) == text

    @given(
        st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
        st.lists(st.text("ab", max_size=4), max_size=8),
    )
    def test_law_holds_no_more_than_a_beginning(self, stops, sent):
        stop, out, text = StopStrings(stops), "", ""
        for piece in sent:
            out += stop.add(piece)
            text += piece
            if stop.matched is not None:
                break
            beginnings = [stop[:n] for stop in stops for n in range(len(stop))]
            held = max((len(b) for b in beginnings if text.endswith(b)), default=0)
            assert out == text[: len(text) - held]

    def test_adversarial_text_takes_linear_time(self):
        """Each step back in the failure table undoes one forward: two a character at most."""
        steps = 0

        class Counting(str):
            def __ne__(self, other):
                nonlocal steps
                steps += 1
                return str.__ne__(self, other)

            __hash__ = str.__hash__

        stop = StopStrings(["a" * 200 + "b"])
        for _ in range(50):
            for character in "a" * 100 + "c":
                stop._advance(Counting(character))
        assert steps <= 2 * 50 * 101


def test_detokenizer_and_stop_strings_in_a_row():
    text = "one 你好 two STOP three"
    detokenizer, stop = Detokenizer(byte_level), StopStrings(["好 two ST"])
    sent = [stop.add(detokenizer.add(token_id)) for token_id in text.encode()]
    sent += [stop.add(detokenizer.finish()), stop.finish()]
    assert "".join(sent) == "one 你"
    assert stop.matched == "好 two ST"
