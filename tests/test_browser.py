"""Chromium against the server: fetch, EventSource and WebSocket, from its own page and from others.

Each test is a few lines of JavaScript in a page; what they return is posted back to the page's
server. A page on another port is another origin, though the same site.
"""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fakes import FakeModel
from require import require_program
from serving import Running, eventually, serving

from connection import Exchange
from engine import Engine
from simulated import SimulatedEngine

FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --disable-component-update --disable-sync"""
SEEDED = {"prompt": "One, two,", "max_tokens": 12, "seed": 7}
ENDLESS = {"prompt": "a", "max_tokens": 1_000_000}

PAGE = """<!doctype html><meta charset="utf-8"><script>
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
(async () => { %s })()
  .catch(error => ({failed: String(error)}))
  .then(result => post("/result", result ?? null));
</script>"""


class Browser:
    def __init__(self, running: Running) -> None:
        self.results: asyncio.Queue[Any] = asyncio.Queue()
        self.script = ""
        self.origin = f"http://127.0.0.1:{running.port}"
        running.server._routes["/page"] = {"GET": self._page}
        running.server._routes["/result"] = {"POST": self._result}

    async def _page(self, exchange: Exchange) -> None:
        page = PAGE % self.script
        exchange.respond(200, page.encode(), "text/html; charset=utf-8")

    async def _result(self, exchange: Exchange) -> None:
        self.results.put_nowait(json.loads(await exchange.content()))
        exchange.respond_empty(204)

    @asynccontextmanager
    async def page(self, profile: Path, script: str) -> AsyncIterator[None]:
        """Have a browser open a page that runs `script`, for as long as the block lasts."""
        self.script = script
        program = require_program("chromium")
        process = await asyncio.create_subprocess_exec(
            program, *FLAGS.split(), f"--user-data-dir={profile}", self.origin + "/page",
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield
        finally:
            process.terminate()
            async with asyncio.timeout(20):
                await process.wait()

    async def result(self) -> Any:
        async with asyncio.timeout(30):
            return await self.results.get()

    async def run(self, profile: Path, script: str) -> Any:
        """What the script returns."""
        async with self.page(profile, script):
            return await self.result()


def engine() -> SimulatedEngine:
    return SimulatedEngine(delay_ms=5, jitter_ms=0)


async def whole_text(running: Running) -> str:
    return (await running.ask("POST", "/complete", SEEDED)).json()["text"]


def started(running: Running) -> int:
    """How many replies were begun."""
    return len(running.server.entries)


class TestFetch:
    async def test_stream(self, tmp_path: Path) -> None:
        script = f"""
            const response = await post("/stream", {json.dumps(SEEDED)});
            return {{...await read(response), coding: response.headers.get("content-encoding")}};"""
        async with serving(engine()) as running:
            told = await Browser(running).run(tmp_path, script)
            assert told.pop("reads") > 6  # each piece when it is made, not all at the end
            assert told == {"text": await whole_text(running), "done": True, "coding": None}

    async def test_any_text(self, tmp_path: Path) -> None:
        awkward = "a\x0b\x1c\x85\u2028\u2029\r\n\rb é 你 \U0001f600 </script>"
        data = [*awkward.encode(), 256]
        model = FakeModel(script=lambda history: data[len(history) - 1])
        script = 'return read(await post("/stream", {prompt: "x"}));'
        async with serving(Engine(model)) as running:
            assert (await Browser(running).run(tmp_path, script))["text"] == awkward

    async def test_stop_button(self, tmp_path: Path) -> None:
        """Field report 158, as far as it is the server's: `abort()` frees the row."""
        script = f"""
            const control = new AbortController();
            const options = {{signal: control.signal}};
            const response = await post("/stream", {json.dumps(ENDLESS)}, options);
            return read(response, text => {{ if (text.length > 20) control.abort(); }})
              .catch(error => error.name);"""
        async with serving(engine()) as running:
            assert await Browser(running).run(tmp_path, script) == "AbortError"
            await eventually(lambda: running.server.engine.running == 0)
            assert running.server.entries[0].client_left

    async def test_closed_tab(self, tmp_path: Path) -> None:
        script = f'return read(await post("/stream", {json.dumps(ENDLESS)}));'
        async with serving(engine()) as running:
            async with Browser(running).page(tmp_path, script):
                await eventually(lambda: running.server.engine.running == 1, 20)
            await eventually(lambda: running.server.engine.running == 0)

    async def test_a_cut_is_an_error(self, tmp_path: Path) -> None:
        body = {**SEEDED, "truncate_after": 3}
        script = f'return read(await post("/stream", {json.dumps(body)}));'
        async with serving(engine()) as running:
            assert "TypeError" in (await Browser(running).run(tmp_path, script))["failed"]


class TestEventSource:
    QUERY = "prompt=One,+two,&max_tokens=12&seed=7"

    async def test_named_events(self, tmp_path: Path) -> None:
        script = f"""
            const source = new EventSource("/stream?events=named&{self.QUERY}");
            let text = "";
            source.addEventListener("token", event => text += JSON.parse(event.data).text);
            const done = await new Promise(resolve => source.addEventListener("done", resolve));
            source.close();
            return {{text, reason: JSON.parse(done.data).finish_reason}};"""
        async with serving(engine()) as running:
            told = await Browser(running).run(tmp_path, script)
            assert started(running) == 1
            assert told == {"text": await whole_text(running), "reason": "length"}

    async def test_left_alone(self, tmp_path: Path) -> None:
        """Field report 35: it reconnects after the end, is told 204, and gives up."""
        script = f"""
            const source = new EventSource("/stream?{self.QUERY}");
            const told = [];
            source.onmessage = event => told.push(event.data);
            await until(() => source.readyState === EventSource.CLOSED);
            return told;"""
        async with serving(engine()) as running:
            told = await Browser(running).run(tmp_path, script)
            assert told.pop() == "[DONE]"
            assert len(told) == 12
            assert started(running) == 1

    async def test_cut_off(self, tmp_path: Path) -> None:
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
            told = await Browser(running).run(tmp_path, script)
            assert started(running) == 1
            assert told == {"text": await whole_text(running), "errors": 1}

    async def test_refused(self, tmp_path: Path) -> None:
        """A 400 is final: the browser does not try again."""
        script = """
            const source = new EventSource("/stream?prompt=");
            await new Promise(resolve => source.onerror = resolve);
            return source.readyState;"""
        async with serving(engine()) as running:
            assert await Browser(running).run(tmp_path, script) == 2


class TestWebSocket:
    async def test_reply(self, tmp_path: Path) -> None:
        script = f"""
            const socket = await opened(new WebSocket("ws://" + location.host + "/ws"));
            const told = [];
            socket.onmessage = event => told.push(JSON.parse(event.data));
            const closed = new Promise(resolve => socket.onclose = resolve);
            socket.send('{json.dumps(SEEDED)}');
            const {{code, wasClean}} = await closed;
            return {{told, code, wasClean, extensions: socket.extensions}};"""
        async with serving(engine()) as running:
            told = await Browser(running).run(tmp_path, script)
            assert (told["code"], told["wasClean"], told["extensions"]) == (1000, True, "")
            assert told["told"].pop()["done"] is True
            assert "".join(m["text"] for m in told["told"]) == await whole_text(running)

    async def test_stop(self, tmp_path: Path) -> None:
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
            told = await Browser(running).run(tmp_path, script)
            assert told["code"] == 1000
            assert told["last"]["finish_reason"] == "cancelled"

    async def test_closed_in_the_middle(self, tmp_path: Path) -> None:
        script = f"""
            const socket = await opened(new WebSocket("ws://" + location.host + "/ws"));
            const closed = new Promise(resolve => socket.onclose = resolve);
            socket.onmessage = () => socket.close(4001, "enough");
            socket.send('{json.dumps(ENDLESS)}');
            const {{code, wasClean}} = await closed;
            return [code, wasClean];"""
        async with serving(engine()) as running:
            assert await Browser(running).run(tmp_path, script) == [4001, True]
            await eventually(lambda: running.server.engine.running == 0)


class TestOtherOrigins:
    """Field reports 25 and 65. The page is served on one port; the model's server has another."""

    @asynccontextmanager
    async def two(self, allowed: bool) -> AsyncIterator[tuple[Browser, Running]]:
        async with serving(engine()) as host:
            browser = Browser(host)
            origins = (browser.origin,) if allowed else ()
            async with serving(engine(), origins=origins) as running:
                yield browser, running

    async def test_allowed(self, tmp_path: Path) -> None:
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
        async with self.two(allowed=True) as (browser, running):
            told = await browser.run(tmp_path, script % f"http://127.0.0.1:{running.port}")
            assert told == {"text": await whole_text(running), "statuses": [400, 404]}

    async def test_refused(self, tmp_path: Path) -> None:
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
        async with self.two(allowed=False) as (browser, running):
            told = await browser.run(tmp_path, script % f"http://127.0.0.1:{running.port}")
            assert told == ["fetch", "preflight", "get", "log", "events", "socket"]
            assert started(running) == 0
