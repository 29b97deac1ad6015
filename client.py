"""The measuring client: ask any streaming endpoint, see the text come, learn what took how long.

    python client.py http://127.0.0.1:8765 "Name three colours."
    python client.py https://host/v1/chat/completions "Hi" --model NAME --key-env API_KEY
    python client.py https://host/stream --data @request.json -n 20 --concurrency 4
    python client.py https://public.example/stream "Hi" --against http://127.0.0.1:8000/stream

Of one reply the text goes to stdout as it comes and nothing else does; its measures, and why it
came as it came, go to stderr. Of several there is a table of percentiles. Everything stands on the
parsers of this project and the standard library alone, so nothing hides what is measured.

As a module: `ask` for one reply, a `Session` for several over one connection (`asking.py`).

Not here: what is measured (`measures.py`), how a reply is read (`roundtrip.py`), what it shows
(`diagnosis.py`). Read next: `forwarding.py`, for the gateway that spoils the measures on purpose.
"""

import argparse
import asyncio
import gc
import io
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

import diagnosis
import plans
import tally
from asking import DEFAULT_OPTIONS, Session, ask
from measures import Failure, Mode, Reply
from readings import DIALECTS
from tally import Tally
from target import Options, Target

__all__ = ["DEFAULT_OPTIONS", "Failure", "Mode", "Options", "Reply", "Session", "Target", "ask"]

DEFAULT_URL = "http://127.0.0.1:8765"
DEFAULT_PROMPT = "The old lighthouse stood"
ADDRESS = re.compile(r"\S+://\S*|[\w.-]+:[0-9]+(/\S*)?|[\w-]+(\.[\w-]+)+(/\S*)?")
SCHEMES = ("http://", "https://", "ws://", "wss://")

# The exit code, beside argparse's 2 for bad usage.
COMPLETE, FAILED, BUFFERED, INTERRUPTED = 0, 1, 3, 130


def main(arguments: list[str] | None = None) -> int:
    """Ask as the arguments say, print, and return the exit code (see `--help`)."""
    parser = _argument_parser()
    args = parser.parse_intermixed_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a console that is not UTF-8 gets escapes
            stream.reconfigure(errors="backslashreplace")
    try:
        plan = _plan(args)
        with _opened(args.timeline) as timeline:
            printer = Printer(plan, as_json=args.json, timeline=timeline)
            return printer.run()
    except ValueError as exc:
        parser.error(str(exc))
    except KeyboardInterrupt:  # before anything was asked, or while it was printed
        return INTERRUPTED
    except BrokenPipeError:  # `| head` has seen enough
        _write_no_more()
        return FAILED
    except OSError as exc:  # such as a full disk
        _write_no_more()
        print(f"client.py: cannot write: {exc.strerror}", file=sys.stderr)
        return FAILED


def _write_no_more() -> None:
    """Keep the exit from writing to stdout again what could not be written."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Printer:
    """Carries out a plan and prints what came of it: one reply in full, or many as a table."""

    def __init__(self, plan: plans.Plan, *, as_json: bool, timeline: TextIO | None) -> None:
        self._plan = plan
        self._as_json = as_json
        self._timeline = timeline
        self._tallies = [Tally(url) for url in plan.urls]
        self._alone = plan.n == 1 and len(plan.urls) == 1
        self._newest: Reply | None = None
        self._replies = 0

    def run(self) -> int:
        """Return the exit code. After Ctrl-C, print what there is."""
        interrupted = False
        began = time.perf_counter()
        gc.disable()  # a collection stops all for milliseconds, and dates would be late by them
        try:
            asyncio.run(plans.run(self._plan, self._take))
        except KeyboardInterrupt:
            interrupted = True
        finally:
            gc.enable()
        duration = time.perf_counter() - began
        if self._as_json:
            print(json.dumps(self._record(duration), indent=2))
        elif self._alone:
            self._print_reply()
        else:
            self._print_tallies(duration)
        return INTERRUPTED if interrupted else self._exit_code()

    def _take(self, which: int, reply: Reply) -> None:
        self._newest = reply
        self._tallies[which].add(reply)
        if self._timeline is not None:
            for event in reply.events:
                line = {"reply": self._replies, "url": reply.url, "at_s": event.at}
                line |= {"bytes": event.size, "text": event.text, "reasoning": event.reasoning}
                print(json.dumps(line), file=self._timeline)
        self._replies += 1

    def _exit_code(self) -> int:
        if any(t.complete < t.n for t in self._tallies):
            return FAILED
        kept = any(t.verdict in diagnosis.KEPT for t in self._tallies)
        return BUFFERED if kept else COMPLETE

    def _print_reply(self) -> None:
        reply = self._newest
        if reply is None:
            return
        print(end="\n" if reply.pieces else "", flush=True)
        if reply.failure in (Failure.CONNECT, Failure.TLS):  # there is nothing to measure
            print(f"client.py: {reply.failure}: {reply.error}", file=sys.stderr)
            return
        print(tally.reply_table(reply), file=sys.stderr)
        print(tally.diagnoses_words(diagnosis.diagnose(reply)), file=sys.stderr)

    def _print_tallies(self, duration: float) -> None:
        for found in self._tallies:
            print(tally.tally_table(found))
            print(f"{tally.verdict_words(found)}\n")
        print(f"{self._replies} replies in {duration:.1f} s")
        if words := self._compared():
            print(f"=> {words}")

    def _compared(self) -> str | None:
        verdicts = [t.verdict for t in self._tallies if t.verdict is not None]
        return diagnosis.compare(*verdicts) if len(verdicts) == 2 else None

    def _record(self, duration: float) -> dict[str, Any]:
        if self._alone and self._newest is not None:
            return tally.reply_record(self._newest)
        return {
            "duration_s": duration,
            "runs": [tally.tally_record(found) for found in self._tallies],
            "against": self._compared(),
        }


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO | None]:
    """Open the timeline's file before anything is asked; ValueError where that can't be."""
    if path is None:
        yield None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as exc:
        raise ValueError(f"--timeline {path}: {exc.strerror}") from None
    with file:
        yield file


# What the arguments ask for


def _plan(args: argparse.Namespace) -> plans.Plan:
    """Return the plan; ValueError where arguments contradict each other."""
    url, prompt = DEFAULT_URL, args.prompt
    if args.url is not None and args.url.lower().startswith(SCHEMES):
        url = args.url
    elif args.url is not None and prompt is None and not ADDRESS.fullmatch(args.url):
        prompt = args.url  # the one argument is the prompt
    elif args.url is not None:
        raise ValueError(f"not an http, https, ws or wss URL: {args.url!r}")
    given = (url,) if args.against is None else (url, args.against)
    for each in given:
        Target.parse(each)
    urls = tuple(_with_route(u, args.route) for u in given)
    for flag, least in (("-n", 1), ("--warmup", 0), ("--concurrency", 1)):
        value = getattr(args, flag.strip("-"))
        if value is not None and value < least:
            raise ValueError(f"{flag} is at least {least}")
    if args.rate is not None and not 0 < args.rate < 1e6:
        raise ValueError("--rate is a positive number of requests a second")
    alone = args.n == 1 and len(urls) == 1
    data = None if args.data is None else _data(args.data)  # once: a pipe can't be read again
    bodies = tuple(
        _body(args, _prompt_body(args, u, prompt) if data is None else data) for u in urls
    )
    return plans.Plan(
        urls=urls,
        bodies=tuple(body or {} for body in bodies),
        options=tuple(
            _options(args, u, body, echo=alone and not args.json)
            for u, body in zip(urls, bodies, strict=True)
        ),
        n=args.n,
        warmup=args.warmup,
        concurrency=args.concurrency,
        rate=args.rate,
        keep_alive=args.keep_alive,
        insecure=args.insecure,
    )


def _with_route(url: str, route: str | None) -> str:
    """Return the URL of a route where only a server's is given."""
    parts = urlsplit(url)
    if parts.path not in ("", "/"):
        return url
    path = route or ("ws" if parts.scheme in ("ws", "wss") else "stream")
    return parts._replace(path=f"/{path}").geturl()


def _body(args: argparse.Namespace, body: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the request's members; None for a plain GET, where nothing is to be said."""
    members = {name: getattr(args, name) for name in SAMPLING}
    members |= {"stop": args.stop, "events": args.events, "model": args.model}
    given = {name: value for name, value in members.items() if value is not None}
    given |= dict(_member(text) for text in args.field)
    return {**(body or {}), **given} if body is not None or given else None


def _data(text: str) -> dict[str, Any]:
    """Return the object that `--data` holds or names: JSON, @FILE, or @- for stdin."""
    try:
        if text == "@-":
            text = sys.stdin.read()
        elif text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as exc:
        raise ValueError(f"--data: {exc}") from None
    if not isinstance(data, dict):
        raise ValueError("--data is a JSON object")
    return data


def _prompt_body(args: argparse.Namespace, url: str, prompt: str | None) -> dict[str, Any] | None:
    """Return a request for a reply to the prompt, as the route that the URL names takes it."""
    path = urlsplit(url).path.rstrip("/")
    known = args.url is None or path.endswith(PROVIDERS) or not urlsplit(args.url).path.strip("/")
    if prompt is None and not known:
        return None
    prompt = DEFAULT_PROMPT if prompt is None else prompt
    turns = {"messages": [{"role": "user", "content": prompt}]}
    if path.endswith("/chat/completions"):
        return {**turns, "stream": True, "stream_options": {"include_usage": True}}
    if path.endswith("/v1/messages"):
        return {**turns, "stream": True, "max_tokens": 256}
    if path.endswith("/responses"):
        return {"input": prompt, "stream": True}
    if path.endswith("/v1/completions"):
        return {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
    body: dict[str, Any] = turns if args.chat else {"prompt": prompt}
    return {**body, "usage": True} if path.endswith("/stream") else body


PROVIDERS = ("/chat/completions", "/v1/completions", "/v1/messages", "/responses")


def _member(text: str) -> tuple[str, Any]:
    """Return a member of the request: `max_tokens=20`, `stop=["x"]`, `model=name`."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--field is NAME=VALUE, not {text!r}")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def _options(
    args: argparse.Namespace, url: str, body: dict[str, Any] | None, *, echo: bool
) -> Options:
    fields = []
    for line in args.header:
        name, colon, value = line.partition(":")
        if not colon:
            raise ValueError(f"--header is 'NAME: VALUE', not {line!r}")
        fields.append((name, value.strip()))
    if args.key_env is not None:
        fields += _key_fields(args.key_env, url)
    mode = Target.parse(url).mode
    mode = ROUTES[args.route] if args.route else Mode.STREAM if mode is Mode.SSE else mode
    return Options(
        mode=Mode(args.mode) if args.mode else mode,
        dialect=args.dialect,
        method="GET" if args.get or body is None else "POST",
        http_version=args.http,
        fields=tuple(fields),
        compressed=args.compressed,
        timeout=args.timeout,
        on_piece=_show if echo else None,
        leave_after=args.leave_after,
        leave_at=args.leave_at,
        leave=args.leave,
        stop_after=args.stop_after,
    )


def _show(piece: str) -> None:
    """Print a piece at once; on a terminal without what could steer it."""
    shown = piece.translate(STEERING) if sys.stdout and sys.stdout.isatty() else piece
    print(shown, end="", flush=True)


# Control characters but tab and line feed: escape sequences begin with one (ECMA-48 section 5.3).
STEERING = {c: repr(chr(c))[1:-1] for c in (*range(32), *range(127, 160)) if c not in (9, 10)}


def _key_fields(name: str, url: str) -> list[tuple[str, str]]:
    """Return the key from the environment, as the provider wants it; it is printed nowhere."""
    key = os.environ.get(name)
    if not key:
        raise ValueError(f"--key-env: {name} is not set")
    if urlsplit(url).path.endswith("/v1/messages"):
        return [("x-api-key", key), ("anthropic-version", "2023-06-01")]
    return [("Authorization", f"Bearer {key}")]


ROUTES = {"stream": Mode.STREAM, "complete": Mode.JSON, "ws": Mode.WEBSOCKET}
SAMPLING = {
    "max_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "repetition_penalty": float,
    "seed": int,
}

EPILOG = """\
examples:
  python client.py http://127.0.0.1:8765 "Hello"       this project's server, streamed
  python client.py "Hello" --max-tokens 20              the same: its address is the default
  python client.py https://api.example/v1/chat/completions "Hello" --model NAME --key-env MY_KEY
  python client.py https://my.app/api/stream --data '{"question": "why?"}' -n 20 --concurrency 4
  python client.py https://my.app/api/stream --data @ask.json --against http://127.0.0.1:8000/api/stream
                                                        is it the app, or a hop before it?

what the diagnosis can say:
  streams well             text comes as it is written
  buffered by a hop        silence, then many events within milliseconds, again and again
  held until the end       the same, with all of the text in one burst
  head early, text late    queued, or a long prefill; then it streams
  heartbeats only          the connection lives, no text comes
  stalls                   long gaps in a stream that is quick otherwise
  slower than a reader     more than 180 ms a token
  compressed               by gzip or deflate (undone here), br or zstd (only reported)
  no end marker            it ended in order, but no [DONE] or its like said so
  cut                      the connection broke, or the message ended without any last word
  too short to tell        ask for a longer reply

exit code: 0 complete, 1 a reply failed, 2 bad usage, 3 complete but buffered, 130 after Ctrl-C.
Times start when the request is handed to the socket; connecting is given apart. Percentiles are
nearest-rank. Events are not tokens: tokens are counted by usage where the server tells it. The
error of the dates is how much later than the kernel had the bytes this program saw them (Linux).
"""


def _argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Ask a streaming endpoint, print the reply as it comes, say what took how long"
        " and why.",
        epilog=EPILOG,
        usage="%(prog)s [URL] [PROMPT] [FLAG ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_request(parser)
    _add_reading(parser)
    _add_plan(parser)
    return parser


def _add_request(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", nargs="?", metavar="URL", help=f"http, https, ws or wss (default {DEFAULT_URL})")
    add(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="what to ask; may stand alone. Without it and --data a URL without a path, and a"
        f" provider's route, are asked {DEFAULT_PROMPT!r}; any other is fetched with GET",
    )

    add = parser.add_argument_group("what to ask").add_argument
    add("--data", metavar="JSON", help="the request's object; @FILE reads it from a file")
    add(
        "--field",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a member of the request, such as max_tokens=20; may be repeated",
    )
    add("--model", metavar="NAME", help="the request's model")
    add("--chat", action="store_true", help="ask as a chat message, not as text to continue")
    for name, kind in SAMPLING.items():
        add("--" + name.replace("_", "-"), type=kind, metavar="N")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add("--route", choices=tuple(ROUTES), help="of this project's server, if URL names none")
    add("--events", choices=("plain", "named", "bare"), help="form of this server's events")

    add = parser.add_argument_group("how to ask").add_argument
    add(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="a field of the request's head; may be repeated",
    )
    add("--key-env", metavar="NAME", help="send the key in this environment variable")
    add("--get", action="store_true", help="send the members in the query of a GET")
    add("--http", choices=("1.1", "1.0"), default="1.1", help="1.0: for a close-delimited reply")
    add("--compressed", action="store_true", help="take gzip and deflate, as browsers do")
    add("--insecure", action="store_true", help="accept any certificate")
    add("--timeout", type=float, default=600.0, metavar="S", help="for a reply (%(default)g s)")


def _add_reading(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how to read the reply").add_argument
    add(
        "--mode",
        choices=[m for m in Mode if m is not Mode.STREAM],
        help="how it is delivered (default: as its content type says)",
    )
    add(
        "--dialect",
        choices=DIALECTS,
        default="auto",
        help="where an event has its text (default: as its shape says)",
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how often").add_argument
    add("-n", type=int, default=1, metavar="N", help="so many requests (%(default)s)")
    add("--concurrency", type=int, metavar="N", help="so many at once (1)")
    add("--warmup", type=int, default=0, metavar="N", help="so many before, not counted")
    add("--rate", type=float, metavar="R", help="start R a second, evenly, whatever is under way")
    add("--against", metavar="URL", help="ask this one in turn, too, and say which side buffers")
    add("--keep-alive", action="store_true", help="use a connection again where possible")

    add = parser.add_argument_group("what to print").add_argument
    add("--json", action="store_true", help="everything as JSON on stdout, in place of the text")
    add(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write each event there, a line of JSON: date, bytes, text",
    )

    add = parser.add_argument_group("leaving early, to see what the server does").add_argument
    add("--leave-after", type=int, metavar="N", help="leave after N pieces")
    add("--leave-at", type=float, metavar="S", help="leave after S seconds")
    add("--leave", choices=("close", "reset", "half-close"), default="close", help="how to leave")
    add("--stop-after", type=int, metavar="N", help="say stop on a WebSocket after N pieces")


if __name__ == "__main__":
    sys.exit(main())
