"""The task: a request from one agent to another, as it was accepted; where it is done; and its lease.

A task never changes after it was accepted. A lease is one attempt at a turn of it, and never expires by itself. The
daemon alone writes a target: no door decodes one, so what a client says never decides where its task goes.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from covenant.model.clock_steps import STEADY, Ages
from covenant.model.content import Content, Text
from covenant.model.errors import Invalid
from covenant.model.ids import AgentId, LeaseId, TaskId

CLAIMED_DEPTH_MAX: Final = 64
"""More than any limit that is set: what claims to be deeper is not believed to be anything else."""
CHAIN_MAX: Final = 64
NAME_CHARS_MAX: Final = 256


class Hop(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What a call says of those before it. A call that begins a chain has depth 0 and nobody in its chain."""

    depth: int = 0
    chain: tuple[str, ...] = ()
    """Who called whom, the first caller first."""
    deadline_ms: int | None = None
    """When the answer is of no use any more, in epoch milliseconds."""
    traceparent: str | None = None
    tracestate: str | None = None

    def next(self, caller: str, *, deadline_ms: int | None = None) -> Hop:
        """What `caller` says when it calls somebody on behalf of this hop: one deeper, and never later."""
        known = [moment for moment in (self.deadline_ms, deadline_ms) if moment is not None]
        return Hop(
            depth=self.depth + 1,
            chain=(*self.chain, caller)[-CHAIN_MAX:],
            deadline_ms=min(known) if known else None,
            traceparent=self.traceparent,
            tracestate=self.tracestate,
        )


def check_chain(depth: int, chain: Sequence[str], callee: AgentId, depth_max: int) -> None:
    if callee.pubkey in chain:
        above = len(chain) - chain.index(callee.pubkey)
        raise Invalid(
            "loop_detected",
            f"{callee.display} is in this chain of calls already, {above} call{'s' if above > 1 else ''} up; "
            "it is not called again on its own behalf",
        )
    if depth > depth_max:
        raise Invalid(
            "depth_exceeded", f"this call is {depth} deep in a chain of calls; at most {depth_max} are allowed here"
        )


def check_hop(hop: Hop | None, callee: AgentId, depth_max: int) -> None:
    """What arrives by a door."""
    if hop is not None and (hop.depth or hop.chain):
        check_chain(hop.depth, hop.chain, callee, depth_max)


ELSEWHERE: Final = "remote.url"
"""The recipient of tasks for agents that are called by their address. No agent of a catalogue can have this id."""
PEERS: Final = "remote.peer"
"""The recipient of tasks for agents of peers. No agent of a catalogue can have this id."""


class Target(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Either `url` or `name` (the registry's entry, which wins), or `profile` with the peer that offers it."""

    name: str | None = None
    url: str | None = None
    peer: str | None = None
    """The peer's id or name; None or empty: whichever peer offers the profile."""
    profile: str | None = None
    budget: int | None = None
    """How many tokens the peer may use; None: as many as the settings say."""
    context: str | None = None
    """What the peer is told besides the task."""

    @property
    def of_peer(self) -> bool:
        return self.profile is not None

    @property
    def label(self) -> str:
        """A name that no other target has."""
        return self.name or self.url or ""


MAILBOX: Final = "mailbox"
"""The origin of tasks whose sender drains the result."""
A2A: Final = "a2a"
"""The origin of tasks that came by A2A, in whichever binding."""
SIMPLE: Final = "simple"
"""The origin of tasks that came by the simple door."""
NATIVE: Final = "native"
"""The origin of tasks that came by Covenant's own routes, `/v1/orchestrate` and `/v1/conversations`."""
DELEGATION: Final = "delegation"
"""The origin of tasks that an agent at work on another task, their parent, has given to somebody. They end with it."""


KIND_LENGTH_MAX: Final = 128
"""A longer kind stands in a cache key as its hash."""


class DuplicateSafety(enum.StrEnum):
    """Whether the work may run twice: only the sender can say so."""

    UNSAFE = "unsafe"
    IDEMPOTENT = "idempotent"


class Idempotency(msgspec.Struct, frozen=True, gc=False):
    duplicate_safety: DuplicateSafety
    key: str


class Task(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Field order is the order of the canonical encoding that `digest` is taken over: append only."""

    id: TaskId
    sender: AgentId
    recipient: AgentId
    intent_text: str
    task_kind: str | None = None
    parent: TaskId | None = None
    deadline_ms: int | None = None
    idempotency: Idempotency | None = None
    parts: tuple[Content, ...] = ()
    timeout_ms: int | None = None
    context_id: str | None = None
    tenant: str | None = None
    origin: str = MAILBOX
    """Which door brought it."""
    depth: int = 0
    message_id: str | None = None
    """The first message's own id, where the door has messages."""
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] = ()
    reference_task_ids: tuple[str, ...] = ()
    output_modes: tuple[str, ...] = ()
    """The media types that the sender can take; none named means any."""
    request_metadata: dict[str, Any] | None = None
    """Metadata of the request, beside that of its message."""
    chain: tuple[str, ...] = ()
    """The keys of the callers up the chain, the first one first: an agent in the chain is not called again."""
    traceparent: str | None = None
    """The W3C trace context. The digest does not cover it."""
    tracestate: str | None = None
    target: Target | None = None
    """Where the task is done, if not here. Written by the daemon alone."""
    not_before_ms: int | None = None
    """Nobody begins it before this moment, in epoch milliseconds."""
    priority: int = 0
    """From 0 to 9: within its recipient's queue, it is begun before tasks of a lower one, within bounds."""


class CacheKey(msgspec.Struct, frozen=True, gc=False):
    """Two tasks with equal cache keys are the same work: the second gets the first one's result."""

    sender: str
    recipient: str
    task_kind: str
    key: str


def cache_key(task: Task) -> CacheKey | None:
    """None unless the sender declared the work idempotent. A task without a kind is its own kind."""
    idempotency = task.idempotency
    if idempotency is None or idempotency.duplicate_safety != DuplicateSafety.IDEMPOTENT:
        return None
    kind = task.task_kind.strip() if task.task_kind else task.intent_text
    return CacheKey(task.sender.pubkey, task.recipient.pubkey, short_kind(kind), idempotency.key.strip())


def short_kind(kind: str) -> str:
    """A kind that is a whole text is kept as its hash: a key must stay small, however large its task is."""
    if len(kind) <= KIND_LENGTH_MAX:
        return kind
    return f"sha256:{hashlib.sha256(kind.encode(errors='surrogatepass')).hexdigest()}"


_encode = msgspec.json.Encoder().encode


def account_of(task: Task) -> str:
    """Whose limits a live task counts against: its tenant's, or those of a sender that has no tenant.

    No tenant's name has an `@`.
    """
    return task.tenant if task.tenant is not None else f"@{task.sender.pubkey}"


def utf8_length(text: str) -> int:
    """How many bytes a text has, without encoding it where that can be known."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def weigh(task: Task) -> int:
    """How many bytes the body of a task has: what its sender chose freely. A text alone is not encoded for this."""
    text, parts, metadata, about = task.intent_text, task.parts, task.metadata, task.request_metadata
    size = len(text) if text.isascii() else utf8_length(text)
    if not (parts or metadata or about or task.extensions or task.reference_task_ids or task.output_modes):
        return size
    return size + len(_encode((parts, metadata, about, task.extensions, task.reference_task_ids, task.output_modes)))


def without_body(task: Task) -> Task:
    """The task as an index entry: all that a decision asks of it, and nothing that can be large."""
    return msgspec.structs.replace(
        task,
        intent_text="",
        parts=(),
        metadata=None,
        request_metadata=None,
        extensions=(),
        reference_task_ids=(),
        output_modes=(),
    )


def fingerprint(task: Task) -> tuple[str, int]:
    """SHA-256 of the normalised request, and its size in bytes: equal digests mean the same request sent again."""
    encoded = _encode(task)
    return hashlib.sha256(encoded).hexdigest(), len(encoded)


class Lease(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    lease_id: LeaseId
    leased_to: AgentId
    leased_at_ms: int
    attempt: int
    renewed_at_ms: int = 0
    node: str | None = None
    """Where the holder runs, if it said so: a daemon names itself for the agents inside it."""
    boot: str | None = None
    """Which run of that node: a lease of an earlier run has lost its holder."""

    def age_ms(self, now_ms: int, ages: Ages = STEADY) -> int:
        """Since it was given or renewed, whichever is shorter ago."""
        age_ms = ages.age_ms(self.leased_at_ms, now_ms)
        return min(age_ms, ages.age_ms(self.renewed_at_ms, now_ms)) if self.renewed_at_ms else age_ms


class ReceivedTask(Task, frozen=True, gc=True, dict=True, eq=False):
    """A task as its receiver has it. It equals and encodes as the task that was sent, and tells its lease besides."""

    @classmethod
    def under(cls, task: Task, lease: Lease) -> ReceivedTask:
        received = cls(**{name: getattr(task, name) for name in task.__struct_fields__})
        received.__dict__["lease"] = lease
        return received

    @property
    def lease(self) -> Lease:
        lease: Lease = self.__dict__["lease"]
        return lease

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and msgspec.structs.astuple(self) == msgspec.structs.astuple(other)

    def __hash__(self) -> int:
        return hash(Task(**msgspec.structs.asdict(self)))


TIMED_OUT: Final = "Task timed out"
"""The error message of a task that took too long."""


class ResultStatus(enum.StrEnum):
    OK = "ok"
    ERROR = "error"
    PARTIAL = "partial"


class Ending(enum.StrEnum):
    """How a task ended, in A2A's words."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    REJECTED = "rejected"


class Cause(enum.StrEnum):
    """What ended a task."""

    RESULT = "result"
    FORCE_ERROR = "force_error"
    CANCEL = "cancel"
    DEADLINE = "deadline_exceeded"
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"
    """Its holder was lost, and no operator decided in time."""
    REPLAY = "replayed"
    LEADER = "leader"


ERROR_CODE: Final = "covenant.error_code"
"""In a result's metadata: the code of the A2A error that the agent raised. Who waits for the result is refused so."""


class Result(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: TaskId
    status: ResultStatus
    content: tuple[Content, ...] = ()
    error_message: str | msgspec.UnsetType = msgspec.UNSET
    """Omitted when absent, unlike `content`, which is always there."""
    metadata: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """What it took: tokens, why it stopped."""
    reply: bool | msgspec.UnsetType = msgspec.UNSET
    """The content is the whole answer, a bare message: who sent the task need not hear of a task at all."""

    @classmethod
    def ok(cls, task_id: TaskId, *content: Content | str) -> Result:
        """Done. A string is a block of text."""
        blocks = tuple(Text(block) if isinstance(block, str) else block for block in content)
        return cls(task_id=task_id, status=ResultStatus.OK, content=blocks)


def result_digest(result: Result) -> str:
    """SHA-256 of a result: equal digests mean that the same was said again."""
    return hashlib.sha256(_encode(result)).hexdigest()


def weigh_result(result: Result) -> int:
    """How many bytes a result has: what its holder chose freely. Texts alone are not encoded for this."""
    size = utf8_length(result.error_message) if isinstance(result.error_message, str) else 0
    texts = 0
    for block in result.content:
        if not isinstance(block, Text):
            break
        texts += utf8_length(block.text)
    else:
        if not result.metadata:
            return size + texts
    return size + len(_encode((result.content, result.metadata or None)))


def error_result(task_id: TaskId, message: str) -> Result:
    return Result(task_id=task_id, status=ResultStatus.ERROR, error_message=message)
