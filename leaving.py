"""The experiment with clients that leave: every way to go, on every route, direct and through hops.

    close        FIN, as browsers and most libraries do
    reset        RST, as a process does that is killed with bytes unread
    half-close   FIN, and reads on: `printf ... | nc -N`
    stop         {"stop": true} on a WebSocket, which stays open
    cancel       POST /cancel/ID from another connection
    vanish       not one packet more: a cable pulled, a phone in a tunnel

A client leaves when the server's log says that so many tokens were generated, right behind one of
them, so that the next is far. What was generated then and what in the end is the log's word, and so
is the reason. The log names nobody: each cell's prompt has a number of words of its own.

Vanishing is made real on one machine by a filter of the kernel on the client's socket that drops
every packet (SO_ATTACH_FILTER, Linux): nothing is read, acknowledged or answered any more.

Not here: gateways (`hops.py`), and what they do to those who stay (`hop_experiments.py`). Read
next: `drainer.py`.
"""

import asyncio
import ctypes
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import hops
import http1
import websocket
from bench import NOTICE_S, Bench, ExperimentError, experiment
from hops import NotInstalled
from report import Finding, span

ROUNDS = 2
TOGETHER = 16  # cells at a time
TOKENS = 100  # of a reply that nobody leaves
AFTER = 10  # tokens, the client leaves
DELAY_MS = 33
STALL_S = 1
TRIES = 20
MANY = 1000  # more than there are cells: each attempt needs a prompt of its own length
POLL_S = 0.01
READ_BYTES = 65536

# What the server's log says, in a word.
NOTICED = {
    "the client closed its connection": "closed",
    "the client closed the WebSocket": "closed",
    "the client's connection broke": "broke",
    "the client said stop": "told",
    "cancelled by id": "told",
    "the client vanished: it acknowledged nothing for too long": "silent",
    "no answer to a ping": "silent",
}

READ_ON = "reads on"

Body = dict[str, Any]


# Routes


def _native(prompt: str) -> Body:
    return {"prompt": prompt, "max_tokens": TOKENS}


def _text(prompt: str) -> Body:
    return {"model": "simulated", "prompt": prompt, "max_tokens": TOKENS}


def _messages(prompt: str) -> Body:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "simulated", "messages": messages, "max_tokens": TOKENS}


def _responses(prompt: str) -> Body:
    return {"model": "simulated", "input": prompt, "max_output_tokens": TOKENS}


@dataclass(frozen=True)
class Route:
    """An address, what is asked of it, and whether the reply is streamed."""

    name: str
    path: str
    body: Callable[[str], Body]
    stream: bool | None = None  # None: the address decides

    @property
    def is_websocket(self) -> bool:
        """Whether the request is a message, after an opening handshake."""
        return self.path == "/ws"

    def request(self, prompt: str, host: str) -> bytes:
        """Return the request's bytes."""
        body = self.body(prompt)
        if self.stream is not None:
            body["stream"] = self.stream
        if self.is_websocket:
            return _frame(body)
        fields = [("Host", host), ("Content-Type", "application/json")]
        return http1.encode_request("POST", self.path, fields, json.dumps(body).encode())


def _frame(message: Body) -> bytes:
    content = json.dumps(message).encode()
    return websocket.encode_frame(websocket.TEXT, content, mask=os.urandom(4))


ROUTES = (
    Route("/complete", "/complete", _native),
    Route("/stream", "/stream", _native),
    Route("/ws", "/ws", _native),
    Route("chat", "/v1/chat/completions", _messages, False),
    Route("streamed", "/v1/chat/completions", _messages, True),
    Route("completions", "/v1/completions", _text, False),
    Route("streamed", "/v1/completions", _text, True),
    Route("responses", "/v1/responses", _responses, False),
    Route("streamed", "/v1/responses", _responses, True),
    Route("messages", "/v1/messages", _messages, False),
    Route("streamed", "/v1/messages", _messages, True),
)


# Ways to leave


class Guest:
    """A client that reads whatever comes, until it leaves."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._reading: asyncio.Task[None] | None = None
        self._filter: Any = None  # has to outlive the socket

    async def ask(self, route: Route, prompt: str) -> None:
        """Connect, send one request and begin to read."""
        loop, host = asyncio.get_running_loop(), self._address.netloc
        await loop.sock_connect(self._socket, (self._address.hostname, self._address.port))
        if route.is_websocket:
            fields = [("Host", host), *websocket.request_fields(websocket.new_key())]
            opening = http1.encode_request("GET", route.path, fields)
            await loop.sock_sendall(self._socket, opening)
            await loop.sock_recv(self._socket, READ_BYTES)  # the 101: nothing else comes unasked
        await loop.sock_sendall(self._socket, route.request(prompt, host))
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while await loop.sock_recv(self._socket, READ_BYTES):
                pass

    async def close(self) -> None:
        """Close the socket, if it is open still."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._socket.close()

    async def reset(self) -> None:
        """Close the socket with a linger time of zero: the kernel sends RST."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self.close()

    async def half_close(self) -> None:
        """Send FIN and read on."""
        self._socket.shutdown(socket.SHUT_WR)

    async def stop(self) -> None:
        """Say stop on a WebSocket, and read on."""
        await asyncio.get_running_loop().sock_sendall(self._socket, _frame({"stop": True}))

    async def vanish(self) -> None:
        """Drop every packet that comes from now on. OSError where the kernel does not allow it."""
        self._filter = vanish(self._socket)


def vanish(peer: socket.socket) -> object:
    """Make a socket deaf; what is returned has to be kept as long as that."""
    attach_filter = 26  # SO_ATTACH_FILTER has no name in Python
    # One instruction of the classic Berkeley Packet Filter: return 0, keep nothing of the packet.
    drop = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    peer.setsockopt(socket.SOL_SOCKET, attach_filter, program)
    return drop


def can_vanish() -> bool:
    """Whether this system and this user may make a socket deaf."""
    with socket.socket() as peer:
        try:
            vanish(peer)
        except OSError:
            return False
    return True


# Cells of the table


@dataclass(frozen=True)
class Way:
    """How to leave, and through what."""

    name: str
    leave: Callable[[Guest], Awaitable[None]] | None  # None: by another connection
    hop: str = "direct"
    only_websocket: bool = False
    published: str = "not measured"


def _ways() -> Iterator[Way]:
    by_read = "1 late by write, at once by read"
    for hop in ("direct", "proxy.py", "nginx"):
        yield Way("close", Guest.close, hop, published=by_read)
        yield Way("reset", Guest.reset, hop)
        yield Way("half-close", Guest.half_close, hop)
        yield Way("stop", Guest.stop, hop, only_websocket=True)
        if hop == "direct":
            yield Way("cancel", None, hop)
        yield Way("vanish", Guest.vanish, hop)


WAYS = tuple(_ways())


@dataclass
class Cell:
    """One way to leave one route: tokens generated after the client left, and what was noticed."""

    way: Way
    route: Route
    wasted: list[int] = field(default_factory=list)
    noticed: list[str] = field(default_factory=list)
    absent: str = ""

    def __str__(self) -> str:
        """Write it as it stands in the table."""
        if not self.wasted:
            return self.absent
        if set(self.noticed) == {READ_ON}:
            return READ_ON  # all of it was generated, and none of it wasted
        return f"{span(self.wasted)} {', '.join(sorted(set(self.noticed)))}"


class Log:
    """A server's log, asked for again and again for everybody who waits for a line of it."""

    def __init__(self, bench: Bench, url: str) -> None:
        self._bench = bench
        self._url = url
        self.asked = 0.0  # when, for what is known now
        self._lines: dict[int, dict[str, Any]] = {}  # by the number of tokens of the prompt
        self._news = asyncio.Condition()

    async def follow(self) -> None:
        """Ask until cancelled."""
        now = asyncio.get_running_loop().time
        while True:
            asked = now()
            lines = json.loads(await self._bench.get(f"{self._url}/log"))["requests"]
            async with self._news:
                self.asked = asked
                self._lines = {line["prompt_tokens"]: line for line in lines}
                self._news.notify_all()
            await asyncio.sleep(POLL_S)

    async def line(self, words: int, until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for the line of a prompt with so many words, and for `until` to hold of it."""
        async with self._news:
            await self._news.wait_for(lambda: words in self._lines and until(self._lines[words]))
            return self._lines[words]


async def _leave(bench: Bench, url: str, hop_url: str, log: Log, cell: Cell, words: int) -> bool:
    """Ask, leave, and see what comes of it; False when leaving took longer than a token does."""
    now, guest = asyncio.get_running_loop().time, Guest(hop_url)
    try:
        async with asyncio.timeout(NOTICE_S):
            await guest.ask(cell.route, "word " * words)
            line = await log.line(words, lambda line: line["completion_tokens"] >= AFTER)
            seen = line["completion_tokens"]
            # Right behind a token, so that the next is far.
            line = await log.line(words, lambda line: line["completion_tokens"] > seen)
            known = log.asked
            if cell.way.leave is None:
                await bench.get(f"{url}/cancel/{line['id']}", "POST")
            else:
                await cell.way.leave(guest)
            in_time = now() - known < DELAY_MS / 1000
            ended = await log.line(words, lambda line: line["finish_reason"] is not None)
    except TimeoutError:
        raise ExperimentError(f"{cell.route.path}: waited for {NOTICE_S:g} s in vain") from None
    finally:
        await guest.close()
    if in_time:
        cell.wasted.append(ended["completion_tokens"] - line["completion_tokens"])
        cell.noticed.append(_noticed(cell, ended))
    return in_time


async def _try(bench: Bench, urls: dict[str, str], log: Log, cell: Cell, words: int) -> None:
    """Play a cell until it is played in time: a busy machine may come between log and leaving."""
    for attempt in range(TRIES):
        prompt = words + attempt * MANY
        if await _leave(bench, urls["direct"], urls[cell.way.hop], log, cell, prompt):
            return
    raise ExperimentError(f"this machine is too busy: nobody left in time in {TRIES} attempts")


def _noticed(cell: Cell, line: dict[str, Any]) -> str:
    if line["finish_reason"] == "cancelled":
        reason: str = line["cancel_reason"]
        return NOTICED.get(reason, reason)
    return READ_ON if cell.way.leave is Guest.half_close else "unnoticed"


# The experiment


@experiment("leaving", waits=True)
async def leaving(bench: Bench) -> Finding:
    """What is still generated when a client has left, by every way to go on every route."""
    cells = [Cell(way, route) for way in WAYS for route in ROUTES if _can(way, route)]
    bench.expect(ROUNDS * len(cells), "leaving")
    for number in range(ROUNDS):
        async with _paths(bench, number) as urls:
            await _round(bench, urls, cells)
    return Finding(
        ["way", *(route.name for route in ROUTES), "published"],
        [
            [
                f"{way.name}, {way.hop}",
                *(_cell(cells, way, route) for route in ROUTES),
                way.published,
            ]
            for way in WAYS
        ],
        f"{ROUNDS} replies a cell, of {TOKENS} tokens if nobody leaves; left behind the"
        f" {AFTER + 1}th token or a later one",
        [
            "Each cell: tokens generated after the client had left, and how the server noticed."
            " closed: an end-of-file (where the client may have half-closed, the probe that follows"
            " was answered by a reset); broke: a reset; told: a message or a request; silent:"
            f" nothing acknowledged for --stall, here {STALL_S} s; unnoticed: all {TOKENS} tokens.",
            "The providers' routes, in order: /v1/chat/completions, /v1/completions, /v1/responses,"
            " /v1/messages, each whole and streamed.",
            "half-close: who reads on is not gone, but nginx takes it for gone. vanish: of a client"
            " behind nginx the server can't know, nginx has its own time limits: minutes; proxy.py"
            f" runs with --stall {STALL_S} here.",
        ],
        f"simulated, {DELAY_MS} ms a token",
    )


def _can(way: Way, route: Route) -> bool:
    return route.is_websocket or not way.only_websocket


def _cell(cells: list[Cell], way: Way, route: Route) -> str:
    found = (str(cell) for cell in cells if (cell.way, cell.route) == (way, route))
    return next(found, "-")


@asynccontextmanager
async def _paths(bench: Bench, number: int) -> AsyncIterator[dict[str, str]]:
    """Give the URL of a new server, with a log of its own, by every hop that is installed."""
    schedule = f"--delay-ms={DELAY_MS}", "--jitter-ms=0", f"--seed={number}"
    url = await bench.server("--model=simulated", f"--stall={STALL_S}", *schedule)
    urls = {"direct": url, "proxy.py": await bench.proxy(url, f"--stall={STALL_S}")}
    async with AsyncExitStack() as stack:
        with suppress(NotInstalled):
            nginx = hops.running(hops.nginx(*hops.HTTP_1_1), url)
            urls["nginx"] = await stack.enter_async_context(nginx)
        yield urls


async def _round(bench: Bench, urls: dict[str, str], cells: list[Cell]) -> None:
    """Play every cell once, several at a time."""
    log = Log(bench, urls["direct"])
    room = asyncio.Semaphore(TOGETHER)
    possible = can_vanish()

    async def play(words: int, cell: Cell) -> None:
        async with room:
            if cell.way.hop not in urls:
                cell.absent = "not installed"
            elif cell.way.leave is Guest.vanish and not possible:
                cell.absent = "not permitted"
            else:
                await _try(bench, urls, log, cell, words)
            bench.step()

    async def play_all() -> None:
        await asyncio.gather(*(play(*pair) for pair in enumerate(cells, 10)))

    tasks = [asyncio.create_task(play_all()), asyncio.create_task(log.follow())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
