"""The measuring client: ask a server, print the reply as it comes, say what took how long.

    python client.py "Name three colours."                      # streamed
    python client.py --route ws --max-tokens 20 "Hello"         # over a WebSocket
    python client.py --url http://127.0.0.1:8765/complete "Hi"  # any URL; its path wins

The text goes to stdout and nothing else does; the measures go to stderr. As a module: `ask` for one
reply, a `Session` for several over one connection. Both stand on the parsers of this project and
the standard library alone, so nothing hides what is measured. Connecting (the name, TCP, TLS) comes
before the clock of `exchange.py` starts, and is given apart.

Not here: what is measured (`measures.py`), and how a reply is read (`exchange.py`): the two files
to read before this one. Read next: `proxy.py`, which spoils the measures on purpose.
"""

import argparse
import asyncio
import io
import os
import ssl
import sys
import time
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import urlsplit

import http1
import measures
import sse
import websocket
from exchange import DialectError, Exchange, Options, Target
from measures import Failure, Mode, Reply
from wire import Failed, Wire, os_words

__all__ = ["Failure", "Mode", "Options", "Reply", "Session", "ask"]

DEFAULT_URL = "http://127.0.0.1:8765"
DEFAULT_OPTIONS = Options()


class Session:
    """One connection, kept alive for requests one after another to one origin.

    When the server has closed it, the next request opens another; nothing is sent twice.
    """

    def __init__(self, *, insecure: bool = False) -> None:
        self._insecure = insecure  # accept any certificate
        self._origin: tuple[str, int, bool] | None = None
        self._wire: Wire | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def ask(
        self, url: str, body: Mapping[str, Any], options: Options = DEFAULT_OPTIONS
    ) -> Reply:
        """Send one request and return its reply, complete or failed.

        `body` is the request's JSON object (`{"prompt": ..., "max_tokens": ...}`). A peer's faults
        are in the `Reply`; ValueError is for ours, raised before anything is sent.
        """
        target = Target.parse(url)
        reply = Reply(url, options.mode or target.mode)
        exchange = Exchange(target, body, options, reply)
        origin = target.host, target.port, target.tls
        if self._origin not in (None, origin):
            raise ValueError("a session is for one origin")
        self._origin = origin
        persists = False
        try:
            async with asyncio.timeout(options.timeout):
                wire = await self._connect(target, reply)
                persists = await exchange.run(wire)
        except TimeoutError:
            reply.fail(Failure.TIMEOUT, f"not complete after {options.timeout:g} s")
        except _EXPECTED as exc:
            reply.fail(*_explain(exc))
        finally:
            if not persists:
                await self.close()
        return reply

    async def _connect(self, target: Target, reply: Reply) -> Wire:
        await asyncio.sleep(0)  # let an end-of-file that waits in the kernel be seen
        if self._wire is not None and self._wire.idle:
            return self._wire
        await self.close()
        context = _tls_context(self._insecure) if target.tls else None
        loop = asyncio.get_running_loop()
        before = time.perf_counter()
        where = f"{target.host}:{target.port}"
        try:
            _, self._wire = await loop.create_connection(
                self.protocol, target.host, target.port, ssl=context
            )
        except ssl.SSLError as exc:
            raise Failed(Failure.TLS, f"{where}: {os_words(exc)}") from None
        except OSError as exc:
            raise Failed(Failure.CONNECT, f"{where}: {os_words(exc)}") from None
        reply.connect = time.perf_counter() - before
        return self._wire

    def protocol(self) -> Wire:
        """Return what is to handle a new connection."""
        return Wire()

    async def close(self) -> None:
        """Close the connection; the session can be used again."""
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()


async def ask(
    url: str, body: Mapping[str, Any], options: Options = DEFAULT_OPTIONS, *, insecure: bool = False
) -> Reply:
    """Send one request over a connection of its own: see `Session.ask`."""
    async with Session(insecure=insecure) as session:
        return await session.ask(url, body, options)


_EXPECTED = (
    Failed,
    http1.ProtocolError,
    websocket.ProtocolError,
    sse.EventTooLong,
    DialectError,
)


def _explain(exc: Exception) -> tuple[Failure, str]:
    match exc:
        case Failed():
            return exc.failure, str(exc)
        case http1.Truncated():
            return Failure.TRUNCATED, str(exc)
        case _:
            return Failure.PROTOCOL, str(exc)


def _tls_context(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


# The command


def main(arguments: list[str] | None = None) -> int:
    """Ask, print the text as it comes to stdout, then the measures to stderr.

    Returns 0 for a complete reply, 1 for a failed one, 130 after Ctrl-C; 2 is argparse's.
    """
    parser = _argument_parser()
    args = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a console that is not UTF-8 gets escapes
            stream.reconfigure(errors="backslashreplace")
    try:
        url, body, options = _request(args)
        reply = asyncio.run(ask(url, body, options, insecure=args.insecure))
        print(end="\n" if reply.pieces else "", flush=True)
    except ValueError as exc:
        parser.error(str(exc))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough; keep the exit from writing again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if reply.failure in (Failure.CONNECT, Failure.TLS):  # there is nothing to measure
        print(f"client.py: {reply.failure}: {reply.error}", file=sys.stderr)
    else:
        print(measures.table(reply), file=sys.stderr)
    return 0 if reply.complete else 1


def _request(args: argparse.Namespace) -> tuple[str, dict[str, Any], Options]:
    """Return what the arguments ask for; ValueError where they contradict each other."""
    url, route = args.url, args.route
    parts = urlsplit(url)
    if parts.path in ("", "/"):
        path = route or ("ws" if parts.scheme in ("ws", "wss") else "stream")
        url = parts._replace(path=f"/{path}").geturl()
    mode = _MODES[route] if route else Target.parse(url).mode
    body = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    body |= {name: value for name, value in (("stop", args.stop), ("events", args.events)) if value}
    body["prompt"] = args.prompt
    if mode is Mode.SSE:
        body["usage"] = True
    fields = []
    for line in args.field:
        name, colon, value = line.partition(":")
        if not colon:
            raise ValueError(f"a field is 'Name: value', not {line!r}")
        fields.append((name, value.strip()))
    options = Options(
        mode=mode,
        method="GET" if args.get else "POST",
        http_version=args.http,
        fields=tuple(fields),
        timeout=args.timeout,
        on_piece=lambda piece: print(piece, end="", flush=True),
        leave_after=args.leave_after,
        leave_at=args.leave_at,
        leave=args.leave,
        stop_after=args.stop_after,
    )
    return url, body, options


_MODES = {"stream": Mode.SSE, "complete": Mode.JSON, "ws": Mode.WEBSOCKET}
_SAMPLING = {
    "max_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "repetition_penalty": float,
    "seed": int,
}


def _argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Ask, print the reply as it comes, measure it.")
    add = parser.add_argument
    add("prompt")
    add("--url", default=DEFAULT_URL, help="of the server, or of a route (default %(default)s)")
    add("--route", choices=tuple(_MODES), help="what to ask for (default: by the URL, or stream)")
    for name, kind in _SAMPLING.items():
        add("--" + name.replace("_", "-"), type=kind, metavar="N")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add("--events", choices=("plain", "named"))
    add("--get", action="store_true", help="send the parameters in the query of a GET")
    add("--http", choices=("1.1", "1.0"), default="1.1", help="1.0: for a close-delimited reply")
    add("--field", action="append", default=[], metavar="NAME:VALUE", help="may be repeated")
    add("--timeout", type=float, default=600.0, metavar="S")
    add("--leave-after", type=int, metavar="N", help="leave after N pieces")
    add("--leave-at", type=float, metavar="S", help="leave after S seconds")
    add("--leave", choices=("close", "reset", "half-close"), default="close", help="how to leave")
    add("--stop-after", type=int, metavar="N", help="say stop on a WebSocket after N pieces")
    add("--insecure", action="store_true", help="accept any certificate")
    return parser


if __name__ == "__main__":
    sys.exit(main())
