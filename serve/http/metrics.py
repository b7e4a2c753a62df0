"""Numbers for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})


class Meters:
    """What this process has done."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("malmen_requests", "Requests", ["method", "route", "status"], registry=self.registry)
        self.seconds = Histogram("malmen_request_seconds", "Their duration", ["route"], registry=self.registry)
        self.facts = Counter("malmen_facts", "Facts published", registry=self.registry)
        self.tokens = Counter("malmen_completion_tokens", "Tokens answered", registry=self.registry)
        self.waiting = Gauge("malmen_edits_waiting", "Edits given to the writer", registry=self.registry)
        self.live_facts = Gauge("malmen_live_facts", "Facts in the live version", registry=self.registry)
        self.live_number = Gauge("malmen_live_version_number", "Number of the live version", registry=self.registry)

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """One request. A method may be any word, of anybody: were each kept, the registry would grow without end."""
        self.requests.labels(method if method in METHODS else "other", route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Prometheus's format."""
        return generate_latest(self.registry)
