"""The metrics of `/metrics` for Prometheus: counts and times, never the text of clients."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds


class SchedulerMetrics:
    """The metrics of a scheduler; the metrics of the server are in state.py."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()  # one per scheduler, because prometheus_client's default registry is global
        options: dict[str, Any] = {"namespace": "nanochat", "registry": self.registry}
        self.running = Gauge("requests_running", "Requests that hold a slot.", **options)
        self.queued = Gauge("requests_queued", "Requests that wait for a slot.", **options)
        self.slots = Gauge("slots", "Requests that can run at once.", **options)
        self.finished = Counter("requests_finished", "Requests by how they ended.", ["reason"], **options)
        self.tokens_generated = Counter("tokens_generated", "Tokens generated.", **options)
        self.tokens_prompt = Counter("tokens_prompt", "Tokens of prompts.", **options)
        options["buckets"] = BUCKETS
        self.first_token = Histogram("time_to_first_token_seconds", "From the request to its first token.", **options)
        self.per_token = Histogram("time_per_token_seconds", "Between two tokens of a request.", **options)
