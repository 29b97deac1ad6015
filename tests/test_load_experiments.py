"""The experiments of load, against the simulated server; what they stand on; a few real passes."""

import asyncio

import pytest
import pytest_asyncio
from fakes import FakeModel
from require import require
from serving import serving

import client
from generation import SamplingParams
from simulated import SimulatedEngine

require("tqdm")
from benches import FastBench, cells, milliseconds  # noqa: E402

import load_experiments  # noqa: E402
from bench import Bench, ExperimentError  # noqa: E402
from dated import DatedModel  # noqa: E402
from load_experiments import Load  # noqa: E402
from measures import Mode, Reply  # noqa: E402
from recording import Recording, Streams, record  # noqa: E402
from workload import counting  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench():
    async with FastBench() as bench:
        yield bench


class TestLoad:
    async def test_rows_and_notes(self, bench, monkeypatch):
        monkeypatch.setattr(load_experiments, "LOAD_ROUNDS", 2)
        monkeypatch.setattr(load_experiments, "CLIENTS", (1, 3, 16))
        finding = await load_experiments.load(bench)
        assert [row[0] for row in finding.rows] == ["none: a bare loop", "1", "3", "16"]
        assert all(float(rate) > 0 for (rate,) in cells(finding, "tokens/s"))
        # The simulated engine has no queue.
        assert cells(finding, "queued: median, p95") == [("n/a",), *[("0 ms, 0 ms",)] * 3]
        waits, per_token, rates = finding.figures[0].panels
        by_client, by_server, _ = waits.lines.values()
        for (clients, seen), (also, sampled) in zip(by_client, by_server, strict=True):
            assert clients == also
            assert 0 < sampled < seen
        assert per_token.limit == ("a reader: 180 ms", 180)
        assert [clients for clients, _ in rates.lines["all"]] == [1, 3, 16]

    async def test_what_the_server_did_not_tell_is_no_zero(self):
        told = Load(1, [Reply("", Mode.SSE, timings={"queued": 0.0, "first_token": None})])
        assert told.server("queued") == 0
        with pytest.raises(ExperimentError, match="no text"):
            told.server("first_token")

    async def test_the_bare_loop_leaves_its_row_free(self):
        model = FakeModel(context=4096)
        params = SamplingParams(max_tokens=9)
        assert load_experiments.bare_loop(model, "prompt", params) > 0
        assert [name for name, _ in model.calls] == ["prefill", *["decode"] * 8]
        assert model.cache[0] == []

    async def test_rounds_are_compared_one_by_one(self):
        assert load_experiments._ratio([9, 1, 8], [10, 1, 10]) == (
            "0.90x (by round 0.90x, 1.00x, 0.80x; fastest 0.90x)"
        )


async def test_chat(bench, monkeypatch):
    monkeypatch.setattr(load_experiments, "CHATS", 2)
    finding = await load_experiments.chat(bench)
    tokens = [int(cell.split()[0]) for (cell,) in cells(finding, "prompt tokens")]
    assert tokens == sorted(tokens)
    assert tokens[-1] > 500
    assert finding.notes[0].startswith("The same text with reuse and without: 10 of 10")


class TestAdded:
    async def test_rows(self, bench, monkeypatch):
        monkeypatch.setattr(load_experiments, "ADDED_ROUNDS", 1)
        finding = await load_experiments.added(bench)
        assert [row[0] for row in finding.rows] == ["0", "8"]
        # The simulated engine has no passes: all is added.
        for first, added in cells(finding, "first text", "added: median"):
            # One is told in whole milliseconds, the other in hundredths.
            assert abs(milliseconds(added) - milliseconds(first)) <= 0.51

    @pytest.mark.parametrize(
        ("passes", "expected"),
        [
            ([], 0),
            ([("decode", 1, 3)], 2),
            ([("decode", -1, 1)], 1),
            ([("decode", 9, 12)], 1),
            ([("decode", -2, 12)], 10),
            ([("decode", -2, -1), ("decode", 11, 12)], 0),
            ([("prefill", 1, 3), ("choose", 3, 3.5)], 2.5),
        ],
    )
    async def test_only_what_falls_between_counts(self, passes, expected):
        assert load_experiments.within(passes, 0, 10) == expected

    async def test_a_dated_model_is_otherwise_the_one_it_is_given(self):
        model = DatedModel(FakeModel(context=4096))
        assert load_experiments.bare_loop(model, "prompt", SamplingParams(max_tokens=2)) > 0
        names = [name for name, _, _ in model.passes]
        assert names == ["prefill", "choose", "decode", "choose"]
        dates = [date for _, *dates in model.passes for date in dates]
        assert dates == sorted(dates)
        assert model.rows == 4


BODY = {"prompt": "One, two,", "max_tokens": 20, "usage": True, "seed": 1}


class TestRecording:
    async def test_a_recorded_reply_is_what_the_client_reads(self):
        async with serving() as running:
            url = f"http://127.0.0.1:{running.port}/stream"
            reply, live = await record(url, BODY), await client.ask(url, BODY)
        assert reply.text == live.text
        assert reply.completion_tokens == 20
        assert reply.received.payload == live.received.payload - longer_timings(live, reply)
        dates = [event.at for event in reply.events]
        assert dates == sorted(dates)
        assert dates[0] < dates[-1]  # when they came, not when they were read

    async def test_one_connection_for_several(self):
        async with serving() as running, Recording() as session:
            url = f"http://127.0.0.1:{running.port}/stream"
            first, second = await session.ask(url, BODY), await session.ask(url, BODY)
        assert first.connect is not None
        assert second.connect is None
        assert first.text == second.text

    @pytest.mark.parametrize("body", [{"prompt": ""}, {"prompt": "x", "truncate_after": 3}])
    async def test_what_is_not_complete_is_no_measurement(self, body):
        async with serving() as running:
            with pytest.raises(ExperimentError):
                await record(f"http://127.0.0.1:{running.port}/stream", body)


class TestStreams:
    async def test_gaps_are_within_replies_and_between_dates(self):
        async with serving(SimulatedEngine(delay_ms=2, jitter_ms=0)) as running:
            url = f"http://127.0.0.1:{running.port}/stream"
            async with Streams(url, 3, lambda index: BODY | {"seed": index}) as streams:
                await streams.more(50)  # more than a reply has
        count = sum(map(len, streams._dates))
        assert count > 3 * 40
        assert len(streams._dates) > 3
        all_gaps = streams.gaps(0, float("inf"))
        assert len(all_gaps) == count - len(streams._dates)
        middle = sorted(date for dates in streams._dates for date in dates)[count // 2]
        halves = streams.gaps(0, middle), streams.gaps(middle, float("inf"))
        assert sorted(all_gaps) == sorted([*halves[0], *halves[1]])
        assert all(halves)

    async def test_a_refusal_is_told_at_once(self):
        async with serving() as running:
            with pytest.raises(ExperimentError, match="400"):
                async with Streams(
                    f"http://127.0.0.1:{running.port}/stream", 2, lambda _: {"prompt": ""}
                ):
                    pass

    async def test_nothing_is_left_running(self):
        engine = SimulatedEngine(delay_ms=1, jitter_ms=0)
        async with serving(engine) as running:
            url = f"http://127.0.0.1:{running.port}/stream"
            async with Streams(url, 2, counting):
                assert engine.running == 2
            async with asyncio.timeout(5):
                while engine.running:
                    await asyncio.sleep(0.001)


def longer_timings(one, other):
    """By how much one reply's are longer: timings are told with as many digits as they need."""
    return len(str(one.timings)) - len(str(other.timings))


class TestBench:
    async def test_memory_is_that_of_the_server(self, bench):
        memory = bench.memory(await bench.server())
        assert memory is None or 2**20 < memory < 2**30

    async def test_a_server_that_is_gone(self):
        with pytest.raises(ExperimentError, match=r"127\.0\.0\.1:1/health"):
            await Bench(quiet=True).get("http://127.0.0.1:1/health")


@pytest.mark.model
async def test_bare_loop(real_model):
    params = SamplingParams(max_tokens=3, seed=1)
    assert load_experiments.bare_loop(real_model, "One, two,", params) > 0
