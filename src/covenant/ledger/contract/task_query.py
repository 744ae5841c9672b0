"""The one query over tasks, live and finished, its page, and the number of tasks.

Every filter is optional, and a task must match all given ones. Pages are ordered by (time, number of the task). A
cursor names the last place of a page. In the order of creation, a task that changes meanwhile neither shifts the pages
nor is listed twice. In the order of the last change, such a task moves to the front.

A page may have fewer tasks than were requested, and a cursor all the same: one request looks at a bounded number of
tasks. Only a page without a cursor is the last one.
"""

from __future__ import annotations

import re
from string import ascii_lowercase, ascii_uppercase
from typing import Final, Literal

import msgspec

from covenant.ledger.machine.entry import Alive, Entry
from covenant.ledger.machine.states import LEASED, QUERY_STATES, State
from covenant.model.errors import Invalid
from covenant.model.ids import LeaseId, PublicKey, TaskId
from covenant.model.task import Ending, Task
from covenant.model.task_event import Interruption

PAGE_MAX: Final = 200
EXCERPT_CHARS: Final = 200
NAME_CHARS_MAX: Final = 1_000
"""A longer context, kind or key of a task is cut here: a page is small however long these are."""
AGENTS_COUNTED_MAX: Final = 200
_WORDS: Final = {state: word for word, state in QUERY_STATES.items()}
_END: Final = (1 << 63) - 1
_LOWER: Final = str.maketrans(ascii_uppercase, ascii_lowercase)
_cursor = re.compile(r"([cm])([0-9a-f]{1,15})-([0-9a-f]{1,16})").fullmatch

Order = Literal["created", "moved"]


class TaskQuery(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`viewer` and `within` restrict the tasks: an identity sees those it sent or receives, a tenant its own, None all.

    An identity is its key. `viewer_names` are the displays that the key has had here; the index is searched by them.
    """

    viewer: PublicKey | None = None
    viewer_names: tuple[str, ...] = ()
    within: str | None = None
    states: tuple[State, ...] = ()
    outcomes: tuple[Ending, ...] = ()
    id: str | None = None
    """The beginning of the id."""
    agent: str | None = None
    """The recipient's whole display."""
    sender: str | None = None
    tenant: str | None = None
    task_kind: str | None = None
    origin: str | None = None
    parent: str | None = None
    context: str | None = None
    key: str | None = None
    cause: str | None = None
    attempt_min: int | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    moved_since_ms: int | None = None
    moved_until_ms: int | None = None
    interruptions: tuple[Interruption, ...] = ()
    """Why a parked task waits for its sender."""
    text: str | None = None
    """A part of the intent. ASCII letters match in either case."""
    order: Order = "created"
    ascending: bool = False
    limit: int = 50
    after: str = ""
    count: bool = False


class FoundTask(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: TaskId
    parent: TaskId | None
    context_id: str | None
    tenant: str | None
    agent: str
    sender: str
    task_kind: str | None
    key: str | None
    origin: str
    state: str
    a2a_state: str
    attempt: int
    created_at_ms: int
    updated_at_ms: int
    deadline_ms: int | None
    outcome: str | None
    cause: str | None
    lease_id: LeaseId | None
    leased_to: str | None
    leased_at_ms: int | None
    holder_lost: bool
    intent: str
    error_message: str | None
    remote: bool


class FoundPage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`next` is None on the last page. `total` is None if it was not requested; `at_least`: there may be more."""

    tasks: tuple[FoundTask, ...]
    next: str | None
    total: int | None = None
    at_least: bool = False


class LaneCounts(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The number of tasks in each lane. `failed` and `done` split the finished ones, so every task is in one lane."""

    queued: int = 0
    in_flight: int = 0
    parked: int = 0
    following: int = 0
    result_pending: int = 0
    failed: int = 0
    done: int = 0


class AgentLanes(LaneCounts, frozen=True, kw_only=True):
    agent: str
    tenant: str | None


class TaskCounts(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The tasks that the caller may see; for an identity, those that it receives. Agents with most open work first."""

    lanes: LaneCounts
    by_agent: tuple[AgentLanes, ...]
    holders_lost: int = 0


class QueueDepth(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The number of tasks that wait for one recipient, and the time of the oldest."""

    agent: str
    depth: int
    oldest_at_ms: int


class Place(msgspec.Struct, frozen=True, gc=False, order=True):
    """The position of a task in an order: the time by which it is sorted, and its number."""

    ms: int
    no: int

    def cursor(self, order: Order) -> str:
        return f"{order[0]}{self.ms:x}-{self.no:x}"


def place_after(query: TaskQuery) -> Place | None:
    """The place after which the page begins; None: at the first task."""
    if not query.after:
        return None
    found = _cursor(query.after)
    if found is None:
        raise Invalid("invalid_cursor", "after: give the `next` of the page before, or nothing")
    if found[1] != query.order[0]:
        raise Invalid("invalid_cursor", f"after: this cursor belongs to a query in another order than {query.order!r}")
    return Place(int(found[2], 16), min(int(found[3], 16), _END))


def state_word(state: State) -> str:
    return _WORDS[state]


def fold(text: str) -> str:
    """The text with ASCII letters in lower case, which every engine can do in the same way."""
    return text.translate(_LOWER)


def excerpt(text: str) -> str:
    return text[:EXCERPT_CHARS]


def found_task(entry: Entry, alive: Alive) -> FoundTask:
    """An entry as a query returns it."""
    task, held = entry.task, entry.lease if entry.state is LEASED else None
    error = entry.result.error_message if entry.result is not None else None
    return FoundTask(
        task_id=task.id,
        parent=task.parent,
        context_id=task.context_id[:NAME_CHARS_MAX] if task.context_id else None,
        tenant=task.tenant,
        agent=task.recipient.display,
        sender=task.sender.display,
        task_kind=task.task_kind[:NAME_CHARS_MAX] if task.task_kind is not None else None,
        key=task.idempotency.key[:NAME_CHARS_MAX] if task.idempotency is not None else None,
        origin=task.origin,
        state=state_word(entry.state),
        a2a_state=entry.a2a_state,
        attempt=entry.attempt,
        created_at_ms=entry.accepted_at_ms,
        updated_at_ms=entry.updated_at_ms,
        deadline_ms=task.deadline_ms,
        outcome=entry.ending,
        cause=entry.cause,
        lease_id=held.lease_id if held is not None else None,
        leased_to=held.leased_to.display if held is not None else None,
        leased_at_ms=held.leased_at_ms if held is not None else None,
        holder_lost=entry.holder_lost(alive),
        intent=excerpt(task.intent_text),
        error_message=excerpt(error) if isinstance(error, str) else None,
        remote=task.target is not None,
    )


def may_see(query: TaskQuery, task: Task) -> bool:
    """Whether the caller may see a task."""
    ours = query.viewer is None or query.viewer in (task.sender.pubkey, task.recipient.pubkey)
    return ours and query.within in (None, task.tenant)


def passes(query: TaskQuery, entry: Entry) -> bool:
    """Whether an entry matches the query, and the caller may see it."""
    task = entry.task
    if not may_see(query, task):
        return False
    filters = (
        (query.agent, task.recipient.display),
        (query.sender, task.sender.display),
        (query.tenant, task.tenant),
        (query.task_kind, task.task_kind),
        (query.origin, task.origin),
        (query.parent, task.parent),
        (query.context, task.context_id),
        (query.key, task.idempotency.key if task.idempotency is not None else None),
        (query.cause, entry.cause),
    )
    return (
        (not query.states or entry.state in query.states)
        and (not query.outcomes or entry.ending in query.outcomes)
        and all(wanted is None or wanted == value for wanted, value in filters)
        and (query.id is None or task.id.startswith(query.id))
        and (query.attempt_min is None or entry.attempt >= query.attempt_min)
        and (query.since_ms is None or entry.accepted_at_ms >= query.since_ms)
        and (query.until_ms is None or entry.accepted_at_ms < query.until_ms)
        and (query.moved_since_ms is None or entry.updated_at_ms >= query.moved_since_ms)
        and (query.moved_until_ms is None or entry.updated_at_ms < query.moved_until_ms)
        and (not query.interruptions or entry.a2a_state in query.interruptions)
        and (query.text is None or fold(query.text) in fold(task.intent_text))
    )
