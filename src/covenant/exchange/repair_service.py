"""Repair, the retry gate, and repair of many tasks: they end leases whose holder does not come back.

A bulk repair applies the verbs for one task to every task that matches a filter, as the same caller. A pass is a dry
run unless the request says otherwise. A pass can do nothing that the caller could not do task by task: each task is
checked when its turn comes, under the lease that it was found with, and has its own audit row. The pass has a row of
its own at the end.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from covenant.exchange.access.principals import Principal, require_operator
from covenant.exchange.mailbox import MailboxExchange
from covenant.exchange.request_checks import check_limit, check_reason, check_repair
from covenant.exchange.task_search import query_of, scoped
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.task_query import PAGE_MAX, FoundTask, TaskQuery
from covenant.ledger.machine.commands import Access, Repair, RetryStale
from covenant.ledger.machine.decisions.repairs import scan_row
from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.ledger.machine.states import FINISHED, LEASED, QUERY_STATES, State
from covenant.model.errors import Conflict, Invalid, Refusal
from covenant.model.grant import FORCE_ERROR_ACTION, REQUEUE_ACTION
from covenant.model.ids import TaskId
from covenant.model.retry_policy import (
    ForceError,
    Posture,
    RepairCommand,
    RepairOutcome,
    Requeue,
    RetryPolicy,
    RetryReport,
)
from covenant.wire.mailbox import RepairTasks

LIMIT: Final = 100
LIMIT_MAX: Final = 1_000
PARALLEL_MAX: Final = 50
"""Tasks that are repaired at once; they share the journal's syncs."""
CANCEL: Final = "cancel"


class BulkOutcome(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The outcome for one task: would_apply, applied or refused. `state` is the state before."""

    task_id: TaskId
    state: str
    outcome: str
    code: str | None = None
    reason: str | None = None


class BulkReport(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`more`: more tasks match the filter than the limit allows."""

    dry_run: bool
    matched: int
    applied: int
    outcomes: tuple[BulkOutcome, ...]
    more: bool = False


async def repair_task(
    ledger: Ledger, principal: Principal, task_id: TaskId, command: RepairCommand, reason: str
) -> RepairOutcome:
    check_repair(command, reason)
    entry = await ledger.entry(task_id)
    peer = None
    if entry is not None:
        ours = entry.task.sender.pubkey == principal.agent.pubkey
        peer = (entry.task.recipient if ours or principal.operator else entry.task.sender).pubkey
    access = Access(
        caller=principal.agent,
        actions=(REQUEUE_ACTION if isinstance(command, Requeue) else FORCE_ERROR_ACTION,),
        scope_id=f"a2a-repair:{task_id}",
        what=f"a2a repair of task {task_id}",
        peer=peer,
        task_id=task_id,
        lease_id=command.lease_id,
        duplicate_risk=command.duplicate_risk.value if isinstance(command, Requeue) else None,
    )
    return await ledger.commit(
        Repair(
            access=access,
            task_id=task_id,
            viewer=principal.viewer,
            by=principal.agent,
            command=command,
            reason=reason,
        )
    )


async def retry_stale(
    ledger: Ledger, principal: Principal, policy: RetryPolicy, *, scheduled: bool = False
) -> RetryReport:
    """Runs the retry gate once. A scheduled pass writes its summary to the audit, also when it is refused."""
    await require_operator(ledger, principal, "a2a auto retry")
    _check_policy(policy)
    access = Access(
        caller=principal.agent,
        actions=(REQUEUE_ACTION,),
        scope_id="a2a-auto-retry",
        what="a2a auto retry",
        duplicate_risk="idempotent",
    )
    try:
        return await ledger.commit(RetryStale(access=access, by=principal.agent, policy=policy, scheduled=scheduled))
    except Refusal as refusal:
        if scheduled:
            empty = RetryReport(policy=policy, considered=0)
            await ledger.commit(WriteAuditRow(by=principal.agent, row=scan_row(empty, refusal.message)))
        raise


def _check_policy(policy: RetryPolicy) -> None:
    for name in ("min_lease_age_ms", "max_attempts", "max_requeues", "scan_limit"):
        if getattr(policy, name) < 0:
            raise Invalid("invalid_policy", f"{name} must not be negative")
    if policy.scan_limit > 10_000:
        raise Invalid("invalid_policy", "scan_limit must be at most 10000")


async def repair_tasks(
    ledger: Ledger, exchange: MailboxExchange, principal: Principal, request: RepairTasks
) -> BulkReport:
    dry_run = request.dry_run is not False
    limit = check_limit(LIMIT if request.limit is None else request.limit, LIMIT_MAX)
    found, more = await _find_tasks(ledger, principal, _query(request), limit)
    repair = _Repair(ledger, exchange, principal, request)
    if dry_run:
        judged = tuple([repair.judge(task) for task in found])
        return BulkReport(dry_run=True, matched=len(found), applied=0, outcomes=judged, more=more)
    outcomes: list[BulkOutcome] = []
    try:
        for begin in range(0, len(found), PARALLEL_MAX):
            outcomes += await asyncio.gather(*(repair.apply(task) for task in found[begin : begin + PARALLEL_MAX]))
    finally:
        row = _audit_row(request, len(found), outcomes)
        await ledger.commit(WriteAuditRow(by=principal.agent, row=row))
    applied = sum(each.outcome == "applied" for each in outcomes)
    return BulkReport(dry_run=False, matched=len(found), applied=applied, outcomes=tuple(outcomes), more=more)


class _Repair:
    def __init__(self, ledger: Ledger, exchange: MailboxExchange, principal: Principal, request: RepairTasks) -> None:
        self._ledger, self._exchange, self._principal, self._reason = ledger, exchange, principal, request.reason
        self._action = request.command.replace("-", "_")
        self._command = _command(request, self._action)

    def judge(self, task: FoundTask) -> BulkOutcome:
        """The outcome to expect, as far as the task alone shows."""
        refusal = self._refusal(task)
        return _outcome(task, "would_apply") if refusal is None else _refused(task, refusal)

    def _refusal(self, task: FoundTask) -> Refusal | None:
        state = QUERY_STATES[task.state]
        if self._command is None and state in FINISHED:
            return Conflict("already_over", f"task {task.task_id} has ended: {task.outcome}")
        if self._command is not None and state is not LEASED:
            return Conflict("not_leased", f"task {task.task_id} is not currently leased; it is {task.state}")
        return None

    async def apply(self, task: FoundTask) -> BulkOutcome:
        try:
            if self._command is None:
                canceled = await self._exchange.cancel(self._principal, task.task_id, self._reason)
                if canceled.before:
                    raise Conflict("already_over", f"task {task.task_id} has ended: {canceled.ending}")
            else:
                command = msgspec.structs.replace(self._command, lease_id=task.lease_id)
                await repair_task(self._ledger, self._principal, task.task_id, command, self._reason)
        except Refusal as refusal:
            return _refused(task, refusal)
        return _outcome(task, "applied")


def _outcome(task: FoundTask, outcome: str) -> BulkOutcome:
    return BulkOutcome(task_id=task.task_id, state=task.state, outcome=outcome)


def _refused(task: FoundTask, refusal: Refusal) -> BulkOutcome:
    return msgspec.structs.replace(_outcome(task, "refused"), code=refusal.code, reason=refusal.message)


def _command(request: RepairTasks, action: str) -> Requeue | ForceError | None:
    """The command for one task; None for a cancel."""
    check_reason(request.reason, "repair")
    if action == CANCEL:
        return None
    if action == "force_error":
        command = ForceError(request.message if request.message is not None else request.reason)
        check_repair(command, request.reason)
        return command
    if request.duplicate_risk is None:
        raise Invalid("invalid_repair", "a requeue needs duplicate_risk: idempotent or operator_accepted")
    return Requeue(Posture(request.duplicate_risk.replace("-", "_")))


def _query(request: RepairTasks) -> TaskQuery:
    """The query, oldest tasks first; by default only states that the command applies to."""
    query = query_of(request.filter)
    if query == TaskQuery():
        raise Invalid("invalid_filter", "a bulk repair needs a filter; name at least one field")
    open_states = tuple(state for state in State if state not in FINISHED)
    repairable = open_states if request.command == CANCEL else (LEASED,)
    states = query.states or (() if query.outcomes else repairable)
    return msgspec.structs.replace(query, states=states, ascending=True)


async def _find_tasks(
    ledger: Ledger, principal: Principal, query: TaskQuery, limit: int
) -> tuple[list[FoundTask], bool]:
    found: list[FoundTask] = []
    query = await scoped(ledger, principal, query)
    while len(found) < limit:
        size = min(PAGE_MAX, limit - len(found))
        page = await ledger.find(msgspec.structs.replace(query, limit=size))
        found += page.tasks
        if page.next is None:
            return found, False
        query = msgspec.structs.replace(query, after=page.next)
    return found, True


def _audit_row(request: RepairTasks, matched: int, outcomes: list[BulkOutcome]) -> dict[str, object]:
    filters = {name: value for name, value in msgspec.structs.asdict(request.filter).items() if value is not None}
    applied = sum(each.outcome == "applied" for each in outcomes)
    return {
        "type": "a2a_bulk_repair",
        "action": request.command.replace("-", "_"),
        "reason": request.reason,
        "filter": filters,
        "matched": matched,
        "applied": applied,
        "refused": len(outcomes) - applied,
    }
