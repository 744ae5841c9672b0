"""A home goes into a database and comes out again with everything that it held; a move that is cut off is finished."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from threading import Thread
from typing import Any

import asyncpg
import msgspec
import pytest

from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import QueueQuery
from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.blob_folder import BlobFolder
from covenant.ledger.embedded.fault_points import MOVE_POINTS
from covenant.ledger.embedded.moved_mark import read_mark
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.ledger.postgres.database_admin import migrate_database
from covenant.ledger.postgres.migrations import WrongSchema
from covenant.ledger.postgres.open_postgres import DatabaseUnusable, open_blob_rows, open_postgres_ledger
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.ledger.transfer.database_contents import MOVED, NOT_MOVED
from covenant.ledger.transfer.ledger_move import CannotMove, Mover
from covenant.model.errors import HomeLocked, HomeUnusable, Unavailable
from covenant.model.ids import TaskId
from tests.daemon.home_history import LIMITS, HomeHistory, fill_home
from tests.ledger_contract import fault_plans
from tests.ledger_contract.blobs import QUOTA
from tests.ledger_contract.postgres_server import Databases, at
from tests.ledger_contract.samples import OPERATOR
from tests.ledger_contract.transaction_pooler import pooler_before
from tests.matrices import first_of
from tests.waits import BOUND_S

SPACE = "0" * 32
FILE = b"some bytes" * 40_000


@pytest.fixture
async def url(databases: Databases) -> AsyncIterator[str]:
    url = await databases.borrow()
    yield url
    await databases.give_back(url)


@pytest.fixture(params=first_of((True, False)), ids=("compacted", "journal"))
async def history(tmp_path: Path, request: pytest.FixtureRequest) -> HomeHistory:
    history = HomeHistory(tmp_path)
    await fill_home(history, compacted=request.param)
    store = BlobFolder(history.home / "blobs", uuid_source())
    writer = await store.writer(SPACE, QUOTA)
    await writer.write(FILE)
    await writer.finish(next(iter(history.tasks)))
    return history


def mover(history: HomeHistory, url: str, home: Path | None = None) -> Mover:
    how: dict[str, Any] = {"now_ms": history.clock, "new_id": uuid_source(), "by": OPERATOR, "durability": "os"}
    return Mover(home or history.home, url, LIMITS, **how)


async def on_postgres(history: HomeHistory, url: str, node: str = "n") -> Ledger:
    return await open_postgres_ledger(url, clock=history.clock, limits=LIMITS, durability="os", node=node)


async def told(ledger: Ledger, tasks: list[TaskId]) -> dict[str, Any]:
    """Everything that somebody can ask for."""
    counts = await ledger.counts()
    known: dict[str, Any] = {
        "tasks": [await ledger.show(task_id, None, 100) for task_id in tasks],
        "steps": [await ledger.steps(task_id, 0, 100) for task_id in tasks],
        "pushes": [await ledger.pushes(task_id) for task_id in tasks],
        "parties": [await ledger.parties(task_id) for task_id in tasks],
        "trees": [await ledger.tree(task_id, None) for task_id in tasks],
        "queue": await ledger.queue(QueueQuery()),
        "results": await ledger.recent_results(None, 100),
        "identities": sorted(await ledger.identities(), key=lambda each: each.token_sha256),
        "grants": sorted(await ledger.grants(), key=lambda each: each.signature_b58),
        "tenants": sorted(await ledger.tenants(), key=lambda each: each.name),
        "agents": ledger.agents("acme"),
        "peers": ledger.peers(),
        "delegations": await ledger.delegations(),
        "parcels": [await ledger.peer_outbox(peer.id) for peer in ledger.peers()],
        "messages": await ledger.message_log(),
        "usage": await ledger.peer_usage(0),
        "outbox": sorted(await ledger.outbox(), key=lambda each: (each.task_id, each.id)),
        "counts": (counts.queued, counts.leased, counts.parked, counts.following, counts.settled, counts.holders_lost),
    }
    values: dict[str, Any] = msgspec.to_builtins(known)
    return values


async def audit_of(ledger: Ledger) -> list[Any]:
    report = await ledger.audit_verify()
    assert report.valid, report.failures
    return [each.row for each in await ledger.audit_recent(None, 10_000, None)]


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        assert found[name] == value, name


async def test_a_home_goes_into_a_database_and_out_again_with_all_that_it_held(
    history: HomeHistory, url: str, tmp_path: Path
) -> None:
    tasks = list(history.tasks)
    ledger = await open_ledger(history.copy("before"), clock=history.clock, limits=LIMITS, boot="later", node="here")
    before, rows = await told(ledger, tasks), await audit_of(ledger)
    await ledger.close()
    moved = await mover(history, url).move_in()
    assert moved["task"].count >= len(tasks)
    assert moved["blob"].count == 1
    shared = await on_postgres(history, url)
    same(await told(shared, tasks), before)
    in_database = await audit_of(shared)
    assert in_database[: len(rows)] == rows
    await shared.commit(WriteAuditRow(by=OPERATOR, row={"type": "noted there"}))
    await shared.close()
    blobs = await open_blob_rows(url)
    (blob,) = await blobs.listing(SPACE, "", 10)
    assert b"".join([data async for data in blobs.read(SPACE, blob.sha256, 0, blob.size)]) == FILE
    await blobs.close()
    home = tmp_path / "back"
    home.mkdir(mode=0o700)
    back = await mover(history, url, home).move_out()
    assert {kind: each for kind, each in back.items() if kind != "audit"} == {
        kind: each for kind, each in moved.items() if kind != "audit"
    }
    ledger = await open_ledger(home, clock=history.clock, limits=LIMITS, boot="even later", node="here")
    same(await told(ledger, tasks), before)
    assert [row for row in await audit_of(ledger) if "ledger_moved" not in row] == [
        *rows,
        *[row for row in in_database[len(rows) :] if "ledger_moved" not in row],
        *[row for row in await audit_of(ledger) if "noted there" in row],
    ]
    await ledger.close()
    (stored,) = await BlobFolder(home / "blobs", uuid_source()).listing(SPACE, "", 10)
    assert (stored.sha256, stored.tasks) == (blob.sha256, blob.tasks)
    with pytest.raises(Unavailable, match="moved out of the database"):
        await on_postgres(history, url)


async def test_the_same_home_can_take_its_ledger_back(history: HomeHistory, url: str) -> None:
    tasks = list(history.tasks)
    await mover(history, url).move_in()
    with pytest.raises(HomeUnusable, match="its ledger is in postgres://"):
        await open_ledger(history.home, clock=history.clock)
    with pytest.raises(CannotMove, match="already"):
        await mover(history, url).move_in()
    shared = await on_postgres(history, url)
    before = await told(shared, tasks)
    await shared.close()
    await mover(history, url).move_out()
    assert (history.home / "moved-1" / "journal").is_dir(), "the old files are kept"
    ledger = await open_ledger(history.home, clock=history.clock, limits=LIMITS, node="here", boot="later")
    same(await told(ledger, tasks), before)
    await ledger.close()


async def test_a_moved_ledger_counts_on_so_that_no_peer_takes_it_for_an_older_copy(
    history: HomeHistory, url: str
) -> None:
    ledger = await open_ledger(history.home, clock=history.clock, limits=LIMITS)
    await ledger.durable()
    in_home = ledger.durable_seq
    await ledger.close()
    await mover(history, url).move_in()
    shared = await on_postgres(history, url)
    assert isinstance(shared, PostgresLedger)
    await shared.commit(WriteAuditRow(by=OPERATOR, row={"type": "noted there"}))
    in_database = shared.committed_batches()
    await shared.close()
    assert in_database > in_home
    await mover(history, url).move_out()
    ledger = await open_ledger(history.home, clock=history.clock, limits=LIMITS)
    assert ledger.durable_seq >= in_database
    await ledger.close()


async def test_a_move_is_refused_while_somebody_serves_or_the_target_is_not_empty(
    history: HomeHistory, url: str, tmp_path: Path
) -> None:
    ledger = await open_ledger(history.home, clock=history.clock, limits=LIMITS)
    with pytest.raises(HomeLocked):
        await mover(history, url).move_in()
    await ledger.close()
    shared = await on_postgres(history, url)
    with pytest.raises(CannotMove, match="stop them"):
        await mover(history, url).move_in()
    await shared.commit(WriteAuditRow(by=OPERATOR, row={"type": "something"}))
    await shared.close()
    with pytest.raises(CannotMove, match="not empty"):
        await mover(history, url).move_in()
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    (other / "journal").mkdir()
    with pytest.raises(CannotMove, match="has a ledger already"):
        await mover(history, url, other).move_out()


async def test_a_move_that_was_refused_leaves_the_home_as_it_was(
    history: HomeHistory, url: str, databases: Databases
) -> None:
    with pytest.raises(DatabaseUnusable):
        await mover(history, at(databases.url, "not_there")).move_in()
    shared = await on_postgres(history, url)
    with pytest.raises(CannotMove, match="stop them"):
        await mover(history, url).move_in()
    with pytest.raises(CannotMove, match="has a ledger already"):
        await mover(history, url).move_out()
    await shared.close()
    ledger = await open_ledger(history.home, clock=history.clock, limits=LIMITS)
    assert not [row for row in await audit_of(ledger) if "ledger_moved" in row]
    await ledger.close()
    await mover(history, url).move_in()
    shared = await on_postgres(history, url)
    with pytest.raises(CannotMove, match="stop them"):
        await mover(history, url).move_out()
    mark = read_mark(history.home)
    assert mark is not None
    assert mark.state == "moved"
    await shared.close()


async def test_a_ledger_is_moved_out_once_and_only_from_where_it_is(
    history: HomeHistory, url: str, tmp_path: Path
) -> None:
    homes = [tmp_path / name for name in ("one", "two")]
    for home in homes:
        home.mkdir(mode=0o700)
    with pytest.raises(CannotMove, match="no ledger to move"):
        await mover(history, url, homes[0]).move_out()
    await mover(history, url).move_in()
    await mover(history, url, homes[0]).move_out()
    with pytest.raises(CannotMove, match=f"already, into the home {homes[0]}"):
        await mover(history, url, homes[1]).move_out()


async def test_a_ledger_whose_open_tasks_were_deleted_is_not_moved_out(
    history: HomeHistory, url: str, tmp_path: Path
) -> None:
    await mover(history, url).move_in()
    connection = await asyncpg.connect(url)
    await connection.execute("TRUNCATE live")
    await connection.close()
    (home := tmp_path / "other").mkdir(mode=0o700)
    with pytest.raises(WrongSchema, match="covenant ledger restored"):
        await mover(history, url, home).move_out()
    assert not (home / "journal").exists()


async def test_a_url_whose_password_has_an_unescaped_sign_is_said_to_be_wrong(history: HomeHistory, url: str) -> None:
    role, _, rest = url.partition("@")
    signed = f"{role}:se@cret@localhost{rest}"
    for refuse in (mover(history, signed).move_in(), on_postgres(history, signed), migrate_database(signed)):
        with pytest.raises(DatabaseUnusable, match=r"ledger\.url cannot be read.* @ as %40") as refusal:
            await refuse
        assert "cret" not in str(refusal.value)


async def test_a_move_that_was_cut_off_is_not_finished_in_another_database(
    history: HomeHistory, url: str, databases: Databases
) -> None:
    assert await killed(history, url, "in", "move.mark") == -signal.SIGKILL
    other = await databases.borrow()
    with pytest.raises(CannotMove, match="finish it with that database"):
        await mover(history, other).move_in()
    with pytest.raises(CannotMove, match="without --out"):
        await mover(history, url).move_out()
    await databases.give_back(other)


CHILD = """
import asyncio, sys
from pathlib import Path
from covenant.ledger.clock import uuid_source
from tests.ledger_contract import fault_plans
from covenant.ledger.transfer.ledger_move import Mover
from tests.daemon.home_history import LIMITS
from tests.ledger_contract.samples import OPERATOR
home, url, out, point, now = sys.argv[1:]
fault_plans.arm(fault_plans.Plan(point, fault_plans.kill))
mover = Mover(Path(home), url, LIMITS, now_ms=lambda: int(now), new_id=uuid_source(), by=OPERATOR, durability="os")
asyncio.run(mover.move_out() if out == "out" else mover.move_in())
"""


async def killed(history: HomeHistory, url: str, way: str, point: str) -> int:
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHILD, str(history.home), url, way, point, str(history.clock())),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(running.communicate(), BOUND_S)
    assert running.returncode in (0, -signal.SIGKILL), errors.decode()
    return running.returncode


@pytest.mark.parametrize("history", [True], indirect=True, ids=["compacted"])
@pytest.mark.parametrize("point", first_of(MOVE_POINTS))
async def test_a_move_that_is_killed_is_finished_by_the_next_one(history: HomeHistory, url: str, point: str) -> None:
    tasks = list(history.tasks)
    only_out = point in ("move.publish", "move.place", "move.unmark")
    assert await killed(history, url, "in", point) == (0 if only_out else -signal.SIGKILL)
    if not only_out:
        if point != "move.written":  # the database may have committed
            with pytest.raises(HomeUnusable, match="cut off"):
                await open_ledger(history.home, clock=history.clock)
        await mover(history, url).move_in()
    mark = read_mark(history.home)
    assert mark is not None
    assert mark.state == "moved"
    shared = await on_postgres(history, url)
    before = await told(shared, tasks)
    await shared.close()
    out = only_out or point == "move.commit"
    assert await killed(history, url, "out", point) == (-signal.SIGKILL if out else 0)
    if out:
        with pytest.raises(HomeUnusable, match="cut off"):
            await open_ledger(history.home, clock=history.clock)
        await mover(history, url).move_out()
    ledger = await open_ledger(history.home, clock=history.clock, limits=LIMITS, node="here", boot="later")
    same(await told(ledger, tasks), before)
    await ledger.close()


@pytest.mark.parametrize("history", [True], indirect=True, ids=["compacted"])
async def test_a_move_whose_connection_is_lost_says_why_and_what_to_do(history: HomeHistory, url: str) -> None:
    def end_sessions(_: fault_points.FaultPoint) -> None:
        thread = Thread(target=asyncio.run, args=(end_all_sessions(url),))
        thread.start()
        thread.join()

    moves = {"move.written": mover(history, url).move_in, "move.commit": mover(history, url).move_out}
    for point, move in moves.items():
        plan = fault_plans.Plan(point, end_sessions)
        with fault_plans.armed(plan), pytest.raises(DatabaseUnusable) as lost:
            await move()
        assert plan.fired
        assert "(connection was closed in the middle of operation)" in str(lost.value)
        assert str(lost.value).endswith("then run the same command again")
        await move()


async def test_a_move_through_a_transaction_pooler_names_the_way(history: HomeHistory, url: str) -> None:
    async with pooler_before(url, 2) as pooler:
        with pytest.raises(DatabaseUnusable, match="name the database itself with --ledger"):
            await mover(history, pooler.url).move_in()
    await mover(history, url).move_in()


async def end_all_sessions(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await connection.close()


async def test_an_audit_that_was_changed_is_not_moved(history: HomeHistory, url: str, tmp_path: Path) -> None:
    await mover(history, url).move_in()
    connection = await asyncpg.connect(url)
    await connection.execute(
        "UPDATE audit SET row = replace(row, '\"type\"', '\"typo\"') WHERE idx = (SELECT max(idx) FROM audit)"
    )
    await connection.close()
    home = tmp_path / "back"
    home.mkdir(mode=0o700)
    with pytest.raises(Exception, match="does not follow"):
        await mover(history, url, home).move_out()


async def test_every_table_is_moved_or_left_on_purpose(url: str, history: HomeHistory) -> None:
    await (await on_postgres(history, url)).close()
    connection = await asyncpg.connect(url)
    tables = {
        row["tablename"]
        for row in await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    }
    await connection.close()
    assert tables == MOVED | NOT_MOVED
