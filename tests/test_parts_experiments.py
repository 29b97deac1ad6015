"""The parts beside other libraries: that both do the same work, and what is said without them."""

import importlib.util
from typing import Any

import pytest
from require import require

for library in ("httpx_sse", "openai", "h11", "websockets", "tokenizers", "tqdm"):
    require(library)
from benches import FastBench, cells  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

import parts_experiments  # noqa: E402
from bench import ExperimentError  # noqa: E402


class BytesModel:
    """A model's tokenizer, a byte a token."""

    name = "bytes"

    def __init__(self) -> None:
        alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        self._tokenizer = self
        self._marked = Tokenizer(models.BPE(alphabet, []))
        self._marked.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._marked.decoder = decoders.ByteLevel()

    def encode(self, text: str) -> list[int]:
        return self._marked.encode(text).ids

    def text(self, ids: list[int]) -> str:
        return self._marked.decode(ids)


class PartsBench(FastBench):
    async def with_model(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(BytesModel(), *args, **kwargs)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROUNDS", 1), ("EVENTS", 40), ("REQUESTS", 2), ("MESSAGES", 3)):
        monkeypatch.setattr(parts_experiments, name, value)
    monkeypatch.setattr(parts_experiments, "TOKENS", (20, 30))


@pytest.mark.usefixtures("quick")
async def test_every_part_beside_its_library() -> None:
    async with PartsBench() as bench:
        finding = await parts_experiments.parts(bench)
    made = cells(finding, "part", "beside", "n")
    assert len(set(made)) == len(made) == 23
    assert {n for part, _, n in made if "events" in part} == {"40"}
    assert [n for part, _, n in made if "events" not in part] == [
        "2",
        "3",
        "3",
        "1",
        "1",
        "20",
        "30",
    ]
    assert all(row[4].endswith("x") for row in finding.rows)


@pytest.mark.usefixtures("quick")
async def test_what_does_not_do_the_same_work_is_no_comparison() -> None:
    part = parts_experiments.Part("a part", "another", lambda: 1, lambda: 2)
    with pytest.raises(RuntimeError, match="not the same number"):
        part.row()


async def test_without_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "h11" else name)
    async with PartsBench() as bench:
        with pytest.raises(ExperimentError, match="parts needs h11"):
            await parts_experiments.parts(bench)
