"""Commands: the ledger's verbs as values, each with the answer it gets.

A command is complete: repeating it under the same ids gives the same answer. `keys` names what its decision
reads and changes, so that an engine with many writers can lock just that. A key stands for an entity and for what
hangs on it: a task for whoever shares its work (the leader and the followers of its cache key) and for the account that
it counts against, a queue, a lane of results, the leases and what is due for the tasks in them, a request for the tasks
that it gave out.
"""

from __future__ import annotations

from typing import Final, Generic, Literal, TypeVar

import msgspec

from covenant.model.a2a_requests import PushConfig
from covenant.model.ids import AgentId, LeaseId, PublicKey, TaskId
from covenant.model.push import Push, PushMove
from covenant.model.retry_policy import RepairCommand, RepairOutcome, RetryPolicy, RetryReport
from covenant.model.task import DELEGATION, Ending, Lease, Result, Task, account_of, cache_key
from covenant.model.task_event import MessageUpdate, Signal, StatusUpdate, TurnUpdate, Update, Wait

A = TypeVar("A")
Key = tuple[str, ...]


class Access(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The capability a caller must show: one live grant for one of `actions` whose pins the request meets.

    Every check is audited under `scope_id`. Commands without an `Access` come from the process itself.
    """

    caller: AgentId
    actions: tuple[str, ...]
    scope_id: str
    what: str
    """What the caller is trying to do, for the refusal: "send to bob@host"."""
    peer: str | None = None
    task_id: str | None = None
    lease_id: str | None = None
    duplicate_risk: str | None = None


class Command(msgspec.Struct, Generic[A], frozen=True, gc=False, kw_only=True):
    access: Access | None = None

    def keys(self) -> tuple[Key, ...]:
        return ()

    def undo(self, answer: A, /) -> GiveBack | None:
        """What gives back what the answer gave out, if whoever asked is cancelled before it is told."""


AUDIT: Final[Key] = ("audit",)
"""The head of the audit chain: of every command that leaves a row."""


def _access_keys(*accesses: Access | None) -> tuple[Key, ...]:
    grants = [("grants", access.caller.pubkey, action) for access in accesses if access for action in access.actions]
    return (*grants, AUDIT) if grants else ()


class LeasedTask(msgspec.Struct, frozen=True, gc=False):
    """`messages`: what a later turn is about. The first one is about the task itself."""

    task: Task
    lease: Lease
    turn: int = 1
    messages: tuple[MessageUpdate, ...] = ()
    continues: bool = False
    """The same attempt goes on, after a wait."""
    cut: bool = False
    """An attempt before was cut short, and nobody knows how far it came beyond the last step in the ledger."""


class Accepted(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: TaskId
    duplicate: bool = False
    replayed: bool = False
    following: TaskId | None = None
    leased: LeasedTask | None = None


class Starter(msgspec.Struct, frozen=True, gc=False):
    """Who can start on a task at once, in this very process."""

    holder: AgentId
    node: str
    boot: str


RecipientFault = Literal["unknown", "mismatch"]
"""Nobody has the name, and no key was given; or the registry binds the name or the key otherwise."""


class Accept(Command[Accepted], frozen=True, gc=False, kw_only=True):
    task: Task
    digest: str
    admission: Access | None = None
    """The recipient's own consent to this sender, where the setting asks for it."""
    starter: Starter | None = None
    """Leased to it in the same record, unless others wait before it or the work is done already."""
    push: PushConfig | None = None
    """Made in the same record; told from the task's first step on."""
    minted: bool = False
    """Its id is new, by chance and from here: nobody looks for an earlier task of that id."""
    recipient_fault: RecipientFault | None = None
    """What is wrong with the recipient. Told to those who may send to it, and to nobody else."""

    def keys(self) -> tuple[Key, ...]:
        task, key = self.task, cache_key(self.task)
        cache: tuple[Key, ...] = (("cache", *msgspec.structs.astuple(key)),) if key else ()
        parent: tuple[Key, ...] = (("task", task.parent),) if task.origin == DELEGATION and task.parent else ()
        return (
            ("task", task.id),
            ("account", account_of(task)),
            *((("tenant", task.tenant),) if task.tenant is not None else ()),
            *parent,
            ("queue", task.recipient.pubkey),
            ("results", task.sender.pubkey),
            *cache,
            *((("pushes",),) if self.push is not None else ()),
            *_access_keys(self.access, self.admission),
        )


class Leased(msgspec.Struct, frozen=True, gc=False):
    """`again`: what this request id was given before, as far as it is still live. There is no more to wait for."""

    tasks: tuple[LeasedTask, ...] = ()
    again: bool = False


class Take(Command[Leased], frozen=True, gc=False, kw_only=True):
    """Lease up to `count` queued tasks: the oldest of one recipient, or of all recipients in turn.

    Without a `holder`, each is leased to its recipient.
    """

    holder: AgentId | None
    recipient: PublicKey | None
    count: int = 1
    request_id: str | None = None
    by: AgentId | None = None
    """Who asks, where it is not the holder. With a request id, one of the two must be there."""
    node: str | None = None
    boot: str | None = None

    @property
    def asker(self) -> AgentId | None:
        return self.by or self.holder

    def keys(self) -> tuple[Key, ...]:
        queue: Key = ("queue", self.recipient) if self.recipient else ("queue",)
        asker = self.asker
        if self.request_id is None or asker is None:
            return (queue,)
        return (queue, ("request", "take", asker.pubkey, self.request_id))

    def undo(self, answer: Leased, /) -> GiveBack | None:
        if self.request_id is not None or not answer.tasks:
            return None
        return GiveBack(leases=tuple((each.task.id, each.lease.lease_id) for each in answer.tasks))


class TaskCommand(Command[A], frozen=True, gc=False, kw_only=True):
    task_id: TaskId
    viewer: PublicKey | None = None
    """Who asks: a task that is not theirs is not found. None sees all (the operator, and the process itself)."""
    recipient: PublicKey | None = None
    """At whose door it is asked: a task for somebody else is not found either."""

    def keys(self) -> tuple[Key, ...]:
        return (("task", self.task_id), *_access_keys(self.access))


class HolderCommand(TaskCommand[A], frozen=True, gc=False, kw_only=True):
    """What the holder of a lease says about its task."""

    holder: AgentId
    lease_id: LeaseId


class Renew(HolderCommand[Lease], frozen=True, gc=False, kw_only=True):
    pass


class Release(HolderCommand[Lease], frozen=True, gc=False, kw_only=True):
    """Give back work that was not started."""

    reason: str
    audited: bool = False
    """Whether somebody asked for it, of which the audit tells."""

    def keys(self) -> tuple[Key, ...]:
        keys = super().keys()
        return (*keys, AUDIT) if self.audited else keys


class Interrupt(HolderCommand[Lease], frozen=True, gc=False, kw_only=True):
    """Mark work whose holder is gone, and tell those who watch the task. Marked work stays as it is.

    An operator has `hold_ms` to decide what becomes of it; then the task fails. 0: the work waits without a bound.
    """

    reason: str
    hold_ms: int = 0
    outlook: str = ""
    """What becomes of the work, where no operator decides that."""


class Reported(msgspec.Struct, frozen=True, gc=False):
    generation: int
    duplicate: bool = False


class Report(HolderCommand[Reported], frozen=True, gc=False, kw_only=True):
    update: Update
    update_no: int = 0


class Advanced(msgspec.Struct, frozen=True, gc=False):
    """Where the task stands. `goes_on`: the result ended the turn and not the task; its next turn is queued."""

    generation: int
    goes_on: bool = False
    signal: Signal | None = None
    """The signal that was there already: the task is not parked for it."""


class Advance(HolderCommand[Advanced], frozen=True, gc=False, kw_only=True):
    """Several updates, and perhaps the result, in one record: what a holder in this process has to say at once.

    Only the last update may park the task, and not beside a result.
    """

    updates: tuple[TurnUpdate, ...] = ()
    result: Result | None = None
    ending: Ending | None = None
    """None: as the result's status says."""
    wait: Wait | None = None
    """Instead of a result: the lease ends, and the task is parked until what is waited for has come."""
    told: StatusUpdate | None = None
    """What its watchers hear of a wait that is not a step's."""


class Continue(TaskCommand[Reported], frozen=True, gc=False, kw_only=True):
    """A message to a task: its next turn if it is parked; kept for its next turn while it is at work.

    `message_id` names this saying of it: the same again is the same message, lost on its way back. One that begins with
    `key` and goes on otherwise is another message under the same key, and is refused.
    """

    message: MessageUpdate
    message_id: str
    key: str | None = None
    by: AgentId | None = None
    """Who says it, for the audit of an approval."""


class Tell(TaskCommand[Reported], frozen=True, gc=False, kw_only=True):
    """A signal to a task: what a step waits for, now or later."""

    signal: Signal


class Settled(msgspec.Struct, frozen=True, gc=False):
    """`goes_on`: messages were kept for it, so the result ended the turn and not the task."""

    task_id: TaskId
    duplicate: bool = False
    goes_on: bool = False


class Settle(TaskCommand[Settled], frozen=True, gc=False, kw_only=True):
    holder: AgentId | None
    """None: whoever has the lease, for a process that trusts itself."""
    result: Result
    lease_id: LeaseId | None = None
    ending: Ending | None = None
    """None: as the result's status says."""

    def keys(self) -> tuple[Key, ...]:
        return (("task", self.task_id), *_access_keys(self.access), AUDIT)


class Canceled(msgspec.Struct, frozen=True, gc=False):
    """`ending` tells who won where a cancel and a result race; `before`, that it had ended before this was asked."""

    task_id: TaskId
    ending: Ending
    result: Result
    canceled: bool
    before: bool = False


class Cancel(TaskCommand[Canceled], frozen=True, gc=False, kw_only=True):
    by: AgentId
    reason: str
    audited: bool = False
    """Whether it is a repair, of which the audit tells."""

    def keys(self) -> tuple[Key, ...]:
        keys = super().keys()
        return (*keys, AUDIT) if self.audited else keys


class Repair(TaskCommand[RepairOutcome], frozen=True, gc=False, kw_only=True):
    by: AgentId
    command: RepairCommand
    reason: str

    def keys(self) -> tuple[Key, ...]:
        return (("task", self.task_id), *_access_keys(self.access), AUDIT)


class RetryStale(Command[RetryReport], frozen=True, gc=False, kw_only=True):
    """One pass of the retry gate. Without `policy.enabled` it changes nothing and says what it would do."""

    by: AgentId
    policy: RetryPolicy
    scheduled: bool = False

    def keys(self) -> tuple[Key, ...]:
        return (("leases",), *_access_keys(self.access), AUDIT)


class Drained(msgspec.Struct, frozen=True, gc=False):
    results: tuple[Result, ...] = ()


class Drain(Command[Drained], frozen=True, gc=False, kw_only=True):
    """Take up to `count` of the oldest results, of one sender or of all; or the result of one task."""

    by: AgentId
    sender: PublicKey | None
    count: int = 1
    request_id: str | None = None
    task_id: TaskId | None = None

    def keys(self) -> tuple[Key, ...]:
        results: Key = ("results", self.sender) if self.sender else ("results",)
        if self.task_id is not None:
            results = ("task", self.task_id)
        if self.request_id is None:
            return (results,)
        return (results, ("request", "drain", self.by.pubkey, self.request_id))

    def undo(self, answer: Drained, /) -> GiveBack | None:
        if self.request_id is not None or not answer.results:
            return None
        return GiveBack(results=tuple(result.task_id for result in answer.results))


class Returned(msgspec.Struct, frozen=True, gc=False):
    """How many leases and results went back."""

    leases: int = 0
    results: int = 0


GONE: Final = "whoever asked for it had left before it was told"


class GiveBack(Command[Returned], frozen=True, gc=False, kw_only=True):
    """Leases and results that whoever asked for them was never told of. Each goes back to the head of its queue.

    What has moved on since then stays where it is.
    """

    leases: tuple[tuple[TaskId, LeaseId], ...] = ()
    results: tuple[TaskId, ...] = ()
    reason: str = GONE

    def keys(self) -> tuple[Key, ...]:
        tasks = (*(task_id for task_id, _ in self.leases), *self.results)
        return tuple(("task", task_id) for task_id in tasks)


class Withdraw(Command[Returned], frozen=True, gc=False, kw_only=True):
    """Whoever asked under this request id asks no more: what it was given goes back, and it is given nothing later."""

    by: AgentId
    request_id: str
    reason: str = "whoever asked for it has withdrawn the request"

    def keys(self) -> tuple[Key, ...]:
        by, request_id = self.by.pubkey, self.request_id
        return ("request", "take", by, request_id), ("request", "drain", by, request_id)


class Swept(msgspec.Struct, frozen=True, gc=False):
    expired: tuple[TaskId, ...] = ()
    timed_out: tuple[TaskId, ...] = ()
    forgotten: int = 0
    uncached: int = 0
    more: bool = False
    pushes: int = 0
    """Configurations dropped."""
    interrupted: tuple[TaskId, ...] = ()
    """Work that was interrupted, and for which no operator decided in time."""
    woken: int = 0
    """Tasks whose wait was over."""


class Sweep(Command[Swept], frozen=True, gc=False, kw_only=True):
    """Settle what is past its deadline, timeout or hold, wake what has waited long enough, forget what nobody drains,
    and drop what is too old to replay."""

    count: int = 100

    def keys(self) -> tuple[Key, ...]:
        return (("due",),)


class Orphaned(msgspec.Struct, frozen=True, gc=False):
    task_ids: tuple[TaskId, ...] = ()
    more: bool = False


class CancelOrphans(Command[Orphaned], frozen=True, gc=False, kw_only=True):
    """Cancel what was delegated by tasks that have ended since. What that orphans in turn is for the next one."""

    count: int = 100

    def keys(self) -> tuple[Key, ...]:
        return (("orphans",),)


class PutPush(TaskCommand[Push], frozen=True, gc=False, kw_only=True):
    """Make a configuration; or put it in the place of the one with its id, which keeps its cursor.

    `once`: without an id, one that is equal is the same one. So a client that says it with every message has one.
    """

    config: PushConfig
    once: bool = False

    def keys(self) -> tuple[Key, ...]:
        return ("task", self.task_id), ("pushes",)


class DropPush(TaskCommand[bool], frozen=True, gc=False, kw_only=True):
    """Whether there was one. Doing it twice is as good as once."""

    id: str

    def keys(self) -> tuple[Key, ...]:
        return ("task", self.task_id), ("pushes",)


class MovePushes(Command[None], frozen=True, gc=False, kw_only=True):
    """What deliveries came to, of several configurations at once. One that was replaced meanwhile is left alone."""

    moves: tuple[PushMove, ...]

    def keys(self) -> tuple[Key, ...]:
        return (*(("task", move.task_id) for move in self.moves), ("pushes",))


class RetryPush(TaskCommand[Push], frozen=True, gc=False, kw_only=True):
    """Try again at once, given up or not."""

    by: AgentId
    id: str

    def keys(self) -> tuple[Key, ...]:
        return ("task", self.task_id), ("pushes",), AUDIT
