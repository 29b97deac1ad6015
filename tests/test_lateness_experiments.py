"""The heartbeat of a dated server's event loop, and the experiment that reads it."""

import json

import pytest
from require import require

require("tqdm")
from benches import FastBench, cells  # noqa: E402

import lateness_experiments  # noqa: E402
from lateness_experiments import Beats  # noqa: E402


@pytest.fixture
async def bench():
    async with FastBench() as bench:
        yield bench


async def test_beats_are_counted_from_asking_to_asking(bench):
    url = await bench.dated_server()
    assert json.loads(await bench.get(f"{url}/beats"))["late"] == []
    late = []
    while len(late) < 20:
        late += json.loads(await bench.get(f"{url}/beats?switch_ms=0.5"))["late"]
    assert min(late) >= 0  # never early


async def test_the_table(bench, monkeypatch):
    monkeypatch.setattr(lateness_experiments, "ROUNDS", 1)
    monkeypatch.setattr(lateness_experiments, "WATCH_S", 0.1)
    finding = await lateness_experiments.loop_lateness(bench)
    assert cells(finding, "streams", "switch interval") == [
        ("0", "0.5 ms"),
        ("8", "5 ms"),
        ("8", "0.5 ms"),
        ("8", "0.05 ms"),
    ]
    assert all(int(beats.replace(",", "")) > 0 for (beats,) in cells(finding, "beats"))
    rates = [rate for (rate,) in cells(finding, "tokens/s")]
    assert rates[0] == "n/a"
    assert all(int(rate) > 0 for rate in rates[1:])


def test_percentiles_are_medians_of_the_rounds():
    beats = Beats([[0.001] * 99 + [0.009], [0.002] * 99 + [0.007], [0.003] * 100], [10, 30, 20])
    assert beats.row(8, 0.5) == [
        "8", "0.5 ms", "2.00 ms", "2.00 ms", "2.00 ms", "9.0 ms", "20", "300",
    ]  # fmt: skip
