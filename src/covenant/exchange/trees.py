"""Trees of tasks as readers see them: with how that stands which peers do, as far as it is known here."""

from __future__ import annotations

import msgspec

from covenant.ledger.contract import Ledger, TreeNode
from covenant.model.correspondence import Delegation
from covenant.model.delegating import Role
from covenant.model.delegation import amounts_of
from covenant.model.ids import PublicKey, TaskId


async def grown(ledger: Ledger, root: TaskId, viewer: PublicKey | None) -> TreeNode:
    tree = await ledger.tree(root, viewer)
    return _with_peers(ledger, tree)


def _with_peers(ledger: Ledger, node: TreeNode) -> TreeNode:
    delegation = ledger.delegation_of(node.task_id)
    children = tuple(_with_peers(ledger, child) for child in node.children)
    if delegation is not None and delegation.role is Role.REQUESTER:
        return _elsewhere(node, children, delegation)
    if all(new is old for new, old in zip(children, node.children, strict=True)):
        return node
    return msgspec.structs.replace(node, children=children)


def _elsewhere(node: TreeNode, children: tuple[TreeNode, ...], delegation: Delegation) -> TreeNode:
    # What it used is in its result, once it has one; until then, as the provider last said.
    used = (amounts_of(delegation.usage) or msgspec.UNSET) if node.usage is msgspec.UNSET else node.usage
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
