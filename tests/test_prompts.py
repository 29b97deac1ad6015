"""The paragraphs to continue: twenty, of a known size, each one seamless paragraph."""

import json
import unicodedata
from pathlib import Path

import pytest

ENTRIES = json.loads((Path(__file__).parents[1] / "prompts.json").read_text(encoding="utf-8"))


def test_twenty_on_different_subjects_and_at_least_five_not_english():
    assert len(ENTRIES) == 20
    assert len({entry["subject"] for entry in ENTRIES}) == 20
    assert sum(entry["language"] != "en" for entry in ENTRIES) >= 5


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["subject"])
def test_lengths(entry):
    assert set(entry) == {"subject", "language", "prompt", "human"}
    if entry["language"] == "ja":  # written without spaces, so counted in characters
        assert 100 <= len(entry["prompt"]) <= 140
        assert 220 <= len(entry["human"]) <= 280
    else:
        assert 180 <= len(entry["prompt"]) <= 220
        assert 100 <= len(entry["human"].split()) <= 160


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["subject"])
def test_prompt_and_human_join_into_one_paragraph(entry):
    whole = entry["prompt"] + entry["human"]
    assert entry["prompt"] == entry["prompt"].strip()
    assert entry["human"].startswith(" ") == (entry["language"] != "ja")
    assert whole == " ".join(whole.split())
    assert whole.endswith((".", "。"))
    assert whole == unicodedata.normalize("NFC", whole)
