"""The context of a decision, refusals that several decisions share, and the capability check.

A context collects a decision's events and its audit rows. A command with an `Access` needs one live grant whose pins
match. Each check leaves an audit row, and a refusal spends no use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from covenant.ledger.machine.commands import Access, TaskCommand
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import AnyEvent, Audited, GrantUsed
from covenant.ledger.machine.view import Archived, View
from covenant.model.clock_steps import Ages
from covenant.model.errors import Conflict, Forbidden, NotFound, Refusal
from covenant.model.grant import PINS, AuditHead, AuditRow, Grant, Scope, link
from covenant.model.ids import AgentId, TaskId
from covenant.model.retry_policy import Posture
from covenant.model.task import Ending, Lease

NewId = Callable[[], str]

_encode = msgspec.json.Encoder().encode


class CommandRefused(Exception):
    """The refusal that a decision raised, and the decision's audit rows, which must be durable before the answer.

    Of the decision's other events nothing is kept: no grant's use is spent.
    """

    def __init__(self, refusal: Refusal, events: list[AnyEvent]) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.events: list[AnyEvent] = [event for event in events if isinstance(event, Audited)]


class DecisionContext(msgspec.Struct, eq=False):
    """The input of one decision, and its events so far. Used for one call."""

    view: View
    now_ms: int
    new_id: NewId
    ages: Ages
    events: list[AnyEvent]
    add: Callable[[AnyEvent], None]
    """`events.append`."""
    _head: AuditHead | None = None

    def has_passed(self, deadline_ms: int | None) -> bool:
        """Whether a deadline has passed. While ages are paused, none has."""
        return deadline_ms is not None and deadline_ms <= self.now_ms and not self.ages.paused

    @property
    def expiry_ms(self) -> int:
        """The time to compare the expiries of grants with."""
        return self.ages.expiry_ms(self.now_ms)

    def audit(self, issuer: AgentId, kind: dict[str, Any] | msgspec.Raw) -> None:
        row = AuditRow(id=self.new_id(), timestamp_ms=self.now_ms, issuer=issuer, kind=kind)
        text = _encode(row).decode()
        self._head = head = link(self._head or self.view.audit_head, text)
        self.events.append(Audited(head.index, head.chain_hash, issuer.pubkey, text))


def audit_repair(
    decide: DecisionContext,
    task_id: TaskId,
    lease: Lease | None,
    by: AgentId,
    *,
    action: str,
    reason: str,
    duplicate_risk: Posture | None = None,
) -> None:
    """`lease`: the task's lease that the repair ended."""
    decide.audit(
        by,
        {
            "type": "a2a_repair_applied",
            "task_id": task_id,
            "action": action,
            "reason": reason,
            "lease_id": lease.lease_id if lease is not None else None,
            "duplicate_risk": duplicate_risk,
            "attempt": lease.attempt if lease is not None else None,
        },
    )


def find_task(decide: DecisionContext, command: TaskCommand[Any]) -> Entry | Archived | None:
    """The task, if it exists and the command's viewer may see it: the two absences look the same."""
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


def known_task(decide: DecisionContext, command: TaskCommand[Any]) -> Entry | Archived:
    found = find_task(decide, command)
    if found is None:
        raise unknown_task(command.task_id)
    return found


def open_task(decide: DecisionContext, command: TaskCommand[Any]) -> Entry:
    """The task that a message or a signal is for: one that has not ended."""
    found = known_task(decide, command)
    if found.ending is not None:
        how = f"task {command.task_id} has ended: it is {found.ending}, and takes no more messages"
        raise Conflict(_ended_code(found.ending), how)
    assert isinstance(found, Entry)
    return found


def unknown_task(task_id: str) -> NotFound:
    return NotFound("unknown_task", f"task {task_id[:80]} was not found")


def not_lessee(decide: DecisionContext, task_id: TaskId, caller: AgentId) -> Forbidden:
    return _denied(
        decide, task_id, caller, Forbidden("not_lessee", f"task {task_id} is not leased to {caller.display}")
    )


def not_sender(decide: DecisionContext, task_id: TaskId, caller: AgentId) -> Forbidden:
    return _denied(decide, task_id, caller, Forbidden("not_sender", f"only the sender of task {task_id} may cancel it"))


def _denied(decide: DecisionContext, task_id: TaskId, caller: AgentId, refusal: Forbidden) -> Forbidden:
    decide.audit(caller, {"type": "a2a_access_refused", "task_id": task_id, "reason": refusal.code})
    return refusal


def stale_lease(task_id: TaskId) -> Refusal:
    return Conflict("stale_lease", f"task {task_id} is under another lease now; stop working on it and take new work")


def task_has_ended(task_id: TaskId, ending: Ending) -> Refusal:
    """The refusal for a holder whose task has ended meanwhile: the holder must stop."""
    how = "was canceled" if ending is Ending.CANCELED else "is already settled"
    return Conflict(_ended_code(ending), f"task {task_id} {how}; stop working on it")


def follows_another(task_id: TaskId) -> Refusal:
    return Conflict("following", f"task {task_id} follows another task with the same work, and gets its result")


def key_reused() -> Refusal:
    message = "this Idempotency-Key was used for another message; use a new key for new work"
    return Conflict("idempotency_key_reused", message)


def _ended_code(ending: Ending) -> str:
    return "canceled" if ending is Ending.CANCELED else "already_settled"


def authorize(decide: DecisionContext, access: Access | None) -> None:
    """Adds the audit row of a passed check, or refuses with the row of a failed one."""
    if access is None:
        return
    live, expiry_ms = False, decide.expiry_ms
    for action in access.actions:
        for grant in decide.view.grants(access.caller.pubkey, action):
            if not grant.live(expiry_ms):
                continue
            live = True
            if _pins_met(grant.pins, access):
                if grant.max_uses is not None:
                    decide.add(GrantUsed(grant.signature_b58))
                decide.audit(access.caller, _passed(access.scope_id, access.actions[0], grant))
                return
    if live:
        _refuse_scope(decide, access)
    _refuse_missing(decide, access)


class BulkAuthorization:
    """Authorisation of one pass over many tasks: each task needs a grant, or is skipped, and each costs a use.

    Opening it needs some live grant with any pins, and leaves the row of that check. A dry run only reports what a real
    pass would be allowed; without any grant it reports the pass itself.
    """

    def __init__(self, decide: DecisionContext, access: Access | None, *, dry: bool) -> None:
        self._decide = decide
        self._dry = dry
        self._uses: dict[str, int] = {}
        self._grants: tuple[Grant, ...] | None = None
        if access is None:
            return
        view, expiry_ms = decide.view, decide.expiry_ms
        grants = [grant for action in access.actions for grant in view.grants(access.caller.pubkey, action)]
        live = tuple(grant for grant in grants if grant.live(expiry_ms))
        if live:
            self._grants = live
        if not dry:
            if not live:
                _refuse_missing(decide, access)
            decide.audit(access.caller, _passed(access.scope_id, access.actions[0], live[0]))

    def covers(self, access: Access) -> bool:
        """Whether a grant covers this task; if so, a use of the grant is spent."""
        if self._grants is None:
            return True
        for grant in self._grants:
            used = grant.used + self._uses.get(grant.signature_b58, 0)
            if _pins_met(grant.pins, access) and (grant.max_uses is None or used < grant.max_uses):
                self._spend(grant)
                return True
        return False

    def _spend(self, grant: Grant) -> None:
        if grant.max_uses is None:
            return
        self._uses[grant.signature_b58] = self._uses.get(grant.signature_b58, 0) + 1
        if not self._dry:
            self._decide.add(GrantUsed(grant.signature_b58))


def _pins_met(pins: Scope, access: Access) -> bool:
    return (
        (pins.peer_pubkey_b58 is None or pins.peer_pubkey_b58 == access.peer)
        and (pins.task_id is None or pins.task_id == access.task_id)
        and (pins.lease_id is None or pins.lease_id == access.lease_id)
        and (pins.duplicate_risk is None or pins.duplicate_risk == access.duplicate_risk)
    )


def _passed(scope_id: str, action: str, grant: Grant) -> msgspec.Raw:
    return _encoded_pass(scope_id, action, grant.action, grant.granted_by.display, grant.signature_b58)


@lru_cache(maxsize=4_096)
def _encoded_pass(scope_id: str, action: str, granted: str, by: str, signature_b58: str) -> msgspec.Raw:
    """Encoded once: a busy sender passes the same check again and again."""
    authorized_by = {"action": granted, "granted_by_display": by, "signature_b58": signature_b58}
    return msgspec.Raw(_encode(_check_row(scope_id, action, [authorized_by])))


def _check_row(scope_id: str, action: str, authorized_by: list[dict[str, str]]) -> dict[str, Any]:
    passed = bool(authorized_by)
    return {
        "type": "capability_check",
        "agent_id": scope_id,
        "required_actions": [action],
        "missing_actions": [] if passed else [action],
        "passed": passed,
        "authorized_by": authorized_by,
    }


def _refuse_missing(decide: DecisionContext, access: Access) -> None:
    spent = next(
        (
            grant
            for action in access.actions
            for grant in decide.view.grants(access.caller.pubkey, action)
            if grant.max_uses is not None and grant.used >= grant.max_uses and grant.revoked_at_ms is None
        ),
        None,
    )
    if spent is not None:
        decide.audit(
            access.caller,
            {
                "type": "capability_budget_exhausted",
                "signature_b58": spent.signature_b58,
                "action": spent.action,
                "max_uses": spent.max_uses,
                "used": spent.used,
            },
        )
    action = access.actions[0]
    decide.audit(access.caller, _check_row(access.scope_id, action, []))
    raise Forbidden(
        "capability_missing",
        f"{access.what} requires capability {action!r}. "
        f"The operator grants it with: covenant capabilities grant {action} --to {access.caller.display}",
    )


def _refuse_scope(decide: DecisionContext, access: Access) -> None:
    pinned: set[str] = set()
    for action in access.actions:
        for grant in decide.view.grants(access.caller.pubkey, action):
            if grant.live(decide.expiry_ms):
                pinned.update(name for name in PINS if getattr(grant.pins, name) not in (None, _value_of(access, name)))
    reason = f"{' or '.join(sorted(pinned))} does not match capability scope"
    decide.audit(
        access.caller,
        {
            "type": "capability_scope_rejected",
            "agent_id": access.scope_id,
            "action": access.actions[0],
            "reason": reason,
        },
    )
    raise Forbidden("scope_rejected", f"{access.what} rejected by capability scope: {reason}")


def _value_of(access: Access, pin: str) -> str | None:
    value: str | None = getattr(access, "peer" if pin == "peer_pubkey_b58" else pin)
    return value
