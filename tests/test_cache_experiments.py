"""The experiment on the cache, with a model of bytes; its formula, exactly."""

import pytest
import pytest_asyncio
from fakes import FakeModel
from require import require

require("tqdm")
from benches import FastBench, cells  # noqa: E402

import cache_experiments  # noqa: E402
from cache_experiments import GIB, KIB, MIB, Shape  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Fast(FakeModel):
    """Looked at as the real one is."""

    def decode(self, rows, ids):
        super().decode(rows, ids)
        return self

    def best(self, index):
        return 0.0, index


class CacheBench(FastBench):
    async def with_model(self, function, *args, **kwargs):
        return function(Fast(context=4096), *args, **kwargs)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench():
    async with CacheBench() as bench:
        yield bench


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(cache_experiments, "STEP_ROWS", (1, 3))
    monkeypatch.setattr(cache_experiments, "STEP_CONTEXTS", (8, 40))
    monkeypatch.setattr(cache_experiments, "CHUNK", 16)


class TestFormula:
    @pytest.mark.parametrize(
        ("shape", "token", "sequence", "fit"),
        [
            (Shape("published", 32, 8, 128, 4096), 128 * KIB, 512 * MIB, 128),
            (Shape("SmolLM2-135M", 30, 3, 64, 2048), 23_040, 45 * MIB, 1456),
            (Shape("Llama 2 7B", 32, 32, 128, 4096), 512 * KIB, 2 * GIB, 32),
        ],
        ids=lambda value: getattr(value, "name", None),
    )
    async def test_bytes(self, shape, token, sequence, fit):
        assert (shape.token, shape.sequence) == (token, sequence)
        assert 64 * GIB // shape.sequence == fit

    async def test_a_step_that_reads_everything_once(self):
        assert cache_experiments.computed_step(1) == pytest.approx(0.008, rel=0.05)
        assert cache_experiments.computed_step(64) == pytest.approx(0.025, rel=0.05)


async def test_kv(bench, monkeypatch):
    monkeypatch.setattr(cache_experiments, "fresh_model", lambda flags: Fast(rows=9, context=1024))
    finding = await cache_experiments.kv(bench)
    assert dict(cells(finding, "model", "published"))["Llama 3 8B"] == (
        "128 KiB, 512 MiB, 128 in 64 GiB"
    )
    assert finding.model == "fake"
    [(header, rows)] = finding.tables
    assert {len(row) for row in rows} == {len(header)}
    assert [row[1:4] for row in rows[2:]] == [
        ["1", "8", "0 MiB"],
        ["3", "8", "0 MiB"],
        ["1", "40", "0 MiB"],
        ["3", "40", "0 MiB"],
    ]
    assert [len(points) for points in finding.figures[0].panels[0].lines.values()] == [2, 2]


class TestSteps:
    async def test_each_step_appends_the_last_token_of_its_length(self):
        model = Fast(rows=4)
        lengths = []
        decode = model.decode

        def noted(rows, ids):
            lengths.append((len(rows), {len(model.cache[row]) + 1 for row in rows}))
            return decode(rows, ids)

        model.decode = noted
        found = cache_experiments.measure_steps(model)
        assert list(found) == [(1, 8), (3, 8), (1, 40), (3, 40)]
        expected = [(n, {length}) for length in (40, 8) for _ in range(7) for n in (1, 3)]
        assert lengths == expected
        assert model.cache == [[]] * 4  # left as it was found: free

    async def test_a_model_of_few_rows_has_fewer_conditions(self):
        assert list(cache_experiments.measure_steps(Fast(rows=2))) == [(1, 8), (1, 40)]


async def test_rows_are_filled_in_chunks():
    model = FakeModel()
    cache_experiments.fill(model, [1, 3], 40)
    assert [len(row) for row in model.cache] == [0, 40, 0, 40]
    assert [len(ids) for _, (_, ids) in model.calls] == [16, 16, 8] * 2
