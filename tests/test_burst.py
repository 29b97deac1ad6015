"""What one step writes: held while it is made, and sent together, in order."""

import asyncio
import threading
from typing import Any

import pytest
from fakes import FakeModel
from serving import eventually, serving

import burst
from client import ask
from engine import Engine
from generation import Generation
from watching import Watched


class Client:
    """Writes as `Watched` does, to a list of what was sent to whom."""

    def __init__(self, name: str, sent: list[tuple[str, bytes]]) -> None:
        self.name = name
        self.sent = sent

    def write(self, data: bytes) -> None:
        writes = burst.held.get()
        assert writes is not None
        writes.append((self, data))

    def send(self, data: bytes, now: float) -> None:
        if data == b"!":
            raise ValueError("no")
        self.sent.append((self.name, data))


def clients(names: str) -> tuple[list[Client], list[tuple[str, bytes]]]:
    sent: list[tuple[str, bytes]] = []
    return [Client(name, sent) for name in names], sent


def test_sent_at_the_end_in_order() -> None:
    (a, b), sent = clients("ab")
    with burst.together():
        a.write(b"1")
        b.write(b"2")
        a.write(b"3")
        assert sent == []
    assert sent == [("a", b"1"), ("b", b"2"), ("a", b"3")]
    assert burst.held.get() is None


def test_what_was_made_before_a_fault_is_sent() -> None:
    (a,), sent = clients("a")

    def fail() -> None:
        with burst.together():
            a.write(b"1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert sent == [("a", b"1")]
    assert burst.held.get() is None


async def test_a_failed_write_costs_no_other_client_its_bytes() -> None:
    (a, b), sent = clients("ab")
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    with burst.together():
        a.write(b"!")
        b.write(b"2")
    assert sent == [("b", b"2")]
    assert [str(context["exception"]) for context in told] == ["no"]


def test_a_step_holds_nothing_of_another_thread() -> None:
    """Each event loop has its own: a transport is for one thread."""
    elsewhere: list[object] = []
    with burst.together():
        thread = threading.Thread(target=lambda: elsewhere.append(burst.held.get()))
        thread.start()
        thread.join()
    assert elsewhere == [None]


async def test_a_step_of_a_model_makes_all_its_events_before_it_sends_one(
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
