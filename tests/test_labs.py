"""The experiments on a schedule: each once, on a short one; what they stand on, exactly."""

import json

import pytest
import pytest_asyncio
from require import require
from serving import serving

require("tqdm")
from benches import FastBench, cells  # noqa: E402

import client  # noqa: E402
import grouping_experiments  # noqa: E402
import labs  # noqa: E402
from bench import ExperimentError  # noqa: E402
from grouping_experiments import Hold  # noqa: E402
from measures import Event, Mode, Reply  # noqa: E402
from simulated import SimulatedEngine  # noqa: E402
from workload import arrivals  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench():
    async with FastBench() as bench:
        yield bench


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Words come each 2 ms: a schedule that is over soon."""
    for name, value in {"WORD_MS": 2, "JITTER_MS": 0, "LAB_CALLS": 3, "TIMED_REPLIES": 1}.items():
        monkeypatch.setattr(labs, name, value)
    for name, value in {"FRAGMENT_MS": 2, "FIRST_MS": 10, "PAIRS": 3, "STAGGER_S": 0.01}.items():
        monkeypatch.setattr(labs, name, value)
    for name, value in {"FELT_MS": 90, "FELT_REPLIES": 1, "SHARES": (0.1, 0.9)}.items():
        monkeypatch.setattr(labs, name, value)
    for name, value in {"WORD_MS": 2, "GROUPED_REPLIES": 1, "HELD_REPLIES": 1}.items():
        monkeypatch.setattr(grouping_experiments, name, value)


def reply(*events):
    return Reply("", Mode.SSE, events=[Event(*event) for event in events])


class TestLab:
    async def test_the_streams_begin_before_the_whole_replies_come(self, bench):
        finding = await labs.lab(bench)
        assert [row[0] for row in finding.rows] == [
            "wait",
            "stream",
            "stream, by the server's clock",
        ]
        assert finding.result["stream"]["first_text_ms"] < finding.result["wait"]["first_text_ms"]
        calls = json.loads(finding.files["timeline.json"])["calls"]
        assert [call["mode"] for call in calls] == ["wait"] * 3 + ["stream"] * 3
        assert [call["seed"] for call in calls] == [42, 43, 44] * 2
        assert ["events_ms" in call for call in calls] == [True, False, False] * 2
        assert len(calls[3]["events_ms"]) == labs.LAB_WORDS
        [figure] = finding.figures
        assert [len(points) for points in figure.lines.values()] == [labs.LAB_WORDS, 1]

    async def test_a_call_for_a_stream_has_the_words_of_its_whole_reply(self, bench):
        url = await bench.simulated(*labs.schedule(2))
        calls = [(f"{url}/{route}", labs.asked(9)) for route in ("complete", "stream")]
        whole, streamed = await labs.at_once(bench, calls)
        assert whole.text == streamed.text
        assert whole.connect is streamed.connect is None  # the connections were open

    async def test_summary(self):
        replies = [reply((first, "a"), (first + 1, " b")) for first in (0.1, 0.2, 0.3)]
        assert labs.lab_summary(replies) == {
            "first_text_ms": 200.0,
            "first_text_p95_ms": 300.0,
            "total_ms": 1200.0,
            "total_p95_ms": 1300.0,
        }

    async def test_arrivals_count_characters(self):
        events = (0.1, "Two"), (0.2, ""), (0.3, " plus two"), (0.4, "")
        assert arrivals(reply(*events)) == [(0.1, 3), (0.3, 12)]


class TestTimestamps:
    async def test_bytes_are_those_published(self, bench):
        finding = await labs.timestamps(bench)
        # The space after the colon makes 94 of 93.
        assert cells(finding, "bytes of the body", "complete", "error") == [
            ("94", "yes", "none"),
            ("276", "yes", "none"),
        ]

    async def test_a_server_gives_the_text_that_was_looked_for(self):
        seed = await labs.seed_of(18, 82)
        async with serving() as running:
            body = labs.asked(18) | {"seed": seed}
            told = await client.ask(f"http://127.0.0.1:{running.port}/stream", body)
        assert (len(told.pieces), told.text_bytes) == (18, 82)

    async def test_no_such_text(self):
        with pytest.raises(ExperimentError, match="no reply of 1 words has 82 bytes"):
            await labs.seed_of(1, 82)


async def test_pairs(bench):
    finding = await labs.pairs(bench)
    assert [row[0] for row in finding.rows] == ["stream", "blocking"]
    assert cells(finding, "schedule") == [("10 ms; 70 ms",), ("70 ms",)]


async def test_a_schedule_begins_when_it_says():
    assert labs.schedule(80, 0, 400) == [
        "--delay-ms=80",
        "--jitter-ms=0",
        "--first-delay-ms=320",
        "--seed=42",
    ]


async def test_no_fault_passes_for_a_whole_reply(bench):
    finding = await labs.faults(bench)
    assert set(cells(finding, "taken as")) == {("rejected",)}
    words = cells(finding, "reply", "words")
    assert words == [(name, "0" if name == "/complete" else "3") for name, *_ in words]
    seen = [words for (words,) in cells(finding, "what the client saw")]
    assert all("failed, as asked" in words for words in seen[:4])
    assert all(words.startswith("truncated: ") for words in seen[4:])
    assert finding.notes[0].startswith("Rejected: 8 of 8")


async def test_a_whole_reply_is_told_as_one():
    assert labs._verdict(reply((0.1, "Two words"))) == ["whole", "2", "nothing"]


class TestFelt:
    async def test_rows(self, bench):
        finding = await labs.felt(bench)
        shares = cells(finding, "share of the total", "by schedule", "published")
        assert shares == [("10%", "9 of 90 ms", "10x"), ("90%", "81 of 90 ms", "not measured")]

    async def test_the_schedule_has_its_length_and_its_share(self):
        engine = SimulatedEngine(seed=42, delay_ms=90 * 0.9 / 40, first_delay_ms=9 - 90 * 0.9 / 40)
        flags = dict(flag.split("=") for flag in labs.felt_schedule(0.1))
        assert float(flags["--delay-ms"]) == pytest.approx(engine.delay_ms)
        assert float(flags["--first-delay-ms"]) == pytest.approx(engine.first_delay_ms)


class TestBatching:
    async def test_events_and_bytes_become_fewer(self, bench):
        finding = await grouping_experiments.batching(bench)
        assert cells(finding, "events")[:3] == [("120",), ("30",), ("15",)]
        one, four, eight = (int(size.replace(",", "")) for (size,) in cells(finding, "bytes")[:3])
        assert one > four > eight
        assert set(finding.figures[0].points) == {"k = 1", "k = 4", "k = 8", "20 ms", "50 ms"}

    @pytest.mark.parametrize(
        ("how", "expected"),
        [
            ({}, Hold(0, 0)),
            ({"flush_tokens": 4}, Hold(99, 49.5)),
            ({"flush_tokens": 8}, Hold(231, 115.5)),
            ({"flush_ms": 20}, Hold(20, 20)),
            ({"flush_ms": 50}, Hold(50, 33.5)),
        ],
    )
    async def test_expected(self, how, expected):
        assert grouping_experiments.expected_hold(33, **how) == expected

    async def test_measured(self):
        alone = [Event(0.1, "One"), Event(0.2, " two"), Event(0.3, " three"), Event(0.4, " four")]
        pairs = [Event(0.2, "One two"), Event(0.4, " three four"), Event(0.4)]
        hold = grouping_experiments.measured_hold(alone, pairs)
        assert (hold.first, hold.average) == pytest.approx((100, 50))
        with pytest.raises(ExperimentError, match="not the same words"):
            grouping_experiments.measured_hold(alone, pairs[:1])


class TestHoldBack:
    async def test_the_phrase_is_never_seen_and_its_beginning_not_if_enough_is_held(self, bench):
        finding = await grouping_experiments.hold_back(bench)
        columns = "held back", "words of the phrase seen", "phrase seen"
        assert cells(finding, *columns) == [
            ("0", "2 of 3", "no"),
            ("1", "1 of 3", "no"),
            ("2", "0 of 3", "no"),
            ("10", "0 of 3", "no"),
        ]
        assert set(cells(finding, "the reply ended with")) == {
            ("the reply was stopped by a filter",)
        }


class TestPadding:
    async def test_lengths_are_told_by_sizes_unless_padded(self, bench):
        finding = await grouping_experiments.padding(bench)
        (plain, _), (padded, _) = cells(finding, "lengths right", "off by")
        assert plain == "100%"
        assert int(padded.removesuffix("%")) < 50

    async def test_sizes_and_lengths(self):
        content = (
            b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
            b'data: {"choices": [{"delta": {"content": "Two"}}]}\n\n'
            b'data: {"choices": [{"delta": {}}]}\n\ndata: {"choices": []}\n\ndata: [DONE]\n\n'
        )
        assert grouping_experiments.sizes_and_lengths(content) == [(50, 3)]

    @pytest.mark.parametrize(
        ("seen", "expected"),
        [
            ([(51, 3), (52, 4)], (1, 0)),
            ([(51, 3), (51, 3), (60, 4), (61, 6)], (0.5, 3.75)),
        ],
    )
    async def test_recovered(self, seen, expected):
        assert grouping_experiments.recovered(seen) == expected

    async def test_a_refusal_is_no_measurement(self, bench):
        url = await bench.server()
        with pytest.raises(ExperimentError, match="400"):
            grouping_experiments._post(f"{url}/v1/chat/completions", {})
        with pytest.raises(ExperimentError, match=r"127\.0\.0\.1:1/"):
            grouping_experiments._post("http://127.0.0.1:1/", {})
