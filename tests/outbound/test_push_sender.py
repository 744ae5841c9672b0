"""What webhooks are owed: delivered in order, signed, repeated until taken, given up visibly; nobody else waits."""

import asyncio
import base64
import errno
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from covenant.daemon.environment import monotonic_ms, now_ms
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.commands import Cancel, DropPush, MovePushes, PutPush, RetryPush
from covenant.ledger.machine.identity_commands import AddTenant, ChangeTenant
from covenant.model.a2a_requests import PushAuthentication, PushConfig
from covenant.model.ids import PublicKey, TaskId, base58
from covenant.model.push import Push
from covenant.model.settings import PushSettings
from covenant.model.task_event import Step
from covenant.model.tenants import Tenant, TenantLimits
from covenant.outbound.push_sender import BURST_MAX, STEPS_AT_ONCE
from covenant.seal.keys import VERSION, public_key, signed_bytes, verify
from covenant.wire.a2a.dialects import V1
from tests.engine_under_test import open_ledger
from tests.ledger_contract import fault_plans
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.samples import OPERATOR, agent, task_id
from tests.outbound.http_servers import reply
from tests.outbound.receivers import (
    KEY,
    QUICK,
    SLOW,
    Receiver,
    advance,
    begin,
    chunk,
    make_task,
    owed,
    pushing,
    put,
    receiver,
    status,
)
from tests.places import free_port
from tests.waits import BOUND_S, eventually


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    opened = await open_ledger(tmp_path / "home", clock=now_ms)
    yield opened
    await opened.close()


@pytest.fixture
async def hook() -> AsyncIterator[Receiver]:
    async with receiver() as served:
        yield served


def verify_webhook(key: PublicKey, delivery_id: str, timestamp_s: int, body: bytes, signature: str) -> bool:
    """As a receiver does it (docs/formats/push.md)."""
    version, _, value = signature.partition(",")
    signed = signed_bytes(delivery_id, timestamp_s, body)
    return version == VERSION and verify(key, signed, base58(base64.b64decode(value)))


async def steps(ledger: Ledger, number: int = 1) -> list[Step]:
    return list(await ledger.steps(task_id(number), 0, 1_000))


async def test_every_step_is_posted_once_and_in_order_as_a_stream_tells_it(ledger: Ledger, hook: Receiver) -> None:
    async with pushing(ledger) as runner:
        leased = await begin(ledger, 1, PushConfig(url=hook.url(), id="mine"))
        await advance(ledger, leased, status("on it"), chunk("a"))
        await advance(ledger, leased, chunk("b"), end=True)
        await hook.got(6)
        assert not await owed(runner, ledger, lambda found: not found), "its last delivery ends a configuration"
    assert hook.generations == [1, 2, 3, 4, 5, 6]
    assert [request.body for request in hook.taken] == [
        V1.responses.encode_step(make_task(), s) for s in await steps(ledger)
    ]
    first = hook.taken[0]
    assert (first.method, first.target) == ("POST", "/hook")
    assert first.headers["content-type"] == "application/a2a+json"
    assert (first.headers["covenant-task-id"], first.headers["covenant-push-id"]) == (task_id(1), "mine")
    assert len({request.headers["webhook-id"] for request in hook.taken}) == 6


@pytest.mark.embedded
@pytest.mark.parametrize("version", ["1.0", "0.3"])
async def test_a_delivery_does_not_wait_for_the_archive(ledger: Ledger, hook: Receiver, version: str) -> None:
    """The webhook hears of a step as soon as the step is durable, though history cannot be written at all."""
    with fault_plans.armed(fault_plans.Plan("archive.commit", fault_plans.fail(errno.EIO), lasting=True)):
        async with pushing(ledger):
            leased = await begin(ledger, 1, PushConfig(url=hook.url(), version=version))
            await hook.got(1)
            await advance(ledger, leased, status("on it"))
            await hook.until(lambda: hook.generations[-1:] == [3])
            await advance(ledger, leased, chunk("b"), end=True)
            await hook.until(lambda: hook.generations[-1:] == [5])
            counts = await ledger.counts()
            assert counts.behind, "the archive was held"
    assert hook.generations[-1] == 5


async def test_one_made_late_in_a_task_does_not_wait_for_the_archive(ledger: Ledger, hook: Receiver) -> None:
    with fault_plans.armed(fault_plans.Plan("archive.commit", fault_plans.fail(errno.EIO), lasting=True)):
        async with pushing(ledger):
            leased = await begin(ledger)
            await put(ledger, task_id(1), hook.url())
            await advance(ledger, leased, chunk("heard"))
            await hook.got(1)
            await advance(ledger, leased, end=True)
            await hook.got(2)
    assert hook.generations == [3, 4]


async def test_one_made_later_is_told_what_happens_from_then_on(ledger: Ledger, hook: Receiver) -> None:
    leased = await begin(ledger)
    await advance(ledger, leased, status("unheard"))
    async with pushing(ledger):
        await put(ledger, task_id(1), hook.url())
        await advance(ledger, leased, chunk("heard"), end=True)
        await hook.got(2)
    assert hook.generations == [4, 5]


async def test_one_made_after_the_end_of_its_task_is_kept_and_told_nothing(ledger: Ledger, hook: Receiver) -> None:
    await advance(ledger, await begin(ledger), chunk("unheard"), end=True)
    assert len(await steps(ledger)) == 4, "the archive has it"
    async with pushing(ledger) as runner:
        late = await put(ledger, task_id(1), hook.url(), id="late")
        await advance(ledger, await begin(ledger, 2, PushConfig(url=hook.url())), end=True)
        await owed(runner, ledger, lambda found: task_id(2) not in {push.task_id for push in found})
        assert await ledger.pushes(task_id(1)) == (late,), "its owner can read it for a while"
    assert {request.headers["covenant-task-id"] for request in hook.taken} == {task_id(2)}


async def test_long_stories_come_whole_and_in_order(ledger: Ledger, hook: Receiver) -> None:
    count = 3 * BURST_MAX + STEPS_AT_ONCE // 2
    async with pushing(ledger) as runner:
        leased = await begin(ledger, 1, PushConfig(url=hook.url()))
        for number in range(count):
            await advance(ledger, leased, chunk(str(number)))
        await advance(ledger, leased, end=True)
        await hook.got(count + 3)
        await owed(runner, ledger, lambda found: not found)
    assert hook.generations == list(range(1, count + 4))


async def test_what_fails_is_tried_again_before_anything_after_it(ledger: Ledger) -> None:
    tally: list[str] = []
    async with receiver(reply(500), reply(302, location="/elsewhere"), reply(200)) as hook:
        async with pushing(ledger, tally=tally) as runner:
            leased = await begin(ledger, 1, PushConfig(url=hook.url()))
            await advance(ledger, leased, end=True)
            await hook.got(3)
            await owed(runner, ledger, lambda found: not found)
        said = [(r.headers["covenant-generation"], r.headers["covenant-attempt"]) for r in hook.served.requests]
        assert said == [("1", "1"), ("1", "2"), ("1", "3"), ("2", "1"), ("3", "1")]
        ids = [request.headers["webhook-id"] for request in hook.served.requests]
        assert len(set(ids[:3])) == 1, "the same delivery, tried again, has the same name"
        assert tally == ["failed", "failed", "delivered", "delivered", "delivered"]


async def test_a_clock_that_is_set_back_makes_no_delivery_wait_for_it(tmp_path: Path) -> None:
    """By a day, while a delivery that failed waits for its next attempt."""
    clock = FakeClock(now_ms())
    ledger = await open_ledger(tmp_path / "stepped", clock=clock, monotonic_ms=monotonic_ms)
    limits = PushSettings(attempts_max=100, pause_ms=200, pause_ms_max=1_000)
    async with receiver(reply(500), reply(500), reply(200)) as hook, pushing(ledger, limits) as runner:
        await begin(ledger, 1, PushConfig(url=hook.url()))
        await owed(runner, ledger, lambda found: bool(found and found[0].attempts))
        clock.step(-86_400_000)
        await hook.got(2)
    await ledger.close()


async def test_a_receiver_that_is_not_there_yet_gets_it_when_it_is(ledger: Ledger) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/hook"
    async with pushing(ledger, PushSettings(attempts_max=100, pause_ms=1, pause_ms_max=20)) as runner:
        leased = await begin(ledger, 1, PushConfig(url=url))
        (push,) = await owed(runner, ledger, lambda found: bool(found and found[0].attempts))
        assert push.failure
        async with receiver(port=port) as hook:
            await advance(ledger, leased, end=True)
            await hook.got(3)
            assert hook.generations == [1, 2, 3]


@pytest.mark.parametrize(
    ("header", "low_ms", "high_ms"),
    [("100", 100_000, 100_000), ("999999999", 3_600_000, 3_600_000), ("soon", 48_000, 72_000), ("-5", 48_000, 72_000)],
)
async def test_a_receiver_says_when_to_come_again_within_reason(
    ledger: Ledger, header: str, low_ms: int, high_ms: int
) -> None:
    async with receiver(reply(503, retry_after=header)) as hook, pushing(ledger, SLOW) as runner:
        before = now_ms()
        await begin(ledger, 1, PushConfig(url=hook.url()))
        (push,) = await owed(runner, ledger, lambda found: bool(found and found[0].attempts))
        assert before + low_ms <= push.next_ms <= now_ms() + high_ms
        assert (push.failure, push.dead_at_ms, push.delivered) == ("HTTP 503", None, 0)


async def test_pauses_grow_threefold(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    limits = PushSettings(attempts_max=4, pause_ms=10)
    async with receiver(reply(500)) as hook, pushing(ledger, limits) as runner:
        await begin(ledger, 1, PushConfig(url=hook.url()))
        await owed(runner, ledger, lambda found: found[0].dead_at_ms is not None)
        assert len(hook.served.requests) == 4
    pauses = [line.__dict__["again_in_ms"] for line in caplog.records if line.message == "push.failed"]
    assert pauses == [10, 30, 90]


@pytest.mark.parametrize(("said", "tries"), [(reply(410), 1), (reply(500), 3)])
async def test_one_given_up_is_visible_and_the_operator_can_have_it_tried_again(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, said: bytes, tries: int
) -> None:
    tally: list[str] = []
    async with receiver(said) as hook, pushing(ledger, QUICK, tally=tally) as runner:
        leased = await begin(ledger, 1, PushConfig(url=hook.url(), id="p"))
        (push,) = await owed(runner, ledger, lambda found: bool(found and found[0].dead_at_ms))
        assert (push.attempts, push.delivered) == (tries, 0)
        await advance(ledger, leased, end=True)
        await ledger.durable()
        assert (await ledger.counts()).pushes_dead == 1
        assert tally == ["failed"] * (tries - 1) + ["dead"]
        (line,) = [record for record in caplog.records if record.message == "push.dead"]
        assert (line.levelname, line.__dict__["push_id"]) == ("WARNING", "p")
        hook.script = [reply(200)]
        await ledger.commit(RetryPush(task_id=task_id(1), by=OPERATOR, id="p"))
        await hook.got(3)
        await owed(runner, ledger, lambda found: not found)
        assert hook.generations == [1, 2, 3], "nothing of what happened meanwhile is left out"


async def test_a_dead_webhook_delays_nobody_else(ledger: Ledger, hook: Receiver) -> None:
    async with receiver() as dead, pushing(ledger, leave_s=0):
        dead.held = asyncio.Event()
        leased = await begin(ledger, 1, PushConfig(url=dead.url()))
        await put(ledger, task_id(1), hook.url())
        await advance(ledger, leased, chunk("a"), end=True)
        await hook.got(2)
        assert not dead.taken


async def test_a_host_that_hangs_has_so_many_places_and_no_more(ledger: Ledger, hook: Receiver) -> None:
    limits = PushSettings(at_once_max=8, at_once_per_host_max=2)
    async with receiver() as hung, pushing(ledger, limits):
        hung.held = asyncio.Event()
        for number in range(1, 11):
            await begin(ledger, number, PushConfig(url=hung.url()))
        await hung.asked(2)
        for number in range(11, 16):
            await advance(ledger, await begin(ledger, number, PushConfig(url=hook.url())), end=True)
        await hook.got(15)
        assert len(hung.served.requests) == 2
        hung.held.set()
        await hung.got(20)


async def test_a_tenant_whose_hosts_all_hang_leaves_places_to_others(ledger: Ledger, hook: Receiver) -> None:
    limits = PushSettings(at_once_max=4, at_once_per_host_max=4)
    async with receiver() as one, receiver() as other, pushing(ledger, limits, leave_s=0):
        one.held = other.held = asyncio.Event()
        for number in range(1, 9):
            url = (one if number % 2 else other).url()
            await begin(ledger, number, PushConfig(url=url), recipient=agent("bob@greedy"))
        await one.asked(1)
        await other.asked(1)
        await advance(ledger, await begin(ledger, 20, PushConfig(url=hook.url())), end=True)
        await hook.got(3)
        assert len(one.served.requests) + len(other.served.requests) == 2


async def test_an_address_inside_is_refused_when_it_is_called_and_the_operator_sees_why(
    ledger: Ledger, hook: Receiver
) -> None:
    async with pushing(ledger, QUICK, allow=()) as runner:
        await begin(ledger, 1, PushConfig(url=hook.url()))
        (push,) = await owed(runner, ledger, lambda found: bool(found and found[0].dead_at_ms))
        assert push.failure is not None
        assert "loopback" in push.failure
        assert "outbound.allow" in push.failure
    assert not hook.served.connections


async def test_a_redirect_elsewhere_gets_nothing(ledger: Ledger, hook: Receiver) -> None:
    async with receiver(reply(307, location=hook.url("/stolen"))) as first, pushing(ledger) as runner:
        await begin(ledger, 1, PushConfig(url=first.url(), token="secret"))
        (push,) = await owed(runner, ledger, lambda found: bool(found and found[0].dead_at_ms))
        assert push.failure is not None
        assert "redirects" in push.failure
    assert not hook.served.connections


async def test_a_delivery_is_signed_and_any_change_shows(ledger: Ledger, hook: Receiver) -> None:
    async with pushing(ledger):
        await begin(ledger, 1, PushConfig(url=hook.url()))
        await hook.got(1)
    request = hook.taken[0]
    key, headers = public_key(KEY), request.headers
    assert headers["covenant-key-id"] == key
    delivery_id, moment_s, signature = (headers[f"webhook-{name}"] for name in ("id", "timestamp", "signature"))
    assert abs(int(moment_s) - now_ms() // 1000) <= BOUND_S
    assert verify_webhook(key, delivery_id, int(moment_s), request.body, signature)
    assert not verify_webhook(key, delivery_id, int(moment_s), request.body + b" ", signature)
    assert not verify_webhook(key, delivery_id, int(moment_s) + 1, request.body, signature)
    assert not verify_webhook(key, delivery_id + "0", int(moment_s), request.body, signature)
    assert not verify_webhook(key, delivery_id, int(moment_s), request.body, "v1," + signature[4:])
    assert not verify_webhook(public_key(bytes(32)), delivery_id, int(moment_s), request.body, signature)


@pytest.mark.parametrize(
    ("scheme", "credentials", "header"),
    [
        ("Bearer", "abc.def", "Bearer abc.def"),
        ("Basic", "dTpw", "Basic dTpw"),
        ("basic", "u:p", "basic dTpw"),
        ("Hook", "k=1, s=2", "Hook k=1, s=2"),
        ("Bearer", None, None),
    ],
)
async def test_it_authenticates_as_its_owner_asked(
    ledger: Ledger, hook: Receiver, scheme: str, credentials: str | None, header: str | None
) -> None:
    known = PushAuthentication(scheme=scheme, credentials=credentials)
    async with pushing(ledger):
        await begin(ledger, 1, PushConfig(url=hook.url(), token="tok", authentication=known))
        await hook.got(1)
    assert hook.taken[0].headers.get("authorization") == header
    assert hook.taken[0].headers["x-a2a-notification-token"] == "tok"


async def test_deleting_a_configuration_stops_the_delivery_under_way(ledger: Ledger) -> None:
    async with receiver() as hook, pushing(ledger):
        hook.held = asyncio.Event()
        leased = await begin(ledger, 1, PushConfig(url=hook.url(), id="p"))
        await hook.asked(1)
        await ledger.commit(DropPush(task_id=task_id(1), id="p"))
        await advance(ledger, leased, end=True)
        async with receiver() as later:
            await advance(ledger, await begin(ledger, 2, PushConfig(url=later.url())), end=True)
            await later.got(3)
        assert len(hook.served.requests) == 1


async def test_a_new_address_gets_what_the_old_one_did_not_take(ledger: Ledger, hook: Receiver) -> None:
    async with receiver() as old, pushing(ledger) as runner:
        old.held = asyncio.Event()
        leased = await begin(ledger, 1, PushConfig(url=old.url(), id="p"))
        await old.asked(1)
        await ledger.commit(PutPush(task_id=task_id(1), config=PushConfig(url=hook.url(), id="p")))
        await advance(ledger, leased, end=True)
        await hook.got(3)
        assert hook.generations == [1, 2, 3]
        await owed(runner, ledger, lambda found: not found)


async def test_a_cursor_that_is_saved_while_it_is_read_repeats_nothing(
    ledger: Ledger, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second delivery reads its cursor before the first one's is saved, and has the answer after that."""
    read, commit = ledger.pushes, ledger.commit
    reads, saves = 0, asyncio.Event()
    held = False

    async def commit_later(command: Any) -> Any:
        if isinstance(command, MovePushes):
            await saves.wait()
        return await commit(command)

    async def read_slowly(which: TaskId) -> Sequence[Push]:
        nonlocal reads
        found = await read(which)
        reads += held
        if reads == 2:  # the first is for the news, this one for the delivery
            saves.set()
            await eventually(lambda: asyncio.sleep(0, not runner._saver.unsaved))
        return found

    monkeypatch.setattr(ledger, "commit", commit_later)
    monkeypatch.setattr(ledger, "pushes", read_slowly)
    async with pushing(ledger) as runner:
        leased = await begin(ledger, 1, PushConfig(url=hook.url()))
        await hook.got(2)
        await eventually(lambda: asyncio.sleep(0, not runner._deliveries))
        held = True
        await advance(ledger, leased, end=True)
        await owed(runner, ledger, lambda found: not found)
    assert reads >= 2
    assert hook.generations == [1, 2, 3]


async def test_canceling_a_task_is_told_too(ledger: Ledger, hook: Receiver) -> None:
    async with pushing(ledger):
        await begin(ledger, 1, PushConfig(url=hook.url()))
        await ledger.commit(Cancel(task_id=task_id(1), by=OPERATOR, reason="enough"))
        await hook.got(3)
    assert hook.bodies[-1]["statusUpdate"]["status"]["state"] == "TASK_STATE_CANCELED"


async def test_after_a_stop_deliveries_go_on_where_they_were(tmp_path: Path, hook: Receiver) -> None:
    ledger = await open_ledger(tmp_path / "home", clock=now_ms)
    async with pushing(ledger) as runner:
        leased = await begin(ledger, 1, PushConfig(url=hook.url()))
        await hook.got(2)
    (push,) = await ledger.outbox()
    assert push.delivered == 2, "a stop writes down what was taken"
    await advance(ledger, leased, chunk("meanwhile"), end=True)
    await ledger.compact()
    await ledger.close()
    ledger = await open_ledger(tmp_path / "home", clock=now_ms)
    async with pushing(ledger) as runner:
        await hook.got(4)
        await owed(runner, ledger, lambda found: not found)
    await ledger.close()
    assert hook.generations == [1, 2, 3, 4]


async def test_one_that_sleeps_goes_on_sleeping_over_a_restart(tmp_path: Path) -> None:
    ledger = await open_ledger(tmp_path / "home", clock=now_ms)
    async with receiver(reply(500), reply(200)) as hook:
        async with pushing(ledger, PushSettings(pause_ms=400)) as runner:
            await begin(ledger, 1, PushConfig(url=hook.url()))
            (push,) = await owed(runner, ledger, lambda found: bool(found and found[0].attempts))
        await ledger.close()
        ledger = await open_ledger(tmp_path / "home", clock=now_ms)
        async with pushing(ledger) as runner:
            await hook.got(1)
            assert now_ms() >= push.next_ms
            assert hook.taken[0].headers["covenant-attempt"] == "2"
        await ledger.close()


async def test_its_secrets_are_in_no_log_and_no_record_but_the_configuration(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secrets = ("canary-token", "canary-credentials", "canary-path", "canary-query")
    known = PushAuthentication(scheme="Bearer", credentials="canary-credentials")
    async with receiver(reply(500)) as hook, pushing(ledger, PushSettings(attempts_max=2, pause_ms=1)) as runner:
        url = hook.url("/canary-path?key=canary-query")
        config = PushConfig(url=url, id="p", token="canary-token", authentication=known)
        leased = await begin(ledger, 1, config)
        await owed(runner, ledger, lambda found: bool(found and found[0].dead_at_ms))
        await ledger.commit(RetryPush(task_id=task_id(1), by=OPERATOR, id="p"))
        await owed(runner, ledger, lambda found: bool(found[0].dead_at_ms))
        await advance(ledger, leased, end=True)
        (push,) = await ledger.outbox()
        assert "canary" not in (push.failure or "")
        shown, rows = await ledger.show(task_id(1), None, 100), await ledger.audit_recent(None, 100, None)
    assert any(record.message == "push.dead" for record in caplog.records)
    told = " ".join(str(record.__dict__) for record in caplog.records)
    for secret in secrets:
        assert secret not in told
        assert secret not in f"{shown} {rows} {push!r} {config!r} {await steps(ledger)}"


async def test_a_configuration_that_cannot_be_sent_is_given_up_and_harms_nobody(ledger: Ledger, hook: Receiver) -> None:
    async with pushing(ledger) as runner:
        leased = await begin(ledger, 1, PushConfig(url=hook.url(), token="new\r\nline"))
        await put(ledger, task_id(1), hook.url())
        await advance(ledger, leased, end=True)
        await hook.got(1)
        push, *_ = await owed(runner, ledger, lambda found: bool(found[0].dead_at_ms))
        assert push.failure is not None
    assert all("x-a2a-notification-token" not in request.headers for request in hook.served.requests)


async def test_a_disabled_tenant_hears_nothing_until_it_is_enabled_again(ledger: Ledger, hook: Receiver) -> None:
    tenant = Tenant(name="default", token_sha256="", token_prefix="", limits=TenantLimits())
    await ledger.commit(AddTenant(by=OPERATOR, tenant=tenant))
    await ledger.commit(ChangeTenant(by=OPERATOR, name="default", disabled=True))
    async with receiver() as other, pushing(ledger):
        await advance(ledger, await begin(ledger, 1, PushConfig(url=hook.url())), end=True)
        elsewhere = await begin(ledger, 2, PushConfig(url=other.url()), recipient=agent("bob@other"))
        await advance(ledger, elsewhere, end=True)
        await other.got(3)
        assert not hook.served.connections
        await ledger.commit(ChangeTenant(by=OPERATOR, name="default", disabled=False))
        await hook.got(3)
        assert hook.generations == [1, 2, 3]


class Heard(logging.Handler):
    """Says when a line was logged."""

    def __init__(self, event: str) -> None:
        super().__init__()
        self.event = event
        self.came = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == self.event:
            self.came.set()


@pytest.mark.embedded
async def test_when_nothing_can_be_written_down_nothing_is_sent_again_and_again(ledger: Ledger, hook: Receiver) -> None:
    heard = Heard("push.stopped")
    logging.getLogger("covenant.outbound.push_sender").addHandler(heard)
    leased = await begin(ledger, 1, PushConfig(url=hook.url()))
    await advance(ledger, leased, *(chunk(str(number)) for number in range(100)))
    plan = fault_plans.Plan("journal.sync", fault_plans.fail(errno.EIO))
    with fault_plans.armed(plan):
        async with pushing(ledger):
            await hook.got(1)
            await asyncio.wait_for(heard.came.wait(), BOUND_S)
            sent = len(hook.served.requests)
            await ledger.outbox()
            assert len(hook.served.requests) == sent
    logging.getLogger("covenant.outbound.push_sender").removeHandler(heard)
    assert plan.fired
    assert hook.generations == sorted(set(hook.generations))


async def test_flaky_receivers_and_restarts_of_the_outbox_leave_no_gap_and_no_disorder(ledger: Ledger) -> None:
    count, ups_and_downs = 20, 4
    script = [reply(200), reply(500), reply(200), reply(429, retry_after="0"), reply(200), reply(200)] * 1_000
    limits = PushSettings(attempts_max=100, pause_ms=1, pause_ms_max=5)
    async with receiver(*script) as hook:
        leases = [await begin(ledger, number, PushConfig(url=hook.url(f"/{number}"))) for number in range(count)]
        for _ in range(ups_and_downs):
            async with pushing(ledger, limits):
                before = len(hook.taken)
                for leased in leases:
                    await advance(ledger, leased, chunk("a"), chunk("b"))
                await hook.got(before + count)
        async with pushing(ledger, limits) as runner:
            for leased in leases:
                await advance(ledger, leased, end=True)
            await owed(runner, ledger, lambda found: not found)
    for number in range(count):
        heard = [g for request, g in zip(hook.taken, hook.generations, strict=True) if request.target == f"/{number}"]
        assert heard == list(range(1, 2 + 2 * ups_and_downs + 2)), "a clean stop repeats nothing either"
