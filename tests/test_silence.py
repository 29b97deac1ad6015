"""The providers' clients for Python through silences: a heartbeat every 0.2 s, before the reply
and in it. Field reports 27 to 33; those for Node are in `test_node.py`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from beating import HEARTBEATS, PATHS, ROUTES, beating, heartbeat
from fakes import FakeModel
from require import require
from serving import Running, serving

import proxy
from client import Options, ask
from engine import Engine

openai = require("openai")
anthropic = require("anthropic")

AUTO = Options(dialect="auto")
HI = [{"role": "user", "content": "Count."}]


class Way(NamedTuple):
    """A route as its SDK has it: where the method is, what is asked, the text of an event."""

    sdk: Any
    methods: Callable[[Any], Any]
    body: dict[str, Any]
    text: Callable[[Any], str | None]


WAYS = {
    "chat": Way(
        openai,
        lambda sdk: sdk.chat.completions,
        {"messages": HI, "max_tokens": 2},
        lambda chunk: chunk.choices[0].delta.content,
    ),
    "completions": Way(
        openai,
        lambda sdk: sdk.completions,
        {"prompt": "Count.", "max_tokens": 2},
        lambda chunk: chunk.choices[0].text,
    ),
    "responses": Way(
        openai,
        lambda sdk: sdk.responses,
        {"input": "Count.", "max_output_tokens": 2},
        lambda event: event.delta if event.type == "response.output_text.delta" else "",
    ),
    "messages": Way(
        anthropic,
        lambda sdk: sdk.messages,
        {"messages": HI, "max_tokens": 2},
        lambda event: event.delta.text if event.type == "content_block_delta" else "",
    ),
}


class Heard:
    """What came of one call: its text as far as it came, the last event, and what was raised."""

    def __init__(self, route: str, port: int, **fields: Any) -> None:
        self.way = WAYS[route]
        base = f"http://127.0.0.1:{port}" + ("/v1" if self.way.sdk is openai else "")
        self.options = {"base_url": base, "api_key": "none", "max_retries": 0, "timeout": 30}
        self.asked = {**self.way.body, "model": "default", "stream": True, "extra_body": fields}
        self.text = ""
        self.last: Any = None
        self.error: Exception | None = None

    def blocking(self) -> None:
        kind = self.way.sdk.OpenAI if self.way.sdk is openai else self.way.sdk.Anthropic
        try:
            with kind(**self.options) as sdk:
                for event in self.way.methods(sdk).create(**self.asked):
                    self._take(event)
        except Exception as error:
            self.error = error

    async def asynchronous(self) -> None:
        kind = self.way.sdk.AsyncOpenAI if self.way.sdk is openai else self.way.sdk.AsyncAnthropic
        try:
            async with kind(**self.options) as sdk:
                async for event in await self.way.methods(sdk).create(**self.asked):
                    self._take(event)
        except Exception as error:
            self.error = error

    def _take(self, event: Any) -> None:
        self.last = event
        self.text += self.way.text(event) or ""


async def hear(*asked: tuple[str, int], **fields: Any) -> list[tuple[str, Heard]]:
    """Each of these routes at a port by both clients, all at the same time."""
    calls = [(route, Heard(route, port, **fields)) for route, port in asked for _ in range(2)]
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(len(asked)) as pool:
        await asyncio.gather(
            *(call.asynchronous() for _, call in calls[::2]),
            *(loop.run_in_executor(pool, call.blocking) for _, call in calls[1::2]),
        )
    return calls


@asynccontextmanager
async def behind_proxy(running: Running, honor: bool) -> AsyncIterator[int]:
    """The port of a gateway of ours in front of a server."""
    settings = proxy.Settings(("127.0.0.1", running.port), honor=honor)
    gateway = await asyncio.start_server(
        lambda reader, writer: proxy.Connection(reader, writer, settings).run(), "127.0.0.1", 0
    )
    async with gateway:
        yield gateway.sockets[0].getsockname()[1]


async def test_heartbeats_do_no_harm() -> None:
    """Field reports 27 to 31: in every mode, and behind a gateway that buffers or does not."""
    async with AsyncExitStack() as stack:
        servers = {mode: await stack.enter_async_context(beating(mode)) for mode in HEARTBEATS}
        ports = {mode: running.port for mode, running in servers.items()}
        for name, honor in (("honored", True), ("buffered", False)):
            gateway = behind_proxy(servers["comment"], honor)
            ports[name] = await stack.enter_async_context(gateway)
        asked = [(route, port) for port in ports.values() for route in ROUTES]
        calls, *contents = await asyncio.gather(
            hear(*asked), *(raw(servers["off"], route, port) for route, port in asked)
        )
    for route, call in calls:
        assert call.error is None, route
        assert len(call.text.split()) == 2, route
    pairs = [(name, route) for name in ports for route in ROUTES]
    for (name, route), content in zip(pairs, contents, strict=True):
        mode = HEARTBEATS.get(name, HEARTBEATS["comment"])
        assert heartbeat(content) == mode[route], (name, route, content)


async def raw(running: Running, route: str, port: int) -> bytes:
    body = {"model": "default", "stream": True, **WAYS[route].body}
    async with running.connect(port=port) as peer:
        return (await peer.ask("POST", f"/v1/{PATHS[route]}", body)).content


async def test_a_failure_after_heartbeats_is_raised_and_keeps_what_came() -> None:
    """Field report 33."""
    async with beating("comment") as running, beating("event") as other:
        asked = [(route, server.port) for server in (running, other) for route in ROUTES]
        calls = await hear(*asked, fail_after=1)
    for route, call in calls:
        assert len(call.text.split()) == 1, route
        if route == "responses":  # here an error is an event among others
            assert call.error is None
            assert call.last.type == "response.failed"
            assert call.last.response.error.message == "the simulated model failed, as asked"
        else:
            assert isinstance(call.error, (openai.APIError, anthropic.APIError)), route
            assert "failed, as asked" in str(call.error)


async def test_what_is_known_before_the_first_token_is_no_stream() -> None:
    """Field report 32."""

    def refuse(prompt: Any) -> list[int]:
        raise ValueError("no tools here")

    model = FakeModel()
    model.encode = refuse  # type: ignore[method-assign]
    async with serving(Engine(model)) as running:
        calls = await hear(*((route, running.port) for route in ROUTES))
    for route, call in calls:
        assert isinstance(call.error, (openai.BadRequestError, anthropic.BadRequestError)), route
        assert "no tools here" in str(call.error)
        assert call.last is None


async def test_heartbeats_are_no_first_text_to_our_client() -> None:
    """Field report 31."""
    async with beating("comment") as running:
        base = f"http://127.0.0.1:{running.port}/v1"
        replies = await asyncio.gather(
            *(
                ask(f"{base}/{PATHS[route]}", {"stream": True, **WAYS[route].body}, AUTO)
                for route in ROUTES
            )
        )
    for reply in replies:
        assert reply.comments + reply.pings >= 2
        assert len(reply.text.split()) == 2
        assert reply.first_text > 1  # by the engine's schedule
