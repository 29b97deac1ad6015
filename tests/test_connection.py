"""One connection's life: persistence, deadlines, who left, who is slow, how to close."""

import asyncio
import contextlib
import json
import logging
import socket
import struct
import threading
import tracemalloc
from typing import Any

import pytest
from fakes import FakeModel
from serving import HOST, eventually, quick, serving

import http1
import server
import watching
from connection import Connection
from delivery import Policy
from engine import Engine
from simulated import SimulatedEngine

GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class TestPersistence:
    """RFC 9112 section 9.3."""

    async def test_many_requests_on_one_connection(self) -> None:
        async with serving() as running, running.connect() as peer:
            for _ in range(5):
                assert (await peer.ask("GET", "/health")).status == 200

    async def test_pipelined_answers_come_in_order_and_whole(self) -> None:
        async with serving() as running, running.connect() as peer:
            for n in (3, 1, 2):
                peer.request("POST", "/complete", {"prompt": "a", "max_tokens": n})
            peer.request("GET", "/health")
            answers = [await peer.answer() for _ in range(4)]
        counts = [a.json()["usage"]["completion_tokens"] for a in answers[:3]]
        assert counts == [3, 1, 2]
        assert answers[3].json()["status"] == "ok"

    async def test_a_request_pipelined_behind_a_stream_waits_for_its_end(self) -> None:
        async with serving() as running, running.connect() as peer:
            peer.request("POST", "/stream", {"prompt": "a", "max_tokens": 20})
            peer.request("GET", "/health")
            stream, health = await peer.answer(), await peer.answer()
        assert stream.events()[-1] == "[DONE]"
        assert health.status == 200

    async def test_the_client_asks_to_close(self) -> None:
        async with serving() as running, running.connect() as peer:
            answer = await peer.ask("GET", "/health", Connection="close")
            assert answer.fields.get("connection") == "close"
            assert await peer.closed() == b""

    @pytest.mark.parametrize("keep", [False, True])
    async def test_http_1_0(self, keep: bool) -> None:
        async with serving() as running, running.connect() as peer:
            line = b"Connection: keep-alive\r\n" if keep else b""
            peer.parser.expect("GET")
            peer.send(b"GET /health HTTP/1.0\r\n" + line + b"\r\n")
            answer = await peer.answer()
            assert answer.fields.get("connection") == ("keep-alive" if keep else "close")
            assert "transfer-encoding" not in answer.fields

    async def test_http_1_0_stream_is_ended_by_the_close(self) -> None:
        body = b'{"prompt": "a", "max_tokens": 3}'
        head = b"POST /stream HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n"
        async with serving() as running, running.connect() as peer:
            peer.parser.expect("POST")
            peer.send(head % len(body) + body)
            answer = await peer.answer()
        assert peer.parser.framing == "close"
        assert answer.fields.get("connection") == "close"
        assert answer.content.startswith(b"data:")
        assert answer.content.endswith(b"data: [DONE]\n\n")

    async def test_unread_content_is_never_taken_for_a_request(self) -> None:
        """Field report 16."""
        async with serving() as running, running.connect() as peer:
            peer.request("POST", "/nope", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            peer.request("GET", "/log")
            assert (await peer.answer()).status == 404
            assert "requests" in (await peer.answer()).json()

    async def test_unread_content_that_has_not_come_ends_the_connection(self) -> None:
        async with serving() as running, running.connect() as peer:
            peer.parser.expect("POST")
            peer.send(b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n")
            answer = await peer.answer()
            assert (answer.status, answer.fields.get("connection")) == (404, "close")
            assert await peer.closed() == b""

    async def test_nodelay_is_on(self) -> None:
        """Field report 22: Nagle's algorithm and delayed acknowledgements add 40 ms."""
        async with serving() as running, running.connect() as peer:
            await peer.ask("GET", "/health")
            (connection,) = running.server._connections
            import socket

            accepted = connection.writer.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


class TestExpect:
    """RFC 9110 section 10.1.1; field report 14."""

    HEAD = (
        b"POST /complete HTTP/1.%d\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    )
    BODY = b'{"prompt": "a", "max_tokens": 2}'

    async def test_continue_before_the_content(self) -> None:
        async with serving() as running, running.connect() as peer:
            peer.parser.expect("POST")
            peer.send(self.HEAD % (1, len(self.BODY)))
            event = await peer.event()
            assert event.status == 100
            peer.send(self.BODY)
            assert (await peer.answer()).status == 200

    async def test_no_continue_when_the_content_is_here(self) -> None:
        async with serving() as running, running.connect() as peer:
            peer.parser.expect("POST")
            peer.send(self.HEAD % (1, len(self.BODY)) + self.BODY)
            answer = await peer.answer()
            assert (answer.status, answer.interim) == (200, [])

    async def test_never_to_http_1_0(self) -> None:
        async with serving() as running, running.connect() as peer:
            peer.parser.expect("POST")
            peer.send(self.HEAD % (0, len(self.BODY)))
            await asyncio.sleep(0.05)
            peer.send(self.BODY)
            answer = await peer.answer()
            assert (answer.status, answer.interim) == (200, [])

    @pytest.mark.parametrize(
        ("target", "length", "status"), [("/nope", 5, 404), ("/complete", 2**40, 413)]
    )
    async def test_a_refusal_comes_at_once(self, target: str, length: int, status: int) -> None:
        head = f"POST {target} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
        async with serving() as running, running.connect() as peer:
            peer.parser.expect("POST")
            peer.send(f"{head}Content-Length: {length}\r\n\r\n".encode())
            answer = await peer.answer()
            assert (answer.status, answer.interim) == (status, [])
            assert await peer.closed() == b""

    async def test_other_expectations(self) -> None:
        async with serving() as running:
            assert (await running.ask("GET", "/health", Expect="tea")).status == 417


class TestNoRequest:
    """What is no request costs its sender the connection, and nobody else anything."""

    @pytest.mark.parametrize(
        ("name", "raw", "status"),
        [
            ("TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
            ("bare LF", b"GET /\n", 400),
            ("half a line, then the end", b"GET", 400),
            ("long target", b"GET /" + b"a" * 70_000, 414),
            ("long field", b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 70_000, 431),
            ("many fields", b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20_000, 431),
            ("no end", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200_000, 431),
            ("smuggling", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
             b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\n\r\n", 400),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )  # fmt: skip
    async def test_answer_then_close(
        self, name: str, raw: bytes, status: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serving() as running, running.connect() as peer:
            peer.parser.expect("GET")
            peer.send(raw)
            if name.startswith("half"):
                peer.half_close()
            answer = await peer.answer()
            assert answer.status == status
            assert answer.fields.get("connection") == "close"
            assert answer.fields.get("date")
            assert "message" in answer.json()["error"]
            assert await peer.closed() == b""
            assert (await running.ask("GET", "/health")).status == 200
        assert not caplog.records

    async def test_one_byte_and_gone(self, caplog: pytest.LogCaptureFixture) -> None:
        async with serving() as running:
            for leave in ("close", "reset"):
                async with running.connect() as peer:
                    peer.send(b"G")
                    getattr(peer, leave)()
            assert (await running.ask("GET", "/health")).status == 200
            await eventually(lambda: not running.server._connections)
        assert not caplog.records


class TestDeadlines:
    async def test_a_head_that_takes_too_long(self) -> None:
        """RFC 9110 section 15.5.9; field report 21."""
        async with serving(settings=quick(head_s=0.1)) as running, running.connect() as peer:
            peer.parser.expect("GET")
            peer.send(b"GET / HT")
            assert (await peer.answer()).status == 408
            assert await peer.closed() == b""

    async def test_dribblers_do_not_hold_up_others(self) -> None:
        async with serving(settings=quick(head_s=0.5)) as running:
            async with running.connect() as slow:
                slow.parser.expect("GET")
                slow.send(b"GET / HT")
                assert (await running.ask("GET", "/health")).status == 200

                async def dribble() -> None:
                    while True:
                        slow.send(b"P")
                        await asyncio.sleep(0.05)

                task = asyncio.create_task(dribble())
                # One byte now and then does not move the deadline.
                assert (await slow.answer()).status in (400, 408)
                task.cancel()

    async def test_content_that_takes_too_long(self) -> None:
        async with serving(settings=quick(content_s=0.1)) as running, running.connect() as peer:
            peer.parser.expect("POST")
            peer.send(b"POST /complete HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            assert (await peer.answer()).status == 408
            assert await peer.closed() == b""

    @pytest.mark.parametrize("raw", [b"", b"\r\n\r\n", GET_HEALTH])
    async def test_an_idle_connection_is_closed_without_a_word(self, raw: bytes) -> None:
        settings = quick(idle_s=0.1, head_s=0.1)
        async with serving(settings=settings) as running, running.connect() as peer:
            peer.send(raw)
            if raw == GET_HEALTH:
                peer.parser.expect("GET")
                await peer.answer()
            assert await peer.closed() == b""


def stepped(rows: int = 2, **options: Any) -> tuple[FakeModel, Engine]:
    """An engine whose every forward pass waits for a release."""
    model = FakeModel(rows=rows, context=4096, **options)
    model.step = threading.Semaphore(0)
    return model, Engine(model)


ROUTES = ["/stream", "/complete"]
REQUEST = {"prompt": "a", "max_tokens": 2000, "seed": 1}


class TestGone:
    """The stop law: who left is noticed by reading, not by the next write."""

    @pytest.mark.parametrize("leave", ["close", "reset"])
    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("version", ["1.0", "1.1"])
    async def test_in_the_middle(self, route: str, leave: str, version: str) -> None:
        model, engine = stepped()
        async with serving(engine) as running:
            async with running.connect() as peer:
                peer.parser.expect("POST")
                body = b'{"prompt": "a", "max_tokens": 2000}'
                peer.send(
                    f"POST {route} HTTP/{version}\r\nHost: x\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                model.step.release(5)
                await eventually(lambda: len(model.calls) == 6)
                getattr(peer, leave)()
                (entry,) = running.server.entries
                await eventually(lambda: entry.client_left)
            model.step.release(100)
            await eventually(lambda: entry.generation.finish_reason)
            assert entry.generation.completion_tokens == 5  # the pass under way made none
            assert engine.running == 0
            assert len(model.calls) == 6

    @pytest.mark.parametrize("leave", ["close", "reset"])
    @pytest.mark.parametrize("route", ROUTES)
    async def test_before_the_first_token(self, route: str, leave: str) -> None:
        """Field report 88."""
        model, engine = stepped()
        async with serving(engine) as running:
            async with running.connect() as peer:
                peer.request("POST", route, REQUEST)
                await eventually(lambda: len(model.calls) == 1)
                getattr(peer, leave)()
                (entry,) = running.server.entries
                await eventually(lambda: entry.client_left)
            model.step.release(100)
            await eventually(lambda: entry.generation.finish_reason)
            assert entry.generation.completion_tokens == 0

    @pytest.mark.parametrize("leave", ["close", "reset"])
    @pytest.mark.parametrize("ahead_bytes", [400_000, 1_200_000])
    async def test_far_ahead_of_the_answer(
        self, leave: str, ahead_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its end is behind more than is read, or could not even be sent."""
        monkeypatch.setattr(watching, "AHEAD_LOOK_S", 0.02)
        model, engine = stepped()
        page = http1.encode_request("GET", "/health", [HOST])
        request = http1.encode_request("POST", "/complete", [HOST], json.dumps(REQUEST).encode())
        loop = asyncio.get_running_loop()
        async with serving(engine) as running:
            with socket.socket() as peer:
                peer.setblocking(False)
                await loop.sock_connect(peer, ("127.0.0.1", running.port))
                async with asyncio.timeout(20):
                    await loop.sock_sendall(peer, request + page * (ahead_bytes // len(page)))
                await eventually(lambda: len(model.calls) == 1)
                if leave == "reset":
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            (entry,) = running.server.entries
            await eventually(lambda: entry.client_left, 20)

    @pytest.mark.parametrize("leave", ["close", "reset"])
    @pytest.mark.parametrize("route", ROUTES)
    async def test_in_the_queue(self, route: str, leave: str) -> None:
        """Field report 89."""
        model, engine = stepped(rows=1)
        async with serving(engine) as running:
            async with running.connect() as first, running.connect() as second:
                first.request("POST", "/stream", {**REQUEST, "max_tokens": 3})
                await eventually(lambda: len(model.calls) == 1)
                second.request("POST", route, REQUEST)
                await eventually(lambda: engine.waiting == 1)
                getattr(second, leave)()
                entry = running.server.entries[1]
                await eventually(lambda: entry.client_left)
                model.step.release(100)
                assert len((await first.answer()).text()) == 3
                await eventually(lambda: entry.generation.finish_reason)
            assert sum(kind == "prefill" for kind, _ in model.calls) == 1

    @pytest.mark.parametrize("route", ROUTES)
    async def test_a_half_closed_client_reads_on(self, route: str) -> None:
        """Field report 173: `printf ... | nc`."""
        model, engine = stepped()
        async with serving(engine) as running, running.connect() as peer:
            peer.request("POST", route, {**REQUEST, "max_tokens": 8})
            peer.half_close()
            model.step.release(3)
            await eventually(lambda: len(model.calls) == 4)
            await asyncio.sleep(0.05)  # the time in which a reset would have come
            model.step.release(100)
            answer = await peer.answer()
            text = answer.text() if route == "/stream" else answer.json()["text"]
            assert len(text) == 8
            if route == "/complete":
                assert answer.interim == [102]
            else:
                assert b":\n\n" in answer.content

    async def test_http_1_0_cannot_be_asked_before_the_head(self) -> None:
        _, engine = stepped()
        async with serving(engine) as running, running.connect() as peer:
            body = b'{"prompt": "a"}'
            head = b"POST /complete HTTP/1.0\r\nContent-Length: %d\r\n\r\n"
            peer.send(head % len(body) + body)
            peer.half_close()
            assert await peer.closed() == b""
            assert running.server.entries[0].client_left

    async def test_an_answer_made_at_once_is_written_to_whoever_reads(self) -> None:
        async with serving() as running, running.connect() as peer:
            peer.parser.expect("GET")
            peer.send(b"GET /health HTTP/1.0\r\n\r\n")
            peer.half_close()
            assert (await peer.answer()).status == 200

    async def test_naive_generates_on(self) -> None:
        model, engine = stepped()
        async with serving(engine, settings=quick(naive=True)) as running:
            async with running.connect() as peer:
                peer.request("POST", "/stream", {**REQUEST, "max_tokens": 30})
                model.step.release(3)
                await peer.until(b"data")
                peer.close()
            model.step.release(100)
            (entry,) = running.server.entries
            await eventually(lambda: entry.generation.finish_reason)
            assert entry.generation.completion_tokens == 30
            assert not entry.client_left

    async def test_leaving_makes_no_noise(self, caplog: pytest.LogCaptureFixture) -> None:
        """Field report 172."""
        caplog.set_level(logging.INFO)
        engine = SimulatedEngine(delay_ms=0, jitter_ms=0)
        async with serving(engine) as running:
            for i in range(60):
                async with running.connect() as peer:
                    peer.request("POST", "/stream", {**REQUEST, "max_tokens": 100_000})
                    await peer.until(b"data")
                    (peer.close, peer.reset)[i % 2]()
            await eventually(lambda: engine.running == 0)
            await eventually(lambda: not running.server._connections)
        assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


class TestSlow:
    """Field report 67: a client that does not read holds no memory and no row for ever."""

    async def test_too_many_bytes(self) -> None:
        engine = SimulatedEngine(delay_ms=0, jitter_ms=0)
        async with serving(engine, settings=quick(queued_bytes=20_000)) as running:
            async with running.connect(receive_buffer=4096) as peer:
                peer.request("POST", "/stream", {"prompt": "a", "max_tokens": 1_000_000})
                await eventually(lambda: running.server.entries)
                (entry,) = running.server.entries
                await eventually(lambda: entry.generation.finish_reason, 20)
                assert entry.generation.finish_reason == "cancelled"
                assert "slow" in entry.generation.cancel_reason
                assert entry.client_left
            assert engine.running == 0

    @pytest.mark.parametrize("slow_client", ["buffer", "drop"])
    async def test_of_a_stream_that_ends_with_its_connection(self, slow_client: str) -> None:
        """RFC 9112 section 6.3, rule 8: its close would be its end, so the client gets a reset."""
        engine = SimulatedEngine(delay_ms=0, jitter_ms=0)
        settings, policy = quick(queued_bytes=200_000), Policy(slow_client=slow_client)
        async with serving(engine, settings=settings, policy=policy) as running:
            async with running.connect(receive_buffer=4096) as peer:
                peer.parser.expect("GET")
                peer.send(b"GET /stream?prompt=a&max_tokens=1000000 HTTP/1.0\r\n\r\n")
                await eventually(lambda: running.server.entries)
                (entry,) = running.server.entries
                await eventually(lambda: entry.generation.finish_reason, 20)
                with pytest.raises((http1.Truncated, ConnectionResetError)):
                    await peer.until(b"an end")

    async def test_of_one_that_is_finished_and_not_yet_taken(self) -> None:
        """What waits when the client stops taking is not there, however complete it was made."""

        async def large(exchange: Any) -> None:
            exchange.start(200, [])
            exchange.write(exchange.frame(b"x" * 8_000_000))
            exchange.finish()

        async with serving(settings=quick(stall_s=0.2, queued_bytes=10**9)) as running:
            running.server.routes.add("GET", "/health", large)
            async with running.connect(receive_buffer=4096) as peer:
                peer.parser.expect("GET")
                peer.send(b"GET /health HTTP/1.0\r\n\r\n")
                await eventually(lambda: running.server._connections)
                await eventually(lambda: not running.server._connections, 5)
                with pytest.raises((http1.Truncated, ConnectionResetError)):
                    await peer.until(b"an end")

    async def test_a_pipelined_answer_begins_behind_what_is_still_taken(self) -> None:
        """The bytes of the answer before count as progress, though they were written before."""
        body = b"x" * 400_000

        async def large(exchange: Any) -> None:
            exchange.respond(200, body, "text/plain")

        engine = SimulatedEngine(delay_ms=20, jitter_ms=0)
        settings = quick(stall_s=0.4, queued_bytes=10**9)
        async with serving(engine, settings=settings) as running:
            running.server.routes.add("GET", "/health", large)
            async with running.connect(receive_buffer=4096) as peer:
                peer.request("GET", "/health")
                peer.request("POST", "/stream", {"prompt": "a", "max_tokens": 60})
                for _ in range(10):  # twice the limit and more, some of the first answer each time
                    await asyncio.sleep(0.1)
                    await peer.reader.read(4000)
                (entry,) = running.server.entries
                assert not entry.client_left, entry.generation.cancel_reason

    async def test_the_probe_itself_is_too_much(self, caplog: pytest.LogCaptureFixture) -> None:
        """A client that says its last word with its queue full to the brim: no error of ours."""

        async def to_the_brim(exchange: Any) -> None:
            exchange.start(200, [], heartbeat=b":\n\n")
            while exchange.queued < 19_000:
                exchange.write(exchange.frame(b"x" * 1000))
                await asyncio.sleep(0)
            framing, room = len(b"3e8\r\n\r\n"), len(b":\n\n")
            exchange.write(exchange.frame(b"x" * (20_000 - exchange.queued - framing - room)))
            exchange.watch(lambda why: None)
            while exchange.gone is None:
                await asyncio.sleep(0.01)
            exchange.finish()

        async with serving(settings=quick(queued_bytes=20_000)) as running:
            running.server.routes.add("GET", "/health", to_the_brim)
            async with running.connect(receive_buffer=4096) as peer:
                peer.request("GET", "/health")
                peer.writer.write_eof()
                await eventually(lambda: not running.server._connections, 5)
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    async def test_no_progress(self) -> None:
        engine = SimulatedEngine(delay_ms=0, jitter_ms=0)
        settings = quick(stall_s=0.3, queued_bytes=10**9)
        async with serving(engine, settings=settings) as running:
            async with running.connect(receive_buffer=4096) as peer:
                peer.request("POST", "/stream", {"prompt": "a", "max_tokens": 1_000_000})
                await eventually(lambda: running.server.entries)
                (entry,) = running.server.entries
                await eventually(lambda: entry.generation.finish_reason, 20)
                assert "slow" in entry.generation.cancel_reason

    async def test_slow_progress_is_progress(self) -> None:
        engine = SimulatedEngine(delay_ms=0, jitter_ms=0)
        settings = quick(stall_s=0.4, queued_bytes=10**9)
        async with serving(engine, settings=settings) as running:
            async with running.connect(receive_buffer=4096) as peer:
                peer.request("POST", "/stream", {"prompt": "a", "max_tokens": 20_000})
                for _ in range(8):  # twice the limit in all, with some bytes taken each time
                    await asyncio.sleep(0.1)
                    await peer.reader.read(8000)
                (entry,) = running.server.entries
                assert not entry.client_left


async def test_who_is_cancelled_while_it_reads_has_taken_nothing() -> None:
    """A WebSocket's listener is, at the end of each reply: the client's Close may just be there."""
    connection = Connection.__new__(Connection)
    connection.reader = watching.WatchedReader()
    connection.reader.feed_data(b"x")
    reading = asyncio.create_task(connection.read())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    async with asyncio.timeout(5):
        assert await connection.read() == b"x"


async def test_an_exchange_is_small() -> None:
    """Beyond 29 attributes CPython keeps 1.5 KB for each, not 300 bytes: all share their keys."""
    sizes: list[int] = []

    async def measured(exchange: Any) -> None:
        sizes.append(len(vars(exchange)))
        exchange.respond_empty(204)

    async with serving() as running:
        running.server.routes.add("GET", "/health", measured)
        await running.ask("GET", "/health")
    assert sizes[0] < 30


class TestHeartbeat:
    """Field reports 31 and 41."""

    async def test_in_the_queue_and_during_prefill(self) -> None:
        model, engine = stepped(rows=1)
        async with serving(engine, settings=quick(heartbeat_s=0.02)) as running:
            async with running.connect() as first, running.connect() as queued:
                first.request("POST", "/stream", {**REQUEST, "max_tokens": 2})
                await first.until(b":\n\n:\n\n")
                queued.request("POST", "/stream", {**REQUEST, "max_tokens": 2})
                await queued.until(b":\n\n:\n\n")
                model.step.release(100)
                for peer in (first, queued):
                    await peer.until(b"[DONE]")
                    assert peer.content.count(b"text") == 2

    async def test_none_while_pieces_come(self) -> None:
        async with serving(settings=quick(heartbeat_s=5)) as running:
            answer = await running.ask("POST", "/stream", {"prompt": "a", "max_tokens": 20})
        assert b":\n\n" not in answer.content


class TestCut:
    async def test_a_handler_that_fails_before_the_head_is_500(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serving() as running:
            running.server.routes.add("GET", "/health", _raise)
            answer = await running.ask("GET", "/health")
            assert answer.status == 500
            assert "secret" not in answer.content.decode()
        assert "secret" in caplog.text

    @pytest.mark.parametrize("version", ["1.0", "1.1"])
    async def test_after_the_head_it_is_no_end(
        self, version: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def half(exchange: Any) -> None:
            exchange.start(200, [])
            exchange.write(exchange.frame(b"data: 1\n\n"))
            await asyncio.sleep(0.05)
            raise RuntimeError("secret")

        async with serving() as running, running.connect() as peer:
            running.server.routes.add("GET", "/health", half)
            peer.parser.expect("GET")
            peer.send(f"GET /health HTTP/{version}\r\nHost: x\r\n\r\n".encode())
            await peer.until(b"data: 1\n\n")
            with pytest.raises((http1.Truncated, ConnectionResetError)):
                await peer.until(b"an end")
        assert "secret" in caplog.text

    async def test_an_empty_piece_is_no_chunk(self) -> None:
        """Field report 11: a chunk of no bytes would be the last one."""

        async def parts(exchange: Any) -> None:
            exchange.start(200, [])
            for part in (b"data: a\n\n", b"", b"data: b\n\n"):
                exchange.write(exchange.frame(part))
            exchange.finish()

        async with serving() as running, running.connect() as peer:
            running.server.routes.add("GET", "/health", parts)
            peer.request("GET", "/health", Connection="close")
            raw = await peer.closed()
        assert raw.count(b"0\r\n\r\n") == 1
        assert raw.endswith(b"data: b\n\n\r\n0\r\n\r\n")


async def _raise(exchange: Any) -> None:
    raise RuntimeError("secret")


class TestFloods:
    """Bytes that are here already must not be worked through without a pause."""

    async def test_other_clients_are_served_between_pipelined_requests(self) -> None:
        async with serving() as running, running.connect() as flood, running.connect() as other:
            served = 0
            handle = running.server.handle

            async def count(exchange: Any) -> None:
                nonlocal served
                served += exchange.request.method == "HEAD"
                await handle(exchange)

            await other.ask("GET", "/health")
            for connection in running.server._tasks.values():
                connection.handler = count
            await eventually(lambda: len(running.server._tasks) == 2)
            for connection in running.server._tasks.values():
                connection.handler = count
            flood.send(b"HEAD /health HTTP/1.1\r\nHost: a\r\n\r\n" * 1500)
            other.request("GET", "/health")
            assert (await other.answer()).status == 200
            assert served < 1500

    async def test_small_chunks_take_the_memory_of_what_they_hold(self) -> None:
        async with serving() as running, running.connect() as peer:
            head = b"POST /complete HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            tracemalloc.start()
            try:
                before = tracemalloc.get_traced_memory()[0]
                peer.send(head + b"2\r\n  \r\n" * 100_000)
                await peer.writer.drain()
                await eventually(
                    lambda: all(c.reader._buffer == b"" for c in running.server._tasks.values())
                )
                await asyncio.sleep(0.2)
                assert tracemalloc.get_traced_memory()[0] - before < 3_000_000
            finally:
                tracemalloc.stop()


async def test_head_is_refused_without_content() -> None:
    """RFC 9110 section 9.3.2, also where the rest of the head is what is wrong."""
    async with serving() as running, running.connect() as peer:
        peer.send(b"HEAD / HTTP/1.1\r\n\r\n")
        assert (await peer.closed()).endswith(b"\r\n\r\n")


@pytest.mark.parametrize("target", ["/%ff", "/stream/%ff", "/v1/%80"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_a_path_that_is_no_text_is_the_client_s_fault(
    method: str, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as running:
        assert (await running.ask(method, target)).status == 400
    assert not caplog.records


async def test_shutdown_lets_a_slow_reader_have_its_whole_answer() -> None:
    engine = SimulatedEngine(delay_ms=0, jitter_ms=0)
    async with serving(engine) as running, running.connect(receive_buffer=4096) as peer:
        peer.request("POST", "/complete", {"prompt": "a", "max_tokens": 20_000})
        await eventually(lambda: running.server.entries and engine.running == 0)
        await eventually(lambda: all(c.exchange is None for c in running.server._tasks.values()))
        stopping = asyncio.create_task(running.server.stop(goodbye_s=20))
        assert (await peer.answer()).json()["usage"]["completion_tokens"] == 20_000
        await stopping


async def test_naive_breaks_silences_no_more_often_than_others() -> None:
    model, engine = stepped()
    settings = quick(naive=True, heartbeat_s=0.05)
    async with serving(engine, settings=settings) as running, running.connect() as peer:
        peer.request("POST", "/stream", {**REQUEST, "max_tokens": 2})
        await asyncio.sleep(0.3)
        model.step.release(100)
        await peer.until(b"[DONE]")
        assert 1 <= peer.content.count(b":\n\n") <= 7


class TestTooMany:
    async def test_connections(self) -> None:
        async with serving(max_connections=2) as running:
            async with running.connect() as a, running.connect() as b:
                await a.ask("GET", "/health")
                await b.ask("GET", "/health")
                async with running.connect() as c:
                    c.parser.expect("GET")
                    answer = await c.answer()
                    assert answer.status == 503
                    assert answer.fields.get("retry-after")
                a.close()
                await eventually(lambda: len(running.server._connections) == 1)
                assert (await running.ask("GET", "/health")).status == 200


async def test_a_header_never_holds_what_the_client_sent() -> None:
    """Field report 8."""
    async with serving(origins=("*",)) as running, running.connect() as peer:
        peer.parser.expect("GET")
        pairs = [HOST, ("Origin", "http://a")]
        peer.send(http1.encode_request("GET", "/complete?prompt=a%0d%0aX-Evil:%201", pairs))
        answer = await peer.answer()
        assert "x-evil" not in answer.fields


class TestOpenFiles:
    """One file a connection: the limit is raised for as many as are allowed, or fewer are."""

    @pytest.fixture
    def limits(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        resource = pytest.importorskip("resource")
        limits = [1024, 4096]
        monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
        monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(0, new[0]))
        return limits

    @pytest.mark.parametrize(
        ("asked", "allowed", "soft"),
        [(10, 10, 1024), (824, 824, 1024), (825, 825, 1025), (10_000, 3896, 4096)],
    )
    def test_raised_up_to_the_hard_limit(
        self, limits: list[int], asked: int, allowed: int, soft: int
    ) -> None:
        assert server.allow_connections(asked) == allowed
        assert limits == [soft, 4096]

    def test_without_any_limit(self, limits: list[int]) -> None:
        import resource

        limits[1] = resource.RLIM_INFINITY
        assert server.allow_connections(10_000) == 10_000
        assert limits[0] == 10_200
        limits[0] = resource.RLIM_INFINITY
        assert server.allow_connections(10**6) == 10**6

    async def test_a_flood_beyond_is_dropped_without_a_word(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server, "TURNED_AWAY", 1)
        async with (
            serving(max_connections=1) as running,
            running.connect() as first,
            running.connect() as told,
            running.connect() as dropped,
        ):
            assert (await first.ask("GET", "/health")).status == 200
            told.parser.expect("GET")
            assert (await told.answer()).status == 503
            with contextlib.suppress(ConnectionError):
                assert await dropped.reader.read() == b""
