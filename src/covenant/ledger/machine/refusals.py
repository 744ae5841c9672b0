"""Finding a task for whoever asks, and the refusals that several decisions share, worded once."""

from __future__ import annotations

from typing import Any

from covenant.ledger.machine.commands import TaskCommand
from covenant.ledger.machine.decision import Decide, Refused
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.view import Archived
from covenant.model.errors import Conflict, Forbidden, NotFound, Refusal
from covenant.model.ids import AgentId, TaskId
from covenant.model.result import Ending


def find(decide: Decide, command: TaskCommand[Any]) -> Entry | Archived | None:
    """The task, if it exists and the command's viewer has part in it: the two absences look the same."""
    viewer = command.viewer
    entry = decide.view.entry(command.task_id)
    if entry is not None:
        lessee = entry.lease.leased_to.pubkey if entry.lease is not None else None
        task = entry.task
        seen = viewer is None or viewer in (task.recipient.pubkey, task.sender.pubkey, lessee)
        return entry if seen and command.recipient in (None, task.recipient.pubkey) else None
    archived = decide.view.archived(command.task_id)
    if archived is not None and (
        viewer is None or viewer in (archived.sender.pubkey, archived.recipient.pubkey, archived.leased_to)
    ):
        return archived if command.recipient in (None, archived.recipient.pubkey) else None
    return None


def unknown(task_id: TaskId) -> Refusal:
    return NotFound("unknown_task", f"task {task_id} is not known here")


def not_lessee(decide: Decide, task_id: TaskId, caller: AgentId) -> Refused:
    return _denied(
        decide, task_id, caller, Forbidden("not_lessee", f"task {task_id} is not leased to {caller.display}")
    )


def not_sender(decide: Decide, task_id: TaskId, caller: AgentId) -> Refused:
    return _denied(decide, task_id, caller, Forbidden("not_sender", f"only the sender of task {task_id} may cancel it"))


def _denied(decide: Decide, task_id: TaskId, caller: AgentId, refusal: Forbidden) -> Refused:
    decide.audit(caller, {"type": "a2a_access_refused", "task_id": task_id, "reason": refusal.code})
    return decide.refuse(refusal)


def stale(task_id: TaskId) -> Refusal:
    return Conflict("stale_lease", f"task {task_id} is under another lease now; stop working on it and take new work")


def over(task_id: TaskId, ending: Ending) -> Refusal:
    """The task ended meanwhile: a holder that hears this stops."""
    said = "was canceled" if ending is Ending.CANCELED else "is already settled"
    return Conflict(_over(ending), f"task {task_id} {said}; stop working on it")


def takes_no_more(task_id: TaskId, ending: Ending) -> Refusal:
    """The task has ended: who has more to say begins another one."""
    return Conflict(_over(ending), f"task {task_id} has ended: it is {ending}, and takes no more messages")


def key_reused() -> Refusal:
    message = "this Idempotency-Key was used for another message; use a new key for new work"
    return Conflict("idempotency_key_reused", message)


def _over(ending: Ending) -> str:
    return "canceled" if ending is Ending.CANCELED else "already_settled"
