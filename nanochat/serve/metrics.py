"""What `/metrics` reports, in Prometheus' text format: counts and times, nothing of what any client wrote."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from nanochat.serve.scheduler import Histogram
from nanochat.serve.state import ServerState


class ServerCollector(Collector):
    """Reads the state at each scrape; the scheduler counts by itself. `replica` becomes a label of every sample."""

    def __init__(self, state: ServerState, replica: int | None = None):
        self.state = state
        self.replica = replica
        self.registry = CollectorRegistry()  # one per app: prometheus_client's own registry is global
        self.registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        for metric in self.metrics():
            if self.replica is not None:
                label = {"replica": str(self.replica)}
                metric.samples = [sample._replace(labels={**label, **sample.labels}) for sample in metric.samples]
            yield metric

    def metrics(self) -> Iterator[Metric]:
        responses = dict(self.state.responses)
        errors = sum(count for status, count in responses.items() if status >= 500)
        yield _counts("http_responses", "Responses by status.", "status", responses)
        yield CounterMetricFamily("nanochat_http_errors", "Responses with a status of 500 or more.", errors)
        yield _gauge("ready", "1 when the model is loaded and takes requests.", self.state.is_ready)
        if self.state.model is None:
            return
        stats = self.state.model.scheduler.stats()
        yield _gauge("requests_running", "Requests that hold a slot.", stats.running)
        yield _gauge("requests_queued", "Requests that wait for a slot.", stats.queued)
        yield _gauge("slots", "Requests that can run at once.", stats.slots)
        yield _counts("requests_finished", "Requests by how they ended.", "reason", stats.requests_finished)
        yield CounterMetricFamily("nanochat_tokens_generated", "Tokens generated.", stats.tokens_generated)
        yield CounterMetricFamily("nanochat_tokens_prompt", "Tokens of prompts.", stats.tokens_prompt)
        yield _gauge("cache_used_bytes", "Bytes of the cache that requests use.", stats.cache_used)
        yield _gauge("cache_bytes", "Bytes of the cache.", stats.cache_total)
        first_token = stats.first_token_seconds
        yield _histogram("time_to_first_token_seconds", "From the request to its first token.", first_token)
        yield _histogram("time_per_token_seconds", "Between two tokens of a request.", stats.token_seconds)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"nanochat_{name}", help, value)


def _counts(name: str, help: str, label: str, counts: Mapping[Any, int]) -> Metric:
    """A counter with one sample per label value; Prometheus' format adds `_total` to its name."""
    metric = CounterMetricFamily(f"nanochat_{name}", help, labels=[label])
    for value, count in counts.items():
        metric.add_metric([str(value)], count)
    return metric


def _histogram(name: str, help: str, data: Histogram) -> Metric:
    buckets = []
    total = 0
    for bound, count in zip([*map(str, data.bounds), "+Inf"], data.counts, strict=True):
        total += count
        buckets.append((bound, total))  # Prometheus' buckets count everything below their bound
    return HistogramMetricFamily(f"nanochat_{name}", help, buckets=buckets, sum_value=data.total)
