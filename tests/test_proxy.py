"""The gateway between scripted upstreams and real clients, over real sockets.

Nothing timed decides a test: each step waits for the event before it, and `soon` only keeps a
failure from hanging.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from require import require

import forwarding
import http1
import proxy

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
TEXT = "data: Two\n\n: keep-alive\n\ndata: 你好\r\n\r\ndata: : not a comment\n\n".encode()
GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
GET_10 = b"GET /x HTTP/1.0\r\n\r\n"
VERSIONS = {"1.1": GET, "1.0": GET_10}
MODES = {"buffering": False, "honor": True}
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nX-Accel-Buffering: no\r\nTransfer-Encoding: chunked\r\n\r\n"


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, 20)


class Call:
    """One connection that the gateway made to upstream, for the test to play."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def head(self) -> bytes:
        return await soon(self.reader.readuntil(b"\r\n\r\n"))

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def answer(self, *pieces: bytes) -> bytes:
        """Read the request's head, write and close."""
        head = await self.head()
        await self.send(*pieces)
        self.writer.close()
        return head

    async def left(self) -> None:
        """Wait until the gateway has closed this connection."""
        with contextlib.suppress(ConnectionError):
            while await soon(self.reader.read(65536)):
                pass

    def reset(self) -> None:
        reset_on_close(self.writer.get_extra_info("socket"))
        self.writer.transport.abort()


class Client:
    """A raw socket, so that what the kernel has is what is seen."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.received = sock, b""
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await soon(self._loop.sock_sendall(self.sock, data))

    async def read(self) -> bytes:
        data = await soon(self._loop.sock_recv(self.sock, 65536))
        self.received += data
        return data

    async def until(self, mark: bytes) -> bytes:
        """Read on until the mark has come; fails at end-of-file."""
        while mark not in self.received:
            assert await self.read(), f"closed before {mark!r}: {self.received!r}"
        return self.received

    async def rest(self) -> bytes:
        while await self.read():
            pass
        return self.received

    def half_close(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def leave(self, how: str) -> None:
        if how == "reset":
            reset_on_close(self.sock)
        self.sock.close()


def reset_on_close(sock: Any) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Net:
    """A gateway in this process, its upstream's calls, and clients."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[Call] = asyncio.Queue()
        self.connections: list[proxy.Connection] = []
        self.port = 0
        self._open: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, upstream_port: int | None = None, **settings: Any) -> None:
        if upstream_port is None:
            upstream_port = await self._listen(lambda r, w: self.calls.put_nowait(Call(r, w)))
        chosen = self.settings = proxy.Settings(("127.0.0.1", upstream_port), **settings)

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = proxy.Connection(reader, writer, chosen)
            self.connections.append(connection)
            self._tasks.add(asyncio.create_task(connection.run()))

        self.port = await self._listen(accept)

    def be_impatient(self) -> None:
        object.__setattr__(self.settings, "timeout_s", 0.02)

    async def _listen(self, accept: Callable[..., None]) -> int:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self._open.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def client(self, data: bytes = b"") -> Client:
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        self._open.append(sock)
        client = Client(sock)
        await client.send(data)
        return client

    async def call(self) -> Call:
        call = await soon(self.calls.get())
        self._open.append(call.writer)
        return call

    async def exchange(self, request: bytes, *answer: bytes) -> tuple[bytes, bytes]:
        """Play one exchange; the head that upstream saw, all that the client got until the end."""
        client = await self.client(request)
        call = await self.call()
        head, received = await asyncio.gather(call.answer(*answer), client.rest())
        return head, received

    async def close(self) -> None:
        for thing in self._open:
            thing.close()
        for task in self._tasks:
            task.cancel()
        done = await asyncio.gather(*self._tasks, return_exceptions=True)
        failed = [e for e in done if isinstance(e, Exception)]
        assert not failed, failed


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    net = Net()
    yield net
    await net.close()


def parse(raw: bytes, method: str = "GET") -> tuple[http1.Response, bytes, str]:
    """Read one whole final response that ends with the connection."""
    parser = http1.ResponseParser()
    parser.expect(method)
    parser.feed(raw)
    parser.feed_eof()
    final, content = None, b""
    while not isinstance(event := parser.next_event(), http1.End):
        if isinstance(event, http1.Content):
            content += event.data
        elif isinstance(event, http1.Response) and not event.interim:
            final = event
    assert final is not None
    assert parser.take_unread() == b""
    check_with_h11(raw, method, content)
    return final, content, parser.framing


def check_with_h11(raw: bytes, method: str, content: bytes) -> None:
    h11 = require("h11")
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method=method, target="/", headers=[("Host", "a")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(raw)
    connection.receive_data(b"")
    got = b""
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Data):
            got += event.data
    assert got == content


def names(head: bytes) -> list[str]:
    return [line.split(b":")[0].decode().lower() for line in head.split(b"\r\n")[1:-2]]


def chunk_sizes(raw: bytes) -> list[int]:
    body, sizes = raw.split(b"\r\n\r\n", 1)[1], []
    while body:
        line, body = body.split(b"\r\n", 1)
        sizes.append(int(line, 16))
        body = body[sizes[-1] + 2 :]
    return sizes


def chunks(*pieces: bytes) -> bytes:
    return b"".join(http1.encode_chunk(piece) for piece in pieces)


UPSTREAM = {
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(TEXT[:9], TEXT[9:])
    + b"0\r\nX-Trailer: dropped\r\n\r\n",
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(TEXT) + TEXT,
    "close": b"HTTP/1.1 200 OK\r\n\r\n" + TEXT,
    "close-1.0": b"HTTP/1.0 200 OK\r\n\r\n" + TEXT,
}  # fmt: skip


NO_CONTENT = {
    "HEAD-length": ("HEAD", b"200 OK\r\nContent-Length: 7\r\n", "7"),
    "HEAD-chunked": ("HEAD", b"200 OK\r\nTransfer-Encoding: chunked\r\n", None),
    "HEAD-nonsense": ("HEAD", b"200 OK\r\nContent-Length: x\r\n", None),
    "204": ("GET", b"204 No Content\r\n", None),
    "204-length": ("GET", b"204 No Content\r\nContent-Length: 0\r\n", None),
    "304-length": ("GET", b"304 Not Modified\r\nContent-Length: 7\r\n", "7"),
    "200-empty": ("GET", b"200 OK\r\nContent-Length: 0\r\n", "0"),
    "200-twice": ("GET", b"200 OK\r\nContent-Length: 0\r\nContent-Length: 0\r\n", "0"),
}


@pytest.mark.parametrize("honor", MODES.values(), ids=MODES)
class TestFraming:
    """RFC 9112 sections 6 and 7; field reports 135, 137."""

    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize("framing", UPSTREAM)
    async def test_each_pairing(self, net: Net, framing: str, version: str, honor: bool) -> None:
        await net.start(honor=honor, block_bytes=16)
        request = VERSIONS[version].replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        _, raw = await net.exchange(request, UPSTREAM[framing])
        response, content, framed = parse(raw)
        other = "chunked" if version == "1.1" else "close"
        assert framed == ("length" if framing == "length" else other)
        assert content == TEXT
        assert "x-trailer" not in response.fields
        assert response.fields.tokens("connection") == ["close"]
        assert "date" in response.fields
        received_by = "1.0" if framing == "close-1.0" else "1.1"
        assert response.fields.get_all("via") == [f"{received_by} buffering-proxy"]

    @pytest.mark.parametrize("name", NO_CONTENT)
    async def test_no_content_and_the_connection_persists(
        self, net: Net, name: str, honor: bool
    ) -> None:
        await net.start(honor=honor)
        method, head, length = NO_CONTENT[name]
        client = await net.client(GET.replace(b"GET", method.encode()))
        await (await net.call()).answer(b"HTTP/1.1 " + head + b"\r\n")
        first = await client.until(b"\r\n\r\n")
        await client.send(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        await (await net.call()).answer(UPSTREAM["length"])
        second = (await client.rest())[len(first) :]
        response, content, _ = parse(first, method)
        assert response.fields.get("content-length") == length
        assert "transfer-encoding" not in response.fields
        assert content == b""
        assert parse(second)[1] == TEXT

    async def test_one_byte_writes_change_nothing(self, net: Net, honor: bool) -> None:
        """Field reports 30, 139: split characters, CRLF, chunk-size lines."""
        await net.start(honor=honor, block_bytes=50)
        text = TEXT * 20
        wire = STREAM_HEAD + chunks(*[text[i : i + 17] for i in range(0, len(text), 17)])
        wire += http1.LAST_CHUNK
        request = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        _, raw = await net.exchange(request, *[wire[i : i + 1] for i in range(len(wire))])
        response, content, _ = parse(raw)
        assert hashlib.sha256(content).digest() == hashlib.sha256(text).digest()
        assert response.fields.get_all("x-accel-buffering") == ["no"]
        if not honor:
            full, rest = divmod(len(text), 50)
            assert chunk_sizes(raw) == [50] * full + [rest, 0]

    async def test_pipelined_and_persistent(self, net: Net, honor: bool) -> None:
        await net.start(honor=honor)
        client = await net.client(GET.replace(b"/x", b"/1") + GET.replace(b"/x", b"/2"))
        for number in (b"1", b"2"):
            head = await (await net.call()).answer(b"HTTP/1.1 200 OK\r\n\r\nanswer " + number)
            assert head.startswith(b"GET /%b HTTP/1.1\r\n" % number)
            await client.until(b"answer " + number + b"\r\n0\r\n\r\n")

    async def test_split_request(self, net: Net, honor: bool) -> None:
        await net.start(honor=honor)
        client = await net.client()
        for byte in GET:
            await client.send(bytes([byte]))
        await (await net.call()).answer(UPSTREAM["length"])
        await client.until(TEXT)


PASSED = {
    "no": (True, b"X-Accel-Buffering: no"),
    "No": (True, b"x-accel-buffering: No"),
    "NO": (True, b"X-ACCEL-BUFFERING: NO"),
}


BUFFERED = {
    "yes": (True, b"X-Accel-Buffering: yes"),
    "absent": (True, b"X-Other: no"),
    "not-honored": (False, b"X-Accel-Buffering: no"),
}


class TestHonor:
    """Field report 138."""

    @pytest.mark.parametrize("name", PASSED)
    @pytest.mark.parametrize("request_", VERSIONS.values(), ids=VERSIONS)
    async def test_pieces_pass_as_they_come(self, net: Net, name: str, request_: bytes) -> None:
        honor, field = PASSED[name]
        await net.start(honor=honor)
        client = await net.client(request_)
        call = await net.call()
        await call.head()
        await call.send(b"HTTP/1.1 200 OK\r\n" + field + b"\r\n\r\n")
        assert field in await client.until(b"\r\n\r\n")  # unchanged, before any content
        for number in range(5):
            await call.send(b"piece %d" % number)
            await client.until(b"piece %d" % number)

    @pytest.mark.parametrize("name", BUFFERED)
    async def test_blocks(self, net: Net, name: str) -> None:
        honor, field = BUFFERED[name]
        await net.start(honor=honor, block_bytes=8)
        client = await net.client(GET)
        call = await net.call()
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n" + field + b"\r\n\r\n"
        await call.answer(head, *[chunks(b"x")] * 20, http1.LAST_CHUNK)
        raw = await client.until(b"0\r\n\r\n")
        assert chunk_sizes(raw) == [8, 8, 4, 0]
        assert field in raw

    async def test_a_full_block_leaves_before_the_end(self, net: Net) -> None:
        await net.start(block_bytes=8)
        client = await net.client(GET)
        call = await net.call()
        await call.head()
        await call.send(STREAM_HEAD, chunks(b"12345678"))
        await client.until(b"12345678")

    async def test_the_head_is_held_with_the_first_block(self) -> None:
        writer = FakeWriter()
        downstream = forwarding.Downstream(writer, http1.Request("GET", "/", http1.Fields()), 1)  # type: ignore[arg-type]
        response = http1.Response(200, "OK", http1.Fields())
        downstream.start(response, "chunked", keep_alive=True, block_bytes=4)
        downstream.hold(b"123")
        await downstream.flush()
        assert writer.written == b""
        downstream.hold(b"45")
        await downstream.flush()
        assert writer.written.startswith(b"HTTP/1.1 200 OK\r\n")
        assert writer.written.endswith(b"\r\n\r\n4\r\n1234\r\n")


class FakeWriter:
    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        pass


TARGETS = {
    "3.2.1-origin": (b"GET /a%2Fb?c HTTP/1.1\r\nHost: h\r\n", b"GET /a%2Fb?c HTTP/1.1", b"h"),
    "3.2.2-absolute": (b"GET http://h:8/a?b HTTP/1.1\r\nHost: x\r\n",
                       b"GET /a?b HTTP/1.1", b"h:8"),
    "3.2.2-no-path": (b"GET http://h HTTP/1.1\r\nHost: x\r\n", b"GET / HTTP/1.1", b"h"),
    "3.2.2-query": (b"GET http://h?b HTTP/1.1\r\nHost: x\r\n", b"GET /?b HTTP/1.1", b"h"),
    "3.2.2-slashes": (b"GET //h/a?u=http://x HTTP/1.1\r\nHost: x\r\n",
                      b"GET //h/a?u=http://x HTTP/1.1", b"x"),
    "3.2.4-asterisk": (b"OPTIONS * HTTP/1.1\r\nHost: h\r\n", b"OPTIONS * HTTP/1.1", b"h"),
    "3.2.4-absolute": (b"OPTIONS http://h HTTP/1.1\r\nHost: x\r\n",
                       b"OPTIONS * HTTP/1.1", b"h"),
    "1.0-no-host": (b"GET /a HTTP/1.0\r\n", b"GET /a HTTP/1.1", b"127.0.0.1:%d"),
}  # fmt: skip


ANSWERED_HERE = {
    "CONNECT": (b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", 501),
    "OPTIONS-0": (b"OPTIONS * HTTP/1.1\r\nHost: a\r\nMax-Forwards: 0\r\n\r\n", 200),
    "TRACE-0": (b"TRACE / HTTP/1.1\r\nHost: a\r\nMax-Forwards: 0\r\n\r\n", 501),
    "bare-LF": (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    "bare-CR": (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n", 400),
    "no-host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "TE-and-CL": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n"
                  b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", None),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50), 400),
    "long-target": (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", 414),
    "long-field": (GET[:-2] + b"X: " + b"a" * 1_000_000 + b"\r\n\r\n", 431),
}  # fmt: skip


class TestForwarding:
    """RFC 9110 section 7.6; RFC 9112 section 3.2."""

    async def test_hop_by_hop_fields_of_a_request(self, net: Net) -> None:
        await net.start()
        request = (
            b"POST /x?q=%20 HTTP/1.1\r\nHost: a:1\r\nConnection: close, X-Foo\r\nX-Foo: 1\r\n"
            b"Connection: Content-Length, Host\r\nKeep-Alive: 1\r\nTE: trailers\r\nTrailer: X\r\n"
            b"Upgrade: h2c\r\nProxy-Connection: x\r\nProxy-Authorization: x\r\nX-Bar: 2\r\n"
            b"Content-Length: 2\r\nVia: 1.0 other\r\nAccept-Encoding: gzip\r\n\r\nhi"
        )
        head, _ = await net.exchange(request, b"HTTP/1.1 200 OK\r\n\r\n")
        assert head.startswith(b"POST /x?q=%20 HTTP/1.1\r\nHost: a:1\r\n")
        assert sorted(names(head)) == [
            "accept-encoding", "connection", "content-length", "host", "via", "via", "x-bar",
        ]  # fmt: skip
        assert b"Connection: close\r\n" in head
        assert re.findall(rb"Via: (.*)\r\n", head) == [b"1.0 other", b"1.1 buffering-proxy"]

    async def test_hop_by_hop_fields_of_a_response(self, net: Net) -> None:
        await net.start()
        client = await net.client(GET)
        await (await net.call()).answer(
            b"HTTP/1.1 200 Fine\r\nConnection: X-Foo, Content-Length\r\nX-Foo: 1\r\nTrailer: a\r\n"
            b"Keep-Alive: 1\r\nUpgrade: h2c\r\nProxy-Authenticate: x\r\nProxy-Status: y\r\n"
            b"Content-Length: 2\r\nDate: then\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n\r\nhi"
        )
        raw = await client.until(b"hi")
        head = raw.removesuffix(b"hi")
        assert head.startswith(b"HTTP/1.1 200 Fine\r\n")
        assert sorted(names(head)) == [
            "content-length", "date", "proxy-status", "set-cookie", "set-cookie", "via",
        ]  # fmt: skip
        assert b"Date: then\r\n" in head

    @pytest.mark.parametrize("name", TARGETS)
    async def test_target_and_host(self, net: Net, name: str) -> None:
        await net.start()
        sent, line, host = TARGETS[name]
        await net.client(sent + b"\r\n")
        call = await net.call()
        head = await call.head()
        if b"%d" in host:
            host %= call.writer.get_extra_info("sockname")[1]
        assert head.startswith(line + b"\r\nHost: " + host + b"\r\n")
        assert names(head).count("host") == 1

    async def test_max_forwards_is_counted_down(self, net: Net) -> None:
        await net.start()
        await net.client(b"OPTIONS * HTTP/1.1\r\nHost: a\r\nMax-Forwards: 2\r\n\r\n")
        assert b"\r\nMax-Forwards: 1\r\n" in await (await net.call()).head()

    @pytest.mark.parametrize("name", ANSWERED_HERE)
    async def test_answered_without_upstream(self, net: Net, name: str) -> None:
        await net.start()
        request, status = ANSWERED_HERE[name]
        client = await net.client(request)
        raw = await client.rest()
        parser = http1.ResponseParser()
        parser.expect("GET")
        parser.feed(raw)
        response = parser.next_event()
        assert isinstance(response, http1.Response)
        assert status in (response.status, None)
        assert response.status != 200 or name == "OPTIONS-0"
        assert "date" in response.fields
        assert response.fields.tokens("connection") == ["close"]
        assert net.calls.empty()
        if response.status >= 400:
            error = json.loads(raw.split(b"\r\n\r\n", 1)[1])["error"]
            assert error["message"]
            assert error["type"]

    @pytest.mark.parametrize("path", ["1", "GET / HT", GET.decode()[:-2]])
    async def test_a_head_that_is_never_finished(self, net: Net, path: str) -> None:
        await net.start()
        client = await net.client(path.encode())
        client.half_close()
        assert b" 400 " in await client.rest()

    async def test_late_head_is_408(self, net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(proxy, "HEAD_S", 0.02)
        await net.start()
        assert b" 408 " in await (await net.client(b"GET / HT")).rest()

    async def test_empty_lines_do_not_move_the_deadline(
        self, net: Net, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """RFC 9112 section 2.2 lets them come before a request, not for ever."""
        monkeypatch.setattr(proxy, "HEAD_S", 0.2)
        await net.start()
        client = await net.client(b"\r\n")

        async def go_on() -> None:
            with contextlib.suppress(OSError):
                while True:
                    await client.send(b"\r\n")
                    await asyncio.sleep(0.02)

        sending = asyncio.create_task(go_on())
        with contextlib.suppress(ConnectionResetError):
            assert await client.rest() == b""
        sending.cancel()

    async def test_late_content_is_408(self, net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(proxy, "CONTENT_S", 0.02)
        await net.start()
        client = await net.client(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf")
        assert b" 408 " in await client.rest()
        await (await net.call()).left()

    async def test_idle_connection_is_closed(
        self, net: Net, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(proxy, "IDLE_S", 0.02)
        await net.start()
        assert await (await net.client()).rest() == b""

    async def test_nodelay_on_both_legs(self, net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
        """Field report 22."""
        legs = []
        real = asyncio.open_connection

        async def remember(*args: Any, **options: Any) -> Any:
            reader, writer = await real(*args, **options)
            legs.append(writer)
            return reader, writer

        monkeypatch.setattr(asyncio, "open_connection", remember)
        await net.start()
        await net.client(GET)
        await (await net.call()).head()
        for writer in (*legs, net.connections[0].writer):
            sock = writer.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert len(legs) == 1


class TestContentOfRequests:
    POST = b"POST /x HTTP/1.1\r\nHost: a\r\n"

    @pytest.mark.parametrize("framing", ["length", "chunked"])
    async def test_streamed_up(self, net: Net, framing: str) -> None:
        await net.start()
        chunked = framing == "chunked"
        field = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 10"
        client = await net.client(self.POST + field + b"\r\n\r\n")
        call = await net.call()
        assert b"\r\n" + field + b"\r\n" in await call.head()
        for piece in (b"01234", b"56789"):
            wire = http1.encode_chunk(piece) if chunked else piece
            await client.send(wire)
            assert await soon(call.reader.readexactly(len(wire))) == wire
        if chunked:
            await client.send(b"0\r\nX-Trailer: dropped\r\n\r\n")
            assert await soon(call.reader.readexactly(5)) == http1.LAST_CHUNK
        await call.send(UPSTREAM["length"])
        raw = await client.until(TEXT)
        assert b"Connection: close" not in raw

    async def test_answer_before_the_content_is_complete(self, net: Net) -> None:
        """Field report 16: what is left of the content is never taken for a request."""
        await net.start()
        client = await net.client(self.POST + b"Content-Length: 100\r\n\r\nhalf")
        call = await net.call()
        await call.answer(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n")
        raw = await client.rest()
        assert b" 413 " in raw
        assert b"\r\nConnection: close\r\n" in raw

    async def test_broken_content_never_reaches_upstream_complete(self, net: Net) -> None:
        await net.start()
        client = await net.client(self.POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXY")
        call = await net.call()
        await call.head()
        assert b" 400 " in await client.rest()
        assert b"0\r\n\r\n" not in await soon(call.reader.read())

    async def test_end_of_file_inside_the_content(self, net: Net) -> None:
        await net.start()
        client = await net.client(self.POST + b"Content-Length: 100\r\n\r\nhalf")
        client.half_close()
        assert b" 400 " in await client.rest()
        await (await net.call()).left()


class TestInterim:
    """RFC 9110 sections 10.1.1 and 15.2; field reports 15, 141."""

    async def test_expect_continue_end_to_end(self, net: Net) -> None:
        await net.start()
        head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        client = await net.client(head)
        call = await net.call()
        assert b"\r\nExpect: 100-continue\r\n" in await call.head()
        await call.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await client.until(b"HTTP/1.1 100 Continue\r\n")
        await client.send(b"hi")
        assert await soon(call.reader.readexactly(2)) == b"hi"
        await call.send(UPSTREAM["length"])
        await client.until(TEXT)

    async def test_expect_from_http_1_0_is_ignored(self, net: Net) -> None:
        await net.start()
        await net.client(b"POST / HTTP/1.0\r\nContent-Length: 0\r\nExpect: 100-continue\r\n\r\n")
        assert "expect" not in names(await (await net.call()).head())

    async def test_curl_waits_for_its_100(self, net: Net, tmp_path: Path) -> None:
        await net.start()
        content = tmp_path / "content"
        content.write_bytes(bytes(2_000_000))
        curl = await run_curl(net, "-T", str(content), "-H", "Expect: 100-continue")
        call = await net.call()
        await call.head()
        await call.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await soon(call.reader.readexactly(2_000_000))
        await call.send(UPSTREAM["length"])
        out, _ = await soon(curl.communicate())
        assert (out, curl.returncode) == (TEXT, 0)

    @pytest.mark.parametrize("version", VERSIONS)
    async def test_early_hints(self, net: Net, version: str) -> None:
        await net.start()
        client = await net.client(VERSIONS[version])
        early = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        await (await net.call()).answer(early, UPSTREAM["length"])
        raw = await client.until(TEXT)
        assert raw.startswith(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n") == (version == "1.1")
        assert raw.count(b"HTTP/1.1 200 OK") == 1

    @pytest.mark.parametrize("version", VERSIONS)
    async def test_a_flood_is_bounded(self, net: Net, version: str) -> None:
        """As many bytes of interim heads as one head may have; then upstream is given up."""
        await net.start()
        client = await net.client(VERSIONS[version])
        call = await net.call()
        await call.head()

        async def flood() -> None:
            with contextlib.suppress(OSError):
                while True:
                    await call.send(b"HTTP/1.1 102 Processing\r\n\r\n" * 100)

        flooding = asyncio.create_task(flood())
        with contextlib.suppress(ConnectionResetError):
            await client.rest()
        assert b"HTTP/1.1 502 Bad Gateway\r\n" in client.received
        assert client.received.count(b" 102 ") < 3000
        await soon(flooding)


GARBAGE = {
    "closes": b"",
    "half-a-head": b"HTTP/1.1 200 OK\r\nX: y\r\n",
    "not-HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "HTTP/2": b"HTTP/2.0 200 OK\r\n\r\n",
    "status-042": b"HTTP/1.1 042 Odd\r\n\r\n",
    "TE-and-CL": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n",
    "two-lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "gzip-coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    "unasked-101": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n",
    "huge-head": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000,
}


BROKEN = {
    "in-a-chunk": (STREAM_HEAD + chunks(b"12345678") + b"7\r\nFoo", b"12345678Foo"),
    "after-a-chunk": (STREAM_HEAD + chunks(b"12345678", b"Foo"), b"12345678Foo"),
    "in-a-size": (STREAM_HEAD + chunks(b"Foo") + b"0", b"Foo"),
    "nothing-yet": (STREAM_HEAD, b""),
    "bad-chunk": (STREAM_HEAD + chunks(b"Foo") + b"0x5\r\nhello", b"Foo"),
    "short": (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nFoo", b"Foo"),
}


class TestBadUpstream:
    """Field reports 12, 133, 141."""

    @pytest.mark.parametrize("request_", VERSIONS.values(), ids=VERSIONS)
    async def test_refused(self, net: Net, request_: bytes) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            await net.start(upstream_port=unused.getsockname()[1])
            self.check(await (await net.client(request_)).rest(), 502, "bad_gateway")

    @pytest.mark.parametrize("name", GARBAGE)
    async def test_garbage(self, net: Net, name: str) -> None:
        await net.start()
        client = await net.client(GET)
        call = await net.call()
        await call.head()
        call.writer.write(GARBAGE[name])
        call.writer.write_eof()
        self.check(await client.rest(), 502, "bad_gateway")

    async def test_reset_before_the_head(self, net: Net) -> None:
        await net.start()
        client = await net.client(GET)
        call = await net.call()
        await call.head()
        call.reset()
        self.check(await client.rest(), 502, "bad_gateway")

    async def test_silent(self, net: Net) -> None:
        await net.start(timeout_s=0.02)
        client = await net.client(GET)
        call = await net.call()
        self.check(await client.rest(), 504, "gateway_timeout")
        await call.left()

    def test_a_long_time_to_first_token_is_legal(self) -> None:
        assert proxy.Settings(("a", 1)).timeout_s >= 300

    async def test_refusing_head_has_no_content(self, net: Net) -> None:
        await net.start()
        client = await net.client(GET.replace(b"GET", b"HEAD"))
        await (await net.call()).answer(b"")
        raw = await client.rest()
        assert b" 502 " in raw
        assert raw.endswith(b"\r\n\r\n")

    def check(self, raw: bytes, status: int, kind: str) -> None:
        response, content, _ = parse(raw)
        assert response.status == status
        assert "date" in response.fields
        assert json.loads(content)["error"]["type"] == kind
        assert json.loads(content)["error"]["message"].startswith("upstream: ")

    @pytest.mark.parametrize("name", BROKEN)
    @pytest.mark.parametrize("honor", MODES.values(), ids=MODES)
    @pytest.mark.parametrize("version", VERSIONS)
    async def test_a_broken_answer_stays_broken(
        self, net: Net, version: str, name: str, honor: bool
    ) -> None:
        await net.start(honor=honor, block_bytes=8)
        wire, held = BROKEN[name]
        client = await net.client(VERSIONS[version])
        await (await net.call()).answer(wire)
        must_reset = version == "1.0" and name != "short"
        with pytest.raises(ConnectionResetError) if must_reset else contextlib.nullcontext():
            await client.rest()
        head, _, content = client.received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert not content.endswith(b"0\r\n\r\n")
        assert re.sub(rb"[0-9a-f]+\r\n([^\r]*)\r\n", rb"\1", content) == held

    @pytest.mark.parametrize("honor", MODES.values(), ids=MODES)
    async def test_a_reset_does_not_end_content_that_the_close_would_end(
        self, net: Net, honor: bool
    ) -> None:
        await net.start(honor=honor, block_bytes=3)
        client = await net.client(GET)
        call = await net.call()
        await call.head()
        await call.send(b"HTTP/1.1 200 OK\r\nX-Accel-Buffering: no\r\n\r\nFoo")
        await client.until(b"Foo")
        call.reset()
        assert (await client.rest()).endswith(b"\r\n\r\n3\r\nFoo\r\n")

    @pytest.mark.parametrize("honor", MODES.values(), ids=MODES)
    @pytest.mark.parametrize("name", [n for n in BROKEN if n != "bad-chunk"])
    async def test_curl_exits_18(self, net: Net, name: str, honor: bool) -> None:
        await net.start(honor=honor)
        wire, held = BROKEN[name]
        curl = await run_curl(net)
        await (await net.call()).answer(wire)
        out, _ = await soon(curl.communicate())
        assert (out, curl.returncode) == (held, 18)

    async def test_silence_in_the_middle_breaks(self, net: Net) -> None:
        await net.start(honor=True)
        curl = await run_curl(net)
        assert curl.stdout is not None
        call = await net.call()
        await call.head()
        await call.send(STREAM_HEAD + chunks(b"Foo"))
        assert await soon(curl.stdout.readexactly(3)) == b"Foo"
        net.be_impatient()  # counts from the read after the next
        await call.send(chunks(b"Bar"))
        out, _ = await soon(curl.communicate())
        assert (out, curl.returncode) == (b"Bar", 18)


async def run_curl(net: Net, *arguments: str) -> asyncio.subprocess.Process:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    url = f"http://127.0.0.1:{net.port}/"
    command = ["curl", "-sN", "--noproxy", "*", *arguments, url]
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)


MOMENTS = ["before the head", "head held", "block passed", "some held"]


@pytest.mark.parametrize("honor", MODES.values(), ids=MODES)
@pytest.mark.parametrize("version", VERSIONS)
class TestLeaving:
    """Field reports 132, 140, 173."""

    FIRST = chunks(b"12345678")
    SECOND = chunks(b"more")

    async def open(self, net: Net, version: str, honor: bool, moment: str) -> tuple[Client, Call]:
        """Bring an exchange to a moment, as seen by the client where it can see it."""
        await net.start(honor=honor, block_bytes=8)
        client = await net.client(VERSIONS[version])
        call = await net.call()
        await call.head()
        if moment != "before the head":
            await call.send(STREAM_HEAD)
        if moment == "block passed":
            await call.send(self.FIRST)
            await client.until(b"12345678")
        if moment == "some held":
            await call.send(self.FIRST, chunks(b"held"))
            await client.until(b"12345678")
        return client, call

    @pytest.mark.parametrize("moment", MOMENTS)
    @pytest.mark.parametrize("how", ["close", "reset"])
    async def test_upstream_is_closed(
        self, net: Net, how: str, moment: str, version: str, honor: bool
    ) -> None:
        client, call = await self.open(net, version, honor, moment)
        client.leave(how)
        await call.left()

    async def test_close_with_the_request(self, net: Net, version: str, honor: bool) -> None:
        await net.start(honor=honor)
        client = await net.client(VERSIONS[version])
        client.leave("close")
        await (await net.call()).left()

    @pytest.mark.parametrize("moment", MOMENTS)
    async def test_half_closed_reads_on(
        self, net: Net, moment: str, version: str, honor: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if version == "1.0":
            # Its first probe is what upstream sends next, which must not depend on our speed.
            monkeypatch.setattr(proxy, "PROBE_S", 10)
        client, call = await self.open(net, version, honor, moment)
        client.half_close()
        if version == "1.1":
            await client.until(self.probe_at(moment, honor))
        if moment == "before the head":
            await call.send(STREAM_HEAD)
        await call.send(self.SECOND, http1.LAST_CHUNK)
        response, content, _ = parse(await client.rest())
        started = b"" if moment in ("before the head", "head held") else b"12345678"
        held = b"held" if moment == "some held" else b""
        assert response.status == 200
        assert content == started + held + b"more"
        await call.left()

    def probe_at(self, moment: str, honor: bool) -> bytes:
        if moment == "before the head" or (moment == "head held" and not honor):
            return b"HTTP/1.1 102 Processing\r\n\r\n" * 2
        if moment == "head held":
            return b"\r\n\r\n0"
        if moment == "some held" and not honor:
            return b"\r\n4\r\nheld\r\n"
        return b"\r\n0"

    async def test_half_closed_then_closed(self, net: Net, version: str, honor: bool) -> None:
        client, call = await self.open(net, version, honor, "head held")
        client.half_close()
        if version == "1.1" and not honor:
            await client.until(b" 102 ")
        client.leave("close")
        await call.send(self.FIRST)
        await call.left()


class TestHalfClosed:
    async def test_broken_answer_after_a_probe_is_reset(self, net: Net) -> None:
        """To some clients `0` and the end of the connection are a last chunk."""
        await net.start(honor=True)
        client = await net.client(GET)
        call = await net.call()
        await call.head()
        await call.send(STREAM_HEAD + chunks(b"Foo"))
        await client.until(b"Foo")
        client.half_close()
        await client.until(b"Foo\r\n0")
        call.writer.close()
        with pytest.raises(ConnectionResetError):
            await client.rest()

    async def test_pipelined_then_half_closed(self, net: Net) -> None:
        await net.start()
        client = await net.client(GET + GET)
        client.half_close()
        for _ in range(2):
            await (await net.call()).answer(UPSTREAM["length"])
        assert (await client.rest()).count(TEXT) == 2


class TestFarAhead:
    """A client that sends so much more than its request that nobody reads up to its end."""

    AHEAD = 2 * (proxy.PIPELINE_BYTES + 2 * proxy.READ_BYTES)

    @pytest.mark.parametrize("times", [1, 4])  # with the rest in our buffers, or not even sent
    @pytest.mark.parametrize("how", ["close", "reset"])
    async def test_one_who_leaves_is_found(
        self, net: Net, how: str, times: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(proxy, "AHEAD_PROBE_S", 0.05)
        await net.start()
        client = await net.client(GET + GET * (times * self.AHEAD // len(GET)))
        call = await net.call()
        client.leave(how)
        await call.left()

    async def test_one_who_half_closes_reads_on(self, net: Net) -> None:
        await net.start()
        client = await net.client(GET * (self.AHEAD // len(GET)))
        call = await net.call()
        client.half_close()
        await call.answer(UPSTREAM["length"])
        await client.until(TEXT)
        await net.call()  # for the next request


class TestSlowClient:
    async def test_nothing_is_read_from_upstream_meanwhile(self, net: Net) -> None:
        await net.start(honor=True)
        await net.client(GET)
        call = await net.call()
        await call.head()
        await call.send(STREAM_HEAD)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 256 * 1024 * 1024:
                # A stuck write never ends, however long the wait.
                await asyncio.wait_for(call.send(chunks(bytes(65536))), 0.3)
                sent += 65536
        assert sent < 32 * 1024 * 1024

    async def test_leaves_while_stuck(self, net: Net) -> None:
        await net.start(honor=True)
        client = await net.client(GET)
        call = await net.call()
        await call.head()
        call.writer.write(STREAM_HEAD + chunks(bytes(32 * 1024 * 1024)))
        await client.until(b"\0")
        client.leave("close")
        await call.left()

    async def test_stalled_is_gone(self, net: Net) -> None:
        await net.start(honor=True, stall_s=0.05)
        await net.client(GET)
        call = await net.call()
        await call.head()
        call.writer.write(STREAM_HEAD + chunks(bytes(32 * 1024 * 1024)))
        await call.left()


class TestTunnel:
    """RFC 9110 section 7.8; RFC 6455."""

    UPGRADE = (
        b"GET /ws HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    SWITCH = (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    )

    async def open(self, net: Net) -> tuple[Client, Call]:
        await net.start()
        client = await net.client(self.UPGRADE)
        call = await net.call()
        head = await call.head()
        assert b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" in head
        assert b"\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n" in head
        await call.send(self.SWITCH + b"first")
        raw = await client.until(b"\r\n\r\nfirst")
        assert b"\r\nUpgrade: websocket\r\n" in raw
        return client, call

    async def test_bytes_both_ways_then_half_close(self, net: Net) -> None:
        client, call = await self.open(net)
        await client.send(b"\x81up")
        assert await soon(call.reader.readexactly(3)) == b"\x81up"
        client.half_close()
        assert await soon(call.reader.read()) == b""
        await call.send(b"last words")
        call.writer.close()
        assert (await client.rest()).endswith(b"firstlast words")

    @pytest.mark.parametrize("how", ["close", "reset"])
    async def test_client_leaves(self, net: Net, how: str) -> None:
        client, call = await self.open(net)
        client.leave(how)
        await call.left()

    async def test_upstream_leaves(self, net: Net) -> None:
        client, call = await self.open(net)
        call.reset()
        with contextlib.suppress(ConnectionResetError):
            await client.rest()

    async def test_the_other_side_does_not_follow(
        self, net: Net, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(proxy, "LINGER_S", 0.02)
        client, call = await self.open(net)
        client.half_close()
        with contextlib.suppress(ConnectionResetError):
            await client.rest()
        await call.left()

    async def test_refused_handshake_keeps_its_field(self, net: Net) -> None:
        await net.start()
        client = await net.client(self.UPGRADE)
        await (await net.call()).answer(
            b"HTTP/1.1 426 Upgrade Required\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
            b"Content-Length: 0\r\n\r\n"
        )
        assert b"\r\nUpgrade: websocket\r\n" in await client.until(b"\r\n\r\n")

    @pytest.mark.parametrize(
        ("instead_of", "put"),
        [
            pytest.param(b"WebSocket\r\n", b"h2c\r\n", id="h2c"),
            pytest.param(b"GET", b"DELETE", id="not-GET"),
            pytest.param(b"HTTP/1.1", b"HTTP/1.0", id="HTTP/1.0"),
            pytest.param(b", Upgrade", b"", id="not-a-connection-option"),
        ],
    )
    async def test_other_upgrades_are_declined(
        self, net: Net, instead_of: bytes, put: bytes
    ) -> None:
        await net.start()
        await net.client(self.UPGRADE.replace(instead_of, put))
        head = await (await net.call()).head()
        assert "upgrade" not in names(head)
        assert b"Connection: close\r\n" in head

    async def test_websockets_library_both_sides(self, net: Net) -> None:
        websockets = require("websockets")
        closed = asyncio.Event()

        async def echo(connection: Any) -> None:
            async for message in connection:
                await connection.send(message)
            closed.set()

        async with websockets.serve(echo, "127.0.0.1", 0) as server:
            await net.start(upstream_port=server.sockets[0].getsockname()[1])
            url = f"ws://127.0.0.1:{net.port}/ws"
            async with websockets.connect(url, proxy=None) as client:
                for message in ("你好", b"\0\1", "x" * 200_000):
                    await client.send(message)
                    assert await soon(client.recv()) == message
            await soon(closed.wait())
            assert client.close_code == 1000

    async def test_websockets_server_closes(self, net: Net) -> None:
        websockets = require("websockets")

        async def refuse(connection: Any) -> None:
            await connection.close(4000, "enough")

        async with websockets.serve(refuse, "127.0.0.1", 0) as server:
            await net.start(upstream_port=server.sockets[0].getsockname()[1])
            url = f"ws://127.0.0.1:{net.port}/ws"
            async with websockets.connect(url, proxy=None) as client:
                with pytest.raises(websockets.ConnectionClosed):
                    await soon(client.recv())
                assert (client.close_code, client.close_reason) == (4000, "enough")


class TestProcess:
    """Field reports 167, 168, 170."""

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", "-X", "dev", str(ROOT / "proxy.py"), *arguments,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip

    async def ready(self, *arguments: str) -> tuple[asyncio.subprocess.Process, int]:
        process = await self.start("--port", "0", *arguments)
        assert process.stdout is not None
        line = (await soon(process.stdout.readline())).decode()
        match = re.fullmatch(r"http://127\.0\.0\.1:([0-9]+)\n", line)
        assert match is not None
        return process, int(match[1])

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    async def test_a_signal_ends_it_cleanly(self, net: Net, number: signal.Signals) -> None:
        await net.start()
        upstream = net._open[0].sockets[0].getsockname()[1]
        process, net.port = await self.ready("--upstream", f"http://127.0.0.1:{upstream}")
        idle, half, stream = [await net.client(x) for x in (b"", b"GET / HT", GET_10)]
        call = await net.call()
        await call.head()
        await call.send(STREAM_HEAD, chunks(bytes(9000)))
        await stream.until(b"\0")
        os.kill(process.pid, number)
        out, err = await soon(process.communicate())
        # asyncio's debug mode tells of what took long on a busy machine.
        told = [line for line in err.splitlines() if not line.startswith(b"Executing <")]
        assert (out, told, process.returncode) == (b"", [], 0)
        await call.left()
        assert await idle.rest() == b""
        await half.rest()
        with pytest.raises(ConnectionResetError):  # not an end that HTTP/1.0 could believe in
            await stream.rest()

    async def test_port_in_use(self) -> None:
        process, port = await self.ready()
        other = await self.start("--port", str(port))
        out, err = await soon(other.communicate())
        assert out == b""
        assert err.count(b"\n") == 1
        assert f"127.0.0.1:{port}".encode() in err
        assert other.returncode not in (0, None)
        process.terminate()
        assert await soon(process.wait()) == 0

    @pytest.mark.parametrize(
        "arguments",
        ["--upstream https://a", "--upstream http://a/b", "--upstream x", "--block 0",
         "--timeout nan", "--timeout -1", "--stall 0", "--port 70000", "--host 203.0.113.1"],
    )  # fmt: skip
    async def test_bad_arguments(self, arguments: str) -> None:
        process = await self.start("--port", "0", *arguments.split())
        _, err = await soon(process.communicate())
        assert process.returncode not in (0, None)
        assert b"Traceback" not in err


class TestRealServers:
    async def test_uvicorn_stream_and_half_close(self, net: Net) -> None:
        """A server that takes end-of-file for a departure must not see the client's."""
        uvicorn = require("uvicorn")

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                for _ in range(3):
                    part = {"type": "http.response.body", "body": TEXT, "more_body": True}
                    await send(part)
                await send({"type": "http.response.body", "body": b""})

        config = uvicorn.Config(app, port=0, lifespan="off", log_level="critical")
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None
        listener = socket.create_server(("127.0.0.1", 0))
        task = asyncio.create_task(server._serve([listener]))
        await net.start(upstream_port=listener.getsockname()[1])
        client = await net.client(GET)
        client.half_close()
        assert parse(await client.rest())[1] == TEXT * 3
        server.should_exit = True
        await soon(task)
        listener.close()

    async def test_aiohttp_both_sides(self, net: Net) -> None:
        aiohttp = require("aiohttp")
        web = require("aiohttp.web")

        async def echo(request: Any) -> Any:
            response = web.StreamResponse(headers={"X-Accel-Buffering": "no"})
            await response.prepare(request)
            async for piece in request.content.iter_any():
                await response.write(piece)
            return response

        app = web.Application()
        app.router.add_post("/x", echo)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        await net.start(upstream_port=runner.addresses[0][1], honor=True)

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield TEXT

        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{net.port}/x"
            for data in (TEXT * 20, pieces()):
                async with session.post(url, data=data) as response:
                    assert await soon(response.read()) == TEXT * 20
        await runner.cleanup()
