"""The servers of compare/: the same text as the simulated model's, the same faults, who left."""

import asyncio
import contextlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from processes import STRICT, outcome, started
from require import require, require_program
from serving import connected

import client
import simulated
from client import Options
from measures import Failure

COMPARE = Path(__file__).resolve().parent.parent / "compare"
SCHEDULE = ("--seed", "7", "--delay-ms", "2", "--jitter-ms", "1")

# script, what it needs
SERVERS = {
    "fastapi": ("with_fastapi.py", ("fastapi", "uvicorn")),
    "starlette": ("with_starlette.py", ("starlette", "uvicorn")),
    "aiohttp": ("with_aiohttp.py", ("aiohttp",)),
    "node": ("with_node.mjs", ()),
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Compared:
    name: str
    url: str

    def ask(self, route, options=client.DEFAULT_OPTIONS, **body):
        return client.ask(f"{self.url}/{route}", {"prompt": "One, two,"} | body, options)

    @property
    def port(self):
        return int(self.url.rpartition(":")[2])

    async def running(self):
        """The number that /health tells."""
        async with connected(self.port) as peer:
            return (await peer.ask("GET", "/health")).json()["running"]

    async def becomes(self, running):
        async with asyncio.timeout(20):
            while await self.running() != running:
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def program(*command):
    """A program that prints its URL, for as long as the block lasts."""
    # What it has to say goes to pytest's capture: nobody would read a pipe.
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:[0-9]+", line)
        yield line
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SERVERS)
async def compared(request):
    script, modules = SERVERS[request.param]
    for module in modules:
        require(module)
    interpreter = require_program("node") if script.endswith(".mjs") else sys.executable
    async with program(interpreter, COMPARE / script, "--port", "0", *SCHEDULE) as url:
        yield Compared(request.param, url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ours():
    async with started(*SCHEDULE) as server:
        yield Compared("ours", server.url)


PROMPTS = ("One, two,", "Phở bò 🍜 nóng hổi", " a  b\n\tc ")


class TestSameText:
    @pytest.mark.parametrize("prompt", PROMPTS)
    @pytest.mark.parametrize("route", ["stream", "complete"])
    async def test_as_the_simulated_model(self, compared, ours, route, prompt):
        # The draws of words and of times take turns: with other times the words would be others.
        asked = {"prompt": prompt, "max_tokens": 40, "seed": 11}
        theirs, expected = await compared.ask(route, **asked), await ours.ask(route, **asked)
        assert theirs.failure is None
        assert theirs.text == expected.text
        assert len(theirs.text.split()) == 40

    async def test_without_a_seed_each_reply_is_another(self, compared):
        first, second = await compared.ask("complete"), await compared.ask("complete")
        assert first.failure is second.failure is None
        assert first.text != second.text

    async def test_the_words_are_the_same(self):
        assert json.loads((COMPARE / "words.json").read_text("utf-8")) == simulated.WORDS


class TestFaults:
    @pytest.mark.parametrize("words", [0, 3])
    async def test_a_stream_fails(self, compared, ours, words):
        asked = {"max_tokens": 9, "seed": 5, "fail_after": words}
        theirs, expected = await compared.ask("stream", **asked), await ours.ask("stream", **asked)
        assert theirs.failure is expected.failure is Failure.IN_BAND
        assert theirs.error == expected.error
        assert theirs.text == expected.text

    @pytest.mark.parametrize("words", [0, 3])
    async def test_a_stream_is_cut(self, compared, ours, words):
        asked = {"max_tokens": 9, "seed": 5, "truncate_after": words}
        theirs, expected = await compared.ask("stream", **asked), await ours.ask("stream", **asked)
        if compared.name == "fastapi":  # a matter of luck, as its docstring says
            assert theirs.failure in (Failure.NO_END_MARKER, Failure.TRUNCATED)
            assert expected.text.startswith(theirs.text)
        else:
            assert theirs.failure is Failure.TRUNCATED
            assert theirs.text == expected.text
        await compared.becomes(0)

    async def test_a_buffered_reply_fails(self, compared):
        reply = await compared.ask("complete", fail_after=3)
        assert reply.failure is Failure.STATUS
        assert reply.status == 500

    async def test_a_buffered_reply_is_cut(self, compared):
        reply = await compared.ask("complete", max_tokens=9, truncate_after=3)
        assert reply.failure is Failure.TRUNCATED
        reply = await compared.ask("complete", max_tokens=9, truncate_after=10)
        assert reply.failure is None

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"prompt": " "},
            {"prompt": "x", "max_tokens": 0},
            {"prompt": "x", "max_tokens": "many"},
            {"prompt": "x", "max_token": 9},
            b"[]",
            b"{",
        ],
    )
    @pytest.mark.parametrize("route", ["/stream", "/complete"])
    async def test_what_can_not_be_right_is_refused(self, compared, route, body):
        async with connected(compared.port) as peer:
            answer = await peer.ask("POST", route, body, content_type="application/json")
        assert 400 <= answer.status < 500
        assert await compared.running() == 0


class TestLeaving:
    @pytest.mark.parametrize("leave", ["close", "reset"])
    @pytest.mark.parametrize("route", ["/stream", "/complete"])
    async def test_generation_stops(self, compared, route, leave):
        body = {"prompt": "x", "max_tokens": 1_000_000}
        async with connected(compared.port) as peer:
            peer.request("POST", route, body, content_type="application/json")
            await compared.becomes(1)
            getattr(peer, leave)()
            await compared.becomes(0)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["bare.py", "bare_asyncio.py"])
async def bare(request):
    command = (sys.executable, *STRICT, COMPARE / request.param, "--port=0", "--delay-ms=2")
    async with program(*command) as url:
        yield Compared("bare", url)


class TestBare:
    async def test_as_many_events_as_asked_for(self, bare):
        replies = await asyncio.gather(*(bare.ask("stream", max_tokens=n) for n in (1, 2, 50)))
        assert [reply.failure for reply in replies] == [None] * 3
        assert [reply.text for reply in replies] == [" water" * n for n in (1, 2, 50)]

    async def test_a_client_that_leaves_stops_nobody_else(self, bare):
        staying = asyncio.create_task(bare.ask("stream", max_tokens=100))
        left = await bare.ask("stream", Options(leave_after=2, leave="reset"), max_tokens=100)
        assert left.failure is Failure.CANCELLED
        assert (await staying).failure is None

    async def test_what_is_no_request_is_dropped(self, bare):
        async with connected(bare.port) as peer:
            peer.send(b"GET / HTTP/1.1\r\n\r\n")
            assert await peer.closed() == b""
        assert (await bare.ask("stream", max_tokens=1)).failure is None


async def test_the_aiohttp_client(ours):
    require("aiohttp")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, COMPARE / "aiohttp_client.py", ours.url, "-n", "2", "--max-tokens", "20"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    code, out, told = await outcome(process)
    assert (code, told) == (0, b"")
    found = [
        re.fullmatch(r"(\w+) +first text ([0-9.]+) ms \(.*\), all ([0-9.]+) ms \(.*\), n = 2", line)
        for line in out.decode().splitlines()
    ]
    assert [line[1] for line in found] == ["complete", "stream"]
    # The text of 20 words is all there after the first, whichever way and however slow.
    assert [float(line[2]) == float(line[3]) for line in found] == [True, False]
