"""The experiment with gateways in between: what each does to a stream.

    client.py -- direct, or through proxy.py, nginx, haproxy, caddy, apache, varnish -- server.py

It runs on the simulated engine, so what differs between two rows is what stands between client
and server. All paths of a round are asked at the same time, each a moment after the one before:
the words of two replies then come at different moments, and hardly wait for each other.

Not here: how a gateway is configured and started (`hops.py`). Read next: `leaving.py`.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import client
import diagnosis
import hops
import measures
from bench import REPLY_S, Bench, ExperimentError, experiment
from client import Options
from diagnosis import Kind
from figures import Histograms
from hops import Hop, HopError, NotInstalled
from measures import Reply
from report import Finding, seconds
from workload import median

Fields = tuple[tuple[str, str], ...]

DELAY_MS, JITTER_MS = 20, 8
SHORT, LONG = 100, 400  # words: 2.5 KB of events, less than any block; and 10 KB
ROUNDS = 2
IDLE_S = 1  # a gateway's patience with a silent upstream
SILENT_MS = 2000  # until the first word
HEARTBEATS = {"no heartbeats": 0, "heartbeats": 0.3}
AT_ONCE = "first text = total"  # published of a hop that buffers, for replies below its block
GZIP: Fields = (("Accept-Encoding", "gzip"),)
# What the client has to find in a short reply and in a long one.
WELL = Kind.WELL, Kind.WELL
IN_BLOCKS = Kind.HELD, Kind.BUFFERED
BUFFERED = Kind.BUFFERED, Kind.BUFFERED
HELD = Kind.HELD, Kind.HELD
COMPRESSED = Kind.COMPRESSED, Kind.COMPRESSED


@dataclass(frozen=True)
class Path:
    """A way to the server: direct, through a gateway, or through `proxy.py` with these flags."""

    name: str
    hop: Hop | tuple[str, ...] | None
    expected: tuple[Kind, ...] = WELL  # for each of `words`
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


def _nginx(
    name: str,
    *directives: str,
    expected: tuple[Kind, ...] = WELL,
    without: tuple[Kind, ...] = WELL,
    fields: Fields = (),
) -> list[Path]:
    """One configuration, for servers that send `X-Accel-Buffering: no` and for those that don't."""
    obeying, deaf = hops.nginx(*directives), hops.nginx(*directives, *hops.WITHOUT_FIELD)
    published = "" if hops.UNBUFFERED[0] in directives else AT_ONCE
    return [
        Path(f"nginx, {name}", obeying, expected, fields=fields),
        Path(f"nginx, {name}, without the field", deaf, without, published, fields),
    ]


def _silent(name: str, hop: Hop | tuple[str, ...]) -> list[Path]:
    """A gateway that gives up a silent upstream, before a server with heartbeats or without."""
    return [
        Path(
            f"{name} time-out {IDLE_S} s, {words}",
            hop,
            (Kind.LATE if heartbeat_s else Kind.CUT,),
            flags=(f"--first-delay-ms={SILENT_MS}", f"--heartbeat={heartbeat_s}"),
            words=(SHORT,),
        )
        for words, heartbeat_s in HEARTBEATS.items()
    ]


PATHS = [
    Path("direct", None),
    Path("proxy.py, blocks of 8 KiB", (), IN_BLOCKS, AT_ONCE),
    Path("proxy.py, blocks of 4 KiB", ("--block=4096",), IN_BLOCKS, AT_ONCE),
    Path("proxy.py --honor", ("--honor",)),
    *_nginx("as shipped (HTTP/1.0)", without=IN_BLOCKS),
    # Chunks that come over HTTP/1.1 are passed on one by one even where buffering is on.
    *_nginx("HTTP/1.1", *hops.HTTP_1_1),
    *_nginx("proxy_buffering off", *hops.UNBUFFERED),
    *_nginx(
        "HTTP/1.1, gzip",
        *hops.HTTP_1_1,
        *hops.GZIP,
        expected=COMPRESSED,
        without=HELD,
        fields=GZIP,
    ),
    Path("haproxy", hops.haproxy(), BUFFERED),
    Path("haproxy, http-no-delay", hops.haproxy("option http-no-delay")),
    Path("caddy", hops.caddy()),
    # It obeys `Cache-Control: no-transform`, which every stream of this server carries.
    Path("caddy, encode gzip", hops.caddy("encode gzip"), fields=GZIP),
    Path("apache", hops.apache()),
    Path("apache, deflate", hops.apache(*hops.DEFLATE), COMPRESSED, fields=GZIP),
    Path("varnish", hops.varnish(stream=True)),
    Path("varnish, do_stream off", hops.varnish(stream=False), HELD, AT_ONCE),
    *_silent("proxy.py", ("--honor", f"--timeout={IDLE_S}")),
    *_silent("nginx", hops.nginx(*hops.HTTP_1_1, f"proxy_read_timeout {IDLE_S}s;")),
    *_silent("haproxy", hops.haproxy("option http-no-delay", f"timeout server {IDLE_S}s")),
]

SHOWN = (  # in the figure
    *("direct", "proxy.py, blocks of 4 KiB", "proxy.py --honor", "nginx, as shipped (HTTP/1.0)"),
    *("nginx, as shipped (HTTP/1.0), without the field", "nginx, HTTP/1.1", "haproxy"),
    *("haproxy, http-no-delay", "caddy", "apache", "varnish"),
)


@dataclass
class Passed:
    """What came through one path: replies by their number of words, or why there are none."""

    path: Path
    url: str = ""
    absent: str = ""
    replies: dict[int, list[Reply]] = field(default_factory=dict)


@experiment("hops", waits=True)
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
            "the client's diagnosis",
            "published",
        ],
        [_row(passed) for passed in found],
        f"{ROUNDS} replies of each length a path, medians; gaps of all replies of {LONG} words",
        _notes(found),
        f"simulated, {DELAY_MS} +/- {JITTER_MS} ms a word",
        [Histograms("hops", "Gaps between two pieces, by path", _gaps_shown(found))],
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
    spread = measures.spread(_gaps(passed))
    short, long = (_first_and_total(passed.replies.get(words, [])) for words in (SHORT, LONG))
    ranks = [seconds(value) for value in (spread.p50, spread.p99, spread.max)]
    return [path.name, short, long, *ranks, _diagnosis(passed), path.published]


def _gaps(passed: Passed) -> list[float]:
    """Return the gaps of the long replies."""
    longest = passed.replies.get(max(passed.path.words), [])
    return [gap for reply in longest for gap in measures.gaps(reply.events)]


def _gaps_shown(found: Sequence[Passed]) -> dict[str, list[float]]:
    return {p.path.name: _gaps(p) for p in found if p.path.name in SHOWN and not p.absent}


def _first_and_total(replies: Sequence[Reply]) -> str:
    if not replies or any(reply.first_text is None for reply in replies):
        return "n/a"
    first = seconds(median([reply.first_text for reply in replies]))
    return f"{first}, {seconds(median([reply.last_text for reply in replies]))}"


def _diagnosis(passed: Passed) -> str:
    """What the client finds in the short replies, then in the long ones, if that differs."""
    said = [_found(replies) for replies in passed.replies.values()]
    return "; ".join(dict.fromkeys(said))


def _found(replies: Sequence[Reply]) -> str:
    counts = Counter(map(_words, replies)).most_common()
    if len(counts) == 1:
        return counts[0][0]
    return ", ".join(f"{words} ({count} of {len(replies)})" for words, count in counts)


def _words(reply: Reply) -> str:
    kinds = diagnosis.kinds(reply)
    block = diagnosis.block_size(diagnosis.burst_sizes(reply)) if Kind.BUFFERED in kinds else None
    return " + ".join(kinds) + (f", blocks of {block // 1024} KiB" if block else "")


def _right(passed: Passed) -> list[bool]:
    """Say of each reply whether the first finding is what the configuration does."""
    pairs = zip(passed.path.words, passed.path.expected, strict=True)
    return [
        diagnosis.kinds(reply)[0] is expected
        for words, expected in pairs
        for reply in passed.replies.get(words, [])
    ]


def _notes(found: Sequence[Passed]) -> list[str]:
    texts = {
        (words, reply.text)
        for passed in found
        for words, replies in passed.replies.items()
        for reply in replies
        if reply.complete
    }
    same = len(texts) == len({words for words, _ in texts})
    right = [_right(passed) for passed in found]
    wrong = [p.path.name for p, verdicts in zip(found, right, strict=True) if not all(verdicts)]
    return [
        f"The diagnosis is what the configuration does: in {sum(map(sum, right))} of"
        f" {sum(map(len, right))} replies{'; not: ' if wrong else ''}{'; '.join(wrong)}.",
        f"The same text by every path: {'yes' if same else 'no'}.",
        "Without the field: the gateway is told to ignore `X-Accel-Buffering: no`, as if the server"
        " did not send it.",
        "gzip, deflate: the client asks for it, which browsers always do.",
        f"Time-outs: the first word comes after {SILENT_MS / 1000:g} s; heartbeats are comments"
        f" each {HEARTBEATS['heartbeats']:g} s.",
        "Configurations: `hops.py`. Published: 4.91 / 4.91 s through a gateway that buffers, and"
        " 0.20 / 5.03 s where the field is obeyed.",
    ]
