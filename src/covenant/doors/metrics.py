"""What the doors count and time, and the ledger in numbers, for Prometheus. No label ever names an agent or a task.

A request is timed with one bisection and two additions; the families are only built when somebody reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from covenant.ledger.contract import Counts

BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_LABELS: Final = (*(str(bound) for bound in BOUNDS_S), "+Inf")


class Timer:
    """How long the requests of one operation took, at one door."""

    __slots__ = ("_buckets", "_sum_s")

    def __init__(self) -> None:
        self._buckets = [0] * len(_LABELS)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def cumulated(self) -> tuple[list[tuple[str, float]], float]:
        return list(zip(_LABELS, map(float, accumulate(self._buckets)), strict=True)), self._sum_s


class Meter(Collector):
    def __init__(self) -> None:
        self._timers: dict[tuple[str, str], Timer] = {}
        self._refused: Counter[tuple[str, str]] = Counter()
        self._pushed: Counter[str] = Counter()
        self._counts: Counts | None = None
        self.connections = 0
        """Open connections on the local socket."""
        self._loop_holds = 0
        self._loop_held_s = 0.0
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        for standard in (ProcessCollector, PlatformCollector, GCCollector):
            standard(registry=self._registry)

    def timer(self, door: str, operation: str) -> Timer:
        return self._timers.setdefault((door, operation), Timer())

    def refused(self, door: str, code: str) -> None:
        """`code` is one of ours: a machine code of the error tree, never what a caller sent."""
        self._refused[door, code] += 1

    def pushed(self, outcome: str) -> None:
        """What came of an attempt to deliver a push notification: delivered, failed or dead."""
        self._pushed[outcome] += 1

    def loop_held(self, seconds: float) -> None:
        """The loop was held for so long by one thing. Called by the watchdog's thread, and by no other."""
        self._loop_holds += 1
        self._loop_held_s += seconds

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A number that is read when somebody asks."""
        self._gauges[name] = (text, read)

    def expose(self, counts: Counts) -> bytes:
        """All of it, in Prometheus' text format."""
        self._counts = counts
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._ledger_families()
        requests = HistogramMetricFamily(
            "covenant_request_seconds", "Time to answer a request.", labels=("door", "operation")
        )
        for names, timer in self._timers.items():
            buckets, sum_s = timer.cumulated()
            requests.add_metric(names, buckets, sum_s)
        yield requests
        refused = CounterMetricFamily("covenant_refused", "Requests refused, by code.", labels=("door", "code"))
        for names, count in self._refused.items():
            refused.add_metric(names, count)
        yield refused
        pushed = CounterMetricFamily(
            "covenant_push_attempts",
            "Attempts to deliver a push notification, by what came of them.",
            labels=("outcome",),
        )
        for outcome, count in self._pushed.items():
            pushed.add_metric((outcome,), count)
        yield pushed
        yield GaugeMetricFamily("covenant_ipc_connections", "Open connections on the socket.", self.connections)
        yield CounterMetricFamily("covenant_loop_holds", "Times the loop was held for over 250 ms.", self._loop_holds)
        yield CounterMetricFamily("covenant_loop_held_seconds", "How long, in all.", self._loop_held_s)
        for name, (text, read) in self._gauges.items():
            yield GaugeMetricFamily(name, text, read())

    def _ledger_families(self) -> Iterator[Metric]:
        counts = self._counts
        if counts is None:
            return
        tasks = GaugeMetricFamily("covenant_tasks", "Live tasks, by state.", labels=("state",))
        for state, number in (
            ("queued", counts.queued),
            ("in_flight", counts.leased),
            ("parked", counts.parked),
            ("following", counts.following),
            ("result_pending", counts.settled),
        ):
            tasks.add_metric((state,), number)
        yield tasks
        gauges: tuple[tuple[str, str, float], ...] = (
            ("covenant_queue_depth", "Tasks waiting for a holder.", counts.queued),
            ("covenant_leases", "Tasks that a holder works on.", counts.leased),
            ("covenant_oldest_lease_age_seconds", "Age of the oldest lease.", counts.oldest_lease_age_ms / 1000),
            ("covenant_holders_lost", "Leases whose holder is gone.", counts.holders_lost),
            ("covenant_results_undrained", "Results that wait for their sender.", counts.settled),
            ("covenant_results_cached", "Results kept for idempotent replay.", counts.cached),
            ("covenant_pushes", "Push configurations whose last delivery is to come.", counts.pushes),
            ("covenant_delegations", "Delegations to and from peers that have not ended.", counts.delegations),
            (
                "covenant_delegations_lost",
                "Those whose provider is silent: an operator decides.",
                counts.delegations_lost,
            ),
            ("covenant_parcels", "Messages that wait for a peer.", counts.parcels),
            ("covenant_pushes_dead", "Push configurations that were given up.", counts.pushes_dead),
            ("covenant_archive_lag_records", "Durable records not archived yet.", archive_lag(counts)),
            ("covenant_writer_failed", "1 once the writer has failed.", float(counts.failure is not None)),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(name, text, value)
        yield CounterMetricFamily("covenant_commits", "Records appended to the journal.", counts.last_seq)
        yield CounterMetricFamily("covenant_syncs", "Syncs of the journal since the start.", counts.syncs)


def archive_lag(counts: Counts) -> int:
    return max(0, counts.durable_seq - counts.archived_seq)
