"""Chromium against the server: fetch, EventSource and WebSocket, from its own page and from others.

Each test is a few lines of JavaScript, and looks at what they return. A page on another port is
another origin, though the same site.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fakes import FakeModel
from serving import Running, eventually, serving

from engine import Engine
from simulated import SimulatedEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")

SEEDED = {"prompt": "One, two,", "max_tokens": 12, "seed": 7}
ENDLESS = {"prompt": "a", "max_tokens": 1_000_000}

SCRIPT = """
const type = {"content-type": "application/json"};
const post = (path, body, options) => fetch(path, {
  method: "POST", headers: type, body: JSON.stringify(body), ...options});
const opened = (target) => new Promise((resolve, reject) => {
  target.onopen = () => resolve(target); target.onerror = reject; });
const until = async (condition) => {
  while (!condition()) await new Promise(resolve => setTimeout(resolve, 5)); };
async function read(response, onpiece = () => {}) {
  // What every page that streams does: one decoder, cut at blank lines, until [DONE].
  const decoder = new TextDecoder(), reader = response.body.getReader();
  let buffer = "", text = "", reads = 0, done = false;
  for (;;) {
    const {value, done: end} = await reader.read();
    if (end) return {text, reads, done};
    reads += 1;
    buffer += decoder.decode(value, {stream: true});
    const blocks = buffer.split("\\n\\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      if (block === "data: [DONE]") done = true;
      else if (block.startsWith("data: ")) text += JSON.parse(block.slice(6)).text;
    }
    onpiece(text);
  }
}
(async () => { %s })().catch(error => ({failed: String(error)}));
"""


class Browser:
    """A tab with a document of this server that has no script and no policy of its own."""

    def __init__(self, chromium: Any, running: Running) -> None:
        self.chromium = chromium
        self.origin = f"http://127.0.0.1:{running.port}"

    @asynccontextmanager
    async def page(self) -> AsyncIterator[Any]:
        context = await self.chromium.new_context()
        try:
            page = await context.new_page()
            await page.goto(self.origin + "/health")
            yield page
        finally:
            await context.close()

    async def run(self, script: str) -> Any:
        """What the script returns."""
        async with self.page() as page, asyncio.timeout(30):
            return await page.evaluate(SCRIPT % script)


def engine() -> SimulatedEngine:
    return SimulatedEngine(delay_ms=5, jitter_ms=0)


async def whole_text(running: Running) -> str:
    return (await running.ask("POST", "/complete", SEEDED)).json()["text"]


def started(running: Running) -> int:
    """How many replies were begun."""
    return len(running.server.entries)


class TestFetch:
    async def test_stream(self, chromium: Any) -> None:
        script = f"""
            const response = await post("/stream", {json.dumps(SEEDED)});
            return {{...await read(response), coding: response.headers.get("content-encoding")}};"""
        async with serving(SimulatedEngine(delay_ms=30)) as running:
            told = await Browser(chromium, running).run(script)
            assert told.pop("reads") > 1  # as pieces are made, not all at the end
            assert told == {"text": await whole_text(running), "done": True, "coding": None}

    async def test_any_text(self, chromium: Any) -> None:
        awkward = "a\x0b\x1c\x85\u2028\u2029\r\n\rb é 你 \U0001f600 </script>"
        data = [*awkward.encode(), 256]
        model = FakeModel(script=lambda history: data[len(history) - 1])
        script = 'return read(await post("/stream", {prompt: "x"}));'
        async with serving(Engine(model)) as running:
            assert (await Browser(chromium, running).run(script))["text"] == awkward

    async def test_stop_button(self, chromium: Any) -> None:
        """Field report 158, as far as it is the server's: `abort()` frees the row."""
        script = f"""
            const control = new AbortController();
            const options = {{signal: control.signal}};
            const response = await post("/stream", {json.dumps(ENDLESS)}, options);
            return read(response, text => {{ if (text.length > 20) control.abort(); }})
              .catch(error => error.name);"""
        async with serving(engine()) as running:
            assert await Browser(chromium, running).run(script) == "AbortError"
            await eventually(lambda: running.server.engine.running == 0)
            assert running.server.entries[0].client_left

    async def test_closed_tab(self, chromium: Any) -> None:
        script = f'return read(await post("/stream", {json.dumps(ENDLESS)}));'
        async with serving(engine()) as running:
            async with Browser(chromium, running).page() as page:
                await page.evaluate("() => {" + SCRIPT % script + "}")
                await eventually(lambda: running.server.engine.running == 1, 20)
            await eventually(lambda: running.server.engine.running == 0)

    async def test_a_cut_is_an_error(self, chromium: Any) -> None:
        body = {**SEEDED, "truncate_after": 3}
        script = f'return read(await post("/stream", {json.dumps(body)}));'
        async with serving(engine()) as running:
            assert "TypeError" in (await Browser(chromium, running).run(script))["failed"]


class TestEventSource:
    QUERY = "prompt=One,+two,&max_tokens=12&seed=7"

    async def test_named_events(self, chromium: Any) -> None:
        script = f"""
            const source = new EventSource("/stream?events=named&{self.QUERY}");
            let text = "";
            source.addEventListener("token", event => text += JSON.parse(event.data).text);
            const done = await new Promise(resolve => source.addEventListener("done", resolve));
            source.close();
            return {{text, reason: JSON.parse(done.data).finish_reason}};"""
        async with serving(engine()) as running:
            told = await Browser(chromium, running).run(script)
            assert started(running) == 1
            assert told == {"text": await whole_text(running), "reason": "length"}

    async def test_left_alone(self, chromium: Any) -> None:
        """Field report 35: it reconnects after the end, is told 204, and gives up."""
        script = f"""
            const source = new EventSource("/stream?{self.QUERY}");
            const told = [];
            source.onmessage = event => told.push(event.data);
            await until(() => source.readyState === EventSource.CLOSED);
            return told;"""
        async with serving(engine()) as running:
            told = await Browser(chromium, running).run(script)
            assert told.pop() == "[DONE]"
            assert len(told) == 12
            assert started(running) == 1

    async def test_cut_off(self, chromium: Any) -> None:
        """Field report 37: it goes on where it was, each piece once."""
        script = f"""
            const source = new EventSource("/stream?resume=true&truncate_after=5&{self.QUERY}");
            let text = "", errors = 0;
            source.onerror = () => errors += 1;
            const done = new Promise(resolve => source.onmessage = event =>
              event.data === "[DONE]" ? resolve() : text += JSON.parse(event.data).text);
            await done;
            source.close();
            return {{text, errors}};"""
        async with serving(engine()) as running:
            told = await Browser(chromium, running).run(script)
            assert started(running) == 1
            assert told == {"text": await whole_text(running), "errors": 1}

    async def test_refused(self, chromium: Any) -> None:
        """A 400 is final: the browser does not try again."""
        script = """
            const source = new EventSource("/stream?prompt=");
            await new Promise(resolve => source.onerror = resolve);
            return source.readyState;"""
        async with serving(engine()) as running:
            assert await Browser(chromium, running).run(script) == 2


class TestWebSocket:
    async def test_reply(self, chromium: Any) -> None:
        script = f"""
            const socket = await opened(new WebSocket("ws://" + location.host + "/ws"));
            const told = [];
            socket.onmessage = event => told.push(JSON.parse(event.data));
            const closed = new Promise(resolve => socket.onclose = resolve);
            socket.send('{json.dumps(SEEDED)}');
            const {{code, wasClean}} = await closed;
            return {{told, code, wasClean, extensions: socket.extensions}};"""
        async with serving(engine()) as running:
            told = await Browser(chromium, running).run(script)
            assert (told["code"], told["wasClean"], told["extensions"]) == (1000, True, "")
            assert told["told"].pop()["done"] is True
            assert "".join(m["text"] for m in told["told"]) == await whole_text(running)

    async def test_stop(self, chromium: Any) -> None:
        script = f"""
            const socket = await opened(new WebSocket("ws://" + location.host + "/ws"));
            let count = 0, last;
            socket.onmessage = event => {{
              last = JSON.parse(event.data);
              if (++count === 3) socket.send('{{"stop": true}}'); }};
            const closed = new Promise(resolve => socket.onclose = resolve);
            socket.send('{json.dumps(ENDLESS)}');
            return {{code: (await closed).code, last}};"""
        async with serving(engine()) as running:
            told = await Browser(chromium, running).run(script)
            assert told["code"] == 1000
            assert told["last"]["finish_reason"] == "cancelled"

    async def test_closed_in_the_middle(self, chromium: Any) -> None:
        script = f"""
            const socket = await opened(new WebSocket("ws://" + location.host + "/ws"));
            const closed = new Promise(resolve => socket.onclose = resolve);
            socket.onmessage = () => socket.close(4001, "enough");
            socket.send('{json.dumps(ENDLESS)}');
            const {{code, wasClean}} = await closed;
            return [code, wasClean];"""
        async with serving(engine()) as running:
            assert await Browser(chromium, running).run(script) == [4001, True]
            await eventually(lambda: running.server.engine.running == 0)


class TestOtherOrigins:
    """Field reports 25 and 65. The page is served on one port; the model's server has another."""

    @asynccontextmanager
    async def two(self, chromium: Any, allowed: bool) -> AsyncIterator[tuple[Browser, Running]]:
        async with serving(engine()) as host:
            browser = Browser(chromium, host)
            origins = (browser.origin,) if allowed else ()
            async with serving(engine(), origins=origins) as running:
                yield browser, running

    async def test_allowed(self, chromium: Any) -> None:
        """With a preflight, an answer, and errors that can be read."""
        script = f"""
            const target = "%s", headers = {{...type, "x-stainless-retry-count": "0"}};
            const ask = (path, body) => post(target + path, body, {{headers}});
            const answer = await read(await ask("/stream", {json.dumps(SEEDED)}));
            const statuses = [];
            for (const path of ["/stream", "/nope"])
              statuses.push((await ask(path, {{prompt: ""}})).status);
            const socket = await opened(new WebSocket(target.replace("http", "ws") + "/ws"));
            socket.close();
            return {{text: answer.text, statuses}};"""
        async with self.two(chromium, allowed=True) as (browser, running):
            told = await browser.run(script % f"http://127.0.0.1:{running.port}")
            assert told == {"text": await whole_text(running), "statuses": [400, 404]}

    async def test_refused(self, chromium: Any) -> None:
        """Whatever a page elsewhere tries, it reads nothing and starts nothing."""
        script = """
            const target = "%s", failed = [];
            const note = name => () => failed.push(name);
            const body = '{"prompt": "a"}', query = "prompt=a";
            await fetch(target + "/stream", {method: "POST", body}).catch(note("fetch"));
            await post(target + "/complete", {prompt: "a"}).catch(note("preflight"));
            await fetch(`${target}/stream?${query}`).catch(note("get"));
            await fetch(`${target}/log`).catch(note("log"));
            await fetch(target + "/complete", {method: "POST", body, mode: "no-cors"});
            await fetch(`${target}/complete?${query}`, {mode: "no-cors"});
            await opened(new EventSource(`${target}/stream?${query}`)).catch(note("events"));
            await opened(new WebSocket(target.replace("http", "ws") + "/ws")).catch(note("socket"));
            for (const [tag, name] of [["img", "src"], ["script", "src"], ["iframe", "src"]]) {
              const element = document.createElement(tag);
              await new Promise(resolve => {
                element.onload = element.onerror = resolve;
                element[name] = `${target}/complete?${query}`;
                document.documentElement.append(element);
              });
            }
            return failed;"""
        async with self.two(chromium, allowed=False) as (browser, running):
            told = await browser.run(script % f"http://127.0.0.1:{running.port}")
            assert told == ["fetch", "preflight", "get", "log", "events", "socket"]
            assert started(running) == 0
