"""What the experiments ask for: prompts, sampling; and what came of it: medians, arrivals.

Read next: `experiments.py`.
"""

import json
from collections.abc import Sequence
from typing import Any

import measures
from bench import HERE, ExperimentError
from measures import Reply

TEXTS: list[dict[str, str]] = json.loads((HERE / "prompts.json").read_text(encoding="utf-8"))
ENGLISH = [text for text in TEXTS if text["language"] == "en"]
PROMPTS = [text["prompt"] for text in ENGLISH[:5]]

TOKENS = 100
SAMPLING: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.7, "top_p": 0.9, "seed": 1}


def body(prompt: str, **more: Any) -> dict[str, Any]:
    """Return a request for a reply of `TOKENS` tokens; the same request, the same reply."""
    return {"prompt": prompt, **SAMPLING, **more}


def counting(index: int) -> dict[str, Any]:
    """Return a request for a reply that runs on: a model that counts does not come to an end."""
    numbers = ", ".join(str(index * 7 + number) for number in range(1, 9))
    return {"prompt": f"{numbers},", "max_tokens": 1900, "temperature": 0}


def median(values: Sequence[float | None]) -> float:
    """Return the nearest-rank median; ExperimentError where there is nothing to measure."""
    known = [value for value in values if value is not None]
    found = measures.percentile(known, 50)
    if found is None or len(known) < len(values):
        raise ExperimentError("a reply had no text to measure")
    return found


def arrivals(reply: Reply) -> list[tuple[float, float]]:
    """Return how a reply's text comes: (seconds, characters by then), an event a point."""
    points, characters = [], 0
    for event in reply.events:
        if event.text:
            characters += len(event.text)
            points.append((event.at, float(characters)))
    return points
