"""Who may use the server: origins of web pages, API keys, and what CORS lets a page read.

A server on localhost can be reached by every page that its user opens in a browser. A page can't
read what another origin answers unless that answer allows it (CORS), but a `POST` or a WebSocket
would start a generation all the same. The browser says for which origin it acts, in `Origin`:
that has to be the server's own, or one allowed by flag. With a plain `GET` (an image, a link) it
names no origin, but says in `Sec-Fetch-Site` that the page was another one's. Programs other than
browsers send neither.

RFC 6454 (origins), RFC 6455 section 10.2, WHATWG Fetch section 3.2 (CORS), RFC 6750 (bearer keys).
Read next: `metrics.py`.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import http1

Pairs = list[tuple[str, str]]
SCHEMES = ("http", "https")  # of a page from this server, or from a proxy in front of it
GENERATING = ("/complete", "/stream")  # where a GET costs something, and a HEAD must not


class Refusal(Exception):
    """A request that gets a 4xx or 5xx instead of a reply; the words are safe to show."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        field: str | None = None,
        fields: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.field = field
        self.fields = fields


@dataclass(frozen=True)
class Access:
    """The allowed origins ("*" for any) and the keys, of which one is needed if there are any."""

    origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()

    def check_origin(self, request: http1.Request) -> None:
        """Raise `Refusal` (403) for a page of another origin that is not allowed."""
        origin = request.fields.get("origin")
        if origin is None:
            site = request.fields.get("sec-fetch-site") or "none"
            if site in ("none", "same-origin") or request.path not in GENERATING:
                return
            origin = "null"
        if self._allows(origin):
            return
        # RFC 6454 section 6.2: scheme "://" host [":" port], or the word null.
        if origin.lower() not in (f"{scheme}://{request.host.lower()}" for scheme in SCHEMES):
            raise Refusal(403, "this origin is not allowed here (see --cors)", "forbidden")

    def check_key(self, request: http1.Request) -> None:
        """Raise `Refusal` (401) without a valid `Authorization: Bearer` or `x-api-key`."""
        if not self.api_keys:
            return
        scheme, _, bearer = (request.fields.get("authorization") or "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else request.fields.get("x-api-key")
        # Every key is compared, each in constant time: the time taken tells nothing.
        given_bytes = (given or "").encode("latin-1")
        matches = [hmac.compare_digest(given_bytes, key.encode()) for key in self.api_keys]
        if not any(matches):
            challenge = (("WWW-Authenticate", "Bearer"),)
            raise Refusal(401, "a valid API key is needed", "authentication_error", None, challenge)

    def fields(self, request: http1.Request) -> Pairs:
        """What lets a page of an allowed origin read the answer, errors included."""
        origin = request.fields.get("origin")
        if origin is None or not self._allows(origin):
            return []
        return [
            ("Access-Control-Allow-Origin", origin),
            ("Access-Control-Expose-Headers", "Reply-Id, Retry-After"),
            ("Vary", "Origin"),
        ]

    def preflight_fields(self, request: http1.Request, methods: Mapping[str, Any] | None) -> Pairs:
        """The answer to OPTIONS, which may be a browser asking before the real request."""
        fields = self.fields(request)
        if "access-control-request-method" in request.fields:
            self.check_origin(request)
            fields.append(("Access-Control-Allow-Methods", "GET, POST, OPTIONS"))
            fields.append(("Access-Control-Max-Age", "600"))
            asked = request.fields.get("access-control-request-headers")
            if asked:
                fields.append(("Access-Control-Allow-Headers", asked))
        if methods is not None:
            fields.append(("Allow", allow(methods)))
        return fields

    def _allows(self, origin: str) -> bool:
        return "*" in self.origins or origin in self.origins


def allow(methods: Mapping[str, Any]) -> str:
    """The value of `Allow` for an address with these handlers."""
    names = {*methods, "OPTIONS"} | ({"HEAD"} if "GET" in methods else set())
    return ", ".join(sorted(names))
