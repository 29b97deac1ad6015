"""The same over TLS: https, wss, who left, and what is no TLS at all."""

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import outcome, started
from serving import Peer, Running, eventually, quick, serving
from sockets import open_websocket

from client import Failure, Options, ask
from simulated import SimulatedEngine

ENDLESS = {"prompt": "a", "max_tokens": 1_000_000}
SEEDED = {"prompt": "One, two,", "max_tokens": 12, "seed": 7}


@pytest.fixture
def trusting(files: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files[0])


@asynccontextmanager
async def connect(running: Running, context: ssl.SSLContext) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port, ssl=context)
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()


async def test_stream_and_keep_alive(tls: ssl.SSLContext, trusting: ssl.SSLContext) -> None:
    async with serving(tls=tls) as running, connect(running, trusting) as peer:
        whole = (await peer.ask("POST", "/complete", SEEDED)).json()["text"]
        assert (await peer.ask("POST", "/stream", SEEDED)).text() == whole
        assert (await peer.ask("POST", "/complete", b"a" * 2_000_000)).status == 413


async def test_wss(tls: ssl.SSLContext, trusting: ssl.SSLContext) -> None:
    async with serving(tls=tls) as running, connect(running, trusting) as peer:
        web = await open_websocket(peer, Origin="https://test")
        web.say(SEEDED)
        text, done = await web.reply()
        assert text
        assert done["finish_reason"] == "length"
        assert await web.closed() == 1000


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("route", ["/stream", "/complete", "/ws"])
async def test_who_left_is_noticed(
    tls: ssl.SSLContext, trusting: ssl.SSLContext, route: str, leave: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    async with serving(tls=tls) as running:
        async with connect(running, trusting) as peer:
            if route == "/ws":
                (await open_websocket(peer)).say(ENDLESS)
            else:
                peer.request("POST", route, ENDLESS)
            await eventually(lambda: running.server.engine.running)
            getattr(peer, leave)()
            await eventually(lambda: not running.server.engine.running)
        (entry,) = running.server.entries
        assert entry.client_left
        await eventually(lambda: not running.server._connections)
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


async def test_what_is_no_tls(
    tls: ssl.SSLContext, trusting: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tls=tls, settings=quick(head_s=0.2)) as running:
        for raw in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x00", b"\0" * 100, b""):
            async with running.connect() as peer:
                peer.send(raw)
                await peer.closed()  # the handshake is limited in time, too
        async with connect(running, trusting) as peer:
            assert (await peer.ask("GET", "/health")).status == 200
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


async def test_the_measuring_client(tls: ssl.SSLContext) -> None:
    async with serving(tls=tls) as running:
        for scheme, route in (("https", "/stream"), ("https", "/complete"), ("wss", "/ws")):
            url = f"{scheme}://127.0.0.1:{running.port}{route}"
            assert (await ask(url, SEEDED)).failure is Failure.TLS
            assert (await ask(url, SEEDED, insecure=True)).failure is None
        left = await ask(url, ENDLESS, Options(leave_after=2), insecure=True)
        assert left.failure is Failure.CANCELLED
        await eventually(lambda: not running.server.engine.running)


@pytest.mark.parametrize("apart", [True, False], ids=["two files", "one file"])
async def test_the_program(files: tuple[Path, Path], tmp_path: Path, apart: bool) -> None:
    certificate, key = files
    flags: tuple[Any, ...] = ("--cert", certificate, "--key", key)
    if not apart:
        both = tmp_path / "both.pem"
        both.write_bytes(certificate.read_bytes() + key.read_bytes())
        flags = ("--cert", both)
    async with started(*map(str, flags)) as program:
        assert program.url.startswith("https://")
        reply = await ask(program.url + "/stream", SEEDED, insecure=True)
        assert reply.failure is None
        program.signal(signal.SIGINT)
        assert await outcome(program.process) == (0, b"", b"")


async def test_shutdown_tells_a_stream(tls: ssl.SSLContext, trusting: ssl.SSLContext) -> None:
    engine = SimulatedEngine(first_delay_ms=3_600_000)
    async with serving(engine, tls=tls) as running, connect(running, trusting) as peer:
        peer.request("POST", "/stream", ENDLESS)
        await peer.head()
        stopping = asyncio.create_task(running.server.stop(goodbye_s=1))
        await peer.until(b"shutting down")
        await stopping
