"""Requests of the mailbox: tasks, results, leases, queries. They are decoded here, then turned into the model.

On input `null` and absent are the same, and unknown fields are ignored, except in requests that are `strict`. `origin`,
`tenant`, `depth` and `target` of a task are not fields here: the door sets them, never the caller. Reserved metadata
keys are dropped (see `model.sanitizer`). A request that also has a path takes `task_id` from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Literal, TypedDict, TypeVar

import msgspec

from covenant.model.content import Content
from covenant.model.ids import (
    AgentId,
    LeaseId,
    PublicKey,
    TaskId,
    check_display,
    check_pubkey,
    parse_lease_id,
    parse_task_id,
    parse_uuid,
)
from covenant.model.retry_policy import ForceError, Posture, RepairCommand, Requeue, RetryPolicy
from covenant.model.sanitizer import unreserved_parts, unreserved_update
from covenant.model.task import Idempotency, Result, ResultStatus, Task
from covenant.model.task_event import Update
from covenant.model.usage import USAGE, read_usage

T = TypeVar("T")

# The range of an archive's integer column and of other languages' signed 64 bits.
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Moment = Annotated[int, msgspec.Meta(ge=0)]
"""The decoder reads whole numbers up to 2^64-1."""
Enrolled = Callable[[AgentId], AgentId | None]

NO_KEY: Final = PublicKey("")
"""The key of a recipient whose name is not enrolled here."""


class Request(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The base of every request."""

    strict: ClassVar[bool] = False
    """Whether unknown fields are refused: set where a misspelt field would allow more than was meant."""
    ids: ClassVar[tuple[str, ...]] = ()
    """Fields that hold the id of a task, or of a part of one: the beginning of the id is enough."""


class StrictRequest(Request, frozen=True, kw_only=True):
    """The base of requests that change permissions."""

    strict: ClassVar[bool] = True


class EmptyRequest(Request, frozen=True, kw_only=True):
    """A request that needs no fields."""


class TaskRequest(Request, frozen=True, kw_only=True):
    ids: ClassVar[tuple[str, ...]] = ("task_id",)
    task_id: str = ""

    def parsed_task_id(self) -> TaskId:
        return parse_task_id(self.task_id)


class WireAgent(msgspec.Struct, frozen=True, gc=False):
    """An agent's identity: `pubkey` may be left out if the display name is enrolled here."""

    display: str
    pubkey: str | None = None

    def agent(self) -> AgentId:
        """The identity as given, unchecked. Without a key it equals no other identity."""
        return AgentId(self.display, PublicKey(self.pubkey) if self.pubkey is not None else NO_KEY)


class SendTask(Request, frozen=True, kw_only=True):
    ids: ClassVar[tuple[str, ...]] = ("parent",)
    id: str
    recipient: WireAgent
    intent_text: str
    sender: WireAgent | None = None
    task_kind: str | None = None
    parent: str | None = None
    deadline_ms: Moment | None = None
    timeout_ms: Whole | None = None
    context_id: str | None = None
    idempotency: Idempotency | None = None
    parts: tuple[Content, ...] | None = None
    not_before_ms: Moment | None = None
    priority: Whole = 0

    def task(self, caller: AgentId, enrolled: Enrolled) -> Task:
        return Task(
            id=parse_task_id(self.id),
            sender=self._sender(caller),
            recipient=_recipient(self.recipient, enrolled),
            intent_text=self.intent_text,
            task_kind=self.task_kind,
            parent=TaskId(parse_uuid(self.parent, "parent")) if self.parent is not None else None,
            deadline_ms=self.deadline_ms,
            idempotency=self.idempotency,
            parts=unreserved_parts(self.parts or ()),
            timeout_ms=self.timeout_ms,
            context_id=self.context_id,
            not_before_ms=self.not_before_ms,
            priority=self.priority,
        )

    def _sender(self, caller: AgentId) -> AgentId:
        """The caller. If the request claims another sender, that claim is returned, and the exchange refuses it."""
        sender = self.sender
        if sender is None or (sender.display == caller.display and sender.pubkey in (None, caller.pubkey)):
            return caller
        check_display(sender.display)
        if sender.pubkey is not None:
            check_pubkey(sender.pubkey)
        return sender.agent()


def _recipient(given: WireAgent, enrolled: Enrolled) -> AgentId:
    """The recipient. Its key is `NO_KEY` if an unknown name was given: the refusal comes after the grant check."""
    agent = given.agent()
    known = enrolled(agent)
    if known is not None and (known == agent or (given.pubkey is None and known.display == given.display)):
        return known
    check_display(given.display)
    if given.pubkey is None:
        return AgentId(given.display, NO_KEY)
    check_pubkey(given.pubkey)
    return agent


class ReceiveRequest(Request, frozen=True, kw_only=True):
    """Leases the next tasks. `scope=all`, for the operator alone: those of all recipients in turn."""

    count: Whole | None = msgspec.field(name="max", default=None)
    wait_ms: Whole | None = None
    request_id: str | None = None
    scope: Literal["own", "all"] | None = None

    @property
    def everyone(self) -> bool:
        return self.scope == "all"


class DrainRequest(ReceiveRequest, frozen=True, kw_only=True):
    """Drains the next results, or the result of one task."""

    ids: ClassVar[tuple[str, ...]] = ("task_id",)
    task_id: str | None = None


class RecentRequest(Request, frozen=True, kw_only=True):
    limit: Whole | None = None


class QueueRequest(Request, frozen=True, kw_only=True):
    """`after`: the `next` of the last answer. With `wait_ms`, the answer comes when the queue has changed since."""

    limit: Whole | None = None
    min_lease_age_ms: Whole | None = None
    deadline_within_ms: Whole | None = None
    state_filter: Literal["queued", "in_flight", "in-flight", "parked", "following"] | None = None
    after: str | None = None
    wait_ms: Whole | None = None


class TaskFilter(StrictRequest, frozen=True, kw_only=True):
    """Conditions that a task must meet. `state` and `outcome` are one word, or several separated by commas."""

    ids: ClassVar[tuple[str, ...]] = ("parent",)
    state: str | None = None
    outcome: str | None = None
    id: str | None = None
    agent: str | None = None
    sender: str | None = None
    tenant: str | None = None
    task_kind: str | None = None
    origin: str | None = None
    parent: str | None = None
    context: str | None = None
    key: str | None = None
    cause: str | None = None
    attempt_min: Whole | None = None
    since_ms: Whole | None = None
    until_ms: Whole | None = None
    moved_since_ms: Whole | None = None
    text: str | None = None


class FindRequest(TaskFilter, frozen=True, kw_only=True):
    """A page of the tasks that match. `after` is the `next` of the page before."""

    order: Literal["created", "moved"] | None = None
    ascending: bool | None = None
    limit: Whole | None = None
    after: str | None = None
    count: bool | None = None


class FindFilters(TypedDict, total=False):
    """The fields of a `FindRequest`, as keyword arguments of the library's verbs."""

    state: str | None
    outcome: str | None
    id: str | None
    agent: str | None
    sender: str | None
    tenant: str | None
    task_kind: str | None
    origin: str | None
    parent: str | None
    context: str | None
    key: str | None
    cause: str | None
    attempt_min: int | None
    since_ms: int | None
    until_ms: int | None
    moved_since_ms: int | None
    text: str | None
    order: Literal["created", "moved"] | None
    ascending: bool | None
    limit: int | None
    after: str | None
    count: bool | None


class PostResult(TaskRequest, frozen=True, kw_only=True):
    ids: ClassVar[tuple[str, ...]] = ("task_id", "lease_id")
    task_id: str
    status: ResultStatus
    content: tuple[Content, ...] | None = None
    error_message: str | None = None
    lease_id: str | None = None
    rejected: bool | None = None
    """The task ends as rejected; `error_message` is the reason."""
    usage: dict[str, Any] | None = None
    """The usage of the work: `tokens` and other amounts."""

    def result(self) -> Result:
        used = read_usage(self.usage)
        return Result(
            task_id=self.parsed_task_id(),
            status=self.status,
            content=unreserved_parts(self.content or ()),
            error_message=self.error_message if self.error_message is not None else msgspec.UNSET,
            metadata={USAGE: used} if used else msgspec.UNSET,
        )


class LeaseRequest(TaskRequest, frozen=True, kw_only=True):
    ids: ClassVar[tuple[str, ...]] = ("task_id", "lease_id")
    lease_id: str

    def parsed_lease_id(self) -> LeaseId:
        return parse_lease_id(self.lease_id)


class ReleaseLease(LeaseRequest, frozen=True, kw_only=True):
    reason: str


class WithdrawRequest(Request, frozen=True, kw_only=True):
    """Withdraws the receive or drain with this request id, whose caller has stopped waiting."""

    request_id: str


class UpdateTask(LeaseRequest, frozen=True, kw_only=True):
    """`update_no` numbers the updates of one lease from 1, so that a repeated update counts once; 0: unnumbered."""

    update: Update
    update_no: Whole | None = None

    def parsed_update(self) -> Update:
        return unreserved_update(self.update)


class CancelTaskRequest(TaskRequest, frozen=True, kw_only=True):
    reason: str


class AnswerRequest(TaskRequest, frozen=True, kw_only=True):
    """The sender's answer to a task, as text; or, if the task waits for an approval, the decision.

    `question_id`: the question that is answered; absent: the open one. A repeated `answer_id` is the same answer.
    """

    text: str = ""
    approved: bool | None = None
    question_id: str | None = None
    answer_id: str | None = None


class SignalRequest(TaskRequest, frozen=True, kw_only=True):
    """A named signal that a step of a task waits for. A repeated `signal_id` is the same signal."""

    name: str
    value: Any = None
    signal_id: str | None = None


class RequeueCommand(msgspec.Struct, frozen=True, gc=False, tag_field="action", tag="requeue"):
    duplicate_risk: Literal["idempotent", "operator_accepted", "operator-accepted"]
    lease_id: str | None = None


class ForceErrorCommand(msgspec.Struct, frozen=True, gc=False, tag_field="action", tag="force_error"):
    message: str
    lease_id: str | None = None


class RepairTask(TaskRequest, frozen=True, kw_only=True):
    strict: ClassVar[bool] = True
    task_id: str
    command: RequeueCommand | ForceErrorCommand
    reason: str

    def parsed_command(self, given: str | None) -> RepairCommand:
        """The command with the whole id of its lease, `given`."""
        command, lease_id = self.command, parse_optional(parse_lease_id, given)
        if isinstance(command, RequeueCommand):
            return Requeue(Posture(command.duplicate_risk.replace("-", "_")), lease_id)
        return ForceError(command.message, lease_id)


class RepairTasks(StrictRequest, frozen=True, kw_only=True):
    """A repair of every task that matches. `duplicate_risk` is for a requeue, `message` for an error."""

    filter: TaskFilter
    command: Literal["requeue", "force_error", "force-error", "cancel"]
    reason: str
    duplicate_risk: Literal["idempotent", "operator_accepted", "operator-accepted"] | None = None
    message: str | None = None
    dry_run: bool | None = None
    limit: Whole | None = None


class RetryStaleRequest(Request, frozen=True, kw_only=True):
    strict: ClassVar[bool] = True
    enabled: bool | None = None
    min_lease_age_ms: Whole | None = None
    max_attempts: Whole | None = None
    max_requeues: Whole | None = None
    scan_limit: Whole | None = None

    def policy(self) -> RetryPolicy:
        given = msgspec.structs.asdict(self)
        return RetryPolicy(**{name: value for name, value in given.items() if value is not None})


def parse_optional(parse: Callable[[str], T], value: str | None) -> T | None:
    return None if value is None else parse(value)


class FrameHeader(msgspec.Struct, frozen=True, gc=False):
    """The fields of every frame, read before its kind is known."""

    kind: str
    token_b58: str | None = None


class WrappedTask(msgspec.Struct, frozen=True):
    task: SendTask

    def request(self) -> Request:
        return self.task


class WrappedResult(msgspec.Struct, frozen=True):
    """`lease_id` may be in the result or beside it."""

    result: PostResult
    lease_id: str | None = None

    def request(self) -> Request:
        if self.lease_id is None:
            return self.result
        return msgspec.structs.replace(self.result, lease_id=self.lease_id)


class WrappedRepair(msgspec.Struct, frozen=True):
    # The protocol's name for this field is `request`, as is that of the method below.
    repair: RepairTask = msgspec.field(name="request")

    def request(self) -> Request:
        return self.repair


class WrappedPolicy(msgspec.Struct, frozen=True):
    policy: RetryStaleRequest | None = None

    def request(self) -> Request:
        return self.policy if self.policy is not None else RetryStaleRequest()


Wrapped = WrappedTask | WrappedResult | WrappedRepair | WrappedPolicy
"""The four requests that the local socket's protocol wraps in a field."""
