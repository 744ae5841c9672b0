"""scaling: a simulation of many daemons on one PostgreSQL, of failures, and of a tenant that goes to a second ledger.

Two cores cannot run a hundred daemons. The simulation takes the costs that the part `postgres` measured, and adds what
daemons share: the cores of the database, its log, and the way to it. It knows no locks and no cold caches: a database
that is nearly busy is slower than it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from bench.report import Level, Row, Table, fact

NAME: Final = "scaling"
BATCH_MAX: Final = 256
COMMANDS: Final = 2
"""Of a task: the acceptance with its lease, and the result."""
TAKES_NOTHING_AFTER_S: Final = 2.0
RETRY_S, RETRY_MAX_S = 0.5, 8.0
"""A caller that was refused waits so long, then twice as long, up to the longest."""
LATE_MS: Final = 100.0
"""A cluster sustains a rate if 99 of 100 tasks of an agent that takes no time are answered by then."""
CONNECTIONS_A_DAEMON: Final = 10


class Measured(NamedTuple):
    """CPU of a SendMessage at 1 and at 64 connections, as the part `postgres` finds it."""

    daemon_alone_s: float = 0.472e-3
    daemon_many_s: float = 0.122e-3
    database_alone_s: float = 0.404e-3
    database_many_s: float = 0.060e-3
    batch: float = 32.0
    """Commands of a batch at 64 connections."""
    wal_bytes: float = 6_500.0


class Costs(NamedTuple):
    """CPU of a batch of n commands is `batch + n * command`, in the daemon and in the database."""

    daemon_batch_s: float
    daemon_command_s: float
    database_batch_s: float
    database_command_s: float
    wal_bytes: float


def costs_of(measured: Measured) -> Costs:
    """A task alone is two batches of one command; at 64 connections a command has its share of a batch."""
    daemon = _batch_and_command(measured.daemon_alone_s, measured.daemon_many_s, measured.batch)
    database = _batch_and_command(measured.database_alone_s, measured.database_many_s, measured.batch)
    return Costs(*daemon, *database, measured.wal_bytes / COMMANDS)


def _batch_and_command(alone_s: float, many_s: float, batch: float) -> tuple[float, float]:
    batch_s = (alone_s - many_s) / (COMMANDS - COMMANDS / batch)
    return batch_s, alone_s / COMMANDS - batch_s


class Cluster(NamedTuple):
    daemons: int
    cores: int
    """Of the database."""
    sync_s: float = 0.5e-3
    wal_bytes_per_s: float = 500e6
    way_s: float = 0.25e-3
    """From a daemon to the database and back, within one zone."""
    agent_s: float = 0.0
    """The mean of an agent's work. It takes no CPU of a daemon."""


class Fault(NamedTuple):
    at_s: float
    until_s: float
    daemon: int | None = None
    """The daemon that is killed. None: the database is away, as in a failover."""


class Outcome(NamedTuple):
    per_s: float
    p50_ms: float
    p99_ms: float
    longest_ms: float
    daemon_busy: float
    database_busy: float
    log_busy: float
    ended_s: float
    """When the last task had ended."""
    done: int
    held: int
    """Tasks whose daemon was lost while they were leased: what `on_lost` says is done with them."""
    refused: int
    """Requests that no daemon took. Their callers repeat them."""


class _Task(NamedTuple):
    came_s: float
    accepted: bool = False
    tries: int = 0


class Simulation:
    """Tasks arrive by chance at `per_s` until `seconds`, spread evenly over the daemons. All of them are finished."""

    def __init__(
        self, cluster: Cluster, costs: Costs, per_s: float, seconds: float, faults: tuple[Fault, ...] = ()
    ) -> None:
        self._cluster, self._costs, self._seconds, self._faults = cluster, costs, seconds, faults
        self._random = Random(1)
        self._order = count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._waiting: list[list[_Task]] = [[] for _ in range(cluster.daemons)]
        self._writes = [False] * cluster.daemons
        self._free_s = [0.0] * cluster.daemons
        self._runs = [0] * cluster.daemons
        """How often a daemon was killed: what an earlier run of it began is not its own."""
        self._cores_free_s = [0.0] * cluster.cores
        self._log_begins_s = self._log_ends_s = 0.0
        self._daemons_s = self._database_s = self._log_s = 0.0
        self._took_s: list[float] = []
        self.came = 0
        self._held = self._refused = 0
        self._ended_s = 0.0
        for daemon in range(cluster.daemons):
            self._next_arrival(daemon, per_s / cluster.daemons, 0.0)
        for fault in faults:
            if fault.daemon is not None:
                self._at(fault.at_s, partial(self._kill, fault.daemon))

    def run(self) -> Outcome:
        while self._events:
            now_s, _, happens = heappop(self._events)
            happens(now_s)
        took_s, seconds = sorted(self._took_s), max(self._seconds, self._ended_s)
        return Outcome(
            per_s=len(took_s) / seconds,
            p50_ms=took_s[len(took_s) // 2] * 1e3,
            p99_ms=took_s[len(took_s) * 99 // 100] * 1e3,
            longest_ms=took_s[-1] * 1e3,
            daemon_busy=self._daemons_s / seconds / self._cluster.daemons,
            database_busy=self._database_s / seconds / self._cluster.cores,
            log_busy=self._log_s / seconds,
            ended_s=self._ended_s,
            done=len(took_s),
            held=self._held,
            refused=self._refused,
        )

    def _at(self, at_s: float, happens: Callable[[float], None]) -> None:
        heappush(self._events, (at_s, next(self._order), happens))

    # A daemon

    def _next_arrival(self, daemon: int, per_s: float, now_s: float) -> None:
        at_s = now_s + self._random.expovariate(per_s)
        if at_s < self._seconds:
            self._at(at_s, partial(self._arrive, daemon, per_s))

    def _arrive(self, daemon: int, per_s: float, now_s: float) -> None:
        self.came += 1
        self._next_arrival(daemon, per_s, now_s)
        self._ask(daemon, _Task(now_s), now_s)

    def _ask(self, daemon: int, task: _Task, now_s: float) -> None:
        up = [daemon] if self._is_up(daemon, now_s) else self._others(now_s)
        if up and not self._takes_nothing(now_s):
            self._take(self._random.choice(up), task, now_s)
        else:
            self._refused += 1
            later_s = min(RETRY_MAX_S, RETRY_S * 2**task.tries) * (0.5 + self._random.random())
            self._at(now_s + later_s, partial(self._ask, daemon, task._replace(tries=task.tries + 1)))

    def _take(self, daemon: int, task: _Task, now_s: float) -> None:
        ready_s = self._spend(daemon, self._costs.daemon_command_s, now_s)
        self._at(ready_s, partial(self._wait, daemon, self._runs[daemon], task))

    def _spend(self, daemon: int, spent_s: float, now_s: float) -> float:
        self._daemons_s += spent_s
        self._free_s[daemon] = max(now_s, self._free_s[daemon]) + spent_s
        return self._free_s[daemon]

    def _wait(self, daemon: int, run: int, task: _Task, now_s: float) -> None:
        if run != self._runs[daemon]:
            self._orphan(daemon, [task], now_s)
            return
        self._waiting[daemon].append(task)
        if not self._writes[daemon]:
            self._gather(daemon, run, now_s)

    def _gather(self, daemon: int, run: int, now_s: float) -> None:
        """What the daemon already works on is in its next batch too."""
        if run == self._runs[daemon]:
            self._writes[daemon] = True
            self._at(max(now_s, self._free_s[daemon]), partial(self._write, daemon, run))

    def _write(self, daemon: int, run: int, now_s: float) -> None:
        """A daemon has one batch under way: what comes meanwhile is the next one."""
        if run != self._runs[daemon]:
            return
        batch, self._waiting[daemon] = self._waiting[daemon][:BATCH_MAX], self._waiting[daemon][BATCH_MAX:]
        self._writes[daemon] = bool(batch)
        if batch:
            sent_s = self._spend(daemon, self._costs.daemon_batch_s, now_s)
            there_s = max(sent_s + self._cluster.way_s / 2, self._database_back_s(sent_s))
            self._at(there_s, partial(self._execute, daemon, run, batch))

    # The database

    def _execute(self, daemon: int, run: int, batch: list[_Task], now_s: float) -> None:
        spent_s = self._costs.database_batch_s + len(batch) * self._costs.database_command_s
        self._database_s += spent_s
        written_s = max(now_s, heappop(self._cores_free_s)) + spent_s
        heappush(self._cores_free_s, written_s)
        self._at(written_s, partial(self._log, daemon, run, batch))

    def _log(self, daemon: int, run: int, batch: list[_Task], now_s: float) -> None:
        """Whoever commits while the log is being synced shares the next sync with all others that wait for it."""
        if now_s > self._log_begins_s:
            self._log_begins_s = max(now_s, self._log_ends_s)
            self._log_ends_s = self._log_begins_s + self._cluster.sync_s
            self._log_s += self._cluster.sync_s
        bytes_s = len(batch) * self._costs.wal_bytes / self._cluster.wal_bytes_per_s
        self._log_ends_s += bytes_s
        self._log_s += bytes_s
        self._at(self._log_ends_s + self._cluster.way_s / 2, partial(self._commit, daemon, run, batch))

    def _commit(self, daemon: int, run: int, batch: list[_Task], now_s: float) -> None:
        if run != self._runs[daemon]:
            self._orphan(daemon, batch, now_s)
            return
        for task in batch:
            if task.accepted:
                self._took_s.append(now_s - task.came_s)
                self._ended_s = now_s
            else:
                agent_s = self._random.expovariate(1 / self._cluster.agent_s) if self._cluster.agent_s else 0.0
                self._at(now_s + agent_s, partial(self._take_result, daemon, run, task._replace(accepted=True)))
        self._at(now_s, partial(self._gather, daemon, run))

    def _take_result(self, daemon: int, run: int, task: _Task, now_s: float) -> None:
        if run == self._runs[daemon]:
            self._take(daemon, task, now_s)
        else:
            self._held += 1

    # Failures

    def _kill(self, daemon: int, now_s: float) -> None:
        self._runs[daemon] += 1
        self._writes[daemon] = False
        self._free_s[daemon] = now_s
        batch, self._waiting[daemon] = self._waiting[daemon], []
        self._orphan(daemon, batch, now_s)

    def _orphan(self, daemon: int, batch: list[_Task], now_s: float) -> None:
        """An acceptance that nobody was told of is asked for again, under its id. A lease has lost its holder."""
        for task in batch:
            if task.accepted:
                self._held += 1
            else:
                self._at(now_s + RETRY_S, partial(self._ask, daemon, task))

    def _is_up(self, daemon: int, now_s: float) -> bool:
        return not any(one.daemon == daemon and one.at_s <= now_s < one.until_s for one in self._faults)

    def _others(self, now_s: float) -> list[int]:
        return [one for one in range(self._cluster.daemons) if self._is_up(one, now_s)]

    def _takes_nothing(self, now_s: float) -> bool:
        return self._database_back_s(now_s) > 0 and self._database_back_s(now_s - TAKES_NOTHING_AFTER_S) > 0

    def _database_back_s(self, now_s: float) -> float:
        away = [one.until_s for one in self._faults if one.daemon is None and one.at_s <= now_s < one.until_s]
        return max(away, default=0.0)


class Scale(NamedTuple):
    seconds: float
    sizes: tuple[tuple[int, int], ...]
    """Daemons, and cores of their database."""


SCALES: Final[dict[Level, Scale]] = {
    "full": Scale(2.0, ((1, 4), (3, 4), (10, 8), (100, 32))),
    "quick": Scale(0.5, ((1, 4), (3, 4), (10, 8))),
    "smoke": Scale(0.1, ((1, 1), (3, 2))),
}


def run(level: Level, workspace: Path) -> Table:
    del workspace
    scale, costs = SCALES[level], costs_of(Measured())
    rows = [row for daemons, cores in scale.sizes for row in _sustained(Cluster(daemons, cores), costs, scale.seconds)]
    return Table(
        part=NAME,
        title="simulated: tasks of an agent that takes no time, on daemons and a database with cores of their own",
        rows=[*rows, *_failures(costs, scale.seconds), *_move(costs, scale.seconds)],
        notes=[
            f"sustained: 99 of 100 tasks answered within {LATE_MS:g} ms",
            "costs as the part postgres measured them; a sync of 0.5 ms, 500 MB/s of log, 0.25 ms to the database",
        ],
    )


def sustained(cluster: Cluster, costs: Costs, seconds: float) -> Outcome:
    """At the highest rate, within 3 %, at which the cluster is not late."""
    most = cluster.daemons / (COMMANDS * costs.daemon_command_s)
    low, high = most / 64, most
    while high / low > 1.03:
        middle = (low * high) ** 0.5
        if Simulation(cluster, costs, middle, seconds).run().p99_ms <= LATE_MS:
            low = middle
        else:
            high = middle
    return Simulation(cluster, costs, low, seconds).run()


def _sustained(cluster: Cluster, costs: Costs, seconds: float) -> Iterator[Row]:
    found = sustained(cluster, costs, seconds)
    what = f"{cluster.daemons} daemons, {cluster.cores} cores"
    yield fact(f"{what}: sustained", found.per_s, "tasks/s")
    yield fact(f"{what}: p50 at half of it", _at_half(cluster, costs, found, seconds).p50_ms, "ms")
    yield fact(f"{what}: a daemon is busy", found.daemon_busy * 100, "%")
    yield fact(f"{what}: the database is busy", found.database_busy * 100, "%")
    yield fact(f"{what}: its log is busy", found.log_busy * 100, "%")
    yield fact(f"{what}: log", found.per_s * COMMANDS * costs.wal_bytes / 1e6, "MB/s")
    yield fact(f"{what}: connections", cluster.daemons * CONNECTIONS_A_DAEMON)


def _at_half(cluster: Cluster, costs: Costs, found: Outcome, seconds: float) -> Outcome:
    return Simulation(cluster, costs, found.per_s / 2, seconds).run()


def _failures(costs: Costs, seconds: float) -> Iterator[Row]:
    """Three daemons at half of what they sustain: one is killed for good; then the database is away for ten seconds."""
    cluster = Cluster(3, 4)
    half = sustained(cluster, costs, seconds).per_s / 2
    working = cluster._replace(agent_s=seconds / 10)
    killed = Simulation(working, costs, half, seconds, (Fault(seconds / 2, float("inf"), 0),)).run()
    yield fact("3 daemons at half load, one killed: leases that lost their holder", killed.held)
    yield fact("3 daemons at half load, one killed: the others are busy", killed.daemon_busy * 100 * 3 / 2.5, "%")
    away_s = 5 * seconds
    gone = Simulation(cluster, costs, half, 8 * seconds, (Fault(seconds, seconds + away_s),)).run()
    yield fact(f"3 daemons at half load, database away for {away_s:g} s: the longest task", gone.longest_ms, "ms")
    yield fact(f"3 daemons at half load, database away for {away_s:g} s: refused and repeated", gone.refused)


def _move(costs: Costs, seconds: float) -> Iterator[Row]:
    """A tenant with a third of a full ledger's tasks goes to a new one: its open tasks end where they began."""
    cluster = Cluster(3, 4)
    full = sustained(cluster, costs, seconds).per_s * 0.9
    before = Simulation(cluster, costs, full, seconds).run()
    after = Simulation(cluster, costs, full * 2 / 3, seconds).run()
    yield fact("a ledger at 90 %: p99", before.p99_ms, "ms")
    yield fact("a ledger at 90 %, after a third of it went to another: p99", after.p99_ms, "ms")
    agent_s = seconds
    tenant = Simulation(cluster._replace(agent_s=agent_s), costs, full / 3, seconds).run()
    yield fact(
        "that tenant's last open task in the old ledger, in means of its agents' work",
        (tenant.ended_s - seconds) / agent_s,
        "×",
    )
