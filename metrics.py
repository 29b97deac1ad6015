"""What the server counts, as Prometheus reads it.

    # HELP gen_ai_server_time_to_first_token_seconds From the request to its first token.
    # TYPE gen_ai_server_time_to_first_token_seconds histogram
    gen_ai_server_time_to_first_token_seconds_bucket{le="0.05"} 3
    ...

Names follow OpenTelemetry's semantic conventions for generative AI where they have one; the rest
begin with `server_`. Times are the server's own, from `submit` on; what delivery adds, only the
client can see. A reply that never had a first token has no time to it, and is not counted as zero.

Prometheus text exposition format 0.0.4. Read next: `delivery.py`.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

from generation import Generation

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Upper bounds in seconds: the conventions' own for each measure, cut to what a small server sees.
FIRST_TOKEN_S = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_S = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)


class Histogram:
    """Counts of values by upper bound, with their sum."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float | None) -> None:
        """Count a value; None is no value."""
        if value is not None:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def lines(self) -> Iterable[str]:
        """The exposition of this histogram; buckets count all values up to their bound."""
        yield from _heading(self._name, self._text, "histogram")
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self._name}_bucket{{le="{bound}"}} {total}'
        yield f"{self._name}_sum {self._sum:.6f}"
        yield f"{self._name}_count {total}"


def _heading(name: str, text: str, kind: str) -> Iterable[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


class Metrics:
    """Everything that `/metrics` tells about finished replies; the rest is asked when told."""

    def __init__(self) -> None:
        self._first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From the submitted request to its first token.",
            FIRST_TOKEN_S,
        )
        self._per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Between two tokens of a reply, after the first.",
            PER_TOKEN_S,
        )
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "From the submitted request to the end of its reply.",
            DURATION_S,
        )
        self._queued = Histogram(
            "server_queue_time_seconds", "From the submitted request to its row.", FIRST_TOKEN_S
        )
        self._tokens: Counter[str] = Counter()
        self._ends: Counter[str] = Counter(stop=0, length=0, cancelled=0, error=0)

    def finished(self, generation: Generation) -> None:
        """Count a reply that has just ended."""
        timings = generation.timings
        self._first_token.observe(timings.first_token)
        self._per_token.observe(generation.time_per_output_token)
        self._duration.observe(generation.duration)
        self._queued.observe(timings.queued)
        self._tokens["input"] += generation.prompt_tokens
        self._tokens["output"] += generation.completion_tokens
        self._ends[generation.finish_reason or ""] += 1

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """The whole exposition; `gauges` holds, by name, a text and the value now."""
        lines: list[str] = []
        for histogram in (self._first_token, self._per_token, self._duration, self._queued):
            lines += histogram.lines()
        lines += _heading("server_tokens_total", "Tokens read and sampled.", "counter")
        lines += [
            f'server_tokens_total{{type="{kind}"}} {self._tokens[kind]}'
            for kind in ("input", "output")
        ]
        lines += _heading("server_requests_total", "Replies by how they ended.", "counter")
        lines += [
            f'server_requests_total{{finish_reason="{reason}"}} {count}'
            for reason, count in sorted(self._ends.items())
        ]
        for name, (text, value) in gauges.items():
            lines += _heading(name, text, "gauge")
            lines.append(f"{name} {value}")
        return "\n".join([*lines, ""])
