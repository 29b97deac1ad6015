"""Every way to leave, on a server with the simulated model."""

import socket

import pytest
from require import require, require_program
from serving import eventually, quick, serving

from simulated import SimulatedEngine

require("tqdm")
from benches import FastBench  # noqa: E402

import leaving  # noqa: E402
from leaving import READ_ON, ROUTES, WAYS, Cell, Guest  # noqa: E402

NATIVE = ROUTES[:3]


def needs_filter() -> None:
    if not leaving.can_vanish():
        pytest.skip("this system does not let a socket be made deaf")


async def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    require_program("nginx")
    # Long enough that no reply ends by itself before it is left, on whatever machine.
    settings = {"ROUNDS": 1, "TOKENS": 2000, "DELAY_MS": 50, "AFTER": 2, "ROUTES": NATIVE}
    for name, value in settings.items():
        monkeypatch.setattr(leaving, name, value)
    permitted = leaving.can_vanish()
    ways = [
        way
        for way in WAYS
        if way.leave is not Guest.half_close and (way.hop == "direct" or way.name != "vanish")
    ]
    monkeypatch.setattr(leaving, "WAYS", ways)
    async with FastBench() as bench:
        finding = await leaving.leaving(bench)
    rows = {row[0]: [cell.split(" ", 1)[-1] for cell in row[1:4]] for row in finding.rows}
    assert rows["cancel, direct"] == ["told"] * 3
    assert rows["stop, direct"] == rows["stop, nginx"] == ["-", "-", "told"]
    found = {"silent", "broke"} if permitted else {"not permitted"}
    assert {*rows["vanish, direct"]} <= found
    for hop in ("direct", "proxy.py", "nginx"):
        # A piece that is under way makes the kernel answer a close with a reset.
        assert {*rows[f"close, {hop}"], *rows[f"reset, {hop}"]} <= {"closed", "broke"}


@pytest.mark.parametrize("route", NATIVE, ids=[route.path[1:] for route in NATIVE])
async def test_one_who_vanishes_is_found(
    route: leaving.Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is not acknowledged; while nothing is, the kernel asks and hears nothing."""
    needs_filter()
    monkeypatch.setattr(leaving, "TOKENS", 5000)
    engine = SimulatedEngine(delay_ms=10, jitter_ms=0)
    async with serving(engine, settings=quick(stall_s=1)) as running:
        guest = Guest(f"http://127.0.0.1:{running.port}")
        try:
            await guest.ask(route, "a")
            await eventually(lambda: running.server.entries)
            (entry,) = running.server.entries
            await guest.vanish()
            await eventually(lambda: entry.generation.finish_reason, 20)
        finally:
            await guest.close()
    assert entry.client_left
    # A piece that is written in that very moment meets a broken connection.
    assert leaving.NOTICED[entry.generation.cancel_reason] in ("silent", "broke")


def test_what_a_cell_says() -> None:
    close, half = WAYS[0], next(way for way in WAYS if way.leave is Guest.half_close)
    assert str(Cell(close, ROUTES[0], absent="not installed")) == "not installed"
    assert str(Cell(close, ROUTES[0], [0, 1], ["closed", "broke"])) == "0 to 1 broke, closed"
    assert str(Cell(half, ROUTES[0], [89], [READ_ON])) == READ_ON
    ended = {"finish_reason": "length", "cancel_reason": None}
    assert leaving._noticed(Cell(half, ROUTES[0]), ended) == READ_ON
    assert leaving._noticed(Cell(close, ROUTES[0]), ended) == "unnoticed"
    assert leaving._noticed(Cell(close, ROUTES[0]), {**ended, **CANCELLED}) == "told"


CANCELLED = {"finish_reason": "cancelled", "cancel_reason": "cancelled by id"}


def test_a_deaf_socket_hears_nothing() -> None:
    needs_filter()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as peer:
            other, _ = listener.accept()
            with other:
                kept = leaving.vanish(peer)
                other.sendall(b"x")
                peer.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    peer.recv(1)
                del kept
