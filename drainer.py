"""A client that does as little as it can: it drains N streams and dates what comes.

    python drainer.py URL --way sse --streams 200 --every-ms 20 --lasts-s 2 --pid 4711
    --> one line of JSON: a `Drained`

A process of its own, so that it takes no time from the server's interpreter; one epoll loop, so
that thousands of events a second leave its core half idle. Streams are opened one after the other,
and each is asked for as many events as fit until they all end, `--lasts-s` after the first. In the
*window* in which all of them run, from the last head to the first end, the server's CPU time and
the events that came are counted.

    opened_s       |    window_s          |
    ===============|======================|==      stream 1, asked for 100 events
        ===========|======================|==      stream 2, for 95
               ====|======================|==      ...

When an event was due is known without the server's word. It has been told to make one each
`--every-ms`, the first of them so long after the request: event k of a stream is due k times that
after the head came (over a WebSocket: after the request left). So lateness holds the server's
timer, its own work, the kernel, and this loop's turn to read, which the bare loop's row has as
well; how long a request waits for its head is part of `opened_s` instead.

Events are counted, not parsed: an event stream's by their blank lines, a WebSocket's by its
frames. Linux only: `epoll`, and the clock that tells another process's CPU time.

Read next: `delivery_experiments.py`.
"""

import argparse
import contextlib
import dataclasses
import json
import resource
import select
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import http1
import measures
import websocket

WAYS = ("sse", "close", "ws")
READ_BYTES = 65536
# A head comes in milliseconds, an event when it is due: what takes longer will not come.
PATIENCE_S = 20.0
WARM_UP = 20
# Requests that wait for their heads: enough to keep the server busy, not to make a queue.
OPENING = 16
# The window's least part of a run.
LEAST = 0.1
TAIL_BYTES = len(http1.LAST_CHUNK) - 1
KEY = b"0123"  # any masking key will do on loopback


class DrainError(Exception):
    """The streams cannot be drained; the message says why in one line."""


@dataclasses.dataclass
class Drained:
    """What came of the streams, in seconds and bytes."""

    opened_s: float  # for all of the heads
    window_s: float
    window_events: int
    window_cpu_s: float  # of the server's process
    memory: int  # what its process has grown by, from before the first to the window's end
    events: int  # that were asked for, by all streams together
    whole: int  # streams of which every event and the end came
    late: tuple[float, float, float]  # p50, p95, p99 of the pieces that came in the window


class TooShort(DrainError):
    """Opening the streams left no time to measure: with more time there would be some."""


class Stream:
    """One stream: its socket, what was asked for, and what has come."""

    __slots__ = ("asked", "began", "count", "dates", "message", "peer", "tail", "whole")

    def __init__(self, peer: socket.socket, asked: int, message: bytes) -> None:
        self.peer = peer
        self.asked = asked
        self.message = message  # to be sent when the head has come
        self.began: float | None = None  # when that was
        self.count = 0  # events, the end's included
        self.dates: list[float] = []
        self.tail = b""  # of what came, as far as what comes next depends on it
        self.whole = False


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used, all its threads included."""
    # The kernel's CPUCLOCK_SCHED of a process, which clock_getcpuclockid(3) makes of its id.
    return time.clock_gettime((~pid << 3) | 2)


def memory_bytes(pid: int) -> int:
    """Return the memory that a process has in use."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


class Drainer:
    """Opens streams and drains them, in one loop."""

    def __init__(self, url: str, way: str, every_s: float) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._host = parts.netloc
        self._way = way
        self._every_s = every_s
        self._epoll = select.epoll()
        self._open: dict[int, Stream] = {}  # by their sockets' numbers
        self._waiting = 0  # for their heads

    def close(self) -> None:
        """Drop what is open."""
        self._epoll.close()
        for stream in self._open.values():
            stream.peer.close()

    def open(self, events: int) -> Stream:
        """Ask for one more stream, and drain all while too many wait for their heads."""
        peer = socket.create_connection(self._address, timeout=PATIENCE_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request, message = _requests(self._way, self._host, events)
        stream = self._open[peer.fileno()] = Stream(peer, events, message)
        self._waiting += 1
        peer.sendall(request)
        peer.setblocking(False)
        self._epoll.register(peer.fileno(), select.EPOLLIN)
        self._wait_for_heads(OPENING)
        return stream

    def _wait_for_heads(self, waiting: int) -> None:
        while self._waiting > waiting:
            self.drain(time.perf_counter() + PATIENCE_S)

    def drain(self, until: float) -> None:
        """Read once from every stream that has something; DrainError when none has until then."""
        ready = self._epoll.poll(max(0.0, until - time.perf_counter()))
        if not ready and time.perf_counter() >= until:
            raise DrainError(f"nothing came for {PATIENCE_S:g} s")
        for number, _ in ready:
            stream = self._open[number]
            try:
                data = stream.peer.recv(READ_BYTES)
            except ConnectionError:
                data = b""
            now = time.perf_counter()
            if not data or self._read(stream, data, now):
                self._end(stream, closed=not data)

    def _read(self, stream: Stream, data: bytes, now: float) -> bool:
        """Count the events that a read completed; True when it holds the end."""
        if stream.began is None:
            data = stream.tail + data
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                stream.tail = data
                return False
            self._begin(stream, data[:end], now)
            data = data[end:]
        data = stream.tail + data
        if self._way == "ws":
            count, stream.tail, ended = _frames(data)
        else:
            # From the tail's last byte on: a blank line may be cut between two reads.
            count = data.count(b"\n\n", max(0, len(stream.tail) - 1))
            ended = self._way == "sse" and data.endswith(http1.LAST_CHUNK)
            stream.tail = data[-TAIL_BYTES:]
        stream.count += count
        stream.dates += [now] * count
        return ended

    def _begin(self, stream: Stream, head: bytes, now: float) -> None:
        _check_head(head, self._way)
        self._waiting -= 1
        stream.began, stream.tail = now, b""
        if stream.message:
            stream.peer.send(stream.message)

    def _end(self, stream: Stream, closed: bool) -> None:
        if stream.began is None:
            raise DrainError("the server closed a connection without an answer")
        stream.whole = stream.count == stream.asked + 1 and closed == (self._way == "close")
        self._epoll.unregister(stream.peer.fileno())
        del self._open[stream.peer.fileno()]
        stream.peer.close()

    def warm_up(self, count: int) -> None:
        """Have a process's first streams, which are slower and make it allocate what it keeps."""
        for _ in range(count):
            self.open(1)
        self._finish()

    def _finish(self) -> None:
        while self._open:
            self.drain(time.perf_counter() + PATIENCE_S)

    def run(self, count: int, lasts_s: float, pid: int) -> Drained:
        """Open so many streams, read all to their ends, and tell what happened."""
        before = memory_bytes(pid)
        began = time.perf_counter()
        streams: list[Stream] = []
        for _ in range(count):
            left_s = began + lasts_s - time.perf_counter()
            if left_s < lasts_s * LEAST:
                raise TooShort(
                    f"{len(streams)} of {count} streams opened in {lasts_s - left_s:.1f} s"
                )
            streams.append(self.open(max(1, int(left_s / self._every_s))))
        self._wait_for_heads(0)
        opened, cpu_began = time.perf_counter(), cpu_s(pid)
        while len(self._open) == count:
            self.drain(time.perf_counter() + PATIENCE_S)
        closed, cpu_ended, after = time.perf_counter(), cpu_s(pid), memory_bytes(pid)
        self._finish()
        late = [late for stream in streams for late in self._late(stream, opened, closed)]
        if closed - opened < lasts_s * LEAST or not late:
            raise TooShort(f"opening the streams took {opened - began:.1f} s, too much of it all")
        ranks = measures.spread(late)
        return Drained(
            opened - began,
            closed - opened,
            len(late),
            cpu_ended - cpu_began,
            after - before,
            sum(stream.asked for stream in streams),
            sum(stream.whole for stream in streams),
            (ranks.p50 or 0.0, ranks.p95 or 0.0, ranks.p99 or 0.0),
        )

    def _late(self, stream: Stream, since: float, until: float) -> Iterator[float]:
        due = stream.began or 0.0
        for date in stream.dates[: stream.asked]:
            due += self._every_s
            if since <= date <= until:
                yield date - due


def _requests(way: str, host: str, events: int) -> tuple[bytes, bytes]:
    """Return what asks for a stream: the first bytes, and those that follow a handshake."""
    content = json.dumps({"prompt": "Once upon a time", "max_tokens": events}).encode()
    if way == "ws":
        fields = [("Host", host), *websocket.request_fields(websocket.new_key())]
        handshake = http1.encode_request("GET", "/ws", fields)
        return handshake, websocket.encode_frame(websocket.TEXT, content, mask=KEY)
    fields = [("Host", host), ("Content-Type", "application/json")]
    request = http1.encode_request("POST", "/stream", fields, content)
    if way == "close":
        request = request.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)
    return request, b""


def _check_head(head: bytes, way: str) -> None:
    line, _, _ = head.partition(b"\r\n")
    if line.split()[1] != (b"101" if way == "ws" else b"200"):
        raise DrainError(f"the server answered {line.decode(errors='replace')}")
    if way != "ws" and (b"\r\ntransfer-encoding: chunked" in head.lower()) != (way == "sse"):
        raise DrainError(f"the stream's framing is not the one that --way {way} asks for")


def _frames(data: bytes) -> tuple[int, bytes, bool]:
    """Count whole text frames; return what is left, and whether a Close was among them."""
    count = at = 0
    while at + 4 <= len(data):
        length, start = data[at + 1], at + 2
        if length == 126:
            length, start = int.from_bytes(data[start : start + 2], "big"), start + 2
        if data[at] == 0x88:
            return count, b"", True
        if start + length > len(data):
            break
        count += data[at] == 0x81  # not a ping
        at = start + length
    return count, data[at:], False


def allow_files(count: int) -> str | None:
    """Raise the limit of open files to what `count` streams need; else say why not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = count + 100
    if hard != resource.RLIM_INFINITY and need > hard:
        return f"the system allows {hard:,} open files"
    if soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
    return None


def main(arguments: list[str] | None = None) -> int:
    """Drain the streams that the arguments ask for."""
    parser = argparse.ArgumentParser(description="Drain many streams, date what comes.")
    add: Any = parser.add_argument
    add("url", help="of the server")
    add("--way", choices=WAYS, default="sse")
    add("--streams", type=int, default=200)
    add("--every-ms", type=float, default=20.0, help="an event, as the server was told")
    add("--lasts-s", type=float, default=2.0, help="seconds from the first request to the end")
    add("--pid", type=int, required=True, help="the server's process")
    args = parser.parse_args(arguments)
    try:
        if refused := allow_files(args.streams):
            raise DrainError(refused)
        with contextlib.closing(Drainer(args.url, args.way, args.every_ms / 1000)) as drainer:
            drainer.warm_up(min(args.streams, WARM_UP))
            drained = drainer.run(args.streams, args.lasts_s, args.pid)
    except (DrainError, OSError) as error:
        print(f"drainer.py: {error or type(error).__name__}", file=sys.stderr)
        return 2 if isinstance(error, TooShort) else 1
    print(json.dumps(dataclasses.asdict(drained)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
