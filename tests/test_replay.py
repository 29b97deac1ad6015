"""Replies that can be resumed: the store by itself, and over real connections."""

import asyncio
import json
import re
import threading
from contextlib import nullcontext
from typing import Any
from urllib.parse import urlencode

import pytest
from fakes import FakeModel
from serving import Answer, Peer, Running, eventually, quick, serving

import http1
import sse
from delivery import Policy
from engine import Engine
from generation import BadRequest, Generation, QueueFull
from pieces import Banned
from replay import Replay, ReplayStore, parse_event_id
from simulated import SimulatedEngine

ASK = {"prompt": "One, two,", "max_tokens": 9, "seed": 7, "resume": True}
FOREVER = {"prompt": "a", "max_tokens": 1_000_000, "seed": 1, "resume": True}


class TestEventId:
    def test_good(self) -> None:
        assert parse_event_id("reply-0a1b:12") == ("reply-0a1b", 12)

    @pytest.mark.parametrize(
        "text",
        ["999999", "-1", "abc", "reply-0a:", "reply-0a:-1", "reply-0a:+1", "reply-0a:1_0",
         "reply-0a: 1", "reply-0a:1\n", "reply-0a:٣", "reply-0A:1", "reply-:1", "x:1", "reply-0a",
         "reply-0a:1:2", "reply-0a:1e3", "reply-0a:" + "1" * 100_000],
        ids=lambda text: text[:12],
    )  # fmt: skip
    def test_bad(self, text: str) -> None:
        """Field report 37."""
        with pytest.raises(BadRequest) as caught:
            parse_event_id(text)
        assert caught.value.field == "Last-Event-ID"


async def tell(replay: Replay, number: int, gate: asyncio.Event | None = None) -> None:
    for i in range(number):
        replay.put(f"{i} ".encode())
        if gate is not None and i == 0:
            await gate.wait()


class Kept:
    """An outlet that is always ready."""

    frame = bytes

    def __init__(self) -> None:
        self.content = b""

    def put(self, data: bytes) -> bool:
        self.content += data
        return True

    async def ready(self) -> None:
        raise AssertionError("it always is")


async def read(replay: Replay, after: int = 0) -> bytes:
    outlet = Kept()
    await replay.follow(after, outlet, lambda: True)
    return outlet.content


class TestStore:
    async def test_from_any_number(self) -> None:
        store = ReplayStore(60)
        replay = Replay(Generation(1), 60)
        store.add(replay, tell(replay, 3))
        assert await read(replay) == b"0 1 2 "
        assert await read(replay, 2) == b"2 "
        assert await read(replay, 3) == b""
        assert store.get(replay.generation.id) is replay

    async def test_all_who_follow_get_each_event_once(self) -> None:
        gate = asyncio.Event()
        replay = Replay(Generation(1), 60)
        ReplayStore(60).add(replay, tell(replay, 5, gate))
        followers = [asyncio.ensure_future(read(replay)) for _ in range(3)]
        await eventually(lambda: replay.events)
        late = asyncio.ensure_future(read(replay, 1))
        gate.set()
        whole = b"0 1 2 3 4 "
        assert await asyncio.gather(*followers, late) == [whole] * 3 + [whole[2:]]

    async def test_expires_after_keep(self) -> None:
        store = ReplayStore(keep_s=0.01)
        replay = Replay(Generation(1), 60)
        store.add(replay, tell(replay, 3))
        await read(replay)
        await eventually(lambda: not len(store))
        assert store.get(replay.generation.id) is None

    async def test_finished_ones_make_room(self) -> None:
        store = ReplayStore(60, most=2)
        replays = [Replay(Generation(1), 60) for _ in range(5)]
        for replay in replays:
            store.check_room()
            store.add(replay, tell(replay, 3))
            await read(replay)
        assert len(store) == 2
        assert [store.get(r.generation.id) is not None for r in replays] == [False] * 3 + [True] * 2

    async def test_running_ones_do_not(self) -> None:
        gate = asyncio.Event()
        store = ReplayStore(60, most=2)
        for _ in range(2):
            store.check_room()
            replay = Replay(Generation(1), 60)
            store.add(replay, tell(replay, 3, gate))
        with pytest.raises(QueueFull):
            store.check_room()
        gate.set()
        await eventually(lambda: all(r.complete for r in store._replays.values()))
        store.check_room()
        assert len(store) == 2  # who is refused after this has cost no other its place
        replay = Replay(Generation(1), 60)
        store.add(replay, tell(replay, 3))
        assert len(store) == 2

    async def test_a_reply_that_nobody_ever_followed_is_given_up(self) -> None:
        replay = Replay(Generation(1), grace_s=0.01)
        ReplayStore(60).add(replay, tell(replay, 3, asyncio.Event()))
        await eventually(lambda: replay.generation.cancel_reason)

    async def test_who_left_at_once_leaves_no_timer_behind(self) -> None:
        """The reply's own wait for a follower, and that after the one who left, are one wait."""
        replay = Replay(Generation(1), grace_s=0.03)
        await replay.follow(0, Kept(), lambda: False)
        gate = asyncio.Event()
        ReplayStore(60).add(replay, tell(replay, 3, gate))
        await asyncio.sleep(0)
        following = asyncio.create_task(read(replay))
        await asyncio.sleep(0.1)
        assert replay.generation.cancel_reason is None
        gate.set()
        assert await following == b"0 1 2 "

    async def test_a_long_replay_lets_others_have_their_turn(self) -> None:
        replay = Replay(Generation(1), 60)
        ReplayStore(60).add(replay, tell(replay, 1000))
        await eventually(lambda: replay.complete)
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        await read(replay)
        task.cancel()
        assert turns >= 5

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    async def test_a_fault_of_ours_is_no_end(self) -> None:
        """The end law: followers of a reply whose telling failed learn that it broke off."""

        async def failing() -> None:
            replay.put(b"1")
            raise KeyError("a bug")

        reported: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(what))
        replay = Replay(Generation(1), 60)
        ReplayStore(60).add(replay, failing())
        with pytest.raises(RuntimeError, match="broke off"):
            await read(replay)
        await replay.reached(1)
        with pytest.raises(RuntimeError, match="broke off"):
            await replay.reached(2)
        await eventually(lambda: reported)
        assert isinstance(reported[0]["exception"], KeyError)
        assert replay.generation.cancel_reason  # and nothing is generated for it


# Over connections.


def numbered(content: bytes) -> list[tuple[str, str]]:
    """Id and data of each event, read as a browser reads them."""
    return [(event.last_event_id, event.data) for event in sse.Parser().feed(content)]


def text_of(events: list[tuple[str, str]]) -> str:
    return "".join(json.loads(data).get("text", "") for _, data in events if data != "[DONE]")


async def whole(running: Running, **others: Any) -> tuple[str, list[tuple[str, str]]]:
    """Ask for a resumable reply and read all of it: its id, its events."""
    answer = await running.ask("POST", "/stream", {**ASK, **others})
    assert answer.status == 200
    return answer.fields.get("reply-id"), numbered(answer.content)


async def resume(running: Running, id: str, last: str | None = None) -> Answer:
    fields = {} if last is None else {"Last_Event_ID": last}
    return await running.ask("GET", f"/stream/{id}", **fields)


class TestEvents:
    @pytest.mark.parametrize("events", ["plain", "named", "bare"])
    async def test_every_event_has_its_number(self, events: str) -> None:
        async with serving() as running:
            id, told = await whole(running, events=events)
        assert re.fullmatch("reply-[0-9a-f]+", id)
        assert [name for name, _ in told] == [f"{id}:{n}" for n in range(1, 11)]

    async def test_without_resume_no_event_has_an_id_nor_a_retry(self) -> None:
        """Field report 27: some SDKs dispatch an empty event after any that had an id."""
        async with serving() as running:
            for events in ("plain", "named", "bare"):
                answer = await running.ask(
                    "POST", "/stream", {**ASK, "resume": False, "events": events, "usage": True}
                )
                assert b"id:" not in answer.content
                assert b"retry:" not in answer.content

    async def test_the_end_alone_has_all(self) -> None:
        """With usage asked for, two events end the reply; only the last one has the number."""
        async with serving() as running:
            id, told = await whole(running, usage=True)
            assert told[-2][0] == f"{id}:9"
            assert told[-1] == (f"{id}:10", "[DONE]")
            again = numbered((await resume(running, id, f"{id}:9")).content)
        assert [data for _, data in again] == [told[-2][1], "[DONE]"]


class TestResume:
    async def test_cut_at_every_number_each_token_comes_once(self) -> None:
        """Field report 37."""
        async with serving() as running:
            plain = await running.ask("POST", "/complete", {**ASK, "resume": False})
            id, told = await whole(running)
            assert text_of(told) == plain.json()["text"]
            for seen in range(10):
                rest = await resume(running, id, f"{id}:{seen}")
                assert rest.status == 200
                assert rest.fields.get("content-type") == "text/event-stream; charset=utf-8"
                assert rest.fields.get("reply-id") == id
                assert told[:seen] + numbered(rest.content) == told
            assert numbered((await resume(running, id)).content) == told

    @pytest.mark.parametrize("seen", [0, 1, 4, 10, 11])
    async def test_cut_live_and_resumed_live(self, seen: int) -> None:
        """A connection that breaks after any event; the rest comes over the next as it is made."""
        model = FakeModel(rows=1)
        model.step = threading.Semaphore(0)
        body = {**ASK, "max_tokens": 12}
        async with serving(Engine(model)) as running:
            async with running.connect() as peer:
                peer.request("POST", "/stream", body)
                await peer.head()
                if seen:
                    model.step.release(seen)
                while len(numbered(peer.content)) < seen:
                    await peer.event()
                before = numbered(peer.content)
                peer.reset()
            (entry,) = running.server.entries
            await eventually(lambda: entry.client_left)
            id = entry.generation.id
            async with running.connect() as peer:
                fields = {"Last_Event_ID": before[-1][0]} if before else {}
                peer.request("GET", f"/stream/{id}", **fields)
                await peer.head()
                assert entry.generation.finish_reason is None
                model.step.release(100)
                after = numbered(await peer_rest(peer))
            model.step.release(100)
            alone = await running.ask("POST", "/complete", {**body, "resume": False})
        assert [name for name, _ in before + after] == [f"{id}:{n}" for n in range(1, 14)]
        assert text_of(before + after) == alone.json()["text"]
        assert after[-1][1] == "[DONE]"

    async def test_two_at_once(self) -> None:
        model = FakeModel(rows=1)
        model.step = threading.Semaphore(0)
        async with serving(Engine(model)) as running:
            async with running.connect() as first, running.connect() as second:
                first.request("POST", "/stream", ASK)
                head, _ = await first.head()
                model.step.release(4)
                while len(numbered(first.content)) < 4:
                    await first.event()
                id = head.fields.get("reply-id")
                second.request("GET", f"/stream/{id}", Last_Event_ID=f"{id}:2")
                await second.head()
                model.step.release(100)
                told = numbered(await peer_rest(first))
                assert told[2:] == numbered(await peer_rest(second))
                assert len(told) == 10

    async def test_one_of_two_leaves(self) -> None:
        """The other reads on; nobody's absence is waited for."""
        engine = SimulatedEngine(delay_ms=1, jitter_ms=0)
        policy = Policy(grace_s=0)
        async with serving(engine, policy=policy) as running, running.connect() as stays:
            stays.request("POST", "/stream", FOREVER)
            head, _ = await stays.head()
            async with running.connect() as leaves:
                leaves.request("GET", f"/stream/{head.fields.get('reply-id')}")
                await leaves.until(b"data")
                (replay,) = running.server.delivery.replays._replays.values()
                assert replay._followers == 2
            await eventually(lambda: replay._followers == 1)
            mark = len(stays.content)
            while len(stays.content) < mark + 1000:
                await stays.event()
            assert engine.running == 1

    async def test_a_long_one_to_a_client_that_keeps_up(self) -> None:
        """More than may wait for a client at a time: it waits where it is kept, not on the way."""
        engine = SimulatedEngine(delay_ms=0, jitter_ms=0)
        body = {**ASK, "max_tokens": 20_000}
        async with serving(engine) as running:
            id, told = await whole(running, **body)
            answer = await resume(running, id)
            assert len(answer.content) > 2**20
            assert numbered(answer.content) == told

    @pytest.mark.parametrize("slow_client", ["buffer", "pause", "drop"])
    async def test_a_slow_follower_holds_up_nobody(self, slow_client: str) -> None:
        engine = SimulatedEngine(delay_ms=0, jitter_ms=0)
        body = {**ASK, "max_tokens": 10_000}
        policy = Policy(slow_client=slow_client)
        async with serving(engine, policy=policy) as running:
            async with running.connect(receive_buffer=4096) as slow:
                slow.request("POST", "/stream", body)
                await eventually(lambda: running.server.entries)
                (entry,) = running.server.entries
                await eventually(lambda: entry.generation.finish_reason, 20)
                assert entry.generation.finish_reason == "length"
                fast = await resume(running, entry.generation.id)
                assert text_of(numbered((await slow.answer()).content)) == fast.text()

    async def test_head(self) -> None:
        """RFC 9110 section 9.3.2."""
        async with serving() as running:
            id, _ = await whole(running)
            async with running.connect() as peer:
                answer = await peer.ask("HEAD", f"/stream/{id}")
                assert (answer.status, answer.content) == (200, b"")
                assert "content-length" not in answer.fields
                assert (await peer.ask("GET", "/health")).status == 200

    async def test_only_streams_can_be_resumed(self) -> None:
        async with serving() as running:
            answer = await running.ask("POST", "/complete", ASK)
        assert answer.status == 400
        assert answer.json()["error"]["field"] == "resume"


async def peer_rest(peer: Peer) -> bytes:
    """The whole content of the stream whose head was read, to its end."""
    while not isinstance(await peer.event(), http1.End):
        pass
    return peer.content


class TestLastEventId:
    """Field report 37, with the decisions: 204 all seen, 404 unknown or expired, 400 malformed."""

    @pytest.mark.parametrize(
        ("last", "status"),
        [
            ("999999", 400),
            ("-1", 400),
            ("abc", 400),
            ("{id}:-1", 400),
            ("{id}:11", 400),  # ahead of the reply
            ("{id}:999999", 400),
            ("reply-0000000000000000:5", 400),  # another reply's
            ("{id}:" + "9" * 5000, 400),
            ("x" * 100_000, 431),
            ("{id}:10", 204),
            ("{id}:0", 200),
            ("", 200),  # RFC: no id
        ],
        ids=lambda value: str(value)[:16],
    )
    async def test_of_a_finished_reply(
        self, last: str, status: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serving() as running:
            id, _ = await whole(running)
            answer = await resume(running, id, last.replace("{id}", id))
            assert answer.status == status
            if status == 204:
                assert answer.content == b""
            assert len(running.server.entries) == 1
        assert not caplog.records

    async def test_ahead_of_a_running_reply(self) -> None:
        engine = SimulatedEngine(delay_ms=3_600_000)
        async with serving(engine) as running, running.connect() as peer:
            peer.request("POST", "/stream", FOREVER)
            head, _ = await peer.head()
            id = head.fields.get("reply-id")
            assert (await resume(running, id, f"{id}:1")).status == 400

    @pytest.mark.parametrize("id", ["reply-0000000000000000", "x", "reply-", "%00", "..%2f"])
    async def test_unknown(self, id: str) -> None:
        async with serving() as running:
            assert (await resume(running, id)).status == 404

    async def test_unknown_though_well_formed(self) -> None:
        id = "reply-0000000000000000"
        async with serving() as running:
            assert (await resume(running, id, f"{id}:1")).status == 404

    async def test_of_a_reply_that_cannot_be_resumed(self) -> None:
        async with serving() as running:
            answer = await running.ask("POST", "/stream", {**ASK, "resume": False})
            assert (await resume(running, answer.fields.get("reply-id"))).status == 404

    async def test_expired(self) -> None:
        """404 after --keep; but who has seen the end is still told so."""
        async with serving(policy=Policy(keep_s=0.01)) as running:
            id, _ = await whole(running)
            await eventually(lambda: not len(running.server.delivery.replays))
            for last, status in (
                (None, 404),
                (f"{id}:3", 404),
                (f"{id}:11", 404),
                (f"{id}:10", 204),
            ):
                assert (await resume(running, id, last)).status == status

    async def test_on_the_route_that_generates(self) -> None:
        """A client repeats its request with the id; whatever it is, nothing is started."""
        async with serving() as running:
            id, told = await whole(running)
            for method, target, body in (
                ("GET", f"/stream?{urlencode({**ASK, 'resume': 'true'})}", None),
                ("POST", "/stream", ASK),
            ):
                for last, status in (
                    (f"{id}:4", 200),
                    (f"{id}:10", 204),
                    ("abc", 400),
                    ("reply-00:3", 404),
                ):
                    answer = await running.ask(method, target, body, Last_Event_ID=last)
                    assert answer.status == status
                    if status == 200:
                        assert told[:4] + numbered(answer.content) == told
            assert len(running.server.entries) == 1


class TestLife:
    """A resumable reply is nobody's connection's; but somebody has to come back for it."""

    async def test_survives_its_client_and_a_return_within_the_grace_time(self) -> None:
        engine = SimulatedEngine(delay_ms=1, jitter_ms=0)
        async with serving(engine, policy=Policy(grace_s=30)) as running:
            async with running.connect() as peer:
                peer.request("POST", "/stream", FOREVER)
                await peer.until(b"data")
                peer.reset()
            (replay,) = running.server.delivery.replays._replays.values()
            await eventually(lambda: replay._abandonment)
            made = len(replay.events)
            await eventually(lambda: len(replay.events) > made + 5)  # nobody reads it
            async with running.connect() as peer:
                peer.request("GET", f"/stream/{replay.generation.id}")
                await peer.until(b"data")
                assert replay._abandonment is None
                assert engine.running == 1

    async def test_then_the_stop_law(self) -> None:
        model = FakeModel(rows=1, context=4096)
        model.step = threading.Semaphore(0)
        engine = Engine(model)
        async with serving(engine, policy=Policy(grace_s=0.02)) as running:
            async with running.connect() as peer:
                peer.request("POST", "/stream", {**FOREVER, "max_tokens": 2000})
                model.step.release(3)
                await eventually(lambda: len(model.calls) == 4)
                peer.close()
            (entry,) = running.server.entries
            await eventually(lambda: entry.generation.cancel_reason)
            model.step.release(100)
            await eventually(lambda: entry.generation.finish_reason)
            assert len(model.calls) == 4  # the pass under way, and no more
            assert engine.running == 0
            answer = await resume(running, entry.generation.id)  # what there was is kept
            assert answer.content.count(b'"text"') == 3
            assert b"[DONE]" not in answer.content  # broken off is not ended
            assert b"event: error" in answer.content

    async def test_too_many_of_them(self) -> None:
        """Memory is bounded: one more is refused, and generates nothing."""
        engine = SimulatedEngine(delay_ms=3_600_000)
        async with serving(engine) as running:
            running.server.delivery.replays._most = 2
            async with running.connect() as a, running.connect() as b:
                for peer in (a, b):
                    peer.request("POST", "/stream", FOREVER)
                    await peer.head()
                answer = await running.ask("POST", "/stream", FOREVER)
                assert answer.status == 429
                assert answer.fields.get("retry-after")
                assert engine.running == 2
                plain = {**FOREVER, "resume": False}
                async with running.connect() as c:
                    c.request("POST", "/stream", plain)
                    assert (await c.head())[0].status == 200

    @pytest.mark.parametrize("fault", ["fail_after", "truncate_after"])
    async def test_with_a_fault(self, fault: str) -> None:
        async with serving() as running:
            async with running.connect() as peer:
                peer.request("POST", "/stream", {**ASK, fault: 4})
                await peer.head()
                cut = pytest.raises(http1.Truncated) if fault == "truncate_after" else nullcontext()
                with cut:
                    await peer_rest(peer)
                before = numbered(peer.content)
                (entry,) = running.server.entries
            id = entry.generation.id
            if fault == "truncate_after":
                # The connection was cut, the reply was not: the rest is there.
                assert len(before) == 4
                after = numbered((await resume(running, id, before[-1][0])).content)
                assert [name for name, _ in before + after] == [f"{id}:{n}" for n in range(1, 11)]
                assert after[-1][1] == "[DONE]"
            else:
                assert before[-1][0] == f"{id}:5"
                assert "failed" in before[-1][1]
                assert (await resume(running, id, before[-1][0])).status == 204
                assert numbered((await resume(running, id)).content) == before

    async def test_shutdown_is_told_to_every_follower(self) -> None:
        engine = SimulatedEngine(delay_ms=1, jitter_ms=0)
        async with serving(engine, settings=quick(linger_s=0.05)) as running:
            async with running.connect() as first, running.connect() as second:
                first.request("POST", "/stream", FOREVER)
                head, _ = await first.head()
                second.request("GET", f"/stream/{head.fields.get('reply-id')}")
                await second.until(b"data")
                await running.server.stop(goodbye_s=5)
                for peer in (first, second):
                    content = await peer_rest(peer)
                    assert b"event: error" in content
                    assert b"shutting down" in content
                    assert b"[DONE]" not in content

    async def test_filtered_and_grouped(self, tmp_path: Any) -> None:
        """What is kept is what was told: a banned phrase is not in the replay either."""
        async with serving() as running:
            id, told = await whole(running)
        third = text_of(told).split()[2]
        async with serving(policy=Policy(banned=Banned([third]))) as running:
            id, told = await whole(running, hold_back=2, flush_tokens=2)
            again = numbered((await resume(running, id)).content)
        assert again == told
        assert third not in text_of(told)
        assert "filter" in told[-1][1]


class TestEventSource:
    """Field report 35: an EventSource left alone reconnects after the end, for ever."""

    @pytest.mark.parametrize("fault", [{}, {"fail_after": 2}])
    @pytest.mark.parametrize("events", ["plain", "named", "bare"])
    async def test_its_return_starts_nothing(self, events: str, fault: dict[str, int]) -> None:
        query = {"prompt": "a", "max_tokens": 3, "events": events, **fault}
        async with serving() as running, running.connect() as peer:
            answer = await peer.ask("GET", f"/stream?{urlencode(query)}")
            told = numbered(answer.content)
            *pieces, (last, _) = told
            assert {name for name, _ in pieces} == {""}  # an id on the end alone
            for _ in range(3):
                again = await peer.ask("GET", f"/stream?{urlencode(query)}", Last_Event_ID=last)
                assert again.status == 204
            assert len(running.server.entries) == 1

    async def test_with_usage_too(self) -> None:
        async with serving() as running:
            answer = await running.ask("GET", "/stream?prompt=a&max_tokens=3&usage=true")
            last = numbered(answer.content)[-1][0]
            again = await running.ask("GET", "/stream?prompt=a", Last_Event_ID=last)
            assert again.status == 204

    async def test_of_a_reply_that_the_log_has_forgotten(self) -> None:
        """404 stops it as well."""
        async with serving() as running:
            answer = await running.ask("GET", "/stream?prompt=a&max_tokens=3")
            running.server.entries.clear()
            last = numbered(answer.content)[-1][0]
            again = await running.ask("GET", "/stream?prompt=a", Last_Event_ID=last)
            assert again.status == 404
            assert not running.server.entries
