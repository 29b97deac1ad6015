"""Shared conformance cases, played at the project's own connection loop in a real process.

HTTP/1.1: every case passes, and at its strict value, time-outs included. Event streams: every case
served, unframed and parsed by the client's side, is what browsers make of it.
"""

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from serving import connected

import http1
import sse

HERE = Path(__file__).resolve().parent
CHECKS = HERE.parent / "../shared/checks"
# What the player waits for a time-out; the fixture's deadlines are shorter.
SLOW_S = "8"

pytestmark = pytest.mark.skipif(
    not CHECKS.exists(), reason=f"the shared checks are absent: no folder {CHECKS}"
)


@pytest_asyncio.fixture
async def port() -> AsyncIterator[int]:
    """The port of the conformance server."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-X", "dev", "-W", "error", str(HERE / "conformance_server.py"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(20):
        port = int(await process.stdout.readline())
    yield port
    process.kill()
    _, err = await process.communicate()
    assert err == b""


async def test_http1_cases(port: int, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    player = await asyncio.create_subprocess_exec(
        sys.executable, str(CHECKS / "http1_run.py"), f"127.0.0.1:{port}",
        "--strict", "--slow", SLOW_S, "--json", str(results),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(120):
        out, _ = await player.communicate()
    assert player.returncode == 0, out.decode()
    played = json.loads(results.read_bytes())
    assert len(played) >= 147
    wrong = [case for case in played if not (case["ok"] and case["strict"])]
    assert not wrong, out.decode()


def load_sse_cases() -> list[dict[str, Any]]:
    return json.loads((CHECKS / "sse_cases.json").read_bytes())


@pytest.mark.parametrize("bytewise", [False, True])
async def test_sse_cases(port: int, bytewise: bool) -> None:
    query = "?bytewise=1" if bytewise else ""
    async with connected(port) as peer:
        for number, case in enumerate(load_sse_cases()):
            peer.request("GET", f"/sse-cases/{number}{query}")
            head, _ = await peer.head()
            assert head.status == 200
            parser = sse.Parser()
            events: list[sse.Event] = []
            while isinstance(part := await peer.event(), http1.Content):
                events += parser.feed(part.data)
            content, peer.content = peer.content, b""
            assert content == base64.b64decode(case["input_base64"]), case["name"]
            told = [
                {"type": e.type, "data": e.data, "lastEventId": e.last_event_id} for e in events
            ]
            assert told == case["events"], case["name"]
            assert parser.retry in (case["retry"], case.get("retry_alt", case["retry"]))
            assert parser.last_event_id == case["final_id"]
