"""The mailbox's verbs: the checks of each, in their order, before the ledger decides.

The order is: the request itself, the claimed sender, whether the task exists for this caller, the capability. So an
invalid task costs no audit row, and a caller without part in a task learns nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from covenant.exchange.access.principals import Principal, require_operator
from covenant.exchange.delegation import signal_caller
from covenant.exchange.request_checks import (
    check_limit,
    check_reason,
    check_request_id,
    check_size,
    check_task,
    read_answer,
)
from covenant.exchange.stored_files import StoredFiles
from covenant.exchange.tasks.builder import check_blocks, check_update
from covenant.exchange.tasks.reader import TaskReader, add_earlier_usage, read_tree
from covenant.exchange.tasks.writer import Intake, accept_span, record_attempt
from covenant.exchange.worker_presence import WorkerPresence
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import Queue, QueueQuery, TaskDetail, TaskScope, TreeNode
from covenant.ledger.machine.commands import (
    Accept,
    Accepted,
    Access,
    Cancel,
    Canceled,
    Continue,
    Drain,
    Drained,
    GiveBack,
    Leased,
    RecipientFault,
    Release,
    Renew,
    Report,
    Reported,
    Returned,
    Settle,
    Settled,
    SignalTask,
    Take,
    Withdraw,
)
from covenant.ledger.machine.decisions.acceptance import unknown_recipient
from covenant.ledger.machine.decisions.context import unknown_task
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.ledger.machine.states import LIVE_NAMES
from covenant.model.errors import Conflict, Forbidden, Invalid, NotFound, Unavailable
from covenant.model.grant import COMPACT_ACTION, recv_actions, respond_actions, send_actions
from covenant.model.ids import AgentId, LeaseId, TaskId
from covenant.model.peers.delegation import PEER
from covenant.model.question import PersonDecision
from covenant.model.settings import DEPTH_MAX
from covenant.model.task import DELEGATION, Ending, Lease, Result, ResultStatus, Task, check_chain, fingerprint
from covenant.model.task_event import SIGNAL_CHARS_MAX, WAITS_FOR_SENDER, Signal, StatusUpdate, Update
from covenant.model.tracing import DUPLICATE, OFF, Tracer, traced
from covenant.model.usage import USAGE, read_usage, usage_in
from covenant.seal.keys import nonce

_encode = msgspec.json.Encoder().encode


class MailboxExchange:
    def __init__(
        self,
        ledger: Ledger,
        operator: AgentId,
        tracer: Tracer = OFF,
        *,
        recipient_admission: bool = False,
        depth_max: int = DEPTH_MAX,
        intake: Intake | None = None,
        files: StoredFiles | None = None,
        presence: WorkerPresence | None = None,
    ) -> None:
        """`recipient_admission`: a recipient must have granted `a2a.recv.<sender>` before anyone may send to it."""
        self._ledger = ledger
        self._reader = TaskReader(ledger)
        self._operator = operator
        self.limits = ledger.limits
        self._presence = presence
        self._recipient_admission = recipient_admission
        self._depth_max = depth_max
        self._tracer = tracer
        self._intake = intake or Intake()
        self._files = files
        self.leasing = True
        """False while the daemon stops: no new work is leased, everything else goes on."""

    async def accept(self, principal: Principal, task: Task) -> Accepted:
        digests = [check_task(task, self.limits.task_bytes_max)]
        files = self._files if self._files is not None and self._files.may_store(task.parts) else None
        if files is not None and (named := files.named_by_hash(task.parts)) is not task.parts:
            digests.insert(0, fingerprint(msgspec.structs.replace(task, parts=named))[0])
        if self._intake.closed is not None and task.parent is None:
            raise self._intake.closed
        if task.sender != principal.agent:
            await self._forged(principal, task)
        if principal.operator and not task.recipient.pubkey:
            await self._ledger.durable()
            raise unknown_recipient(task.recipient)
        access = Access(
            caller=principal.agent,
            actions=send_actions(task.recipient),
            scope_id=f"a2a-send:{task.recipient.display}",
            what=f"a2a send to {task.recipient.display}",
            peer=task.recipient.pubkey,
            task_id=task.id,
        )
        if task.parent is not None:
            task = await self._within(task.parent, task)
        if files is not None and await self._ledger.parties(task.id) is None:
            task = await files.store_task(task)
        fault, admission = self._recipient_fault(task.recipient), self._admission(task)
        digest, *former = digests
        command = Accept(
            access=access, admission=admission, task=task, digest=digest, former=tuple(former), recipient_fault=fault
        )
        if not self._tracer.on:
            return await self._ledger.commit(command)
        with accept_span(self._tracer, task, None) as span:
            command = msgspec.structs.replace(command, task=traced(task, span.trace))
            accepted = await self._ledger.commit(command)
            span.note({DUPLICATE: accepted.duplicate})
        return accepted

    def _recipient_fault(self, recipient: AgentId) -> RecipientFault | None:
        if not recipient.pubkey:
            return "unknown"
        known = self._ledger.enrolled(recipient)
        return "mismatch" if known is not None and known != recipient else None

    async def _within(self, parent_id: TaskId, task: Task) -> Task:
        """The task as part of its parent, if a tenant's agent sends it while it works on the parent.

        So the task is one call deeper, continues the chain, and has no later deadline. The digest covers none of this.
        """
        entry = await self._ledger.entry(parent_id)
        parent = entry.task if entry is not None and not entry.finished else None
        if parent is None or parent.tenant is None or parent.recipient.pubkey != task.sender.pubkey:
            return task
        depth, chain = parent.depth + 1, (*parent.chain, task.sender.pubkey)
        check_chain(depth, chain, task.recipient, self._depth_max)
        moments = [moment for moment in (parent.deadline_ms, task.deadline_ms) if moment is not None]
        return msgspec.structs.replace(
            task, depth=depth, chain=chain, deadline_ms=min(moments) if moments else None, tenant=parent.tenant
        )

    def _admission(self, task: Task) -> Access | None:
        if not self._recipient_admission or task.sender.pubkey == task.recipient.pubkey:
            return None
        return Access(
            caller=task.recipient,
            actions=recv_actions(task.sender),
            scope_id=f"a2a-recv-gate:{task.recipient.display}",
            what=f"a2a send to {task.recipient.display}: being received",
            peer=task.sender.pubkey,
            task_id=task.id,
        )

    async def _forged(self, principal: Principal, task: Task) -> None:
        await self._ledger.commit(
            WriteAuditRow(
                by=principal.agent,
                row={
                    "type": "a2a_sender_mismatch",
                    "peer_display": principal.agent.display,
                    "claimed_sender_display": task.sender.display,
                },
            )
        )
        raise Forbidden(
            "sender_mismatch",
            f"task.sender {task.sender.display!r} does not match the authenticated identity "
            f"{principal.agent.display!r}; send as yourself, with your own pubkey",
        )

    async def take(
        self, principal: Principal, *, everyone: bool = False, count: int = 1, request_id: str | None = None
    ) -> Leased:
        """Leases the next tasks: the caller's own, or (for the operator) those of all recipients in turn."""
        check_limit(count, self.limits.batch_max, "max")
        check_request_id(request_id)
        if self._intake.closed is not None:
            raise self._intake.closed
        if self._presence is not None:
            self._presence.note(principal.agent)
        if not self.leasing:
            raise Unavailable("stopping", "the daemon is stopping; ask again", retry_after_ms=1_000)
        if everyone:
            await require_operator(self._ledger, principal, "scope=all")
        recipient = None if everyone else principal.agent.pubkey
        return await self._ledger.commit(
            Take(holder=principal.agent, recipient=recipient, count=count, request_id=request_id)
        )

    async def renew(self, principal: Principal, task_id: TaskId, lease_id: LeaseId) -> Lease:
        if self._presence is not None:
            self._presence.note(principal.agent)
        return await self._ledger.commit(
            Renew(task_id=task_id, viewer=principal.viewer, holder=principal.agent, lease_id=lease_id)
        )

    async def release(
        self, principal: Principal, task_id: TaskId, lease_id: LeaseId, reason: str, *, audited: bool = True
    ) -> Lease:
        return await self._ledger.commit(
            Release(
                task_id=task_id,
                viewer=principal.viewer,
                holder=principal.agent,
                lease_id=lease_id,
                reason=check_reason(reason, "release"),
                audited=audited,
            )
        )

    async def give_back(self, answer: Leased | Drained) -> None:
        """Returns leases or results whose receiver disconnected before the answer reached it."""
        if isinstance(answer, Leased):
            leases = tuple((each.task.id, each.lease.lease_id) for each in answer.tasks)
            await self._ledger.commit(GiveBack(leases=leases))
        else:
            await self._ledger.commit(GiveBack(results=tuple(result.task_id for result in answer.results)))

    async def withdraw(self, principal: Principal, request_id: str) -> Returned:
        """Undoes the caller's receive or drain under this request id: its leases or results go back."""
        check_request_id(request_id)
        return await self._ledger.commit(Withdraw(by=principal.agent, request_id=request_id))

    async def report(
        self, principal: Principal, task_id: TaskId, lease_id: LeaseId, update: Update, update_no: int
    ) -> Reported:
        check_size(_encode(update), self.limits.update_bytes_max, "update")
        check_update(update)
        if self._files is not None and self._files.may_store(update.parts):
            update = await self._files.store_update(update, task_id, principal.agent)
        asks = isinstance(update, StatusUpdate) and update.state in WAITS_FOR_SENDER
        if asks and update.metadata and USAGE in update.metadata:
            # A question reports the usage of all turns so far: the next turn knows no other.
            used = await add_earlier_usage(self._ledger, task_id, read_usage(update.metadata[USAGE]))
            update = msgspec.structs.replace(update, metadata={**update.metadata, USAGE: used})
        return await self._ledger.commit(
            Report(
                task_id=task_id,
                viewer=principal.viewer,
                holder=principal.agent,
                lease_id=lease_id,
                update=update,
                update_no=update_no,
            )
        )

    async def cancel(self, principal: Principal, task_id: TaskId, reason: str) -> Canceled:
        check_reason(reason, "cancel")
        return await self._ledger.commit(
            Cancel(task_id=task_id, viewer=principal.viewer, by=principal.agent, reason=reason, audited=True)
        )

    async def answer(
        self, principal: Principal, task_id: TaskId, given: str | PersonDecision, answer_id: str | None = None
    ) -> Reported:
        """The next message to a task that waits for its sender; from its sender, or from the operator.

        `answer_id`: a repeat with the same id is the same answer.
        """
        check_request_id(answer_id)
        message, message_id = read_answer(given), answer_id or nonce()
        message = msgspec.structs.replace(message, message_id=message_id)
        check_size(_encode(message), self.limits.update_bytes_max, "answer")
        entry, viewer = await self._ledger.entry(task_id), principal.viewer
        if entry is not None and entry.a2a_state in WAITS_FOR_SENDER and viewer in (None, entry.task.sender.pubkey):
            reported = await self._ledger.commit(
                Continue(task_id=task_id, viewer=viewer, message=message, message_id=message_id, by=principal.agent)
            )
            if not reported.duplicate:
                await signal_caller(self._ledger, entry.task, reported.generation)
                return reported
        view = (await self._reader.past(task_id, scope=TaskScope(sender=viewer))).view()
        if view is None:
            raise NotFound("unknown_task", f"no task {task_id} of yours is known here")
        before = next((earlier for earlier in view.history if earlier.message_id == message_id), None)
        if before is None:
            code = "not_asked" if isinstance(given, PersonDecision) else "not_waiting"
            raise Conflict(code, f"task {task_id} does not wait for its sender: it is {view.state}")
        if before.parts != message.parts:
            raise Conflict("idempotency_key_reused", f"{answer_id} was the id of another answer; use a new one")
        return Reported(view.generation, duplicate=True)

    async def signal(
        self, principal: Principal, task_id: TaskId, name: str, value: Any, signal_id: str | None
    ) -> Reported:
        """Signals a task, whose step waits for it now or later; from its sender, its recipient or the operator.

        `signal_id`: a repeat with the same id is the same signal.
        """
        check_request_id(signal_id)
        if not 0 < len(name) <= SIGNAL_CHARS_MAX or not name.isprintable():
            raise Invalid("invalid_signal", f"a signal needs a name of at most {SIGNAL_CHARS_MAX} printable characters")
        signal = Signal(name, signal_id or nonce(), value)
        check_size(_encode(signal), self.limits.update_bytes_max, "signal")
        return await self._ledger.commit(SignalTask(task_id=task_id, viewer=principal.viewer, signal=signal))

    async def settle(
        self, principal: Principal, result: Result, lease_id: LeaseId | None, *, rejected: bool = False
    ) -> Settled:
        """`rejected`: the worker refuses the task, and the error says why."""
        if rejected and result.status is not ResultStatus.ERROR:
            raise Invalid("invalid_result", 'rejected: only a result with the status "error" can reject a task')
        check_size(_encode(result), self.limits.result_bytes_max, "result")
        check_blocks(result.content, "content")
        task_id = result.task_id
        parties, entry = await self._ledger.parties(task_id), await self._ledger.entry(task_id)
        access = None
        if parties is not None:
            own = principal.viewer in (None, parties.recipient.pubkey)
            if own and (entry is None or entry.turn > 1):
                used = await add_earlier_usage(self._ledger, task_id, usage_in(result.metadata))
                result = msgspec.structs.replace(result, metadata={USAGE: used} if used else msgspec.UNSET)
            if self._files is not None and self._files.may_store(result.content):
                result = await self._files.store_answer(result, parties, principal.agent)
            sender = parties.sender
            access = Access(
                caller=principal.agent,
                actions=(*respond_actions(sender), *_respond_within(entry)),
                scope_id=f"a2a-respond:{task_id}",
                what=f"a2a respond to {sender.display}",
                peer=sender.pubkey,
                task_id=task_id,
            )
        settled = await self._ledger.commit(
            Settle(
                access=access,
                task_id=task_id,
                viewer=principal.viewer,
                holder=principal.agent,
                result=result,
                lease_id=lease_id,
                ending=Ending.REJECTED if rejected else None,
            )
        )
        if entry is not None and self._tracer.on and not settled.duplicate:
            record_attempt(self._tracer, entry, result)
        return settled

    async def drain(
        self,
        principal: Principal,
        *,
        everyone: bool = False,
        count: int = 1,
        request_id: str | None = None,
        task_id: TaskId | None = None,
    ) -> Drained:
        """Takes the oldest results: the caller's own, or (for the operator) everybody's; or the result of one task."""
        check_limit(count, self.limits.batch_max, "max")
        check_request_id(request_id)
        if everyone:
            await require_operator(self._ledger, principal, "scope=all")
        sender = None if everyone else principal.agent.pubkey
        return await self._ledger.commit(
            Drain(by=principal.agent, sender=sender, count=count, request_id=request_id, task_id=task_id)
        )

    async def queue(self, principal: Principal, query: QueueQuery) -> Queue:
        check_limit(query.limit, self.limits.page_max)
        if query.state_filter is not None and query.state_filter not in LIVE_NAMES:
            raise Invalid("invalid_filter", f"state_filter must be one of {', '.join(LIVE_NAMES)}")
        return await self._ledger.queue(msgspec.structs.replace(query, viewer=principal.viewer))

    async def recent_tasks(self, principal: Principal, limit: int) -> Sequence[Task]:
        check_limit(limit, self.limits.page_max)
        return await self._ledger.recent_tasks(principal.viewer, limit)

    async def recent_results(self, principal: Principal, limit: int) -> Sequence[Result]:
        check_limit(limit, self.limits.page_max)
        return await self._ledger.recent_results(principal.viewer, limit)

    async def show(self, principal: Principal, task_id: TaskId, after: int | None = None) -> TaskDetail:
        shown = await self._ledger.show(task_id, principal.viewer, self.limits.page_max, after)
        if shown is None:
            raise unknown_task(task_id)
        return shown

    async def tree(self, principal: Principal, root: TaskId) -> TreeNode:
        return await read_tree(self._ledger, root, principal.viewer)

    async def compact(self, principal: Principal) -> int:
        access = Access(caller=principal.agent, actions=(COMPACT_ACTION,), scope_id="a2a:compact", what="a2a compact")
        await self._ledger.commit(WriteAuditRow(access=access, by=principal.agent, row={"type": "a2a_compact_started"}))
        dropped = await self._ledger.compact()
        await self.note(principal, "a2a_compacted", dropped=dropped)
        return dropped

    async def note(self, principal: Principal, what: str, **fields: object) -> None:
        """Writes a row of this type into the audit."""
        await self._ledger.commit(WriteAuditRow(by=principal.agent, row={"type": what, **fields}))


def _respond_within(entry: Entry | None) -> tuple[str, ...]:
    """A grant to answer a tenant's callers also covers its agents, when they delegate, and its peers."""
    if entry is None or entry.task.origin not in (DELEGATION, PEER):
        return ()
    return (f"a2a.respond.client@{entry.task.tenant}",)
