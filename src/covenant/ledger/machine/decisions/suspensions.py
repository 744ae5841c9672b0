"""Waits: a task that is parked until a time, for a signal or for an answer, and the end of the wait.

A step of a turn waits (a sleep, a signal, a question), or the next attempt does (a retry), or the first one
(`not_before_ms`). A signal that arrives before a step waits for it is kept. A wait ends once: the event that ends it is
the result of the step.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from covenant.ledger.machine.commands import Advance, Advanced, Continue, Reported, SignalTask
from covenant.ledger.machine.decisions.acceptance import check_account
from covenant.ledger.machine.decisions.context import DecisionContext, follows_another, open_task
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import MessageKept, SignalKept, SignalTaken, TaskResumed, TaskSuspended, TaskUpdated
from covenant.ledger.machine.evolution import SIGNAL_MARK
from covenant.ledger.machine.states import FOLLOWING
from covenant.model.content import Text
from covenant.model.errors import Conflict, Invalid, OverLimit
from covenant.model.question import has_decision, question_id, read_decision
from covenant.model.task_event import WAITS_MAX, StepUpdate, Wait, weigh_signal

WAIT_MS_MAX: Final = 10 * 366 * 86_400_000


def suspend(decide: DecisionContext, entry: Entry, command: Advance, wait: Wait, generation: int) -> Advanced:
    """Ends the lease with a wait; or, if the signal has already arrived, returns it, and the turn goes on."""
    if any(each.for_ms is not None and not 0 <= each.for_ms <= WAIT_MS_MAX for each in wait.all_waits):
        raise Invalid("invalid_wait", "a wait must be at most ten years")
    if len(wait.others) >= WAITS_MAX or any(each.others or each.asks or not each.step for each in wait.others):
        raise Invalid("invalid_wait", f"at most {WAITS_MAX} steps may wait at once, and only one of them may ask")
    task_id, lease_id = command.task_id, command.lease_id
    for each in wait.all_waits:
        signal = next((kept for kept in entry.signals if kept.name == each.signal), None)
        if signal is not None:
            decide.add(SignalTaken(task_id, signal.id))
            decide.add(TaskUpdated(task_id, lease_id, generation + 1, _step_outcome(entry, each, signal.value)))
            return Advanced(generation + 1, signal=signal)
    if wait.asks is not None and (command.status is None or not wait.step):
        raise Invalid("invalid_wait", "a wait for an answer needs a step and a question")
    asks = not wait.step or wait.asks is not None
    own = msgspec.structs.replace(wait, others=()) if wait.others else wait
    update = command.status if asks else StepUpdate(wait.name, wait.step, entry.turn, wait.kind, wait=own)
    if update is None:
        decide.add(TaskSuspended(task_id, wait, lease_id))
        return Advanced(generation)
    decide.add(TaskSuspended(task_id, wait, lease_id, generation + 1, update))
    return Advanced(generation + 1)


def resume(decide: DecisionContext, entry: Entry) -> None:
    """Ends a wait whose time has come. A signal that arrives later is too late for this step."""
    wait = entry.wait
    assert wait is not None
    if not wait.step:
        decide.add(TaskResumed(entry.task.id))
        return
    ended = wait.first(decide.now_ms, decide.ages)
    outcome = _step_outcome(entry, ended, None, timed_out=ended.kind != "sleep")
    decide.add(TaskResumed(entry.task.id, entry.generation + 1, outcome))


def _step_outcome(entry: Entry, wait: Wait, value: Any, *, timed_out: bool = False) -> StepUpdate:
    return StepUpdate(wait.name, wait.step, entry.turn, wait.kind, value, timed_out=timed_out)


def answer(decide: DecisionContext, entry: Entry, wait: Wait, command: Continue) -> Reported:
    """Ends the wait of a task that asks, if the message answers the question."""
    task_id, parts = command.task_id, command.message.parts
    result: dict[str, Any] = {"question": wait.question}
    if wait.asks == "approval":
        expected, decision = question_id(entry.turn, wait.step), read_decision(parts)
        if decision is None:
            raise Invalid("approval_expected", f"task {task_id} waits for an approval: say `approve`, or `deny: why`")
        if decision.id not in (None, expected):
            raise Conflict("not_asked", f"task {task_id} asks {expected} now, and not {decision.id}")
        result |= {"approved": decision.approved, "reason": decision.reason}
        if command.by is not None:
            result["by"] = command.by.display
            row = {
                "type": "a2a_approval",
                "task_id": task_id,
                "question_id": expected,
                "approved": decision.approved,
                "reason": decision.reason,
            }
            decide.audit(command.by, row)
    elif has_decision(parts):
        raise Conflict("not_asked", f"task {task_id} waits for an answer, and not for an approval")
    else:
        result["text"] = "\n".join(part.text for part in parts if isinstance(part, Text))
    generation = entry.generation + 1
    decide.add(MessageKept(task_id, generation, command.message, command.message_id, answers=True))
    decide.add(TaskResumed(task_id, generation + 1, _step_outcome(entry, wait, result)))
    return Reported(generation + 1)


def send_signal(decide: DecisionContext, command: SignalTask) -> Reported:
    entry, signal = open_task(decide, command), command.signal
    for mark, generation in entry.recent_ids:
        if mark == SIGNAL_MARK + signal.id:
            return Reported(generation, duplicate=True)
    if entry.state is FOLLOWING:
        raise follows_another(command.task_id)
    waiting = entry.wait.all_waits if entry.wait is not None else ()
    if (wait := next((each for each in waiting if each.signal == signal.name), None)) is not None:
        generation = entry.generation + 1
        decide.add(TaskResumed(command.task_id, generation, _step_outcome(entry, wait, signal.value), signal.id))
        return Reported(generation)
    check_account(decide, entry.task, 0, weigh_signal(signal))
    if len(entry.signals) >= decide.view.limits.messages_kept_max:
        raise OverLimit(
            "too_many_signals",
            f"too many signals to task {command.task_id} wait to be taken; send again when the task has taken some",
        )
    decide.add(SignalKept(command.task_id, signal))
    return Reported(entry.generation)
