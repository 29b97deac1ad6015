"""Many at once on the real model: the same text in company, and a storm that leaves no trace."""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from serving import Peer, Running, eventually, serving

import proxy
from engine import Engine
from generation import Generation, SamplingParams

pytestmark = pytest.mark.model

SUBJECTS = (
    "The sea",
    "A train left",
    "In the winter of",
    "Bread is",
    "Once upon a time",
    "She said",
)
# The whole storm is 500: STORM=500 python -m pytest tests/test_load.py
STORM = int(os.environ.get("STORM", 120))


async def collect(generation: Generation) -> str:
    return "".join([piece async for piece in generation])


def mixed(number: int) -> tuple[str, SamplingParams]:
    """A prompt of one to some two hundred tokens, and its own way of sampling."""
    draw = random.Random(number)
    prompt = " ".join(draw.choices(SUBJECTS, k=draw.choice((1, 3, 20, 60))))
    temperature = draw.choice((0, 0.7, 1.0))
    return prompt, SamplingParams(draw.randrange(4, 12), temperature, top_p=0.95, seed=number)


async def test_thirty_two_in_company_say_what_they_say_alone(real_model: Any) -> None:
    """With a constant number of rows in every step no request can change another's text.

    Every fourth is asked alone, too: for all of them it takes a minute more.
    """
    real_model.fixed = True
    engine = Engine(real_model, prefill_chunk=64)
    engine.start()
    try:
        asked = [mixed(number) for number in range(32)]
        together = [engine.submit(prompt, params) for prompt, params in asked]
        texts = await asyncio.gather(*map(collect, together))
        for (prompt, params), text in list(zip(asked, texts, strict=True))[::4]:
            assert await collect(engine.submit(prompt, params)) == text
    finally:
        engine.close()
        real_model.fixed = False


@asynccontextmanager
async def gateway(running: Running) -> AsyncIterator[int]:
    """The project's own proxy in front of a server; its port."""
    settings = proxy.Settings(upstream=("127.0.0.1", running.port))

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await proxy.Connection(reader, writer, settings).run()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()


async def abort(running: Running, number: int, proxy_port: int) -> None:
    """One request, direct or through the proxy, given up at a random moment in a random way."""
    draw = random.Random(number)
    route = draw.choice(("/stream", "/complete"))
    prompt = "word " * draw.choice((1, 10, 200))
    async with running.connect(port=draw.choice((running.port, running.port, proxy_port))) as peer:
        moment = draw.choice(("head", "queue or prefill", "decoding"))
        if moment == "head":
            peer.send(f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Le".encode())
        else:
            peer.request("POST", route, {"prompt": prompt, "max_tokens": 500})
        if moment == "decoding" and route == "/stream":
            # Through the buffering proxy nothing comes for long: leave then, too.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await first_event(peer)
        else:
            await asyncio.sleep(draw.random() * 0.2)
        (peer.close if draw.random() < 0.5 else peer.reset)()


async def first_event(peer: Peer) -> None:
    while b"data:" not in peer.content:
        await peer.event()
    await asyncio.sleep(0)


async def test_an_abort_storm_leaves_no_trace(real_model: Any) -> None:
    engine = Engine(real_model, max_waiting=STORM)
    fresh = {"prompt": "The old bridge", "max_tokens": 12, "seed": 5}
    async with serving(engine) as running, gateway(running) as proxy_port:
        before = (await running.ask("POST", "/complete", fresh)).json()["text"]
        for start in range(0, STORM, 30):
            await asyncio.gather(*(abort(running, n, proxy_port) for n in range(start, start + 30)))
        await eventually(lambda: (engine.running, engine.waiting) == (0, 0), 60)
        await eventually(lambda: not running.server._connections, 60)
        assert all(entry.generation.finish_reason for entry in running.server.entries)
        assert engine.cache_bytes == 0
        assert (await running.ask("POST", "/complete", fresh)).json()["text"] == before
