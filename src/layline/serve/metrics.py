"""/metrics: the engine's plain numbers in Prometheus' text form, read when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from layline.engine.async_engine import AsyncEngine
from layline.engine.statistics import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Requests = Callable[[], Counter[tuple[str, str, int]]]


class EngineCollector(Collector):
    """Turns the engine's numbers and the counts of HTTP requests into metrics."""

    def __init__(self, engine: AsyncEngine, requests: Requests) -> None:
        self._engine = engine
        self._requests = requests

    def collect(self) -> Iterable[Metric]:
        """All metrics at this moment."""
        yield from self._gauges()
        yield from self._totals()
        statistics = self._engine.statistics
        for name, text, histogram in (
            ("time_to_first_token", "from submission to the first token", statistics.first_token),
            ("inter_token", "between two tokens of a request", statistics.inter_token),
            ("request", "from submission to the last token", statistics.request),
            ("step", "one step of the engine", statistics.step),
        ):
            yield _histogram(f"layline_{name}_seconds", f"Seconds {text}.", histogram)

    def _gauges(self) -> Iterable[Metric]:
        load = self._engine.load
        healthy = self._engine.failure is None
        for name, text, value in (
            ("requests_waiting", "Requests that hold no cache block yet.", load.waiting),
            ("requests_running", "Requests that hold cache blocks.", load.running),
            ("kv_blocks_used", "Cache blocks that requests hold.", load.cache.held),
            ("kv_blocks_idle", "Cache blocks kept for later prompts.", load.cache.idle),
            ("kv_blocks", "Cache blocks in all.", load.cache.blocks),
            ("healthy", "1 while the engine can run, 0 once it failed.", float(healthy)),
        ):
            yield GaugeMetricFamily(f"layline_{name}", text, value=value)

    def _totals(self) -> Iterable[Metric]:
        statistics, cache = self._engine.statistics, self._engine.load.cache
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts that were taken.", statistics.prompt_tokens),
            ("generated_tokens", "Tokens that were generated.", statistics.generated_tokens),
            ("steps", "Steps of the engine.", statistics.steps),
            (
                "prefix_lookup_tokens",
                "Tokens looked for in the cache.",
                cache.prefix_lookups,
            ),
            ("prefix_hit_tokens", "Tokens found in the cache.", cache.prefix_hits),
            ("preemptions", "Requests that lost their cache blocks.", cache.preemptions),
            ("draft_tokens", "Drafts that steps verified.", cache.drafted),
            ("accepted_draft_tokens", "Drafts that became tokens.", cache.accepted),
        ):
            yield CounterMetricFamily(f"layline_{name}", text, value=value)
        finished = CounterMetricFamily(
            "layline_requests_finished", "Requests that ended, by reason.", labels=["reason"]
        )
        for reason, count in sorted(statistics.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        requests = CounterMetricFamily(
            "layline_http_requests",
            "HTTP requests; 499 is a client that left before its answer.",
            labels=["method", "path", "status"],
        )
        for (method, path, status), count in sorted(self._requests().items()):
            requests.add_metric([method, path, str(status)], count)
        yield requests


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    rows = histogram.cumulative()
    buckets = [("+Inf" if bound == float("inf") else str(bound), count) for bound, count in rows]
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total)


class Metrics:
    """The text of /metrics. It has a registry of its own: two servers share no number."""

    def __init__(self, engine: AsyncEngine, requests: Requests) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, requests))

    def text(self) -> bytes:
        """All metrics at this moment."""
        return bytes(generate_latest(self._registry))
