"""A real nginx between the server and its clients, as most deployments have one."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from fakes import FakeModel
from require import require_program
from serving import Running, eventually, serving

import client
import hops
from engine import Engine

FILE = 'location /file { default_type application/json; return 200 \'{"text": "from nginx"}\'; }'


@asynccontextmanager
async def nginx(running: Running) -> AsyncIterator[int]:
    """nginx in front of a server, as the README has it; its port."""
    require_program("nginx")
    hop = hops.nginx(*hops.HTTP_1_1)
    # A place of nginx's own, beside the one that is passed on.
    configuration = hop.configuration.replace("location / {", f"{FILE} location / {{")
    hop = replace(hop, configuration=configuration)
    async with hops.running(hop, f"http://127.0.0.1:{running.port}") as url:
        yield int(url.rpartition(":")[2])


def stepped() -> tuple[FakeModel, Engine]:
    model = FakeModel(rows=2, context=4096)
    model.step = threading.Semaphore(0)
    return model, Engine(model)


REQUEST = {"prompt": "a", "max_tokens": 12, "seed": 1}


@pytest.mark.parametrize("route", ["/stream", "/complete"])
@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_who_leaves_nginx_leaves_the_server(route: str, leave: str) -> None:
    model, engine = stepped()
    async with serving(engine) as running, nginx(running) as port:
        async with running.connect(port=port) as peer:
            peer.request("POST", route, {**REQUEST, "max_tokens": 2000})
            await eventually(lambda: len(model.calls) == 1)
            getattr(peer, leave)()
            (entry,) = running.server.entries
            await eventually(lambda: entry.client_left, 20)
        model.step.release(100)
        await eventually(lambda: entry.generation.finish_reason)
        assert entry.generation.completion_tokens == 0


@pytest.mark.parametrize("route", ["stream", "complete", "ws"])
async def test_the_measuring_client_through_nginx(route: str) -> None:
    async with serving() as running, nginx(running) as port:
        direct = await ask(running.port, route)
        through = await ask(port, route)
    assert through.complete
    assert through.text == direct.text
    if route == "ws":
        assert through.received.framing == direct.received.framing


async def ask(port: int, route: str) -> Any:
    return await client.ask(f"http://127.0.0.1:{port}/{route}", REQUEST)


async def test_the_measuring_client_on_an_answer_of_nginx_s_own() -> None:
    """A response that the project had no hand in: its length, its fields, its bytes."""
    async with serving() as running, nginx(running) as port:
        options = client.Options(method="GET", mode=client.Mode.JSON)
        reply = await client.ask(f"http://127.0.0.1:{port}/file/complete", {}, options)
    assert reply.text == "from nginx"
    assert ("Server", "nginx") in [(name, value[:5]) for name, value in reply.fields]
    assert reply.received.payload == len('{"text": "from nginx"}')


async def test_a_half_closed_client_is_nginx_s_to_judge() -> None:
    """nginx takes end-of-file for gone (499) and closes upstream: the stop law holds."""
    model, engine = stepped()
    async with serving(engine) as running, nginx(running) as port:
        async with running.connect(port=port) as peer:
            peer.request("POST", "/stream", {**REQUEST, "max_tokens": 2000})
            await eventually(lambda: len(model.calls) == 1)
            peer.half_close()
            (entry,) = running.server.entries
            await eventually(lambda: entry.client_left, 20)
            await asyncio.sleep(0)
