"""One reply, three ways of delivery: what stands between, who stops it, who is slow or leaves."""

import asyncio
import gc
import json
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import pytest
from fakes import EOS, FakeModel
from serving import Peer, Running, eventually, quick, serving

import http1
import sse
import websocket
from client import Failure, Options, Reply, ask
from delivery import Policy
from engine import Engine
from generation import Generation
from pieces import Banned
from simulated import SimulatedEngine
from telling import Entry

ROUTES = ("/stream", "/complete", "/ws")


def says(text: str | bytes, rows: int = 2) -> FakeModel:
    """A model that says this, a byte a token, to a prompt of one letter; then the end."""
    data = text.encode() if isinstance(text, str) else text

    def script(history: Sequence[int]) -> int:
        said = len(history) - 1
        return data[said] if said < len(data) else EOS

    return FakeModel(rows=rows, context=4096, script=script)


def stepped(model: FakeModel) -> FakeModel:
    """Every forward pass waits for a release."""
    model.step = threading.Semaphore(0)
    return model


async def asked(running: Running, route: str, **body: Any) -> Reply:
    """One reply as the project's own client sees it."""
    url = f"http://127.0.0.1:{running.port}{route}"
    usage = {"usage": True} if route == "/stream" else {}
    return await ask(url, {"prompt": "a", **usage, **body}, Options(timeout=20))


# A client that is asked to send, and read, one thing at a time, on any route.


@dataclass
class Talk:
    """A request under way on any route, read as far as a test wants."""

    route: str
    peer: Peer
    socket: websocket.Connection | None = None
    text: str = ""
    end: dict[str, Any] | None = None
    parser: sse.Parser = field(default_factory=sse.Parser)
    parsed: int = 0

    async def open(self, body: dict[str, Any]) -> None:
        """Send the request."""
        method, _, path = self.route.rpartition(" ")
        if path == "/ws":
            key = websocket.new_key()
            self.peer.parser.expect("GET")
            fields = [("Host", "test"), *websocket.request_fields(key)]
            self.peer.send(http1.encode_request("GET", "/ws", fields))
            assert (await self.peer.head())[0].status == 101
            self.socket = websocket.Connection(websocket.Side.CLIENT)
            self.socket.feed(self.peer.parser.take_unread())
            self.peer.send(self.socket.message(json.dumps(body)))
        elif method == "GET":
            self.peer.request("GET", f"{path}?{urlencode(body)}")
        else:
            self.peer.request("POST", path, body)

    async def rest(self, until: Callable[[], bool] = lambda: False) -> "Talk":
        """Read to the end, or until something holds; texts and the end are kept."""
        if self.socket is not None:
            while self.end is None and not until():
                self._take(json.loads(await self._message()))
        elif self.route.endswith("/complete"):
            answer = await self.peer.answer()
            self.end = {"status": answer.status, **answer.json()}
            self.text = self.end.get("text", "")
        else:
            while not until():
                event = await self.peer.event()
                assert event is not None
                for told in self.parser.feed(self.peer.content[self.parsed :]):
                    data = {} if told.data == "[DONE]" else json.loads(told.data)
                    self._take({"error": data} if told.type == "error" else data)
                self.parsed = len(self.peer.content)
                if isinstance(event, http1.End):
                    self.end = self.end or {"done": True}
                    break
        return self

    async def _message(self) -> str:
        assert self.socket is not None
        async with asyncio.timeout(10):
            while (event := self.socket.next_event()) is None:
                data = await self.peer.reader.read(65536)
                assert data, "the connection ended without a Close"
                self.socket.feed(data)
        assert isinstance(event, websocket.Message), event
        assert isinstance(event.data, str)
        return event.data

    def _take(self, told: dict[str, Any]) -> None:
        self.text += told.get("text", "")
        if {"finish_reason", "error"} & set(told):
            self.end = told


@asynccontextmanager
async def talking(
    running: Running, route: str, receive_buffer: int | None = None, **body: Any
) -> AsyncIterator[Talk]:
    async with running.connect(receive_buffer) as peer:
        talk = Talk(route, peer)
        await talk.open({"prompt": "a"} | body)
        yield talk


async def entry_of(running: Running, number: int = -1) -> Entry:
    """The newest entry of the log, once there is one."""
    await eventually(lambda: running.server.entries)
    return running.server.entries[number]


# --- What stands between -----------------------------------------------------------------------


class TestStopStrings:
    """Field reports 80 to 83 and 107, on every route."""

    @pytest.mark.parametrize(
        ("text", "stop", "max_tokens", "kept", "reason"),
        [
            ("abcDEFGHIJk", ["DEFGHIJ"], 50, "abc", "stop"),
            ("so\nUser: hi", ["\nUser:"], 50, "so", "stop"),
            ("alpha beta gamma delta", "beta gamma", 50, "alpha ", "stop"),
            ("xxSTOPyy", ["STOP"], 50, "xx", "stop"),
            ("pleas", ["assistant!"], 50, "pleas", "stop"),  # by its end, which is no stop string
            ("please assist", ["assistant!"], 13, "please assist", "length"),
            ("你好吗", ["好"], 50, "你", "stop"),
            ("hello world", ["ZZZZZZZZZZ"], 50, "hello world", "stop"),
            ("abc", [], 3, "abc", "length"),
            ("abc", [], 4, "abc", "stop"),  # the end comes exactly as the last token
        ],
    )
    async def test_table(
        self, text: str, stop: Any, max_tokens: int, kept: str, reason: str
    ) -> None:
        async with serving(Engine(says(text))) as running:
            for route in ROUTES:
                reply = await asked(running, route, stop=stop, max_tokens=max_tokens)
                assert reply.complete, reply.error
                assert (reply.text, reply.finish_reason) == (kept, reason)
                assert reply.usage["completion_tokens"] <= max_tokens

    async def test_nothing_is_held_that_begins_no_stop_string(self) -> None:
        """Field report 83: each piece at its own token."""
        model = stepped(says("hello"))
        async with serving(Engine(model)) as running:
            async with talking(running, "/stream", stop=["ZZZ", "lp"]) as talk:
                for number, text in enumerate(("h", "he", "he", "hel"), 1):
                    model.step.release()
                    await eventually(lambda n=number: len(model.calls) == n + 1)
                    await talk.rest(lambda text=text: talk.text == text)

    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("cause", ["cancel", "shutdown", "error"])
    async def test_what_was_held_is_not_lost(self, cause: str, route: str) -> None:
        """Field report 82, for every way to end: "eas" might have become "ease!"."""
        model = stepped(says("pleas and more"))
        engine = Engine(model)
        body = {"stop": ["ease!"], "hold_back": 3, "flush_tokens": 50}
        async with serving(engine, settings=quick(linger_s=0.05)) as running:
            async with talking(running, route, **body) as talk:
                entry = await entry_of(running)
                model.step.release(5)
                await eventually(lambda: len(model.calls) == 6)
                model.fail_decode = lambda: cause == "error"
                if cause != "error":
                    entry.generation.cancel("shutdown" if cause == "shutdown" else "by id")
                model.step.release()
                await talk.rest()
        assert entry.generation.finish_reason == ("error" if cause == "error" else "cancelled")
        assert "message" in talk.end["error"] if cause != "cancel" else "error" not in talk.end
        if route != "/complete" or cause == "cancel":
            assert talk.text == "pleas"


class TestGrouping:
    @pytest.mark.parametrize(
        ("how", "texts"),
        [
            ({}, list("abcdefg")),
            ({"flush_tokens": 1}, list("abcdefg")),
            ({"flush_tokens": 3}, ["abc", "def", "g"]),
            ({"flush_ms": 10_000}, ["abcdefg"]),
            ({"flush_ms": 10_000, "flush_tokens": 4}, ["abcd", "efg"]),
            ({"flush_tokens": 4, "hold_back": 5}, ["abcd", "efg"]),
            ({"flush_tokens": None, "flush_ms": None, "hold_back": None}, list("abcdefg")),
        ],
        ids=str,
    )
    async def test_events(self, how: dict[str, Any], texts: list[str]) -> None:
        async with serving(Engine(says("abcdefg"))) as running:
            for route in ("/stream", "/ws"):
                reply = await asked(running, route, **how)
                assert reply.complete
                assert reply.pieces == texts
                # Events are not tokens: the usage tells those, with the end.
                assert reply.usage["completion_tokens"] == 8

    async def test_a_window(self) -> None:
        """What has come is sent when the window is over, without waiting for more."""
        model = stepped(says("abc"))
        async with serving(Engine(model)) as running:
            async with talking(running, "/stream", flush_ms=20) as talk:
                model.step.release(2)
                await talk.rest(lambda: talk.text == "ab")

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("flush_ms", [0, -1, 10_001, True, "5", [], float("nan"), float("inf")]),
            ("flush_tokens", [0, -1, 1001, 1.5, True, "5"]),
            ("hold_back", [-1, 1001, 1.5, True, "5"]),
            ("resume", [0, 1, "true", []]),
        ],
    )
    async def test_bad_values(self, name: str, values: list[Any]) -> None:
        async with serving() as running:
            for value in values:
                answer = await running.ask("POST", "/stream", {"prompt": "a", name: value})
                assert answer.status == 400
                error = answer.json()["error"]
                assert error["field"] == name or value != value or value == float("inf")


def banning(*phrases: str) -> Policy:
    return Policy(banned=Banned(phrases))


class TestHoldBack:
    TEXT = "All is well until a Forbidden Word comes. The rest is silence."

    async def test_a_delay_of_so_many_tokens(self) -> None:
        model = stepped(says("abcdef"))
        async with serving(Engine(model)) as running:
            async with talking(running, "/stream", hold_back=3) as talk:
                model.step.release(4)
                await talk.rest(lambda: bool(talk.text))
                await eventually(lambda: len(model.calls) == 5)
                assert talk.text == "a"

    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("hold_back", [0, 5, 14, 200])
    async def test_never_sent_on_any_route(self, route: str, hold_back: int) -> None:
        phrase = "forbidden WORD"
        async with serving(Engine(says(self.TEXT)), policy=banning("other", phrase)) as running:
            async with running.connect() as peer:
                talk = Talk(route, peer)
                await talk.open({"prompt": "a", "hold_back": hold_back})
                await talk.rest()
        error = talk.end["error"]
        assert error["type"] == "content_filter"
        assert "orbidden" not in error["message"]
        assert "forbidden word" not in talk.text.casefold()
        if route == "/complete":
            assert talk.end["status"] == 422
            assert "text" not in talk.end
        else:
            kept = "All is well until a "
            assert talk.text.startswith(kept)  # what was safe is not lost
            assert talk.text == kept or hold_back < len(phrase)

    @pytest.mark.parametrize("route", ROUTES)
    async def test_generation_stops_by_the_stop_law(self, route: str) -> None:
        model = stepped(says("so bad a word"))
        async with serving(Engine(model), policy=banning("bad")) as running:
            async with talking(running, route, hold_back=5) as talk:
                entry = await entry_of(running)
                model.step.release(6)  # "so bad"
                await eventually(lambda: entry.generation.cancel_reason)
                model.step.release(100)
                await talk.rest()
                await eventually(lambda: entry.generation.finish_reason)
        assert len(model.calls) <= 7  # the seventh may have been under way
        assert entry.generation.completion_tokens == 6

    @pytest.mark.parametrize(
        ("events", "error"),
        [("plain", "event: error"), ("bare", "event: error"), ("named", "event: error")],
    )
    async def test_the_error_in_each_form_of_events(self, events: str, error: str) -> None:
        async with serving(Engine(says(self.TEXT)), policy=banning("word")) as running:
            body = {"prompt": "a", "events": events, "usage": True, "hold_back": 9}
            answer = await running.ask("POST", "/stream", body)
        *_, last = answer.content.decode().split("\n\n")[:-1]
        kind, _, data = last.partition("\n")
        assert kind == error
        assert json.loads(data.removeprefix("data: "))["type"] == "content_filter"
        assert b"done" not in answer.content.lower()  # neither [DONE] nor event: done
        assert b"usage" not in answer.content

    async def test_without_a_banned_phrase_nothing_changes(self) -> None:
        async with serving(Engine(says(self.TEXT)), policy=banning("forbidden words")) as running:
            for route in ROUTES:
                reply = await asked(running, route, hold_back=7, stop=[" silence"])
                assert reply.complete
                assert reply.text == self.TEXT.removesuffix(" silence.")
                assert reply.finish_reason == "stop"

    async def test_a_phrase_behind_the_stop_string_was_never_said(self) -> None:
        async with serving(Engine(says(self.TEXT)), policy=banning("word")) as running:
            reply = await asked(running, "/stream", stop=["Forbidden"], hold_back=3)
        assert reply.complete
        assert reply.text == "All is well until a "


# --- Cancelled from another connection ---------------------------------------------------------


def in_state(state: str) -> tuple[FakeModel, dict[str, Any]]:
    """A model and a request: where `state` can be waited for."""
    model = stepped(FakeModel(rows=1, context=4096))
    prompt = "a" * 300 if state == "prefilling" else "a"
    return model, {"prompt": prompt, "max_tokens": 500, "seed": 1}


async def reach(state: str, model: FakeModel, engine: Engine, running: Running) -> Entry:
    """Bring the newest request there; the passes made so far, and one under way."""
    entry = await entry_of(running)
    if state == "waiting":
        await eventually(lambda: len(running.server.entries) == 2 and engine.waiting == 1)
        return running.server.entries[-1]
    await eventually(lambda: len(model.calls) == 1)
    if state == "prefilling":
        model.step.release()
        await eventually(lambda: len(model.calls) == 2)
    if state in ("decoding", "paused"):
        model.step.release(3)
        await eventually(lambda: len(model.calls) == 4)
    if state == "paused":
        entry.generation.pause(True)
        model.step.release()  # the pass under way ends; no other begins
        await eventually(lambda: entry.generation.completion_tokens == 4)
    return entry


# The tokens made in each state before the request is stopped.
MADE = {"waiting": 0, "prefilling": 0, "decoding": 3, "paused": 4}


@pytest.mark.parametrize("state", MADE)
class TestStopLaw:
    """Whatever the cause, the state and the route: at most the pass under way, and a free row."""

    @asynccontextmanager
    async def request(self, state: str, route: str) -> AsyncIterator[tuple[Any, ...]]:
        model, body = in_state(state)
        engine = Engine(model)
        async with serving(engine) as running:
            async with running.connect() as first, running.connect() as peer:
                if state == "waiting":
                    first.request("POST", "/stream", {"prompt": "first", "max_tokens": 3})
                    await eventually(lambda: engine.running == 1)
                talk = Talk(route, peer)
                await talk.open(body)
                entry = await reach(state, model, engine, running)
                yield running, talk, entry
                model.step.release(1000)
                await eventually(lambda: entry.generation.finish_reason)
                assert entry.generation.finish_reason == "cancelled"
                assert entry.generation.completion_tokens == MADE[state]
                if state == "waiting":
                    await first.until(b"[DONE]")  # field report 90: the other's is unharmed
                    assert first.content.count(b"text") == 3
                await eventually(lambda: engine.running == engine.waiting == 0)
                assert model.cache == [[]] or len(model.cache[0]) == 256  # whole chunks, reusable
                fresh = await running.ask("POST", "/complete", {"prompt": "b", "max_tokens": 2})
                assert len(fresh.json()["text"]) == 2

    @pytest.mark.parametrize("route", ROUTES)
    async def test_cancel_by_id(self, state: str, route: str) -> None:
        async with self.request(state, route) as (running, talk, entry):
            id = entry.generation.id
            answer = await running.ask("POST", f"/cancel/{id}")
            assert (answer.status, answer.json()) == (200, {"id": id, "cancelled": True})
            running.server.engine.model.step.release(1000)
            await talk.rest()
            assert len(talk.text) == MADE[state]
            assert "error" not in talk.end
            assert talk.end.get("finish_reason", "cancelled") == "cancelled"

    @pytest.mark.parametrize("leave", ["close", "reset"])
    @pytest.mark.parametrize("route", ["/ws", "GET /stream", "GET /complete"])
    async def test_leaving(self, state: str, route: str, leave: str) -> None:
        """Field reports 87 to 89; `test_connection.py` has the POST routes."""
        async with self.request(state, route) as (_, talk, entry):
            getattr(talk.peer, leave)()
            await eventually(lambda: entry.client_left)

    async def test_a_close_frame(self, state: str) -> None:
        async with self.request(state, "/ws") as (_, talk, entry):
            talk.peer.send(talk.socket.close(1001))
            await eventually(lambda: entry.client_left)

    async def test_a_stop_message(self, state: str) -> None:
        async with self.request(state, "/ws") as (running, talk, entry):
            talk.peer.send(talk.socket.message('{"stop": true}'))
            await eventually(lambda: entry.generation.cancel_reason)
            running.server.engine.model.step.release(1000)
            await talk.rest()
            assert talk.end["finish_reason"] == "cancelled"
            assert talk.end["usage"]["completion_tokens"] == MADE[state]


class TestCancel:
    @pytest.mark.parametrize("route", ROUTES)
    async def test_finished(self, route: str) -> None:
        async with serving() as running:
            assert (await asked(running, route, max_tokens=3)).complete
            (entry,) = running.server.entries
            answer = await running.ask("POST", f"/cancel/{entry.generation.id}")
        assert answer.status == 200
        assert answer.json() == {"id": entry.generation.id, "cancelled": False}
        assert entry.generation.finish_reason == "length"

    @pytest.mark.parametrize("id", ["reply-0000000000000000", "", "x", "a/b", "%00"])
    async def test_unknown(self, id: str) -> None:
        async with serving() as running:
            answer = await running.ask("POST", f"/cancel/{id}", {"some": "content"})
            assert answer.status == 404
            assert (await running.ask("GET", "/cancel/x")).status == 405

    async def test_a_running_reply_that_the_log_has_forgotten(self) -> None:
        engine = SimulatedEngine(delay_ms=3_600_000)
        async with serving(engine) as running, talking(running, "/stream") as talk:
            head, _ = await talk.peer.head()
            running.server.entries.clear()
            answer = await running.ask("POST", f"/cancel/{head.fields.get('reply-id')}")
            assert answer.json()["cancelled"] is True
            await eventually(lambda: engine.running == 0)

    async def test_a_resumable_one(self) -> None:
        """Every follower is told the same end."""
        engine = SimulatedEngine(delay_ms=1, jitter_ms=0)
        body = {"max_tokens": 1_000_000, "resume": True, "usage": True}
        async with serving(engine) as running, talking(running, "/stream", **body) as talk:
            await talk.rest(lambda: bool(talk.text))
            (entry,) = running.server.entries
            async with running.connect() as other:
                other.request("GET", f"/stream/{entry.generation.id}")
                await other.until(b"data")
                await running.ask("POST", f"/cancel/{entry.generation.id}")
                await talk.rest()
                await other.until(b"[DONE]")
        assert talk.end["finish_reason"] == "cancelled"


# --- Slow clients ------------------------------------------------------------------------------


class Wide(FakeModel):
    """Each token is a long piece, so that few of them fill a client's buffers."""

    def __init__(self) -> None:
        super().__init__(rows=4, context=4096)
        self.step = threading.Semaphore(0)

    def text(self, ids: Sequence[int]) -> str:
        return "".join(chr(id) * 2000 for id in ids if id < 256)

    async def run(self, until: Callable[[], Any]) -> None:
        """Step by step, so that it can't run ahead of what the event loop writes."""
        async with asyncio.timeout(10):
            while not until():
                self.step.release()
                await asyncio.sleep(0.001)


LONG = {"max_tokens": 400, "seed": 1}


def queued_bytes(content: bytes) -> float:
    lines = content.decode().splitlines()
    (line,) = (line for line in lines if line.startswith("server_client_queued_bytes "))
    return float(line.split()[1])


@dataclass
class Slow:
    """A long reply to a client that takes a few kilobytes, and then no more until it is asked."""

    running: Running
    model: Wide
    engine: Engine
    talk: Talk
    generation: Generation
    entry: Entry


@asynccontextmanager
async def slow(route: str, slow_client: str, **deadlines: float) -> AsyncIterator[Slow]:
    model = Wide()
    engine, policy = Engine(model), Policy(slow_client=slow_client)
    async with serving(engine, policy=policy, settings=quick(**deadlines)) as running:
        async with talking(running, route, receive_buffer=4096, **LONG) as talk:
            entry = await entry_of(running)
            yield Slow(running, model, engine, talk, entry.generation, entry)


@pytest.mark.parametrize("route", ["/stream", "/ws"])
class TestSlowClients:
    """Field report 67, and section 6 of the design."""

    async def test_pause(self, route: str) -> None:
        """The row leaves the batch and comes back; others go on; the text is as ever."""
        async with slow(route, "pause") as it:
            await it.model.run(lambda: it.generation.paused)
            it.model.step.release(100_000)
            assert (await asked(it.running, route, max_tokens=20)).complete
            made = it.generation.completion_tokens
            assert (await asked(it.running, route, max_tokens=60)).complete
            assert it.generation.completion_tokens == made < 400
            assert it.generation.finish_reason is None
            metrics = await it.running.ask("GET", "/metrics")
            assert queued_bytes(metrics.content) > 64 * 1024
            await it.talk.rest()
            assert it.generation.finish_reason == "length"
            assert not it.entry.client_left
            assert it.talk.text == (await asked(it.running, "/complete", **LONG)).text

    async def test_cancelled_while_paused(self, route: str) -> None:
        async with slow(route, "pause") as it:
            await it.model.run(lambda: it.generation.paused)
            it.model.step.release(100)
            await it.running.ask("POST", f"/cancel/{it.generation.id}")
            await eventually(lambda: it.generation.finish_reason == "cancelled")
            assert it.engine.running == 0

    async def test_gone_while_paused(self, route: str) -> None:
        async with slow(route, "pause") as it:
            await it.model.run(lambda: it.generation.paused)
            it.model.step.release(100)
            it.talk.peer.reset()
            await eventually(lambda: it.generation.finish_reason == "cancelled")
            assert it.entry.client_left
            assert it.engine.running == 0

    async def test_too_long_paused(self, route: str) -> None:
        """A pause is no way to hold a row for ever: without progress the client is dropped."""
        async with slow(route, "pause", stall_s=0.2) as it:
            await it.model.run(lambda: it.generation.paused)
            it.model.step.release(100)
            await eventually(lambda: it.generation.finish_reason)
            assert "slow" in it.generation.cancel_reason

    async def test_drop(self, route: str) -> None:
        async with slow(route, "drop") as it:
            await it.model.run(lambda: it.generation.finish_reason)
            assert it.generation.finish_reason == "cancelled"
            assert "behind" in it.generation.cancel_reason
            assert it.entry.client_left
            assert it.engine.running == 0
            with pytest.raises((AssertionError, http1.Truncated, ConnectionError)):
                await it.talk.rest()  # a cut, never an end
            it.model.step.release(100)
            assert (await asked(it.running, route, max_tokens=20)).complete

    async def test_buffer(self, route: str) -> None:
        """Within the bound it is generated to the end, and read later."""
        async with slow(route, "buffer") as it:
            it.model.step.release(1000)
            await eventually(lambda: it.generation.finish_reason)
            assert it.generation.finish_reason == "length"
            await it.talk.rest()
            assert len(it.talk.text) == 400 * 2000


# --- Errors ------------------------------------------------------------------------------------


class TestErrors:
    async def test_a_failing_pass_is_told_on_every_route(self) -> None:
        """Field report 94: nobody waits for ever; who was queued is served; the engine goes on."""
        model = stepped(FakeModel(rows=3, context=4096))
        faults = iter([False, True])
        model.fail_decode = lambda: next(faults, False)
        body = {"prompt": "a", "max_tokens": 5}
        async with serving(Engine(model)) as running:
            async with (
                talking(running, "/stream", **body) as stream,
                talking(running, "/complete", **body) as complete,
                talking(running, "/ws", **body) as socket,
            ):
                engine = running.server.engine
                await eventually(lambda: engine.waiting + engine.running == 3)
                async with talking(running, "/stream", **body) as queued:
                    await eventually(lambda: engine.waiting + engine.running == 4)
                    model.step.release(1000)
                    for talk in (stream, complete, socket, queued):
                        await talk.rest()
        failed = [talk for talk in (stream, complete, socket) if "error" in talk.end]
        assert failed
        for talk in failed:
            assert talk.end["error"]["type"] == "model_error"
            assert "fault" not in talk.end["error"]["message"]
        assert len(queued.text) == 5

    async def test_a_dead_thread_is_told_to_all_who_wait(self) -> None:
        """Field report 94; from then on 503, and unhealthy."""
        model = stepped(FakeModel(rows=1, context=4096))
        async with serving(Engine(model)) as running:
            async with (
                talking(running, "/stream") as stream,
                talking(running, "/complete") as complete,
                talking(running, "/ws") as socket,
            ):
                await eventually(lambda: running.server.engine.waiting == 2)

                def die(row: int, length: int) -> None:
                    raise SystemError("cannot free the row")

                model.truncate = die  # type: ignore[method-assign]
                model.step.release(1000)
                for talk in (stream, complete, socket):
                    await talk.rest()
                    assert talk.end["error"]["message"] == "the generation thread died"
            assert complete.end["status"] == 500
            assert (await running.ask("POST", "/stream", {"prompt": "a"})).status == 503
            assert (await running.ask("GET", "/health")).status == 503
            assert (await asked(running, "/ws")).failure is Failure.IN_BAND

    async def test_a_bad_row_leaves_its_neighbour_alone(self) -> None:
        """Field report 95: the other's text is what it is alone."""
        body = {"prompt": "good", "max_tokens": 60, "seed": 1}
        model = FakeModel(rows=2)
        model.fail_choose = lambda history: bytes(history[:3]) == b"bad" and len(history) > 5
        async with serving(Engine(model)) as running:
            alone = await asked(running, "/complete", **body)
            good, *bad = await asyncio.gather(
                asked(running, "/stream", **body),
                *(asked(running, route, prompt="bad") for route in ROUTES),
            )
        assert good.complete
        assert good.text == alone.text
        assert all(not reply.complete for reply in bad)

    @pytest.mark.parametrize("route", ROUTES)
    async def test_a_prompt_that_cannot_be_encoded(self, route: str) -> None:
        """Field report 32: what can be known before the first token is no stream."""

        class Refusing(FakeModel):
            def encode(self, prompt: Any) -> list[int]:
                raise ValueError("the chat template knows no such role")

        async with serving(Engine(Refusing())) as running:
            reply = await asked(running, route)
            assert not running.server.entries
        assert "no such role" in reply.error
        assert reply.failure is (Failure.IN_BAND if route == "/ws" else Failure.STATUS)
        assert reply.status == (101 if route == "/ws" else 400)

    @pytest.mark.parametrize("route", ROUTES)
    async def test_a_tokenizer_that_breaks(
        self, route: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Broken(FakeModel):
            def encode(self, prompt: Any) -> list[int]:
                raise KeyError("secret")

        async with serving(Engine(Broken())) as running:
            reply = await asked(running, route)
        assert reply.failure is (Failure.TRUNCATED if route == "/ws" else Failure.STATUS)
        assert reply.status == (101 if route == "/ws" else 500)
        assert "secret" not in reply.error
        assert "secret" in caplog.text

    async def test_a_whole_reply_is_whole_though_the_server_shuts_down(self) -> None:
        """The last token and the shutdown in one moment: the reply is not told as an error."""

        class Racing(SimulatedEngine):
            def submit(self, *args: Any, **kwargs: Any) -> Generation:
                generation = Generation(1)
                generation.cancel("shutdown")
                generation.deliver("whole", "length")
                return generation

        async with serving(Racing()) as running:
            for route in ROUTES:
                reply = await asked(running, route)
                assert (reply.complete, reply.text) == (True, "whole")

    async def test_nothing_begins_after_the_shutdown_did(self) -> None:
        """A prompt that was still being tokenized is refused, not forgotten."""
        entered, release = threading.Event(), threading.Event()

        class Slow(FakeModel):
            def encode(self, prompt: Any) -> list[int]:
                entered.set()
                assert release.wait(10)
                return super().encode(prompt)

        engine = Engine(Slow(context=4096))
        async with serving(engine, settings=quick(linger_s=0.05)) as running:
            async with talking(running, "/complete", prompt="a" * 3000) as talk:
                await eventually(entered.is_set)
                stopping = asyncio.create_task(running.server.stop(goodbye_s=5))
                await asyncio.sleep(0)
                release.set()
                await talk.rest()
                assert talk.end["status"] == 503
                await stopping
        assert not running.server.entries

    async def test_no_event_without_data_that_is_json(self) -> None:
        """Field report 29, heartbeats and all."""
        engine = SimulatedEngine(delay_ms=5, jitter_ms=0, first_delay_ms=50)
        async with serving(engine, settings=quick(heartbeat_s=0.002)) as running:
            for events in ("plain", "named", "bare"):
                for fault in ({}, {"fail_after": 2}):
                    body = {"prompt": "a", "max_tokens": 3, "events": events, "usage": True}
                    answer = await running.ask("POST", "/stream", {**body, **fault})
                    assert b"\n\n:\n\n" in answer.content
                    for event in sse.Parser().feed(answer.content):
                        assert event.data == "[DONE]" or json.loads(event.data)


class TestLimits:
    @pytest.mark.parametrize("route", ROUTES)
    async def test_one_token(self, route: str) -> None:
        """Field report 96."""
        async with serving(Engine(says("abc"))) as running:
            reply = await asked(running, route, max_tokens=1)
        assert (reply.text, reply.finish_reason) == ("a", "length")

    @pytest.mark.parametrize("route", ROUTES)
    async def test_a_prompt_one_below_the_context(self, route: str) -> None:
        """Field report 98: it runs, and ends at the limit."""
        async with serving(Engine(FakeModel(context=64))) as running:
            reply = await asked(running, route, prompt="a" * 63, max_tokens=50)
        assert (len(reply.text), reply.finish_reason) == (1, "length")

    async def test_a_long_prompt_does_not_block_the_loop(self) -> None:
        """Field report 101: a heartbeat goes on while a thread is busy with a tokenizer."""
        entered, release = threading.Event(), threading.Event()

        class Slow(FakeModel):
            def encode(self, prompt: Any) -> list[int]:
                if len(prompt) > 1000:
                    entered.set()
                    time.sleep(0.3)
                    release.set()
                return super().encode(prompt)

        gaps: list[float] = []
        busy: list[bool] = []

        async def beat() -> None:
            last = time.monotonic()
            while True:
                await asyncio.sleep(0.001)
                now = time.monotonic()
                gaps.append(now - last)
                busy.append(entered.is_set() and not release.is_set())
                last = now

        async with serving(Engine(Slow(context=4096))) as running:
            beating = asyncio.create_task(beat())
            reply = await asked(running, "/stream", prompt="a" * 4000, max_tokens=2)
            beating.cancel()
        assert reply.complete
        assert any(busy)
        assert max(gaps) < 0.29, f"the loop stood still for {max(gaps) * 1000:.0f} ms"


# --- Nothing is left behind --------------------------------------------------------------------


def open_files() -> int:
    folder = "/proc/self/fd"
    return len(os.listdir(folder)) if os.path.isdir(folder) else 0


async def test_a_thousand_requests_half_of_them_aborted() -> None:
    """Field reports 92 and 110: objects, threads, descriptors and rows are as they were."""
    model = FakeModel(rows=3)
    engine = Engine(model, max_waiting=50)
    body = {"prompt": "some words", "max_tokens": 3, "seed": 1}
    async with serving(engine) as running:
        running.server.delivery.entries = deque(maxlen=20)  # the log is full after the warm-up

        async def tiny(i: int) -> None:
            route = ("/stream", "/complete", "/ws", "GET /stream")[i // 2 % 4]
            async with running.connect() as peer:
                talk = Talk(route, peer)
                await talk.open(body)
                if i % 2 == 0:
                    await talk.rest()
                    assert len(talk.text) == 3
                else:
                    for _ in range(i % 7):  # in the head, queued, prefilling, decoding, at the end
                        await asyncio.sleep(0)
                    (peer.close if i % 4 == 1 else peer.reset)()

        async def many(number: int) -> tuple[int, int, int]:
            for start in range(0, number, 10):
                await asyncio.gather(*(tiny(i) for i in range(start, start + 10)))
            await eventually(lambda: not running.server._connections)
            await eventually(lambda: engine.running == engine.waiting == 0)
            await asyncio.sleep(0.01)  # closed sockets are let go of one turn later
            model.calls.clear()
            gc.collect()
            return len(gc.get_objects()), threading.active_count(), open_files()

        before_text = await asked(running, "/complete", **body)
        objects, threads, files = await many(200)
        objects_after, threads_after, files_after = await many(1000)
        assert threads_after <= threads
        assert files_after <= files
        assert objects_after - objects < 300  # one for each request would be a thousand
        assert not running.server.delivery._running
        assert not running.server._tasks
        assert (await asked(running, "/complete", **body)).text == before_text.text
