"""The page in a real browser: the race, stopping, what breaks, what is shown, and to whom."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import Tab, opened, window
from fakes import EOS, FakeConstraint, FakeModel
from processes import started
from require import require, require_program
from serving import Running, eventually, serving

import proxy
from engine import Engine
from simulated import TICKS_PER_S, SimulatedEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")

LANES = ["JSON, whole", "SSE by fetch", "EventSource", "WebSocket"]
ROUTES = {"/complete", "/stream", "/ws"}
ENDLESS = {"max_tokens": 100_000}
HOSTILE = "<img src=x onerror=alert(1)></script><b>&amp;"


@asynccontextmanager
async def page(
    chromium: Any, engine: Any = None, **context: Any
) -> AsyncIterator[tuple[Tab, Running]]:
    """A server and its page. The simulated engine writes a word in five milliseconds."""
    engine = engine or SimulatedEngine(delay_ms=5, jitter_ms=0)
    options = {"model": "fake"} if isinstance(engine, Engine) else {}
    async with serving(engine, **options) as running:
        async with opened(chromium, running, **context) as tab:
            # The settings ask for a schedule; the tests' is the engine's own, a faster one.
            await tab.do(
                """tokens => {
                  const all = asked;
                  asked = () => {
                    const {delay_ms, first_delay_ms, ...rest} = all();
                    return {...rest, max_tokens: tokens, ...window.extra};
                  };
                  window.extra = {};
                }""",
                1000 if options else 30,
            )
            yield tab, running


async def extra(tab: Tab, fields: dict[str, Any]) -> None:
    """Fields that the next requests have besides those of the settings."""
    await tab.do("fields => { window.extra = fields; }", fields)


async def lane(tab: Tab, index: int) -> dict[str, Any]:
    """How a lane stands, by its run and by what is on the screen."""
    return await tab.do(
        """index => {
          const {run, root, parts} = lanes[index];
          return {state: run.state, words: run.words, text: run.text, id: run.id, note: run.note,
            shown: parts.output.textContent, status: parts.state.textContent,
            stop: !parts.halt.hidden, resume: !parts.resume.hidden, again: !parts.again.hidden,
            tokens: run.tokens, events: run.events, marked: root.dataset.state};
        }""",
        index,
    )


async def ended(tab: Tab, *indexes: int) -> None:
    await tab.do("indexes => Promise.all(indexes.map(index => lanes[index].ended))", indexes)


async def has_text(tab: Tab, *indexes: int) -> None:
    await tab.until("indexes => indexes.every(index => lanes[index].run.text)", indexes)


def saying(text: str, endless: bool = False, rows: int = 4) -> Engine:
    """A model that says this, whatever it is asked: byte by byte, from the prompt's end on."""
    said = text.encode()

    class Saying(FakeModel):
        def prefill(self, row: int, ids: Any) -> Any:
            self.begun = getattr(self, "begun", {})
            self.begun[row] = self.begun.get(row, 0) * bool(self.cache[row]) + len(ids)
            return super().prefill(row, ids)

        def choose(self, logits: Any, index: int, params: Any, history: Any, *rest: Any) -> int:
            if rest[1:] and rest[1] is not None:
                return super().choose(logits, index, params, history, *rest)
            prompt = bytes(i for i in history if i < 256).find(b"\x00")
            at = len(history) - prompt - 1
            return said[at] if at < len(said) else EOS

        def encode(self, prompt: Any) -> list[int]:
            return [*super().encode(prompt), 0]

        def constraint(self, schema: Any) -> FakeConstraint:
            return FakeConstraint({"const": ENTRY})

    return Engine(Saying(rows=rows, context=4096))


ENTRY = {"title": "Fog " + HOSTILE, "weather": "fog", "ships": 12, "lamp_lit": True, "entry": "é😀"}


# --- The race ---


async def test_race(chromium: Any) -> None:
    """Field report 165: one click, one seed; the first text, not the head; and the four dates."""
    async with page(chromium, SimulatedEngine(delay_ms=30)) as (tab, running):
        await tab.page.click("#start")
        await tab.until("byId('verdict').textContent")
        told = [await lane(tab, index) for index in range(4)]
        texts = {one["text"] for one in told}
        assert len(texts) == 1
        assert all(one["shown"] == one["text"] for one in told)
        assert all(one["marked"] == "done" for one in told)
        # Field report 131: what was cut short is kept, and marked.
        assert all(one["status"] == "done: max_tokens" for one in told)
        assert [one["tokens"] for one in told] == [30] * 4
        verdict = await tab.do("byId('verdict').textContent")
        assert verdict.startswith("Streamed, the first words came ")
        assert verdict.endswith("with the same text.")
        log = (await running.ask("GET", "/log")).json()["requests"]
        assert sorted(line["route"] for line in log) == ["/complete", "/stream", "/stream", "/ws"]
        for line in log:
            marks, own = line["page"], line["timings"]
            assert own["first_token"] > 0
            assert 0 < marks["first_byte"] <= marks["first_text"] < marks["first_paint"], line
            assert marks["first_text"] <= marks["last_text"]
        titles = "[...document.querySelectorAll('.track')].map(track => track.title)"
        bars = await tab.do(titles)
        assert len(bars) == 4
        assert all(len(re.findall(r"[0-9] m?s\b", bar)) == 4 for bar in bars), bars
        assert await tab.do("byId('bars').hidden") is False
        # The next race's bars stand beside none of this one's.
        await extra(tab, {"fail_after": 0})
        await tab.do("() => lanes[3].start()")
        await extra(tab, {})
        await tab.do("() => lanes[1].start()")
        assert len(await tab.do(titles)) == 3


async def test_settings_are_what_is_asked_for(chromium: Any) -> None:
    async with serving() as running, opened(chromium, running) as tab:
        assert await tab.do("byId('engines').hidden && byId('proxies').hidden")
        assert not await tab.do("document.querySelector('label.simulated').hidden")
        await tab.page.fill("#prompt", "Ünder & über?")
        for id, value in (("seed", 3), ("tokens", 20), ("first", 100), ("every", 1)):
            await tab.page.fill(f"#{id}", str(value))
        assert await tab.do("document.querySelector('output[for=first]').textContent") == "100"
        await tab.page.click("#start")
        await tab.until("byId('verdict').textContent")
        body = {"prompt": "Ünder & über?", "seed": 3, "max_tokens": 20}
        text = (await running.ask("POST", "/complete", body)).json()["text"]
        assert {one["text"] for one in [await lane(tab, i) for i in range(4)]} == {text}
        for entry in list(running.server.entries)[:4]:
            assert entry.generation.timings.first_token >= 0.1 - 0.5 / TICKS_PER_S
            assert (
                entry.generation.timings.last_token < 0.1 + 33 * 19 / 1000
            )  # not the engine's own


async def test_a_model_and_its_stand_in(chromium: Any) -> None:
    async with (
        serving(saying("Said by the model."), model="fake") as running,
        opened(chromium, running) as tab,
    ):
        assert not await tab.do("byId('engines').hidden")
        assert await tab.do("document.querySelector('label.simulated').hidden")
        await tab.page.click("#start")
        await tab.until("byId('verdict').textContent")
        assert (await lane(tab, 1))["text"] == "Said by the model."
        await tab.page.select_option("#engine", "simulated")
        assert not await tab.do("document.querySelector('label.simulated').hidden")
        await tab.page.fill("#tokens", "10")
        await tab.page.fill("#every", "1")
        await tab.page.click("#start")
        await tab.until("byId('verdict').textContent")
        told = [await lane(tab, index) for index in range(4)]
        assert {len(one["text"].split()) for one in told} == {10}
        assert len({one["text"] for one in told}) == 1


@pytest.mark.parametrize("honor", [False, True])
async def test_through_a_proxy(chromium: Any, honor: bool) -> None:
    """A buffering gateway holds both event streams back, and the verdict says so."""
    tasks = []
    target: list[int] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        settings = proxy.Settings(("127.0.0.1", target[0]), honor)
        tasks.append(asyncio.create_task(proxy.Connection(reader, writer, settings).run()))

    gateway = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{gateway.sockets[0].getsockname()[1]}"
    flags = ("--page-proxy", url, "--first-delay-ms", "100")
    async with gateway, started(*flags) as program:
        target.append(program.port)
        async with opened(chromium, program) as tab:
            await tab.page.fill("#tokens", "20")
            await tab.page.check("#through")
            await tab.page.click("#start")
            await tab.until("byId('verdict').textContent")
            told = [await lane(tab, index) for index in range(4)]
            assert len({one["text"] for one in told}) == 1
            assert {one["state"] for one in told} == {"done"}
            verdict = await tab.do("byId('verdict').textContent")
            assert ("held back SSE by fetch and EventSource" in verdict) == (not honor)
            assert all(a.startswith((tab.origin, url, "ws" + url[4:])) for a in tab.addresses)
            sent = [a for a in tab.addresses if "/stream" in a or "/complete" in a or "/ws" in a]
            assert len(sent) == 4
            assert all(url[4:] in a for a in sent)
            tab.addresses.clear()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_with_a_key(chromium: Any) -> None:
    """It goes into headers only; what can't carry it says so, and nothing is left running."""
    async with (
        serving(SimulatedEngine(delay_ms=1, jitter_ms=0), api_keys=("s3cret",)) as running,
        opened(chromium, running) as tab,
    ):
        for id, value in (("tokens", 20), ("first", 0), ("every", 1)):
            await tab.page.fill(f"#{id}", str(value))
        assert await tab.do("byId('key').type") == "password"
        for key in ("", "wrong", "wröng 😀"):
            await tab.page.fill("#key", key)
            await tab.page.click("#start")
            await tab.until("byId('verdict').textContent.startsWith('No verdict')")
            told = [await lane(tab, index) for index in range(4)]
            assert (
                told[0]["status"] == told[1]["status"] == "failed: 401: a valid API key is needed"
            )
            assert "an EventSource can't send the API key" in told[2]["status"]
            assert "a WebSocket can't send the API key" in told[3]["status"]
        assert len(running.server.entries) == 0
        await tab.page.fill("#key", "s3cret")
        await tab.page.click("#start")
        await tab.until("byId('verdict').textContent.startsWith('Streamed')")
        assert "Without EventSource, WebSocket." in await tab.do("byId('verdict').textContent")
        assert [entry.page["first_text"] > 0 for entry in running.server.entries] == [True, True]
        await tab.page.fill("#every", "200")
        await tab.do("() => { chat.start(); }")
        await has_text(tab, 4)
        await tab.do("() => chat.run.stop()")
        await ended(tab, 4)
        assert (await lane(tab, 4))["state"] == "stopped"
        await eventually(lambda: running.server.engine.running == 0)
        assert not any("s3cret" in address for address in tab.addresses)
        assert await tab.do("[document.cookie, localStorage.length, sessionStorage.length]") == [
            "", 0, 0
        ]  # fmt: skip
        await tab.do("() => { lanes[1].start(); }")
        await has_text(tab, 1)
        await tab.page.reload()
        await eventually(lambda: running.server.engine.running == 0)
        assert await tab.do("ready.then(() => byId('key').value)") == ""


# --- Stopping: field report 158 ---


@pytest.mark.parametrize("index", range(5), ids=[*LANES, "Markdown"])
async def test_stop(chromium: Any, index: int) -> None:
    """Before the first text, in the middle, and after the end; then start works again."""
    async with page(chromium) as (tab, running):
        engine = running.server.engine

        async def start() -> None:
            await tab.do("index => { lanes[index].start(); }", index)
            await tab.until("index => !lanes[index].parts.halt.hidden", index)

        async def stop() -> dict[str, Any]:
            await tab.do("index => lanes[index].parts.halt.click()", index)
            await ended(tab, index)
            await eventually(lambda: engine.running == 0)
            return await lane(tab, index)

        await extra(tab, {**ENDLESS, "first_delay_ms": 60_000})
        await start()
        await eventually(lambda: engine.running == 1)
        before = await stop()
        assert (before["state"], before["status"], before["text"]) == ("stopped", "stopped", "")
        assert running.server.entries[-1].generation.completion_tokens == 0

        await extra(tab, ENDLESS)
        await start()
        if index == 0:  # whose text would come at the end only
            await eventually(lambda: running.server.entries[-1].generation.completion_tokens > 3)
        else:
            await has_text(tab, index)
        middle = await stop()
        assert middle["state"] == "stopped"
        assert middle["marked"] == "stopped"
        assert middle["shown"].strip() == middle["text"].strip()
        assert bool(middle["text"]) == (index != 0)
        generation = running.server.entries[-1].generation
        assert generation.finish_reason == "cancelled"
        assert generation.completion_tokens < 1000

        await extra(tab, {})
        await tab.do("index => lanes[index].parts.again.click()", index)
        await ended(tab, index)
        after = await lane(tab, index)
        assert (after["state"], after["stop"], after["again"]) == ("done", False, True)
        await tab.do("index => { lanes[index].run.stop(); }", index)  # a no-op
        assert (await lane(tab, index))["state"] == "done"
        assert len(running.server.entries) == 3
        # No cancelling of a reply that is over.
        assert sum("/cancel/" in address for address in tab.addresses) == 2 * (index in (1, 2, 4))


async def test_stop_at_once(chromium: Any) -> None:
    """Pressed before anything is known of the replies: none of them goes on."""
    async with page(chromium) as (tab, running):
        await extra(tab, ENDLESS)
        await tab.do("() => { startRace(); stopAll(); }")
        await ended(tab, 0, 1, 2, 3)
        await eventually(lambda: running.server.engine.running == 0)
        assert all(e.generation.completion_tokens < 1000 for e in running.server.entries)
        assert {(await lane(tab, i))["state"] for i in range(4)} == {"stopped"}
        await tab.until("byId('verdict').textContent.startsWith('No verdict')")
        await extra(tab, {})
        await tab.page.click("#start")
        await tab.until("byId('verdict').textContent.endsWith('with the same text.')")


async def test_double_clicks(chromium: Any) -> None:
    """The second click of two meets no other button; two races at once are one race."""
    async with page(chromium) as (tab, running):
        await tab.page.dblclick("#start")
        await tab.until("byId('verdict').textContent.endsWith('with the same text.')")
        await extra(tab, ENDLESS)
        await tab.page.dblclick("#race .again:visible >> nth=1")
        await has_text(tab, 1)
        stop = await tab.page.locator("#race .halt >> nth=1").bounding_box()
        await tab.page.dblclick("#race .halt:visible")
        await ended(tab, 1)
        assert (await lane(tab, 1))["state"] == "stopped"
        again = await tab.page.locator("#race .again >> nth=1").bounding_box()
        assert again["x"] + again["width"] <= stop["x"]
        await eventually(lambda: running.server.engine.running == 0)
        assert await tab.do("byId('stop').disabled")
        await tab.page.dblclick("#start")
        await has_text(tab, 1, 2, 3)
        await tab.page.dblclick("#stop")
        await ended(tab, 0, 1, 2, 3)
        await eventually(lambda: running.server.engine.running == 0)
        assert all(e.generation.finish_reason for e in running.server.entries)


async def test_settings_changed_meanwhile(chromium: Any) -> None:
    """A race runs on with what it began with; a resumed reply too."""
    async with page(chromium) as (tab, running):
        await extra(tab, {"truncate_after": 5})
        await tab.do("() => { startRace(); }")
        await tab.page.fill("#prompt", "Another")
        await tab.page.fill("#seed", "99")
        await ended(tab, 1)
        await tab.do("() => lanes[1].resume()")
        assert (await lane(tab, 1))["text"] == await self_contained(running)
        await ended(tab, 0, 2, 3)


async def test_nothing_is_added_after_stop(chromium: Any) -> None:
    """What was on its way when the button was pressed is read, for its usage, and not shown."""
    async with page(chromium) as (tab, _):
        script = """() => {
          const run = new Run({}, {body: {}}, performance.now(), () => 0);
          run.take({text: "One"});
          run.stop();
          run.take({text: " two", usage: {completion_tokens: 2}});
          return [run.text, run.tokens];
        }"""
        assert await tab.do(script) == ["One", 2]


async def test_stopped_from_elsewhere(chromium: Any) -> None:
    async with page(chromium) as (tab, running):
        await extra(tab, ENDLESS)
        await tab.do("() => { lanes[1].start(); }")
        await has_text(tab, 1)
        await running.ask("POST", f"/cancel/{(await lane(tab, 1))['id']}")
        await ended(tab, 1)
        assert (await lane(tab, 1))["status"] == "stopped: stopped from elsewhere"


async def test_closing_the_tab_stops_all(chromium: Any) -> None:
    """At once, the resumable replies too: they are not kept going for somebody to come back."""
    async with page(chromium) as (tab, running):
        await extra(tab, ENDLESS)
        await tab.do("() => { startRace(); chat.start(); }")
        await has_text(tab, 1, 2, 3, 4)
        await eventually(lambda: running.server.engine.running == 5)
        await tab.page.close(run_before_unload=False)
        await eventually(lambda: running.server.engine.running == 0)
        reasons = {e.generation.finish_reason for e in running.server.entries}
        assert reasons == {"cancelled"}


async def test_leaving_and_coming_back(chromium: Any) -> None:
    """By the history the page comes back as it was or anew; either way it can start."""
    async with page(chromium) as (tab, running):
        await extra(tab, ENDLESS)
        await tab.do("() => { startRace(); chat.start(); }")
        await has_text(tab, 1, 2, 3, 4)
        await tab.page.goto(f"{tab.origin}/log")
        await eventually(lambda: running.server.engine.running == 0)
        await tab.page.go_back()
        await tab.do("ready")
        for id, value in (("tokens", 10), ("first", 0), ("every", 1)):
            await tab.page.fill(f"#{id}", str(value))
        await tab.do("() => { window.extra = {}; }")
        await tab.page.click("#start")
        await tab.until("byId('verdict').textContent.endsWith('with the same text.')")


# --- What breaks: field reports 35, 37, 157 ---


async def test_nothing_is_sent_twice(chromium: Any) -> None:
    """Field report 157: not by hiding the tab, not by the end, not by a server that dies."""
    async with page(chromium) as (tab, running):
        await extra(tab, {"max_tokens": 300})
        await tab.do("() => { startRace(); }")
        await has_text(tab, 1, 2, 3)
        await hide(tab, True)
        before = await tab.do("lanes[1].run.text.length")
        await tab.until("length => lanes[1].parts.output.textContent.length > length", before)
        await hide(tab, False)
        await ended(tab, 0, 1, 2, 3)
        assert len(running.server.entries) == 4
        texts = {(await lane(tab, index))["shown"] for index in range(4)}
        assert len(texts) == 1
        await extra(tab, ENDLESS)
        await tab.do("() => { startRace(); chat.start(); }")
        await has_text(tab, 1, 2, 3, 4)
        await eventually(lambda: len(running.server.entries) == 9)
        for connection in list(running.server._tasks.values()):
            connection.writer.transport.abort()
        running.server._listener.close()
        await ended(tab, 0, 1, 3, 4)
        sent = len([a for a in tab.addresses if "/stream" in a or "/complete" in a or "/ws" in a])
        for index in (0, 1, 3, 4):
            told = await lane(tab, index)
            assert told["state"] == "interrupted", told
            assert told["text"] == "" if index == 0 else told["shown"]
            assert told["again"]
            assert told["resume"] == (index in (1, 4))
        await tab.until("lanes[2].run.note.includes('reconnecting')")
        again = [a for a in tab.addresses if "/stream" in a or "/complete" in a or "/ws" in a]
        assert len(again) == sent
        assert len(running.server.entries) == 9
        await tab.do("() => lanes[1].resume()")  # there is nobody to ask
        told = await lane(tab, 1)
        assert told["state"] == "interrupted"
        assert told["resume"]
        await tab.do("() => lanes[2].run.stop()")
        await ended(tab, 2)


async def hide(tab: Tab, hidden: bool) -> None:
    """Frames stop, and the page is told: what a browser does to a tab in the background."""
    await tab.do(
        """hidden => {
          window.frames_ ??= window.requestAnimationFrame;
          window.requestAnimationFrame = hidden ? () => 1 : frames_;
          Object.defineProperty(document, "hidden", {get: () => hidden, configurable: true});
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


BUSY = '{"error": {"message": "the queue is full"}}'
ANSWERS = [
    ({"status": 429, "headers": {"Retry-After": "7"}, "body": BUSY},
     "failed: 429: the queue is full; try again in 7 s"),
    ({"content_type": "text/html", "body": "<html>Log in"},
     "failed: 200: content of type text/html"),
    ({"status": 500, "body": ""}, "failed: 500: content of type unknown"),
]  # fmt: skip


async def test_answers_that_are_no_reply(chromium: Any) -> None:
    """From the server or from a hop that thinks it knows better; to what the page reports, too."""
    async with page(chromium) as (tab, running):
        answers = {}

        async def fulfill(route: Any) -> None:
            await route.fulfill(**answers)

        for path in ("complete", "stream*", "log/*"):
            await tab.page.route(f"**/{path}", fulfill)
        for answer, words in ANSWERS:
            answers = answer
            await tab.do("() => Promise.all(race.map(lane => lane.start()))")
            told = [(await lane(tab, index))["status"] for index in range(4)]
            assert told == [words, words, "failed: refused, and an EventSource is not told why",
                            "done: max_tokens"]  # fmt: skip
        assert [entry.page for entry in running.server.entries] == [None] * 3


SOCKETS = [
    (None, (1000, ""), "interrupted: closed with 1000 before the end"),
    ('{"text": "One"}', (1011, "boom"), "interrupted: closed with 1011 before the end: boom"),
    (None, (4000, "x" * 123), "interrupted: closed with 4000 before the end: " + "x" * 123),
    ("{oops", None, "failed: not JSON: {oops"),
    ('{"text": 5}', None, 'failed: text is not a string: {"text": 5}'),
    ('{"error": {"message": "<b>"}}', None, "failed: <b>"),
    ('{"done": true}', None, "done"),
]  # fmt: skip


async def test_websockets_that_end_otherwise(chromium: Any) -> None:
    """By a close code, or by a message after which the page hangs up itself."""
    # A profile of its own: a route for WebSockets can't be taken back.
    async with page(chromium, locale="en") as (tab, _):
        cases, closed = list(SOCKETS), []

        def accept(socket: Any) -> None:
            message, close, _ = cases.pop(0)

            def answer(_: Any) -> None:
                if message:
                    socket.send(message)
                if close:
                    closing.append(
                        asyncio.create_task(socket.close(code=close[0], reason=close[1]))
                    )

            socket.on_message(answer)
            socket.on_close(lambda *_: closed.append(message))

        closing: list[Any] = []
        await tab.page.route_web_socket("**/ws", accept)
        for message, _, words in SOCKETS:
            await tab.do("() => lanes[3].start()")
            told = await lane(tab, 3)
            assert told["status"] == words
            assert told["shown"] == told["text"] == ("One" if message == '{"text": "One"}' else "")
        await asyncio.gather(*closing)
        await eventually(lambda: len(closed) >= 4)
        assert {message for message, close, _ in SOCKETS if not close} <= set(closed)


async def test_hidden_before_the_first_text(chromium: Any) -> None:
    """Nothing is painted in a hidden tab, and nothing is said to be."""
    async with page(chromium) as (tab, running):
        await hide(tab, True)
        await tab.do("() => lanes[1].start()")
        assert (await lane(tab, 1))["shown"] == (await lane(tab, 1))["text"] != ""
        assert running.server.entries[0].page["first_paint"] is None
        assert running.server.entries[0].page["first_text"] > 0


async def test_a_tab_that_is_hidden_in_earnest(tmp_path: Path) -> None:
    """Field report 157: behind another tab, and frozen as browsers do to save power."""
    require("websockets")
    program = require_program("chromium")
    async with (
        serving(SimulatedEngine(delay_ms=5, jitter_ms=0)) as running,
        window(program, tmp_path) as chromium,
    ):
        target, tab = await chromium.open(f"http://127.0.0.1:{running.port}")
        await chromium.until(tab, "typeof ready !== 'undefined'")
        await chromium.do(tab, "ready")
        assert await chromium.do(tab, "document.visibilityState") == "visible"
        await chromium.do(
            tab,
            """void (() => {
              for (const [id, value] of [["tokens", 400], ["every", 8], ["first", 0]])
                byId(id).value = value;
              startRace(); chat.start();
            })()""",
        )
        await chromium.until(tab, "[1, 2, 3, 4].every(i => lanes[i].run.firstPaint)")
        await chromium.open("about:blank")
        await chromium.until(tab, "document.hidden")
        await chromium.do(tab, "void (seen = lanes[1].parts.output.textContent.length)")
        # No frame comes any more; what arrives is shown all the same.
        await chromium.until(tab, "lanes[1].parts.output.textContent.length > seen")
        await chromium.call("Page.setWebLifecycleState", tab, state="frozen")
        generation = running.server.entries[1].generation
        tokens = generation.completion_tokens
        await eventually(lambda: generation.completion_tokens > tokens + 50)
        await chromium.call("Page.setWebLifecycleState", tab, state="active")
        await chromium.call("Target.activateTarget", targetId=target)
        await chromium.until(tab, "!document.hidden")
        told = await chromium.do(
            tab,
            """Promise.all(lanes.slice(0, 5).map(lane => lane.ended)).then(() =>
              lanes.slice(0, 5).map(({run, parts}) =>
                [parts.state.textContent, run.text.split(" ").length,
                  parts.output.textContent === run.text]))""",
        )
        # A frozen page keeps its fetches and EventSources; its WebSockets Chromium closes.
        (*_, websocket, _) = told
        assert websocket[0].startswith("interrupted: closed with 1006"), websocket
        assert websocket[2]
        told.remove(websocket)
        assert told == [["done: max_tokens", 400, True]] * 4
        assert len(running.server.entries) == 5
        assert "Without WebSocket." in await chromium.do(tab, "byId('verdict').textContent")


async def test_interrupted_then_resumed(chromium: Any) -> None:
    """Field report 37: what was cut off goes on where it was, when the user asks for it."""
    async with page(chromium) as (tab, running):
        await extra(tab, {"truncate_after": 5})
        await tab.do("() => lanes[1].start()")
        told = await lane(tab, 1)
        assert told["state"] == "interrupted"
        assert told["status"] == "interrupted: the connection was lost"
        # A browser may throw away what it had not handed over when the connection broke.
        assert len(told["text"].split()) <= 5
        assert told["shown"] == told["text"]
        assert len(running.server.entries) == 1
        await tab.page.click("#race .resume:visible")
        await ended(tab, 1)
        whole = await self_contained(running)
        told = await lane(tab, 1)
        assert (told["state"], told["text"], told["shown"]) == ("done", whole, whole)
        assert [e.route for e in running.server.entries] == ["/stream", "/complete"]


async def self_contained(running: Running) -> str:
    body = {"prompt": "The old lighthouse stood", "seed": 7, "max_tokens": 30}
    return (await running.ask("POST", "/complete", body)).json()["text"]


async def test_interrupted_then_started_again(chromium: Any) -> None:
    async with page(chromium) as (tab, running):
        await extra(tab, {"truncate_after": 5})
        await tab.do("() => lanes[1].start()")
        await extra(tab, {})
        await tab.do("() => { lanes[1].parts.again.click(); return lanes[1].ended; }")
        assert (await lane(tab, 1))["text"] == await self_contained(running)
        assert len(running.server.entries) == 3


async def test_resumed_too_late(chromium: Any) -> None:
    async with page(chromium) as (tab, running):
        await extra(tab, {"truncate_after": 5})
        await tab.do("() => lanes[1].start()")
        running.server.delivery.replays._replays.clear()
        await tab.do("() => lanes[1].resume()")
        told = await lane(tab, 1)
        assert told["status"].startswith("failed: 404: this reply is unknown")
        assert told["shown"] == told["text"]


@pytest.mark.parametrize("after", [0, 5, 30], ids=["at-once", "middle", "before-the-end"])
async def test_event_source_resumes_by_itself(chromium: Any, after: int) -> None:
    """Field report 35: it comes back for the same reply, each word once, and closes at the end."""
    async with page(chromium) as (tab, running):
        await extra(tab, {"truncate_after": after})
        await tab.do("() => lanes[2].start()")
        told = await lane(tab, 2)
        assert told["state"] == "done"
        assert len(running.server.entries) == 1
        assert told["text"] == told["shown"] == await self_contained(running)
        assert sum("/stream" in address for address in tab.addresses) == 2


async def test_what_comes_twice_is_shown_once(chromium: Any) -> None:
    """From a server that begins anew whatever id it is told."""
    async with page(chromium) as (tab, running):
        words = ["One", " two", " three"]
        events = ['retry: 1\nid: reply-a:0\nevent: begin\ndata: {"id": "reply-a"}\n\n']
        events += [
            f"id: reply-a:{number}\ndata: {json.dumps({'text': word})}\n\n"
            for number, word in enumerate(words, 1)
        ]
        bodies = ["".join(events[:3]), "".join([*events, "data: [DONE]\n\n"])]

        async def fulfill(route: Any) -> None:
            await route.fulfill(body=bodies.pop(0), content_type="text/event-stream")

        await tab.page.route("**/stream?*", fulfill)
        await tab.do("() => lanes[2].start()")
        told = await lane(tab, 2)
        assert (told["state"], told["text"], told["shown"]) == ("done", *["One two three"] * 2)
        assert bodies == []
        assert len(running.server.entries) == 0


FAULTS = [
    ({"fail_after": 4}, "failed: the simulated model failed, as asked"),
    ({"garbage_after": 4}, "interrupted: the connection was lost"),
    ({"max_tokens": 0}, "failed: 400: max_tokens must be an integer from 1 to 1000000"),
]


@pytest.mark.parametrize(("fields", "words"), FAULTS, ids=["fails", "garbage", "refused"])
async def test_faults(chromium: Any, fields: dict[str, Any], words: str) -> None:
    """Every fault is told in words, what came stays, and nothing is tried again."""
    async with page(chromium) as (tab, running):
        await extra(tab, fields)
        await tab.do("() => Promise.all([1, 2, 3].map(index => lanes[index].start()))")
        told = [await lane(tab, index) for index in (1, 2, 3)]
        assert told[0]["status"] == words
        assert told[2]["status"].partition(":")[0] == words.partition(":")[0]
        if "max_tokens" in fields:
            assert told[1]["status"] == "failed: refused, and an EventSource is not told why"
            assert told[2]["status"] == "failed: max_tokens must be an integer from 1 to 1000000"
            assert len(running.server.entries) == 0
        else:
            assert all(one["shown"] == one["text"] for one in told)
            assert len(running.server.entries) == 3
        if "fail_after" in fields:
            assert {one["status"] for one in told} == {words}


@pytest.mark.parametrize("split", [1, 7])
async def test_split_writes(chromium: Any, split: int) -> None:
    """Field report 159: characters and events that come in parts."""
    text = "é你😀\r\n\u2028 " * 3
    async with page(chromium, saying(text)) as (tab, _):
        script = """async ([split]) => {
          const real = window.fetch;
          window.fetch = async (...given) => {
            const response = await real(...given);
            if (!given[0].endsWith("/stream")) return response;
            const parts = new TransformStream({transform(bytes, out) {
              for (let at = 0; at < bytes.length; at += split)
                out.enqueue(bytes.slice(at, at + split));
            }});
            return new Response(response.body.pipeThrough(parts), response);
          };
          await lanes[1].start();
          window.fetch = real;
          return [lanes[1].run.state, lanes[1].run.text];
        }"""
        assert await tab.do(script, [split]) == ["done", text]


DELTA = '{"choices":[{"delta":{"content":"%s"}}]}'
STOP = '{"choices":[{"delta":{},"finish_reason":"stop"}]}'
USAGE = '{"choices":[],"usage":{"completion_tokens":2}}'
FOREIGN = [
    ("crlf, no role, no [DONE]", "\r\n", [STOP], "done: no end marker, but a reason to end"),
    ("choices: [] and [DONE]", "\n", [USAGE, "[DONE]"], "done"),
    ("broken off", "\r", [], "interrupted: the stream broke off: no end marker came"),
    ("in-band", "\n", ['{"error":{"message":"<b>quota</b>"}}'], "failed: <b>quota</b>"),
]


@pytest.mark.parametrize("case", FOREIGN, ids=[case[0] for case in FOREIGN])
async def test_a_foreign_server(chromium: Any, case: tuple[str, str, list[str], str]) -> None:
    """Field report 166: whatever an OpenAI-compatible server leaves out."""
    _, end, last, status = case
    body = f": hello{end}" + "".join(
        f"data: {data}{end}{end}" for data in [DELTA % "One", DELTA % " two", *last]
    )
    async with page(chromium, saying("")) as (tab, running):

        async def answer(route: Any) -> None:
            await route.fulfill(body=body, content_type="text/event-stream")

        await tab.page.route("**/v1/chat/completions", answer)
        await tab.do("() => form.start()")
        told = await lane(tab, 5)
        assert told["text"] == "One two"
        assert told["status"] == status
        assert not told["resume"]
        assert len(running.server.entries) == 0


# --- What is shown ---


async def test_form(chromium: Any) -> None:
    """A constrained object fills the fields; the one in progress shows as it grows."""
    async with page(chromium, saying("")) as (tab, running):
        await tab.do("""() => {
          window.seen = [];
          window.told = [];
          const all = announce;
          announce = words => { told.push(words); all(words); };
          const add = FormView.prototype.add;
          FormView.prototype.add = function (text) {
            for (const char of text) {
              add.call(this, char);
              seen.push([...this.fields].map(([, f]) => [f.className, f.textContent]));
            }
          };
        }""")
        await tab.page.click("#more .lane:nth-child(2) .again")
        await ended(tab, 5)
        told = await lane(tab, 5)
        assert told["state"] == "done"
        assert json.loads(told["text"]) == ENTRY
        seen = await tab.do("seen")
        titles = [fields[0] for fields in seen]
        assert ["growing", "Fog <img"] in titles
        # Each field is told once, when it is complete.
        announced = await tab.do("told.map(words => words.split(':')[0])")
        assert [name for name in announced if name in ENTRY] == list(ENTRY)
        # Each field goes through the three states once, and what is complete stays as it is.
        for field in range(len(ENTRY)):
            states = [fields[field][0] for fields in seen]
            assert states == sorted(states, key=["", "growing", "complete"].index)
        assert [text for _, text in seen[-1]] == [ENTRY["title"], "fog", "12", "true", "é😀"]
        assert told["text"] in told["shown"]  # the raw text is beside it
        assert running.server.entries[-1].page["first_text"] > 0


@pytest.mark.model
async def test_the_real_model(chromium: Any, real_model: Any) -> None:
    """Text by four ways; and a form that is stopped when its first field has begun."""
    async with page(chromium, Engine(real_model)) as (tab, running):
        await extra(tab, {"max_tokens": 4})
        await tab.page.click("#start")
        await tab.until("byId('verdict').textContent")
        told = [await lane(tab, index) for index in range(4)]
        assert {one["state"] for one in told} == {"done"}
        # Not that it is the same: in company other types than float32 may part (see lm.py).
        assert all(one["text"] for one in told)
        await tab.do("() => { form.start(); }")
        begun = "[...form.drawing.fields.values()].some(f => f.className && f.textContent)"
        await tab.until(f"form.run.over || {begun}")
        await tab.do("() => form.run.stop()")
        await ended(tab, 5)
        await eventually(lambda: running.server.engine.running == 0)
        assert await tab.do(begun)
        assert not await tab.do("form.drawing.json.broken")


async def test_form_without_a_model(chromium: Any) -> None:
    async with page(chromium) as (tab, _):
        assert await tab.do("form.parts.again.disabled")
        assert "schema" in await tab.do("form.parts.note.textContent")


async def test_text_is_never_markup(chromium: Any) -> None:
    """Field report 163: in the race, as Markdown, in the form, and in the words of errors."""
    async with page(chromium, saying(f"{HOSTILE}\n\n# {HOSTILE}\n- {HOSTILE}")) as (tab, _):
        await tab.do("() => Promise.all(lanes.map(lane => lane.start()))")
        for index in range(6):
            assert HOSTILE in (await lane(tab, index))["shown"]
        await tab.do(
            """words => {
          lanes[1].run.words = words;
          lanes[1].changed(lanes[1].run);
          return new Promise(requestAnimationFrame);
        }""",
            HOSTILE,
        )
        assert HOSTILE in (await lane(tab, 1))["status"]
        assert (
            await tab.do("document.querySelectorAll('main img, main b, main script').length") == 0
        )
        # The policy holds as well: markup that got in would not run.
        assert (
            await tab.do("""() => {
          try { document.body.innerHTML = "<i>"; } catch (error) { return error.name; }
        }""")
            == "TypeError"
        )
        tab.errors.clear()
        await tab.do("() => { violations.length = 0; }")


async def test_markdown_from_a_model(chromium: Any) -> None:
    text = "# Rain\n\nIt is *water*.\n\n- one\n- two\n\n```py\nprint(1)\n```\n\n"
    text += "| a | b |\n|---|---|\n| 1 | 2 |\n"
    async with page(chromium, saying(text)) as (tab, _):
        await tab.page.click("#more .again")
        await tab.until("lanes[4].run?.over")
        await ended(tab, 4)
        shown = await tab.do("[...chat.parts.output.children].map(child => child.localName)")
        assert shown == ["h1", "p", "ul", "pre", "table"]


async def test_five_thousand_events(chromium: Any) -> None:
    """Field report 164: as fast as they come, all are shown; the document is touched by frames."""
    async with page(chromium, SimulatedEngine(delay_ms=0, jitter_ms=0)) as (tab, _):
        await extra(tab, {"max_tokens": 5000})
        told = await tab.do("""async () => {
          let frames = 0, changes = 0, long = 0;
          const count = () => { frames++; requestAnimationFrame(count); };
          requestAnimationFrame(count);
          const watch = new MutationObserver(records => changes += records.length);
          const options = {childList: true, characterData: true, subtree: true};
          watch.observe(lanes[1].parts.output, options);
          new PerformanceObserver(list => { for (const {duration} of list.getEntries())
            long = Math.max(long, duration); }).observe({type: "longtask", buffered: false});
          await lanes[1].start();
          const {run, parts} = lanes[1];
          return {events: run.events, whole: parts.output.textContent === run.text, frames, long,
            nodes: parts.output.childNodes.length, changes, words: run.text.split(" ").length};
        }""")
        assert told["whole"]
        assert told["words"] == 5000
        assert told["events"] == 5002
        assert told["nodes"] < 20
        # A redraw makes at most three records: a new node, its first text, and the last one's.
        assert told["changes"] <= 3 * told["frames"] + 3
        assert told["long"] < 1000  # far above what it takes: a busy machine shall not decide


async def test_follows_until_the_reader_scrolls_up(chromium: Any) -> None:
    async with page(chromium) as (tab, _):
        await extra(tab, {"max_tokens": 100_000, "delay_ms": 1})
        await tab.do("() => { lanes[1].start(); }")
        output = "lanes[1].parts.output"
        at_end = f"{output}.scrollHeight - {output}.scrollTop - {output}.clientHeight < 24"
        await tab.until(f"{output}.scrollTop > 100 && {at_end}")
        await tab.do(f"() => {{ {output}.scrollTop = 20; }}")
        length = await tab.do(f"{output}.scrollHeight")
        await tab.until(f"length => {output}.scrollHeight > length + 100", length)
        assert await tab.do(f"{output}.scrollTop") == 20
        await tab.do(f"() => {{ {output}.scrollTop = {output}.scrollHeight; }}")
        length = await tab.do(f"{output}.scrollHeight")
        await tab.until(f"length => {output}.scrollHeight > length + 100 && {at_end}", length)
        await tab.do("() => lanes[1].run.stop()")
        await ended(tab, 1)


async def test_six_connections(chromium: Any) -> None:
    """Field report 165: a lane that has no connection says so, and runs when there is one."""
    async with page(chromium) as (tab, running):
        other = await tab.page.context.new_page()
        await other.goto(f"{tab.origin}/health")
        await other.evaluate("""() => {
          window.held = Array.from({length: 6}, () => new AbortController());
          for (const {signal} of held) fetch("/stream", {method: "POST", signal,
            headers: {"Content-Type": "application/json"},
            body: '{"prompt": "a", "max_tokens": 100000}'}).catch(() => 0);
        }""")
        await eventually(lambda: running.server.engine.running == 6)
        await tab.do("() => { startRace(); }")
        await tab.until("lanes[3].run.over")  # a WebSocket is not one of the six
        for index in (0, 1, 2):
            await tab.until("index => lanes[index].parts.note.textContent", index)
            assert "six" in (await lane(tab, index))["note"]
        await other.evaluate("() => held.forEach(control => control.abort())")
        await ended(tab, 0, 1, 2)
        told = [await lane(tab, index) for index in range(4)]
        assert {one["state"] for one in told} == {"done"}
        assert {one["note"] for one in told} == {""}
        assert len({one["text"] for one in told}) == 1
        assert len(running.server.entries) == 6 + 4


# --- To whom ---


async def test_keys_and_announcements(chromium: Any) -> None:
    async with page(chromium) as (tab, running):
        await tab.do("""() => {
          window.announced = [];
          new MutationObserver(() => announced.push(byId("live").textContent))
            .observe(byId("live"), {childList: true, characterData: true, subtree: true});
        }""")
        await tab.page.focus("#prompt")
        await tab.page.keyboard.press("Control+Enter")
        await ended(tab, 0, 1, 2, 3)
        await tab.until("announced.length && announced.join().includes('All ended')")
        announced = await tab.do("announced")
        assert len(announced) <= 3  # not a word at a time
        assert "WebSocket: done" in " ".join(announced)
        await extra(tab, ENDLESS)
        await tab.page.keyboard.press("Control+Enter")
        await has_text(tab, 1, 2, 3)
        await tab.page.keyboard.press("Escape")
        await ended(tab, 0, 1, 2, 3)
        await eventually(lambda: running.server.engine.running == 0)
        # By tabs alone one gets to every control that is shown, and to the replies, to scroll.
        await tab.do("() => byId('prompt').focus()")
        reached = []
        for _ in range(20):
            await tab.page.keyboard.press("Tab")
            reached.append(
                await tab.do("document.activeElement.id || document.activeElement.className")
            )
        assert {"seed", "tokens", "start"} <= set(reached)
        assert sum("output" in name for name in reached) >= 4


async def test_focus_is_never_lost(chromium: Any) -> None:
    """A button that goes away when it is pressed leaves the keyboard in its lane, or at "Start"."""
    async with page(chromium) as (tab, _):
        await extra(tab, ENDLESS)
        await tab.do("() => { startRace(); }")
        await has_text(tab, 1, 2, 3)
        focused = "() => document.activeElement.ariaLabel || document.activeElement.id"
        await tab.do("() => lanes[1].parts.halt.focus()")
        await tab.page.keyboard.press("Enter")
        await ended(tab, 1)
        assert await tab.do(focused) == "Reply: SSE by fetch"
        await tab.do("() => lanes[1].parts.again.focus()")
        await tab.page.keyboard.press("Enter")
        await has_text(tab, 1)
        assert await tab.do(focused) == "Reply: SSE by fetch"
        await tab.page.focus("#stop")
        await tab.page.keyboard.press("Enter")
        await ended(tab, 0, 1, 2, 3)
        assert await tab.do(focused) == "start"
        assert await tab.do("byId('stop').disabled")


async def test_everything_has_a_name(chromium: Any) -> None:
    async with page(chromium) as (tab, _):
        nameless = await tab.do("""
          [...document.querySelectorAll("input, textarea, select, button")]
            .filter(e => !(e.labels?.length || e.textContent.trim() || e.ariaLabel))
            .map(e => e.outerHTML)""")
        assert nameless == []
        assert await tab.do("lanes.map(lane => lane.root.ariaLabel)") == [
            *LANES, "Markdown", "JSON, as a form"
        ]  # fmt: skip
        assert await tab.do("byId('live').getAttribute('aria-live')") == "polite"
        assert await tab.do("document.querySelectorAll('[aria-live], [role=log]').length") == 1
        assert await tab.do("document.documentElement.lang") == "en"


async def test_dark_narrow_and_calm(chromium: Any) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    async with serving() as running:
        async with opened(chromium, running, color_scheme="light") as tab:
            light = await tab.do(background)
        options = {
            "color_scheme": "dark",
            "reduced_motion": "reduce",
            "viewport": {"width": 320, "height": 700},
        }
        async with opened(chromium, running, **options) as tab:
            assert await tab.do(background) != light
            await tab.do("() => { startRace(); }")
            assert await tab.do("document.getAnimations().length") == 0
            await tab.until("lanes[1].run.firstText")
            clock = await tab.do("lanes[0].parts.clock.textContent")
            assert clock in ("0 ms", "500 ms") or clock.endswith((".00 s", ".50 s"))
            # Whatever is written into it, the page is no wider than its window.
            await tab.do("""() => {
              const {run} = lanes[1], word = "x".repeat(500);
              run.words = run.note = run.fresh = word;
              lanes[1].draw();
              chat.start();
              chat.drawing.add(`# ${word}\\n\\n| ${word} | b |\\n|---|---|\\n\\n- ${word}`);
              byId("verdict").textContent = word;
            }""")
            wide = """[...document.querySelectorAll("main *")].filter(node =>
              node.getBoundingClientRect().right > 320 && !node.closest(".output *")).length"""
            assert await tab.do(wide) == 0
            assert await tab.do("document.documentElement.scrollWidth") <= 320
            await tab.page.emulate_media(forced_colors="active")
            colour = "getComputedStyle(document.querySelector('.key .wire')).backgroundColor"
            assert await tab.do(colour) == "rgb(240, 166, 75)"  # a bar is told by nothing else
            await tab.page.emulate_media(media="print")
            cut = "lanes.filter(({parts: {output: o}}) => o.scrollHeight > o.clientHeight).length"
            assert await tab.do(cut) == 0
            await tab.page.emulate_media(media="screen")
            await tab.do("() => stopAll()")
            await ended(tab, 0, 1, 2, 3, 4)
