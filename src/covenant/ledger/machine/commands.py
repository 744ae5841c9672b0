"""Commands: the ledger's verbs as values, each with the type of its answer.

A command is complete: repeating it under the same ids gives the same answer.
"""

from __future__ import annotations

from typing import Final, Generic, Literal, TypeVar

import msgspec

from covenant.model.a2a_requests import PushConfig
from covenant.model.ids import AgentId, LeaseId, PublicKey, TaskId
from covenant.model.push import Push, PushMove
from covenant.model.retry_policy import RepairCommand, RepairOutcome, RetryPolicy, RetryReport
from covenant.model.task import Ending, Lease, Result, Task
from covenant.model.task_event import MessageUpdate, Signal, StatusUpdate, TurnUpdate, Update, Wait

A = TypeVar("A")
GONE: Final = "the caller left before it got the answer"


class Access(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The capability that a caller needs: one live grant for one of `actions` whose pins match the request.

    Every check is audited under `scope_id`. Commands without an `Access` come from the process itself.
    """

    caller: AgentId
    actions: tuple[str, ...]
    scope_id: str
    what: str
    """The attempted action, for the refusal: "send to bob@host"."""
    peer: str | None = None
    task_id: str | None = None
    lease_id: str | None = None
    duplicate_risk: str | None = None


class Command(msgspec.Struct, Generic[A], frozen=True, gc=False, kw_only=True):
    access: Access | None = None

    def undo(self, answer: A, /) -> GiveBack | None:
        """The command that gives back the answer's leases or results if the caller is cancelled before it gets them."""


class LeasedTask(msgspec.Struct, frozen=True, gc=False):
    """`messages`: the messages of a later turn. The first turn has the task's own text."""

    task: Task
    lease: Lease
    turn: int = 1
    messages: tuple[MessageUpdate, ...] = ()
    continues: bool = False
    """The lease continues the same attempt after a wait."""
    cut: bool = False
    """An earlier attempt was cut short. How far it came beyond its last step in the ledger is unknown."""
    generation: int = 0
    """The task's at the lease; 0 before the first update of all."""


class Accepted(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: TaskId
    duplicate: bool = False
    replayed: bool = False
    following: TaskId | None = None
    leased: LeasedTask | None = None


class Starter(msgspec.Struct, frozen=True, gc=False):
    """A worker in this process that can start on a task at once."""

    holder: AgentId
    node: str
    boot: str


RecipientFault = Literal["unknown", "mismatch"]
"""No agent has the name, and no key was given; or the registry binds the name or the key otherwise."""


class Accept(Command[Accepted], frozen=True, gc=False, kw_only=True):
    task: Task
    digest: str
    former: tuple[str, ...] = ()
    """The request's digests by earlier rules: a task that was accepted under them has one of these."""
    admission: Access | None = None
    """The recipient's own consent to this sender, if the setting requires it."""
    starter: Starter | None = None
    """The task is leased to it in the same record, unless others wait before it or the result is already known."""
    push: PushConfig | None = None
    """Created in the same record; it gets the task's steps from the first one on."""
    minted: bool = False
    """The id was just generated here at random: no earlier task can have it."""
    recipient_fault: RecipientFault | None = None
    """The fault of the recipient. Only callers that may send to it learn of it."""
    body_bytes: int | None = None
    """The bytes of the task (`weigh`), if its writer has counted them already."""


class Leased(msgspec.Struct, frozen=True, gc=False):
    """`again`: the live leases that this request id was given before. There is nothing more to wait for."""

    tasks: tuple[LeasedTask, ...] = ()
    again: bool = False


class Take(Command[Leased], frozen=True, gc=False, kw_only=True):
    """Leases up to `count` queued tasks: the oldest of one recipient, or of all recipients in turn.

    Without a `holder`, each is leased to its recipient.
    """

    holder: AgentId | None
    recipient: PublicKey | None
    count: int = 1
    request_id: str | None = None
    by: AgentId | None = None
    """The caller, if it is not the holder. With a request id, one of the two must be set."""
    node: str | None = None
    boot: str | None = None

    @property
    def asker(self) -> AgentId | None:
        return self.by or self.holder

    def undo(self, answer: Leased, /) -> GiveBack | None:
        if self.request_id is not None or not answer.tasks:
            return None
        return GiveBack(leases=tuple((each.task.id, each.lease.lease_id) for each in answer.tasks))


class TaskCommand(Command[A], frozen=True, gc=False, kw_only=True):
    task_id: TaskId
    viewer: PublicKey | None = None
    """The caller: a task that is not theirs is not found. None sees all (the operator, and the process itself)."""
    recipient: PublicKey | None = None
    """The agent whose address the caller used: a task for another agent is not found either."""


class HolderCommand(TaskCommand[A], frozen=True, gc=False, kw_only=True):
    """A command of a lease's holder about its task."""

    holder: AgentId
    lease_id: LeaseId


class Renew(HolderCommand[Lease], frozen=True, gc=False, kw_only=True):
    pass


class Release(HolderCommand[Lease], frozen=True, gc=False, kw_only=True):
    """Gives back work that was not started."""

    reason: str
    audited: bool = False
    """Whether the release was requested by a caller, and is audited."""


class Interrupt(HolderCommand[Lease], frozen=True, gc=False, kw_only=True):
    """Marks work whose holder is gone, and tells the task's watchers. Work that is already marked stays as it is.

    An operator has `hold_ms` to decide about the work; then the task fails. 0: the work waits without limit.
    """

    reason: str
    hold_ms: int = 0
    outlook: str = ""
    """What will happen to the work, if no operator decides about it."""
    by_agent: bool = False
    """The work's own turn asks for the hold: another `on_lost` must not end it."""


class Reported(msgspec.Struct, frozen=True, gc=False):
    generation: int
    duplicate: bool = False


class Report(HolderCommand[Reported], frozen=True, gc=False, kw_only=True):
    update: Update
    update_no: int = 0


class Advanced(msgspec.Struct, frozen=True, gc=False):
    """The state of the task. `goes_on`: the result ended the turn but not the task; its next turn is queued."""

    generation: int
    goes_on: bool = False
    signal: Signal | None = None
    """A signal that had already arrived: the task is not parked for it."""


class Advance(HolderCommand[Advanced], frozen=True, gc=False, kw_only=True):
    """Several updates, and perhaps the result, of a holder in this process, in one record.

    Only the last update may park the task, and not together with a result.
    """

    updates: tuple[TurnUpdate, ...] = ()
    result: Result | None = None
    ending: Ending | None = None
    """None: follows from the result's status."""
    wait: Wait | None = None
    """Instead of a result: the lease ends, and the task is parked until the wait is over."""
    status: StatusUpdate | None = None
    """The update that watchers see for a wait that is not a step's."""


class Continue(TaskCommand[Reported], frozen=True, gc=False, kw_only=True):
    """A message to a task: its next turn if the task is parked; kept for its next turn while it is at work.

    A repeated `message_id` is the same message, whose answer was lost. An id that begins with `key` and differs after
    it is another message under the same key, and is refused. `former`: as in `Accept`.
    """

    message: MessageUpdate
    message_id: str
    former: tuple[str, ...] = ()
    key: str | None = None
    by: AgentId | None = None
    """The message's author, for the audit of an approval."""


class SignalTask(TaskCommand[Reported], frozen=True, gc=False, kw_only=True):
    """A signal to a task, for a step that waits for it now or later."""

    signal: Signal


class Settled(msgspec.Struct, frozen=True, gc=False):
    """`goes_on`: messages were kept for the task, so the result ended the turn but not the task."""

    task_id: TaskId
    duplicate: bool = False
    goes_on: bool = False


class Settle(TaskCommand[Settled], frozen=True, gc=False, kw_only=True):
    holder: AgentId | None
    """None: any holder of the lease, for a trusted process."""
    result: Result
    lease_id: LeaseId | None = None
    ending: Ending | None = None
    """None: follows from the result's status."""


class Canceled(msgspec.Struct, frozen=True, gc=False):
    """`ending` is the outcome of a race between a cancel and a result; `before`: the task had already ended."""

    task_id: TaskId
    ending: Ending
    result: Result
    canceled: bool
    before: bool = False


class Cancel(TaskCommand[Canceled], frozen=True, gc=False, kw_only=True):
    by: AgentId
    reason: str
    audited: bool = False
    """Whether the cancel is a repair, and is audited."""


class Repair(TaskCommand[RepairOutcome], frozen=True, gc=False, kw_only=True):
    by: AgentId
    command: RepairCommand
    reason: str


class RetryStale(Command[RetryReport], frozen=True, gc=False, kw_only=True):
    """One pass of the retry gate. Without `policy.enabled` it changes nothing and reports what it would do."""

    by: AgentId
    policy: RetryPolicy
    scheduled: bool = False


class Drained(msgspec.Struct, frozen=True, gc=False):
    results: tuple[Result, ...] = ()


class Drain(Command[Drained], frozen=True, gc=False, kw_only=True):
    """Takes up to `count` of the oldest results, of one sender or of all; or the result of one task."""

    by: AgentId
    sender: PublicKey | None
    count: int = 1
    request_id: str | None = None
    task_id: TaskId | None = None

    def undo(self, answer: Drained, /) -> GiveBack | None:
        if self.request_id is not None or not answer.results:
            return None
        return GiveBack(results=tuple(result.task_id for result in answer.results))


class Returned(msgspec.Struct, frozen=True, gc=False):
    """The numbers of leases and results that went back."""

    leases: int = 0
    results: int = 0


class GiveBack(Command[Returned], frozen=True, gc=False, kw_only=True):
    """Returns leases and results that their caller never got to the heads of their queues.

    Leases and results that have changed since then stay as they are.
    """

    leases: tuple[tuple[TaskId, LeaseId], ...] = ()
    results: tuple[TaskId, ...] = ()
    reason: str = GONE


class Withdraw(Command[Returned], frozen=True, gc=False, kw_only=True):
    """Withdraws a request id: its leases and results go back, and it gets none later."""

    by: AgentId
    request_id: str
    reason: str = "the caller withdrew its request"


class Swept(msgspec.Struct, frozen=True, gc=False):
    expired: tuple[TaskId, ...] = ()
    timed_out: tuple[TaskId, ...] = ()
    forgotten: int = 0
    uncached: int = 0
    more: bool = False
    pushes: int = 0
    """The number of dropped push configurations."""
    interrupted: tuple[TaskId, ...] = ()
    """Tasks that failed because no operator decided in time about their interrupted work."""
    woken: int = 0
    """The number of tasks whose wait was over."""


class Sweep(Command[Swept], frozen=True, gc=False, kw_only=True):
    """Settles tasks that are past their deadline, timeout or hold, wakes tasks whose wait is over, forgets results that
    nobody drains, and drops cached results that are too old."""

    count: int = 100


class Orphaned(msgspec.Struct, frozen=True, gc=False):
    task_ids: tuple[TaskId, ...] = ()
    more: bool = False


class CancelOrphans(Command[Orphaned], frozen=True, gc=False, kw_only=True):
    """Cancels tasks that were delegated by tasks that have ended. Tasks orphaned by this are left to the next pass."""

    count: int = 100


class PutPush(TaskCommand[Push], frozen=True, gc=False, kw_only=True):
    """Creates a push configuration, or replaces the one with its id, whose cursor is kept.

    `once`: one without an id that equals an existing one is the same. So a client may send it with every message.
    """

    config: PushConfig
    once: bool = False


class DropPush(TaskCommand[bool], frozen=True, gc=False, kw_only=True):
    """Drops a configuration. The answer says whether there was one. Repeating it is harmless."""

    id: str


class MovePushes(Command[None], frozen=True, gc=False, kw_only=True):
    """The outcomes of several configurations' deliveries. A configuration that was replaced meanwhile is left alone."""

    moves: tuple[PushMove, ...]


class RetryPush(TaskCommand[Push], frozen=True, gc=False, kw_only=True):
    """Retries a configuration at once, whether it was given up or not."""

    by: AgentId
    id: str
