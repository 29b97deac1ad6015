"""The README's nginx configurations, as they stand there: before copies of this server, and between
it and several engines."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeModel
from require import require_program
from serving import Peer, Running, eventually, serving
from sockets import open_websocket

import hops
from engine import Engine
from simulated import SimulatedEngine
from upstream import UpstreamEngine

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
REQUEST = {"prompt": "a", "max_tokens": 30, "seed": 1}
# To nginx's ip_hash, clients of different networks.
ADDRESSES = [f"127.0.{network}.1" for network in range(1, 9)]


@asynccontextmanager
async def nginx(name: str, servers: Sequence[Running]) -> AsyncIterator[int]:
    """nginx with the README's configuration of this name, in front of two servers; its port."""
    require_program("nginx")
    (found,) = re.findall(rf"(    upstream {name} .*?\n    \}}\n)", README, re.DOTALL)
    ports = iter(server.port for server in servers)
    text = re.sub(r" server [a-z0-9.]+:\d+;", lambda _: f" server 127.0.0.1:{next(ports)};", found)
    text, count = re.subn(r"listen \d+;", "listen 127.0.0.1:PORT;", text)
    assert (count, next(ports, None)) == (1, None)
    async with hops.running(hops.nginx_serving(text), "") as url:
        yield int(url.rpartition(":")[2])


@asynccontextmanager
async def coming_from(address: str, port: int) -> AsyncIterator[Peer]:
    """A client with this address of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()


async def ask(address: str, port: int, method: str, target: str, *body: Any, **fields: str) -> Any:
    async with coming_from(address, port) as peer:
        return await peer.ask(method, target, *body, **fields)


@asynccontextmanager
async def copies(*engines: Any) -> AsyncIterator[tuple[int, list[Running]]]:
    """nginx in front of two copies of this server; its port, and the copies."""
    async with AsyncExitStack() as stack:
        made = engines or [SimulatedEngine(delay_ms=2) for _ in range(2)]
        servers = [await stack.enter_async_context(serving(engine)) for engine in made]
        yield await stack.enter_async_context(nginx("streaming", servers)), servers


class TestCopies:
    async def test_a_reply_is_resumed_where_it_was_made(self) -> None:
        async with copies() as (port, servers):
            whole = await servers[0].ask("POST", "/complete", REQUEST)
            for address in ADDRESSES:
                async with coming_from(address, port) as peer:
                    peer.request("POST", "/stream", {**REQUEST, "resume": True})
                    head, _ = await peer.head()
                    await peer.until(b":3\n")
                id = head.fields.get("reply-id")
                seen = [json.loads(data) for data in re.findall(rb"data: (.*)\n", peer.content)[:3]]
                rest = await ask(address, port, "GET", f"/stream/{id}", Last_Event_ID=f"{id}:3")
                text = "".join(event["text"] for event in seen) + rest.text()
                assert text == whole.json()["text"]
            routes = [[entry.route for entry in server.server.entries] for server in servers]
        assert {"/stream"} == set(routes[1])
        assert len(routes[0]) + len(routes[1]) == 1 + len(ADDRESSES)
        assert len(routes[0]) > 1

    async def test_a_reply_in_the_background(self) -> None:
        async with copies() as (port, _):
            for address in ADDRESSES[:3]:
                body = {"input": "a", "background": True, "max_output_tokens": 100_000}
                made = await ask(address, port, "POST", "/v1/responses", body)
                place = f"/v1/responses/{made.json()['id']}"
                assert (await ask(address, port, "GET", place)).json()["status"] == "in_progress"
                ended = await ask(address, port, "POST", f"{place}/cancel")
                assert ended.json()["status"] == "cancelled"

    async def test_a_websocket(self) -> None:
        async with copies() as (port, _), coming_from(ADDRESSES[0], port) as peer:
            web = await open_websocket(peer)
            web.say(REQUEST)
            text, end = await web.reply()
        assert len(text.split()) == 30
        assert end["finish_reason"] == "length"

    async def test_a_piece_arrives_before_the_next_is_made(self) -> None:
        models = [FakeModel(context=4096) for _ in range(2)]
        for model in models:
            model.step = threading.Semaphore(0)
        async with copies(*map(Engine, models)) as (port, servers):
            async with coming_from(ADDRESSES[0], port) as peer:
                peer.request("POST", "/stream", {**REQUEST, "max_tokens": 2000})
                await peer.head()
                (model,) = [m for m, s in zip(models, servers, strict=True) if s.server.entries]
                for count in range(1, 4):
                    model.step.release()
                    while peer.content.count(b"text") < count:
                        await peer.event()
                assert len(model.calls) <= 4
            (entry,) = [entry for server in servers for entry in server.server.entries]
            await eventually(lambda: entry.client_left, 20)

    async def test_a_copy_that_is_gone(self) -> None:
        """No reply is begun twice: a 502, and then the other copy."""
        async with copies() as (port, servers):
            for address in ADDRESSES:
                assert (await ask(address, port, "POST", "/complete", REQUEST)).status == 200
            before = len(servers[1].server.entries)
            await servers[0].server.stop(goodbye_s=0)
            answers = [await ask(a, port, "POST", "/complete", REQUEST) for a in ADDRESSES]
            made = sum(answer.status == 200 for answer in answers)
            assert len(servers[1].server.entries) == before + made
        assert {answer.status for answer in answers} == {200, 502}


@pytest.mark.parametrize("route", ["/stream", "/v1/messages"])
async def test_engines_behind_it(route: str) -> None:
    """Client, nginx, copies, nginx, engines: the text comes through, and who leaves is gone."""
    asked = {"/stream": REQUEST, "/v1/messages": {
        "messages": [{"role": "user", "content": "a"}], "max_tokens": 30, "seed": 1, "stream": True,
    }}[route]  # fmt: skip
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(serving()) for _ in range(2)]
        behind = await stack.enter_async_context(nginx("engines", engines))
        relays = [UpstreamEngine(f"http://127.0.0.1:{behind}") for _ in range(2)]
        port, _ = await stack.enter_async_context(copies(*relays))
        for address in ADDRESSES:
            reply = await ask(address, port, "POST", route, asked)
            assert reply.status == 200
            assert b"[DONE]" in reply.content or b"message_stop" in reply.content
        async with coming_from(ADDRESSES[0], port) as peer:
            peer.request("POST", route, {**asked, "max_tokens": 100_000})
            await peer.until(b'"text": " ')
            assert sum(engine.server.engine.running for engine in engines) == 1
        await eventually(lambda: not any(engine.server.engine.running for engine in engines))
        made = [len(engine.server.entries) for engine in engines]
    assert sum(made) == len(ADDRESSES) + 1
    assert min(made) > 0
