"""The outcome of a delegation: its status, which is that of its local task, and the evidence that proves its result.

The evidence is the offer, the result, the conversation and the provider's signature. It is in the task's last updates.
Large evidence is split over several.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from covenant.ledger.contract.tasks import TaskLedger, TreeNode
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import (
    OFFERED,
    OUTCOMES,
    PROOF,
    REJECTED,
    RUNNING,
    STATUS,
    Delegation,
    DelegationRole,
    DelegationState,
)
from covenant.model.peers.delegation_messages import DelegationOutcome, DelegationStatus, SubDelegation, usage_amounts
from covenant.model.task import Cause, Result
from covenant.model.task_event import StatusUpdate
from covenant.model.task_view import TaskState, TaskView
from covenant.seal.keys import from_base64url

STEPS_MAX: Final = 1_000
"""Steps that are read at once."""


class DelegationOfEndedTask(Delegation, frozen=True, kw_only=True):
    """A delegation whose task here has ended, while its provider has not sent the result."""

    outcome: DelegationOutcome

    @property
    def status(self) -> DelegationStatus:
        return self.outcome


def by_task(delegation: Delegation, outcome: DelegationOutcome | None) -> Delegation:
    """The delegation with the status of its task. `outcome` is how the task has ended; None if it has not.

    A delegation that has ended is still shown as going on until its task has taken the result.
    """
    if delegation.role is DelegationRole.PROVIDER or delegation.settled:
        return delegation
    if outcome is None:
        went_on = OFFERED if delegation.state is REJECTED else RUNNING
        return msgspec.structs.replace(delegation, state=went_on) if delegation.ended else delegation
    if delegation.ended:
        return msgspec.structs.replace(delegation, state=settled_as(delegation.state, outcome))
    return DelegationOfEndedTask(**msgspec.structs.asdict(delegation), outcome=outcome)


def view_outcome(view: TaskView | None) -> DelegationOutcome:
    """The outcome of a task that has ended. A task that was erased counts as canceled."""
    return task_outcome(view.state, view.cause, view.result) if view is not None else "cancelled"


def task_outcome(state: str, cause: str | None, result: Result | None) -> DelegationOutcome:
    """The outcome of a task as a status of delegations. The task's cause shows a timeout."""
    code = result.metadata.get("code") if result is not None and result.metadata else None
    if state == TaskState.COMPLETED:
        return "completed"
    if state == TaskState.CANCELED:
        return "cancelled"
    return "timeout" if cause in (Cause.TIMEOUT, Cause.DEADLINE) or code == "timeout" else "failed"


def settled_as(state: DelegationState, outcome: DelegationOutcome) -> DelegationState:
    """The state of a delegation whose task has ended. A rejected one stays rejected if that made its task fail."""
    return state if STATUS[state] == outcome else OUTCOMES[outcome]


async def read_task_evidence(ledger: TaskLedger, task_id: TaskId) -> dict[str, Any] | None:
    """The evidence in the task's updates. None: the delegation has not ended, or its result came without a proof."""
    parts: dict[tuple[str, int], dict[int, str]] = {}
    steps = await ledger.steps(task_id, 0, STEPS_MAX)
    while steps:
        for step in reversed(steps):
            what = step.what
            proof = (what.metadata or {}).get(PROOF) if isinstance(what, StatusUpdate) else None
            if isinstance(proof, dict) and "sha256" in proof:
                found = parts.setdefault((proof["sha256"], proof["of"]), {})
                found[proof["part"]] = proof["data"]
                proof = _joined(proof["sha256"], proof["of"], found)
            if isinstance(proof, dict):
                return proof
        steps = await ledger.steps(task_id, steps[-1].generation, STEPS_MAX)
    return None


def _joined(sha256: str, count: int, parts: Mapping[int, str]) -> dict[str, Any] | None:
    if len(parts) < count:
        return None
    whole = from_base64url("".join(parts[number] for number in range(count)))
    return msgspec.json.decode(whole, type=dict[str, Any]) if hashlib.sha256(whole).hexdigest() == sha256 else None


async def read_sub_delegations(ledger: TaskLedger, task_id: TaskId) -> tuple[TreeNode, ...]:
    """The delegations that the provider made in turn, as its signed result reports them, as nodes of a tree."""
    evidence = await read_task_evidence(ledger, task_id)
    result = (evidence or {}).get("result") or {}
    return tuple(map(remote_node, msgspec.convert(result.get("subDelegations", ()), tuple[SubDelegation, ...])))


def remote_node(delegation: SubDelegation) -> TreeNode:
    used = usage_amounts(delegation.token_usage) or msgspec.UNSET
    return TreeNode(
        task_id=TaskId(delegation.delegation_id),
        task=None,
        state=None,
        remote=True,
        provider=delegation.provider or "",
        profile=delegation.profile,
        status=delegation.status,
        usage_total=used,
        children=tuple(map(remote_node, delegation.sub_delegations)),
    )
