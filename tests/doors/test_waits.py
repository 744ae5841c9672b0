"""Waits end when the caller leaves, when its token is revoked, and when the daemon stops; no lease is lost by it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from covenant.doors.a2a.in_process_client import InProcessExchange
from covenant.doors.operator_api.mailbox import drain_waiting, take_waiting
from covenant.doors.waits import CallerGoneError, Pause, Waits, while_connected
from covenant.model.errors import OverLimit, Refusal, Unavailable
from covenant.model.settings import Limits
from covenant.wire.mailbox import DrainRequest, ReceiveRequest
from tests.doors.clients import HttpConnection
from tests.doors.doors_under_test import DoorsUnderTest, EnrolledCaller, new_task
from tests.waits import BOUND_S


@asynccontextmanager
async def http_wait(under_test: DoorsUnderTest, actor: EnrolledCaller, target: str) -> AsyncIterator[HttpConnection]:
    async with HttpConnection(under_test.port) as connection:
        await connection.say("GET", target, {"Authorization": f"Bearer {actor.token}"}, b"")
        await under_test.waits.until(1)
        yield connection


@pytest.mark.parametrize("target", ["/a2a/tasks/next?wait_ms=60000", "/a2a/results/next?wait_ms=60000"])
async def test_revoking_a_token_ends_its_long_polls(under_test: DoorsUnderTest, target: str) -> None:
    alice, bob = await under_test.pair()
    async with http_wait(under_test, bob, target) as connection:
        await under_test.registry.revoke(under_test.principal, "alice@test")
        await under_test.waits.until(1)
        await under_test.operator.http.post("/identities/revoke", {"identity": "bob@test"})
        reply = await connection.hear()
        assert (reply.status, reply.json["code"]) == (401, "unknown_token")
        assert reply.headers["www-authenticate"] == "Bearer"
    await under_test.waits.until(0)
    assert (await alice.http.ask("GET", "/a2a/queue")).status == 401


async def test_rotating_a_token_ends_the_waits_of_the_old_one(under_test: DoorsUnderTest) -> None:
    _, bob = await under_test.pair()
    async with http_wait(under_test, bob, "/a2a/tasks/next?wait_ms=60000") as connection:
        await under_test.operator.http.post("/identities/rotate", {"identity": "bob@test"})
        assert (await connection.hear()).status == 401


async def test_revoking_a_token_ends_its_connections_to_the_socket(under_test: DoorsUnderTest) -> None:
    alice, bob = await under_test.pair()
    async with under_test.connect() as idle, under_test.connect() as waiting, under_test.connect() as other:
        for connection, actor in ((idle, bob), (waiting, bob), (other, alice)):
            await connection.authenticate(actor.token)
        await waiting.send_bytes(b'{"kind":"try_recv_a2a_task","wait_ms":60000}')
        await under_test.waits.until(1)
        await under_test.registry.revoke(under_test.principal, "bob@test")
        assert await idle.hear() is None
        assert (await waiting.hear())["code"] == "unknown_token"
        assert await waiting.hear() is None
        assert (await other.ask("ping"))["kind"] == "pong"


async def test_requests_already_sent_are_not_served_after_a_revocation(under_test: DoorsUnderTest) -> None:
    """The operator revokes itself; what it had sent behind that is not done any more."""
    async with under_test.connect() as connection:
        await connection.authenticate(under_test.operator.token)
        await connection.send_bytes(b'{"kind":"revoke_identity","identity":"operator@test","force":true}')
        await connection.send_bytes(b'{"kind":"enroll_identity","display":"eve@test"}')
        assert (await connection.hear())["kind"] == "identity_revoked"
        assert await connection.hear() is None
    assert [each.agent.display for each in await under_test.ledger.identities()] == ["operator@test"]


async def test_rotating_ones_own_token_on_the_socket_tells_the_new_one_and_ends(under_test: DoorsUnderTest) -> None:
    async with under_test.connect() as connection:
        await connection.authenticate(under_test.operator.token)
        rotated = await connection.ask("rotate_token")
        assert await connection.hear() is None
    async with under_test.connect() as connection:
        await connection.authenticate(rotated["token_b58"])


@pytest.mark.parametrize("door", ["http", "ipc"])
async def test_no_lease_is_taken_for_a_caller_that_has_left(under_test: DoorsUnderTest, door: str) -> None:
    alice, bob = await under_test.pair()
    if door == "http":
        async with http_wait(under_test, bob, "/a2a/tasks/next?wait_ms=60000"):
            pass
    else:
        async with under_test.connect() as connection:
            await connection.authenticate(bob.token)
            await connection.send_bytes(b'{"kind":"try_recv_a2a_task","wait_ms":60000}')
            await under_test.waits.until(1)
    await under_test.waits.until(0)
    task = new_task(bob)
    await alice.http.post("/a2a/tasks", task)
    taken = await bob.http.get("/a2a/tasks/next")
    assert (taken["task"]["id"], taken["lease"]["attempt"]) == (task["id"], 1)


def left() -> Pause:
    pause = Pause()
    pause.leave()
    return pause


async def test_a_lease_taken_just_as_the_caller_left_is_given_back(under_test: DoorsUnderTest) -> None:
    """The caller leaves while the lease is being made durable: nobody would ever hear of it."""
    alice, bob = await under_test.pair()
    await alice.http.post("/a2a/tasks", new_task(bob))
    principal = under_test.identity_auth.recognise(bob.token)
    assert principal is not None
    with pytest.raises(CallerGoneError):
        await take_waiting(under_test.office, principal, ReceiveRequest(wait_ms=60_000), left())
    assert (await bob.http.get("/a2a/tasks/next"))["lease"]["attempt"] == 2


async def test_a_result_drained_just_as_the_caller_left_can_be_drained_again(under_test: DoorsUnderTest) -> None:
    alice, bob = await under_test.pair()
    task = new_task(bob)
    await alice.http.post("/a2a/tasks", task)
    await bob.http.get("/a2a/tasks/next")
    await bob.http.post("/a2a/results", {"task_id": task["id"], "status": "ok"})
    principal = under_test.identity_auth.recognise(alice.token)
    assert principal is not None
    with pytest.raises(CallerGoneError):
        await drain_waiting(under_test.office, principal, DrainRequest(wait_ms=60_000), left())
    assert (await alice.http.get("/a2a/results/next"))["result"]["task_id"] == task["id"]


async def test_a_caller_that_left_under_a_request_id_finds_the_same_when_it_asks_again(
    under_test: DoorsUnderTest,
) -> None:
    """It may be asking again already, over another connection: what it was told there must stay its own."""
    alice, bob = await under_test.pair()
    await alice.http.post("/a2a/tasks", new_task(bob))
    principal = under_test.identity_auth.recognise(bob.token)
    assert principal is not None
    with pytest.raises(CallerGoneError):
        await take_waiting(under_test.office, principal, ReceiveRequest(wait_ms=60_000, request_id="r-1"), left())
    again = await bob.http.get("/a2a/tasks/next?request_id=r-1")
    assert again["lease"]["attempt"] == 1
    assert (await bob.http.get("/a2a/tasks/next"))["task"] is None


async def test_a_stop_ends_every_wait_and_lets_no_new_one_begin(under_test: DoorsUnderTest) -> None:
    _, bob = await under_test.pair()
    async with http_wait(under_test, bob, "/a2a/tasks/next?wait_ms=60000") as connection:
        under_test.waits.stop()
        reply = await connection.hear()
        assert (reply.status, reply.json["code"]) == (503, "stopping")
    assert (await bob.http.ask("GET", "/a2a/results/next?wait_ms=60000")).json["code"] == "stopping"
    assert (await bob.http.get("/a2a/results/next"))["result"] is None


async def nothing_happens() -> bool:
    await asyncio.Event().wait()
    return True


async def something_happens() -> bool:
    return True


async def test_a_pause_gives_what_happens_unless_it_is_ended_first() -> None:
    pause = Pause()
    assert await pause.until(something_happens())
    pause.end(Unavailable("stopping", "first"))
    pause.end(Unavailable("other", "second"))
    for happening in (something_happens, nothing_happens):
        with pytest.raises(Refusal, match="first"):
            await pause.until(happening())
    with pytest.raises(CallerGoneError):
        await left().until(something_happens())


async def test_a_wake_for_a_caller_that_has_just_left_is_passed_on(under_test: DoorsUnderTest) -> None:
    """Both wait; the first leaves in the very moment in which the task arrives."""
    alice, bob = await under_test.pair()
    principal = under_test.identity_auth.recognise(bob.token)
    assert principal is not None
    pauses = [Pause(), Pause()]
    waiting = []
    for pause in pauses:
        waiting.append(
            asyncio.ensure_future(take_waiting(under_test.office, principal, ReceiveRequest(wait_ms=60_000), pause))
        )
        await asyncio.sleep(0.05)
    task = new_task(bob)
    pauses[0].leave()
    await alice.http.post("/a2a/tasks", task)
    first, second = waiting
    with pytest.raises(CallerGoneError):
        await first
    taken = await asyncio.wait_for(second, BOUND_S)
    assert taken.task is not None
    assert taken.task.id == task["id"]


async def test_one_result_ends_one_of_many_drains_and_the_longest_waiting(under_test: DoorsUnderTest) -> None:
    alice, bob = await under_test.pair()
    principal = under_test.identity_auth.recognise(alice.token)
    assert principal is not None
    pause = Pause()
    drains = []
    for _ in range(5):
        wait = drain_waiting(under_test.office, principal, DrainRequest(wait_ms=60_000), pause)
        drains.append(asyncio.ensure_future(wait))
        await asyncio.sleep(0.02)
    await alice.http.post("/a2a/tasks", new_task(bob))
    task = (await bob.http.get("/a2a/tasks/next"))["task"]
    await bob.http.post("/a2a/results", {"task_id": task["id"], "status": "ok"})
    assert (await asyncio.wait_for(drains[0], BOUND_S)).result is not None
    assert not any(drain.done() for drain in drains[1:])
    pause.leave()
    await asyncio.gather(*drains, return_exceptions=True)


async def test_waits_are_bounded_for_each_caller_and_in_all(under_test: DoorsUnderTest) -> None:
    """Above the bound the caller is told to come back; whoever waits already is left alone."""
    alice, bob = await under_test.pair()
    principals = [under_test.identity_auth.recognise(each.token) for each in (alice, bob)]
    first, second = [each for each in principals if each is not None]
    waits = Waits(under_test.identity_auth, Limits(waits_max=3, waits_per_caller_max=2))
    with waits.pause(first), waits.pause(first), waits.pause(second):
        for principal in (first, second):
            with pytest.raises(OverLimit) as refused, waits.pause(principal):
                pass
            assert (refused.value.code, refused.value.status) == ("too_many_waits", 429)
    with waits.pause(first) as pause:
        assert await pause.until(something_happens())


async def test_work_is_canceled_when_its_caller_leaves() -> None:
    other = InProcessExchange({}, b"")
    asyncio.get_running_loop().call_soon(other.disconnect)
    with pytest.raises(CallerGoneError), while_connected(other):
        await nothing_happens()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_work_that_ends_before_its_caller_leaves_is_left_alone() -> None:
    other = InProcessExchange({}, b"")
    with while_connected(other):
        assert await something_happens()
    other.disconnect()
    for _ in range(5):
        await asyncio.sleep(0)


async def test_work_can_be_ended_for_another_reason_and_the_first_counts() -> None:
    other = InProcessExchange({}, b"")

    async def work() -> None:
        with while_connected(other) as connected:
            connected.end(Unavailable("gone", "revoked"))
            connected.end(Unavailable("gone", "later"))
            await nothing_happens()

    with pytest.raises(Unavailable, match="revoked"):
        await work()


async def test_work_that_is_canceled_by_somebody_else_is_canceled() -> None:
    other = InProcessExchange({}, b"")

    async def work() -> None:
        with while_connected(other):
            await nothing_happens()

    working = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
