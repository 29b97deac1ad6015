"""Real gateways: their configurations start, and do to a stream what they are there for."""

import asyncio
import os
import threading
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from fakes import FakeModel
from require import require, require_program
from serving import Running, eventually, serving

import hops
from engine import Engine
from hops import HopError, NotInstalled

require("tqdm")
from benches import FastBench  # noqa: E402

import hop_experiments  # noqa: E402
from bench import ExperimentError  # noqa: E402
from measures import Event, Mode, Reply  # noqa: E402

REQUEST = {"prompt": "a", "max_tokens": 12, "seed": 1}
STREAM = {
    "nginx, as shipped": hops.nginx(),
    "nginx, HTTP/1.1": hops.nginx(*hops.HTTP_1_1),
    "nginx, unbuffered": hops.nginx(*hops.UNBUFFERED, *hops.WITHOUT_FIELD),
    "haproxy": hops.haproxy(),
    "haproxy, no delay": hops.haproxy("option http-no-delay"),
    "caddy": hops.caddy(),
    "apache": hops.apache(),
}
HOLD = {
    "nginx, without the field": hops.nginx(*hops.WITHOUT_FIELD),
    "varnish, whole": hops.varnish(stream=False),
}
# A hop that holds sends nothing, however long the wait: no wait can be too short to pass.
HELD_S = 0.3


def installed(hop: hops.Hop) -> hops.Hop:
    """Skip the test when the program is absent; CI has nginx and haproxy."""
    if hop.program in ("nginx", "haproxy"):
        require_program(hop.program)
    try:
        hop.path  # noqa: B018
    except NotInstalled as absent:
        pytest.skip(str(absent))
    return hop


def stepped() -> tuple[FakeModel, Engine]:
    model = FakeModel(rows=2, context=4096)
    model.step = threading.Semaphore(0)
    return model, Engine(model)


def through(running: Running, hop: hops.Hop):
    return hops.running(installed(hop), f"http://127.0.0.1:{running.port}")


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.mark.parametrize("name", STREAM)
async def test_a_piece_arrives_before_the_next_is_made(name: str) -> None:
    model, engine = stepped()
    async with serving(engine) as running, through(running, STREAM[name]) as url:
        async with running.connect(port=port_of(url)) as peer:
            peer.request("POST", "/stream", REQUEST)
            for count in range(1, 4):
                model.step.release()
                while peer.content.count(b"text") < count:
                    await peer.event()
            assert len(model.calls) <= 4
            model.step.release(100)
            await peer.until(b"[DONE]")


@pytest.mark.parametrize("name", HOLD)
async def test_nothing_arrives_before_the_end(name: str) -> None:
    model, engine = stepped()
    async with serving(engine) as running, through(running, HOLD[name]) as url:
        async with running.connect(port=port_of(url)) as peer:
            peer.request("POST", "/stream", REQUEST)
            model.step.release(3)
            await eventually(lambda: len(model.calls) == 4, 20)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(HELD_S):
                    await peer.until(b"text")
            model.step.release(100)
            await peer.until(b"[DONE]")


async def test_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither processes, the children of the one that was started included, nor files."""
    started = []
    real = asyncio.create_subprocess_exec

    async def remember(*args, **options):
        started.append((await real(*args, **options), options["cwd"]))
        return started[-1][0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", remember)
    async with serving() as running, through(running, hops.nginx()):
        [(process, folder)] = started
        assert os.getsid(process.pid) == process.pid
        assert gone_or_not(folder) == "there"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert gone_or_not(folder) == "gone"


def gone_or_not(folder: str) -> str:
    return "there" if os.path.exists(folder) else "gone"


async def test_a_configuration_that_is_wrong() -> None:
    with pytest.raises(HopError, match="no_such_directive"):
        async with hops.running(installed(hops.nginx("no_such_directive on;")), "http://a:1"):
            pass


async def test_a_program_that_is_not_there() -> None:
    with pytest.raises(NotInstalled, match="gatewayd is not installed"):
        async with hops.running(hops.Hop("gatewayd", (), ""), "http://a:1"):
            pass


def test_names_are_filled_in_whole() -> None:
    names = hops._names("/f", 80, "http://h:1")
    assert hops._filled("UPSTREAM UPSTREAM_PORT PORT XPORT", names) == "h:1 1 80 XPORT"


CI_HAS = ("nginx", "haproxy")


async def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick run through what CI has, and one program that nobody has."""
    for program in CI_HAS:
        require_program(program)
    quick = {"SHORT": 20, "LONG": 40, "ROUNDS": 1, "DELAY_MS": 5, "JITTER_MS": 0}
    for name, value in quick.items():
        monkeypatch.setattr(hop_experiments, name, value)
    paths = [
        replace(path, words=(20, 40))
        for path in hop_experiments.PATHS
        if not path.flags and (not isinstance(path.hop, hops.Hop) or path.hop.program in CI_HAS)
    ]
    paths.append(hop_experiments.Path("gatewayd", hops.Hop("gatewayd", (), "")))
    monkeypatch.setattr(hop_experiments, "PATHS", paths)
    async with FastBench() as bench:
        finding = await hop_experiments.through_hops(bench)
    rows = {row[0]: row for row in finding.rows}
    assert finding.notes[1] == "The same text by every path: yes."
    assert rows.pop("gatewayd")[1:7] == [*["n/a"] * 5, "gatewayd is not installed"]
    assert not any("n/a" in row for row in rows.values())
    first, total = rows["proxy.py, blocks of 8 KiB"][1].split(", ")
    assert first == total


async def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that gives up a silent upstream, before servers with heartbeats and without."""
    require_program("nginx")
    monkeypatch.setattr(hop_experiments, "ROUNDS", 1)
    monkeypatch.setattr(hop_experiments, "DELAY_MS", 1)
    paths = [
        replace(path, flags=("--first-delay-ms=1500", path.flags[1]))
        for path in hop_experiments.PATHS
        if path.flags and path.name.startswith("nginx")
    ]
    monkeypatch.setattr(hop_experiments, "PATHS", paths)
    async with FastBench() as bench:
        finding = await hop_experiments.through_hops(bench)
    cut, whole = (row[6] for row in finding.rows)
    assert cut == "cut"
    assert whole.startswith("head early, text late")


async def test_a_hop_that_breaks_is_no_row() -> None:
    wrong = hop_experiments.Path("x", installed(hops.nginx("no_such_directive on;")))
    async with FastBench() as bench, AsyncExitStack() as stack:
        with pytest.raises(ExperimentError, match=r"x: .*no_such_directive"):
            await hop_experiments._open(stack, bench, wrong)


def a_reply(*dates: float, size: int = 1) -> Reply:
    return Reply("", Mode.SSE, events=[Event(at, "x" * size) for at in dates], end=dates[-1])


def test_the_diagnosis_of_several_replies() -> None:
    steady, burst = [0.02 * at for at in range(1, 40)], [1.0] * 39
    replies = [a_reply(*steady), a_reply(*burst), a_reply(*steady)]
    path = hop_experiments.Path("x", None, words=(1, 2))
    passed = hop_experiments.Passed(path, replies={1: replies, 2: replies[:1]})
    said = "streams well (2 of 3), held until the end (1 of 3); streams well"
    assert hop_experiments._diagnosis(passed) == said
    assert hop_experiments._right(passed) == [True, False, True, True]
    notes = hop_experiments._notes([passed])
    assert "in 3 of 4 replies; not: x." in notes[0]
