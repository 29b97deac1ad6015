"""One request to another HTTP server, over a connection of its own.

    async with outbound.exchange("POST", "/completions", content) as (head, answer):
        while (data := await answer.part()) is not None: ...

The connection is opened with the block and closed with it, whatever the reason to leave: an error,
the end, or a task that was cancelled. Closing is what tells the other server that nobody waits, so
a connection is never shared or kept. What is read is bounded, and so is each wait.

Over asyncio streams, which stop reading from the socket while 128 KiB wait for us.

Not here: redirects, content codings (identity is asked for), what the answer means (`upstream.py`).
Read next: `upstream.py`.
"""

import asyncio
import contextlib
import json
import re
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import http1

READ_BYTES = 64 * 1024
# For a TCP connection and a TLS handshake: a host that is there answers in a round trip or two.
CONNECT_S = 10.0
# No model writes as much in one reply; a broken server may.
LIMITS = http1.Limits(head_bytes=64 * 1024, content_bytes=64 * 1024 * 1024)


@dataclass(frozen=True, slots=True)
class Address:
    """Where the other server is; `base` is the path that ends in /v1."""

    tls: bool
    host: str
    port: int
    authority: str
    base: str

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Take a URL apart, with or without /v1 at its end. ValueError says what is wrong."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http or https URL: {url!r}")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("the upstream URL has a scheme, a host, a port and a path, no more")
        path = parts.path.rstrip("/").removesuffix("/v1")
        if not re.fullmatch(r"[!-~]*", path):
            raise ValueError("the upstream URL's path must be ASCII")
        host = parts.hostname.encode("idna").decode("ascii")
        name = f"[{host}]" if ":" in host else host
        tls = parts.scheme == "https"
        authority = name if parts.port is None else f"{name}:{parts.port}"
        return cls(tls, host, parts.port or (443 if tls else 80), authority, f"{path}/v1")

    def __str__(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.authority}{self.base}"


class Outbound:
    """Requests to the server at `url`.

    `key` goes into `Authorization` and nowhere else; `timeout_s` bounds each wait for a read.
    ValueError when the URL or the key can't be used.
    """

    def __init__(
        self, url: str, key: str | None, timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        self.address = Address.parse(url)
        if key is not None and not re.fullmatch(r"[!-~]+", key):
            raise ValueError("the upstream key must be visible ASCII characters")
        self._key = key
        self._timeout_s = timeout_s
        self._tls = (tls or ssl.create_default_context()) if self.address.tls else None

    @contextlib.asynccontextmanager
    async def exchange(
        self, method: str, path: str, content: bytes = b""
    ) -> AsyncIterator[tuple[http1.Response, "Answer"]]:
        """Send one request and read the head of its answer; the connection ends with the block.

        Raises TimeoutError, OSError, `http1.ProtocolError`.
        """
        reader, writer = await self._connect()
        try:
            writer.write(self._encode(method, path, content))
            answer = Answer(reader, method, self._timeout_s)
            yield await answer.head(), answer
        finally:
            # Not close(): that would first wait for a server that does not take its request.
            writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = self.address
        async with asyncio.timeout(min(CONNECT_S, self._timeout_s)):
            return await asyncio.open_connection(address.host, address.port, ssl=self._tls)

    def _encode(self, method: str, path: str, content: bytes) -> bytes:
        fields = [
            ("Host", self.address.authority),
            ("Accept", "text/event-stream, application/json"),
            # A compressed stream waits in the compressor's window.
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        if content:
            fields.append(("Content-Type", "application/json"))
        if self._key is not None:
            fields.append(("Authorization", f"Bearer {self._key}"))
        return http1.encode_request(method, self.address.base + path, fields, content)


class Answer:
    """The upstream server's answer to one request, as it comes.

    Each read may take `patience_s`. Raises TimeoutError, OSError, `http1.ProtocolError`.
    """

    def __init__(self, reader: asyncio.StreamReader, method: str, patience_s: float) -> None:
        self.patience_s = patience_s
        self._reader = reader
        self._parser = http1.ResponseParser(LIMITS)
        self._parser.expect(method)

    async def head(self) -> http1.Response:
        """The head of the final response."""
        while True:
            event = await self._next()
            if isinstance(event, http1.Response) and (not event.interim or event.status == 101):
                return event

    async def part(self) -> bytes | None:
        """What comes next of the content, in the read that brings it; None at its end."""
        event = await self._next()
        return event.data if isinstance(event, http1.Content) else None

    async def json(self) -> Any:
        """The whole content, parsed; None if it is no JSON."""
        parts = []
        while (part := await self.part()) is not None:
            parts.append(part)
        return parse_json(b"".join(parts))

    async def _next(self) -> http1.Response | http1.Content | http1.End:
        while (event := self._parser.next_event()) is None:
            async with asyncio.timeout(self.patience_s):
                data = await self._reader.read(READ_BYTES)
            if data:
                self._parser.feed(data)
            else:
                self._parser.feed_eof()
        return event


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; None for what is none (or nested without end)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
