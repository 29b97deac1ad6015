"""The client that drains, and what the experiment makes of what it tells."""

import asyncio
import contextlib
import dataclasses
import os
import resource
import sys

import pytest
from require import require
from scripted import scripted
from splits import splits

import drainer
import http1
import websocket
from drainer import Drained, Drainer, DrainError, Stream

require("tqdm")
import delivery_experiments  # noqa: E402
from bench import Bench  # noqa: E402
from delivery_experiments import BARE, HEADER, SUBJECTS, Row, Size, Skipped, Subject  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the drainer needs epoll")

PIECE, DONE = b'data: {"text": " a"}\n\n', b"data: [DONE]\n\n"
SSE_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CLOSE_HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
LONG = b'{"done": true, "usage": "' + b"x" * 200 + b'"}'


def chunked(*events):
    return b"".join(map(http1.encode_chunk, events)) + http1.LAST_CHUNK


def frames(*messages):
    return b"".join(websocket.encode_frame(1, message) for message in messages)


STREAMS = {
    "sse": SSE_HEAD + chunked(PIECE, PIECE, DONE),
    "close": CLOSE_HEAD + PIECE + PIECE + DONE,
    "ws": b"HTTP/1.1 101 Switching Protocols\r\n\r\n"
    + frames(b'{"text": "a"}', b'{"text": "\n\n"}')
    + websocket.encode_frame(9, b"")  # a ping is no event
    + frames(LONG)
    + websocket.encode_frame(8, b"\x03\xe8"),
}


class TestReading:
    @pytest.mark.parametrize("way", drainer.WAYS)
    def test_events_are_counted_however_they_are_read(self, way):
        for fragments in splits(STREAMS[way]):
            subject = Drainer("http://127.0.0.1:1", way, 1.0)
            stream = Stream(None, 2, b"")
            ends = [subject._read(stream, part, at) for at, part in enumerate(fragments)]
            assert stream.count == len(stream.dates) == 3
            assert ends == [False] * (len(fragments) - 1) + [way != "close"]

    def test_an_event_has_the_date_of_the_read_that_completed_it(self):
        subject, stream = Drainer("http://127.0.0.1:1", "sse", 1.0), Stream(None, 2, b"")
        raw = STREAMS["sse"]
        middle = raw.index(b"\n\n") + 1
        for date, part in ((1.0, raw[:middle]), (2.0, raw[middle:])):
            subject._read(stream, part, date)
        assert stream.began == 1.0
        assert stream.dates == [2.0] * 3

    def test_lateness_is_against_the_schedule_and_within_the_window(self):
        subject, stream = Drainer("http://127.0.0.1:1", "sse", 10.0), Stream(None, 4, b"")
        stream.began, stream.dates = 100.0, [110.5, 121.0, 130.0, 149.0, 149.0]
        assert list(subject._late(stream, 0, 200)) == [0.5, 1.0, 0.0, 9.0]  # not of the end
        assert list(subject._late(stream, 111, 140)) == [1.0, 0.0]

    @pytest.mark.parametrize(
        ("way", "head", "why"),
        [
            ("sse", b"HTTP/1.1 503 Busy\r\n\r\n", "answered HTTP/1.1 503 Busy"),
            ("sse", CLOSE_HEAD, "framing"),
            ("close", SSE_HEAD, "framing"),
            ("ws", SSE_HEAD, "answered HTTP/1.1 200 OK"),
        ],
    )
    def test_another_answer_is_no_measurement(self, way, head, why):
        with pytest.raises(DrainError, match=why):
            Drainer("http://127.0.0.1:1", way, 1.0)._read(Stream(None, 1, b""), head, 0.0)


async def drained(*scripts):
    """What a drainer says of one stream, of which it asks for two events."""
    async with scripted(*scripts) as server:
        with contextlib.closing(Drainer(server.url(""), "sse", 0.5)) as subject:
            return await asyncio.to_thread(subject.run, 1, 1.4, os.getpid())


class TestWhole:
    @pytest.mark.parametrize(
        ("content", "whole"),
        [
            (chunked(PIECE, PIECE, DONE), 1),
            (chunked(PIECE, DONE), 0),
            (chunked(PIECE, PIECE, PIECE, DONE), 0),
            (chunked(PIECE, PIECE, DONE).removesuffix(http1.LAST_CHUNK), 0),
            (chunked(PIECE, PIECE), 0),
        ],
    )
    async def test_every_event_and_the_end(self, content, whole):
        async def pause(peer):
            await asyncio.sleep(0.15)  # a tenth of it all is the least that is measured

        result = await drained([SSE_HEAD, pause, content])
        assert result.events == 2
        assert result.whole == whole
        assert result.window_s >= 0.14

    async def test_no_time_to_measure(self):
        with pytest.raises(drainer.TooShort, match="too much of it all"):
            await drained([STREAMS["sse"]])

    async def test_opening_takes_too_long(self):
        async with scripted([SSE_HEAD + chunked(PIECE, DONE)], []) as server:
            with contextlib.closing(Drainer(server.url(""), "sse", 1.0)) as subject:
                with pytest.raises(drainer.TooShort, match="0 of 2 streams opened"):
                    await asyncio.to_thread(subject.run, 2, 0.0000001, os.getpid())

    async def test_no_answer(self):
        with pytest.raises(DrainError, match="without an answer"):
            await drained()

    def test_the_clock_is_that_of_the_process(self):
        before = drainer.cpu_s(os.getpid())
        while drainer.cpu_s(os.getpid()) < before + 0.005:
            pass
        assert drainer.cpu_s(os.getppid()) != drainer.cpu_s(os.getpid())

    def test_too_few_files(self, monkeypatch):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (50, 1000))
        assert drainer.allow_files(2000) == "the system allows 1,000 open files"
        raised = []
        monkeypatch.setattr(resource, "setrlimit", lambda *limits: raised.append(limits))
        assert drainer.allow_files(200) is None
        assert raised == [(resource.RLIMIT_NOFILE, (300, 1000))]


SMALL = Size(3, 5, 0.6)


class TestMeasure:
    async def test_a_real_server(self):
        result = await delivery_experiments.measure(SUBJECTS["ws"], SMALL)
        assert result.whole == SMALL.streams
        assert 0 < result.window_events <= result.events
        assert 0 < result.window_cpu_s < result.window_s
        assert list(result.late) == sorted(result.late)

    async def test_what_is_not_installed(self):
        for subject, name in (
            (dataclasses.replace(BARE, needs=("no_such_module",)), "no_such_module"),
            (dataclasses.replace(BARE, program="no-such-program"), "no-such-program"),
        ):
            with pytest.raises(Skipped, match=f"not installed: {name}"):
                await delivery_experiments.measure(subject, SMALL)

    async def test_a_server_that_does_not_start(self):
        with pytest.raises(Skipped, match="did not start"):
            await delivery_experiments.measure(Subject("x", "sse", ("no_such.py",)), SMALL)

    async def test_a_run_that_was_too_short_is_made_once_more_with_time(self, monkeypatch):
        lasted = []

        async def drain(subject, url, pid, size):
            lasted.append(size.lasts_s)
            raise delivery_experiments.TooShort("too slow")

        monkeypatch.setattr(delivery_experiments, "_drain", drain)
        with pytest.raises(Skipped, match="too slow"):
            await delivery_experiments.measure(BARE, Size(1, 5, 1.0))
        assert lasted == [1.0, 3.0]

    async def test_a_drainer_that_refuses(self):
        wrong = dataclasses.replace(BARE, way="ws")  # the bare loop knows no WebSocket
        with pytest.raises(Skipped, match="closed a connection without an answer"):
            await delivery_experiments.measure(wrong, SMALL)


def drained_of(cpu_us, late_s=0.001, memory=0, whole=200):
    """Of 1,000 events."""
    return Drained(
        0.1, 2.0, 1000, cpu_us / 1000, memory, 2000, whole, (late_s / 4, late_s / 2, late_s)
    )


def row(name, streams, *drained, skipped=None):
    return Row(SUBJECTS[name], Size(streams, 20, 2.0), list(drained), skipped)


class TestTable:
    def test_against_the_bare_loop_of_the_same_size(self):
        rows = [
            row("bare", 200, drained_of(5), drained_of(6), drained_of(7)),
            row("sse", 200, drained_of(9, memory=200 * 2048), drained_of(12), drained_of(50)),
            row("bare", 2000, drained_of(10)),
            row("sse", 2000, drained_of(15, whole=1999)),
            row("ws", 2000, skipped="no room"),
        ]
        lines = delivery_experiments.table(rows)
        assert all(len(line) == len(HEADER) for line in lines)
        assert [line[2:4] for line in lines[:4]] == [
            ["6.0 us", "1.00x"], ["12.0 us", "2.0x"], ["10.0 us", "1.00x"], ["15.0 us", "1.50x"],
        ]  # fmt: skip
        assert [line[-1] for line in lines[:4]] == [
            "600 of 600", "600 of 600", "200 of 2,000", "1,999 of 2,000",
        ]  # fmt: skip
        assert lines[4][2] == "skipped: no room"

    def test_goals(self):
        rows = [
            row("bare", 200, drained_of(6)),
            row("sse", 200, drained_of(9)),
            row("node", 200, drained_of(18)),
            row("aiohttp", 200, drained_of(16)),
            row("sse", 2000, drained_of(10, whole=2000)),
            row("sse", 10000, drained_of(12, late_s=0.2, memory=10**8, whole=9999)),
        ]
        told = " ".join(delivery_experiments.goals(rows))
        assert "1.50x of the bare loop" in told
        assert "9.0 us beside 16.0 us of the best framework" in told
        assert "p99 200 ms late" in told
        assert "10.0 KB a stream" in told
        assert "1 streams not whole" in told
        assert "1.11x at 2,000, 1.33x at 10,000" in told

    def test_without_anything(self):
        assert delivery_experiments.goals([row("sse", 200, skipped="no room")]) == []


async def test_delivery(monkeypatch):
    monkeypatch.setattr(delivery_experiments, "SIZES", {200: SMALL})
    few = {name: SUBJECTS[name] for name in ("bare", "sse")}
    few["absent"] = Subject("absent", "sse", ("x",), needs=("no_such_module",))
    few = {
        name: dataclasses.replace(subject, sizes=(SMALL.streams,)) for name, subject in few.items()
    }
    monkeypatch.setattr(delivery_experiments, "SUBJECTS", few)
    finding = await delivery_experiments.delivery(Bench(quiet=True))
    assert [line[1] for line in finding.rows] == ["bare loop", "this server, SSE", "absent"]
    assert [line[-1] for line in finding.rows] == ["3 of 3", "3 of 3", "-"]
    assert "not installed: no_such_module" in finding.rows[2][2]


def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(delivery_experiments, "SIZES", {200: SMALL})
    assert delivery_experiments.main(["--only", "close", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "bare loop" in out
    assert "this server, SSE to the close" in out
