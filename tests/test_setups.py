"""The diagnosis on real set-ups: the server, `proxy.py`, nginx and haproxy, with known faults.

Each is asked over real sockets and the verdict is known beforehand. What is decided by times here
is apart by a factor of ten or more: a word each 16 ms, blocks of some tenths of a second.
"""

import asyncio
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from processes import SERVER, started
from require import require_program
from scripted import scripted
from test_roundtrip import FINISH, chat

import hops
import http1
from asking import ask
from diagnosis import KEPT, Kind, compare, diagnose
from measures import Mode
from target import Options

CHAT = "/v1/chat/completions"
PROMPT = {"prompt": "Hi"}
TURNS = {"model": "simulated", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
# An event of the chat dialect has about 240 bytes: these are 26 KB, in less than two seconds.
LONG = TURNS | {"max_tokens": 110}
SHORT = PROMPT | {"max_tokens": 60}  # 1.6 KB in a second: less than any hop's block
GZIP = (("Accept-Encoding", "gzip"),)

WELL, HELD, BUFFERED, COMPRESSED = Kind.WELL, Kind.HELD, Kind.BUFFERED, Kind.COMPRESSED


@dataclass(frozen=True, eq=False)
class SetUp:
    name: str
    expected: tuple[Kind, ...]
    body: dict = field(default_factory=lambda: LONG)
    path: str = CHAT
    server: str = "words"
    hop: hops.Hop | tuple[str, ...] | None = None
    evidence: str = ""
    options: dict = field(default_factory=dict)


# A busy machine makes silences of its own: what it spoiled is asked again, alone.
TRIES = 3

SERVERS = {
    "words": ("--delay-ms=16", "--jitter-ms=4"),
    "fast": ("--delay-ms=2", "--jitter-ms=1"),
    "slow": ("--delay-ms=210", "--jitter-ms=0"),
    "late": ("--delay-ms=16", "--first-delay-ms=900", "--heartbeat=0.2"),
}
DEAF = hops.WITHOUT_FIELD

SET_UPS = [
    SetUp("direct", (WELL,)),
    SetUp("direct, native", (WELL,), SHORT, "/stream"),
    SetUp("direct, messages", (WELL,), LONG, "/v1/messages"),
    SetUp("direct, WebSocket", (WELL,), SHORT, "/ws", options={"mode": Mode.WEBSOCKET}),
    SetUp("direct, 500 words a second", (WELL,), PROMPT | {"max_tokens": 300}, "/stream", "fast"),
    SetUp("direct, slow", (Kind.SLOW, WELL), PROMPT | {"max_tokens": 10}, "/stream", "slow"),
    SetUp("direct, late", (Kind.LATE, WELL), LONG, CHAT, "late"),
    SetUp("direct, silent", (Kind.FAILED, Kind.HEARTBEATS), SHORT, "/stream", "late",
          options={"timeout": 0.7}),
    SetUp("direct, whole", (Kind.NOT_A_STREAM,), SHORT, "/complete"),
    SetUp("direct, cut", (Kind.CUT, WELL), SHORT | {"truncate_after": 40}, "/stream"),
    SetUp("direct, failing", (Kind.FAILED, WELL), SHORT | {"fail_after": 40}, "/stream"),
    SetUp("direct, refused", (Kind.REFUSED,), {"no_such_field": 1}, "/stream"),
    SetUp("proxy", (BUFFERED,), LONG, hop=(), evidence="blocks of 8 KiB"),
    SetUp("proxy, 4 KiB", (BUFFERED,), hop=("--block=4096",),
          evidence="blocks of 4 KiB"),
    SetUp("proxy, less than a block", (HELD,), SHORT, "/stream", hop=()),
    SetUp("proxy --honor", (WELL,), hop=("--honor",)),
    SetUp("proxy, 500 words a second", (WELL,), PROMPT | {"max_tokens": 300}, "/stream", "fast",
          ("--honor",)),
    SetUp("nginx", (WELL,), hop=hops.nginx()),
    SetUp("nginx, deaf", (BUFFERED,), hop=hops.nginx(*DEAF), evidence="blocks of 4 KiB"),
    SetUp("nginx, deaf, less than a block", (HELD,), SHORT, "/stream", hop=hops.nginx(*DEAF)),
    SetUp("nginx, unbuffered", (WELL,), hop=hops.nginx(*hops.UNBUFFERED, *DEAF)),
    SetUp("nginx, gzip", (COMPRESSED, WELL), hop=hops.nginx(*hops.HTTP_1_1, *hops.GZIP),
          options={"fields": GZIP}, evidence="gzip"),
    SetUp("nginx, gzip, deaf", (HELD, COMPRESSED), SHORT, "/stream",
          hop=hops.nginx(*hops.HTTP_1_1, *hops.GZIP, *DEAF), options={"fields": GZIP}),
    # The kernel holds what haproxy marks as not the last (MSG_MORE) for 200 ms.
    SetUp("haproxy", (BUFFERED,), hop=hops.haproxy()),
    SetUp("haproxy, no delay", (WELL,), hop=hops.haproxy("option http-no-delay")),
]  # fmt: skip


@asynccontextmanager
async def proxy(upstream, *flags):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SERVER.parent / "proxy.py"), "--port=0", "--upstream", upstream),
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.terminate()
        await process.communicate()


def reach(set_up, upstream):
    if isinstance(set_up.hop, hops.Hop):
        return hops.running(set_up.hop, upstream)
    return proxy(upstream, *set_up.hop)


@dataclass
class Asked:
    """The set-ups at their addresses, and the newest reply of each."""

    urls: dict = field(default_factory=dict)
    replies: dict = field(default_factory=dict)

    async def ask(self, set_up):
        options = {"mode": Mode.STREAM, "dialect": "auto", "timeout": 30} | set_up.options
        url = self.urls[set_up.name] + set_up.path
        self.replies[set_up.name] = await ask(url, set_up.body, Options(**options))

    def wrong(self):
        wrong = {}
        for set_up in SET_UPS:
            found = diagnose(self.replies[set_up.name])
            words = "\n".join(map(str, found))
            if tuple(f.kind for f in found) != set_up.expected or set_up.evidence not in words:
                wrong[set_up] = words
        return wrong


@asynccontextmanager
async def all_set_ups():
    async with AsyncExitStack() as stack:
        servers, asked = {}, Asked()
        for name, flags in SERVERS.items():
            servers[name] = (await stack.enter_async_context(started(*flags))).url
        for set_up in SET_UPS:
            url = servers[set_up.server]
            if set_up.hop is not None:
                url = await stack.enter_async_context(reach(set_up, url))
            asked.urls[set_up.name] = url
        yield asked


async def test_every_set_up_is_recognized():
    for program in ("nginx", "haproxy"):
        require_program(program)
    assert len(SET_UPS) >= 20
    async with all_set_ups() as asked:
        for i in range(2):  # all at once would wait for each other
            await asyncio.gather(*map(asked.ask, SET_UPS[i::2]))
        for _ in range(TRIES):
            for set_up in asked.wrong():
                await asked.ask(set_up)
    assert list(asked.wrong().values()) == []
    direct, through = (diagnose(asked.replies[name])[0].kind for name in ("direct", "nginx, deaf"))
    assert "between them buffers" in compare(through, direct)
    assert through in KEPT


HEAD = http1.encode_head(200, [("Content-Type", "text/event-stream")])
TEXT = b"".join(chat(content=word) for word in ["one", "two", "three", "four", "five", "six"])


@pytest.mark.parametrize(
    ("end", "expected"),
    [(FINISH, [Kind.NO_MARKER, Kind.SHORT]), (b"", [Kind.CUT, Kind.SHORT])],
    ids=["a finish reason", "no last word"],
)
async def test_a_stream_that_ends_without_a_marker(end, expected):
    async with scripted([HEAD, TEXT, end]) as server:
        reply = await ask(server.url(), {}, Options(mode=Mode.STREAM, dialect="auto"))
    assert [each.kind for each in diagnose(reply)] == expected
