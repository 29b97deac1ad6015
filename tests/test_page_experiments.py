"""The experiment of the page, in small; and without a browser."""

import pytest
from benches import FastBench
from require import require, require_program

pytest.importorskip("tqdm")

import page_experiments


async def test_page(monkeypatch: pytest.MonkeyPatch) -> None:
    require("playwright.async_api")
    require_program("chromium")
    monkeypatch.setattr(page_experiments, "ROUNDS", 2)
    monkeypatch.setattr(page_experiments, "EVENT_ROUNDS", 1)
    monkeypatch.setattr(page_experiments, "EVENTS", 300)
    async with FastBench() as bench:
        finding = await page_experiments.page(bench)
    assert [row[-1] for row in finding.rows] == ["2", "2", "2", "1"]
    assert all(row[1].endswith("ms") for row in finding.rows)
    # What the browser dated comes after what the server dated, in every reply.
    assert all(float(row[1].split()[0].replace(",", "")) > 0 for row in finding.rows[:3])
    assert finding.notes[1].startswith("Events a second")


async def test_without_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_experiments.shutil, "which", lambda name: None)
    async with FastBench() as bench:
        finding = await page_experiments.page(bench)
    assert finding.rows == []
    assert finding.notes[0].startswith("Not measured")
