"""Counts and timings of the doors, and numbers of the ledger, for Prometheus. No label names a task; agents are named
only to callers with a token, and only a bounded number of them.

The numbers are copied on the event loop (`Meter.read`, some microseconds) and formatted elsewhere (`Numbers.text`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest

from covenant.ledger.contract.ledger import Counts
from covenant.ledger.machine.states import State
from covenant.model.model_prices import ModelCall, ToolCall

BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
MODEL_BOUNDS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
MODEL_PAIRS_MAX: Final = 100
"""The most pairs of an agent and a model with numbers of their own; the calls of all others are counted together."""
TOOL_PAIRS_MAX: Final = 300
"""The same for pairs of an agent and a tool."""
OTHERS: Final = "other"
LIVE: Final = (State.QUEUED, State.LEASED, State.PARKED, State.FOLLOWING, State.SETTLED)
_LEDGER_METRICS: Final[tuple[tuple[str, str, Callable[[Counts], float]], ...]] = (
    ("covenant_queue_depth", "Tasks waiting for a holder.", lambda counts: counts.queued),
    ("covenant_leases", "Tasks that a holder works on.", lambda counts: counts.leased),
    (
        "covenant_oldest_lease_age_seconds",
        "Age of the oldest lease.",
        lambda counts: counts.oldest_lease_age_ms / 1000,
    ),
    ("covenant_holders_lost", "Leases whose holder is gone.", lambda counts: counts.holders_lost),
    ("covenant_results_undrained", "Results that wait for their sender.", lambda counts: counts.settled),
    ("covenant_results_cached", "Results kept for idempotent replay.", lambda counts: counts.cached),
    ("covenant_pushes", "Push configurations that are still to be delivered.", lambda counts: counts.pushes),
    ("covenant_delegations", "Delegations to and from peers that have not ended.", lambda counts: counts.delegations),
    (
        "covenant_delegations_lost",
        "Delegations whose provider is silent: an operator decides.",
        lambda counts: counts.delegations_lost,
    ),
    ("covenant_peer_outbox", "Messages that wait for a peer.", lambda counts: counts.peer_outbox),
    ("covenant_pushes_dead", "Push configurations that were given up.", lambda counts: counts.pushes_dead),
    ("covenant_archive_lag_records", "Durable records not archived yet.", lambda counts: counts.behind),
    (
        "covenant_clock_paused",
        "1 while nothing is expired, timed out or retried, since the wall clock was set.",
        lambda counts: counts.clock_paused_ms > 0,
    ),
    ("covenant_archive_failed", "1 while the archive cannot be written.", lambda counts: bool(counts.history_failure)),
    ("covenant_archive_set_aside_records", "Records that the archive could not apply.", lambda counts: counts.rejected),
    ("covenant_writer_failed", "1 once the writer has failed.", lambda counts: counts.failure is not None),
    ("covenant_commits_total", "Records appended to the journal.", lambda counts: counts.commits),
    ("covenant_clock_steps_total", "Steps of the wall clock that were seen.", lambda counts: counts.clock_steps),
)
_ENGINE_GAUGES: Final[Mapping[str, tuple[str, str]]] = {
    "syncs": ("covenant_syncs_total", "Syncs of the journal since the start."),
    "nodes": ("covenant_nodes", "Daemons that serve this ledger."),
    "batches": ("covenant_batches_total", "Batches that this daemon's name has written to the database."),
    "batches_fast": ("covenant_batches_fast_total", "Batches written in one statement, since the start."),
    "conflicts": ("covenant_batch_conflicts_total", "Batches that were decided again, as another daemon was faster."),
    "news_age_ms": ("covenant_news_age_ms", "Milliseconds since this daemon last read the other daemons' writes."),
    "registers_behind": ("covenant_registers_behind", "Changes of registers that the slowest living daemon lacks."),
    "rows_dead": ("covenant_database_dead_rows", "Dead rows of the ledger's tables, as the database counts them."),
    "connections": ("covenant_database_connections", "Connections to the database, of all programs."),
    "connections_max": ("covenant_database_connections_max", "Connections that the database allows."),
}
"""Metrics that only one of the ledger's engines has, by their names in `Counts.gauges`."""


class Timer:
    """The durations of one operation's requests at one door."""

    __slots__ = ("_bounds_s", "_buckets", "_sum_s")

    def __init__(self, bounds_s: Sequence[float] = BOUNDS_S) -> None:
        self._bounds_s = bounds_s
        self._buckets = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._buckets[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def read(self) -> Durations | None:
        """The durations so far; None if there are none yet."""
        return Durations(tuple(self._buckets), self._sum_s, self._bounds_s) if any(self._buckets) else None


class Durations(NamedTuple):
    buckets: tuple[int, ...]
    sum_s: float
    bounds_s: Sequence[float] = BOUNDS_S


class CallNumbers(NamedTuple):
    """The numbers of one agent's calls of one model; or of its uses of one tool, without tokens and costs."""

    labels: Mapping[str, str]
    outcomes: Mapping[str, int]
    durations: Durations
    tokens: Mapping[str, int]
    costs: Mapping[str, float]
    """Costs by currency."""


class _CallCounter:
    """Counts the calls of one model, or the uses of one tool, by one agent."""

    __slots__ = ("costs", "outcomes", "timer", "tokens")

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.costs: dict[str, float] = {}
        self.timer = Timer(MODEL_BOUNDS_S)

    def add(self, call: ModelCall | ToolCall) -> None:
        self.outcomes[call.outcome] += 1
        self.timer.observe(call.seconds)
        if isinstance(call, ModelCall):
            self.tokens.update(input=call.tokens.input, output=call.tokens.output)
            if call.cost is not None:
                self.costs[call.currency] = self.costs.get(call.currency, 0.0) + call.cost


_Counters = dict[tuple[str, str], _CallCounter]
"""By the agent, and the name of the model or of the tool."""


class PeerNumbers(NamedTuple):
    """Today's delegations and tokens between one peer and this daemon, in UTC. `role` is this daemon's."""

    peer: str
    role: str
    outcomes: Mapping[str, int]
    tokens: int


class Numbers(NamedTuple):
    """A snapshot of all numbers; any thread may format it."""

    counts: Counts
    durations: Mapping[tuple[str, str], Durations]
    refused: Mapping[tuple[str, str], int]
    pushed: Mapping[str, int]
    connections: int
    loop_holds: int
    loop_held_s: float
    gauges: Mapping[str, tuple[str, float]]
    queues: Sequence[tuple[str, int, float]]
    """Each recipient, how many tasks wait for it, and the age of the oldest in seconds."""
    peers: Sequence[PeerNumbers]
    models: Sequence[CallNumbers]
    tools: Sequence[CallNumbers]
    standard: CollectorRegistry

    def text(self) -> bytes:
        """All numbers in Prometheus' text format, with its library's numbers of the process."""
        return "".join(self._lines()).encode() + generate_latest(self.standard)

    def _lines(self) -> Iterator[str]:
        counts = self.counts
        yield _header("covenant_tasks", "gauge", "Live tasks, by state.")
        for state in LIVE:
            yield _sample("covenant_tasks", getattr(counts, state.value), {"state": state.wire_name})
        for name, text, read in _LEDGER_METRICS:
            yield from _metric(name, text, read(counts))
        for gauge, (name, text) in _ENGINE_GAUGES.items():
            if gauge in counts.gauges:
                yield from _metric(name, text, counts.gauges[gauge])
        yield _header("covenant_request_seconds", "histogram", "Time to answer a request.")
        for (door, operation), durations in self.durations.items():
            yield from _histogram("covenant_request_seconds", {"door": door, "operation": operation}, durations)
        yield _header("covenant_refused_total", "counter", "Requests refused, by code.")
        for (door, code), count in self.refused.items():
            yield _sample("covenant_refused_total", count, {"door": door, "code": code})
        outcomes = "Attempts to deliver a push notification, by outcome."
        yield from _counters("covenant_push_attempts_total", outcomes, "outcome", [({}, self.pushed)])
        yield from _metric("covenant_ipc_connections", "Open connections on the socket.", self.connections)
        yield from _metric("covenant_loop_holds_total", "Times the loop was held for over 250 ms.", self.loop_holds)
        yield from _metric("covenant_loop_held_seconds_total", "Seconds of holds in total.", self.loop_held_s)
        for name, (text, value) in self.gauges.items():
            yield from _metric(name, text, value)
        if self.queues:
            yield _header(
                "covenant_recipient_queue_depth", "gauge", "Tasks waiting, of the longest queues by recipient."
            )
            for agent, depth, _ in self.queues:
                yield _sample("covenant_recipient_queue_depth", depth, {"agent": agent})
            yield _header("covenant_recipient_oldest_queued_age_seconds", "gauge", "Age of the oldest task in each.")
            for agent, _, age_s in self.queues:
                yield _sample("covenant_recipient_oldest_queued_age_seconds", age_s, {"agent": agent})
        if self.peers:
            yield from self._of_peers()
        if self.models:
            yield from self._of_models()
        if self.tools:
            counted, timed = "Uses of tools by models, by outcome.", "Time of a use of a tool."
            yield from _calls("covenant_tool_call", counted, timed, self.tools)

    def _of_peers(self) -> Iterator[str]:
        yield _header(
            "covenant_peer_delegations_today", "gauge", "Delegations of the busiest peers since midnight in UTC."
        )
        for peer, role, outcomes, _ in self.peers:
            for outcome, count in outcomes.items():
                labels = {"peer": _escaped(peer), "role": role, "outcome": outcome}
                yield _sample("covenant_peer_delegations_today", count, labels)
        yield _header("covenant_peer_tokens_today", "gauge", "Tokens of those delegations.")
        for peer, role, _, tokens in self.peers:
            yield _sample("covenant_peer_tokens_today", tokens, {"peer": _escaped(peer), "role": role})

    def _of_models(self) -> Iterator[str]:
        counted, timed = "Calls of language models, by outcome.", "Time from a request to a model to its last token."
        yield from _calls("covenant_model_request", counted, timed, self.models)
        tokens = [(each.labels, each.tokens) for each in self.models]
        yield from _counters("covenant_model_tokens_total", "Tokens that models have used.", "type", tokens)
        costs = [(each.labels, each.costs) for each in self.models]
        cost = "Cost of language models, by model_prices.json."
        yield from _counters("covenant_model_cost_total", cost, "currency", costs)


class Meter:
    def __init__(self) -> None:
        self._timers: dict[tuple[str, str], Timer] = {}
        self._refused: Counter[tuple[str, str]] = Counter()
        self._pushed: Counter[str] = Counter()
        self._models: _Counters = {}
        self._tools: _Counters = {}
        self.connections = 0
        """Open connections on the local socket."""
        self._loop_holds = 0
        self._loop_held_s = 0.0
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self._standard = CollectorRegistry()
        for standard in (ProcessCollector, PlatformCollector, GCCollector):
            standard(registry=self._standard)

    def timer(self, door: str, operation: str) -> Timer:
        return self._timers.setdefault((door, operation), Timer())

    def refused(self, door: str, code: str) -> None:
        """`code` is a machine code of the error tree, never a caller's text."""
        self._refused[door, code] += 1

    def pushed(self, outcome: str) -> None:
        """Counts the outcome of one attempt to deliver a push notification: delivered, failed or dead."""
        self._pushed[outcome] += 1

    def model_called(self, call: ModelCall) -> None:
        _count(call, (call.agent, call.model), self._models, MODEL_PAIRS_MAX)

    def tool_called(self, call: ToolCall) -> None:
        _count(call, (call.agent, call.tool), self._tools, TOOL_PAIRS_MAX)

    def loop_held(self, seconds: float) -> None:
        """Counts one hold of the event loop. Called by the watchdog's thread only."""
        self._loop_holds += 1
        self._loop_held_s += seconds

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Registers a number that is read on demand."""
        self._gauges[name] = (text, read)

    def read(
        self,
        counts: Counts,
        queues: Sequence[tuple[str, int, float]] = (),
        peers: Sequence[PeerNumbers] = (),
        *,
        models: bool = False,
    ) -> Numbers:
        """Takes a snapshot, on the event loop. `models` adds the calls of models and tools, which name agents."""
        durations = ((names, timer.read()) for names, timer in self._timers.items())
        return Numbers(
            counts=counts,
            durations={names: each for names, each in durations if each is not None},
            refused=dict(self._refused),
            pushed=dict(self._pushed),
            connections=self.connections,
            loop_holds=self._loop_holds,
            loop_held_s=self._loop_held_s,
            gauges={name: (text, read()) for name, (text, read) in self._gauges.items()},
            queues=queues,
            peers=peers,
            models=tuple(_read("model", self._models)) if models else (),
            tools=tuple(_read("tool", self._tools)) if models else (),
            standard=self._standard,
        )


def _count(call: ModelCall | ToolCall, names: tuple[str, str], counters: _Counters, pairs_max: int) -> None:
    """Counts a call under these names; under those of "other" once `pairs_max` pairs are known."""
    known = names if names in counters or len(counters) < pairs_max else (OTHERS, OTHERS)
    counters.setdefault(known, _CallCounter()).add(call)


def _read(label: str, counters: _Counters) -> Iterator[CallNumbers]:
    for (agent, name), counter in counters.items():
        durations = counter.timer.read()
        if durations is not None:
            labels = {"agent": _escaped(agent), label: _escaped(name)}
            yield CallNumbers(labels, dict(counter.outcomes), durations, dict(counter.tokens), dict(counter.costs))


def _header(name: str, kind: str, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def _metric(name: str, text: str, value: float) -> Iterable[str]:
    return _header(name, "counter" if name.endswith("_total") else "gauge", text), _sample(name, value)


def _sample(name: str, value: float, labels: Mapping[str, str] | None = None) -> str:
    return f"{name}{{{_labels(labels)}}} {float(value)!r}\n" if labels else f"{name} {float(value)!r}\n"


def _counters(
    name: str, text: str, label: str, numbers: Iterable[tuple[Mapping[str, str], Mapping[str, float]]]
) -> Iterator[str]:
    """A metric that has a further label; `numbers` have the others, and the counts by the value of this one."""
    yield _header(name, "counter", text)
    for labels, counts in numbers:
        for value, count in counts.items():
            yield _sample(name, count, {**labels, label: value})


def _calls(name: str, counted: str, timed: str, calls: Sequence[CallNumbers]) -> Iterator[str]:
    yield from _counters(f"{name}s_total", counted, "outcome", [(each.labels, each.outcomes) for each in calls])
    yield _header(f"{name}_seconds", "histogram", timed)
    for each in calls:
        yield from _histogram(f"{name}_seconds", each.labels, each.durations)


def _labels(labels: Mapping[str, str]) -> str:
    # Most values are names of our own (doors, operations, codes, states) or displays, which need no escaping. Names
    # that somebody else chose come `_escaped`.
    return ",".join(f'{label}="{value}"' for label, value in labels.items())


def _escaped(name: str) -> str:
    """Escapes a name that somebody else chose, for a label."""
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _histogram(name: str, labels: Mapping[str, str], durations: Durations) -> Iterator[str]:
    written, count = _labels(labels), 0
    bounds = (*map(str, durations.bounds_s), "+Inf")
    for bound, count in zip(bounds, accumulate(durations.buckets), strict=True):
        yield f'{name}_bucket{{{written},le="{bound}"}} {float(count)!r}\n'
    yield f"{name}_count{{{written}}} {float(count)!r}\n"
    yield f"{name}_sum{{{written}}} {durations.sum_s!r}\n"
