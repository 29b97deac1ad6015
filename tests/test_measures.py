"""The measures: field reports 142 to 155, on events with made-up dates."""

import json
import math

import pytest

import measures
import tally
from measures import Event, Failure, Mode, Reply


def events(*dated):
    return [Event(at, text) for at, text in dated]


# Field report 145: usage, finish and [DONE] come after the last text and are not part of it.
REPORT_145 = events((1.0, "a"), (1.1, "b"), (1.2, "c"), (1.5, ""), (1.6, ""), (1.7, ""))


class TestText:
    def test_only_text_has_a_first_and_a_last(self):
        heard = events((0.1, ""), (0.2, ""), (0.5, "Hi"), (0.9, "!"), (1.0, ""))
        assert measures.first_text(heard) == 0.5
        assert measures.last_text(heard) == 0.9

    @pytest.mark.parametrize("heard", [[], events((0.1, ""), (0.2, ""))], ids=["none", "no text"])
    def test_without_text_there_is_neither(self, heard):
        assert measures.first_text(heard) is None
        assert measures.last_text(heard) is None
        assert measures.gaps(heard) == []

    def test_gaps_are_between_text_events(self):
        assert measures.last_text(REPORT_145) == 1.2
        assert measures.gaps(REPORT_145) == pytest.approx([0.1, 0.1])

    def test_events_of_one_read_have_an_honest_gap_of_zero(self):
        assert measures.gaps(events((1.0, "a"), (1.0, "b"), (2.0, "c"))) == [0.0, 1.0]


class TestPercentiles:
    @pytest.mark.parametrize(
        ("values", "p50", "p95", "p99", "largest"),
        [
            ([1], 1, 1, 1, 1),
            ([1, 2], 1, 2, 2, 2),
            ([3, 3, 3], 3, 3, 3, 3),
            ([3, 1, 2], 2, 3, 3, 3),
            (range(1, 101), 50, 95, 99, 100),
            (range(1, 201), 100, 190, 198, 200),
            (range(1, 11), 5, 10, 10, 10),
        ],
    )
    def test_nearest_rank(self, values, p50, p95, p99, largest):
        spread = measures.spread(values)
        assert (spread.p50, spread.p95, spread.p99, spread.max) == (p50, p95, p99, largest)
        assert spread.n == len(list(values))

    def test_no_values(self):
        assert measures.spread([]) == measures.Spread(0, None, None, None, None)
        assert measures.percentile([], 50) is None


class TestTimePerOutputToken:
    @pytest.mark.parametrize(
        ("heard", "tokens", "seconds", "count", "counted"),
        [
            (REPORT_145, None, 0.1, 3, "events"),
            (events(*((n / 10, "five tokens") for n in range(10))), 50, 0.9 / 49, 50, "usage"),
            (REPORT_145, 3, 0.1, 3, "usage"),
            (events((1.0, "a")), None, None, 1, "events"),
            (events((1.0, "a")), 1, None, 1, "usage"),
            (events((1.0, "a")), 5, None, 5, "usage"),
            (events((1.0, "a"), (1.0, "b")), None, None, 2, "events"),
            (events((1.0, "a"), (2.0, "b")), 0, None, 0, "usage"),
            ([], None, None, 0, "events"),
            ([], 0, None, 0, "usage"),
        ],
        ids=[
            "145", "148 five tokens an event", "usage", "147 one", "147 one by usage",
            "a buffered reply", "147 no duration", "usage says none", "147 nothing", "147 zero",
        ],
    )  # fmt: skip
    def test_says_what_it_counted(self, heard, tokens, seconds, count, counted):
        measured = measures.time_per_output_token(heard, tokens)
        assert measured.seconds == (seconds if seconds is None else pytest.approx(seconds))
        assert (measured.count, measured.counted) == (count, counted)


class TestReply:
    def test_an_empty_reply_is_complete_and_measures_nothing(self):
        """Field report 152."""
        reply = Reply("http://x/stream", Mode.SSE, status=200)
        assert reply.complete
        assert reply.text == ""
        assert reply.first_text is None
        assert reply.time_per_output_token().seconds is None

    @pytest.mark.parametrize("count", [None, -1, 2.5, "7", True, math.inf, 10**400])
    def test_a_count_of_tokens_that_is_none_is_not_used(self, count):
        reply = Reply("http://x/stream", Mode.SSE, usage={"completion_tokens": count})
        assert reply.completion_tokens is None
        assert reply.time_per_output_token().counted == "events"

    def test_the_first_failure_is_kept(self):
        reply = Reply("http://x/stream", Mode.SSE)
        reply.fail(Failure.IN_BAND, "out of memory")
        reply.fail(Failure.TRUNCATED, "closed")
        assert (reply.failure, reply.error) == (Failure.IN_BAND, "out of memory")

    def test_a_servers_words_are_shortened_and_escaped(self):
        reply = Reply("http://x/stream", Mode.SSE)
        reply.fail(Failure.IN_BAND, "\x1b[2Jé\n" + "x" * 10_000)
        assert reply.error.startswith("\\x1b[2Jé\\nxxx")
        assert len(reply.error) < 400

    def test_bytes_that_are_not_text(self):
        received = measures.ByteCount(head=10, framing=3, payload=20, unparsed=2)
        reply = Reply("u", Mode.SSE, events=events((0.1, "né"), (0.2, "\ud800")), received=received)
        assert received.total == 35
        assert reply.text_bytes == 6


class TestTable:
    @pytest.mark.parametrize("heard", [[], events((0.1, "a")), REPORT_145])
    @pytest.mark.parametrize("failure", [None, Failure.TRUNCATED])
    def test_is_aligned_and_never_says_nan(self, heard, failure):
        reply = Reply("u", Mode.SSE, events=heard)
        if failure:
            reply.fail(failure, "cut")
        lines = tally.reply_table(reply).splitlines()
        assert all(line[21] == " " and line[22] != " " for line in lines)
        assert "nan" not in tally.reply_table(reply)
        assert "inf" not in tally.reply_table(reply)
        assert ("truncated: cut" in lines[0]) == bool(failure)

    def test_a_servers_words_cannot_steer_the_terminal(self):
        assert "\x1b" not in tally.reply_table(Reply("u", Mode.SSE, finish_reason="\x1b[2J"))

    def test_names_what_was_counted(self):
        text = tally.reply_table(Reply("u", Mode.SSE, events=REPORT_145, usage=json.loads("{}")))
        assert "100.0 ms (3 by events)" in text
        assert "inter-event gaps" in text
        assert "(n = 2)" in text
