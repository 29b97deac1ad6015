"""The experiments on neighbours, against the simulated server."""

import re

import pytest
import pytest_asyncio
from require import require

require("tqdm")
from benches import FastBench, cells, milliseconds  # noqa: E402

import neighbour_experiments  # noqa: E402
from bench import ExperimentError  # noqa: E402
from neighbour_experiments import LongPrompt, Window  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench():
    async with FastBench() as bench:
        yield bench


class TestStall:
    async def test_rows(self, monkeypatch):
        monkeypatch.setattr(neighbour_experiments, "USUAL_S", 0.5)
        monkeypatch.setattr(neighbour_experiments, "STALL_ROUNDS", 2)
        async with FastBench() as slower:
            slower.flags["delay-ms"] = "20"  # so that gaps are seen on a busy machine, too
            finding = await neighbour_experiments.stall(slower)
        chunked, whole = cells(finding, "usual gap", "largest gap")
        for usual, largest in (chunked, whole):
            assert milliseconds(usual) <= milliseconds(largest)

    async def test_both_rows_are_against_the_chunk_of_their_round(self):
        chunked = [LongPrompt(0.02, 0.13, 0.1, 1.0, 1500), LongPrompt(0.02, 0.22, 0.2, 1.0, 1500)]
        whole = [LongPrompt(0.02, 1.20, 1.1, 1.0, 1500), LongPrompt(0.02, 2.20, 2.1, 1.0, 1500)]
        chunks = [arrival.chunk for arrival in chunked]
        assert neighbour_experiments._stall_row("", chunked, chunks)[4:6] == [
            "1.00x",
            "1.00x to 1.08x",
        ]
        assert neighbour_experiments._stall_row("", whole, chunks)[4:6] == [
            "10.0x",
            "10.0x to 10.0x",
        ]


class TestNotReading:
    async def test_the_row_is_freed_after_the_limit(self, bench, monkeypatch):
        monkeypatch.setattr(neighbour_experiments, "READING_ROUNDS", 1)
        monkeypatch.setattr(neighbour_experiments, "STALL_S", 1)
        finding = await neighbour_experiments.not_reading(bench)
        alone, _, beside = cells(finding, "queued at most")
        assert alone == ("0 bytes",)
        assert beside != ("0 bytes",)
        # How much later it is noticed is the machine's affair.
        noticed = re.search(r"had its last token after ([\d.]+) s", finding.notes[0])
        assert 1 <= float(noticed[1]) < 60

    async def test_p95_is_compared_round_by_round(self):
        windows = [Window([0.02] * 19 + [gap], None, 5) for gap in (0.9, 0.9)]
        slower = [Window([0.022] * 20, 2**20, 7), Window([0.03] * 20, 2**21, 6)]
        row = neighbour_experiments._window_row("", slower, windows)
        assert row[3:] == ["1.10x", "1.10x to 1.50x", "2 MiB", "7 bytes"]

    async def test_queued_bytes(self):
        text = "# TYPE server_client_queued_bytes gauge\nserver_client_queued_bytes 17\nx 1\n"
        assert neighbour_experiments.queued_bytes(text) == 17
        with pytest.raises(ExperimentError, match="does not tell"):
            neighbour_experiments.queued_bytes("x 1\n")
