"""What the flags say: the command line, read and sorted into what each part of the server takes.

    FLAGS ... --> parse_arguments --> make_options   Options: access, delivery, deadlines, limits
                                  --> make_engine    a model, another server, or words on a schedule
                                  --> make_tls       the certificate

A flag that can't be used is refused here, in words that name it, before anything is loaded. What a
default means stands with those who act on it (`Settings`, `Policy`, `http1.Limits`). `Served`
(`models.py`) is what the providers' dialects are told of all this: the model's names and settings.

Not here: the address to serve on, which is bound before the model is loaded (`server.py`).
Read next: `about.py`.
"""

import argparse
import os
import re
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import http1
import page
from access import Access
from delivery import SLOW_CLIENT, SSE_HEARTBEAT, Policy
from engine import MAX_WAITING, PREFILL_CHUNK, AnyEngine, Engine
from generation import SamplingParams
from models import DEFAULT, Served
from pieces import Banned
from simulated import FIELDS, SimulatedEngine
from upstream import TIMEOUT_S, UpstreamEngine
from watching import Settings


@dataclass(frozen=True)
class Options:
    """What the flags set."""

    model: str = "simulated"
    access: Access = field(default_factory=Access)
    policy: Policy = field(default_factory=Policy)
    settings: Settings = field(default_factory=Settings)
    max_connections: int = 1000
    aliases: tuple[str, ...] = ()
    heartbeat_events: bool = False
    pad: bool = False
    proxy: str | None = None  # the origin of one in front of this server, for the page

    def bound(self, host: str, port: int, tls: bool) -> "Options":
        """The same, with the page's own origins allowed: its lanes through a proxy name them."""
        origins = (*self.access.origins, *page.origins(host, port, tls))
        return replace(self, access=replace(self.access, origins=origins))

    def served(self, engine: AnyEngine) -> Served:
        """What the providers' dialects need to know."""
        simulated = isinstance(engine, SimulatedEngine)
        upstream = engine if isinstance(engine, UpstreamEngine) else None
        return Served(
            (upstream.model or DEFAULT) if upstream else self.model,
            self.aliases,
            engine.context,
            # Words on a schedule have no end of their own.
            default_tokens=SamplingParams().max_tokens if simulated else None,
            simulation_names=FIELDS if simulated else (),
            heartbeat_events=self.heartbeat_events,
            pad=self.pad,
            listed=(lambda: upstream.listed) if upstream else tuple,
        )


_LIMITS, _SETTINGS, _POLICY, _OPTIONS = http1.Limits(), Settings(), Policy(), Options()
_SCHEDULE = SimulatedEngine()

# Under each heading of `--help`: name, default (its type is the flag's), help.
FLAGS: dict[str, tuple[tuple[str, Any, str], ...]] = {
    "where": (
        ("--host", "127.0.0.1", "the address to serve on"),
        ("--port", 8765, "0 takes a free one and prints it"),
        ("--cert", "", "a PEM file: serve https and wss"),
        ("--key", "", "the certificate's private key, when in a file of its own"),
        ("--page-proxy", "", "a proxy in front, http://HOST:PORT, for the page to try"),
    ),
    "the model": (
        ("--model", "default", "a folder, a .gguf file, a hub id, or 'simulated'"),
        ("--device", "auto", "cuda, mps or cpu"),
        ("--dtype", "auto", "float32, bfloat16 or float16"),
        # These two are `lm.LanguageModel.load`'s: to ask it would be to import torch.
        ("--context", 2048, "tokens of prompt and reply together; 0: as many as the model takes"),
        ("--rows", 16, "replies that are generated at the same time"),
        ("--kv-memory", 0.0, "MiB of cache; rows that do not fit are left out; 0: no bound"),
        ("--prefill-chunk", PREFILL_CHUNK, "tokens of a prompt read between two decode passes"),
        ("--banned", "", "a file of phrases, one a line, that no reply may hold"),
    ),
    "the simulated model": (
        ("--seed", _SCHEDULE.seed, "of its schedule"),
        ("--delay-ms", _SCHEDULE.delay_ms, "from one word to the next"),
        ("--jitter-ms", _SCHEDULE.jitter_ms, "by how much that varies"),
        ("--first-delay-ms", _SCHEDULE.first_delay_ms, "before the first word"),
    ),
    "another server in place of a model": (
        ("--upstream", "", "the URL of an OpenAI-compatible server to relay to"),
        ("--upstream-key-env", "", "the environment variable that holds its API key"),
        ("--upstream-model", "", "the model to ask for; else the first in its list"),
        ("--upstream-timeout", TIMEOUT_S, "seconds without a byte from it before it is given up"),
    ),
    "silence, slow clients, lost clients": (
        ("--heartbeat", _SETTINGS.heartbeat_s, "seconds of silence before one is sent; 0: none"),
        ("--sse-heartbeat", "comment", "what is sent on event streams: comment, event or off"),
        ("--slow-client", _POLICY.slow_client, "one that falls behind: buffer, pause or drop"),
        ("--queued-bytes", _SETTINGS.queued_bytes, "bytes that may wait for one client"),
        ("--stall", _SETTINGS.stall_s, "seconds without progress before a client is dropped"),
        ("--grace", _POLICY.grace_s, "seconds that a resumable reply goes on with no client"),
        ("--keep", _POLICY.keep_s, "seconds that a resumable reply is kept after its end"),
    ),
    "limits": (
        ("--queue", MAX_WAITING, "requests that may wait for a row; then 429"),
        ("--connections", _OPTIONS.max_connections, "at the same time; then 503"),
        ("--target-bytes", _LIMITS.target_bytes, "the longest request target; then 414"),
        ("--head-bytes", _LIMITS.head_bytes, "the longest head; then 431"),
        ("--content-bytes", _LIMITS.content_bytes, "the longest content; then 413"),
        ("--head-time", _SETTINGS.head_s, "seconds for a request's head to arrive; then 408"),
        ("--content-time", _SETTINGS.content_s, "seconds for its content to arrive; then 408"),
        ("--idle-time", _SETTINGS.idle_s, "seconds between two requests of a connection"),
    ),
}
# name, metavar, help
REPEATED = (
    ("--cors", "ORIGIN", "let pages from this origin use the server"),
    ("--api-key", "KEY", "ask for a key: this one"),
    ("--alias", "NAME", "take this as a name of the model on the providers' routes"),
)
# name, help
SWITCHES = (
    ("--deterministic", "the same text whatever else is running"),
    ("--naive", "do not notice that a client left, to see what that costs"),
    ("--no-reuse", "read every prompt anew, also what the cache still holds of it"),
    ("--pad", "hide the length of pieces on the providers' routes"),
    ("--no-stand-in", 'refuse "model": "simulated" in a request'),
)


def count(text: str) -> int:
    """A flag's whole number."""
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def amount(text: str) -> float:
    """A flag's number of seconds or milliseconds."""
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]*)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return float(text)


_KINDS: dict[type, Callable[[str], Any]] = {int: count, float: amount, str: str}
_METAVARS = {int: "N", float: "N", str: None}


def _argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="A streaming server for a language model.", usage="%(prog)s [FLAG ...]"
    )
    for heading, flags in FLAGS.items():
        add = parser.add_argument_group(heading).add_argument
        for name, default, text in flags:
            text += " (%(default)s)" if default != "" else ""
            kind = _KINDS[type(default)]
            add(name, type=kind, default=default, metavar=_METAVARS[type(default)], help=text)
    add = parser.add_argument_group("may be repeated").add_argument
    for name, metavar, text in REPEATED:
        text += "" if name == "--api-key" else "; * for any"
        add(name, action="append", default=[], metavar=metavar, help=text)
    add = parser.add_argument_group("switches").add_argument
    for name, text in SWITCHES:
        add(name, action="store_true", help=text)
    return parser


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = _argument_parser()
    args = parser.parse_args(arguments)
    if args.slow_client not in SLOW_CLIENT:
        parser.error(f"argument --slow-client: one of {', '.join(SLOW_CLIENT)}")
    if args.rows == 0:
        parser.error("argument --rows: at least 1")
    if args.sse_heartbeat not in SSE_HEARTBEAT:
        parser.error(f"argument --sse-heartbeat: one of {', '.join(SSE_HEARTBEAT)}")
    try:
        args.page_proxy = page.parse_proxy(args.page_proxy) if args.page_proxy else None
    except ValueError as error:
        parser.error(f"argument --page-proxy: {error}")
    try:
        if args.upstream:
            make_upstream(args)
    except ValueError as error:
        parser.error(f"argument --upstream: {error}")
    return args


def read_banned(path: str) -> Banned:
    """Read the phrases that no reply may hold. Raises OSError that names the file."""
    try:
        return Banned.read(path) if path else Banned(())
    except (OSError, UnicodeError) as error:
        raise OSError(f"--banned {path}: {error}") from error


def make_options(args: argparse.Namespace) -> Options:
    """Sort the flags into the options of `Server`."""
    limits = http1.Limits(
        target_bytes=args.target_bytes,
        head_bytes=args.head_bytes,
        content_bytes=args.content_bytes,
    )
    settings = Settings(
        head_s=args.head_time,
        content_s=args.content_time,
        idle_s=args.idle_time,
        stall_s=args.stall,
        heartbeat_s=args.heartbeat,
        queued_bytes=args.queued_bytes,
        naive=args.naive,
        limits=limits,
    )
    policy = Policy(
        slow_client=args.slow_client,
        banned=read_banned(args.banned),
        keep_s=args.keep,
        grace_s=args.grace,
        request_s=args.content_time,
        heartbeats=args.sse_heartbeat != "off",
        stand_in=not args.no_stand_in,
    )
    access = Access(tuple(args.cors), tuple(args.api_key))
    return Options(
        model=args.model,
        access=access,
        policy=policy,
        settings=settings,
        max_connections=args.connections,
        aliases=tuple(args.alias),
        heartbeat_events=args.sse_heartbeat == "event",
        pad=args.pad,
        proxy=args.page_proxy,
    )


def make_upstream(args: argparse.Namespace) -> UpstreamEngine:
    """Set up the relay to another server. ValueError when a flag can't be used."""
    key = None
    if args.upstream_key_env and not (key := os.environ.get(args.upstream_key_env)):
        raise ValueError(f"the environment variable {args.upstream_key_env} is not set")
    return UpstreamEngine(
        args.upstream,
        key,
        model=args.upstream_model or None,
        timeout_s=args.upstream_timeout,
        max_waiting=args.rows + args.queue,
    )


def make_engine(args: argparse.Namespace) -> AnyEngine:
    """Load the model, or set up a stand-in: another server, or words on a schedule."""
    if args.upstream:
        return make_upstream(args)
    if args.model == "simulated":
        return SimulatedEngine(
            args.seed,
            delay_ms=args.delay_ms,
            jitter_ms=args.jitter_ms,
            first_delay_ms=args.first_delay_ms,
        )
    try:
        import lm  # torch and transformers take a second; the simulated model has no need of them
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: pip install -r requirements.txt, or --model simulated")

    model = lm.LanguageModel.load(
        args.model,
        device=args.device,
        dtype=args.dtype,
        rows=args.rows,
        context=args.context,
        kv_memory=int(args.kv_memory * 2**20) or None,
    )
    model.fixed = args.deterministic
    row_mib = model.context * model.bytes_per_token / 2**20
    print(
        f"{model.name}: {model.dtype} on {model.device}; {model.rows} rows of {model.context}"
        f" tokens, {model.bytes_per_token:,} bytes a token, {row_mib:.0f} MiB a row",
        file=sys.stderr,
    )
    return Engine(
        model,
        prefill_chunk=args.prefill_chunk,
        max_waiting=args.queue,
        reuse=not args.no_reuse,
    )


def make_tls(args: argparse.Namespace) -> ssl.SSLContext | None:
    """Read the certificate, if one is given. Raises OSError that names it."""
    if not args.cert:
        return None
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        tls.load_cert_chain(args.cert, args.key or None)
    except OSError as error:
        raise OSError(f"--cert {args.cert}, --key {args.key or args.cert}: {error}") from error
    return tls
