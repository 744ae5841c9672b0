"""A database that refuses a daemon while it runs: the daemon says what to do, loses nothing, and goes on by itself."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from covenant.agents.api import Agent, Turn
from covenant.agents.runtime import job_buffer
from covenant.ledger.postgres import batch_writer
from covenant.ledger.postgres.open_postgres import DatabaseUnusable
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.model.errors import HomeUnusable
from tests.cli.daemons import Ran, covenant
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.e2e.test_shared_ledger import call, execute, message, until
from tests.ledger_contract.postgres_proxy import proxy_before
from tests.ledger_contract.postgres_server import Databases
from tests.matrices import first_of
from tests.outbound.receivers import receiver

LEASE_MS: Final = 6_000
"""Nothing here waits for a daemon to be declared lost: long, for a busy machine."""


class Guest(NamedTuple):
    """A role that is nobody else's, and has a database for itself. `owner_url`: as somebody who may do anything."""

    role: str
    url: str
    owner_url: str

    @property
    def settings(self) -> dict[str, Any]:
        return {"url": self.url, "durability": "os", "node_lease_ms": LEASE_MS}

    async def as_owner(self, *statements: str) -> None:
        await execute(self.owner_url, *(each.format(role=self.role) for each in statements))

    async def terminate(self, but: int = 0) -> None:
        """All of its connections but that of this process id. Returns when they are gone."""
        connection = await asyncpg.connect(self.owner_url)
        try:
            rows = await connection.fetch(
                "SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1 AND pid <> $2",
                self.role,
                but,
            )
            pids = [row["pid"] for row in rows]

            async def is_gone() -> bool:
                return not await connection.fetchval("SELECT count(*) FROM pg_stat_activity WHERE pid = ANY($1)", pids)

            await until(is_gone)
        finally:
            await connection.close()


@asynccontextmanager
async def open_guest(databases: Databases) -> AsyncIterator[Guest]:
    url, role = await databases.make(), f"guest_{os.getpid()}"
    parts = urlsplit(url)
    host = f"{role}@{parts.hostname or ''}" + (f":{parts.port}" if parts.port else "")
    guest = Guest(role, urlunsplit(parts._replace(netloc=host)), url)
    await guest.as_owner("CREATE ROLE {role} LOGIN", "GRANT CREATE, USAGE ON SCHEMA public TO {role}")
    yield guest
    await databases.drop(url)
    await execute(databases.url, f"DROP ROLE {role}")


@pytest.fixture
async def guest(databases: Databases) -> AsyncIterator[Guest]:
    async with open_guest(databases) as guest:
        yield guest


def counting() -> tuple[Agent, list[str], asyncio.Event]:
    """An agent, what it began, and what it waits for where it was told to."""
    begun: list[str] = []
    go = asyncio.Event()
    agent = Agent("counting", default_project="work")

    @agent
    async def work(turn: Turn) -> str:
        begun.append(turn.text)
        if turn.text == "slow":
            await go.wait()
        return f"did {turn.text}"

    return agent, begun, go


async def send(daemon: DaemonUnderTest, text: str, *, wait: bool = True) -> Any:
    configuration = {"returnImmediately": not wait}
    return await call(daemon, "counting", "SendMessage", message=message(text), configuration=configuration)


async def state_of(daemon: DaemonUnderTest, task_id: str) -> str | None:
    found = await call(daemon, "counting", "GetTask", id=task_id)
    state: str | None = found.get("status", {}).get("state")
    return state


async def reasons(daemon: DaemonUnderTest) -> str:
    """Why it is not ready; empty if it is."""
    answer = await daemon.ask("GET", "/readyz")
    return "" if answer.status_code == 200 else "; ".join(answer.json()["reasons"])


async def is_unready(daemon: DaemonUnderTest, *words: str) -> None:
    async def says_so() -> bool:
        said = await reasons(daemon)
        return bool(said) and all(word in said for word in words)

    await until(says_so)


async def is_ready(daemon: DaemonUnderTest) -> None:
    async def says_so() -> bool:
        return not await reasons(daemon)

    await until(says_so)


async def doctor(folder: Path, guest: Guest) -> str:
    """What is wrong, by the words of the doctor on a home with these settings."""
    home = folder / "doctor"
    home.mkdir(mode=0o700, exist_ok=True)
    (home / "settings.toml").write_text(f'[ledger]\nurl = "{guest.url}"\ndurability = "os"\n')
    (home / "settings.toml").chmod(0o600)
    found = (await asyncio.to_thread(covenant, "doctor", "--home", str(home), "--json")).json["findings"]
    return "\n".join(f"{each['what']}: {each['way_out']}" for each in found if not each["well"])


@asynccontextmanager
async def no_connection_left(guest: Guest, limit: str, lift: str) -> AsyncIterator[None]:
    """Somebody else has the last one, and the daemon has lost its own."""
    held = await asyncpg.connect(guest.url)
    try:
        await guest.as_owner(limit)
        await guest.terminate(but=held.get_server_pid())
        yield
        await guest.as_owner(lift)
    finally:
        await held.close()


@pytest.mark.parametrize(
    ("limit", "lift"),
    [
        ("ALTER ROLE {role} CONNECTION LIMIT 1", "ALTER ROLE {role} CONNECTION LIMIT -1"),
        ("ALTER DATABASE {database} CONNECTION LIMIT 1", "ALTER DATABASE {database} CONNECTION LIMIT -1"),
    ],
    ids=["role", "database"],
)
async def test_a_reached_connection_limit_is_said_and_room_is_all_that_it_needs(
    tmp_path: Path, guest: Guest, limit: str, lift: str, caplog: pytest.LogCaptureFixture
) -> None:
    agent, begun, go = counting()
    database = urlsplit(guest.url).path[1:]
    limit, lift = [each.format(role=guest.role, database=database) for each in (limit, lift)]
    with caplog.at_level(logging.INFO):
        async with open_daemon_under_test(tmp_path / "a", agent, ledger=guest.settings) as a:
            one = (await send(a, "one"))["task"]["id"]
            slow = (await send(a, "slow", wait=False))["task"]["id"]
            await until(lambda: _is("slow" in begun))
            async with no_connection_left(guest, limit, lift):
                await is_unready(a, "has no connection left", "CONNECTION LIMIT")
                await until(lambda: _is(_has_no_writer(a)))
                said = str(await send(a, "two"))
                assert "CONNECTION LIMIT" in said
                assert "can be repeated" in said
                go.set()
                assert "CONNECTION LIMIT" in await doctor(tmp_path, guest)
                await is_unready(a, "has no connection left", "CONNECTION LIMIT")
            await is_ready(a)

            async def is_done() -> bool:
                return await state_of(a, slow) == "TASK_STATE_COMPLETED"

            await until(is_done)
            assert await state_of(a, one) == "TASK_STATE_COMPLETED"
            assert (await send(a, "two"))["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
            assert begun == ["one", "slow", "two"]
    told = [record for record in caplog.records if "CONNECTION LIMIT" in str(record.__dict__.get("reason"))]
    # Whichever looks first says it: the heartbeat, or the writer.
    assert {"ledger.signals_lost", "ledger.write_refused"} & {record.getMessage() for record in told}
    assert len(told) < 20, "a trouble is logged when it begins, not each time it is found"


async def _is(met: bool) -> bool:
    return met


def _ledger(daemon: DaemonUnderTest) -> PostgresLedger:
    ledger = daemon.daemon.base.storage.ledger
    assert isinstance(ledger, PostgresLedger)
    return ledger


def _has_no_writer(daemon: DaemonUnderTest) -> bool:
    """Whether it knows that the connection that it writes by is gone."""
    connection = _ledger(daemon)._writer._connection._connection
    return connection is None or connection.is_closed()


async def test_a_write_in_doubt_while_there_is_no_connection_left_is_told_as_unknown_and_says_why(
    tmp_path: Path, guest: Guest
) -> None:
    agent, begun, _ = counting()
    async with open_daemon_under_test(tmp_path / "a", agent, ledger=guest.settings) as a:
        for text in ("one", "two"):  # so that the next one is accepted by one statement
            await send(a, text)
        held, owner = await asyncpg.connect(guest.url), await asyncpg.connect(guest.owner_url)
        try:
            async with owner.transaction():
                await owner.fetch("SELECT FROM writers FOR UPDATE")
                sending = asyncio.ensure_future(send(a, "three"))
                await until(lambda: _waits_for_a_lock(guest))
                await guest.as_owner("ALTER ROLE {role} CONNECTION LIMIT 1")
                await guest.terminate(but=held.get_server_pid())
                said = str(await sending)
            assert "outcome_unknown" in said
            assert "Repeat the request under the same id" in said
            assert "has no connection left" in said
            assert "CONNECTION LIMIT" in said, "the fix is named"
            await guest.as_owner("ALTER ROLE {role} CONNECTION LIMIT -1")
        finally:
            await held.close()
            await owner.close()
        await is_ready(a)
        assert (await send(a, "three"))["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
        assert begun == ["one", "two", "three"]


async def _waits_for_a_lock(guest: Guest) -> bool:
    connection = await asyncpg.connect(guest.owner_url)
    try:
        return bool(await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))
    finally:
        await connection.close()


async def test_a_start_without_a_connection_says_what_to_do(tmp_path: Path, guest: Guest) -> None:
    await guest.as_owner("ALTER ROLE {role} CONNECTION LIMIT 1")
    with pytest.raises(DatabaseUnusable, match=r"too many connections.*CONNECTION LIMIT"):
        async with open_daemon_under_test(tmp_path / "a", ledger=guest.settings):
            pass
    await guest.as_owner("ALTER ROLE {role} CONNECTION LIMIT 0")
    words = ("serve", "--home", str(tmp_path / "b"), "--http-port", "0", "--ledger", guest.url)
    ran: Ran = await asyncio.to_thread(covenant, *words)
    assert ran.code != 0
    assert "has no connection left" in ran.err
    assert "Traceback" not in ran.err


HINTS: Final = {
    "a schema that is not there": ("search_path = nowhere", "set its search_path", "search_path to the schema public"),
    "another schema": ("search_path = other", "set its search_path", "are in the schema public"),
    "a short time": ("statement_timeout = '1ms'", "raise the statement_timeout", "raise the statement_timeout"),
}


@pytest.mark.parametrize("wrong", HINTS)
async def test_a_setting_of_the_role_that_stops_the_daemon_is_named(tmp_path: Path, guest: Guest, wrong: str) -> None:
    setting, reason, found = HINTS[wrong]
    home = tmp_path / "doctor"
    async with open_daemon_under_test(home, ledger=guest.settings) as a:
        await guest.as_owner("CREATE SCHEMA other", "GRANT CREATE, USAGE ON SCHEMA other TO {role}")
        await guest.as_owner("ALTER ROLE {role} SET " + setting)
        await guest.terminate()
        await is_unready(a, reason)
        assert found in await doctor(tmp_path, guest)
        await guest.as_owner("ALTER ROLE {role} RESET ALL")
        await guest.terminate()
        await is_ready(a)
    await guest.as_owner("ALTER ROLE {role} SET " + setting)
    with pytest.raises((DatabaseUnusable, HomeUnusable), match=r"set the search_path|raise the statement_timeout"):
        async with open_daemon_under_test(home, ledger=guest.settings):
            pass
    await guest.as_owner("ALTER ROLE {role} RESET ALL")
    await guest.as_owner("DROP OWNED BY {role}", "DROP SCHEMA other")


WRONGS: Final = {
    "a right to insert": (
        "REVOKE INSERT ON events FROM {role}",
        "GRANT INSERT ON events TO {role}",
        "events",
        "the table events",
    ),
    "a right to update": (
        "REVOKE UPDATE ON writers FROM {role}",
        "GRANT UPDATE ON writers TO {role}",
        "writers",
        "the table writers",
    ),
    "the heartbeat": (
        "REVOKE UPDATE ON nodes FROM {role}",
        "GRANT UPDATE ON nodes TO {role}",
        "nodes",
        "the table nodes",
    ),
    "a right to read": (
        "REVOKE SELECT ON registers FROM {role}",
        "GRANT SELECT ON registers TO {role}",
        "registers",
        "the table registers",
    ),
    "the schema": (
        "REVOKE ALL ON SCHEMA public FROM {role}, PUBLIC",
        "GRANT CREATE, USAGE ON SCHEMA public TO {role}",
        "does not exist",
        "may use no schema",
    ),
    "a renamed column": (
        "ALTER TABLE events RENAME COLUMN body TO words",
        "ALTER TABLE events RENAME COLUMN words TO body",
        "body",
        "events.body is not there",
    ),
    "a dropped column": (
        "ALTER TABLE live DROP COLUMN attempt",
        "ALTER TABLE live ADD COLUMN attempt integer NOT NULL DEFAULT 1",
        "attempt",
        "live.attempt is not there",
    ),
    "a renamed table": (
        "ALTER TABLE events RENAME TO other",
        "ALTER TABLE other RENAME TO events",
        "events",
        "events.body is not there",
    ),
    "a type": (
        "ALTER TABLE queue ALTER COLUMN place TYPE text",
        "ALTER TABLE queue ALTER COLUMN place TYPE bigint USING place::bigint",
        "",
        "queue.place is text",
    ),
}


@pytest.mark.parametrize("wrong", first_of(WRONGS, 5))
async def test_a_right_or_a_column_that_is_taken_away_is_said_and_costs_nothing(
    tmp_path: Path, guest: Guest, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_buffer, "WRITE_AGAIN_MS_MAX", 100)
    agent, begun, go = counting()
    taken, given_back, word, found = WRONGS[wrong]
    async with open_daemon_under_test(tmp_path / "a", agent, ledger=guest.settings) as a:
        one = (await send(a, "one"))["task"]["id"]
        slow = (await send(a, "slow", wait=False))["task"]["id"]
        await until(lambda: _is("slow" in begun))
        await guest.as_owner(taken)

        async def is_refused() -> bool:
            said = str(await send(a, f"never {len(begun)}"))
            assert "internal" not in said
            return "`covenant doctor` says which" in said

        await until(is_refused)
        before = list(begun)
        await is_unready(a, "the ledger's database", word)
        said = await doctor(tmp_path, guest)
        assert "the database" in said
        assert found in said
        go.set()
        await guest.as_owner(given_back)
        await is_ready(a)  # although nobody writes

        async def is_done() -> bool:
            return await state_of(a, slow) == "TASK_STATE_COMPLETED"

        await until(is_done)
        assert await state_of(a, one) == "TASK_STATE_COMPLETED"
        assert (await send(a, "two"))["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
        assert begun == [*before, "two"], "nothing is begun twice"
        assert (await a.daemon.base.storage.ledger.audit_verify()).valid


async def test_a_role_that_is_not_let_in_any_more_is_said_and_costs_nothing(tmp_path: Path, guest: Guest) -> None:
    agent, begun, _ = counting()
    async with open_daemon_under_test(tmp_path / "a", agent, ledger=guest.settings) as a:
        await send(a, "one")
        await guest.as_owner("ALTER ROLE {role} NOLOGIN")
        await guest.terminate()
        await is_unready(a, "does not let this daemon's role in")
        assert "internal" not in str(await send(a, "never"))
        await guest.as_owner("ALTER ROLE {role} LOGIN")
        await is_ready(a)
        await send(a, "two")
        assert begun == ["one", "two"]


async def test_a_database_that_takes_no_writes_is_said_and_costs_nothing(tmp_path: Path, guest: Guest) -> None:
    agent, begun, _ = counting()
    database = urlsplit(guest.url).path[1:]
    async with open_daemon_under_test(tmp_path / "a", agent, ledger=guest.settings) as a:
        await send(a, "one")
        await guest.as_owner(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
        await guest.terminate()
        await is_unready(a, "takes no writes", "target_session_attrs")
        assert "internal" not in str(await send(a, "never"))
        await guest.as_owner(
            "SET default_transaction_read_only = off", f"ALTER DATABASE {database} RESET default_transaction_read_only"
        )
        await guest.terminate()
        await is_ready(a)
        await send(a, "two")
        assert begun == ["one", "two"]


async def test_connections_that_are_terminated_all_the_time_cost_nobody_a_task(tmp_path: Path, guest: Guest) -> None:
    agent, begun, _ = counting()
    texts = [f"{number}" for number in range(40)]
    answers: dict[str, Any] = {}
    async with open_daemon_under_test(tmp_path / "a", agent, ledger=guest.settings) as a:

        async def tell(text: str) -> None:
            answers[text] = await send(a, text)

        over = asyncio.Event()

        async def cut() -> None:
            while not over.is_set():
                await guest.terminate()
                await asyncio.sleep(0.1)

        cutting = asyncio.create_task(cut())
        try:
            async with asyncio.TaskGroup() as clients:
                for text in texts:
                    clients.create_task(tell(text))
                    await asyncio.sleep(0.03)
        finally:
            over.set()
            await cutting
        await is_ready(a)
        done = [answer["task"]["id"] for answer in answers.values() if "task" in answer]
        for task_id in done:
            await until(lambda: _has_ended(a, task_id))  # noqa: B023  (awaited in this round)
        assert len(begun) == len(set(begun)), "nothing is begun twice"
        assert len(done) <= len(begun)
        listed = await call(a, "counting", "ListTasks", pageSize=100)
        assert {task["id"] for task in listed["tasks"]} >= set(done)


async def _has_ended(daemon: DaemonUnderTest, task_id: str) -> bool:
    return await state_of(daemon, task_id) == "TASK_STATE_COMPLETED"


async def test_webhooks_are_told_again_when_their_moves_could_not_be_written_for_a_while(
    tmp_path: Path, guest: Guest, caplog: pytest.LogCaptureFixture
) -> None:
    agent, _, go = counting()
    settings: dict[str, Any] = {
        "ledger": guest.settings,
        "a2a": {"push_notifications": True},
        "outbound": {"allow": ("127.0.0.1",)},
        "push": {"pause_ms": 1},
    }
    async with receiver() as hook, open_daemon_under_test(tmp_path / "a", agent, **settings) as a:

        def has_heard(text: str) -> bool:
            return any(f"did {text}".encode() in request.body for request in hook.taken)

        async def tell(text: str) -> None:
            config = {"url": hook.url(), "id": "p"}
            configuration = {"taskPushNotificationConfig": config, "returnImmediately": True}
            await call(a, "counting", "SendMessage", message=message(text), configuration=configuration)

        await tell("one")
        await hook.until(lambda: has_heard("one"))
        hook.held, asked = asyncio.Event(), len(hook.served.requests)
        await tell("slow")
        await hook.asked(asked + 1)
        await guest.as_owner("REVOKE UPDATE ON pushes FROM {role}")
        hook.held.set()
        await until(lambda: _is("push.unsaved" in caplog.text))
        await guest.as_owner("GRANT UPDATE ON pushes TO {role}")
        go.set()
        await hook.until(lambda: has_heard("slow"))

        async def is_all_saved() -> bool:
            return not await a.daemon.base.storage.ledger.outbox()

        await until(is_all_saved)


@pytest.mark.parametrize("way", ["SendMessage", "SendStreamingMessage", "simple"])
async def test_a_task_whose_watch_was_cut_before_its_first_step_is_told_as_it_stands(
    tmp_path: Path, guest: Guest, way: str
) -> None:
    agent, begun, _ = counting()
    async with open_daemon_under_test(tmp_path / "a", agent, ledger=guest.settings) as a:
        ledger = _ledger(a)
        await send(a, "one")
        connection = await asyncpg.connect(guest.owner_url)
        try:
            async with connection.transaction():
                await connection.fetch("SELECT FROM writers FOR UPDATE")
                asking = asyncio.ensure_future(ask(a, way))
                await until(lambda: _is(ledger._writer._writing))
                ledger._steps.cut()  # as when a new run has begun
        finally:
            await connection.close()
        assert "two" in await asking
        await until(lambda: _is(begun == ["one", "two"]))


@pytest.mark.parametrize("leaves", [False, True], ids=["is told as unknown", "has left"])
async def test_a_task_whose_acceptance_was_in_doubt_and_had_happened_is_begun_once(
    tmp_path: Path, guest: Guest, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    monkeypatch.setattr(batch_writer, "TRIES_MAX", 2)
    agent, begun, _ = counting()
    async with proxy_before(guest.url) as proxy:
        settings = {**guest.settings, "url": proxy.url, "node_lease_ms": 20_000}
        async with open_daemon_under_test(tmp_path / "a", agent, ledger=settings) as a:
            for text in ("one", "two"):  # so that the next one is accepted by one statement
                await send(a, text)
            proxy.answers_lost = True
            sending = asyncio.ensure_future(send(a, "three"))
            if leaves:
                await until(lambda: _is_accepted(guest, 3))
                sending.cancel()
                await asyncio.wait((sending,))
            else:
                assert "may or may not have happened" in str(await sending)
                assert await _is_accepted(guest, 3)
            proxy.answers_lost = False
            await until(lambda: _is(begun == ["one", "two", "three"]))
            listed = await call(a, "counting", "ListTasks", pageSize=100)
            for task in listed["tasks"]:
                await until(lambda: _has_ended(a, task["id"]))  # noqa: B023  (awaited in this round)
            assert begun == ["one", "two", "three"]


async def _is_accepted(guest: Guest, count: int) -> bool:
    """That many tasks are in the database."""
    connection = await asyncpg.connect(guest.owner_url)
    try:
        return bool(await connection.fetchval("SELECT count(*) = $1 FROM ids", count))
    finally:
        await connection.close()


async def ask(daemon: DaemonUnderTest, way: str) -> str:
    """Send what is answered at once; the words of the answer."""
    if way == "SendMessage":
        return str(await send(daemon, "two", wait=False))
    if way == "simple":
        return (await daemon.ask("POST", "/a2a/tasks/send", json={"params": {"message": "two"}})).text
    body = {"jsonrpc": "2.0", "id": 1, "method": way, "params": {"message": message("two")}}
    return (await daemon.ask("POST", "/v1/a2a/agents/counting", json=body, headers={"A2A-Version": "1.0"})).text
