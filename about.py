"""What the server says of itself: how it is doing, what it did, and which models it has.

    GET /health           {"status": "ok", "model": ..., "running": 2, "waiting": 0, ...}
    GET /log              {"requests": [{"id": ..., "route": "/stream", ...}, ...]}, newest last
    GET /metrics          Prometheus text
    GET /v1/models[/ID]   in the shape of the provider whose client asks

Nothing here starts a reply. What is told is read at the moment that somebody asks.

Not here: what is counted as replies end (`metrics.py`), a model's names (`models.py`).
Read next: `routes.py`.
"""

from collections.abc import Collection

import metrics
from access import Refusal
from connection import Connection, Exchange
from delivery import Delivery
from models import Served, anthropic_model, anthropic_models, openai_model, openai_models
from options import Options
from simulated import SimulatedEngine
from upstream import UpstreamEngine


class About:
    """The handlers of everything that is only told."""

    def __init__(
        self,
        delivery: Delivery,
        options: Options,
        served: Served,
        counted: metrics.Metrics,
        connections: Collection[Connection],
    ) -> None:
        self._delivery = delivery
        self._options = options
        self._served = served
        self._counted = counted
        self._connections = connections

    async def models(self, exchange: Exchange) -> None:
        """`GET /v1/models`."""
        anthropic = "anthropic-version" in exchange.request.fields
        await self._delivery.list_models()
        models = (anthropic_models if anthropic else openai_models)(self._served)
        self._delivery.answer_json(exchange, models)

    async def model(self, exchange: Exchange) -> None:
        """`GET /v1/models/ID`; the name may hold a slash."""
        name = exchange.request.path.split("/", 3)[3]
        await self._delivery.list_models()
        if not self._served.knows(name):
            raise Refusal(404, f"the model {name[:100]!r} is not served here", "model_not_found")
        anthropic = "anthropic-version" in exchange.request.fields
        model = (anthropic_model if anthropic else openai_model)(self._served, name)
        self._delivery.answer_json(exchange, model)

    async def log(self, exchange: Exchange) -> None:
        """`GET /log`."""
        lines = [entry.as_dict() for entry in self._delivery.entries]
        self._delivery.answer_json(exchange, {"requests": lines})

    async def health(self, exchange: Exchange) -> None:
        """`GET /health`; 503 once the engine can't be used any more."""
        engine = self._delivery.engine
        state = {
            "status": "ok" if engine.failure is None else engine.failure,
            "model": self._options.model,
            "running": self._running,
            "waiting": engine.waiting,
        }
        if isinstance(engine, UpstreamEngine):
            state["upstream"] = str(engine.outbound.address)
            state["model"] = engine.model  # null until the server there has named it
        # What the page needs to know: which engines there are, how to get to them.
        state["simulated"] = isinstance(engine, SimulatedEngine)
        state["stand_in"] = self._delivery.stand_in not in (None, engine)
        state["proxy"] = self._options.proxy
        state["needs_key"] = bool(self._options.access.api_keys)
        self._delivery.answer_json(exchange, state, 200 if engine.failure is None else 503)

    @property
    def _running(self) -> int:
        """Replies that hold a row, and those of the stand-in."""
        engine, beside = self._delivery.engine, self._delivery.stand_in
        if beside is None or beside is engine:
            return engine.running
        return engine.running + beside.running

    async def metrics(self, exchange: Exchange) -> None:
        """`GET /metrics`."""
        engine = self._delivery.engine
        queued = sum(c.writer.transport.get_write_buffer_size() for c in self._connections)
        gauges = {
            "server_requests_running": ("Replies under way.", self._running),
            "server_requests_waiting": ("Requests in the queue.", engine.waiting),
            "server_cache_used_bytes": ("Cache of running replies.", engine.cache_bytes),
            "server_connections": ("Open connections.", len(self._connections)),
            "server_client_queued_bytes": ("Written, and not yet taken by clients.", queued),
            "server_replies_kept": ("Replies that can be resumed.", len(self._delivery.replays)),
        }
        body = self._counted.text(gauges).encode()
        fields = self._options.access.fields(exchange.request)
        exchange.respond(200, body, metrics.CONTENT_TYPE, fields)
