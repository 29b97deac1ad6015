"""Start and stop of the real program. Field reports 167 to 170."""

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from fakes import FakeModel
from processes import outcome, start, started
from serving import HOST, eventually, quick, serving
from sockets import open_websocket

import http1
import server
import websocket
from engine import Engine
from options import Options, make_engine
from simulated import SimulatedEngine

ENDLESS = {"prompt": "a", "max_tokens": 1_000_000}
HALF_SENT = b"POST /complete HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"
OTHER_PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def find_python(version: str) -> str:
    """Another interpreter of this machine, from PATH or pyenv; else the test is skipped."""
    candidates = [shutil.which(f"python{version}") or ""]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True)
        versions = Path(root.stdout.strip(), "versions").glob(f"{version}.*/bin/python")
        candidates += map(str, sorted(versions))
    for python in filter(None, candidates):
        done = subprocess.run([python, "-V"], capture_output=True, text=True, check=False)
        if done.stdout.startswith(f"Python {version}."):
            return python
    pytest.skip(f"there is no Python {version} here")


async def stopped_by(number: int, python: str) -> None:
    """Stop a server on which every kind of connection is open."""
    async with (
        started("--delay-ms", "5", python=python) as program,
        AsyncExitStack() as stack,
    ):
        names = ("sse", "named", "old", "body", "ws", "unasked", "idle", "used", "head", "content")
        peers = {name: await stack.enter_async_context(program.connect()) for name in names}
        peers["sse"].request("POST", "/stream", ENDLESS)
        peers["named"].request("POST", "/stream", {**ENDLESS, "events": "named"})
        peers["old"].parser.expect("GET")
        peers["old"].send(b"GET /stream?prompt=a&max_tokens=1000000 HTTP/1.0\r\n\r\n")
        peers["body"].request("POST", "/complete", ENDLESS)
        talking, unasked = [await open_websocket(peers[name]) for name in ("ws", "unasked")]
        talking.say(ENDLESS)
        peers["head"].send(b"GET / HT")
        peers["content"].parser.expect("POST")
        peers["content"].send(HALF_SENT)
        for name in ("sse", "named", "old"):
            await peers[name].until(b"data: ")
        await talking.told()
        while (await peers["used"].ask("GET", "/health")).json()["running"] < 5:
            pass

        program.signal(number)
        for name in ("sse", "named", "old"):  # each told in-band, and ended as HTTP ends
            answer_end = None
            while answer_end is None or isinstance(answer_end, http1.Content):
                answer_end = await peers[name].event()
            assert isinstance(answer_end, http1.End), name
            *_, last = peers[name].content.split(b"\n\n")[:-1]
            assert last.startswith(b"event: error\n"), name
            assert b"shutting down" in last
        assert (await peers["body"].answer()).status == 503
        assert (await peers["content"].answer()).status == 503
        _, error = await talking.reply()
        assert error["error"]["message"] == "the server is shutting down"
        assert await talking.closed() == 1001
        assert await unasked.closed() == 1001
        for name in ("idle", "used", "head"):
            assert await peers[name].closed() == b"", name
        for peer in peers.values():
            peer.close()
        assert await outcome(program.process) == (0, b"", b"")


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    async def test_every_stream_is_told_and_the_exit_is_clean(self, number: int) -> None:
        """Field report 167."""
        await stopped_by(number, sys.executable)

    @pytest.mark.parametrize("version", OTHER_PYTHONS)
    async def test_on_every_python(self, version: str) -> None:
        """Field report 168: from 3.12 on `Server.wait_closed` waits for every connection."""
        if sys.version_info[:2] == tuple(map(int, version.split("."))):
            pytest.skip("the interpreter of the tests above")
        await stopped_by(signal.SIGINT, find_python(version))

    async def test_a_silent_stream_ends_at_once(self) -> None:
        """Field report 169: not with the next heartbeat or word."""
        async with started("--first-delay-ms", "3600000") as program, program.connect() as peer:
            peer.request("POST", "/stream", ENDLESS)
            await peer.head()
            program.signal(signal.SIGINT)
            assert b"shutting down" in (await rest(peer))
            peer.close()
            assert await outcome(program.process) == (0, b"", b"")

    async def test_a_client_that_reads_nothing_does_not_hold_it_up(self) -> None:
        async with started("--delay-ms", "0", "--jitter-ms", "0") as program:
            async with program.connect(receive_buffer=4096) as peer, program.connect() as other:
                peer.request("POST", "/stream", ENDLESS)
                while not (await other.ask("GET", "/log")).json()["requests"]:
                    pass
                program.signal(signal.SIGTERM)
                assert await outcome(program.process) == (0, b"", b"")

    async def test_a_second_signal_ends_it_at_once(self) -> None:
        """While the first one waits for a WebSocket client that does not answer the Close."""
        async with started() as program, program.connect() as peer:
            web = await open_websocket(peer)
            web.say(ENDLESS)
            await web.told()
            program.signal(signal.SIGINT)
            while isinstance(await web.event(), websocket.Message):
                pass
            program.signal(signal.SIGINT)
            code, _, err = await outcome(program.process)
        assert (code, err) == (1, b"")

    async def test_nothing_is_accepted_meanwhile(self) -> None:
        async with started() as program, program.connect() as peer:
            web = await open_websocket(peer)
            web.say(ENDLESS)
            await web.told()
            program.signal(signal.SIGINT)
            while isinstance(await web.event(), websocket.Message):
                pass
            with pytest.raises(ConnectionRefusedError):
                async with program.connect():
                    pass
            peer.close()
            assert (await outcome(program.process))[0] == 0


async def rest(peer: Any) -> bytes:
    while isinstance(await peer.event(), http1.Content):
        pass
    return peer.content


class TestStopping:
    """The same in the test's own process, for what a signal cannot be timed to."""

    async def test_no_reply_begins_once_it_stops(self) -> None:
        engine = SimulatedEngine()
        request = http1.encode_request("POST", "/stream", [HOST], b'{"prompt": "a"}')
        async with serving(engine) as running, running.connect() as peer:
            peer.parser.expect("POST")
            peer.send(request[:-5])
            await eventually(lambda: any(c.exchange for c in running.server._connections))
            running.server.delivery.stopping = True
            peer.send(request[-5:])
            assert (await peer.answer()).status == 503
            assert engine.running == 0

    async def test_where_the_loop_knows_no_signals(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Field report 174: on Windows `add_signal_handler` is not implemented."""

        def unknown(*_: Any) -> None:
            raise NotImplementedError

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "add_signal_handler", unknown)
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            app = server.Server(SimulatedEngine(), Options())
            running = asyncio.create_task(server.run(app, server.bind("127.0.0.1", 0), None))
            printed = ""
            while not printed:
                await asyncio.sleep(0)
                printed = capsys.readouterr().out
            signal.raise_signal(signal.SIGINT)
            async with asyncio.timeout(10):
                await running
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class TestStart:
    """Field report 170."""

    async def test_a_port_in_use(self) -> None:
        async with started() as program:
            # A model that does not exist: the port is asked for before it is looked for.
            code, out, err = await outcome(
                await start("--port", str(program.port), "--model", "/does/not/exist")
            )
        assert (code, out, err.count(b"\n")) == (1, b"", 1)
        assert f"127.0.0.1:{program.port}".encode() in err

    def test_a_port_that_was_taken_while_the_model_loaded(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Two sockets may be bound to one port until one of them listens."""
        with server.bind("127.0.0.1", 0) as other:
            port = other.getsockname()[1]

            def slowly(args: Any) -> Any:
                other.listen()
                return make_engine(args)

            monkeypatch.setattr(sys, "argv", f"server.py --model simulated --port {port}".split())
            monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
            # It is known before the engine has a thread that somebody would have to end.
            monkeypatch.setattr(SimulatedEngine, "start", pytest.fail)
            assert server.main(slowly) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert f"127.0.0.1:{port}" in err

    def test_the_model_is_called_by_its_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        served: list[server.Server] = []

        async def run(made: server.Server, *_: Any) -> None:
            served.append(made)

        monkeypatch.setattr(server, "run", run)
        monkeypatch.setattr(sys, "argv", ["server.py", "--port", "0"])
        monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
        monkeypatch.setattr(server, "gc", MagicMock())
        assert server.main(lambda _: Engine(FakeModel())) == 0
        assert served[0].options.model == FakeModel.name

    async def test_restart_at_once(self) -> None:
        async with started() as program, program.connect() as peer:
            assert (await peer.ask("GET", "/health")).status == 200
            program.signal(signal.SIGINT)  # the server closes first: its end is in TIME-WAIT
            await peer.closed()
            peer.close()
            assert (await outcome(program.process))[0] == 0
        async with started("--port", str(program.port)) as again, again.connect() as peer:
            assert (await peer.ask("GET", "/health")).status == 200

    async def test_ipv6(self) -> None:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
        process = await start("--port", "0", "--host", "::1")
        assert process.stdout is not None
        line = await process.stdout.readline()
        assert line.startswith(b"http://[::1]:")
        process.send_signal(signal.SIGINT)
        assert (await outcome(process))[0] == 0


class TestHeartbeatFlag:
    async def test_none(self) -> None:
        """Field report 28: it can be switched off, and then costs nothing."""
        ticks = 0
        loop = asyncio.get_running_loop()
        engine = SimulatedEngine(first_delay_ms=3_600_000)
        async with serving(engine, settings=quick(heartbeat_s=0, stall_s=0.4)) as running:
            async with running.connect() as peer:
                peer.request("POST", "/stream", ENDLESS)
                await peer.head()
                (connection,) = running.server._connections
                tick = connection.exchange._tick

                def counted() -> None:
                    nonlocal ticks
                    ticks += 1
                    tick()

                connection.exchange._tick = counted
                until = loop.time() + 0.3
                await eventually(lambda: loop.time() > until)
                assert ticks <= 4
                assert peer.content == b""
                assert engine.running == 1
