"""Other people's clients against the server: curl, nc, urllib, httpx, aiohttp, `websockets`.

The browser has `test_browser.py`.
"""

import asyncio
import http.client
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeModel
from require import require, require_program
from serving import Running, eventually, quick, serving

from engine import Engine
from simulated import SimulatedEngine

SEEDED = {"prompt": "One, two,", "max_tokens": 12, "seed": 7}
ENDLESS = {"prompt": "a", "max_tokens": 1_000_000}
AWKWARD = "a\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r\n\rb é 你 \U0001f600"


def url(running: Running, path: str, scheme: str = "http") -> str:
    return f"{scheme}://127.0.0.1:{running.port}{path}"


def awkward() -> Engine:
    """An engine whose model says `AWKWARD` to a prompt of one character."""
    data = AWKWARD.encode()
    return Engine(
        FakeModel(script=lambda history: [*data, 256][len(history) - 1 : len(history)][0])
    )


async def whole_text(running: Running) -> str:
    return (await running.ask("POST", "/complete", SEEDED)).json()["text"]


async def run(*command: str, stdin: bytes | None = None) -> tuple[int | None, bytes]:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(20):
        out, _ = await process.communicate(stdin)
    return process.returncode, out


class TestCurl:
    async def curl(self, *arguments: str, stdin: bytes | None = None) -> tuple[int | None, bytes]:
        program = require_program("curl")
        return await run(program, "-sN", "--noproxy", "*", "--max-time", "15", *arguments,
                         stdin=stdin)  # fmt: skip

    @pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
    async def test_stream(self, version: str) -> None:
        """Field report 9: no chunk sizes in an old client's text."""
        async with serving() as running:
            arguments = ["-d", json.dumps(SEEDED), url(running, "/stream")]
            code, out = await self.curl(version, *arguments)
            text = await whole_text(running)
        assert code == 0
        *pieces, end, rest = out.decode().split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        assert "".join(json.loads(p.removeprefix("data: "))["text"] for p in pieces) == text

    async def test_pieces_arrive_as_they_are_made(self) -> None:
        async with serving() as running:
            program = require_program("curl")
            process = await asyncio.create_subprocess_exec(
                program, "-sN", "--noproxy", "*", "-d", json.dumps({**SEEDED, "stall_after": 3}),
                url(running, "/stream"), stdout=subprocess.PIPE,
            )  # fmt: skip
            assert process.stdout is not None
            async with asyncio.timeout(10):
                for _ in range(3):
                    assert (await process.stdout.readuntil(b"\n\n")).startswith(b"data: {")
            assert running.server.engine.running == 1
            process.kill()
            await process.communicate()
            await eventually(lambda: running.server.engine.running == 0)

    async def test_get(self) -> None:
        async with serving() as running:
            target = url(running, "/complete")
            query = ["--data-urlencode", "prompt=One, two,", "-d", "max_tokens=12", "-d", "seed=7"]
            code, out = await self.curl("-G", *query, target)
            assert (code, json.loads(out)["text"]) == (0, await whole_text(running))

    @pytest.mark.parametrize("expect", [[], ["-H", "Expect: 100-continue"], ["-H", "Expect:"]])
    async def test_too_large(self, tmp_path: Path, expect: list[str]) -> None:
        """Field report 14: curl waits for a 100 with so much; the 413 has to reach it instead."""
        content = tmp_path / "content"
        content.write_bytes(b'{"prompt": "' + b"a" * 2_000_000 + b'"}')
        async with serving() as running:
            code, out = await self.curl(
                *expect, "-w", "\n%{http_code}", "--data-binary", f"@{content}",
                url(running, "/stream"),
            )  # fmt: skip
        body, _, status = out.rpartition(b"\n")
        assert (code, status) == (0, b"413")
        assert "message" in json.loads(body)["error"]

    async def test_waits_for_its_100(self) -> None:
        body = json.dumps({**SEEDED, "prompt": "a " * 200_000}).encode()
        async with serving() as running:
            code, out = await self.curl(
                "-H", "Expect: 100-continue", "--expect100-timeout", "15", "-w", "%{time_total}",
                "-o", "/dev/null", "--data-binary", "@-", url(running, "/complete"), stdin=body,
            )  # fmt: skip
        assert code == 0
        assert float(out) < 10  # it got its 100, and did not wait its own time out

    async def test_exit_codes(self) -> None:
        async with serving() as running:
            code, _ = await self.curl("-f", "-d", "{}", url(running, "/stream"))
            assert code == 22
            fault = json.dumps({**SEEDED, "truncate_after": 3})
            code, out = await self.curl("-d", fault, url(running, "/stream"))
            assert code == 18  # transfer closed with outstanding data
            assert out.count(b"data: ") == 3
            code, _ = await self.curl("--http1.0", "-d", fault, url(running, "/stream"))
            assert code == 56  # connection reset: not what ends a body in HTTP/1.0

    async def test_connections_are_used_again(self) -> None:
        async with serving() as running:
            health = url(running, "/health")
            arguments = ["-d", json.dumps(SEEDED), url(running, "/stream"), "--next", "-sI", health]
            code, out = await self.curl(
                "-w", "%{num_connects}\n", *arguments, "-w", "%{num_connects}"
            )
            assert code == 0
            assert out.splitlines()[-1] == b"0"

    async def test_one_too_many(self) -> None:
        async with serving(max_connections=0) as running:
            body = json.dumps({"prompt": "a" * 500_000})
            for _ in range(5):
                code, out = await self.curl(
                    "-w", "%{http_code}", "-o", "/dev/null", "-d", "@-", url(running, "/stream"),
                    stdin=body.encode(),
                )  # fmt: skip
                assert (code, out) == (0, b"503")

    async def test_websocket_address(self) -> None:
        async with serving() as running:
            code, out = await self.curl("-w", "%{http_code}", url(running, "/ws"))
        assert code == 0
        assert out.endswith(b"426")


async def test_nc_half_closes() -> None:
    """Field report 173: its FIN comes right behind the request."""
    program = require_program("nc")
    body = json.dumps(SEEDED)
    head = f"POST /stream HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    async with serving() as running:
        code, out = await run(program, "-N", "127.0.0.1", str(running.port),
                              stdin=(head + body).encode())  # fmt: skip
    assert code == 0
    assert out.endswith(b"data: [DONE]\n\n")


async def test_the_standard_library() -> None:
    def talk(port: int) -> list[str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        texts = []
        for route in ("/complete", "/stream", "/complete"):  # on one connection
            connection.request("POST", route, json.dumps(SEEDED))
            content = connection.getresponse().read().decode()
            events = [content] if route == "/complete" else content.split("\n\n")[:-2]
            told = (json.loads(event.removeprefix("data: ")) for event in events)
            texts.append("".join(event["text"] for event in told))
        connection.close()
        return texts

    async with serving() as running:
        texts = await asyncio.get_running_loop().run_in_executor(None, talk, running.port)
        assert set(texts) == {await whole_text(running)}


class TestHttpx:
    async def test_lines(self) -> None:
        """Field report 39: httpx cuts lines as `str.splitlines` does."""
        httpx = require("httpx")
        async with serving(awkward()) as running, httpx.AsyncClient(trust_env=False) as client:
            asked = {"method": "POST", "url": url(running, "/stream"), "json": {"prompt": "x"}}
            async with client.stream(**asked) as response:
                lines = [line async for line in response.aiter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        assert "".join(json.loads(line.removeprefix("data: "))["text"] for line in lines) == AWKWARD

    @pytest.mark.parametrize("events", ["plain", "named"])
    async def test_httpx_sse(self, events: str) -> None:
        httpx, httpx_sse = require("httpx"), require("httpx_sse")
        body = {"prompt": "x", "events": events}
        async with (
            serving(awkward()) as running,
            httpx.AsyncClient(trust_env=False) as client,
            httpx_sse.aconnect_sse(client, "POST", url(running, "/stream"), json=body) as source,
        ):
            told = [event async for event in source.aiter_sse()]
        end = told.pop()
        assert end.data == "[DONE]" if events == "plain" else end.event == "done"
        assert "".join(event.json()["text"] for event in told) == AWKWARD

    async def test_leaving(self) -> None:
        httpx = require("httpx")
        async with serving() as running, httpx.AsyncClient(trust_env=False) as client:
            asked = {"method": "POST", "url": url(running, "/stream"), "json": ENDLESS}
            async with client.stream(**asked) as response:
                async for _ in response.aiter_lines():
                    break
            await eventually(lambda: running.server.engine.running == 0)

    async def test_a_hundred_on_few_connections(self) -> None:
        httpx = require("httpx")
        limits = httpx.Limits(max_connections=5)
        async with (
            serving() as running,
            httpx.AsyncClient(trust_env=False, limits=limits) as client,
        ):
            target = url(running, "/complete")
            answers = await asyncio.gather(*(client.post(target, json=SEEDED) for _ in range(100)))
            assert {answer.json()["text"] for answer in answers} == {await whole_text(running)}


class TestAiohttp:
    async def test_stream(self) -> None:
        aiohttp = require("aiohttp")
        async with serving() as running, aiohttp.ClientSession() as session:
            async with session.post(url(running, "/stream"), json=SEEDED) as response:
                assert response.headers["Content-Type"].startswith("text/event-stream")
                lines = [line async for line in response.content if line.strip()]
            assert lines.pop() == b"data: [DONE]\n"
            text = "".join(json.loads(line.removeprefix(b"data: "))["text"] for line in lines)
            assert text == await whole_text(running)

    async def test_a_cut_is_an_error(self) -> None:
        aiohttp = require("aiohttp")
        body = {**SEEDED, "truncate_after": 3}
        async with serving() as running, aiohttp.ClientSession() as session:
            async with session.post(url(running, "/stream"), json=body) as response:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()

    async def test_websocket(self) -> None:
        aiohttp = require("aiohttp")
        async with serving() as running, aiohttp.ClientSession() as session:
            async with session.ws_connect(url(running, "/ws"), compress=15) as web:
                await web.send_json(SEEDED)
                messages = [message.json() async for message in web]
                assert web.close_code == 1000
            assert messages.pop()["done"] is True
            assert "".join(message["text"] for message in messages) == await whole_text(running)


class TestWebsockets:
    """The library that most Python programs use; it offers compression, which is declined."""

    async def connect(self, running: Running, **options: Any) -> Any:
        websockets = require("websockets")
        return await websockets.connect(url(running, "/ws", "ws"), proxy=None, **options)

    async def test_reply(self) -> None:
        async with serving() as running:
            web = await self.connect(running)
            await web.send(json.dumps(SEEDED))
            messages = [json.loads(message) async for message in web]
            assert web.close_code == 1000
            assert messages.pop()["finish_reason"] == "length"
            assert "".join(message["text"] for message in messages) == await whole_text(running)

    async def test_stop_then_ping(self) -> None:
        async with serving() as running:
            web = await self.connect(running)
            await web.send(json.dumps(ENDLESS))
            await web.recv()
            async with asyncio.timeout(10):
                await (await web.ping())
            await web.send('{"stop": true}')
            *_, last = [json.loads(message) async for message in web]
            assert last["finish_reason"] == "cancelled"

    async def test_close_in_the_middle(self) -> None:
        async with serving() as running:
            web = await self.connect(running)
            await web.send(json.dumps(ENDLESS))
            await web.recv()
            await web.close(4000, "enough")
            assert web.close_code == 4000
            await eventually(lambda: running.server.engine.running == 0)
            await eventually(lambda: not running.server._connections)

    async def test_too_large(self) -> None:
        websockets = require("websockets")
        async with serving() as running:
            web = await self.connect(running)
            await web.send("x" * 2_000_000)
            with pytest.raises(websockets.ConnectionClosedError):
                await web.recv()
            assert web.close_code == 1009

    async def test_fragments(self) -> None:
        async with serving() as running:
            web = await self.connect(running)
            await web.send(["{", '"prompt": "a", ', '"max_tokens": 1}'])
            assert "text" in json.loads(await web.recv())
            await web.close()

    async def test_a_foreign_page(self) -> None:
        websockets = require("websockets")
        async with serving() as running:
            with pytest.raises(websockets.InvalidStatus) as refused:
                await self.connect(running, origin="http://evil.example")
            assert refused.value.response.status_code == 403

    async def test_keep_alive_both_ways(self) -> None:
        engine = SimulatedEngine(first_delay_ms=400)
        async with serving(engine, settings=quick(heartbeat_s=0.05, stall_s=0.2)) as running:
            web = await self.connect(running, ping_interval=0.05, ping_timeout=5)
            await web.send(json.dumps(SEEDED))
            *_, last = [json.loads(message) async for message in web]
            assert last["finish_reason"] == "length"
