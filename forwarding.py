"""What a gateway forwards: heads written anew for each side, and content framed and held.

Two messages make an exchange through a gateway, and each belongs to one side only. Fields that are
meant for one hop are dropped, Via and Date are added, and a target is given as an origin server
expects it. Content passes byte for byte, in a frame that the client understands:

    upstream's content     to an HTTP/1.1 client     to an HTTP/1.0 client
    Content-Length         Content-Length            Content-Length
    chunked                chunked                   to the end of the connection
    to the end             chunked                   to the end of the connection

`Downstream` holds the content until a block is full. The head is held too, until the first block
leaves: nginx's head goes out with its first buffer, and a user of a buffering gateway should see
the true time to first byte.

Something harmless can be written at any time, a *probe*, for a gateway that has to know whether
anybody reads: before the head an interim `102`; later what is held, early; with nothing held and
chunked coding, a zero before the next chunk's size (`chunk-size = 1*HEXDIG`).

Covered: RFC 9110 sections 7.6 (forwarding: Connection, Max-Forwards, Via), 7.8 (Upgrade), 15.2
(interim responses); RFC 9112 sections 3.2 (request targets), 6 and 7 (framing).

Not here: connections, and who left (`proxy.py`). Read next: `proxy.py`.
"""

import asyncio
import re
import time

import http1

# RFC 9110 section 7.6.1; and Content-Length, which is part of the framing of each side.
HOP_BY_HOP = (
    *("connection", "content-length", "keep-alive", "te", "trailer"),
    *("transfer-encoding", "upgrade"),
)

Pairs = list[tuple[str, str]]


class ClientGone(Exception):
    """Nobody reads the reply any more."""


# Fields and targets


def end_to_end(fields: http1.Fields, *also_not: str) -> Pairs:
    """Drop what is meant for one hop only: RFC 9110 section 7.6.1."""
    # Proxy-Status alone is meant for everybody: RFC 9209 section 2.
    to_proxy = [
        n for n, _ in fields if n.lower().startswith("proxy-") and n.lower() != "proxy-status"
    ]
    return list(fields.without(*HOP_BY_HOP, *fields.tokens("connection"), *to_proxy, *also_not))


def via(version: tuple[int, int]) -> tuple[str, str]:
    """Name the version that was received: RFC 9110 section 7.6.3."""
    return ("Via", f"{version[0]}.{version[1]} buffering-proxy")


def origin_form(request: http1.Request) -> str:
    """Give the target as an origin server expects it: RFC 9112 section 3.2."""
    target = re.sub(r"^[A-Za-z]+://[^/?]+", "", request.target)
    if target.startswith("/") or target == "*":
        return target
    # RFC 9112 section 3.2.4: OPTIONS for a whole server.
    return "*" if request.method == "OPTIONS" and not target else "/" + target


def hops_left(request: http1.Request) -> int | None:
    """Read Max-Forwards, which counts for OPTIONS and TRACE only: RFC 9110 section 7.6.2."""
    value = request.fields.get("max-forwards", "") or ""
    counts = request.method in ("OPTIONS", "TRACE") and re.fullmatch(r"[0-9]{1,9}", value)
    return int(value) if counts else None


def asks_websocket(request: http1.Request) -> bool:
    """Whether the request may become a tunnel; every other upgrade is declined."""
    return (
        request.method == "GET"
        and request.version >= (1, 1)
        and "upgrade" in request.fields.tokens("connection")
        and request.fields.tokens("upgrade") == ["websocket"]
    )


def request_head(request: http1.Request, upstream: tuple[str, int]) -> bytes:
    """Write the request's head for upstream."""
    # RFC 9112 section 3.2.2: the authority of an absolute target goes before Host.
    fields: Pairs = [("Host", request.host or authority(*upstream))]
    # RFC 9110 section 10.1.1: an expectation of HTTP/1.0 is ignored.
    ignored = () if request.version >= (1, 1) else ("expect",)
    fields += end_to_end(request.fields, "host", "max-forwards", *ignored)
    hops = hops_left(request)
    if hops is not None:
        fields.append(("Max-Forwards", str(hops - 1)))
    if "transfer-encoding" in request.fields:
        fields.append(("Transfer-Encoding", "chunked"))
    elif (length := request.fields.get("content-length")) is not None:
        fields.append(("Content-Length", length))
    if asks_websocket(request):
        fields += [("Connection", "Upgrade"), ("Upgrade", "websocket")]
    else:
        fields.append(("Connection", "close"))
    return http1.encode_request(
        request.method, origin_form(request), [*fields, via(request.version)]
    )


def content_length(response: http1.Response) -> str | None:
    """Give a length once, that was perhaps sent twice, or is wrong where it frames nothing."""
    lengths = set(response.fields.tokens("content-length"))
    length = lengths.pop() if len(lengths) == 1 else ""
    return length if re.fullmatch(r"[0-9]+", length) else None


def response_fields(response: http1.Response) -> Pairs:
    """Give the response's fields as they go to the client, without framing."""
    fields = end_to_end(response.fields)
    if response.status in (101, 426) and "websocket" in response.fields.tokens("upgrade"):
        fields += [("Connection", "Upgrade"), ("Upgrade", "websocket")]
    if not response.interim and "date" not in response.fields:
        fields.append(("Date", http1.format_date(time.time())))  # RFC 9110 section 6.6.1
    return [*fields, via(response.version)]


# The response to the client


class Downstream:
    """One response on its way to the client: framed for it, and held until a block is full.

        waiting --start--> head held --block full, end or probe--> sending --end--> ended

    Writing is immediate; `flush`, `end` and `cut` also wait for a slow client, so that nothing is
    read from upstream meanwhile.
    """

    def __init__(
        self, writer: asyncio.StreamWriter, request: http1.Request, stall_s: float
    ) -> None:
        self.started = False  # the final head is known
        self.ended = False
        self.keep_alive = False
        self.writes = 0
        self._writer = writer
        self._stall_s = stall_s
        self._modern = request.version >= (1, 1)  # knows chunked coding and interim responses
        self._framing = "none"
        self._block_bytes = 0
        self._head: bytes | None = None  # known and not yet sent
        self._held = bytearray()
        self._zero_sent = False  # a probe has begun the next chunk's size

    def interim(self, response: http1.Response) -> None:
        """Pass on a 1xx; HTTP/1.0 has none (RFC 9110 section 15.2)."""
        if self._modern:
            fields = response_fields(response)
            self._write(http1.encode_head(response.status, fields, response.reason))

    def start(
        self, response: http1.Response, framing: str, keep_alive: bool, block_bytes: int
    ) -> None:
        """Take the final head; with `block_bytes` 0 everything leaves at once."""
        fields = response_fields(response)
        if framing in ("chunked", "close"):
            framing = "chunked" if self._modern else "close"
        elif response.status != 204 and (length := content_length(response)) is not None:
            fields.append(("Content-Length", length))  # also of HEAD and 304: what GET would have
        if framing == "chunked":
            fields.append(("Transfer-Encoding", "chunked"))
        if not keep_alive:
            fields.append(("Connection", "close"))
        self._head = http1.encode_head(response.status, fields, response.reason)
        self._framing, self._block_bytes = framing, block_bytes
        self.keep_alive, self.started = keep_alive, True

    def hold(self, data: bytes) -> None:
        """Take a part of the content; write every block that it fills."""
        self._held += data
        while 0 < self._block_bytes <= len(self._held):
            self._send(self._block_bytes)

    async def flush(self) -> None:
        """Write what is due before the next read from upstream, and wait for a slow client."""
        if self._block_bytes == 0:
            self._send(len(self._held))
        await self._drain()

    async def end(self) -> None:
        """Pass on what is left, and end the content."""
        self._send(len(self._held))
        if self._framing == "chunked":
            self._write(http1.LAST_CHUNK)
        self.ended = True
        await self._drain()

    async def cut(self) -> None:
        """Pass on what is left, without an end."""
        self._send(len(self._held))
        self.keep_alive = False
        await self._drain()

    @property
    def needs_reset(self) -> bool:
        """Whether an unfinished reply could be taken for a complete one if it just closed.

        To some clients, a zero followed by the end of the connection is a last chunk.
        """
        begun = self.started and self._head is None and not self.ended
        return begun and (self._framing == "close" or self._zero_sent)

    def probe(self) -> bool:
        """Write something harmless; False when there is nothing of that kind."""
        if self.ended:
            return True  # its last bytes are on their way
        if self._modern and (not self.started or self._head is not None):
            self._write(http1.encode_head(102, []))
        elif self._held or self._head is not None:
            self._send(len(self._held))
        elif self._framing == "chunked" and not self._zero_sent:
            self._zero_sent = True
            self._write(b"0")
        else:
            return False
        return True

    def _send(self, size: int) -> None:
        """Write the head where it is due, and `size` bytes of what is held."""
        out, self._head = self._head or b"", None
        if size:
            data = bytes(self._held[:size])
            del self._held[:size]
            out += http1.encode_chunk(data) if self._framing == "chunked" else data
            self._zero_sent = False
        if out:
            self._write(out)

    def _write(self, data: bytes) -> None:
        self.writes += 1
        self._writer.write(data)

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._writer.drain()
        except OSError as error:  # TimeoutError is one
            raise ClientGone from error


def authority(host: str, port: int) -> str:
    """Write host and port as URLs do."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
