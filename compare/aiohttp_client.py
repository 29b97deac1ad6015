"""A measuring client with aiohttp, as the tutorials of the field have it.

    pip install -r requirements-compare.txt
    python compare/with_fastapi.py --port 8770
    python compare/aiohttp_client.py http://127.0.0.1:8770 -n 20

Asks for the same replies buffered and streamed, in turn, and prints when the first and the last
text came. It dates a line when aiohttp hands it over; `client.py` dates the read that brought it.
"""

import argparse
import asyncio
import json
import math
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

Dates = tuple[float, float]  # of the first text and of the last, in ms since the request


async def stream(session: aiohttp.ClientSession, url: str, ask: dict[str, Any]) -> Dates:
    """Ask for a stream. ValueError when it breaks off."""
    began = time.perf_counter()
    dates: list[float] = []
    async with session.post(f"{url}/stream", json=ask) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"event: error"):
                raise ValueError("the reply failed")
            if line.startswith(b"data: [DONE]"):
                return dates[0], dates[-1]
            if line.startswith(b"data: ") and json.loads(line[6:]).get("text"):
                dates.append((time.perf_counter() - began) * 1000)
    raise ValueError("the stream ended without its end marker")


async def complete(session: aiohttp.ClientSession, url: str, ask: dict[str, Any]) -> Dates:
    """Ask for a buffered reply: its first text comes with its last."""
    began = time.perf_counter()
    async with session.post(f"{url}/complete", json=ask) as response:
        response.raise_for_status()
        await response.json()
        date = (time.perf_counter() - began) * 1000
    return date, date


async def measure(url: str, count: int, max_tokens: int) -> dict[str, list[Dates]]:
    """Ask `count` times each way, in turn."""
    found: dict[str, list[Dates]] = {"complete": [], "stream": []}
    async with aiohttp.ClientSession() as session:
        for index in range(count):
            ask = {"prompt": "Once upon a time", "max_tokens": max_tokens, "seed": index}
            found["complete"].append(await complete(session, url, ask))
            found["stream"].append(await stream(session, url, ask))
    return found


def rank(values: Sequence[float], percent: int) -> float:
    """Return the nearest-rank percentile."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description="Measure one of the servers here.")
    parser.add_argument("url")
    parser.add_argument("-n", type=int, default=20, help="replies each way (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=120, help="words each (%(default)s)")
    args = parser.parse_args()
    for way, pairs in asyncio.run(measure(args.url, args.n, args.max_tokens)).items():
        first, last = zip(*pairs, strict=True)
        print(
            f"{way:9} first text {rank(first, 50):,.1f} ms (p95 {rank(first, 95):,.1f}),"
            f" all {rank(last, 50):,.1f} ms (p95 {rank(last, 95):,.1f}), n = {args.n}"
        )


if __name__ == "__main__":
    main()
