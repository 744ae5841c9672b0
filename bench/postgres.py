"""postgres: the ledger in PostgreSQL, beside the embedded one and beside others on the same PostgreSQL.

One server on the disk of the repository, as it is deployed: it syncs before it acknowledges. Everybody has a database
of its own in it.
"""

from __future__ import annotations

import asyncio
import getpass
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, TypeVar

import asyncpg

from bench import children, machine
from bench.a2a import Server, daemon, first_task, load, peer_server, send
from bench.callers import Round
from bench.claims import Claims
from bench.history_builder import Built
from bench.load import Loaded
from bench.news import Seen
from bench.report import Level, Row, Table, at_least, at_most, fact, ratio
from bench.workload import Measured
from tests.ledger_contract.postgres_server import Server as Database
from tests.ledger_contract.postgres_server import programs

NAME: Final = "postgres"
OURS, EMBEDDED, SDK = "covenant on PostgreSQL", "covenant embedded", "a2a-sdk on PostgreSQL"
PROCRASTINATE, PGMQ = "procrastinate", "SQL as pgmq's"
SENDS: Final[dict[tuple[str, int], float]] = {
    (SDK, 1): 7,
    (SDK, 16): 20,
    (SDK, 64): 35,
    (EMBEDDED, 1): 0.5,
    (EMBEDDED, 16): 0.55,
    (EMBEDDED, 64): 0.55,
}
CYCLES: Final[dict[tuple[str, int], float]] = {
    (PROCRASTINATE, 16): 7,
    (PROCRASTINATE, 64): 14,
    (PGMQ, 16): 0.8,
    (PGMQ, 64): 1.5,
}
CONNECTIONS: Final = (1, 16, 64)
CALLERS: Final = (16, 64)
SEEN_MS: Final = {"listen": (8, 25), "poll": (40, 80)}
BEHIND_RATIO, HELD_RATIO = 1.1, 1.5
SHORT: Final = 1_000
BUILD_S: Final = 600.0
# As docs/postgres.md recommends; the rest is what PostgreSQL comes with.
OPTIONS: Final = (
    "listen_addresses=",
    "max_connections=300",
    "deadlock_timeout=50ms",
    "shared_buffers=256MB",
    "max_wal_size=4GB",
)

T = TypeVar("T")


class Scale(NamedTuple):
    rounds: int
    seconds: float
    steps: int
    behind: int
    """Finished tasks behind a task whose cost in the database is measured."""
    a2a_tasks: int
    """The tasks of each such measurement."""
    held: int
    """Cycles while a snapshot is held, before the claims are measured."""
    peers: bool = True


SCALES: Final[dict[Level, Scale]] = {
    "full": Scale(5, 2.0, 300, 1_000_000, 10_000, 60_000),
    "quick": Scale(1, 1.0, 100, 20_000, 2_000, 4_000),
    "smoke": Scale(1, 0.5, 3, 200, 100, 100, peers=False),
}


def run(level: Level, workspace: Path) -> Table:
    scale = SCALES[level]
    # A test's folder is closed to the user that the server runs as; and nothing is measured there.
    with _database(None if level == "smoke" else workspace) as database:
        rows = [
            *_sends(scale, workspace, database),
            *_cycles(scale, database),
            *_seen(scale, database),
            *_behind(scale, database),
            *_held(scale, database),
        ]
    return Table(
        part=NAME,
        title="the ledger in PostgreSQL on the same machine, everything synced before it is acknowledged",
        rows=rows,
        notes=[
            f"medians of {scale.rounds} interleaved rounds of {scale.seconds:g} s",
            f"the {scale.behind:,} finished tasks are copies of {SHORT:,}, made by SQL, each with an id of its own",
            "procrastinate: defer, run by its worker, finish; pgmq: send, read, archive; ours: four, with history",
        ],
    )


@contextmanager
def _database(workspace: Path | None) -> Iterator[Database]:
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir=workspace))
    for each in folder.parents if workspace is not None else ():
        if each.owner() == getpass.getuser():
            each.chmod(each.stat().st_mode | 0o011)  # whoever runs the server must come through
    database = Database(folder, programs(), OPTIONS)
    try:
        database.prepare()
        database.start()
        yield database
    finally:
        database.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _new(database: Database, name: str, template: str = "template0") -> str:
    _execute(database.url("postgres"), f"CREATE DATABASE {name} TEMPLATE {template}")
    return database.url(name)


def _execute(url: str, *texts: str) -> None:
    async def execute(connection: asyncpg.Connection[Any]) -> None:
        for text in texts:
            await connection.execute(text)

    _connected(url, execute)


def _connected(url: str, use: Callable[[asyncpg.Connection[Any]], Awaitable[T]]) -> T:
    async def connected() -> T:
        connection = await asyncpg.connect(url)
        try:
            return await use(connection)
        finally:
            await connection.close()

    return asyncio.run(connected())


# SendMessage


def _sends(scale: Scale, workspace: Path, database: Database) -> Iterator[Row]:
    found: dict[tuple[str, int], list[Loaded]] = {}
    database_cpu_us: dict[int, list[float]] = {}
    with ExitStack() as stack:
        url = _new(database, "ours")
        servers = {
            OURS: stack.enter_context(daemon(workspace, "p", "--ledger", url)),
            EMBEDDED: stack.enter_context(daemon(workspace, "e")),
        }
        if scale.peers:
            where = _new(database, "sdk").replace("postgres://", "postgresql+asyncpg://")
            servers[SDK] = stack.enter_context(peer_server("a2a_sdk_peer", workspace, where))
        for server in servers.values():
            first_task(server)
        for round_no in range(scale.rounds):
            for connections in CONNECTIONS:
                for name, server in servers.items():
                    cpu_s = machine.cpu_s(database.pid)
                    loaded = _send(server, connections, scale.seconds, round_no)
                    found.setdefault((name, connections), []).append(loaded)
                    if name == OURS:
                        spent_us = (machine.cpu_s(database.pid) - cpu_s) / max(1, loaded.requests) * 1e6
                        database_cpu_us.setdefault(connections, []).append(spent_us)
    for connections in CONNECTIONS:
        rates = {name: median(one.per_s for one in found[name, connections]) for name in servers}
        what = f"SendMessage, {connections} at once"
        yield from _rates(what, rates, {name: SENDS[name, connections] for name in rates if name != OURS})
        mine = found[OURS, connections]
        yield fact(f"{what}: CPU of the daemon", median(one.cpu_us for one in mine), "µs")
        yield fact(f"{what}: CPU of the database", median(database_cpu_us[connections]), "µs")


def _send(server: Server, connections: int, seconds: float, round_no: int) -> Loaded:
    body = send("SendMessage", "hello world")
    return load(server, server.echo, body, connections, seconds=seconds, round_no=round_no)


def _rates(what: str, rates: Mapping[str, float], targets: Mapping[str, float], unit: str = "/s") -> Iterator[Row]:
    for name, rate in rates.items():
        yield fact(f"{what}: {name}", rate, unit)
    for name, target in targets.items():
        yield at_least(f"{what}: ours / {name}", ratio(rates[OURS], rates[name]), target, "×")


# Mailbox


def _cycles(scale: Scale, database: Database) -> Iterator[Row]:
    peers = {PROCRASTINATE: "procrastinate_peer", PGMQ: "pgmq_peer"} if scale.peers else {}
    urls = {name: _new(database, f"cycles_{number}") for number, name in enumerate((OURS, *peers))}
    for callers in CALLERS:
        found: dict[str, list[Measured]] = {name: [] for name in urls}
        for _ in range(scale.rounds):
            for name, url in urls.items():
                if name == OURS:
                    measured = _callers(url, callers, float(scale.seconds))
                else:
                    # They know only the URLs that libpq knows.
                    measured = children.peer(peers[name], Measured, url, callers, float(scale.seconds), timeout_s=60.0)
                found[name].append(measured)
        rates = {name: median(one.per_s for one in rounds) for name, rounds in found.items()}
        what = f"mailbox cycle, {callers} callers"
        yield from _rates(what, rates, {name: CYCLES[name, callers] for name in peers})
        yield fact(f"{what}: CPU of the process", median(one.cpu_us for one in found[OURS]), "µs")


def _callers(url: str, callers: int, extent: float) -> Measured:
    return children.ours("callers", Round, url, callers, extent, timeout_s=120.0).measured


# Another node


def _seen(scale: Scale, database: Database) -> Iterator[Row]:
    for mode, (p50_ms, p99_ms) in SEEN_MS.items():
        url = _new(database, f"seen_{mode}")
        seen = children.ours("news", Seen, url, mode, scale.steps, timeout_s=120.0)
        yield at_most(f"a step seen on another node, by {mode}ing: p50", seen.p50_ms, p50_ms, "ms")
        yield at_most(f"a step seen on another node, by {mode}ing: p99", seen.p99_ms, p99_ms, "ms")


# Much behind


def _behind(scale: Scale, database: Database) -> Iterator[Row]:
    short = _new(database, "short")
    _run_a2a_tasks(short, SHORT)
    long = _new(database, "long", "short")
    _multiply(long, scale.behind)
    yield from _written(short, scale.a2a_tasks)
    spent_us: dict[str, list[float]] = {short: [], long: []}
    for _ in range(scale.rounds):
        for url, spent in spent_us.items():
            cpu_s = machine.cpu_s(database.pid)
            _run_a2a_tasks(url, scale.a2a_tasks)
            spent.append((machine.cpu_s(database.pid) - cpu_s) / scale.a2a_tasks * 1e6)
    few, many = median(spent_us[short]), median(spent_us[long])
    yield fact(f"CPU of the database, an A2A task with {SHORT:,} behind it", few, "µs")
    yield fact(f"CPU of the database, an A2A task with {scale.behind:,} behind it", many, "µs")
    yield at_most("an A2A task: ratio", many / few, BEHIND_RATIO, "×")


def _written(url: str, count: int) -> Iterator[Row]:
    """What a task writes to the log of the database, and what is kept of it."""

    async def look(connection: asyncpg.Connection[Any]) -> tuple[int, int]:
        await connection.execute("VACUUM")
        await connection.execute("CHECKPOINT")
        row = await connection.fetchrow(
            "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint, pg_database_size(current_database())"
        )
        assert row is not None
        return row[0], row[1]

    wal_before, kept_before = _connected(url, look)
    _run_a2a_tasks(url, count)
    wal_after, kept_after = _connected(url, look)
    yield fact("WAL of an A2A task, after a checkpoint", (wal_after - wal_before) / count, "bytes")
    yield fact("kept of an A2A task, with its indexes", (kept_after - kept_before) / count, "bytes")


def _run_a2a_tasks(url: str, count: int) -> None:
    children.ours("history_builder", Built, url, "a2a", count, 0, timeout_s=BUILD_S)


COPIES: Final = {
    "ids": {"task_id": "md5(o.task_id || k.k)::uuid::text", "no": "o.no + k.k * :span"},
    "tasks": {"task_id": "md5(o.task_id || k.k)::uuid::text", "no": "o.no + k.k * :span"},
    "events": {"no": "o.no + k.k * :span"},
}
"""What differs in a copy; everything else is as it was."""
SPAN: Final = 1_000_000
"""Numbers of one copy: no two have one in common."""


def _multiply(url: str, count: int) -> None:
    async def multiply(connection: asyncpg.Connection[Any]) -> None:
        there: int = await connection.fetchval("SELECT count(*) FROM tasks")
        copies = max(0, count // there - 1)
        for table, changed in COPIES.items():
            columns = await connection.fetch(
                "SELECT column_name FROM information_schema.columns WHERE table_name = $1 ORDER BY ordinal_position",
                table,
            )
            names = [row["column_name"] for row in columns]
            values = [changed.get(name, f"o.{name}").replace(":span", str(SPAN)) for name in names]
            await connection.execute(
                f"INSERT INTO {table} ({', '.join(names)}) "
                f"SELECT {', '.join(values)} FROM generate_series(1, {copies}) AS k (k) CROSS JOIN {table} AS o"
            )
        await connection.execute(f"SELECT setval('task_numbers', {(copies + 2) * SPAN})")
        await connection.execute("VACUUM ANALYZE")
        await connection.execute("CHECKPOINT")

    _connected(url, multiply)


# A snapshot that somebody holds


def _held(scale: Scale, database: Database) -> Iterator[Row]:
    url = _new(database, "held")
    claims = children.ours("claims", Claims, url, scale.held, timeout_s=BUILD_S)
    yield fact("a claim", claims.free_ms, "ms")
    yield fact(f"a claim while a snapshot is held, after {scale.held:,} cycles", claims.held_ms, "ms")
    yield at_most("a claim: ratio", claims.held_ms / claims.free_ms, HELD_RATIO, "×")
