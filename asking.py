"""Asking: one request, or several over one connection, each answered with a `Reply`.

    reply = await ask("http://127.0.0.1:8765/stream", {"prompt": "Two"})
    async with Session() as session:          # one connection, kept alive
        reply = await session.ask(url, body, Options(timeout=10))

Connecting (the name, TCP, TLS) comes before the clock of `roundtrip.py` starts, and is given apart.
What a server does wrong is in the `Reply`: its failure, and what came before it.

Not here: how a reply is read (`roundtrip.py`, before this one). Read next: `diagnosis.py`.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import Any, Self

import http1
import sse
import websocket
from contents import ContentError
from measures import Failure, Reply
from readings import DialectError
from roundtrip import RoundTrip
from target import Options, Target
from wire import Failed, Wire, connect, os_words

DEFAULT_OPTIONS = Options()


class Session:
    """One connection, kept alive for requests one after another to one origin.

    When the server has closed it, the next request opens another; nothing is sent twice.
    """

    def __init__(self, *, insecure: bool = False) -> None:
        self._insecure = insecure  # accept any certificate
        self._origin: tuple[str, int, bool] | None = None
        self._wire: Wire | None = None
        self.reply: Reply | None = None  # the newest one, also while it comes

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
        reply = self.reply = Reply(url, options.mode or target.mode)
        round_trip = RoundTrip(target, body, options, reply)
        origin = target.host, target.port, target.tls
        if self._origin not in (None, origin):
            raise ValueError("a session is for one origin")
        self._origin = origin
        persists = False
        try:
            async with asyncio.timeout(options.timeout):
                wire = await self._connect(target, reply)
                persists = await round_trip.run(wire)
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
        before = time.perf_counter()
        where = f"{target.host}:{target.port}"
        try:
            self._wire = await connect(self.protocol, target.host, target.port, context)
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
    ContentError,
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
