"""The experiment with gateways in between: what each does to a stream.

    client.py -- direct, or through proxy.py, nginx, haproxy, caddy, apache, varnish -- server.py

It runs on the simulated engine, so what differs between two rows is what stands between client
and server. All paths of a round are asked at the same time, each a moment after the one before:
the words of two replies then come at different moments, and hardly wait for each other.

Not here: how a gateway is configured and started (`hops.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import client
import hops
import measures
from bench import REPLY_S, Bench, ExperimentError, experiment
from client import Options
from hops import Hop, HopError, NotInstalled
from measures import Reply
from report import Finding, seconds
from workload import median

Fields = tuple[tuple[str, str], ...]

DELAY_MS, JITTER_MS = 20, 8
SHORT, LONG = 100, 400  # words: 2.5 KB of events, less than any block; and 10 KB
ROUNDS = 3
IDLE_S = 1  # a gateway's patience with a silent upstream
SILENT_MS = 2000  # until the first word
HEARTBEATS = {"no heartbeats": 0, "heartbeats": 0.3}
AT_ONCE = "first text = total"  # published of a hop that buffers, for replies below its block
GZIP: Fields = (("Accept-Encoding", "gzip"),)


@dataclass(frozen=True)
class Path:
    """A way to the server: direct, through a gateway, or through `proxy.py` with these flags."""

    name: str
    hop: Hop | tuple[str, ...] | None
    published: str = ""
    fields: Fields = ()  # of the request
    flags: tuple[str, ...] = ()  # of the server
    words: tuple[int, ...] = (SHORT, LONG)

    @asynccontextmanager
    async def open(self, bench: Bench) -> AsyncIterator[str]:
        """Give the URL to ask while the block lasts. Raises HopError."""
        schedule = f"--delay-ms={DELAY_MS}", f"--jitter-ms={JITTER_MS}"
        url = await bench.server("--model=simulated", *schedule, *self.flags)
        if isinstance(self.hop, Hop):
            async with hops.running(self.hop, url) as hop_url:
                yield hop_url
        else:
            yield url if self.hop is None else await bench.proxy(url, *self.hop)


def _nginx(name: str, *directives: str, without: str = AT_ONCE, fields: Fields = ()) -> list[Path]:
    """One configuration, for servers that send `X-Accel-Buffering: no` and for those that don't."""
    obeying, deaf = hops.nginx(*directives), hops.nginx(*directives, *hops.WITHOUT_FIELD)
    return [
        Path(f"nginx, {name}", obeying, fields=fields),
        Path(f"nginx, {name}, without the field", deaf, without, fields),
    ]


def _silent(name: str, hop: Hop | tuple[str, ...]) -> list[Path]:
    """A gateway that gives up a silent upstream, before a server with heartbeats or without."""
    return [
        Path(
            f"{name} time-out {IDLE_S} s, {words}",
            hop,
            flags=(f"--first-delay-ms={SILENT_MS}", f"--heartbeat={heartbeat_s}"),
            words=(SHORT,),
        )
        for words, heartbeat_s in HEARTBEATS.items()
    ]


PATHS = [
    Path("direct", None),
    Path("proxy.py, blocks of 8 KiB", (), AT_ONCE),
    Path("proxy.py, blocks of 4 KiB", ("--block=4096",), AT_ONCE),
    Path("proxy.py --honor", ("--honor",)),
    *_nginx("as shipped (HTTP/1.0)"),
    *_nginx("HTTP/1.1", *hops.HTTP_1_1),
    *_nginx("proxy_buffering off", *hops.UNBUFFERED, without=""),
    *_nginx("HTTP/1.1, gzip", *hops.HTTP_1_1, *hops.GZIP, fields=GZIP),
    Path("haproxy", hops.haproxy()),
    Path("haproxy, http-no-delay", hops.haproxy("option http-no-delay")),
    Path("caddy", hops.caddy()),
    Path("caddy, encode gzip", hops.caddy("encode gzip"), fields=GZIP),
    Path("apache", hops.apache()),
    Path("apache, deflate", hops.apache(*hops.DEFLATE), fields=GZIP),
    Path("varnish", hops.varnish(stream=True)),
    Path("varnish, do_stream off", hops.varnish(stream=False), AT_ONCE),
    *_silent("proxy.py", ("--honor", f"--timeout={IDLE_S}")),
    *_silent("nginx", hops.nginx(*hops.HTTP_1_1, f"proxy_read_timeout {IDLE_S}s;")),
    *_silent("haproxy", hops.haproxy("option http-no-delay", f"timeout server {IDLE_S}s")),
]


@dataclass
class Passed:
    """What came through one path: replies by their number of words, or why there are none."""

    path: Path
    url: str = ""
    absent: str = ""
    replies: dict[int, list[Reply]] = field(default_factory=dict)


@experiment("hops")
async def through_hops(bench: Bench) -> Finding:
    """One stream through each gateway: when its first text comes, and how even the rest is."""
    bench.expect(ROUNDS * sum(len(path.words) for path in PATHS), "hops")
    async with AsyncExitStack() as stack:
        # One after the other: varnish compiles, and servers are shared.
        found = [await _open(stack, bench, path) for path in PATHS]
        for _ in range(ROUNDS):
            await asyncio.gather(*(_ask(bench, passed, at) for at, passed in enumerate(found)))
    return Finding(
        [
            "path",
            f"{SHORT} words: first text, total",
            f"{LONG} words: first text, total",
            "gaps p50",
            "p99",
            "max",
            "the client",
            "published",
        ],
        [_row(passed) for passed in found],
        f"{ROUNDS} replies of each length a path, medians; gaps of all replies of {LONG} words",
        _notes(found),
        f"simulated, {DELAY_MS} +/- {JITTER_MS} ms a word",
    )


async def _open(stack: AsyncExitStack, bench: Bench, path: Path) -> Passed:
    try:
        return Passed(path, await stack.enter_async_context(path.open(bench)))
    except NotInstalled as error:
        return Passed(path, absent=str(error))
    except HopError as error:
        raise ExperimentError(f"{path.name}: {error}") from error


async def _ask(bench: Bench, passed: Passed, at: int) -> None:
    """Ask for one reply of each length; the same words by every path."""
    await asyncio.sleep(at * DELAY_MS / 1000 / len(PATHS))
    for words in passed.path.words:
        if passed.url:
            body = {"prompt": "The old lighthouse stood", "max_tokens": words, "seed": 1}
            options = Options(timeout=REPLY_S, fields=passed.path.fields)
            reply = await client.ask(f"{passed.url}/stream", body, options)
            passed.replies.setdefault(words, []).append(reply)
        bench.step()


def _row(passed: Passed) -> list[str]:
    path = passed.path
    if passed.absent:
        return [path.name, *["n/a"] * 5, passed.absent, path.published]
    longest = passed.replies[max(path.words)]
    spread = measures.spread(gap for reply in longest for gap in measures.gaps(reply.events))
    short, long = (_first_and_total(passed.replies.get(words, [])) for words in (SHORT, LONG))
    ranks = [seconds(value) for value in (spread.p50, spread.p99, spread.max)]
    return [path.name, short, long, *ranks, _verdict(longest), path.published]


def _first_and_total(replies: Sequence[Reply]) -> str:
    if not replies or any(reply.first_text is None for reply in replies):
        return "n/a"
    first = seconds(median([reply.first_text for reply in replies]))
    return f"{first}, {seconds(median([reply.last_text for reply in replies]))}"


def _verdict(replies: Sequence[Reply]) -> str:
    """What the client says of these replies, each thing once."""
    return "; ".join(dict.fromkeys(map(_words, replies)))


def _words(reply: Reply) -> str:
    if reply.failure is None:
        return "complete"
    return f"{reply.failure}"


def _notes(found: Sequence[Passed]) -> list[str]:
    texts = {
        (words, reply.text)
        for passed in found
        for words, replies in passed.replies.items()
        for reply in replies
        if reply.complete
    }
    same = len(texts) == len({words for words, _ in texts})
    return [
        f"The same text by every path: {'yes' if same else 'no'}.",
        "Without the field: the gateway is told to ignore `X-Accel-Buffering: no`, as if the server"
        " did not send it.",
        "gzip, deflate: the client asks for it, which browsers always do.",
        f"Time-outs: the first word comes after {SILENT_MS / 1000:g} s; heartbeats are comments"
        f" each {HEARTBEATS['heartbeats']:g} s.",
        "Configurations: `hops.py`. Published: 4.91 / 4.91 s through a gateway that buffers, and"
        " 0.20 / 5.03 s where the field is obeyed.",
    ]
