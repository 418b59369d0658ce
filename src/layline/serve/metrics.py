"""/metrics: the engine's plain numbers in Prometheus' text form, read when they are asked for."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from layline import __version__
from layline.engine.statistics import Histogram
from layline.serve.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REASONS = ("stop", "length", "abort", "error")
"""How a request of the engine can end; there from the start, so that a first one is a change."""
Requests = Callable[[], Counter[tuple[str, str, int]]]


class EngineCollector(Collector):
    """Turns the engine's numbers and the counts of HTTP requests into metrics.

    Labels have few values: parts of a step, pipeline stages, reasons, and of HTTP requests the
    server's own paths.
    """

    def __init__(self, service: Service, requests: Requests) -> None:
        self._service = service
        self._engine = service.engine
        self._requests = requests

    def collect(self) -> Iterable[Metric]:
        """All metrics at this moment."""
        yield from self._facts()
        yield from self._gauges()
        yield from self._totals()
        yield from self._ends()
        yield from self._times()

    def _facts(self) -> Iterable[Metric]:
        build = {"version": __version__, "python": platform.python_version(), "torch": torch()}
        yield InfoMetricFamily("layline_build", "What serves.", value=build)
        told = self._service.about.get("facts", {})
        names = ("architecture", "weights", "computed in", "keys and values", "device", "mesh")
        model = {name.replace(" ", "_"): str(told[name]) for name in names if name in told}
        model["model"] = self._service.settings.model_name
        yield InfoMetricFamily("layline_model", "What is served.", value=model)

    def _gauges(self) -> Iterable[Metric]:
        load = self._engine.load
        block = self._service.block_bytes
        healthy = self._engine.failure is None
        for name, text, value in (
            ("requests_waiting", "Requests that hold no cache block yet.", load.waiting),
            ("requests_running", "Requests that hold cache blocks.", load.running),
            ("kv_blocks_used", "Cache blocks that requests hold.", load.cache.held),
            ("kv_blocks_idle", "Cache blocks kept for later prompts.", load.cache.idle),
            ("kv_blocks", "Cache blocks in all.", load.cache.blocks),
            ("kv_used_bytes", "Bytes of used blocks over all ranks.", load.cache.held * block),
            ("kv_idle_bytes", "Bytes of idle blocks over all ranks.", load.cache.idle * block),
            ("kv_bytes", "Bytes of the cache over all ranks.", self._service.kv_bytes),
            ("healthy", "1 while the engine can run, 0 once it failed.", float(healthy)),
        ):
            yield GaugeMetricFamily(f"layline_{name}", text, value=value)

    def _totals(self) -> Iterable[Metric]:
        statistics, cache = self._engine.statistics, self._engine.load.cache
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts that were taken.", statistics.prompt_tokens),
            ("generated_tokens", "Tokens that were generated.", statistics.generated_tokens),
            ("steps", "Steps of the engine.", statistics.steps),
            ("prefix_lookup_tokens", "Tokens looked for in the cache.", cache.prefix_lookups),
            ("prefix_hit_tokens", "Tokens found in the cache.", cache.prefix_hits),
            ("preemptions", "Requests that lost their cache blocks.", cache.preemptions),
            ("draft_tokens", "Drafts that steps verified.", cache.drafted),
            ("accepted_draft_tokens", "Drafts that became tokens.", cache.accepted),
        ):
            yield CounterMetricFamily(f"layline_{name}", text, value=value)

    def _ends(self) -> Iterable[Metric]:
        finished = CounterMetricFamily(
            "layline_requests_finished", "Requests that ended, by reason.", labels=["reason"]
        )
        counts = self._engine.statistics.finished
        for reason in sorted({*REASONS, *tuple(counts)}):
            finished.add_metric([reason], counts[reason])
        yield finished
        requests = CounterMetricFamily(
            "layline_http_requests",
            "HTTP requests; 499 is a client that left before its answer.",
            labels=["method", "path", "status"],
        )
        for (method, path, status), count in sorted(self._requests().items()):
            requests.add_metric([method, path, str(status)], count)
        yield requests

    def _times(self) -> Iterable[Metric]:
        statistics, times = self._engine.statistics, self._engine.times
        for name, text, histogram in (
            ("time_to_first_token", "from submission to the first token", statistics.first_token),
            ("inter_token", "between two tokens of a request", statistics.inter_token),
            ("request", "from submission to the last token", statistics.request),
            ("step", "one step of the engine", statistics.step),
        ):
            family = HistogramMetricFamily(f"layline_{name}_seconds", f"Seconds {text}.")
            add(family, [], histogram)
            yield family
        parts = HistogramMetricFamily(
            "layline_step_part_seconds", "Seconds of the host in a part of a step.", labels=["part"]
        )
        for part, histogram in times.parts.items():
            add(parts, [part], histogram)
        yield parts
        stages = HistogramMetricFamily(
            "layline_stage_seconds",
            "Seconds of a pipeline stage in a step, where it runs.",
            labels=["stage"],
        )
        for stage, histogram in sorted(times.stages.items()):
            add(stages, [str(stage)], histogram)
        yield stages
        use = times.use
        for name, text, found in (
            ("busy", "in steps.", use.busy),
            ("bubble", "beside steps, while any was under way.", use.bubble),
            ("slot_wait", "with work that waited for another stage.", use.slot_wait),
        ):
            counter = CounterMetricFamily(
                f"layline_stage_{name}_seconds",
                f"Seconds of a pipeline stage {text}",
                labels=["stage"],
            )
            for stage, seconds in sorted(found.items()):
                counter.add_metric([str(stage)], seconds)
            yield counter


def add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    """Add a histogram to its family."""
    rows = histogram.cumulative()
    buckets = [("+Inf" if bound == float("inf") else str(bound), count) for bound, count in rows]
    family.add_metric(labels, buckets=buckets, sum_value=histogram.total)


def torch() -> str:
    """The version of torch that is installed, which is not imported here."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "unknown"


class Metrics:
    """The text of /metrics. It has a registry of its own: two servers share no number."""

    def __init__(self, service: Service, requests: Requests) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(service, requests))

    def text(self) -> bytes:
        """All metrics at this moment."""
        return bytes(generate_latest(self._registry))
