"""The page at `/`: how it is sent, and what it reports back.

    GET /          page.html to whoever accepts text/html (a browser does, curl does not)
    POST /log/ID   {"first_byte": 0.004, "first_text": 0.31, "first_paint": 0.32, ...}

A Content-Security-Policy lets the page do what it does and nothing else. Its one script and one
style sheet are named by their hashes, so text of the model that found its way into the markup
would not run; nothing is loaded, and no address is spoken to but this server and, where one is
told by flag, a proxy in front of it. `require-trusted-types-for` makes `innerHTML` throw.

The page dates what a server can't see: when the first byte came, when the first text was parsed,
when it was painted. All are seconds since the request was sent, by the browser's clock; the
server's own, in the same line of `/log`, are seconds since the request was understood.

W3C Content Security Policy Level 3. Read next: `page.html`, then `measures.py`.
"""

import base64
import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from generation import BadRequest

HTML = "text/html; charset=utf-8"
MARKS = ("first_byte", "first_text", "first_paint", "last_text")
# Nobody looks at one reply for longer than a day.
MAX_MARK_S = 86_400


@functools.cache
def content() -> bytes:
    """The page as it stands beside this file."""
    return Path(__file__).with_name("page.html").read_bytes()


@functools.cache
def fields(proxy: str | None) -> tuple[tuple[str, str], ...]:
    """What is sent with the page besides its type."""
    return (
        ("Content-Security-Policy", policy(content().decode(), proxy)),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("Cache-Control", "no-cache"),
        ("Vary", "Accept"),
    )


def policy(html: str, proxy: str | None) -> str:
    """The Content-Security-Policy of a page whose inline script and style may be used."""
    connect = ["'self'"]
    if proxy:
        connect += [proxy, "ws" + proxy.removeprefix("http")]
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hashes(html, 'script')}",
            f"style-src {_hashes(html, 'style')}",
            "img-src data:",  # its icon
            f"connect-src {' '.join(connect)}",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def _hashes(html: str, element: str) -> str:
    contents = re.findall(rf"<{element}>(.*?)</{element}>", html, re.DOTALL)
    digests = (hashlib.sha256(text.encode()).digest() for text in contents)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def wanted(accept: str | None) -> bool:
    """Whether this `Accept` names HTML: all browsers do when they open an address."""
    ranges = (part.partition(";")[0].strip().lower() for part in (accept or "").split(","))
    return "text/html" in ranges


def parse_marks(body: Mapping[str, Any]) -> dict[str, float | None]:
    """Check what the page reports; `BadRequest` names the field. What is missing is null."""
    for name, value in body.items():
        if name not in MARKS:
            raise BadRequest(f"unknown field {name[:100]!r}", name[:100])
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value <= MAX_MARK_S):
            raise BadRequest(f"{name} must be a number of seconds up to {MAX_MARK_S}", name)
    return {name: body.get(name) for name in MARKS}


def parse_proxy(url: str) -> str:
    """The origin of the proxy that the page may use; ValueError for anything but an origin."""
    parts = urlsplit(url)
    if not re.fullmatch(r"https?://[A-Za-z0-9.:\[\]-]+/?", url) or not parts.hostname:
        raise ValueError(f"not http://HOST:PORT: {url!r}")
    return f"{parts.scheme}://{parts.netloc}"


def origins(host: str, port: int, tls: bool) -> tuple[str, ...]:
    """The origins under which this server's page is opened: what a proxy's requests name."""
    names = {host, "127.0.0.1", "localhost"}
    scheme = "https" if tls else "http"
    return tuple(f"{scheme}://{f'[{name}]' if ':' in name else name}:{port}" for name in names)
