"""Bytes from nowhere: mutated and random input to a running server, seeded, over real sockets.

Whatever comes, the server answers or closes; it says nothing on stderr, its memory stays flat, it
leaves nothing running, and the next client is served.
"""

import asyncio
import itertools
import os
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from processes import Program, outcome, started
from serving import Peer
from sockets import MASK, OPENING, open_websocket

import http1
import websocket

WORKERS = 8
ROUNDS = 160  # of each worker
BATCH = 4  # after so many rounds of warming up, memory is weighed
# The log of the last replies, those that can be resumed, and what the allocator keeps.
GROWTH_BYTES = 8 * 1024 * 1024
SHORT = ("--head-time", "0.3", "--content-time", "0.3", "--idle-time", "0.3")
FLAGS = (*SHORT, "--delay-ms", "1", "--jitter-ms", "0")

BODY = b'{"prompt": "a b c", "max_tokens": 5, "seed": 1}'


def request(method: str, target: str, body: bytes = b"", **fields: str) -> bytes:
    pairs = [("Host", "x"), *((name.replace("_", "-"), value) for name, value in fields.items())]
    return http1.encode_request(method, target, pairs, body)


CHUNKED = (
    b"POST /stream HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"1;a=b\r\n{\r\n2e\r\n" + BODY[1:] + b"\r\n0\r\nX: y\r\n\r\n"
)
REQUESTS = [
    request("POST", "/complete", BODY),
    request("POST", "/stream", BODY),
    request("POST", "/stream", BODY, Expect="100-continue", Connection="close"),
    request("POST", "/stream", BODY, Origin="http://x", Authorization="Bearer x"),
    request("GET", "/stream?prompt=a%20b&max_tokens=3&stop=x&events=named"),
    request("GET", "/complete?messages=%5B%7B%22role%22:%22user%22,%22content%22:%22a%22%7D%5D"),
    request("GET", "/stream?prompt=a", Last_Event_ID="reply-0:3"),
    request("OPTIONS", "*"),
    request("HEAD", "/stream?prompt=a", Accept_Encoding="gzip"),
    request("GET", "/ws", **OPENING),
    request("GET", "/log") + request("GET", "/health"),
    CHUNKED,
    CHUNKED.replace(b"1.1", b"1.0"),
]


def text(payload: bytes, opcode: int = websocket.TEXT, fin: bool = True) -> bytes:
    return websocket.encode_frame(opcode, payload, fin=fin, mask=MASK)


FRAMES = [
    text(BODY),
    text(BODY[:9], fin=False) + text(b"x", websocket.PING) + text(BODY[9:], websocket.CONTINUATION),
    text(BODY) + text(b'{"stop": true}'),
    text(BODY) + text(b"\x03\xe8bye", websocket.CLOSE),
    text(BODY) + text(b"\0" * 70_000, websocket.BINARY),
    text(b"", websocket.PING) * 50 + text(BODY),
    text("é你\U0001f600".encode()) + text(BODY),
]


def mutated(draw: random.Random, raw: bytes) -> bytes:
    """A few of the things that go wrong: bits, bytes, lengths, pieces lost, doubled, moved."""
    data = bytearray(raw)
    for _ in range(draw.choice((0, 1, 1, 2, 3, 8))):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
            case 1 if at < len(data):
                data[at] = draw.randrange(256)
            case 2:
                data[at:at] = draw.randbytes(draw.randrange(1, 6))
            case 3:
                del data[at : at + draw.randrange(1, 30)]
            case 4:
                data[at:at] = data[at : at + draw.randrange(1, 200)] * draw.randrange(1, 4)
            case 5:
                data[at:at] = draw.choice((b"\r\n", b"\n", b"\r", b"\0", b": ", b"9" * 30, b"\xff"))
            case _:
                del data[at:]
    return bytes(data)


def hostile_bytes(draw: random.Random) -> bytes:
    """A request or several, more or less mutated; now and then nothing but noise."""
    if draw.random() < 0.15:
        return draw.randbytes(draw.choice((1, 10, 1000, 40_000)))
    return b"".join(mutated(draw, draw.choice(REQUESTS)) for _ in range(draw.choice((1, 1, 2, 4))))


def hostile_frames(draw: random.Random) -> bytes:
    if draw.random() < 0.15:
        return draw.randbytes(draw.choice((1, 10, 1000, 40_000)))
    return mutated(draw, draw.choice(FRAMES))


async def attack(program: Program, draw: random.Random, raw: bytes, opening: bool) -> None:
    """Send it in parts, read what comes or not, and leave in one of the ways there are."""
    async with program.connect() as peer:
        if opening:
            peer = (await open_websocket(peer)).peer
        cuts = sorted(draw.randrange(len(raw) + 1) for _ in range(draw.choice((0, 0, 1, 3))))
        for start, end in itertools.pairwise([0, *cuts, len(raw)]):
            peer.send(raw[start:end])
            await asyncio.sleep(0)
        match draw.randrange(5):
            case 0:
                peer.reset()
            case 1:
                peer.close()
            case 2:
                await peer.reader.read(draw.choice((1, 100, 10_000)))
            case _:
                # Half-closed: the server has to come to an end by itself, and soon.
                if peer.writer.can_write_eof() and not peer.writer.is_closing():
                    peer.half_close()
                await peer.closed()


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def storm(
    program: Program, make: Callable[[random.Random], bytes], seed: str, opening: bool
) -> None:
    async def worker(number: int) -> None:
        for turn in range(ROUNDS // BATCH):
            draw = random.Random(f"{seed}/{number}/{turn}")
            try:
                await attack(program, draw, make(draw), opening)
            except ConnectionError:
                pass  # a reset is an answer, too
            except TimeoutError:
                pytest.fail(f"neither an answer nor an end: {seed}/{number}/{turn}")

    await asyncio.gather(*(worker(number) for number in range(WORKERS)))


async def quiet(program: Program) -> None:
    """Wait until nothing is left of the attackers."""
    async with asyncio.timeout(20), program.connect() as peer:
        while True:
            health = (await peer.ask("GET", "/health")).json()
            if not health["running"] and descriptors(program.process.pid) <= 20:
                return
            await asyncio.sleep(0.02)


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="a process is weighed by /proc"
)


@needs_proc
@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_storm(kind: str) -> None:
    make, opening = (hostile_bytes, False) if kind == "http" else (hostile_frames, True)
    async with started(*FLAGS) as program:
        weights = []
        for batch in range(BATCH):
            await storm(program, make, f"{kind}/{batch}", opening)
            await quiet(program)
            weights.append(resident_bytes(program.process.pid))
        assert weights[-1] - weights[0] < GROWTH_BYTES, weights
        async with program.connect() as peer:
            answer = await peer.ask("POST", "/stream", BODY)
            assert answer.events()[-1] == "[DONE]"
        program.process.terminate()
        assert await outcome(program.process) == (0, b"", b"")


@pytest.mark.parametrize("seed", range(2))
async def test_sound_requests_among_noise(seed: int) -> None:
    """Others' bytes change nobody's text."""
    async with started(*FLAGS) as program:
        async with program.connect() as peer:
            whole = (await peer.ask("POST", "/complete", BODY)).json()["text"]

        async def sound() -> None:
            for _ in range(20):
                async with program.connect() as peer:
                    assert (await peer.ask("POST", "/stream", BODY)).text() == whole

        storms = (
            storm(program, hostile_bytes, f"noise/{seed}", False),
            storm(program, hostile_frames, f"noise/{seed}", True),
        )
        await asyncio.gather(sound(), *storms)
        program.process.terminate()
        assert await outcome(program.process) == (0, b"", b"")


@needs_proc
async def test_a_thousand_small_requests() -> None:
    """Field reports 92 and 110: half of them left alone, and nothing of them stays."""
    async with started(*FLAGS) as program:
        pid = program.process.pid

        async def some(count: int) -> None:
            for turn in range(count):
                async with program.connect() as peer:
                    if turn % 2:
                        assert (await peer.ask("POST", "/stream", BODY)).events()[-1] == "[DONE]"
                    else:
                        peer.request("POST", "/stream", BODY.replace(b"5,", b"500000,"))
                        await peer.until(b"data: ")
                        (peer.reset, peer.close)[turn % 4 // 2]()

        async def weigh() -> tuple[int, int]:
            await asyncio.gather(*(some(60) for _ in range(WORKERS)))
            await quiet(program)
            return resident_bytes(pid), threads(pid)

        first, second = await weigh(), await weigh()
        assert second[0] - first[0] < GROWTH_BYTES
        assert second[1] == first[1]


async def test_fifty_dribblers() -> None:
    """Field report 21: they hold up nobody, and their time is limited, however they drip."""
    async with started("--head-time", "1", "--content-time", "1") as program, AsyncExitStack() as s:
        slow = [await s.enter_async_context(program.connect()) for _ in range(50)]
        ends = [asyncio.create_task(drip(peer, number)) for number, peer in enumerate(slow)]
        async with program.connect() as peer:
            assert (await peer.ask("POST", "/stream", BODY)).events()[-1] == "[DONE]"
        assert all(status == 408 for status in await asyncio.gather(*ends))


async def drip(peer: Peer, number: int) -> int:
    """Send a byte now and then; the status that ends it."""
    peer.parser.expect("POST")
    if number % 2:
        peer.send(b"POST /complete HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
    else:
        peer.send(b"GET /complete?prompt=")
    answer = asyncio.create_task(peer.answer())
    while not answer.done():
        peer.send(b"a")
        await asyncio.sleep(0.05)
    return (await answer).status
