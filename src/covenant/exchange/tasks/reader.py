"""The one reader of tasks, for every door: a task as it stands, as it goes on, and when it has come to rest.

A task is looked for within a scope (`TaskScope`): one outside of it is unknown, and nothing of it is read. Finished
tasks do not change, so the views of the last few are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

import msgspec

from covenant.exchange.delegation_evidence import read_sub_delegations
from covenant.ledger.contract.ledger import DelegationLedger
from covenant.ledger.contract.tasks import ANY, TaskLedger, TaskScope, TreeNode, Watch
from covenant.model.content import Text
from covenant.model.errors import Conflict, Invalid, NotFound, Refusal
from covenant.model.ids import PublicKey, TaskId, parse_task_id
from covenant.model.peers.delegation import Delegation, DelegationRole
from covenant.model.peers.delegation_messages import usage_amounts
from covenant.model.task_event import Ended, MessageUpdate, StatusUpdate, Step
from covenant.model.task_view import RESTING, Artifact, TaskView, TaskViewBuilder
from covenant.wire.sse import KEEP_ALIVE_S

KEPT_MAX: Final = 256
KEPT_CHARACTERS_MAX: Final = 8_192
"""Only views with at most this much text are kept. Larger ones are read again."""
WATCH_S: Final = 60.0
"""How long one wait for news of a task takes, where the caller names no limit."""


class TaskReader:
    def __init__(self, ledger: TaskLedger) -> None:
        self._ledger = ledger
        self._kept: OrderedDict[TaskId, TaskView] = OrderedDict()
        ledger.on_erased(self._kept.clear)

    async def get(self, task_id: TaskId, scope: TaskScope) -> TaskView:
        """The task as it stands. One outside the scope is refused as one that does not exist."""
        view = self._kept.get(task_id)
        if view is not None:
            if not _covers(scope, view):
                raise unknown_task(task_id)
            self._kept.move_to_end(task_id)
            return view
        view = (await self.past(task_id, scope=scope)).view()
        if view is None or not _covers(scope, view):
            raise unknown_task(task_id)
        if view.state.terminal:
            self.keep(view)
            return view
        entry = await self._ledger.entry(task_id)
        lost = entry is not None and entry.holder_lost(self._ledger.alive)
        return msgspec.structs.replace(view, holder_lost=True) if lost else view

    async def past(self, task_id: TaskId, through: int | None = None, *, scope: TaskScope = ANY) -> TaskViewBuilder:
        """Everything that is durable, folded; or only as far as a generation. Nothing, if it is outside the scope."""
        builder = TaskViewBuilder()
        while through is None or builder.generation < through:
            limit = PAGE if through is None else min(PAGE, through - builder.generation)
            steps = await self._ledger.steps(task_id, builder.generation, limit, scope)
            for step in steps:
                builder.add(step)
            if len(steps) < limit:
                break
        return builder

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
        """All that happens after a generation; from 0 on, the first view is the first step itself. None: from now on.

        `ends_when_parked`: also ends when the task waits for its sender. `live_only` refuses a task that has ended.
        `invalid` is the code for a generation that the task has not come to.
        """
        with handed_over(self._ledger.watch(task_id)) as watch:
            first = await self.get(task_id, scope)
            if live_only and first.state.terminal:
                raise Conflict("unsupported_operation", f"task {task_id} has ended; read it with GetTask")
            if after is not None:
                if not 0 <= after <= first.generation:
                    raise Invalid(invalid, f"task {task_id} has come to generation {first.generation}, not {after}")
                if max(1, after) < first.generation:
                    first = (await self.past(task_id, max(1, after))).known()
            return TaskStream(self._ledger, watch, first, ends_when_parked=ends_when_parked)

    async def at_rest(
        self, task_id: TaskId, watch: Watch, builder: TaskViewBuilder, until_ms: int | None = None
    ) -> TaskView:
        """The task when it has ended or waits for its sender.

        As it stands then, if `until_ms` (monotonic) passes, or if the watch is cut: too much was said to keep, or the
        disk failed. `builder` has what was before the watch began.
        """
        monotonic_ms = self._ledger.clock.monotonic_ms
        while builder.state not in RESTING:
            left_s = WATCH_S if until_ms is None else (until_ms - monotonic_ms()) / 1000
            if left_s <= 0 or watch.cut:
                builder = await self.past(task_id)
                break
            # Whatever is said on the way is told when it rests: nobody reads it before.
            builder.catch_up(await watch.next(left_s, until_rest=True))
        return builder.known()

    def keep(self, view: TaskView) -> None:
        if not view.state.terminal or _characters(view) > KEPT_CHARACTERS_MAX:
            return
        self._kept[view.task.id] = view
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)


def _covers(scope: TaskScope, view: TaskView) -> bool:
    task = view.task
    return (
        scope.recipient in (None, task.recipient.pubkey)
        and scope.sender in (None, task.sender.pubkey)
        and scope.tenant in (None, task.tenant)
    )


def _characters(view: TaskView) -> int:
    """About how large a view is. A part that is not text counts as too large to keep."""
    found = 0
    said: tuple[MessageUpdate | Artifact, ...] = (*view.history, *view.artifacts)
    for each in said:
        for part in each.parts:
            found += len(part.text) if type(part) is Text else KEPT_CHARACTERS_MAX
    return found


def unknown_task(task_id: str) -> NotFound:
    return NotFound("unknown_task", f"task {task_id[:80]} is not known here")


def parse_known_id(given: str) -> TaskId:
    """Ids are opaque to a client: one that cannot be ours is unknown, and not malformed."""
    try:
        return parse_task_id(given)
    except Refusal:
        raise unknown_task(given) from None


async def read_tree(ledger: DelegationLedger, root: TaskId, viewer: PublicKey | None) -> TreeNode:
    """A tree of tasks, with how those stand that peers do, and what peers delegated on, as far as it is known here."""
    tree = await ledger.tree(root, viewer)
    return await _with_peers(ledger, tree, [PEERS_IN_TREE_MAX])


async def _with_peers(ledger: DelegationLedger, node: TreeNode, left: list[int]) -> TreeNode:
    """`left`: of how many delegations it is still read what their providers delegated on."""
    delegation = await ledger.delegation_of(node.task_id)
    children = tuple([await _with_peers(ledger, child, left) for child in node.children])
    if delegation is not None and delegation.role is DelegationRole.REQUESTER:
        if delegation.ended and left[0] > 0:
            left[0] -= 1
            children = (*children, *await read_sub_delegations(ledger, node.task_id))
        return _elsewhere(node, children, delegation)
    if all(new is old for new, old in zip(children, node.children, strict=True)):
        return node
    return msgspec.structs.replace(node, children=children)


def _elsewhere(node: TreeNode, children: tuple[TreeNode, ...], delegation: Delegation) -> TreeNode:
    # What it used is in its result, once it has one; until then, as the provider last said.
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


PEERS_IN_TREE_MAX: Final = 100
"""Delegations in a tree of which it is told what was delegated on: each is read from the archive."""
PAGE: Final = 1_000
"""Steps that are read at once."""


class TaskStream:
    """A context, iterated once. Yields batches of steps; an empty one says that nothing happened for a while.

    Leaving it never ends the task.
    """

    def __init__(
        self,
        ledger: TaskLedger,
        watch: Watch,
        first: TaskView,
        *,
        backlog: Sequence[Step] | None = None,
        reply: TaskView | None = None,
        ends_when_parked: bool,
    ) -> None:
        """`backlog`: the steps after the first view that the watch has told already; None if the past is to be read."""
        self.first = first
        self.reply = reply
        """The finished task whose agent answered with a bare message: then that is all there is to send."""
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
def handed_over(watch: Watch) -> Iterator[Watch]:
    """Begin to watch for a stream, which leaves the watch in its own time. Left here if the stream is not made."""
    watch.__enter__()
    try:
        yield watch
    except BaseException:
        watch.__exit__(None, None, None)
        raise
