"""The task (an accepted request from one agent to another), its target, its lease and its result.

A task never changes after it was accepted. A lease is one attempt at a turn of it, and never expires by itself. Only
the daemon writes a target: no door decodes one, so a client's request never decides where its task goes.
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
"""A bound on the depth that a request may claim. It is larger than any limit that can be set."""
CHAIN_MAX: Final = 64
NAME_CHARS_MAX: Final = 256
URL_RECIPIENT: Final = "remote.url"
"""The recipient of tasks for agents that are called by URL. No agent of a catalogue can have this id."""
PEER_RECIPIENT: Final = "remote.peer"
"""The recipient of tasks for agents of peers. No agent of a catalogue can have this id."""
MAILBOX: Final = "mailbox"
"""The origin of tasks whose sender drains the result."""
A2A: Final = "a2a"
"""The origin of tasks that came by A2A, in whichever binding."""
SIMPLE: Final = "simple"
"""The origin of tasks that came by the simple door."""
NATIVE: Final = "native"
"""The origin of tasks that came by Covenant's own routes, `/v1/orchestrate` and `/v1/conversations`."""
DELEGATION: Final = "delegation"
"""The origin of tasks that an agent gave to somebody while it worked on their parent task. They end with the parent."""
KIND_LENGTH_MAX: Final = 128
"""A longer kind is replaced by its hash in a cache key."""
REMOTE: Final = "covenant.remote"
"""Key in the metadata of a task's updates: the remote task's id and its state."""
_TARGET_ORIGINS: Final = frozenset({DELEGATION, "mcp"})
"""Origins of tasks whose whole request metadata came from the daemon, in versions that kept a target there."""
_REMOTE_RECIPIENTS: Final = (f"{URL_RECIPIENT}@", f"{PEER_RECIPIENT}@")
"""Recipients of tasks that only the daemon sends."""
_encode = msgspec.json.Encoder().encode
TIMED_OUT: Final = "Task timed out"
"""The error message of a task that exceeded its time limit."""
ERROR_CODE: Final = "covenant.error_code"
"""Key in a result's metadata: the code of the A2A error that the agent raised. A caller that waits gets this error."""


class Hop(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The call chain of a request. A call that begins a chain has depth 0 and an empty chain."""

    depth: int = 0
    chain: tuple[str, ...] = ()
    """The public keys of the callers, first caller first."""
    deadline_ms: int | None = None
    """The answer is useless after this time, in epoch milliseconds."""
    traceparent: str | None = None
    tracestate: str | None = None

    def next(self, caller: str, *, deadline_ms: int | None = None) -> Hop:
        """The hop of a call that `caller` makes on behalf of this one: one deeper, with the earlier deadline."""
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
    """Checks the hop of a request that a door received."""
    if hop is not None and (hop.depth or hop.chain):
        check_chain(hop.depth, hop.chain, callee, depth_max)


class Target(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Either `url`, or `name` (an entry of the registry, which wins), or `profile` with the peer that offers it."""

    name: str | None = None
    url: str | None = None
    peer: str | None = None
    """The peer's id or name; None or empty: any peer that offers the profile."""
    profile: str | None = None
    budget: int | None = None
    """The number of tokens that the peer may use; None: the settings' default."""
    context: str | None = None
    """Text for the peer in addition to the task."""

    @property
    def of_peer(self) -> bool:
        return self.profile is not None

    @property
    def label(self) -> str:
        """A unique name of the target."""
        return self.name or self.url or ""


class DuplicateSafety(enum.StrEnum):
    """Whether the work may run twice. Only the sender can declare it."""

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
    """The door that the task came by."""
    depth: int = 0
    message_id: str | None = None
    """The id of the first message, if the door has messages."""
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] = ()
    reference_task_ids: tuple[str, ...] = ()
    output_modes: tuple[str, ...] = ()
    """The media types that the sender accepts; empty: any."""
    request_metadata: dict[str, Any] | None = None
    """Metadata of the request, beside that of its message."""
    chain: tuple[str, ...] = ()
    """The public keys of the callers, first caller first. An agent in the chain is not called again."""
    traceparent: str | None = None
    """The W3C trace context. The digest does not cover it."""
    tracestate: str | None = None
    target: Target | None = None
    """Where the task is done, if not here. Only the daemon writes it."""
    not_before_ms: int | None = None
    """Earliest start, in epoch milliseconds."""
    priority: int = 0
    """0 to 9. Within its recipient's queue a task begins before those of lower priority, within bounds."""


def target_of(task: Task) -> Target | None:
    """The target of a task that is not done here.

    Earlier versions had it in the request metadata, where clients write too. It is trusted there only for tasks that no
    client can have made, by their origin or recipient.
    """
    if task.target is not None or task.request_metadata is None:
        return task.target
    if task.origin not in _TARGET_ORIGINS and not task.recipient.display.startswith(_REMOTE_RECIPIENTS):
        return None
    try:
        return msgspec.convert(task.request_metadata.get(REMOTE), Target | None)
    except msgspec.ValidationError:
        return None


class CacheKey(msgspec.Struct, frozen=True, gc=False):
    """Two tasks with equal cache keys are the same work: the second gets the first one's result."""

    sender: str
    recipient: str
    task_kind: str
    key: str


def cache_key(task: Task) -> CacheKey | None:
    """The task's cache key; None unless the sender declared it idempotent. Without a kind, its text is the kind."""
    idempotency = task.idempotency
    if idempotency is None or idempotency.duplicate_safety != DuplicateSafety.IDEMPOTENT:
        return None
    kind = task.task_kind.strip() if task.task_kind else task.intent_text
    return CacheKey(task.sender.pubkey, task.recipient.pubkey, short_kind(kind), idempotency.key.strip())


def short_kind(kind: str) -> str:
    """The kind, or its hash if it is long: a cache key must stay small, however large the task's text is."""
    if len(kind) <= KIND_LENGTH_MAX:
        return kind
    return f"sha256:{hashlib.sha256(kind.encode(errors='surrogatepass')).hexdigest()}"


def account_of(task: Task) -> str:
    """The account whose limits a live task counts against: its tenant, or a sender without a tenant.

    A tenant's name never contains `@`.
    """
    return task.tenant if task.tenant is not None else f"@{task.sender.pubkey}"


def utf8_length(text: str) -> int:
    """The length of a text in UTF-8, without encoding it if it is ASCII."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def weigh(task: Task) -> int:
    """The size in bytes of the fields that the sender fills freely. A text alone is measured without encoding it."""
    text, parts, metadata, about = task.intent_text, task.parts, task.metadata, task.request_metadata
    size = len(text) if text.isascii() else utf8_length(text)
    if not (parts or metadata or about or task.extensions or task.reference_task_ids or task.output_modes):
        return size
    return size + len(_encode((parts, metadata, about, task.extensions, task.reference_task_ids, task.output_modes)))


def without_body(task: Task) -> Task:
    """The task without its large fields, as indexes hold it: it has every field that a decision reads."""
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
    """SHA-256 of the normalised request, and its size in bytes. Equal digests: the same request was sent again."""
    encoded = _encode(task)
    return hashlib.sha256(encoded).hexdigest(), len(encoded)


class Lease(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    lease_id: LeaseId
    leased_to: AgentId
    leased_at_ms: int
    attempt: int
    renewed_at_ms: int = 0
    node: str | None = None
    """The node where the holder runs, if known: a daemon names itself for the agents inside it."""
    boot: str | None = None
    """The run of that node. A lease of an earlier run has lost its holder."""

    def age_ms(self, now_ms: int, ages: Ages = STEADY) -> int:
        """The time since the lease was given or last renewed, whichever is shorter."""
        age_ms = ages.age_ms(self.leased_at_ms, now_ms)
        return min(age_ms, ages.age_ms(self.renewed_at_ms, now_ms)) if self.renewed_at_ms else age_ms


class ReceivedTask(Task, frozen=True, gc=True, dict=True, eq=False):
    """A task as its receiver gets it. It equals and encodes as the task that was sent, and also has its lease."""

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


class ResultStatus(enum.StrEnum):
    OK = "ok"
    ERROR = "error"
    PARTIAL = "partial"


class Ending(enum.StrEnum):
    """The outcome of a task, as A2A names it."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    REJECTED = "rejected"


class Cause(enum.StrEnum):
    """The reason why a task ended."""

    RESULT = "result"
    FORCE_ERROR = "force_error"
    CANCEL = "cancel"
    DEADLINE = "deadline_exceeded"
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"
    """The task's holder was lost, and no operator decided in time."""
    REPLAY = "replayed"
    LEADER = "leader"


class Result(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: TaskId
    status: ResultStatus
    content: tuple[Content, ...] = ()
    error_message: str | msgspec.UnsetType = msgspec.UNSET
    """Omitted when absent, unlike `content`, which is always encoded."""
    metadata: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """Usage (tokens) and the reason why the work stopped."""
    reply: bool | msgspec.UnsetType = msgspec.UNSET
    """The content is the whole answer, a bare message: the sender need not be shown a task."""

    @classmethod
    def ok(cls, task_id: TaskId, *content: Content | str) -> Result:
        """A successful result. A string becomes a text block."""
        blocks = tuple(Text(block) if isinstance(block, str) else block for block in content)
        return cls(task_id=task_id, status=ResultStatus.OK, content=blocks)


def result_digest(result: Result) -> str:
    """SHA-256 of a result. Equal digests mean that the same result was reported again."""
    return hashlib.sha256(_encode(result)).hexdigest()


def weigh_result(result: Result) -> int:
    """The size in bytes of the fields that the holder fills freely. Texts alone are measured without encoding them."""
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
