"""A task's story in time: which bars it has, where they stand, and who may see it."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
import pytest

from covenant.dashboard import timeline
from covenant.dashboard.time_scale import FOLD_WIDTH, Stretch, TimeScale
from covenant.dashboard.timeline import draw, task_bars
from covenant.doors.operator_api.tasks import TaskShown
from tests.daemon_under_test import DaemonUnderTest
from tests.dashboard.browser import Browser, leave_stuck, new_viewer, open_browser

NOW_MS = 100_000
KEY = "0" * 64
LEASE = {
    "lease_id": "33333333-3333-4333-8333-333333333333",
    "leased_to": {"display": "echo@default", "pubkey": KEY},
    "leased_at_ms": 1_000,
    "turn": 1,
    "attempt": 1,
}


def shown_task(*updates: dict[str, Any], leases: Any = (), **chosen: Any) -> TaskShown:
    agent = {"display": "echo@default", "pubkey": KEY}
    task = {"id": "11111111-1111-4111-8111-111111111111", "sender": agent, "recipient": agent, "intent_text": "x"}
    said = {
        "kind": "a2a_task",
        "task": task,
        "state": "done",
        "a2a_state": "completed",
        "attempt": 1,
        "turn": 1,
        "generation": 9,
        "created_at_ms": 0,
        "updated_at_ms": 0,
        "leases": leases,
        "updates": [{"generation": at, **update} for at, update in enumerate(updates)],
        "result": None,
        "cause": None,
        "holder_lost": False,
        **chosen,
    }
    return msgspec.convert(said, TaskShown)


def settled(**metadata: Any) -> dict[str, Any]:
    return {
        "task_id": "11111111-1111-4111-8111-111111111111",
        "status": "ok",
        "content": [],
        "metadata": metadata,
    }


def step(kind: str, ts_ms: int) -> dict[str, Any]:
    return {"kind": kind, "ts_ms": ts_ms, "body": {}}


def told(kind: str, ts_ms: int, **about: Any) -> dict[str, Any]:
    """A status with metadata below `covenant.`."""
    metadata = {f"covenant.{name}": value for name, value in about.items()}
    return {"kind": kind, "ts_ms": ts_ms, "body": {"type": "status", "text": "words", "metadata": metadata}}


def durable_step(ts_ms: int, no: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"kind": "step", "ts_ms": ts_ms, "body": {"type": "step", "name": kind, "no": no, "kind": kind, **more}}


def used(ts_ms: int, name: str, took_ms: Any) -> dict[str, Any]:
    """A step that tells of a tool, as an agent that a model plays leaves it."""
    metadata = {"x-arbiter.tool_call": True, "x-arbiter.took_ms": took_ms}
    part = {"type": "json", "value": {"tool": name, "ok": True}, "metadata": metadata}
    return {"kind": "artifact", "ts_ms": ts_ms, "body": {"type": "artifact", "artifact_id": name, "parts": [part]}}


def said(ts_ms: int) -> dict[str, Any]:
    text = {"type": "text", "text": "x"}
    return {"kind": "artifact", "ts_ms": ts_ms, "body": {"type": "artifact", "artifact_id": "a", "parts": [text]}}


def bars_of(shown: TaskShown) -> list[tuple[str, int, int | None]]:
    bars = sorted(task_bars(shown), key=lambda bar: bar.begins_ms)
    return [(bar.kind, bar.begins_ms, bar.ends_ms) for bar in draw(shown, bars, NOW_MS).bars]


def test_models_and_tools_are_bars_of_their_own_and_a_run_of_chunks_is_one() -> None:
    steps = (
        used(9_000, "search", 2_000),
        used(9_500, "fetch", 2_500),
        said(20_000),
        said(20_100),
        step("settled", 30_000),
    )
    leases = [{**LEASE, "ended_at_ms": 30_000, "outcome": "settled"}]
    shown = shown_task(*steps, leases=leases, result=settled(usage={"tokens": 9, "requests": 2}))
    assert bars_of(shown) == [
        ("queued", 0, 1_000),
        ("attempt", 1_000, 30_000),
        ("model", 1_000, 7_000),
        ("tool", 7_000, 9_000),
        ("tool", 7_000, 9_500),
        ("model", 9_500, 30_000),
        ("chunks", 20_000, 20_100),
    ]
    spoken = shown_task(*steps, leases=leases, result=settled(usage={"tokens": 9}))
    assert "model" not in [kind for kind, *_ in bars_of(spoken)], "no model was asked"


def test_pieces_that_are_far_apart_are_two_bars() -> None:
    shown = shown_task(said(1_000), said(2_000), said(20_000), step("status", 20_500), said(20_600))
    assert bars_of(shown) == [("chunks", 1_000, 2_000), ("chunks", 20_000, 20_000), ("chunks", 20_600, 20_600)]


def test_a_task_waits_for_a_holder_then_for_its_sender_then_for_a_holder_again() -> None:
    first = {**LEASE, "ended_at_ms": 2_000, "outcome": "parked"}
    second = {**LEASE, "leased_at_ms": 9_000, "turn": 2}
    shown = shown_task(step("parked", 2_000), step("continued", 8_000), leases=[first, second], state="in_flight")
    assert bars_of(shown) == [
        ("queued", 0, 1_000),
        ("attempt", 1_000, 2_000),
        ("parked", 2_000, 8_000),
        ("queued", 8_000, 9_000),
        ("attempt", 9_000, None),
    ]
    assert len(draw(shown, list(task_bars(shown)), NOW_MS).bands) == 2, "a band for each turn"
    parked = shown_task(step("parked", 2_000), leases=[first], state="parked")
    assert bars_of(parked)[-1] == ("parked", 2_000, None)
    assert bars_of(shown_task(state="following")) == [("following", 0, None)]


def test_a_sleep_and_a_wait_for_a_signal_are_no_time_in_the_queue() -> None:
    """Steps within a millisecond, too: the first attempt takes none."""
    sleeps = {"since_ms": 1_000, "for_ms": 60_000, "step": 1, "name": "sleep"}
    waits = {"since_ms": 62_000, "signal": "paid", "step": 2, "name": "paid"}
    first = {**LEASE, "ended_at_ms": 1_000, "outcome": "suspended"}
    second = {**LEASE, "leased_at_ms": 62_000, "ended_at_ms": 62_000, "outcome": "suspended"}
    steps = (
        durable_step(1_000, 1, "sleep", wait=sleeps),
        durable_step(61_000, 1, "sleep"),
        durable_step(62_000, 2, "wait", wait=waits),
    )
    shown = shown_task(*steps, step("continued", 70_000), leases=[first, second], state="parked", created_at_ms=1_000)
    bars = [bar for bar in task_bars(shown) if bar.kind != "attempt"]
    assert [(bar.label, bar.begins_ms, bar.ends_ms, bar.until_ms) for bar in bars] == [
        ("Sleeps", 1_000, 61_000, 61_000),
        ("In the queue", 61_000, 62_000, None),
        ("Waits for the signal paid", 62_000, None, None),
    ], "a message that is kept meanwhile ends no wait"


def test_a_question_of_a_step_ends_with_the_step_that_has_its_answer() -> None:
    first = {**LEASE, "ended_at_ms": 2_000, "outcome": "suspended"}
    shown = shown_task(
        step("parked", 2_000), durable_step(8_000, 1, "ask"), leases=[first], state="queued", updated_at_ms=8_000
    )
    assert bars_of(shown)[-2:] == [("parked", 2_000, 8_000), ("queued", 8_000, None)]


def test_what_no_step_tells_is_a_bar_too_the_time_to_begin_and_the_pause_before_another_attempt() -> None:
    later = shown_task(state="parked")
    later = msgspec.structs.replace(later, task=msgspec.structs.replace(later.task, not_before_ms=9_000))
    (waits,) = task_bars(later)
    assert (waits.label, waits.begins_ms, waits.ends_ms, waits.until_ms) == ("Waits for its time", 0, None, 9_000)
    begun = msgspec.structs.replace(later, state="queued")
    assert bars_of(begun) == [("parked", 0, 9_000), ("queued", 9_000, None)]
    failed = {**LEASE, "ended_at_ms": 2_000, "outcome": "suspended"}
    again = shown_task(leases=[failed, {**LEASE, "leased_at_ms": 5_000, "attempt": 2}], state="in_flight")
    assert bars_of(again)[2] == ("parked", 2_000, 5_000)
    assert bars_of(shown_task(leases=[failed], state="parked"))[-1] == ("parked", 2_000, None)


def test_a_wait_for_another_attempt_or_for_an_answer_says_until_when() -> None:
    failed = {**LEASE, "ended_at_ms": 2_000, "outcome": "suspended"}
    earlier = told("status", 1_000, next_attempt={"attempt": 2, "at_ms": 1})
    pause = told("status", 2_000, next_attempt={"attempt": 2, "at_ms": 62_000})
    asked = told("parked", 2_000, question={"id": "1-1", "kind": "approval", "until_ms": 92_000})

    def last_wait(*updates: dict[str, Any]) -> tuple[str, int | None]:
        shown = shown_task(*updates, leases=[failed], state="parked")
        return next((bar.label, bar.until_ms) for bar in task_bars(shown) if bar.kind == "parked")

    assert last_wait(earlier, pause) == ("Waits for attempt 2", 62_000)
    assert last_wait(earlier) == ("Waits for attempt 2", None), "an older daemon did not say it"
    assert last_wait(asked) == ("Waits for its sender", 92_000)


def test_a_task_that_ended_before_it_had_a_holder_was_in_the_queue() -> None:
    canceled = shown_task(step("settled", 7_000), cause="cancel")
    assert bars_of(canceled) == [("queued", 0, 7_000)]
    followed = shown_task(step("settled", 7_000), cause="leader")
    assert bars_of(followed) == [("following", 0, 7_000)]
    parked = {**LEASE, "ended_at_ms": 2_000, "outcome": "parked"}
    given_up = shown_task(step("parked", 2_000), step("settled", 7_000), leases=[parked], cause="cancel")
    assert bars_of(given_up)[-1] == ("parked", 2_000, 7_000)


def test_a_requeue_is_a_point_and_a_lost_holder_is_told() -> None:
    requeued = {**LEASE, "ended_at_ms": 5_000, "outcome": "requeued", "reason": "it hung"}
    shown = shown_task(leases=[requeued, {**LEASE, "leased_at_ms": 6_000}], state="in_flight", holder_lost=True)
    repair = next(bar for bar in task_bars(shown) if bar.kind == "repair")
    assert (repair.begins_ms, repair.ends_ms, repair.detail) == (5_000, 5_000, "it hung")
    before, lost = [bar for bar in task_bars(shown) if bar.kind == "attempt"]
    assert (before.detail, before.bad) == ("requeued · it hung", False)
    assert (lost.detail, lost.bad) == ("lost", True)


@pytest.mark.parametrize("took", [10**30, -5, "long", None, 1.5, [1]])
def test_what_a_tool_says_of_its_time_is_not_believed_beyond_reason(took: Any) -> None:
    step = used(9_000, "x" * 10_000, took)
    step["body"]["parts"].insert(0, {"type": "json", "value": 7, "metadata": None})
    (bar,) = [bar for bar in task_bars(shown_task(step, result=settled(usage=[took]))) if bar.kind == "tool"]
    assert 0 <= bar.begins_ms <= 9_000
    assert len(bar.label) == timeline.LABEL_MAX


def test_more_bars_than_can_be_drawn_are_cut_and_that_is_told() -> None:
    shown = shown_task(*(said(at * 3_000) for at in range(timeline.BARS_MAX + 5)))
    drawn = draw(shown, list(task_bars(shown)), NOW_MS)
    assert (len(drawn.bars), drawn.truncated) == (timeline.BARS_MAX, True)
    turns = shown_task(*(step("continued", at * 10) for at in range(3 * timeline.BANDS_MAX)))
    assert len(draw(turns, [], NOW_MS).bands) == timeline.BANDS_MAX


def test_a_long_wait_is_folded_and_the_rest_has_the_room() -> None:
    whole, work = Stretch(0, 100_000), [Stretch(0, 5_000), Stretch(95_000, 100_000)]
    scale = TimeScale(whole, [*work, Stretch(5_000, 95_000)], work)
    (fold,) = scale.folds()
    assert (fold.w, fold.ms) == (FOLD_WIDTH, 90_000)
    assert scale.span(work[0]).w == scale.span(work[1]).w == pytest.approx((1 - FOLD_WIDTH) / 2)
    assert [tick.at_ms for tick in scale.ticks()] == [0, 5_000, 100_000]
    assert [scale.place(at) for at in (-1, 0, 100_000, 200_000)] == pytest.approx([0, 0, 1, 1])


def test_nothing_is_folded_where_all_is_waiting_or_the_waits_are_short() -> None:
    waiting = TimeScale(Stretch(0, 100), [Stretch(0, 100)], [])
    assert waiting.folds() == ()
    assert [tick.at_ms for tick in waiting.ticks()] == [0, 20, 40, 60, 80, 100]
    work = [Stretch(0, 40), Stretch(70, 100), Stretch(90, 80)]
    assert TimeScale(Stretch(0, 100), work, work).folds() == ()


async def test_more_calls_than_are_read_are_told(
    daemon: DaemonUnderTest, operator: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = await leave_stuck(daemon)
    worker = (await operator.read(f"a2a/tasks/{stuck.task_id}/show"))["task"]["recipient"]
    path = f"timeline?task_id={stuck.task_id}"
    monkeypatch.setattr(timeline, "CALLS_MAX", 2)
    for calls, told in ((1, False), (2, False), (3, True)):
        call = {"id": str(uuid.uuid4()), "recipient": worker, "intent_text": "x", "parent": stuck.task_id}
        assert (await daemon.ask("POST", "/a2a/tasks", json=call)).status_code == 200
        found = await operator.read(path)
        assert ([bar["kind"] for bar in found["bars"]].count("child"), found["truncated"]) == (min(calls, 2), told)


async def test_who_may_look_at_a_task_may_see_its_story(daemon: DaemonUnderTest, operator: Browser) -> None:
    stuck = await leave_stuck(daemon)
    path = f"timeline?task_id={stuck.task_id}"
    found = await operator.read(path)
    assert found["kind"] == "ui_timeline"
    assert found["bars"][-1]["kind"] == "attempt"
    assert found["bars"][-1]["ends_ms"] is None
    async with open_browser(daemon, await new_viewer(daemon)) as viewer:
        assert [bar["kind"] for bar in (await viewer.read(path))["bars"]] == [bar["kind"] for bar in found["bars"]]
    async with open_browser(daemon, await daemon.add_tenant("acme")) as tenant:
        for other in (path, f"curl?task_id={stuck.task_id}"):
            answer = await tenant.api("GET", other)
            assert (answer.status_code, answer.json()["code"]) == (404, "unknown_task")
    for wrong in ("timeline", "timeline?task_id=", "timeline?task_id=../x", "curl"):
        assert (await operator.api("GET", wrong)).status_code in (400, 404), wrong
    async with open_browser(daemon) as nobody:
        assert (await nobody.api("GET", path)).status_code == 401
