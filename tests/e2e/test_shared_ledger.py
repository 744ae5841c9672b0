"""Two daemons on one PostgreSQL: what is sent to one is worked on, read, streamed and cancelled at the other."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from covenant.agents.api import Agent, Turn
from covenant.daemon.home import KEY_NAME, TOKEN_NAME, UnsafeHome, read_token
from covenant.daemon.keystore import INSTANCE_NAME
from covenant.daemon.tenant_files import FOLLOWED_NAME
from covenant.ledger.postgres import connections
from covenant.ledger.postgres.migrations import LEVEL, NotDurable, WrongSchema
from covenant.ledger.postgres.open_postgres import DatabaseUnusable
from covenant.model.errors import HomeLocked, SettingsError
from covenant.outbound import s3_objects
from tests.agents.test_served_files import serve_for_tenants
from tests.cli.daemons import covenant as run_command
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.ledger_contract.postgres_proxy import proxy_before
from tests.ledger_contract.postgres_server import Databases, at
from tests.ledger_contract.transaction_pooler import pooler_before
from tests.outbound.receivers import receiver
from tests.outbound.s3_server import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, s3_server
from tests.waits import BOUND_S, LOOK_S


def agents() -> tuple[Agent, Agent, asyncio.Event, asyncio.Event]:
    """One that answers and one that waits, with what tells that the second has begun, and was stopped."""
    echo, slow = Agent("echo"), Agent("slow")
    begun, stopped = asyncio.Event(), asyncio.Event()

    @echo
    async def answer(turn: Turn) -> str:
        return f"echo: {turn.text}"

    @slow
    async def wait(_: Turn) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return ""

    return echo, slow, begun, stopped


@pytest.fixture
async def url(databases: Databases) -> AsyncIterator[str]:
    url = await databases.borrow()
    yield url
    await databases.give_back(url)


async def test_the_agents_of_a_tenants_file_are_that_tenants_on_a_database_too(url: str, short_path: Path) -> None:
    await asyncio.to_thread(serve_for_tenants, short_path, "--ledger-url", url, "--ledger-durability", "os")


def shared(url: str) -> dict[str, Any]:
    return {"url": url, "durability": "os"}


def copy_keys(folder: Path) -> None:
    """Daemons that share a ledger are one instance."""
    for name in (KEY_NAME, TOKEN_NAME):
        target = folder / "b" / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copy2(folder / "a" / name, target)
    (folder / "b").chmod(0o700)


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(BOUND_S):
        while True:
            if await is_so():
                return
            await asyncio.sleep(0.02)


async def call(daemon: DaemonUnderTest, agent: str, method: str, **params: Any) -> Any:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    response = await daemon.ask("POST", f"/v1/a2a/agents/{agent}", json=body, headers={"A2A-Version": "1.0"})
    answer = response.json()
    return answer.get("result") or answer["error"]


def message(text: str) -> dict[str, Any]:
    return {"messageId": text, "role": "ROLE_USER", "parts": [{"text": text}]}


async def send(daemon: DaemonUnderTest, agent: str, text: str, **params: Any) -> Any:
    """The task of a message. A daemon that a busy machine keeps from its database refuses; a client repeats then."""
    async with asyncio.timeout(BOUND_S):
        while "task" not in (answer := await call(daemon, agent, "SendMessage", message=message(text), **params)):
            assert "can be repeated" in answer["message"], answer
            await asyncio.sleep(LOOK_S)
    return answer["task"]


async def test_what_one_daemon_answered_is_read_and_listed_at_the_other(tmp_path: Path, url: str) -> None:
    echo, slow, _, _ = agents()
    async with open_daemon_under_test(tmp_path / "a", echo, slow, ledger=shared(url)) as a:
        copy_keys(tmp_path)
        async with open_daemon_under_test(tmp_path / "b", echo, slow, ledger=shared(url)) as b:
            sent = await send(a, "echo", "hello")
            assert sent["status"]["state"] == "TASK_STATE_COMPLETED"
            assert await call(b, "echo", "GetTask", id=sent["id"]) == await call(a, "echo", "GetTask", id=sent["id"])
            listed = await call(b, "echo", "ListTasks")
            assert [task["id"] for task in listed["tasks"]] == [sent["id"]]


async def test_daemons_behind_a_transaction_pooler_share_one_ledger(tmp_path: Path, url: str) -> None:
    async with pooler_before(url, 4) as pooler:
        ledger = {**shared(pooler.url), "pooler": True}
        first, slow, begun, stopped = agents()
        second, _, _, _ = agents()
        async with open_daemon_under_test(tmp_path / "a", first, slow, ledger=ledger) as a:
            copy_keys(tmp_path)
            async with open_daemon_under_test(tmp_path / "b", second, ledger=ledger) as b:
                sent = [await send(each, "echo", f"{n}") for n in range(5) for each in (a, b)]
                assert {each["status"]["state"] for each in sent} == {"TASK_STATE_COMPLETED"}
                listed = await call(b, "echo", "ListTasks")
                assert {task["id"] for task in listed["tasks"]} == {each["id"] for each in sent}
                held = (await b.ask("POST", "/v1/files", content=b"bytes")).json()
                place = urlsplit(held["url"])
                assert (await a.ask("GET", f"{place.path}?{place.query}", token="")).content == b"bytes"
                configuration = {"returnImmediately": True}
                asked = await send(b, "slow", "wait", configuration=configuration)
                await asyncio.wait_for(begun.wait(), BOUND_S)
                await call(b, "slow", "CancelTask", id=asked["id"])
                await asyncio.wait_for(stopped.wait(), BOUND_S)


async def test_a_text_that_one_daemon_took_is_told_by_the_other_and_both_share_the_rate(
    tmp_path: Path, url: str
) -> None:
    echo = Agent("echo", default_project="work")

    @echo
    async def answer(turn: Turn) -> str:
        return f"echo: {turn.text}"

    limits = {"inbound_rate_per_min": 6}
    async with open_daemon_under_test(tmp_path / "a", echo, ledger=shared(url), a2a=limits) as a:
        copy_keys(tmp_path)
        async with open_daemon_under_test(tmp_path / "b", echo, ledger=shared(url), a2a=limits) as b:

            async def both_know_each_other() -> bool:
                return all(each.daemon.base.storage.ledger.living() == 2 for each in (a, b))

            await until(both_know_each_other)

            async def send(daemon: DaemonUnderTest) -> Any:
                return await daemon.ask("POST", "/a2a/tasks/send", json={"params": {"message": "hello"}})

            async def all_are_told() -> bool:
                found = [await b.ask("GET", f"/a2a/tasks/{each.json()['id']}") for each in sent]
                return all(each.status_code == 200 and each.json()["state"] == "completed" for each in found)

            assert (await send(b)).status_code < 300, "this daemon has its view of the door now"
            sent = [await send(a) for _ in range(3)]
            await until(all_are_told)
            refused = await send(a)
            assert (refused.status_code, int(refused.headers["Retry-After"]) > 0) == (429, True), "half of six a minute"


async def test_a_cancel_at_one_daemon_stops_the_work_at_the_other_whose_stream_ends(tmp_path: Path, url: str) -> None:
    echo, slow, begun, stopped = agents()
    async with open_daemon_under_test(tmp_path / "a", slow, ledger=shared(url)) as a:
        copy_keys(tmp_path)
        async with open_daemon_under_test(tmp_path / "b", echo, slow, ledger=shared(url)) as b:
            returned = {"returnImmediately": True}
            sent = await send(a, "slow", "wait", configuration=returned)
            await asyncio.wait_for(begun.wait(), BOUND_S)
            body = {"jsonrpc": "2.0", "id": 1, "method": "SubscribeToTask", "params": {"id": sent["id"]}}
            headers = {"A2A-Version": "1.0", "Authorization": f"Bearer {b.token}"}
            async with b.http.stream("POST", "/v1/a2a/agents/slow", json=body, headers=headers) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                canceled = await call(b, "slow", "CancelTask", id=sent["id"])
                assert canceled["status"]["state"] == "TASK_STATE_CANCELED"
                rest = [line async for line in lines]
            assert "TASK_STATE_CANCELED" in "".join(rest)
            await asyncio.wait_for(stopped.wait(), BOUND_S)


async def test_a_tenants_removal_ends_at_each_daemon_and_empties_each_home(tmp_path: Path, url: str) -> None:
    async with open_daemon_under_test(tmp_path / "a", ledger=shared(url)) as a:
        copy_keys(tmp_path)
        async with open_daemon_under_test(tmp_path / "b", ledger=shared(url)) as b:
            for daemon in (b, a):  # the first one leads removals
                await a.add_tenant("acme")

                async def is_known() -> bool:
                    return all(each.daemon.base.storage.ledger.tenant("acme") for each in (a, b))

                await until(is_known)
                notes = [tmp_path / home / "memory" / "acme" / "note" for home in ("a", "b")]
                for note in notes:
                    note.parent.mkdir(parents=True)
                    note.write_text("of acme")

                removals, operator = daemon.daemon.base.access.removals, daemon.operator
                await removals.begin(operator, "acme", "it is over", cancel_live=False)
                report = await removals.report(operator, "acme", BOUND_S)
                assert (report.done, report.removal.reason) == (True, "it is over")

                async def are_gone(notes: Sequence[Path] = notes) -> bool:
                    return not any(note.exists() for note in notes)

                await until(are_gone)


async def test_a_removal_that_a_daemon_was_down_for_ends_in_its_home_when_it_starts_again(
    tmp_path: Path, url: str
) -> None:
    home = tmp_path / "b"
    left, made_anew, of_another = (home / place / "note" for place in ("memory/acme", "agents/acme", "agents/soon"))
    made_at_a = tmp_path / "a" / "agents" / "acme" / "note"

    async def start(home: Path) -> None:
        followed = home / FOLLOWED_NAME
        if followed.exists():
            os.utime(followed, (0, 0))
        async with open_daemon_under_test(home, ledger=shared(url)):
            await until(lambda: _followed_anew(followed))

    async with open_daemon_under_test(tmp_path / "a", ledger=shared(url)) as a:
        copy_keys(tmp_path)
        await a.add_tenant("acme")
        await start(home)
        for note in (left, of_another):
            note.parent.mkdir(parents=True)
            note.write_text("a note")
        removals = a.daemon.base.access.removals
        await removals.begin(a.operator, "acme", "it is over", cancel_live=False)
        assert (await removals.report(a.operator, "acme", BOUND_S)).done
        await start(home)
        assert [note.exists() for note in (left, of_another)] == [False, True]
    for note in (made_anew, made_at_a):
        note.parent.mkdir(parents=True)
        note.write_text("for a later tenant of this name")
        await start(note.parents[2])
        assert note.exists()


async def test_a_removal_ends_in_a_home_whose_ledger_was_put_back_to_an_earlier_version(
    tmp_path: Path, url: str
) -> None:
    async with open_daemon_under_test(tmp_path / "a", ledger=shared(url)) as a:
        copy_keys(tmp_path)
        await a.add_tenant("acme")
        async with open_daemon_under_test(tmp_path / "b", ledger=shared(url)):
            followed, left = tmp_path / "b" / FOLLOWED_NAME, tmp_path / "b" / "memory" / "acme" / "note"
            await until(lambda: _followed_anew(followed))
            followed.write_text("1000000")
            left.parent.mkdir(parents=True)
            left.write_text("a note")
            removals = a.daemon.base.access.removals
            await removals.begin(a.operator, "acme", "it is over", cancel_live=False)
            assert (await removals.report(a.operator, "acme", BOUND_S)).done

            async def is_erased() -> bool:
                return not left.exists()

            await until(is_erased)


async def _followed_anew(path: Path) -> bool:
    return path.exists() and path.stat().st_mtime > 0


async def test_a_tenant_that_is_disabled_at_one_daemon_is_shut_out_at_the_other(tmp_path: Path, url: str) -> None:
    async with open_daemon_under_test(tmp_path / "a", ledger=shared(url)) as a:
        copy_keys(tmp_path)
        async with open_daemon_under_test(tmp_path / "b", ledger=shared(url)) as b:
            tenant = await a.add_tenant("acme")
            assert (await b.ask("GET", "/v1/agents", token=tenant)).status_code == 200, "known before it was told"
            await a.tenants.change(a.operator, "acme", disabled=True)
            assert (await b.ask("GET", "/v1/agents", token=tenant)).status_code in (401, 403)


async def test_a_home_without_the_shared_key_or_with_another_token_is_refused(tmp_path: Path, url: str) -> None:
    async with open_daemon_under_test(tmp_path / "a", ledger=shared(url)):
        with pytest.raises(UnsafeHome, match=r"copy identity/local\.key"):
            async with open_daemon_under_test(tmp_path / "c", ledger=shared(url)):
                pass
        copy_keys(tmp_path)
        (tmp_path / "b" / TOKEN_NAME).unlink()
        with pytest.raises(UnsafeHome, match=r"operator\.token"):
            async with open_daemon_under_test(tmp_path / "b", ledger=shared(url)):
                pass
        with pytest.raises(HomeLocked):
            async with open_daemon_under_test(tmp_path / "a", ledger=shared(url)):
                pass


async def test_a_daemon_of_another_instance_does_not_fence_the_one_whose_name_it_has(tmp_path: Path, url: str) -> None:
    named = {"node": "one"}
    async with open_daemon_under_test(tmp_path / "other"):
        pass  # a home with a key and a token of its own
    async with open_daemon_under_test(tmp_path / "a", ledger=shared(url), daemon=named) as a:
        nodes = (await a.ask("GET", "/v1/admin/nodes")).json()["nodes"]
        for home, reason in {"empty": r"copy identity/local\.key", "other": "of another instance"}.items():
            with pytest.raises(UnsafeHome, match=reason):
                async with open_daemon_under_test(tmp_path / home, ledger=shared(url), daemon=named):
                    pass
        found = (await a.ask("GET", "/v1/admin/nodes")).json()["nodes"]
        assert [each["boot"] for each in found] == [each["boot"] for each in nodes]
        assert (await a.ask("GET", "/readyz")).status_code == 200


async def covenant(*words: str, passphrase: str = "") -> dict[str, Any]:
    """What the command says with --json; `exit` is its exit code."""
    variables = {"COVENANT_PASSPHRASE": passphrase, "COVENANT_LEDGER_DURABILITY": "os"}
    ran = await asyncio.to_thread(run_command, *words, "--json", env=variables)
    return {**ran.json, "exit": ran.code}


async def test_a_prepared_database_gives_key_and_token_to_whoever_knows_the_passphrase(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = ("ledger", "init", "--ledger", url, "--home")
    made = await covenant(*init, str(tmp_path / "a"), passphrase="open sesame")
    assert (made["kind"], made["level"], made["shared"], made["exit"]) == ("ledger_init", LEVEL, True, 0)
    wrong = await covenant(*init, str(tmp_path / "b"), passphrase="open barley")
    assert (wrong["exit"], "the key in the database stays locked" in wrong["message"]) == (1, True)
    none = await covenant(*init, str(tmp_path / "b"))
    assert "copy identity/local.key" in none["message"]
    monkeypatch.setenv("COVENANT_PASSPHRASE", "open sesame")
    async with (
        open_daemon_under_test(tmp_path / "a", ledger=shared(url)) as a,
        open_daemon_under_test(tmp_path / "b", ledger=shared(url)) as b,
    ):
        assert a.token == b.token
        assert a.operator.agent == b.operator.agent
        nodes = (await b.ask("GET", "/v1/admin/nodes")).json()["nodes"]
        assert [node["alive"] for node in nodes] == [True, True]
    connection = await asyncpg.connect(url)
    try:
        left = await connection.fetchval("SELECT body FROM secrets")
    finally:
        await connection.close()
    assert read_token(tmp_path / "a" / TOKEN_NAME) not in left


async def test_an_operators_token_that_was_rotated_reaches_daemons_that_know_the_passphrase(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COVENANT_PASSPHRASE", "open sesame")
    async with open_daemon_under_test(tmp_path / "a", ledger=shared(url)) as a:
        async with open_daemon_under_test(tmp_path / "b", ledger=shared(url)):
            pass
        rotated = (await a.identities.rotate(a.operator, None)).token

        async def joins(name: str) -> bool:
            try:
                async with open_daemon_under_test(tmp_path / name, ledger=shared(url)):
                    return read_token(tmp_path / name / TOKEN_NAME) == rotated
            except UnsafeHome:
                return False  # the token is not there yet

        await until(lambda: joins("b"))
        await until(lambda: joins("new"))
        assert read_token(tmp_path / "a" / TOKEN_NAME) == rotated


async def test_daemons_with_one_passphrase_that_start_at_once_are_one_instance(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COVENANT_PASSPHRASE", "open sesame")
    homes = [tmp_path / name for name in "abc"]
    made = await asyncio.gather(
        *(covenant("ledger", "init", "--ledger", url, "--home", str(home), passphrase="open sesame") for home in homes)
    )
    assert [each["exit"] for each in made] == [0, 0, 0]
    assert len({read_token(home / TOKEN_NAME) for home in homes}) == 1


async def test_the_schema_is_raised_by_a_command_and_a_database_that_is_missing_is_said(
    url: str, tmp_path: Path
) -> None:
    home = ("--home", str(tmp_path))
    assert (await covenant("ledger", "migrate", "--ledger", url, *home))["level"] == LEVEL
    again = await covenant("ledger", "migrate", "--ledger", url, *home)
    assert again["before"] == again["level"] == LEVEL
    missing = await covenant("ledger", "migrate", "--ledger", at(url, "no_such_database"), *home)
    assert "does not exist" in missing["message"]
    unnamed = await covenant("ledger", "migrate", *home)
    assert (unnamed["exit"], unnamed["code"]) == (1, "no_database")


async def test_an_identity_that_is_not_the_ledgers_is_refused(tmp_path: Path, url: str) -> None:
    peers = {"enabled": True}
    async with open_daemon_under_test(tmp_path / "a", ledger=shared(url), peers=peers):
        pass
    copy_keys(tmp_path)
    (tmp_path / "b" / INSTANCE_NAME).write_text("ab" * 32)
    (tmp_path / "b" / INSTANCE_NAME).chmod(0o600)
    with pytest.raises(UnsafeHome, match=r"instance\.key is not the identity"):
        async with open_daemon_under_test(tmp_path / "b", ledger=shared(url), peers=peers):
            pass


async def test_a_webhook_is_told_by_one_daemon_and_by_another_when_that_one_is_gone(tmp_path: Path, url: str) -> None:
    talker = Agent("talker")

    @talker
    async def talk(turn: Turn) -> AsyncIterator[Any]:
        for number in range(3):
            yield turn.status(f"part {number}")
        yield "done"

    settings: dict[str, Any] = {
        "ledger": {**shared(url), "node_lease_ms": 1_500},
        "a2a": {"push_notifications": True},
        "outbound": {"allow": ("127.0.0.1",)},
        "push": {"pause_ms": 1},
    }
    async with receiver() as hook, AsyncExitStack() as second:
        config = {"taskPushNotificationConfig": {"url": hook.url(), "id": "p"}}

        async def tell(daemon: DaemonUnderTest) -> int:
            sent = await send(daemon, "talker", "go", configuration=config)
            last: int = sent["metadata"]["covenant.generation"]
            return last

        def told() -> list[int]:
            return [int(request.headers["covenant-generation"]) for request in hook.taken]

        async with open_daemon_under_test(tmp_path / "a", talker, **settings) as a:
            copy_keys(tmp_path)
            b = await second.enter_async_context(open_daemon_under_test(tmp_path / "b", talker, **settings))
            last = await tell(b)
            await hook.until(lambda: len(told()) >= last)
            assert told() == list(range(1, last + 1)), "each step once, by whichever daemon"
            last += await tell(a)
            await hook.until(lambda: len(told()) >= last)
        last += await tell(b)
        await hook.until(lambda: len(told()) >= last)
        assert told() == list(range(1, last // 3 + 1)) * 3


async def test_a_database_that_is_not_there_or_not_durable_is_a_clear_error(tmp_path: Path, url: str) -> None:
    with pytest.raises(DatabaseUnusable, match="does not exist"):
        async with open_daemon_under_test(tmp_path / "a", ledger=shared(f"{at(url, 'no_such_database')}")):
            pass
    with pytest.raises(DatabaseUnusable, match=r"check that it runs and ledger\.url leads to it"):
        async with open_daemon_under_test(tmp_path / "a", ledger=shared("postgres://nobody@127.0.0.1:1/none")):
            pass
    with pytest.raises(NotDurable, match="fsync"):
        async with open_daemon_under_test(tmp_path / "a", ledger={"url": url}):
            pass


async def test_readiness_and_metrics_tell_of_the_database_and_of_its_absence(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "COMMAND_S", 5.0)  # nobody need wait half a minute for a database that is silent
    async with proxy_before(url) as proxy:
        ledger = {**shared(proxy.url), "node_lease_ms": 1_500}
        async with open_daemon_under_test(tmp_path / "a", ledger=ledger) as a:

            async def is_ready() -> bool:
                return (await a.ask("GET", "/readyz")).status_code == 200

            await until(is_ready)
            metrics = (await a.ask("GET", "/metrics")).text
            for name in ("nodes", "batches_total", "batch_conflicts_total", "news_age_ms", "registers_behind"):
                assert f"\ncovenant_{name} " in metrics
            for name in ("dead_rows", "connections", "connections_max"):
                assert f"\ncovenant_database_{name} " in metrics
            assert "covenant_syncs_total" not in metrics, "there is no journal here"
            proxy.silence()

            async def says_so() -> bool:
                answer = await a.ask("GET", "/readyz")
                return answer.status_code == 503 and "has not answered" in answer.json()["reasons"][0]

            await until(says_so)
            sent = await call(a, "index", "SendMessage", message=message("hello"))
            assert "not answered" in str(sent)
            proxy.mend()
            await until(is_ready)


async def execute(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for each in statements:
            await connection.execute(each)
    finally:
        await connection.close()


async def test_the_doctor_says_what_a_start_on_the_database_would_stumble_over(
    tmp_path: Path, databases: Databases
) -> None:
    url = await databases.make()
    home = tmp_path / "a"
    await covenant("ledger", "init", "--ledger", url, "--home", str(home))
    (home / "settings.toml").write_text(f'[ledger]\nurl = "{url}"\ndurability = "os"\n')
    (home / "settings.toml").chmod(0o600)

    async def of_database() -> list[tuple[bool, str]]:
        found = (await covenant("doctor", "--home", str(home)))["findings"]
        return [(each["well"], each["what"]) for each in found if each["what"].startswith("the database")]

    ((is_well, what),) = await of_database()
    assert is_well
    assert f"level {LEVEL}" in what
    await execute(url, "ALTER TABLE live DROP COLUMN attempt", "ALTER TABLE queue ALTER COLUMN place TYPE text")
    assert await of_database() == [
        (False, "the database: live.attempt is not there, and should be integer"),
        (False, "the database: queue.place is text, and should be bigint"),
    ]
    await execute(url, f"UPDATE ledger_level SET level = {LEVEL + 1}")
    ((is_well, what),) = await of_database()
    assert (is_well, what) == (False, f"the database is at level {LEVEL + 1}")
    with pytest.raises(WrongSchema, match="install the version"):
        async with open_daemon_under_test(home, ledger=shared(url)):
            pass
    await databases.drop(url)


async def test_tables_of_others_and_only_rows_that_are_missing_are_said(tmp_path: Path, databases: Databases) -> None:
    url = await databases.make()

    async def said(home: str) -> list[str]:
        variables = {"COVENANT_LEDGER_URL": url, "COVENANT_LEDGER_DURABILITY": "os"}
        ran = await asyncio.to_thread(run_command, "doctor", "--home", str(tmp_path / home), "--json", env=variables)
        (found,) = [f"{each['what']}; {each['way_out']}" for each in ran.json["findings"] if "database" in each["what"]]
        with pytest.raises(WrongSchema) as refused:
            async with open_daemon_under_test(tmp_path / home, ledger=shared(url)):
                pass
        return [str(refused.value), found]

    (tmp_path / "a").mkdir(mode=0o700)
    await execute(url, "CREATE TABLE tasks (id integer)")
    for each in await said("a"):
        assert "tasks" in each
        assert "name an empty database" in each
    await execute(url, "DROP TABLE tasks")
    await covenant("ledger", "init", "--ledger", url, "--home", str(tmp_path / "b"))
    await execute(url, "DELETE FROM ledger_level")
    for each in await said("b"):
        assert "put the level back" in each
    await execute(url, f"INSERT INTO ledger_level (level) VALUES ({LEVEL})", "DELETE FROM registers")
    for each in await said("b"):
        assert "registers" in each
        assert "restore a backup" in each
    await databases.drop(url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgres://covenant@127.0.0.1:port/db", "ledger.url cannot be read"),
        ("postgres://covenant@[::1/db", "ledger.url cannot be read"),
        ("{url}no_such_parameter=1", "no_such_parameter.*remove the parameter"),
        ("{url}sslmode=sometimes", "ledger.url cannot be read.*sslmode"),
    ],
)
async def test_a_wrong_url_is_said_to_be_wrong(tmp_path: Path, databases: Databases, url: str, words: str) -> None:
    given = url.format(url=databases.url + ("&" if "?" in databases.url else "?"))
    with pytest.raises(DatabaseUnusable, match=words):
        async with open_daemon_under_test(tmp_path / "a", ledger=shared(given)):
            pass


@pytest.mark.parametrize("sign", ["/", "?", "#"])
async def test_a_password_that_is_not_encoded_is_not_shown_and_the_fix_is(tmp_path: Path, sign: str) -> None:
    url = f"postgres://covenant:se{sign}cret@127.0.0.1/db"
    for words in (("doctor",), ("ledger", "migrate"), ("serve", "--http-port", "0")):
        ran = await asyncio.to_thread(run_command, *words, "--home", str(tmp_path), env={"COVENANT_LEDGER_URL": url})
        told = ran.out + ran.err
        assert (ran.code != 0, "percent-encode" in told, "/ as %2F" in told) == (True, True, True), told
        assert re.search("'se|cret@|cret'", told) is None, told


async def test_a_role_without_rights_or_connections_is_a_clear_error_and_costs_nothing(
    tmp_path: Path, databases: Databases
) -> None:
    url = await databases.make()
    role = f"guest_{os.getpid()}"
    parts = urlsplit(url)
    as_guest = urlunsplit(
        parts._replace(netloc=f"{role}@{parts.hostname or ''}" + (f":{parts.port}" if parts.port else ""))
    )
    await execute(url, f"CREATE ROLE {role} LOGIN", f"GRANT CREATE, USAGE ON SCHEMA public TO {role}")
    try:
        async with open_daemon_under_test(tmp_path / "a", ledger=shared(as_guest)) as a:
            assert (await send(a, "index", "one"))["id"]
            await execute(url, f"ALTER TABLE events OWNER TO {parts.username}")
            answer = await call(a, "index", "SendMessage", message=message("two"))
            assert "permission denied" in str(answer)
            await execute(url, f"ALTER TABLE events OWNER TO {role}")
            assert (await send(a, "index", "three"))["id"]
        await execute(url, f"ALTER ROLE {role} CONNECTION LIMIT 1")
        with pytest.raises(DatabaseUnusable, match="too many connections"):
            async with open_daemon_under_test(tmp_path / "a", ledger=shared(as_guest)):
                pass
    finally:
        await databases.drop(url)
        await execute(databases.url, f"DROP ROLE {role}")


async def test_files_are_in_one_bucket_for_all_daemons(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setattr(s3_objects, "ATTEMPTS_MAX", 2)
    data = os.urandom(9_000_000)
    async with s3_server() as server:
        blobs = {"url": f"s3://{BUCKET}/covenant", "endpoint": server.url, "region": REGION}
        async with open_daemon_under_test(tmp_path / "a", ledger=shared(url), blobs=blobs) as a:
            copy_keys(tmp_path)
            async with open_daemon_under_test(tmp_path / "b", ledger=shared(url), blobs=blobs) as b:
                stored = await a.ask("POST", "/v1/files", content=data)
                assert stored.status_code == 201, stored.text
                assert list(server.objects.values()) == [data]
                assert all(key.startswith("covenant/") for key in server.objects)
                place = urlsplit(stored.json()["url"])
                assert (await b.ask("GET", f"{place.path}?{place.query}", token="")).content == data
                server.down = True
                refused = await b.ask("POST", "/v1/files", content=b"x")
                assert (refused.status_code, refused.json()["code"]) == (503, "blobs_unavailable")
                server.down = False
                shown = (await a.ask("GET", "/v1/admin/settings")).text
                assert SECRET_KEY not in shown
                assert SECRET_KEY not in (await a.ask("GET", "/metrics")).text


async def test_a_bucket_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with s3_server() as server:
        blobs = {"url": f"s3://{BUCKET}/covenant", "endpoint": server.url, "region": REGION}
        with pytest.raises(SettingsError, match=r"blobs\.url needs ledger\.url"):
            async with open_daemon_under_test(tmp_path / "a", blobs=blobs):
                pass
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        with pytest.raises(SettingsError, match=r"blobs\.url needs AWS_SECRET_ACCESS_KEY"):
            async with open_daemon_under_test(tmp_path / "b", ledger=shared(url), blobs=blobs):
                pass
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another one")
        with pytest.raises(SettingsError, match="SignatureDoesNotMatch") as refused:
            async with open_daemon_under_test(tmp_path / "b", ledger=shared(url), blobs=blobs):
                pass
        assert "another one" not in str(refused.value)


async def test_an_agent_that_one_daemon_serves_is_called_and_listed_at_the_other(tmp_path: Path, url: str) -> None:
    echo, slow, _, _ = agents()
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(open_daemon_under_test(tmp_path / "a", echo, ledger=shared(url)))
        copy_keys(tmp_path)
        async with open_daemon_under_test(tmp_path / "b", slow, ledger=shared(url)) as b:
            sent = await send(b, "echo", "hello")
            assert sent["artifacts"][0]["parts"] == [{"text": "echo: hello"}]
            shown = (await b.ask("GET", "/v1/admin/tenants/default/agents/echo")).json()["agent"]
            assert shown["nodes"] == [a.daemon.base.storage.ledger.node]
            listed = (await a.ask("GET", "/v1/admin/tenants/default/agents")).json()["agents"]
            assert {each["id"]: each.get("nodes") for each in listed} == {
                "index": None,
                "echo": [a.daemon.base.storage.ledger.node],
                "slow": [b.daemon.base.storage.ledger.node],
            }
            card = await b.ask("GET", "/v1/a2a/agents/echo/.well-known/agent-card.json")
            assert card.status_code == 200
            await stack.aclose()

            async def away() -> bool:
                # Until it is known that the daemon is away, what is sent waits for it.
                params = {"message": message("again"), "configuration": {"returnImmediately": True}}
                body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params}
                headers = {"A2A-Version": "1.0"}
                answer = (await b.ask("POST", "/v1/a2a/agents/echo", json=body, headers=headers)).json()
                return "is served by" in str(answer)

            await until(away)
            token = ("--token-file", str(tmp_path / "b" / "operator.token"))
            refused = await covenant("call", f"{b.url}/v1/a2a/agents/echo", "hello", *token)
            assert (refused["exit"], refused["code"]) == (1, "unavailable")
            assert "the agent 'echo' is served by" in refused["message"]
            again = await stack.enter_async_context(open_daemon_under_test(tmp_path / "a", echo, ledger=shared(url)))
            assert again.daemon.base.storage.ledger.node == shown["nodes"][0]
            sent = await send(b, "echo", "third")
            assert sent["status"]["state"] == "TASK_STATE_COMPLETED"


async def test_the_tasks_of_an_agent_whose_daemon_is_away_are_read_canceled_and_answered(
    tmp_path: Path, url: str
) -> None:
    echo, slow, begun, _ = agents()
    asker = Agent("asker", idempotent=True, on_lost="requeue")

    @asker
    async def ask(turn: Turn) -> str:
        return f"told {await turn.ask('which?')}"

    returned = {"returnImmediately": True}
    async with AsyncExitStack() as stack:
        opened = open_daemon_under_test(tmp_path / "a", echo, slow, asker, ledger=shared(url), daemon={"grace_ms": 0})
        await stack.enter_async_context(opened)
        copy_keys(tmp_path)
        async with open_daemon_under_test(tmp_path / "b", ledger=shared(url)) as b:
            done, asked = await send(b, "echo", "hello"), await send(b, "asker", "x")
            assert asked["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
            held = await send(b, "slow", "x", configuration=returned)
            await asyncio.wait_for(begun.wait(), BOUND_S)
            await stack.aclose()

            async def away() -> bool:
                again = await call(b, "slow", "SendMessage", message=message("again"), configuration=returned)
                return "is served by" in str(again)

            await until(away)
            assert (await call(b, "echo", "GetTask", id=done["id"]))["artifacts"] == done["artifacts"]
            assert [each["id"] for each in (await call(b, "echo", "ListTasks"))["tasks"]] == [done["id"]]
            canceled = await call(b, "slow", "CancelTask", id=held["id"])
            assert canceled["status"]["state"] == "TASK_STATE_CANCELED"
            told = {**message("this"), "taskId": asked["id"]}
            answered = await call(b, "asker", "SendMessage", message=told, configuration=returned)
            assert answered["task"]["id"] == asked["id"]
            card = await b.ask("GET", "/v1/a2a/agents/asker/.well-known/agent-card.json")
            assert (card.status_code, card.json()["name"]) == (200, "asker"), "a client that begins now needs it"
            again = open_daemon_under_test(tmp_path / "a", asker, ledger=shared(url))
            await stack.enter_async_context(again)

            async def completed() -> bool:
                found = await call(b, "asker", "GetTask", id=asked["id"])
                return bool(found.get("artifacts", [{}])[0].get("parts") == [{"text": "told this"}])

            await until(completed)


async def test_a_task_for_an_agent_of_a_daemon_that_is_away_waits_for_it(tmp_path: Path, url: str) -> None:
    busy, done, begun = Agent("one", concurrency=1), Agent("one"), asyncio.Event()

    @busy
    async def wait(_: Turn) -> str:
        begun.set()
        await asyncio.Event().wait()
        return ""

    @done
    async def answer(turn: Turn) -> str:
        return turn.text

    async with AsyncExitStack() as stack:
        at_once = {"grace_ms": 0}  # the first agent works when its daemon stops
        await stack.enter_async_context(
            open_daemon_under_test(tmp_path / "a", busy, ledger=shared(url), daemon=at_once)
        )
        copy_keys(tmp_path)
        async with open_daemon_under_test(tmp_path / "b", ledger=shared(url)) as b:
            returned = {"returnImmediately": True}
            first, second = [(await send(b, "one", text, configuration=returned))["id"] for text in ("first", "second")]
            await asyncio.wait_for(begun.wait(), BOUND_S)
            await stack.aclose()
            waiting = await b.daemon.base.storage.ledger.show(second, None, 0)
            assert waiting is not None
            assert waiting.state == "queued"
            await stack.enter_async_context(open_daemon_under_test(tmp_path / "a", done, ledger=shared(url)))

            async def completed() -> bool:
                found = await call(b, "one", "GetTask", id=second)
                return bool(found["status"]["state"] == "TASK_STATE_COMPLETED")

            await until(completed)
            assert first != second
