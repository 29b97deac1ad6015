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
    assert json.loads(await bench.get(f"{url}/beats")) == {"late": [], "waited": []}
    late, waited = [], []
    while len(late) < 20:
        seen = json.loads(await bench.get(f"{url}/beats?switch_ms=0.5"))
        late += seen["late"]
        waited += seen["waited"]
    assert min(late) >= 0  # never early
    assert len(waited) == len(late)
    assert min(waited) >= 0


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
    late = [[0.001] * 99 + [0.009], [0.002] * 99 + [0.007], [0.003] * 100]
    beats = Beats(late, [[0.0], [0.001], [0.0005]], [10, 30, 20])
    assert beats.row(8, 0.5) == [
        "8", "0.5 ms", "2.00 ms", "2.00 ms", "2.00 ms", "9.0 ms", "0.50 ms", "20", "300",
    ]  # fmt: skip


def test_what_is_left_without_the_wait_for_a_core():
    beats = Beats([[3.0, 1.0], [2.0]], [[2.5, 1.5], [0.0]], [1, 2])
    assert beats.rest() == [[0.5, 0.0], [2.0]]
