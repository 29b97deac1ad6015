"""A server that dates what its model does: for experiments that tell the two apart.

    python dated.py --port 0 ...        everything that server.py takes
    GET /passes                         [["decode", began, ended], ...] since it was asked last
    GET /beats?switch_ms=0.5            how late the event loop's beats were, one a millisecond;
                                        and for how long of it the loop's thread waited for a core

The beats begin when they are first asked for; `switch_ms` sets the interpreter's switch interval.
Only Linux tells what a thread waited for a core; elsewhere that is 0.

`time.perf_counter` is one clock for all processes of a machine, so these dates can be laid beside
those of the measuring client.

Not here: the server itself (`server.py`), unchanged: only its model is wrapped.
Read next: `load_experiments.py`.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

from connection import Exchange
from delivery import JSON
from dialects import to_json
from engine import AnyEngine, Engine
from options import Options, make_engine
from server import Server, main

DATED = ("prefill", "decode", "choose")
BEAT_S = 0.001

Pass = tuple[str, float, float]


class DatedModel:
    """A model whose passes, and choices after them, are dated; otherwise the one it is given."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.passes: list[Pass] = []
        for name in DATED:
            setattr(self, name, self._dated(name, getattr(model, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _dated(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def dated(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = call(*args, **kwargs)
            self.passes.append((name, began, time.perf_counter()))
            return result

        return dated


class DatedServer(Server):
    """A server with one route more."""

    def __init__(self, engine: AnyEngine, options: Options) -> None:
        super().__init__(engine, options)
        self.routes.add("GET", "/passes", self._passes)
        self.routes.add("GET", "/beats", self._beats)
        self._late: list[float] = []
        self._waited: list[float] = []
        self._waited_before = 0.0
        self._due: float | None = None

    async def _passes(self, exchange: Exchange) -> None:
        passes: list[Pass] = []
        if isinstance(self.engine, Engine):  # the simulated one has no model
            model: Any = self.engine.model
            passes, model.passes = model.passes, passes
        exchange.respond(200, to_json({"passes": passes}).encode(), JSON)

    async def _beats(self, exchange: Exchange) -> None:
        if switch_ms := dict(exchange.request.query).get("switch_ms"):
            sys.setswitchinterval(float(switch_ms) / 1000)
        if self._due is None:
            self._beat()
        late, waited = self._late, self._waited
        self._late, self._waited = [], []
        exchange.respond(200, to_json({"late": late, "waited": waited}).encode(), JSON)

    def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        now, waited = loop.time(), _waited_for_a_core()
        if self._due is not None:
            self._late.append(now - self._due)
            self._waited.append(waited - self._waited_before)
        self._waited_before = waited
        self._due = now + BEAT_S
        loop.call_at(self._due, self._beat)


def _waited_for_a_core() -> float:
    """Return for how many seconds this thread was ready to run and did not, since it began."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as schedstat:
            return int(schedstat.read().split()[1]) / 1e9
    except OSError:
        return 0.0


def make_dated_engine(args: argparse.Namespace) -> AnyEngine:
    """Make the engine that `server.py` makes, around a model that dates its passes."""
    engine = make_engine(args)
    if isinstance(engine, Engine):
        engine.model = DatedModel(engine.model)
    return engine


if __name__ == "__main__":
    sys.exit(main(make_dated_engine, DatedServer))
