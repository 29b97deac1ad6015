"""What `/metrics` tells, read by Prometheus' own parser."""

import asyncio
import math
import threading
from typing import Any

import pytest
from fakes import EOS, FakeModel
from require import require
from serving import Running, eventually, serving

from engine import Engine
from generation import Generation, GenerationError
from metrics import CONTENT_TYPE, DURATION_S, FIRST_TOKEN_S, PER_TOKEN_S, Histogram, Metrics
from simulated import TICKS_PER_S, SimulatedEngine

HISTOGRAMS = (
    # OpenTelemetry's semantic conventions for generative AI, as Prometheus names them.
    "gen_ai_server_time_to_first_token_seconds",
    "gen_ai_server_time_per_output_token_seconds",
    "gen_ai_server_request_duration_seconds",
    "server_queue_time_seconds",
)
GAUGES = (
    "server_requests_running",
    "server_requests_waiting",
    "server_cache_used_bytes",
    "server_connections",
    "server_client_queued_bytes",
    "server_replies_kept",
)

Samples = dict[tuple[str, str], float]


def parsed(text: str) -> tuple[dict[str, str], Samples]:
    """Types by name, and values by name and label value."""
    parser = require("prometheus_client.parser")
    families = list(parser.text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    values = {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }
    return {family.name: family.type for family in families}, values


async def scrape(running: Running) -> Samples:
    answer = await running.ask("GET", "/metrics")
    assert answer.status == 200
    assert answer.fields.get("content-type") == CONTENT_TYPE
    return parsed(answer.content.decode())[1]


def reply(
    finish_reason: str, tokens: int, first: float | None = None, last: float | None = None
) -> Generation:
    """A reply that has ended, with these times."""
    generation = Generation(3)
    generation.completion_tokens = tokens
    generation.timings.first_token, generation.timings.last_token = first, last
    generation.deliver("", finish_reason)
    generation.duration = 0.5
    return generation


class TestExposition:
    def test_names_and_types(self) -> None:
        types, values = parsed(Metrics().text(dict.fromkeys(GAUGES, ("Some text.", 0))))
        counters = dict.fromkeys(("server_tokens", "server_requests"), "counter")
        assert types == (
            dict.fromkeys(HISTOGRAMS, "histogram") | counters | dict.fromkeys(GAUGES, "gauge")
        )
        assert set(values.values()) == {0}

    @pytest.mark.parametrize("bounds", [FIRST_TOKEN_S, PER_TOKEN_S, DURATION_S])
    def test_buckets_are_cumulative_and_end_in_infinity(self, bounds: tuple[float, ...]) -> None:
        histogram = Histogram("h", "Some text.", bounds)
        given = [0.0, bounds[0], bounds[0] * 1.0001, bounds[3], 1e9]
        for value in given:
            histogram.observe(value)
        _, values = parsed("\n".join([*histogram.lines(), ""]))
        for bound in bounds:
            # A bucket's bound belongs to it: le means less or equal.
            assert values["h_bucket", str(bound)] == sum(value <= bound for value in given)
        assert values["h_bucket", "+Inf"] == values["h_count", ""] == len(given)
        assert math.isclose(values["h_sum", ""], sum(given))
        assert sorted(bounds) == list(bounds)

    def test_gauges_in_full(self) -> None:
        _, values = parsed(Metrics().text({"g": ("Some text.", 123_456_789)}))
        assert values["g", ""] == 123_456_789

    def test_what_did_not_happen_is_not_counted_as_zero(self) -> None:
        metrics = Metrics()
        metrics.finished(reply("cancelled", 0))
        metrics.finished(reply("length", 1, first=0.2, last=0.2))
        metrics.finished(reply("length", 3, first=0.2, last=0.4))
        _, values = parsed(metrics.text({}))
        first, per_token, duration, queued = HISTOGRAMS
        assert values[f"{first}_count", ""] == 2
        assert values[f"{per_token}_count", ""] == 1
        assert values[f"{per_token}_sum", ""] == pytest.approx(0.1)
        assert values[f"{duration}_count", ""] == 3
        assert values[f"{queued}_count", ""] == 0


def fake() -> FakeModel:
    """Says three letters; a prompt of "fail" makes it fail after two."""

    def script(history: Any) -> int:
        prompt = 4 if bytes(history[:4]) in (b"stop", b"fail", b"long") else 0
        said = len(history) - prompt
        return EOS if said == 3 and bytes(history[:4]) == b"stop" else 97

    model = FakeModel(rows=2, context=4096, script=script)
    model.fail_choose = lambda history: bytes(history[:4]) == b"fail" and len(history) == 6
    return model


async def test_each_way_to_end() -> None:
    model = fake()
    async with serving(Engine(model)) as running:
        before = await scrape(running)
        assert before["server_requests_total", "stop"] == 0
        for route in ("/complete", "/stream"):
            for prompt in ("stop", "long", "fail"):
                await running.ask("POST", route, {"prompt": prompt, "max_tokens": 5})
        model.step = threading.Semaphore(1)  # a token, and no other before the client has left
        async with running.connect() as peer:
            peer.request("POST", "/stream", {"prompt": "long", "max_tokens": 4000})
            await peer.until(b"data")
            peer.close()
            (*_, entry) = running.server.entries
            await eventually(lambda: entry.client_left)
        model.step.release(100)
        await eventually(lambda: entry.generation.finish_reason)
        after = await scrape(running)
    ends = {reason: value for (name, reason), value in after.items() if "requests_total" in name}
    assert ends == {"stop": 2, "length": 2, "error": 2, "cancelled": 1}
    made = sum(entry.generation.completion_tokens for entry in running.server.entries)
    assert after["server_tokens_total", "output"] == made >= 2 * (4 + 5 + 2) + 1
    assert after["server_tokens_total", "input"] == 7 * 4
    for name in HISTOGRAMS:
        # The one that was left had a single token, and no time between two.
        assert after[f"{name}_count", ""] == (6 if "per_output_token" in name else 7)


async def test_what_is_refused_is_no_reply() -> None:
    async with serving() as running:
        await running.ask("POST", "/complete", {"prompt": ""})
        await running.ask("POST", "/complete", {"prompt": "a", "max_tokens": 0})
        values = await scrape(running)
    assert sum(v for (name, _), v in values.items() if name == "server_requests_total") == 0


async def test_waiting_running_and_cache() -> None:
    model = fake()
    model.rows = 1
    model.step = threading.Semaphore(0)
    engine = Engine(model)
    async with serving(engine) as running, running.connect() as a, running.connect() as b:
        for peer in (a, b):
            peer.request("POST", "/stream", {"prompt": "long", "max_tokens": 2})
            await peer.head()
        await eventually(lambda: (engine.running, engine.waiting) == (1, 1))
        values = await scrape(running)
        assert values["server_requests_running", ""] == 1
        assert values["server_requests_waiting", ""] == 1
        assert values["server_cache_used_bytes", ""] == 4 * model.bytes_per_token
        assert values["server_connections", ""] == 3
        model.step.release(100)
        for peer in (a, b):
            await peer.until(b"[DONE]")
        values = await scrape(running)
    assert values["server_requests_running", ""] == values["server_requests_waiting", ""] == 0
    assert values["server_cache_used_bytes", ""] == 0


async def test_resumable_replies_kept() -> None:
    async with serving() as running:
        await running.ask("POST", "/stream", {"prompt": "a", "max_tokens": 2, "resume": True})
        assert (await scrape(running))["server_replies_kept", ""] == 1


async def test_times_are_the_server_s_own() -> None:
    """On a schedule without jitter each time is what the schedule says, to the tick, or later."""
    async with serving(SimulatedEngine(delay_ms=10, jitter_ms=0, first_delay_ms=20)) as running:
        await running.ask("POST", "/complete", {"prompt": "a", "max_tokens": 5})
        values = await scrape(running)
        (entry,) = running.server.entries
    first, per_token, duration, _ = HISTOGRAMS
    timings = entry.generation.timings
    assert values[f"{first}_sum", ""] == pytest.approx(timings.first_token, abs=1e-6)
    assert timings.first_token >= 0.03 - 0.5 / TICKS_PER_S
    assert values[f"{per_token}_sum", ""] == pytest.approx(
        (timings.last_token - timings.first_token) / 4, abs=1e-6
    )
    assert values[f"{duration}_sum", ""] >= timings.last_token - 1e-6


async def test_an_end_is_counted_once() -> None:
    """Whoever reads it to the end or cancels it later."""
    metrics = Metrics()
    generation = Generation(1)
    generation.on_finish = metrics.finished
    generation.error = "broken"
    generation.deliver("", "error")
    with pytest.raises(GenerationError):
        await anext(generation)
    generation.cancel()
    await asyncio.sleep(0)
    _, values = parsed(metrics.text({}))
    assert values["server_requests_total", "error"] == 1
    assert values["server_requests_total", "cancelled"] == 0
