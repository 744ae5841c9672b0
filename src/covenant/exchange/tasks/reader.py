"""The one reader of tasks, for every door: a task in its current state, as a stream, or when it has come to rest.

A task is looked up within a scope (`TaskScope`): a task outside of it is unknown, and nothing of it is read. Finished
tasks do not change, so the views of the last few are cached.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from covenant.exchange.delegation_outcome import by_task, read_sub_delegations, remote_node, task_outcome
from covenant.ledger.contract.ledger import DelegationLedger
from covenant.ledger.contract.tasks import ANY, TaskLedger, TaskScope, TreeNode
from covenant.ledger.machine.decisions.context import unknown_task
from covenant.ledger.watchers import TaskWatch
from covenant.model.content import Text
from covenant.model.errors import Conflict, Invalid, Refusal
from covenant.model.ids import PublicKey, TaskId, parse_task_id
from covenant.model.peers.delegation import Delegation, DelegationRole
from covenant.model.peers.delegation_messages import usage_amounts
from covenant.model.task_event import WAITS_FOR_SENDER, Ended, MessageUpdate, StatusUpdate, Step
from covenant.model.task_view import RESTING, Artifact, TaskState, TaskView, TaskViewBuilder
from covenant.model.usage import USAGE, add_usage, read_usage
from covenant.wire.sse import KEEP_ALIVE_S

CACHED_MAX: Final = 256
CACHED_CHARACTERS_MAX: Final = 8_192
"""Only views with at most this much text are cached. Larger ones are read again."""
WATCH_S: Final = 60.0
"""How long one wait for a task's steps takes, where the caller names no limit."""
_ENDED: Final = tuple(state.value for state in TaskState if state.terminal)
PEERS_IN_TREE_MAX: Final = 100
"""The most delegations in a tree whose sub-delegations are shown: each is read from the archive."""
PAGE: Final = 1_000
"""Steps that are read at once."""


async def read_past(
    ledger: TaskLedger, task_id: TaskId, through: int | None = None, *, scope: TaskScope = ANY
) -> TaskViewBuilder:
    """All durable steps, folded, or only those up to a generation. None of a task outside the scope."""
    builder = TaskViewBuilder()
    while through is None or builder.generation < through:
        limit = PAGE if through is None else min(PAGE, through - builder.generation)
        steps = await ledger.steps(task_id, builder.generation, limit, scope)
        for step in steps:
            builder.add(step)
        if len(steps) < limit:
            break
    return builder


class TaskReader:
    """Caches ended tasks, until tasks are erased: a service has one for its whole life."""

    def __init__(self, ledger: TaskLedger) -> None:
        self._ledger = ledger
        self._cache: OrderedDict[TaskId, TaskView] = OrderedDict()
        ledger.on_erased(self._cache.clear)

    async def get(self, task_id: TaskId, scope: TaskScope) -> TaskView:
        """The task in its current state. A task outside the scope is refused as one that does not exist."""
        view = self._cache.get(task_id)
        if view is not None:
            if not _covers(scope, view):
                raise unknown_task(task_id)
            self._cache.move_to_end(task_id)
            return view
        view = (await self.past(task_id, scope=scope)).view()
        if view is None or not _covers(scope, view):
            raise unknown_task(task_id)
        if view.state.terminal:
            self._cache_ended(view)
            return view
        entry = await self._ledger.entry(task_id)
        lost = entry is not None and entry.holder_lost(self._ledger.alive)
        return msgspec.structs.replace(view, holder_lost=True) if lost else view

    def past(
        self, task_id: TaskId, through: int | None = None, *, scope: TaskScope = ANY
    ) -> Coroutine[Any, Any, TaskViewBuilder]:
        """See `read_past`."""
        return read_past(self._ledger, task_id, through, scope=scope)

    async def follow(
        self,
        task_id: TaskId,
        scope: TaskScope,
        after: int | None = None,
        *,
        ends_when_parked: bool,
        live_only: bool = False,
        invalid: str = "invalid_params",
    ) -> TaskStream:
        """Streams the steps after a generation; after 0, the first view is the first step itself. None: from now on.

        `ends_when_parked`: also ends when the task waits for its sender. `live_only` refuses a task that has ended.
        `invalid` is the code for a generation that the task has not reached.
        """
        with handed_over(self._ledger.watch(task_id)) as watch:
            first = await self.get(task_id, scope)
            if live_only and first.state.terminal:
                raise Conflict("unsupported_operation", f"task {task_id} has ended; read it with GetTask")
            if after is not None:
                if not 0 <= after <= first.generation:
                    raise Invalid(invalid, f"task {task_id} is at generation {first.generation}, before {after}")
                if max(1, after) < first.generation:
                    first = (await self.past(task_id, max(1, after))).existing_view()
            return TaskStream(self._ledger, watch, first, ends_when_parked=ends_when_parked)

    async def at_rest(
        self, task_id: TaskId, watch: TaskWatch, builder: TaskViewBuilder | None, wait_ms: int | None = None
    ) -> TaskView:
        """The task when it has ended or waits for its sender.

        After `wait_ms`, or when the watch is cut (too many steps to buffer, or the disk failed), the task in its
        current state. `builder` has the steps before the watch began; None: there were none.
        """
        builder = builder or TaskViewBuilder()
        loop_s = asyncio.get_running_loop().time  # by which a watch waits, too
        left_s = WATCH_S if wait_ms is None else wait_ms / 1000
        until_s = loop_s() + left_s
        while builder.state not in RESTING:
            if left_s <= 0 or watch.cut:
                builder = await self.past(task_id)
                break
            # The watch holds the steps back until the task rests: nobody reads them before.
            builder.catch_up(await watch.next(left_s, until_rest=True))
            if wait_ms is not None and builder.state not in RESTING:
                left_s = until_s - loop_s()
        return builder.existing_view()

    async def accepted(self, task_id: TaskId, watch: TaskWatch) -> TaskViewBuilder:
        """A new task right after it was accepted, from its watch; if that was cut, the first step alone."""
        builder = TaskViewBuilder()
        builder.catch_up(await watch.next(WATCH_S))
        return builder if builder.generation else await self.past(task_id, 1)

    def _cache_ended(self, view: TaskView) -> None:
        if not view.state.terminal or _characters(view) > CACHED_CHARACTERS_MAX:
            return
        self._cache[view.task.id] = view
        if len(self._cache) > CACHED_MAX:
            self._cache.popitem(last=False)


def _covers(scope: TaskScope, view: TaskView) -> bool:
    task = view.task
    return (
        scope.recipient in (None, task.recipient.pubkey)
        and scope.sender in (None, task.sender.pubkey)
        and scope.tenant in (None, task.tenant)
    )


def _characters(view: TaskView) -> int:
    """About how large a view is. A part that is not text counts as too large to cache."""
    found = 0
    shown: tuple[MessageUpdate | Artifact, ...] = (*view.history, *view.artifacts)
    for each in shown:
        for part in each.parts:
            found += len(part.text) if type(part) is Text else CACHED_CHARACTERS_MAX
    return found


def parse_known_id(given: str) -> TaskId:
    """Ids are opaque to a client: an id that cannot be ours is unknown, not malformed."""
    try:
        return parse_task_id(given)
    except Refusal:
        raise unknown_task(given) from None


async def read_tree(ledger: DelegationLedger, root: TaskId, viewer: PublicKey | None) -> TreeNode:
    """A tree of tasks, with the state of delegations to peers and their known sub-delegations."""
    tree = await ledger.tree(root, viewer)
    return await _with_peers(ledger, tree, [PEERS_IN_TREE_MAX])


def fold_ended(tree: TreeNode) -> TreeNode:
    """The tree without the children of branches that have ended; its top stays open."""
    return msgspec.structs.replace(tree, children=tuple(map(_folded, tree.children)))


def _folded(node: TreeNode) -> TreeNode:
    # Sub-delegations of peers have no tree here that could be asked for.
    if node.children and node.task is not None and _has_ended(node):
        return msgspec.structs.replace(node, children=(), folded=_count_below(node))
    return fold_ended(node) if node.children else node


def _has_ended(node: TreeNode) -> bool:
    return (node.task is None or node.a2a_state in _ENDED) and all(map(_has_ended, node.children))


def _count_below(node: TreeNode) -> int:
    return len(node.children) + sum(map(_count_below, node.children))


async def _with_peers(ledger: DelegationLedger, node: TreeNode, reads_left: list[int]) -> TreeNode:
    """`reads_left`: the number of further delegations whose sub-delegations may be read."""
    delegation = await ledger.delegation_of(node.task_id)
    children = tuple([await _with_peers(ledger, child, reads_left) for child in node.children])
    if delegation is not None and delegation.role is DelegationRole.REQUESTER:
        if not delegation.ended:
            children = (*children, *map(remote_node, delegation.below))
        elif reads_left[0] > 0:
            reads_left[0] -= 1
            children = (*children, *await read_sub_delegations(ledger, node.task_id))
        return _with_delegation(node, children, await _by_task(ledger, node, delegation))
    if all(new is old for new, old in zip(children, node.children, strict=True)):
        return node
    return msgspec.structs.replace(node, children=children)


async def _by_task(ledger: DelegationLedger, node: TreeNode, delegation: Delegation) -> Delegation:
    if delegation.settled:
        return delegation
    task = await ledger.show(node.task_id, None, 0) if node.a2a_state in _ENDED else None
    return by_task(delegation, task_outcome(task.a2a_state, task.cause, task.result) if task is not None else None)


def _with_delegation(node: TreeNode, children: tuple[TreeNode, ...], delegation: Delegation) -> TreeNode:
    # The usage is in the result, once there is one; until then, as the provider last reported it.
    used = (usage_amounts(delegation.usage) or msgspec.UNSET) if node.usage is msgspec.UNSET else node.usage
    return msgspec.structs.replace(
        node,
        children=children,
        remote=True,
        remote_task_id=delegation.delegation_id,
        provider=delegation.peer,
        profile=delegation.profile,
        status=delegation.status,
        usage=used,
        usage_total=used if node.usage_total is msgspec.UNSET else node.usage_total,
    )


async def add_earlier_usage(ledger: TaskLedger, task_id: TaskId, now: dict[str, float]) -> dict[str, float]:
    """A turn's usage, plus that of earlier turns that ended with a question, as the last question reports it."""
    used: dict[str, float] = {}
    after = 0
    while steps := await ledger.steps(task_id, after, PAGE):
        for step in steps:
            what = step.what
            if isinstance(what, StatusUpdate) and what.state in WAITS_FOR_SENDER and USAGE in (what.metadata or {}):
                used = read_usage((what.metadata or {})[USAGE])
        after = steps[-1].generation
    add_usage(used, now)
    return used


class TaskStream:
    """A context, iterated once. Yields batches of steps; an empty batch means that nothing happened for a while.

    Leaving it never ends the task.
    """

    def __init__(
        self,
        ledger: TaskLedger,
        watch: TaskWatch,
        first: TaskView,
        *,
        backlog: Sequence[Step] | None = None,
        reply: TaskView | None = None,
        ends_when_parked: bool,
    ) -> None:
        """`backlog`: steps after the first view that the watch delivered; None if the past must be read."""
        self.first = first
        self.reply = reply
        """The finished task whose agent answered with a bare message, which is then the whole answer."""
        self.cut = False
        """The reader was too slow: the stream ended before its task did, and can be resumed."""
        self._ledger = ledger
        self._watch = watch
        self._backlog = backlog
        self._ends_when_parked = ends_when_parked

    async def __aiter__(self) -> AsyncIterator[Sequence[Step]]:
        at = self.first.generation
        if self._is_over(self.first):
            return
        async for batch in self._batches(at):
            newer = [step for step in batch if step.generation > at] if batch else batch
            last = next((place for place, step in enumerate(newer) if self._is_last(step)), None)
            if last is not None:
                yield newer[: last + 1]
                return
            if newer:
                at = newer[-1].generation
            if newer or not batch:
                yield newer

    async def _batches(self, at: int) -> AsyncIterator[Sequence[Step]]:
        if self._backlog is None:
            full = True
            while full:
                past = await self._ledger.steps(self.first.task.id, at, PAGE)
                full = len(past) == PAGE
                if past:
                    at = past[-1].generation
                    yield past
        elif self._backlog:
            yield self._backlog
        while not self._watch.cut:
            yield await self._watch.next(KEEP_ALIVE_S)
        self.cut = True

    def _is_over(self, view: TaskView) -> bool:
        return view.state.terminal or (self._ends_when_parked and view.state.waits)

    def _is_last(self, step: Step) -> bool:
        what = step.what
        if isinstance(what, Ended):
            return True
        return self._ends_when_parked and isinstance(what, StatusUpdate) and what.state != "working"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._watch.__exit__(kind, error, at)


@contextmanager
def handed_over(watch: TaskWatch) -> Iterator[TaskWatch]:
    """Begins a watch for a stream, which ends the watch itself. Ends it here if the stream is not made."""
    watch.__enter__()
    try:
        yield watch
    except BaseException:
        watch.__exit__(None, None, None)
        raise
