"""Tasks as readers see them: folded from the ledger's steps. Finished tasks do not change, so the last few are kept.

A task is looked for within whose it must be: of a foreign one nothing is read, and so nothing is folded.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import ANY, TaskScope, TreeNode
from covenant.model.content import Text
from covenant.model.errors import NotFound, Refusal
from covenant.model.ids import PublicKey, TaskId, parse_task_id
from covenant.model.peers.delegation import Delegation, DelegationRole
from covenant.model.peers.delegation_messages import usage_amounts
from covenant.model.task_event import MessageUpdate
from covenant.model.task_view import Artifact, TaskView, TaskViewBuilder

PAGE: Final = 1_000
KEPT_MAX: Final = 256
KEPT_CHARACTERS_MAX: Final = 8_192
"""A task with more to say is folded again when it is asked for: what is kept stays small."""


class TaskReader:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._kept: OrderedDict[TaskId, TaskView] = OrderedDict()

    async def get(self, task_id: TaskId, recipient: PublicKey, sender: PublicKey | None = None) -> TaskView:
        """The task, if it is this recipient's, and this sender's where that matters.

        Whose it is otherwise is the same answer as that it is nobody's.
        """
        kept = self._kept.get(task_id)
        if kept is not None:
            self._kept.move_to_end(task_id)
            return _theirs(kept, task_id, recipient, sender)
        scope = TaskScope(recipient=recipient, sender=sender)
        view = _theirs((await self.past(task_id, scope=scope)).view(), task_id, recipient, sender)
        self.keep(view)
        return view if view.state.terminal else await self._live(view)

    async def of_tenant(self, task_id: TaskId, tenant: str) -> TaskView:
        """The task, if it is this tenant's, whichever of its agents it is for."""
        view = self._kept.get(task_id) or (await self.past(task_id, scope=TaskScope(tenant=tenant))).view()
        if view is None or view.task.tenant != tenant:
            raise unknown(task_id)
        self.keep(view)
        return view if view.state.terminal else await self._live(view)

    async def past(self, task_id: TaskId, through: int | None = None, *, scope: TaskScope = ANY) -> TaskViewBuilder:
        """Everything that is durable, folded; or only as far as a generation. Nothing, if it is outside the scope."""
        folder = TaskViewBuilder()
        while through is None or folder.generation < through:
            limit = PAGE if through is None else min(PAGE, through - folder.generation)
            steps = await self._ledger.steps(task_id, folder.generation, limit, scope)
            for step in steps:
                folder.add(step)
            if len(steps) < limit:
                break
        return folder

    async def _live(self, view: TaskView) -> TaskView:
        entry = await self._ledger.entry(view.task.id)
        lost = entry is not None and entry.holder_lost(self._ledger.alive)
        return msgspec.structs.replace(view, holder_lost=True) if lost else view

    def keep(self, view: TaskView) -> None:
        if not view.state.terminal or _characters(view) > KEPT_CHARACTERS_MAX:
            return
        self._kept[view.task.id] = view
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)


def _theirs(view: TaskView | None, task_id: TaskId, recipient: PublicKey, sender: PublicKey | None) -> TaskView:
    if view is None or view.task.recipient.pubkey != recipient or sender not in (None, view.task.sender.pubkey):
        raise unknown(task_id)
    return view


def _characters(view: TaskView) -> int:
    """About how much a view holds. What is not text counts as too much."""
    found = 0
    said: tuple[MessageUpdate | Artifact, ...] = (*view.history, *view.artifacts)
    for each in said:
        for part in each.parts:
            found += len(part.text) if isinstance(part, Text) else KEPT_CHARACTERS_MAX
    return found


def unknown(task_id: str) -> NotFound:
    return NotFound("unknown_task", f"task {task_id[:80]} is not known here")


def parse_known_id(given: str) -> TaskId:
    """Ids are opaque to a client: one that cannot be ours is unknown, and not malformed."""
    try:
        return parse_task_id(given)
    except Refusal:
        raise unknown(given) from None


async def read_tree(ledger: Ledger, root: TaskId, viewer: PublicKey | None) -> TreeNode:
    tree = await ledger.tree(root, viewer)
    return await _with_peers(ledger, tree)


async def _with_peers(ledger: Ledger, node: TreeNode) -> TreeNode:
    delegation = await ledger.delegation_of(node.task_id)
    children = tuple([await _with_peers(ledger, child) for child in node.children])
    if delegation is not None and delegation.role is DelegationRole.REQUESTER:
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
