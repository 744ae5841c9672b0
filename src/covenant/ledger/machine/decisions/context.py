"""A decision in the making: the events it has come to so far, and the rows it owes the audit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from covenant.ledger.machine.commands import TaskCommand
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import AnyEvent, Audited
from covenant.ledger.machine.view import Archived, View
from covenant.model.audit_chain import AuditHead, AuditRow, link
from covenant.model.clock_steps import STEADY, Ages
from covenant.model.errors import Conflict, Forbidden, NotFound, Refusal
from covenant.model.ids import AgentId, TaskId
from covenant.model.result import Ending

NewId = Callable[[], str]

_encode = msgspec.json.Encoder().encode


class CommandRefused(Exception):
    """A refusal, and the audit rows that must be durable before it is told. Nothing else: no use is spent."""

    def __init__(self, refusal: Refusal, events: list[AnyEvent]) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.events: list[AnyEvent] = [event for event in events if isinstance(event, Audited)]


class DecisionContext:
    """What one decision reads and what it has decided. Lives for one call and keeps nothing."""

    __slots__ = ("_head", "add", "ages", "events", "new_id", "now_ms", "view")

    def __init__(self, view: View, now_ms: int, new_id: NewId, ages: Ages = STEADY) -> None:
        self.view = view
        self.now_ms = now_ms
        self.ages = ages
        self.new_id = new_id
        self.events: list[AnyEvent] = []
        self.add = self.events.append
        self._head: AuditHead | None = None

    def has_passed(self, deadline_ms: int | None) -> bool:
        """Whether it is too late for something. While ages are paused, nothing is."""
        return deadline_ms is not None and deadline_ms <= self.now_ms and not self.ages.paused

    @property
    def expiry_ms(self) -> int:
        """The moment by which grants have expired."""
        return self.ages.expiry_ms(self.now_ms)

    def audit(self, issuer: AgentId, kind: dict[str, Any] | msgspec.Raw) -> None:
        row = AuditRow(id=self.new_id(), timestamp_ms=self.now_ms, issuer=issuer, kind=kind)
        text = _encode(row).decode()
        self._head = head = link(self._head or self.view.audit_head, text)
        self.events.append(Audited(head.index, head.chain_hash, issuer.pubkey, text))

    def refuse(self, refusal: Refusal) -> CommandRefused:
        return CommandRefused(refusal, self.events)


def find_task(decide: DecisionContext, command: TaskCommand[Any]) -> Entry | Archived | None:
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


def unknown_task(task_id: TaskId) -> Refusal:
    return NotFound("unknown_task", f"task {task_id} is not known here")


def not_lessee(decide: DecisionContext, task_id: TaskId, caller: AgentId) -> CommandRefused:
    return _denied(
        decide, task_id, caller, Forbidden("not_lessee", f"task {task_id} is not leased to {caller.display}")
    )


def not_sender(decide: DecisionContext, task_id: TaskId, caller: AgentId) -> CommandRefused:
    return _denied(decide, task_id, caller, Forbidden("not_sender", f"only the sender of task {task_id} may cancel it"))


def _denied(decide: DecisionContext, task_id: TaskId, caller: AgentId, refusal: Forbidden) -> CommandRefused:
    decide.audit(caller, {"type": "a2a_access_refused", "task_id": task_id, "reason": refusal.code})
    return decide.refuse(refusal)


def stale_lease(task_id: TaskId) -> Refusal:
    return Conflict("stale_lease", f"task {task_id} is under another lease now; stop working on it and take new work")


def already_over(task_id: TaskId, ending: Ending) -> Refusal:
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
