"""What each operation answers, over both doors."""

import asyncio
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant.doors.operator_api.operation_table import OPERATIONS
from covenant.exchange.file_source import pieces_of
from covenant.ledger.machine.commands import MovePushes, PutPush
from covenant.model.a2a_requests import PushConfig
from covenant.model.push import move_of
from covenant.model.settings import Limits
from tests.doors.doors_under_test import DoorsUnderTest, EnrolledCaller, new_task, now_ms, open_doors
from tests.doors.speakers import HttpSpeaker, IpcSpeaker, Speaker
from tests.waits import BOUND_S

LONG_MS = 20_000


def result_of(task: dict[str, Any], text: str = "done", **fields: Any) -> dict[str, Any]:
    return {"task_id": task["id"], "status": "ok", "content": [{"type": "text", "text": text}], **fields}


async def leased_task(
    speaker: Speaker, alice: EnrolledCaller, bob: EnrolledCaller, **fields: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A task that bob has just leased, and its lease."""
    task = new_task(bob, **fields)
    await speaker.ask(alice, "send_a2a_task", task=task)
    taken = await speaker.ask(bob, "try_recv_a2a_task")
    return taken["task"], taken["lease"]


async def test_a_task_is_sent_leased_answered_and_drained(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    task = new_task(bob, parts=[{"type": "json", "value": {"deep": [1, None]}}], deadline_ms=now_ms() + 60_000)

    queued = await speaker.ask(alice, "send_a2a_task", task=task)
    assert queued == {"kind": "a2a_task_queued", "task_id": task["id"]}
    again = await speaker.ask(alice, "send_a2a_task", task=task)
    assert again == {"kind": "a2a_task_queued", "task_id": task["id"], "duplicate": True}

    taken = await speaker.ask(bob, "try_recv_a2a_task")
    expected = {**task, "sender": alice.wire, "recipient": bob.wire}
    assert taken["kind"] == "a2a_task_opt"
    assert taken["task"] == expected
    assert set(taken["lease"]) == {"lease_id", "attempt", "leased_at_ms"}
    assert taken["lease"]["attempt"] == 1
    assert taken["tasks"] == [{"task": expected, "lease": taken["lease"]}]
    empty: dict[str, Any] = {"kind": "a2a_task_opt", "task": None, "lease": None, "tasks": []}
    assert await speaker.ask(bob, "try_recv_a2a_task") == empty

    result = result_of(task)
    posted = await speaker.ask(bob, "post_a2a_result", result={**result, "lease_id": taken["lease"]["lease_id"]})
    assert posted == {"kind": "a2a_result_posted", "task_id": task["id"]}
    assert (await speaker.ask(bob, "post_a2a_result", result=result))["duplicate"] is True

    assert await speaker.ask(alice, "recent_a2a_results") == {"kind": "a2a_results", "results": [result]}
    drained = await speaker.ask(alice, "try_recv_a2a_result")
    assert drained == {"kind": "a2a_result_opt", "result": result, "results": [result]}
    empty = {"kind": "a2a_result_opt", "result": None, "results": []}
    assert await speaker.ask(alice, "try_recv_a2a_result") == empty


async def test_batches_and_repeats_by_request_id(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    tasks = [new_task(bob, f"number {n}") for n in range(5)]
    for task in tasks:
        await speaker.ask(alice, "send_a2a_task", task=task)
    first = await speaker.ask(bob, "try_recv_a2a_task", max=3, request_id="r1")
    assert [each["task"]["id"] for each in first["tasks"]] == [task["id"] for task in tasks[:3]]
    assert (first["task"], first["lease"]) == (first["tasks"][0]["task"], first["tasks"][0]["lease"])
    assert await speaker.ask(bob, "try_recv_a2a_task", max=3, request_id="r1") == first
    for task in tasks[:3]:
        await speaker.ask(bob, "post_a2a_result", result=result_of(task))
    drained = await speaker.ask(alice, "try_recv_a2a_result", max=2, request_id="d1")
    assert [each["task_id"] for each in drained["results"]] == [task["id"] for task in tasks[:2]]
    assert await speaker.ask(alice, "try_recv_a2a_result", max=2, request_id="d1") == drained


async def test_a_repeated_receive_does_not_wait_for_more_than_it_was_given(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    task, _ = await leased_task(speaker, alice, bob)
    await speaker.ask(bob, "post_a2a_result", result=result_of(task))
    other = new_task(bob)
    await speaker.ask(alice, "send_a2a_task", task=other)
    given = await speaker.ask(bob, "try_recv_a2a_task", request_id="r1")
    assert given["task"]["id"] == other["id"]
    await speaker.ask(bob, "post_a2a_result", result=result_of(other))
    await speaker.ask(alice, "send_a2a_task", task=new_task(bob))
    async with asyncio.timeout(LONG_MS / 2_000):
        again = await speaker.ask(bob, "try_recv_a2a_task", request_id="r1", wait_ms=LONG_MS)
    assert again["tasks"] == []


async def test_a_wait_ends_when_there_is_something_to_take(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    task = new_task(bob)
    waiting = asyncio.create_task(speaker.ask(bob, "try_recv_a2a_task", wait_ms=LONG_MS))
    await speaker.ask(alice, "send_a2a_task", task=task)
    assert (await waiting)["task"]["id"] == task["id"]
    waiting = asyncio.create_task(speaker.ask(alice, "try_recv_a2a_result", wait_ms=LONG_MS))
    await speaker.ask(bob, "post_a2a_result", result=result_of(task))
    assert (await waiting)["result"]["task_id"] == task["id"]


async def test_a_wait_ends_empty_when_its_time_is_over(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    _, bob = await under_test.pair()
    assert (await speaker.ask(bob, "try_recv_a2a_task", wait_ms=5))["task"] is None
    assert (await speaker.ask(bob, "try_recv_a2a_result", wait_ms=5))["result"] is None


async def test_the_result_of_one_task_is_waited_for_and_drained_before_others(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    first, second = new_task(bob, "first"), new_task(bob, "second")
    for task in (first, second):
        await speaker.ask(alice, "send_a2a_task", task=task)
    await speaker.ask(bob, "try_recv_a2a_task", max=2)
    await speaker.ask(bob, "post_a2a_result", result=result_of(first))
    assert (await speaker.ask(alice, "try_recv_a2a_result", task_id=second["id"]))["result"] is None
    waiting = asyncio.create_task(speaker.ask(alice, "try_recv_a2a_result", task_id=second["id"], wait_ms=LONG_MS))
    await under_test.waits.until(1)
    await speaker.ask(bob, "post_a2a_result", result=result_of(second))
    assert (await waiting)["result"]["task_id"] == second["id"]
    again = await speaker.tell(alice, "try_recv_a2a_result", task_id=second["id"])
    assert (again.answer["code"], again.status) in [("already_drained", 409), ("already_drained", None)]
    foreign = await speaker.tell(bob, "try_recv_a2a_result", task_id=first["id"])
    assert (foreign.answer["code"], foreign.status) in [("unknown_task", 404), ("unknown_task", None)]
    assert (await speaker.ask(alice, "try_recv_a2a_result"))["result"]["task_id"] == first["id"]


async def test_the_operator_takes_and_drains_for_everybody(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    operator = under_test.operator
    await under_test.grant("a2a.respond.alice@test", operator)
    task = new_task(bob)
    await speaker.ask(alice, "send_a2a_task", task=task)
    assert (await speaker.ask(operator, "try_recv_a2a_task"))["task"] is None
    taken = await speaker.ask(operator, "try_recv_a2a_task", scope="all", wait_ms=LONG_MS)
    assert taken["task"]["id"] == task["id"]
    await speaker.ask(operator, "post_a2a_result", result=result_of(task))
    drained = await speaker.ask(operator, "try_recv_a2a_result", scope="all", wait_ms=LONG_MS)
    assert drained["result"]["task_id"] == task["id"]


async def test_the_queue_is_looked_at_without_taking_anything(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    task, lease = await leased_task(speaker, alice, bob)
    waiting = new_task(bob, "later", deadline_ms=now_ms() + 60_000)
    await speaker.ask(alice, "send_a2a_task", task=waiting)

    recent = await speaker.ask(alice, "recent_a2a_tasks", limit=5)
    assert [each["id"] for each in recent["tasks"]] == [waiting["id"]]
    seen = await speaker.ask(under_test.operator, "a2a_queue")
    assert [(entry["state"], entry["task"]["id"], entry["attempt"]) for entry in seen["tasks"]] == [
        ("in_flight", task["id"], 1),
        ("queued", waiting["id"], 0),
    ]
    assert seen["tasks"][0]["lease_id"] == lease["lease_id"]
    assert seen["tasks"][0]["leased_to"] == bob.wire
    assert seen["results"] == []
    assert "truncated" not in seen

    async def listed(**filters: Any) -> list[str]:
        answer = await speaker.ask(bob, "a2a_queue", **filters)
        return [entry["task"]["id"] for entry in answer["tasks"]]

    assert await listed(state_filter="queued") == [waiting["id"]]
    assert await listed(state_filter="in-flight") == [task["id"]]
    assert await listed(min_lease_age_ms=60_000) == [waiting["id"]]
    assert await listed(deadline_within_ms=120_000) == [waiting["id"]]
    assert await listed(limit=1) == [task["id"]]
    stranger = await under_test.enroll("carol@test")
    assert (await speaker.ask(stranger, "a2a_queue"))["tasks"] == []


async def test_whoever_watches_the_queue_is_answered_when_it_is_another_one(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    operator = under_test.operator
    empty = await speaker.ask(operator, "a2a_queue", wait_ms=LONG_MS)
    assert empty["tasks"] == []
    waiting = asyncio.create_task(speaker.ask(operator, "a2a_queue", after=empty["next"], wait_ms=LONG_MS))
    await under_test.waits.until(1)
    task, _ = await leased_task(speaker, alice, bob)
    shown = await asyncio.wait_for(waiting, BOUND_S)
    while [entry["state"] for entry in shown["tasks"]] != ["in_flight"]:
        shown = await speaker.ask(operator, "a2a_queue", after=shown["next"], wait_ms=LONG_MS)
    assert shown["tasks"][0]["task"]["id"] == task["id"]
    # What moved between two requests, and what was seen of another daemon, is told at once.
    for seen in (empty["next"], "of another run"):
        again = await speaker.ask(operator, "a2a_queue", after=seen, wait_ms=LONG_MS)
        assert [entry["state"] for entry in again["tasks"]] == ["in_flight"]
        assert (await speaker.ask(operator, "a2a_queue", after=again["next"], wait_ms=5))["next"] == again["next"]
    assert "next" not in await speaker.ask(operator, "a2a_queue")


async def test_whoever_watches_the_queue_is_not_woken_by_what_it_may_not_see(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    carol = await under_test.enroll("carol@test")
    seen = (await speaker.ask(carol, "a2a_queue", wait_ms=LONG_MS))["next"]
    watching = asyncio.create_task(speaker.ask(carol, "a2a_queue", after=seen, wait_ms=LONG_MS))
    await under_test.waits.until(1)
    operator = (await speaker.ask(under_test.operator, "a2a_queue", wait_ms=LONG_MS))["next"]
    await leased_task(speaker, alice, bob)
    # The operator, who began to watch later, has seen it.
    await speaker.ask(under_test.operator, "a2a_queue", after=operator, wait_ms=LONG_MS)
    assert not watching.done()
    await under_test.grant("a2a.send.carol@test", alice)
    await speaker.ask(alice, "send_a2a_task", task=new_task(carol))
    assert len((await asyncio.wait_for(watching, BOUND_S))["tasks"]) == 1


async def test_tasks_are_found_live_and_finished_by_what_is_known_of_them(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    since_ms = now_ms()
    done, lease = await leased_task(speaker, alice, bob, task_kind="report")
    await speaker.ask(bob, "post_a2a_result", result=result_of(done, lease_id=lease["lease_id"]))
    await speaker.ask(alice, "try_recv_a2a_result")
    held, lease = await leased_task(speaker, alice, bob)
    await speaker.ask(alice, "send_a2a_task", task=(waiting := new_task(bob, "A Later one", parent=held["id"])))

    async def found(caller: EnrolledCaller = alice, **filters: Any) -> list[str]:
        answer = await speaker.ask(caller, "find_a2a_tasks", **filters)
        assert answer["kind"] == "a2a_found"
        return [task["task_id"] for task in answer["tasks"]]

    everything = [waiting["id"], held["id"], done["id"]]
    for caller in (alice, bob, under_test.operator):
        assert await found(caller, since_ms=since_ms) == everything
    assert await found(state="queued,in_flight", order="moved") == everything[:2]
    assert await found(state="done") == await found(task_kind="report", outcome="completed") == [done["id"]]
    assert (
        await found(state="completed") == await found(state="drained") == await found(state="resolved") == [done["id"]]
    )
    assert await found(state="failed") == await found(state="cancelled,rejected") == []
    assert await found(agent="bob@test", sender="alice@test", ascending=True) == everything[::-1]
    assert await found(parent=held["id"]) == await found(text="later ONE") == [waiting["id"]]
    assert await found(id=held["id"][:13]) == [held["id"]]
    stranger = await under_test.enroll("carol@test")
    assert await found(stranger) == await found(stranger, id=held["id"]) == []

    page = await speaker.ask(alice, "find_a2a_tasks", limit=2, count=True)
    assert (page["total"], [task["task_id"] for task in page["tasks"]]) == (3, everything[:2])
    rest = await speaker.ask(alice, "find_a2a_tasks", limit=2, after=page["next"])
    assert (rest["total"], rest["next"], [task["task_id"] for task in rest["tasks"]]) == (None, None, everything[2:])
    shown = page["tasks"][1]
    assert (shown["lease_id"], shown["leased_to"], shown["state"]) == (lease["lease_id"], "bob@test", "in_flight")
    assert (await speaker.ask(stranger, "find_a2a_tasks", count=True))["total"] == 0


async def test_tasks_are_counted_by_lane_and_by_agent(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    done, lease = await leased_task(speaker, alice, bob)
    await speaker.ask(bob, "post_a2a_result", result=result_of(done, lease_id=lease["lease_id"]))
    await speaker.ask(alice, "try_recv_a2a_result")
    await leased_task(speaker, alice, bob)
    await speaker.ask(alice, "send_a2a_task", task=new_task(bob))
    lanes = {"queued": 1, "in_flight": 1, "parked": 0, "following": 0, "result_pending": 0, "failed": 0, "done": 1}
    counts = await speaker.ask(under_test.operator, "count_a2a_tasks")
    assert (counts["kind"], counts["lanes"], counts["holders_lost"]) == ("a2a_counts", lanes, 0)
    assert counts["by_agent"] == [{"agent": "bob@test", "tenant": None, **lanes}]
    assert (await speaker.ask(bob, "count_a2a_tasks"))["lanes"] == lanes
    stranger = await under_test.enroll("carol@test")
    empty = await speaker.ask(stranger, "count_a2a_tasks")
    assert (set(empty["lanes"].values()), empty["by_agent"]) == ({0}, [])


async def test_tasks_are_repaired_in_bulk_after_a_dry_run_and_the_audit_tells_of_each(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    operator = under_test.operator
    await under_test.grant("a2a.repair.requeue", operator)
    held = [(await leased_task(speaker, alice, bob))[0]["id"] for _ in range(3)]
    await speaker.ask(alice, "send_a2a_task", task=(waiting := new_task(bob)))
    request = {
        "filter": {"agent": "bob@test", "state": "queued,in_flight"},
        "command": "requeue",
        "duplicate_risk": "operator_accepted",
        "reason": "the host of bob is gone",
    }
    dry = await speaker.ask(operator, "repair_a2a_tasks", **request)
    assert (dry["kind"], dry["dry_run"], dry["matched"], dry["applied"]) == ("a2a_bulk", True, 4, 0)
    expected = [(task_id, "would_apply") for task_id in held] + [(waiting["id"], "refused")]
    assert [(each["task_id"], each["outcome"]) for each in dry["outcomes"]] == expected
    assert dry["outcomes"][3]["code"] == "not_leased"
    lanes = (await speaker.ask(operator, "count_a2a_tasks"))["lanes"]
    assert (lanes["queued"], lanes["in_flight"]) == (1, 3)

    first = await speaker.ask(operator, "repair_a2a_tasks", **request, dry_run=False, limit=1)
    assert (first["matched"], first["applied"], first["more"]) == (1, 1, True)
    rest = await speaker.ask(operator, "repair_a2a_tasks", **request, dry_run=False)
    assert (rest["matched"], rest["applied"], rest.get("more")) == (4, 2, None)
    canceled = await speaker.ask(
        operator, "repair_a2a_tasks", filter={"agent": "bob@test"}, command="cancel", reason="over", dry_run=False
    )
    assert (canceled["matched"], canceled["applied"]) == (4, 4)
    rows = [row["kind"] for row in (await speaker.ask(operator, "recent_audit", limit=100))["events"]]
    applied = [(row["action"], row["task_id"]) for row in rows if row["type"] == "a2a_repair_applied"]
    assert sorted(applied) == sorted(
        [("requeue", each) for each in held] + [("cancel", each) for each in (*held, waiting["id"])]
    )
    passes = [row for row in rows if row["type"] == "a2a_bulk_repair"]
    assert [(row["action"], row["matched"], row["applied"], row["refused"]) for row in passes] == [
        ("requeue", 1, 1, 0),
        ("requeue", 4, 2, 2),
        ("cancel", 4, 4, 0),
    ]
    assert passes[0]["filter"] == request["filter"]


async def test_a_repair_in_bulk_does_no_more_than_its_caller_may_and_needs_a_filter_a_reason_and_a_posture(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    task, _ = await leased_task(speaker, alice, bob)
    stranger = await under_test.enroll("carol@test")
    request: dict[str, Any] = {
        "filter": {"agent": "bob@test"},
        "command": "force_error",
        "reason": "gone",
        "dry_run": False,
    }
    nothing = await speaker.ask(stranger, "repair_a2a_tasks", **request)
    assert (nothing["matched"], nothing["outcomes"]) == (0, [])
    refused = await speaker.ask(alice, "repair_a2a_tasks", **request)
    assert [(each["task_id"], each["outcome"], each["code"]) for each in refused["outcomes"]] == [
        (task["id"], "refused", "capability_missing")
    ]
    for wrong, code in (
        ({"filter": {}}, "invalid_filter"),
        ({"filter": {"agnet": "bob@test"}}, "unknown_field"),
        ({"filter": {"state": "faild"}}, "invalid_filter"),
        ({"reason": " "}, "invalid_reason"),
        ({"command": "requeue"}, "invalid_repair"),
        ({"command": "purge"}, "invalid_request"),
        ({"message": " "}, "invalid_repair"),
        ({"limit": 1_001}, "invalid_limit"),
        ({"limit": 0}, "invalid_limit"),
        ({"dry_run": "no"}, "invalid_request"),
    ):
        told = await speaker.tell(under_test.operator, "repair_a2a_tasks", **{**request, **wrong})
        assert (wrong, told.answer["code"]) == (wrong, code)


async def test_a_query_that_asks_for_what_cannot_be_is_refused(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, _ = await under_test.pair()
    for wrong, code in (
        ({"state": "faild"}, "invalid_filter"),
        ({"state": "queued,failed"}, "invalid_filter"),
        ({"state": "failed", "outcome": "completed"}, "invalid_filter"),
        ({"state": ""}, "invalid_filter"),
        ({"outcome": "won"}, "invalid_filter"),
        ({"agnet": "bob@test"}, "unknown_field"),
        ({"limit": 0}, "invalid_limit"),
        ({"limit": 201}, "invalid_limit"),
        ({"limit": "many"}, "invalid_request"),
        ({"text": "x" * 201}, "invalid_filter"),
        ({"text": ""}, "invalid_filter"),
        ({"agent": "x" * 1_001}, "invalid_filter"),
        ({"id": "zz"}, "invalid_filter"),
        ({"order": "name"}, "invalid_request"),
        ({"since_ms": -1}, "invalid_request"),
        ({"attempt_min": 2**64}, "invalid_request"),
        ({"after": "elsewhere"}, "invalid_cursor"),
        ({"after": "m1-1"}, "invalid_cursor"),
    ):
        told = await speaker.tell(alice, "find_a2a_tasks", **wrong)
        assert (wrong, told.answer["code"]) == (wrong, code)


async def test_the_queue_can_be_asked_for_what_is_parked_and_what_follows(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    parked, lease = await leased_task(speaker, alice, bob)
    question = {"type": "status", "text": "which one?", "state": "input-required"}
    await speaker.ask(bob, "update_a2a_task", task_id=parked["id"], lease_id=lease["lease_id"], update=question)
    same = {"idempotency": {"duplicate_safety": "idempotent", "key": "report-7"}}
    leader, follower = new_task(bob, "the report", **same), new_task(bob, "the report", **same)
    for task in (leader, follower):
        await speaker.ask(alice, "send_a2a_task", task=task)

    for state, task in (("parked", parked), ("following", follower), ("queued", leader)):
        answer = await speaker.ask(alice, "a2a_queue", state_filter=state)
        assert [(entry["state"], entry["task"]["id"]) for entry in answer["tasks"]] == [(state, task["id"])]


async def test_nobodys_many_tasks_starve_another_recipient(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    carol = await under_test.enroll("carol@test")
    await under_test.grant("a2a.send.carol@test", alice)
    for number in range(20):
        await speaker.ask(alice, "send_a2a_task", task=new_task(bob, f"one of many: {number}"))
    few = [new_task(carol, f"one of few: {number}") for number in range(2)]
    for task in few:
        await speaker.ask(alice, "send_a2a_task", task=task)
    taken = [await speaker.ask(under_test.operator, "try_recv_a2a_task", scope="all") for _ in range(4)]
    assert {task["id"] for task in few} <= {each["task"]["id"] for each in taken}
    rest = await speaker.ask(under_test.operator, "try_recv_a2a_task", scope="all", max=18)
    texts = [each["task"]["intent_text"] for each in rest["tasks"]]
    assert texts == [f"one of many: {number}" for number in range(2, 20)], "each recipient's in their order"


async def test_blocks_keep_what_only_mcp_has(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    more = {"annotations": {"audience": ["user"], "priority": 0.5}, "_meta": {"example.org/trace": "7"}}
    link = {"type": "resource_link", "uri": "file:///report", "name": "report", "title": "The report", "size": 12}
    icons = {"icons": [{"src": "https://example.org/icon.png", "sizes": ["48x48"]}]}
    blocks = [
        {"type": "text", "text": "done", **more},
        {"type": "image", "data": "aGk=", "mimeType": "image/png", **more},
        {"type": "audio", "data": "aGk=", "mimeType": "audio/wav", **more},
        {"type": "resource", "resource": {"uri": "file:///a", "text": "a", "_meta": more["_meta"]}, **more},
        {**link, **icons, **more},
    ]
    task = new_task(bob, "with all of it", parts=blocks)
    await speaker.ask(alice, "send_a2a_task", task=task)
    taken = await speaker.ask(bob, "try_recv_a2a_task")
    assert taken["task"]["parts"] == blocks
    result = {"task_id": task["id"], "status": "ok", "content": blocks}
    await speaker.ask(bob, "post_a2a_result", result=result)
    assert (await speaker.ask(alice, "try_recv_a2a_result"))["result"]["content"] == blocks
    shown = await speaker.ask(alice, "show_a2a_task", task_id=task["id"])
    assert (shown["task"]["parts"], shown["result"]["content"]) == (blocks, blocks)


async def test_a_deadline_may_be_any_whole_number_of_64_bits(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    late = new_task(bob, "some day", deadline_ms=2**64 - 1)
    await speaker.ask(alice, "send_a2a_task", task=late)
    assert (await speaker.ask(alice, "show_a2a_task", task_id=late["id"]))["task"]["deadline_ms"] == 2**64 - 1
    (entry,) = (await speaker.ask(alice, "a2a_queue"))["tasks"]
    assert entry["task"]["deadline_ms"] == 2**64 - 1
    assert (await speaker.ask(bob, "try_recv_a2a_task"))["task"] == entry["task"]
    refused = await speaker.tell(alice, "send_a2a_task", task=new_task(bob, "never", deadline_ms=2**64))
    assert refused.answer["code"] == "invalid_task"


async def test_a_lease_is_renewed_reported_on_and_given_back(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    task, lease = await leased_task(speaker, alice, bob)
    named = {"task_id": task["id"], "lease_id": lease["lease_id"]}
    renewed = await speaker.ask(bob, "renew_a2a_lease", **named)
    assert renewed == {"kind": "a2a_lease_renewed", "task_id": task["id"], "lease": lease}

    update = {"type": "artifact", "artifact_id": "a", "parts": [{"type": "text", "text": "half"}]}
    updated = await speaker.ask(bob, "update_a2a_task", **named, update_no=1, update=update)
    assert updated == {"kind": "a2a_task_updated", "task_id": task["id"], "generation": 3}
    assert (await speaker.ask(bob, "update_a2a_task", **named, update_no=1, update=update)) == {
        **updated,
        "duplicate": True,
    }
    released = await speaker.ask(bob, "release_a2a_lease", **named, reason="not today")
    assert released == {"kind": "a2a_lease_released", "task_id": task["id"]}
    assert (await speaker.ask(bob, "try_recv_a2a_task"))["lease"]["attempt"] == 2


async def test_a_receive_is_withdrawn_by_its_request_id(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    await speaker.ask(alice, "send_a2a_task", task=new_task(bob))
    first = await speaker.ask(bob, "try_recv_a2a_task", request_id="r-1")
    withdrawn = await speaker.ask(bob, "withdraw_a2a_request", request_id="r-1")
    assert withdrawn == {"kind": "a2a_request_withdrawn", "request_id": "r-1", "leases": 1, "results": 0}
    assert (await speaker.ask(bob, "try_recv_a2a_task", request_id="r-1"))["task"] is None
    again = await speaker.ask(bob, "try_recv_a2a_task")
    assert again["task"] == first["task"]
    await speaker.ask(bob, "post_a2a_result", result=result_of(again["task"]))
    await speaker.ask(alice, "try_recv_a2a_result", request_id="r-2")
    assert (await speaker.ask(bob, "withdraw_a2a_request", request_id="r-2"))["results"] == 0
    assert (await speaker.ask(alice, "withdraw_a2a_request", request_id="r-2"))["results"] == 1
    assert (await speaker.ask(alice, "try_recv_a2a_result"))["result"]["task_id"] == first["task"]["id"]


async def test_a_task_is_canceled_by_its_sender(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    task, _ = await leased_task(speaker, alice, bob)
    canceled = await speaker.ask(alice, "cancel_a2a_task", task_id=task["id"], reason="changed my mind")
    assert canceled["kind"] == "a2a_task_canceled"
    assert (canceled["task_id"], canceled["canceled"], canceled["ending"]) == (task["id"], True, "canceled")
    assert canceled["result"]["status"] == "error"
    refused = await speaker.tell(bob, "post_a2a_result", result=result_of(task))
    assert (refused.answer["code"], refused.status) in [("canceled", 409), ("canceled", None)]


async def test_a_task_is_shown_with_all_that_happened_to_it(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    task, lease = await leased_task(speaker, alice, bob)
    shown = await speaker.ask(alice, "show_a2a_task", task_id=task["id"])
    assert shown["kind"] == "a2a_task"
    assert shown["task"] == task
    assert (shown["state"], shown["a2a_state"], shown["attempt"], shown["turn"]) == ("in_flight", "working", 1, 1)
    assert [each["lease_id"] for each in shown["leases"]] == [lease["lease_id"]]
    assert [each["generation"] for each in shown["updates"]] == list(range(1, shown["generation"] + 1))
    assert (shown["result"], shown["cause"], shown["holder_lost"]) == (None, None, False)


async def test_a_tree_is_drawn_under_a_root_that_was_never_sent(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    root = str(uuid.uuid4())
    child = new_task(bob, parent=root)
    grandchild = new_task(bob, parent=child["id"])
    for task in (child, grandchild):
        await speaker.ask(alice, "send_a2a_task", task=task)
    tree = (await speaker.ask(alice, "a2a_tree", task_id=root))["tree"]
    assert (tree["task_id"], tree["task"], tree["state"]) == (root, None, None)
    assert [node["task"]["id"] for node in tree["children"]] == [child["id"]]
    assert [node["task"]["id"] for node in tree["children"][0]["children"]] == [grandchild["id"]]


async def test_a_folded_tree_has_of_branches_that_have_ended_the_count_alone(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    root = new_task(bob)
    over, busy, between = (new_task(bob, parent=root["id"]) for _ in range(3))
    alive = new_task(bob, parent=between["id"])
    below = [new_task(bob, parent=over["id"]), new_task(bob, parent=over["id"]), new_task(bob, parent=busy["id"])]
    for task in (root, over, busy, between, alive, *below):
        await speaker.ask(alice, "send_a2a_task", task=task)
    for task in (over, between, *below):
        await speaker.ask(alice, "cancel_a2a_task", task_id=task["id"], reason="r")
    tree = (await speaker.ask(alice, "a2a_tree", task_id=root["id"], fold=True))["tree"]
    nodes = {node["task_id"]: node for node in tree["children"]}
    assert (nodes[over["id"]]["children"], nodes[over["id"]]["folded"]) == ([], 2)
    assert [node["task_id"] for node in nodes[busy["id"]]["children"]] == [below[2]["id"]], "it goes on"
    assert [node["task_id"] for node in nodes[between["id"]]["children"]] == [alive["id"]], "something below goes on"
    branch = (await speaker.ask(alice, "a2a_tree", task_id=over["id"], fold=True))["tree"]
    assert {node["task_id"] for node in branch["children"]} == {below[0]["id"], below[1]["id"]}
    whole = (await speaker.ask(alice, "a2a_tree", task_id=root["id"]))["tree"]
    assert "folded" not in str(whole)


async def test_a_long_chain_of_tasks_is_still_a_tree_that_can_be_told(under_test: DoorsUnderTest) -> None:
    alice, bob = await under_test.pair()
    parent = root = str(uuid.uuid4())
    for _ in range(400):
        task = new_task(bob, parent=parent)
        await alice.http.post("/a2a/tasks", task)
        parent = task["id"]
    for speaker in (HttpSpeaker(), IpcSpeaker(under_test)):
        assert (await speaker.ask(alice, "a2a_tree", task_id=root))["tree"]["children"]


async def test_a_task_that_waits_is_answered_by_its_sender_alone(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    task, lease = await leased_task(speaker, alice, bob)
    waits = {"type": "status", "state": "input-required", "text": "which colour?"}
    early = await speaker.tell(alice, "answer_a2a_task", task_id=task["id"], text="red")
    assert early.answer["code"] == "not_waiting"
    await speaker.ask(bob, "update_a2a_task", task_id=task["id"], lease_id=lease["lease_id"], update=waits)
    theirs = await speaker.tell(bob, "answer_a2a_task", task_id=task["id"], text="red")
    assert theirs.answer["code"] == "unknown_task"
    empty = await speaker.tell(alice, "answer_a2a_task", task_id=task["id"], text=" ")
    assert empty.answer["code"] == "invalid_answer"
    answered = await speaker.ask(alice, "answer_a2a_task", task_id=task["id"], text="red", answer_id="a1")
    repeated = await speaker.ask(alice, "answer_a2a_task", task_id=task["id"], text="red", answer_id="a1")
    assert repeated["duplicate"]
    unasked = await speaker.tell(alice, "answer_a2a_task", task_id=task["id"], approved=True)
    assert unasked.answer["code"] == "not_asked"
    told = await speaker.ask(alice, "signal_a2a_task", task_id=task["id"], name="paid", value=1, signal_id="s1")
    assert (told["kind"], told["task_id"]) == ("a2a_signaled", task["id"])
    again = await speaker.ask(alice, "signal_a2a_task", task_id=task["id"], name="paid", value=1, signal_id="s1")
    assert again["duplicate"]
    assert answered == {"kind": "a2a_answered", "task_id": task["id"]}
    taken = (await speaker.ask(bob, "try_recv_a2a_task"))["tasks"][0]
    assert (taken["turn"], taken["messages"][0]["parts"]) == (2, [{"type": "text", "text": "red"}])


async def test_an_answer_is_the_same_answer_after_its_task_has_ended(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    task, lease = await leased_task(speaker, alice, bob)
    waits = {"type": "status", "state": "input-required", "text": "shall I pay?"}
    await speaker.ask(bob, "update_a2a_task", task_id=task["id"], lease_id=lease["lease_id"], update=waits)
    answer = {"task_id": task["id"], "approved": True, "answer_id": "a1"}
    assert "duplicate" not in await speaker.ask(alice, "answer_a2a_task", **answer)
    taken = (await speaker.ask(bob, "try_recv_a2a_task"))["tasks"][0]
    result = {"task_id": task["id"], "status": "ok", "lease_id": taken["lease"]["lease_id"]}

    async def check() -> None:
        assert (await speaker.ask(alice, "answer_a2a_task", **answer))["duplicate"]
        assert (await speaker.ask(under_test.operator, "answer_a2a_task", **answer))["duplicate"]
        for other, code in (
            ({"approved": False}, "idempotency_key_reused"),
            ({"approved": True, "text": "gladly"}, "idempotency_key_reused"),
            ({"answer_id": "a2"}, "not_asked"),
            ({"answer_id": None}, "not_asked"),
            ({"approved": None, "text": "yes", "answer_id": "a2"}, "not_waiting"),
        ):
            refused = await speaker.tell(alice, "answer_a2a_task", **{**answer, **other})
            assert (refused.answer["code"], refused.status) in ((code, 409), (code, None)), other
        assert (await speaker.tell(bob, "answer_a2a_task", **answer)).answer["code"] == "unknown_task"

    await check()
    await speaker.ask(bob, "post_a2a_result", result=result)
    await check()
    await speaker.ask(alice, "try_recv_a2a_result")
    await under_test.ledger.compact()
    await check()


async def test_without_a_dashboard_nobody_has_a_code_for_it(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    assert (await speaker.tell(under_test.operator, "make_login_code")).answer["code"] == "ui_off"


async def test_the_operator_repairs_a_lease(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    for action in ("a2a.repair.requeue", "a2a.repair.force_error"):
        await under_test.grant(action, under_test.operator)
    task, lease = await leased_task(speaker, alice, bob)
    requeue = {"action": "requeue", "duplicate_risk": "operator-accepted", "lease_id": lease["lease_id"]}
    repaired = await speaker.ask(
        under_test.operator, "repair_a2a_task", request={"task_id": task["id"], "reason": "stuck", "command": requeue}
    )
    assert repaired == {
        "kind": "a2a_repaired",
        "outcome": {"task_id": task["id"], "action": "requeued", "state": "queued", "attempt": 1},
    }
    await speaker.ask(bob, "try_recv_a2a_task")
    force = {"action": "force_error", "message": "gave up"}
    outcome = (
        await speaker.ask(
            under_test.operator, "repair_a2a_task", request={"task_id": task["id"], "reason": "stuck", "command": force}
        )
    )["outcome"]
    assert (outcome["action"], outcome["state"], outcome["attempt"]) == ("forced_error", "result_pending", 2)
    assert outcome["result"]["error_message"] == "gave up"
    rows = await under_test.audit("a2a_repair_applied")
    assert {row["kind"]["action"] for row in rows} == {"requeue", "force_error"}


async def test_a_cancel_and_a_release_leave_their_reasons_in_the_audit(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    task, lease = await leased_task(speaker, alice, bob)
    await speaker.ask(bob, "release_a2a_lease", task_id=task["id"], lease_id=lease["lease_id"], reason="not begun")
    for _ in range(2):
        await speaker.ask(under_test.operator, "cancel_a2a_task", task_id=task["id"], reason="not needed")
    rows = await under_test.audit("a2a_repair_applied")
    common = {"type": "a2a_repair_applied", "task_id": task["id"], "duplicate_risk": None}
    released = {"action": "release", "reason": "not begun", "lease_id": lease["lease_id"], "attempt": 1}
    canceled = {"action": "cancel", "reason": "not needed", "lease_id": None, "attempt": None}
    assert sorted((row["kind"] for row in rows), key=lambda kind: str(kind["action"])) == [
        {**common, **canceled},
        {**common, **released},
    ]


async def test_the_retry_gate_says_what_it_would_do_and_then_does_it(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    await under_test.grant("a2a.repair.requeue", under_test.operator)
    task, lease = await leased_task(speaker, alice, bob, idempotency={"duplicate_safety": "idempotent", "key": "k"})
    dry = (await speaker.ask(under_test.operator, "retry_a2a_stale", policy={"min_lease_age_ms": 0}))["report"]
    entry = {"task_id": task["id"], "lease_id": lease["lease_id"], "attempt": 1, "idempotency_key": "k"}
    assert (dry["requeued"], dry["would_requeue"], dry["considered"]) == ([], [entry], 1)
    assert dry["policy"]["max_attempts"] == 3
    done = await speaker.ask(under_test.operator, "retry_a2a_stale", policy={"min_lease_age_ms": 0, "enabled": True})
    assert done["kind"] == "a2a_auto_retried"
    assert done["report"]["requeued"] == [entry]


async def test_the_same_work_is_followed_and_then_replayed(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    idempotency = {"duplicate_safety": "idempotent", "key": "k"}
    task, _ = await leased_task(speaker, alice, bob, idempotency=idempotency)
    second = await speaker.ask(alice, "send_a2a_task", task=new_task(bob, idempotency=idempotency))
    assert second["following"] == task["id"]
    await speaker.ask(bob, "post_a2a_result", result=result_of(task))
    third = await speaker.ask(alice, "send_a2a_task", task=new_task(bob, idempotency=idempotency))
    assert third["replayed"] is True


async def test_the_operator_compacts(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    await under_test.grant("a2a.compact", under_test.operator)
    answer = await speaker.ask(under_test.operator, "compact_a2a")
    assert answer["kind"] == "a2a_compacted"
    assert answer["dropped"] >= 0


async def test_identities_are_enrolled_listed_rotated_revoked_and_purged(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    operator = under_test.operator
    enrolled = await speaker.ask(operator, "enroll_identity", display="dan@test", actions=["a2a.send.bob@test"])
    assert set(enrolled) == {"kind", "display", "pubkey_b58", "token_b58", "granted"}
    assert [each["action"] for each in enrolled["granted"]] == ["a2a.send.bob@test"]
    assert enrolled["granted"][0]["signature_b58"]
    dan = EnrolledCaller(
        operator.agent, enrolled["token_b58"], type(operator.http)(under_test.port, enrolled["token_b58"])
    )
    assert (await speaker.ask(dan, "try_recv_a2a_task"))["task"] is None

    listed = await speaker.ask(operator, "list_identities", status="live")
    assert listed["operator_pubkey_b58"] == operator.agent.pubkey
    assert listed["truncated"] is False
    assert {row["agent_id"]["display"]: row["operator"] for row in listed["identities"]} == {
        "dan@test": False,
        "operator@test": True,
    }
    assert listed["identities"][0].keys() == {"agent_id", "token_prefix", "registered_at", "revoked_at", "operator"}
    assert len((await speaker.ask(operator, "list_identities", limit=1))["identities"]) == 1
    assert [
        row["agent_id"]["display"]
        for row in (await speaker.ask(operator, "list_identities", prefix="dan@"))["identities"]
    ] == ["dan@test"]

    rotated = await speaker.ask(operator, "rotate_token", identity="dan@test")
    assert (rotated["kind"], rotated["display"]) == ("token_rotated", "dan@test")
    assert rotated["token_b58"] != enrolled["token_b58"]
    revoked = await speaker.ask(operator, "revoke_identity", identity="dan@test")
    assert (revoked["kind"], revoked["display"]) == ("identity_revoked", "dan@test")
    assert revoked["revoked_at"] >= 0
    before_ms = now_ms() + 1_000
    purged = await speaker.ask(operator, "purge_identities", before_ms=before_ms)
    assert purged == {"kind": "identities_purged", "before_ms": before_ms, "purged": 2}


async def test_the_operator_rotates_its_own_token_and_hears_the_new_one(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    rotated = await speaker.ask(under_test.operator, "rotate_token")
    assert rotated["display"] == "operator@test"
    assert under_test.saved_tokens == [rotated["token_b58"]]


async def test_capabilities_are_granted_listed_revoked_and_purged(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    operator = under_test.operator
    _, bob = await under_test.pair()
    scope = {"version": 1, "max_uses": 2, "task_id": str(uuid.uuid4())}
    granted = await speaker.ask(
        operator,
        "grant_capability",
        action="a2a.send.bob@test",
        to="bob@test",
        scope=scope,
        expires_at=now_ms() + 60_000,
    )
    assert set(granted) == {"kind", "subject_display", "action", "signature_b58", "scope", "expires_at"}
    assert granted["scope"] == scope
    to_itself = await speaker.ask(operator, "grant_capability", action="a2a.compact")
    assert (to_itself["subject_display"], to_itself["scope"], to_itself["expires_at"]) == ("operator@test", {}, None)

    mine = await speaker.ask(bob, "recent_capabilities", limit=1)
    assert (mine["kind"], mine["limit"]) == ("capability_list", 1)
    assert [each["signature_b58"] for each in mine["capabilities"]] == [granted["signature_b58"]]
    assert mine["capabilities"][0]["budget"] == {"max_uses": 2, "used": 0, "remaining": 2}
    assert mine["capabilities"][0]["effective"] == "live"

    handle = granted["signature_b58"]
    assert (await speaker.ask(operator, "revoke_capability", signature_b58=handle)) == {
        "kind": "capability_revoked",
        "signature_b58": handle,
        "removed": True,
    }
    assert (await speaker.ask(operator, "revoke_capability", signature_b58=handle))["removed"] is False
    everyones = (await speaker.ask(operator, "recent_capabilities", limit=100))["capabilities"]
    assert [each["effective"] for each in everyones if each["signature_b58"] == handle] == ["revoked"]
    purged = await speaker.ask(operator, "purge_capabilities", before_ms=now_ms() + 1_000)
    assert (purged["kind"], purged["purged"]) == ("capabilities_purged", 1)


async def test_the_audit_is_read_verified_and_purged(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    await speaker.ask(alice, "send_a2a_task", task=new_task(bob))
    seen = await speaker.ask(alice, "recent_audit", limit=5, since_ms=0)
    assert (seen["kind"], seen["limit"], seen["since_ms"]) == ("audit_recent", 5, 0)
    assert [row["kind"]["agent_id"] for row in seen["events"]] == ["a2a-send:bob@test"]
    assert (await speaker.ask(alice, "recent_audit"))["since_ms"] is None
    report = (await speaker.ask(under_test.operator, "verify_audit_integrity"))["report"]
    assert (report["valid"], report["failures"]) == (True, [])
    purged = await speaker.ask(under_test.operator, "purge_audit", before_ms=now_ms() + 1_000)
    assert purged["kind"] == "audit_purged"
    assert purged["purged"] == report["events"]
    assert (await speaker.ask(under_test.operator, "verify_audit_integrity"))["report"]["valid"] is True


async def test_the_log_of_a_task_is_read_and_waited_for(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    task, lease = await leased_task(speaker, alice, bob)
    operator, logs = under_test.operator, under_test.ipc.api.services.task_logs
    empty = await speaker.ask(operator, "a2a_task_log", task_id=task["id"])
    assert (empty["lines"], empty["ended"]) == ([], False)
    waiting = asyncio.create_task(speaker.ask(operator, "a2a_task_log", task_id=task["id"], after=0, wait_ms=LONG_MS))
    await under_test.waits.until(1)
    await asyncio.to_thread(logs.add, task["id"], "from a thread", writer="agent")
    first = await waiting
    assert [line["text"] for line in first["lines"]] == ["from a thread"]
    waiting = asyncio.create_task(
        speaker.ask(operator, "a2a_task_log", task_id=task["id"], after=first["next"], wait_ms=LONG_MS)
    )
    await under_test.waits.until(1)
    result = result_of(task, lease_id=lease["lease_id"])
    await speaker.ask(bob, "post_a2a_result", result=result)
    last = await waiting
    assert (last["lines"], last["ended"], last["next"]) == ([], True, first["next"])
    for who in (alice, bob):  # a task without a tenant has a log for the operator alone
        assert (await speaker.tell(who, "a2a_task_log", task_id=task["id"])).answer["code"] == "unknown_task"


async def test_a_task_is_shown_again_when_something_happened_to_it(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    task, _ = await leased_task(speaker, alice, bob)
    shown = await speaker.ask(alice, "show_a2a_task", task_id=task["id"])
    later = {"task_id": task["id"], "after": shown["generation"]}
    assert (await speaker.ask(alice, "show_a2a_task", **later, wait_ms=5))["generation"] == shown["generation"]
    waiting = asyncio.create_task(speaker.ask(alice, "show_a2a_task", **later, wait_ms=LONG_MS))
    await under_test.waits.until(1)
    await speaker.ask(bob, "post_a2a_result", result=result_of(task))
    assert (await waiting)["result"]["status"] == "ok"


async def test_audit_rows_are_waited_for_and_told_once(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    await under_test.pair()
    operator = under_test.operator
    *_, last = (await speaker.ask(operator, "recent_audit"))["events"]
    later = {"since_ms": last["timestamp_ms"], "after": last["id"]}
    assert (await speaker.ask(operator, "recent_audit", **later, wait_ms=5))["events"] == []
    waiting = asyncio.create_task(speaker.ask(operator, "recent_audit", **later, wait_ms=LONG_MS))
    await under_test.waits.until(1)
    await under_test.enroll("dora@test")
    (row,) = (await waiting)["events"]
    assert "dora@test" in str(row)


@pytest.mark.parametrize("kind", [operation.kind for operation in OPERATIONS])
def test_every_operation_is_asked_for_on_this_page_or_on_that_of_peers(kind: str) -> None:
    pages = (Path(__file__), Path(__file__).with_name("test_peers.py"))
    assert any(f'"{kind}"' in page.read_text(encoding="utf-8") for page in pages)


async def test_answers_are_spelled_the_old_way_if_so_set(short_path: Path) -> None:
    async with open_doors(short_path, legacy_kinds=True) as under_test:
        _, bob = await under_test.pair()
        assert (await HttpSpeaker().ask(bob, "try_recv_a2a_task"))["kind"] == "a2_a_task_opt"
        async with under_test.connect() as connection:
            await connection.authenticate(bob.token)
            assert (await connection.ask("a2_a_queue"))["kind"] == "a2_a_queue"
            assert (await connection.ask("ping"))["kind"] == "pong"


async def test_a_page_ends_where_a_frame_would(short_path: Path) -> None:
    async with open_doors(short_path, limits=Limits(task_bytes_max=8 * 1024 * 1024)) as under_test:
        alice, bob = await under_test.pair()
        for _ in range(3):
            await alice.http.post("/a2a/tasks", new_task(bob, "x" * 3_000_000))
        for target, kind in (("/a2a/tasks/recent", "recent_a2a_tasks"), ("/a2a/queue", "a2a_queue")):
            page = await alice.http.get(target)
            assert (len(page["tasks"]), page["truncated"]) == (2, True)
            async with under_test.connect() as connection:
                await connection.authenticate(alice.token)
                assert await connection.ask(kind) == page


async def test_the_operator_keeps_tenants_and_their_agents(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    operator = under_test.operator
    added = await speaker.ask(operator, "add_tenant", name="acme", limits={"rate_per_min": 600})
    assert added["token"].startswith(f"{added['tenant']['token_prefix']}")
    assert (len(added["token"]), added["tenant"]["disabled"], added["tenant"]["agents"]) == (68, False, 1)
    assert added["tenant"]["limits"] == {
        "concurrency": 0,
        "rate_per_min": 600,
        "burst": 0,
        "connections": 0,
        "streams": 0,
        "live_tasks": 0,
        "queued_bytes": 0,
        "kept_hours": 0,
        "kept_bytes": 0,
    }
    listed = await speaker.ask(operator, "list_tenants")
    assert [tenant["name"] for tenant in listed["tenants"]] == ["default", "acme"]
    assert added["token"] not in str(listed)
    assert listed["tenants"][1]["use"]["requests"] == {"used": 0, "most": 600}

    agent = {"id": "writer", "kind": "worker"}
    stored = await speaker.ask(operator, "add_agent", tenant="acme", agent_def=agent)
    shown = await speaker.ask(operator, "show_agent", tenant="acme", agent_id="writer")
    assert shown["agent"] == stored["agent"]
    assert shown["identity"]["display"] == "writer@acme"
    again = {"tenant": "acme", "agent_def": {**agent, "goal": "write"}, "replace": True}
    assert (await speaker.ask(operator, "add_agent", **again))["agent"]["agent_def"]["goal"] == "write"
    agents = await speaker.ask(operator, "list_agents", tenant="acme")
    assert ([each["id"] for each in agents["agents"]], agents["count"]) == (["index", "writer"], 2)
    removed = await speaker.ask(operator, "remove_agent", tenant="acme", agent_id="writer")
    assert removed == {"kind": "agent_removed", "tenant": "acme", "agent_id": "writer"}

    changed = await speaker.ask(operator, "change_tenant", name="acme", disabled=True)
    assert (changed["tenant"]["disabled"], changed["tenant"]["limits"]) == (True, added["tenant"]["limits"])
    rotated = await speaker.ask(operator, "rotate_tenant", name="acme")
    assert rotated["token"] != added["token"]
    assert rotated["tenant"]["disabled"] is True


async def test_the_operator_removes_a_tenant_after_a_dry_run_and_is_shown_that_nothing_is_left(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    operator = under_test.operator
    await speaker.ask(operator, "add_tenant", name="acme")
    await speaker.ask(operator, "add_agent", tenant="acme", agent_def={"id": "writer", "kind": "worker"})
    dry = await speaker.ask(operator, "remove_tenant", name="acme")
    assert (dry["done"], dry["stage"], dry["holdings"]["agents"]) == (False, "dry_run", 1)
    assert (await speaker.ask(operator, "tenant_traces", name="acme"))["left"] > 0
    told = await speaker.tell(operator, "tenant_removal", name="acme")
    assert told.answer["code"] == "no_removal"

    await speaker.ask(operator, "remove_tenant", name="acme", dry_run=False, reason="left")
    removed = await speaker.ask(operator, "tenant_removal", name="acme", wait_ms=LONG_MS)
    assert (removed["done"], removed["stage"], removed["agents"], removed["left"]) == (True, "removed", 1, 0)
    assert (await speaker.ask(operator, "tenant_traces", name="acme"))["left"] == 0
    listed = await speaker.ask(operator, "list_tenants")
    assert [tenant["name"] for tenant in listed["tenants"]] == ["default"]


@pytest.mark.parametrize(
    ("kind", "code", "status", "fields"),
    [
        ("remove_tenant", "unknown_tenant", 404, {"name": "nobody"}),
        ("remove_tenant", "invalid_wait", 400, {"name": "default", "dry_run": False, "reason": "r", "wait_ms": -1}),
        ("tenant_removal", "no_removal", 404, {"name": "nobody"}),
        ("add_tenant", "tenant_exists", 409, {"name": "default"}),
        ("add_tenant", "invalid_tenant", 400, {"name": "a@b"}),
        ("add_tenant", "invalid_tenant", 400, {"name": "x" * 64}),
        ("add_tenant", "invalid_request", 400, {"name": "a", "limits": {"burst": -1}}),
        ("change_tenant", "unknown_tenant", 404, {"name": "nobody", "disabled": True}),
        ("change_tenant", "invalid_request", 400, {"name": "default"}),
        ("rotate_tenant", "unknown_tenant", 404, {"name": "nobody"}),
        ("list_agents", "unknown_tenant", 404, {"tenant": "nobody"}),
        ("list_schedules", "unknown_tenant", 404, {"tenant": "nobody"}),
        ("list_schedules", "unknown_agent", 404, {"tenant": "default", "agent_id": "nobody"}),
        ("show_schedule", "unknown_agent", 404, {"tenant": "default", "agent_id": "nobody", "schedule_id": "s"}),
        ("show_schedule", "unknown_schedule", 404, {"tenant": "default", "agent_id": "index", "schedule_id": "s"}),
        ("pause_schedule", "unknown_schedule", 404, {"tenant": "default", "agent_id": "index", "schedule_id": "s"}),
        ("resume_schedule", "unknown_schedule", 404, {"tenant": "default", "agent_id": "index", "schedule_id": "s"}),
        ("run_schedule", "unknown_schedule", 404, {"tenant": "default", "agent_id": "index", "schedule_id": "s"}),
        ("remove_schedule", "unknown_schedule", 404, {"tenant": "default", "agent_id": "index", "schedule_id": "s"}),
        *(
            ("add_schedule", code, status, {"tenant": "default", "agent_id": "index", "schedule": schedule})
            for code, status, schedule in (
                ("agent_immutable", 409, {"id": "s", "every_s": 1}),
                ("invalid_schedule", 400, {"id": "s", "cron": "soon"}),
                ("invalid_schedule", 400, {"id": "s", "every_s": 1, "time_zone": "Nowhere"}),
                ("invalid_schedule", 400, {"id": "s", "every_s": 1, "cron": "* * * * *"}),
                ("invalid_schedule", 400, {"id": "s", "every_s": -1}),
                ("invalid_schedule", 400, {"id": "s", "colour": 1}),
                ("invalid_schedule", 400, {}),
            )
        ),
        ("list_stored_files", "unknown_tenant", 404, {"tenant": "nobody"}),
        ("list_stored_files", "invalid_hash", 400, {"sha256": "../etc"}),
        ("list_stored_files", "invalid_hash", 400, {"after": "%"}),
        ("list_stored_files", "invalid_limit", 400, {"limit": 201}),
        ("show_agent", "unknown_agent", 404, {"tenant": "default", "agent_id": "nobody"}),
        ("remove_agent", "unknown_agent", 404, {"tenant": "default", "agent_id": "nobody"}),
        ("remove_agent", "agent_immutable", 409, {"tenant": "default", "agent_id": "index"}),
        ("add_agent", "invalid_agent", 400, {"tenant": "default", "agent_def": {"id": "a", "colour": 1}}),
        ("add_agent", "invalid_agent", 400, {"tenant": "default", "agent_def": {"id": "a", "kind": "function"}}),
        ("add_agent", "unknown_agent", 404, {"tenant": "default", "agent_def": {"id": "a"}, "replace": True}),
    ],
)
async def test_what_is_wrong_about_a_tenant_or_agent_is_said(
    under_test: DoorsUnderTest, speaker: Speaker, kind: str, *, code: str, status: int, fields: dict[str, Any]
) -> None:
    told = await speaker.tell(under_test.operator, kind, **fields)
    assert told.answer["code"] == code
    assert told.status in (None, status)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("add_tenant", {"name": "mine"}),
        ("list_tenants", {}),
        ("change_tenant", {"name": "default", "disabled": True}),
        ("rotate_tenant", {"name": "default"}),
        ("remove_tenant", {"name": "default"}),
        ("remove_tenant", {"name": "default", "dry_run": False, "reason": "r", "cancel_live": True}),
        ("tenant_removal", {"name": "default"}),
        ("tenant_traces", {"name": "default"}),
        ("add_agent", {"tenant": "default", "agent_def": {"id": "a"}}),
        ("list_agents", {"tenant": "default"}),
        ("list_stored_files", {"tenant": "default"}),
        ("show_agent", {"tenant": "default", "agent_id": "index"}),
        ("remove_agent", {"tenant": "default", "agent_id": "index"}),
        ("list_schedules", {"tenant": "default"}),
        ("show_schedule", {"tenant": "default", "agent_id": "index", "schedule_id": "s"}),
        ("add_schedule", {"tenant": "default", "agent_id": "index", "schedule": {"id": "s", "every_s": 1}}),
        ("remove_schedule", {"tenant": "default", "agent_id": "index", "schedule_id": "s"}),
        ("pause_schedule", {"tenant": "default", "agent_id": "index", "schedule_id": "s"}),
        ("resume_schedule", {"tenant": "default", "agent_id": "index", "schedule_id": "s"}),
        ("run_schedule", {"tenant": "default", "agent_id": "index", "schedule_id": "s"}),
        ("begin_backup", {}),
        ("end_backup", {"backup_id": "b"}),
        ("begin_drain", {}),
        ("drain_status", {}),
        ("list_nodes", {}),
        ("show_settings", {}),
        ("show_attention", {}),
    ],
)
async def test_tenants_are_the_operators_alone(
    under_test: DoorsUnderTest, speaker: Speaker, kind: str, fields: dict[str, Any]
) -> None:
    _, bob = await under_test.pair()
    told = await speaker.tell(bob, kind, **fields)
    assert told.answer["code"] == "operator_required"
    assert told.status in (None, 403)
    assert len(await under_test.audit("operator_required")) == 1


async def test_the_operator_adds_pauses_resumes_runs_and_removes_a_schedule(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    operator = under_test.operator
    await speaker.ask(operator, "add_tenant", name="acme")
    await speaker.ask(operator, "add_agent", tenant="acme", agent_def={"id": "writer", "kind": "worker"})
    which = {"tenant": "acme", "agent_id": "writer", "schedule_id": "noon"}
    given = {"id": "noon", "cron": "0 12 * * *", "time_zone": "Asia/Kolkata", "text": "lunch", "catch_up_s": 60}
    added = await speaker.ask(operator, "add_schedule", tenant="acme", agent_id="writer", schedule=given)
    assert {name: added["schedule"][name] for name in given} == given
    again = await speaker.tell(operator, "add_schedule", tenant="acme", agent_id="writer", schedule=given)
    assert again.answer["code"] == "schedule_exists"

    shown = (await speaker.ask(operator, "show_schedule", **which))["schedule"]
    assert [moment["local"][10:] for moment in shown["upcoming"]] == ["T12:00:00+05:30"] * 5
    assert shown["upcoming"][1]["at_ms"] - shown["upcoming"][0]["at_ms"] == 86_400_000
    listed = await speaker.ask(operator, "list_schedules", tenant="acme")
    assert (listed["count"], listed["schedules"]) == (1, [{**shown, "upcoming": shown["upcoming"][:1]}])

    paused = [(await speaker.ask(operator, "pause_schedule", **which))["schedule"] for _ in range(2)]
    assert paused[0] == paused[1] == {**shown, "paused_at_ms": paused[0]["paused_at_ms"], "upcoming": []}
    ran = await speaker.ask(operator, "run_schedule", **which)
    task = await speaker.ask(operator, "show_a2a_task", task_id=ran["task_id"])
    assert task["task"]["intent_text"] == "lunch"
    assert task["task"]["metadata"]["schedule"]["id"] == "noon"
    resumed = [(await speaker.ask(operator, "resume_schedule", **which))["schedule"] for _ in range(2)]
    assert resumed[0]["paused_at_ms"] is resumed[1]["paused_at_ms"] is None
    named = {"tenant": "acme", "agent": "writer", "schedule": "noon"}
    for kind, more in (("paused", {}), ("resumed", {}), ("run", {"task_id": ran["task_id"]})):
        (row,) = await under_test.audit(f"schedule_{kind}")
        assert row["kind"] == {"type": f"schedule_{kind}", **named, **more}

    await speaker.ask(operator, "pause_schedule", **which)
    removed = await speaker.ask(operator, "remove_schedule", **which)
    assert removed == {"kind": "schedule_removed", **which}
    assert (await speaker.ask(operator, "list_schedules", tenant="acme"))["schedules"] == []
    back = await speaker.ask(operator, "add_schedule", tenant="acme", agent_id="writer", schedule=given)
    assert back["schedule"]["paused_at_ms"] is None

    await speaker.ask(operator, "change_tenant", name="acme", disabled=True)
    assert (await speaker.ask(operator, "show_schedule", **which))["schedule"]["upcoming"] == []
    assert (await speaker.tell(operator, "run_schedule", **which)).answer["code"] == "tenant_disabled"


async def test_files_are_listed_for_their_tenant_or_their_owner_page_by_page(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    operator, (alice, bob) = under_test.operator, await under_test.pair()
    await speaker.ask(operator, "add_tenant", name="acme")
    files = under_test.files
    hashes = sorted([(await files.upload(pieces_of(bytes([each])), "acme")).sha256 for each in range(5)])
    mine = await files.upload(pieces_of(b"alice's"), f"@{alice.agent.pubkey}")

    first = await speaker.ask(operator, "list_stored_files", tenant="acme", limit=3)
    rest = await speaker.ask(operator, "list_stored_files", tenant="acme", limit=3, after=first["next"])
    assert [each["sha256"] for each in first["files"] + rest["files"]] == hashes
    assert (first["count"], first["bytes"], rest["next"]) == (5, 5, None)
    assert first["upload_url"] == "http://files.test/v1/files"
    linked = files.links.read(first["files"][0]["url"])
    assert linked is not None
    assert (linked.sha256, linked.size) == (hashes[0], 1)
    for begins in (hashes[2], hashes[2][:20].upper()):
        (found,) = (await speaker.ask(operator, "list_stored_files", tenant="acme", sha256=begins))["files"]
        assert found["sha256"] == hashes[2]

    (seen,) = (await speaker.ask(alice, "list_stored_files"))["files"]
    assert (seen["sha256"], seen["references"], seen["tasks"]) == (mine.sha256, 0, [])
    for nothing in (await speaker.ask(bob, "list_stored_files"), await speaker.ask(operator, "list_stored_files")):
        assert (nothing["files"], nothing["count"]) == ([], 0)


async def test_nothing_needs_a_person_at_a_quiet_daemon(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    found = await speaker.ask(under_test.operator, "show_attention")
    assert (found["items"], found["numbers"]["queued"]) == ([], 0)


async def test_the_operator_sees_the_daemon_itself_among_those_that_serve_the_ledger(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    (node,) = (await speaker.ask(under_test.operator, "list_nodes"))["nodes"]
    assert node["alive"]
    assert (node["node"], node["boot"]) == (under_test.ledger.node, under_test.ledger.boot)
    assert (node["leases"], node["started_at_ms"] <= node["seen_at_ms"]) == (0, True)


async def test_frames_are_told_to_be_off_and_nothing_is_inspected_where_nothing_is_called(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    """What these do where they are on is tested with the dashboard, which shows them."""
    alice, bob = await under_test.pair()
    sent = await speaker.ask(alice, "send_a2a_task", task=new_task(bob))
    shown = await speaker.ask(under_test.operator, "a2a_task_frames", task_id=sent["task_id"])
    assert (shown["on"], shown["frames"]) == (False, [])
    for kind, fields in (
        ("a2a_task_frames", {"task_id": sent["task_id"]}),
        ("inspect_a2a_agent", {"agent": "index", "text": "x"}),
        ("show_agent_card", {"tenant": "default", "agent_id": "index"}),
    ):
        assert (await speaker.tell(bob, kind, **fields)).answer["code"] == "operator_required", kind
    for kind, fields in (
        ("inspect_a2a_agent", {"agent": "index", "text": "x"}),
        ("show_agent_card", {"tenant": "default", "agent_id": "index"}),
    ):
        assert (await speaker.tell(under_test.operator, kind, **fields)).answer["code"] == "no_inspector"


@pytest.mark.embedded
async def test_the_operator_has_the_ledger_copied_and_the_copy_removed(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    begun = await speaker.ask(under_test.operator, "begin_backup")
    assert (Path(begun["folder"]) / "archive.db").is_file()
    assert await under_test.audit("backup_begun")
    ended = await speaker.ask(under_test.operator, "end_backup", backup_id=begun["id"])
    assert ended == {"kind": "backup_ended", "backup_id": begun["id"]}
    assert not Path(begun["folder"]).exists()
    told = await speaker.tell(under_test.operator, "end_backup", backup_id=begun["id"])
    assert told.answer["code"] == "unknown_backup"


async def test_an_operator_begins_a_drain_and_sees_what_is_left(speaker: Speaker, under_test: DoorsUnderTest) -> None:
    begun = await speaker.ask(under_test.operator, "begin_drain", timeout_ms=60_000)
    assert (begun["kind"], begun["draining"], begun["running"], begun["queued"]) == ("drain_progress", True, 0, 0)
    assert await under_test.audit("drain_begun")
    assert (await speaker.ask(under_test.operator, "drain_status"))["draining"] is True
    told = await speaker.tell(under_test.operator, "begin_drain", timeout_ms=-1)
    assert told.answer["code"] == "invalid_timeout"


async def test_a_ledger_that_is_no_folder_of_files_says_who_makes_its_backups(short_path: Path) -> None:
    async with open_doors(short_path, backups=None) as under_test:
        told = await HttpSpeaker().tell(under_test.operator, "begin_backup")
        assert (told.status, told.answer["code"]) == (503, "no_backup")


async def test_the_operator_sees_what_is_owed_to_webhooks_and_tries_again(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    sent = await speaker.ask(alice, "send_a2a_task", task=new_task(bob, "tell me"))
    config = PushConfig(url="https://hooks.example:8443/T0/secret?key=secret", id="p", token="secret")
    push = await under_test.ledger.commit(PutPush(task_id=sent["task_id"], config=config))
    assert (await speaker.ask(under_test.operator, "a2a_pushes", dead=True))["pushes"] == []
    move = msgspec.structs.replace(move_of(push), attempts=8, failure="HTTP 500", dead=True)
    await under_test.ledger.commit(MovePushes(moves=(move,)))
    listed = await speaker.ask(under_test.operator, "a2a_pushes", limit=5)
    assert (listed["count"], listed["dead"]) == (1, 1)
    (shown,) = listed["pushes"]
    assert (shown["state"], shown["failure"], shown["host"]) == ("dead", "HTTP 500", "hooks.example:8443")
    assert "secret" not in str(listed)
    retried = await speaker.ask(under_test.operator, "retry_a2a_push", task_id=sent["task_id"], push_id="p")
    assert (retried["push"]["state"], retried["push"]["attempts"]) == ("live", 0)
    for kind, fields in (("a2a_pushes", {}), ("retry_a2a_push", {"task_id": sent["task_id"], "push_id": "p"})):
        assert (await speaker.tell(alice, kind, **fields)).answer["code"] == "operator_required"
    told = await speaker.tell(under_test.operator, "retry_a2a_push", task_id=sent["task_id"], push_id="other")
    assert told.answer["code"] == "unknown_push"
    assert (await speaker.tell(under_test.operator, "a2a_pushes", limit=0)).answer["code"] == "invalid_limit"
