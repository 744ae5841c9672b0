"""Somebody altered a table of the ledger: every read and write says so and names the fix, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import asyncpg
import pytest

from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.e2e.test_shared_ledger import until
from tests.e2e.test_wrong_database import Guest, counting, doctor, is_ready, open_guest, send
from tests.ledger_contract.postgres_server import Databases

READS: Final = (
    "/a2a/attention",
    "/a2a/queue",
    "/a2a/results/recent",
    "/a2a/tasks/recent",
    "/a2a/tasks/{task}/show",
    "/a2a/tasks/{task}/tree",
    "/a2a/tasks?text=on&count=true",
    "/audit/recent?limit=5",
    "/audit/verify",
    "/capabilities/recent",
    "/identities/list",
    "/readyz",
    "/v1/a2a/agents/counting/tasks",
    "/v1/a2a/agents/counting/tasks/{task}",
    "/v1/admin/files",
    "/v1/admin/nodes",
    "/v1/admin/tenants",
    "/v1/agents",
)
TRIGGER: Final = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'by hand'; END $$;
    CREATE TRIGGER refuse BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION refuse()
"""
ADDED: Final = {
    "a trigger": (
        TRIGGER,
        "DROP TRIGGER refuse ON events; DROP FUNCTION refuse",
        "the table events has the trigger refuse",
    ),
    "a constraint": (
        "ALTER TABLE events ADD CONSTRAINT small CHECK (length(body) < 3) NOT VALID",
        "ALTER TABLE events DROP CONSTRAINT small",
        "the table events has the constraint small",
    ),
    "a column": (
        "ALTER TABLE live ADD COLUMN extra text NOT NULL DEFAULT ''; ALTER TABLE live ALTER COLUMN extra DROP DEFAULT",
        "ALTER TABLE live DROP COLUMN extra",
        "live.extra takes no row without a value",
    ),
    "a dropped index": (
        "DROP INDEX ids_by_id",
        "CREATE UNIQUE INDEX ids_by_id ON ids (task_id text_pattern_ops)",
        "the index ids.ids_by_id is not there",
    ),
}


@pytest.fixture
async def guest(databases: Databases) -> AsyncIterator[Guest]:
    async with open_guest(databases) as guest:
        yield guest


@pytest.mark.parametrize("what", ["a trigger", "a constraint", "a column"])
async def test_what_was_added_to_a_table_and_refuses_rows_is_said_and_costs_nothing(
    tmp_path: Path, guest: Guest, what: str
) -> None:
    agent, begun, _ = counting()
    added, removed, found = ADDED[what]
    async with open_daemon_under_test(tmp_path / "a", agent, ledger=guest.settings) as a:
        await send(a, "one")
        await guest.as_owner(added)
        assert "`covenant doctor` says which" in str(await send(a, "never"))
        assert found in await doctor(tmp_path, guest)
        await guest.as_owner(removed)
        await is_done(a, "two")
        assert begun == ["one", "two"]
        assert (await a.daemon.base.storage.ledger.audit_verify()).valid


async def is_done(daemon: DaemonUnderTest, text: str) -> None:
    async def says_so() -> bool:
        said = await send(daemon, text)
        return "task" in said and said["task"]["status"]["state"] == "TASK_STATE_COMPLETED"

    await until(says_so)


async def test_an_index_that_is_missing_is_found_by_the_doctor(tmp_path: Path, guest: Guest) -> None:
    async with open_daemon_under_test(tmp_path / "a", ledger=guest.settings):
        assert "ids_by_id" not in await doctor(tmp_path, guest)
        dropped, _, found = ADDED["a dropped index"]
        await guest.as_owner(dropped, "ALTER TABLE notes SET UNLOGGED", "ALTER TABLE audit ENABLE ROW LEVEL SECURITY")
        await guest.as_owner("CREATE RULE quiet AS ON INSERT TO events DO INSTEAD NOTHING")
        said = await doctor(tmp_path, guest)
    assert found in said
    assert "the table notes is emptied by a crash" in said
    assert "the table audit has row security" in said
    assert "the table events has the rule quiet" in said


async def test_a_node_outlives_an_answer_that_it_does_not_understand(tmp_path: Path, guest: Guest) -> None:
    agent, begun, _ = counting()
    async with open_daemon_under_test(tmp_path / "a", agent, ledger=guest.settings) as a:
        await send(a, "one")
        await guest.as_owner("ALTER TABLE registers ALTER COLUMN version TYPE text")

        async def says_so() -> bool:
            answer = await a.ask("GET", "/readyz")
            return answer.status_code == 503 and "covenant doctor" in answer.text

        await until(says_so)
        assert "registers.version is text" in await doctor(tmp_path, guest)
        await guest.as_owner("ALTER TABLE registers ALTER COLUMN version TYPE bigint USING version::bigint")
        await is_ready(a)
        await is_done(a, "two")
        assert begun == ["one", "two"]


async def tables(url: str) -> list[str]:
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = current_schema() ORDER BY 1")
    finally:
        await connection.close()
    return [row["tablename"] for row in rows]


def is_clear(status: int, said: Any) -> bool:
    """Either an answer, or a refusal that names the fix."""
    words = json.dumps(said)
    return status != 500 and '"internal"' not in words and (status != 503 or "ledger's database" in words)


@pytest.mark.matrix
@pytest.mark.timeout(300)
async def test_no_table_that_was_renamed_makes_an_internal_error_of_a_read_or_a_write(
    tmp_path: Path, guest: Guest
) -> None:
    agent, _, _ = counting()
    unclear: list[str] = []
    async with open_daemon_under_test(tmp_path / "a", agent, ledger=guest.settings) as a:
        task = (await send(a, "one"))["task"]["id"]
        paths = [path.format(task=task) for path in READS]
        refused = 0
        for table in await tables(guest.owner_url):
            await guest.as_owner(f"ALTER TABLE {table} RENAME TO other")
            for path in paths:
                answer = await a.ask("GET", path)
                refused += answer.status_code == 503
                if not is_clear(answer.status_code, answer.json()):
                    unclear.append(f"{table}: {path}: {answer.status_code} {answer.text[:300]}")
            said = await send(a, f"while {table} is away", wait=False)
            if not is_clear(200, said):
                unclear.append(f"{table}: send: {said}")
            await guest.as_owner(f"ALTER TABLE other RENAME TO {table}")
            await is_ready(a)
        assert unclear == []
        assert refused > len(paths), "tables that were away were noticed"
        assert (await a.ask("GET", f"/a2a/tasks/{task}/show")).status_code == 200
        assert (await a.daemon.base.storage.ledger.audit_verify()).valid


class Column(NamedTuple):
    table: str
    name: str
    kind: str


async def columns(url: str) -> list[Column]:
    """Those whose type somebody could change."""
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch(
            "SELECT table_name, column_name, data_type FROM information_schema.columns "
            "WHERE table_schema = current_schema() AND is_generated = 'NEVER' ORDER BY table_name, ordinal_position"
        )
    finally:
        await connection.close()
    return [Column(*row) for row in rows]


def altered(column: Column) -> tuple[str, str]:
    """Changes the type, and changes it back."""
    other, there, back = ("bytea", "convert_to({0}, 'UTF8')", "convert_from({0}, 'UTF8')")
    if column.kind != "text":
        other, there, back = "text", "{0}::text", f"{{0}}::{column.kind}"
    begin = f"ALTER TABLE {column.table} ALTER COLUMN {column.name} TYPE"
    return (
        f"{begin} {other} USING {there.format(column.name)}",
        f"{begin} {column.kind} USING {back.format(column.name)}",
    )


MISREAD: Final = (
    (Column("audit", "row", "text"), ("/audit/recent?limit=5", "/audit/verify")),
    (Column("events", "ts_ms", "bigint"), ("/v1/a2a/agents/counting/tasks",)),
    (Column("live", "state", "text"), ("/a2a/tasks/{task}/show", "/a2a/tasks/{task}/tree", "/a2a/tasks?text=on")),
)
"""Columns that PostgreSQL reads as another type without an error, and reads of them."""


async def test_a_value_of_another_type_is_a_refusal_that_names_its_column(tmp_path: Path, guest: Guest) -> None:
    agent, begun, _ = counting()
    async with open_daemon_under_test(tmp_path / "a", agent, ledger=guest.settings) as a:
        task = (await send(a, "one"))["task"]["id"]
        for column, paths in MISREAD:
            there, back = altered(column)
            await guest.as_owner(there)
            for path in paths:
                text = await answer_of(a, path.format(task=task))
                assert "database_refused" in text or "UNAVAILABLE" in text, path
                assert f"{column.table}.{column.name} is " in text, path
                assert f", and should be {column.kind}" in text, path
                assert "put the column back" in text, path
            await guest.as_owner(back)
            await is_ready(a)
            for path in paths:
                assert "should be" not in await answer_of(a, path.format(task=task))
        await is_done(a, "two")
        assert begun == ["one", "two"]


async def answer_of(daemon: DaemonUnderTest, path: str) -> str:
    """Asked again where that is said: a statement that was prepared before the change is refused once."""
    texts: list[str] = []

    async def is_final() -> bool:
        texts.append((await daemon.ask("GET", path)).text)
        return "; repeat the request" not in texts[-1]

    await until(is_final)
    return texts[-1]


async def test_a_writer_that_looks_whether_it_is_served_again_outlives_a_column_of_another_type(
    tmp_path: Path, guest: Guest
) -> None:
    agent, begun, _ = counting()
    there, back = altered(Column("writers", "audit_hash", "text"))
    async with open_daemon_under_test(tmp_path / "a", agent, ledger=guest.settings) as a:
        ledger = a.daemon.base.storage.ledger
        assert isinstance(ledger, PostgresLedger)
        writer = ledger._writer
        await send(a, "one")
        await guest.as_owner(there)
        async with writer.at_rest:
            await writer._probe()  # as after a batch was refused; an error would end the writer
            assert writer.trouble is not None
            assert "does not understand" in writer.trouble.message
        await guest.as_owner(back)
        await is_ready(a)
        await is_done(a, "two")
        assert begun == ["one", "two"]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_no_column_whose_type_was_changed_makes_an_internal_error_of_a_read_or_a_write(
    tmp_path: Path, guest: Guest
) -> None:
    agent, _, _ = counting()
    unclear: list[str] = []
    tried = 0
    async with open_daemon_under_test(tmp_path / "a", agent, ledger=guest.settings) as a:
        task = (await send(a, "one"))["task"]["id"]
        paths = [path.format(task=task) for path in READS]
        for column in await columns(guest.owner_url):
            there, back = altered(column)
            try:
                await guest.as_owner(there)
            except asyncpg.PostgresError:
                continue  # a key, a default or a partition forbids it
            tried += 1
            for path in paths:
                answer = await a.ask("GET", path)
                if not is_clear(answer.status_code, answer.json()):
                    unclear.append(f"{column}: {path}: {answer.status_code} {answer.text[:300]}")
            said = await send(a, f"while {column.table}.{column.name} is another", wait=False)
            if not is_clear(200, said):
                unclear.append(f"{column}: send: {said}")
            await guest.as_owner(back)
            await is_ready(a)
        assert unclear == []
        assert tried > len(paths)
        assert (await a.daemon.base.storage.ledger.audit_verify()).valid
