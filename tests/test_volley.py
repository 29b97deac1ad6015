"""What one pass writes: held while it is made, and sent together, in order."""

import asyncio
import threading
from typing import Any

import pytest
from fakes import FakeModel
from serving import eventually, serving

import volley
from client import ask
from engine import Engine
from generation import Generation
from volley import Volley
from watching import Watched


class Client:
    """Writes as `Watched` does, to a list of what was sent to whom."""

    def __init__(self, name: str, under_way: Volley, sent: list[tuple[str, bytes]]) -> None:
        self.name = name
        self.under_way = under_way
        self.sent = sent

    def write(self, data: bytes) -> None:
        if self.under_way.writes is None:
            self.send(data, 0)
        else:
            self.under_way.writes.append((self, data))

    def send(self, data: bytes, now: float) -> None:
        if data == b"!":
            raise ValueError("no")
        self.sent.append((self.name, data))


def clients(under_way: Volley, names: str) -> tuple[list[Client], list[tuple[str, bytes]]]:
    sent: list[tuple[str, bytes]] = []
    return [Client(name, under_way, sent) for name in names], sent


@pytest.fixture
def under_way() -> Volley:
    return Volley()


def test_sent_at_the_end_in_order(under_way: Volley) -> None:
    (a, b), sent = clients(under_way, "ab")
    with under_way.together():
        a.write(b"1")
        b.write(b"2")
        a.write(b"3")
        assert sent == []
    b.write(b"4")
    assert sent == [("a", b"1"), ("b", b"2"), ("a", b"3"), ("b", b"4")]


def test_one_within_another_is_part_of_it(under_way: Volley) -> None:
    (a,), sent = clients(under_way, "a")
    with under_way.together():
        a.write(b"1")
        with under_way.together():
            a.write(b"2")
        a.write(b"3")
        assert sent == []
    assert sent == [("a", b"1"), ("a", b"2"), ("a", b"3")]


def test_what_was_made_before_a_fault_is_sent(under_way: Volley) -> None:
    (a,), sent = clients(under_way, "a")

    def fail() -> None:
        with under_way.together():
            a.write(b"1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    a.write(b"2")
    assert sent == [("a", b"1"), ("a", b"2")]


async def test_a_failed_write_costs_no_other_client_its_bytes(under_way: Volley) -> None:
    (a, b), sent = clients(under_way, "ab")
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    with under_way.together():
        a.write(b"!")
        b.write(b"2")
    assert sent == [("b", b"2")]
    assert [str(context["exception"]) for context in told] == ["no"]


async def test_what_a_volley_leaves_to_be_called_is_not_part_of_it(under_way: Volley) -> None:
    """A callback knows the context in which it was made, so no context may hold the volley."""
    (a,), sent = clients(under_way, "a")
    loop = asyncio.get_running_loop()
    with under_way.together():
        loop.call_soon(a.write, b"2")
        a.write(b"1")
    await asyncio.sleep(0)
    assert sent == [("a", b"1"), ("a", b"2")]


async def test_each_event_loop_has_its_own() -> None:
    """A transport is for the thread of its loop."""

    async def other() -> Volley:
        return volley.of(asyncio.get_running_loop())

    ours = await other()
    assert ours is await other()
    assert await asyncio.to_thread(asyncio.run, other()) is not ours


async def test_a_pass_of_a_model_makes_all_its_events_before_it_sends_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no client gets another's."""
    happened: list[str] = []
    deliver, send = Generation.deliver, Watched.send

    def delivered(self: Generation, piece: str, *more: Any) -> None:
        happened.append("made" if piece else "ended")
        deliver(self, piece, *more)

    def sent(self: Watched, data: bytes, now: float) -> None:
        happened.append("sent" if b"data: {" in data else "else")
        send(self, data, now)

    monkeypatch.setattr(Generation, "deliver", delivered)
    monkeypatch.setattr(Watched, "send", sent)
    model = FakeModel(rows=4, script=lambda history: 97 + sum(history) % 26)
    model.step = threading.Semaphore(0)
    async with serving(Engine(model)) as running:
        url = f"http://127.0.0.1:{running.port}"
        bodies = [{"prompt": f"reply {n}", "max_tokens": 9, "seed": n} for n in range(4)]
        streams = [asyncio.create_task(ask(f"{url}/stream", body)) for body in bodies]
        engine = running.server.engine
        await eventually(lambda: engine.waiting + engine.running == 4)
        model.step.release(1000)
        streamed = [await stream for stream in streams]
        whole = [await ask(f"{url}/complete", body) for body in bodies]
    assert [reply.text for reply in streamed] == [reply.text for reply in whole]
    runs = "".join({"made": "m", "sent": "s"}.get(what, "") for what in happened)
    assert "mmmmssss" in runs, runs
