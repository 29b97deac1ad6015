"""Which handler an address has, by method, and which dialect it speaks.

The table is the whole of it: everything that can be asked of the server stands in `_rows` once,
and `curl http://127.0.0.1:8765` is told the same.

Not here: whether a request may pass (`access.py`), and what is done when it may not (`server.py`).
Read next: `server.py`, which looks here.
"""

import functools
from collections.abc import Iterable, Mapping

import http1
import page
from about import About
from background import Background
from completions import Chat
from connection import Exchange, Handler
from conversing import Conversing
from delivery import Delivery
from dialects import Dialect
from legacy import Several, Text
from messages import Messages
from models import Served
from options import Options
from responses import Responses
from resuming import Resuming

PLAIN_TEXT = "text/plain; charset=utf-8"
MODEL = "/v1/models/"


class Routes:
    """The handlers of one server, and the providers' dialects that its addresses speak."""

    def __init__(self, delivery: Delivery, about: About, served: Served, options: Options) -> None:
        self._delivery = delivery
        self._about = about
        self._options = options
        self._chat = Chat(served)
        self._text = Text(served)
        self._responses = Responses(served)
        self._messages = Messages(served)
        self._dialects: dict[str, Dialect] = {
            "/": delivery.buffered,
            "/v1/": self._chat,
            "/v1/completions": self._text,
            "/v1/responses": self._responses,
            "/v1/messages": self._messages,
        }
        self._handlers: dict[str, dict[str, Handler]] = {}
        for methods, path, handler in self._rows():
            self.add(methods, path, handler)

    def _rows(self) -> Iterable[tuple[str, str, Handler]]:
        """Methods, path, handler.

        A path that ends in "/" (other than the root) stands for all that are one name longer, and
        "*" for any one name.
        """
        delivery, about = self._delivery, self._about
        resuming = Resuming(delivery)
        conversing = Conversing(delivery)
        several = Several(delivery, self._text)
        background = Background(delivery, self._responses)
        chat = functools.partial(delivery.reply, dialect=self._chat)
        messages = functools.partial(delivery.reply, dialect=self._messages)
        count_tokens = functools.partial(delivery.count_tokens, dialect=self._messages)
        return (
            ("GET POST", "/complete", delivery.complete),
            ("POST", "/wait", delivery.complete),
            ("POST", "/blocking", delivery.complete),
            ("GET POST", "/stream", resuming.stream),
            ("GET", "/stream/", resuming.resume),
            ("GET", "/ws", conversing.converse),
            ("POST", "/cancel/", delivery.cancel),
            ("POST", "/v1/chat/completions", chat),
            ("POST", "/v1/completions", several.create),
            ("POST", "/v1/responses", background.create),
            ("GET", "/v1/responses/", background.retrieve),
            ("POST", "/v1/responses/*/cancel", background.cancel),
            ("POST", "/v1/messages", messages),
            ("POST", "/v1/messages/count_tokens", count_tokens),
            ("GET", "/v1/models", about.models),
            ("GET", MODEL, about.model),
            ("GET", "/log", about.log),
            ("POST", "/log/", delivery.mark),
            ("GET", "/health", about.health),
            ("GET", "/metrics", about.metrics),
            ("GET", "/", self._index),
        )

    def add(self, methods: str, path: str, handler: Handler) -> None:
        """Have these methods of a path answered by `handler`."""
        self._handlers[path] = dict.fromkeys(methods.split(), handler)

    def at(self, path: str) -> Mapping[str, Handler] | None:
        """The handlers of an address by method; None where there is nothing."""
        if path.startswith(MODEL):
            return self._handlers[MODEL]  # a model's name may hold a slash
        parent, _, name = path.rpartition("/")
        above = parent.rpartition("/")[0]
        places = (path, f"{parent}/" if parent and name else path, f"{above}/*/{name}")
        return next((self._handlers[place] for place in places if place in self._handlers), None)

    def dialect(self, request: http1.Request) -> Dialect:
        """The dialect of an address, by its longest prefix that has one: also for its refusals."""
        try:
            path = request.path
        except http1.ProtocolError:  # which may be why it is refused
            path = "/"
        if path.startswith("/v1/models") and "anthropic-version" in request.fields:
            path = "/v1/messages"  # both providers' clients ask there
        prefixes = [prefix for prefix in self._dialects if path.startswith(prefix)]
        return self._dialects[max(prefixes, key=len, default="/")]

    async def _index(self, exchange: Exchange) -> None:
        """`GET /`: the page for a browser; for curl a list of routes."""
        fields = self._options.access.fields(exchange.request)
        if page.wanted(exchange.request.fields.get("accept")):
            fields = [*page.fields(self._options.proxy), *fields]
            exchange.respond(200, page.content(), page.HTML, fields)
            return
        lines = []
        for path, methods in self._handlers.items():
            one = "ID" if path.endswith("/") and path != "/" else ""
            lines.append(f"{' '.join(methods):10} {path.replace('*', 'ID')}{one}")
        host = exchange.request.host
        example = f'curl -N http://{host}/stream -d \'{{"prompt": "One, two,"}}\''
        body = "\n".join([*lines, "", example, ""]).encode()
        exchange.respond(200, body, PLAIN_TEXT, fields)
