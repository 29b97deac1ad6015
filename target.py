"""Where to ask and how: a URL taken apart, the options, and the request as bytes.

    http://127.0.0.1:8765/stream  ->  Target   +  Options  ->  b"POST /stream HTTP/1.1 ..."

Not here: the connection (`wire.py`, before this one), the reply. Read next: `roundtrip.py`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote, urlencode, urlsplit

import http1
import websocket
from contents import DECODED
from measures import Mode
from readings import DIALECTS
from wire import Leave

# A name, an IPv4 or an IPv6 address, which may have a zone (RFC 4007 section 11).
HOST = re.compile(r"[0-9A-Za-z._-]+|[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(%[0-9A-Za-z._~-]+)?")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to ask, and when to leave.

    `leave_after` pieces (0: right after the request) or `leave_at` seconds, the client leaves:
    "close" closes the socket, "reset" makes the kernel send RST, "half-close" sends FIN and reads
    on to the end. `stop_after` pieces of a WebSocket reply it sends `{"stop": true}` and reads on.
    """

    mode: Mode | None = None  # None: by the URL, see `Target.mode`
    dialect: str = "native"
    method: Literal["POST", "GET"] = "POST"  # GET: the body's members go into the query
    http_version: Literal["1.1", "1.0"] = "1.1"
    fields: tuple[tuple[str, str], ...] = ()  # added, or put in place of our own of that name
    compressed: bool = False  # take gzip and deflate, as browsers do
    timeout: float | None = 600.0  # for everything, connecting included
    on_piece: Callable[[str], None] | None = None
    leave_after: int | None = None
    leave_at: float | None = None
    leave: Leave = "close"
    stop_after: int | None = None

    def check(self, target: "Target", mode: Mode) -> None:
        """Raise ValueError for a combination that no connection can carry out."""
        if self.stop_after is not None and mode is not Mode.WEBSOCKET:
            raise ValueError("stop_after needs a WebSocket")
        if self.http_version == "1.0" and mode is Mode.WEBSOCKET:
            raise ValueError("a WebSocket is opened with HTTP/1.1")
        if self.leave == "half-close" and target.tls:
            raise ValueError("TLS connections cannot be half-closed")
        self._check_numbers()
        for name, _ in self.fields:
            if name.lower() in ("content-length", "transfer-encoding"):
                raise ValueError(f"{name} is set here, as the request's content has it")
        if self.dialect not in DIALECTS:
            raise ValueError(f"no dialect {self.dialect!r}: choose from {', '.join(DIALECTS)}")

    def _check_numbers(self) -> None:
        if self.timeout is not None and not self.timeout > 0:  # nor is NaN
            raise ValueError("timeout is a positive number of seconds")
        if self.leave_at is not None and not self.leave_at >= 0:
            raise ValueError("leave_at is a number of seconds, at least 0")
        for name, least in (("leave_after", 0), ("stop_after", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is at least {least}")


@dataclass(frozen=True)
class Target:
    """A URL, taken apart."""

    scheme: str
    host: str
    port: int
    authority: str
    path: str
    query: str

    @classmethod
    def parse(cls, url: str) -> "Target":
        """Parse an http, https, ws or wss URL; ValueError says what is wrong with it."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ValueError(f"not an http, https, ws or wss URL: {url!r}")
        if parts.username is not None:
            raise ValueError("credentials belong in a field, not in the URL")
        try:
            host = parts.hostname.encode("idna").decode("ascii")
        except UnicodeError:
            host = ""
        if not HOST.fullmatch(host):
            raise ValueError(f"not a host's name or address: {parts.hostname!r}")
        if parts.port == 0:
            raise ValueError("nothing can listen on port 0")
        name = f"[{host}]" if ":" in host else host
        authority = name if parts.port is None else f"{name}:{parts.port}"
        port = parts.port or (443 if parts.scheme in ("https", "wss") else 80)
        keep = "%/:@!$&'()*+,;=-._~?"
        path, query = quote(parts.path or "/", safe=keep), quote(parts.query, safe=keep)
        return cls(parts.scheme, host, port, authority, path, query)

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.scheme in ("https", "wss")

    @property
    def mode(self) -> Mode:
        """The mode that the URL suggests by its scheme or route; an event stream otherwise."""
        last = self.path.rpartition("/")[2]
        if self.scheme in ("ws", "wss") or last == "ws":
            return Mode.WEBSOCKET
        return Mode.JSON if last in ("complete", "wait", "blocking") else Mode.SSE


_ACCEPT = {
    Mode.JSON: "application/json",
    Mode.SSE: "text/event-stream",
    Mode.NDJSON: "application/x-ndjson",
    Mode.TEXT: "text/plain, */*;q=0.5",
    Mode.STREAM: "text/event-stream, application/x-ndjson, text/plain;q=0.9, */*;q=0.5",
}


def encode_request(
    target: Target, body: Mapping[str, Any], options: Options, mode: Mode, key: str
) -> tuple[str, bytes]:
    """Return the method and the bytes of a request; `key` is for a WebSocket's handshake.

    ValueError for fields that no head can carry, and for a body that is not JSON.
    """
    method = "GET" if mode is Mode.WEBSOCKET else options.method
    content = json.dumps(body, allow_nan=False).encode() if method == "POST" else b""
    queries = [target.query] if target.query else []
    fields = [("Host", target.authority), ("User-Agent", "client.py")]
    if mode is Mode.WEBSOCKET:
        fields += websocket.request_fields(key)
    else:
        # RFC 9110 section 12.5.3: without Accept-Encoding any coding is acceptable.
        codings = f"{DECODED[0]}, {DECODED[-1]}" if options.compressed else "identity"
        fields += [("Accept", _ACCEPT[mode]), ("Accept-Encoding", codings)]
        if method == "POST":
            fields.append(("Content-Type", "application/json"))
        elif body:
            queries.append(urlencode({k: _query_value(v) for k, v in body.items()}))
    own = http1.Fields(fields).without(*(name for name, _ in options.fields))
    resource = "?".join([target.path, *filter(None, ["&".join(queries)])])
    raw = http1.encode_request(method, resource, [*own, *options.fields], content)
    return method, raw.replace(b" HTTP/1.1\r\n", f" HTTP/{options.http_version}\r\n".encode(), 1)


def _query_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
