"""What proves a delegation, as its task keeps it: the offer, the result, the conversation and the provider's signature.

The evidence is in the task's last updates. Large evidence is in several of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from covenant.ledger.contract.tasks import TaskLedger, TreeNode
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import PROOF
from covenant.model.peers.delegation_messages import SubDelegation, usage_amounts
from covenant.model.task_event import StatusUpdate
from covenant.seal.keys import from_base64url

STEPS_MAX: Final = 1_000
"""Steps that are read at once."""


async def read_task_evidence(ledger: TaskLedger, task_id: TaskId) -> dict[str, Any] | None:
    """None if there is none: the delegation has not ended, or came without."""
    parts: dict[tuple[str, int], dict[int, str]] = {}
    steps = await ledger.steps(task_id, 0, STEPS_MAX)
    while steps:
        for step in reversed(steps):
            what = step.what
            proof = (what.metadata or {}).get(PROOF) if isinstance(what, StatusUpdate) else None
            if isinstance(proof, dict) and "sha256" in proof:
                found = parts.setdefault((proof["sha256"], proof["of"]), {})
                found[proof["part"]] = proof["data"]
                proof = _joined(proof["sha256"], proof["of"], found)
            if isinstance(proof, dict):
                return proof
        steps = await ledger.steps(task_id, steps[-1].generation, STEPS_MAX)
    return None


def _joined(sha256: str, count: int, parts: Mapping[int, str]) -> dict[str, Any] | None:
    if len(parts) < count:
        return None
    whole = from_base64url("".join(parts[number] for number in range(count)))
    return msgspec.json.decode(whole, type=dict[str, Any]) if hashlib.sha256(whole).hexdigest() == sha256 else None


async def read_sub_delegations(ledger: TaskLedger, task_id: TaskId) -> tuple[TreeNode, ...]:
    """What the provider of a delegation delegated on, by its own signed word, as nodes of a tree."""
    evidence = await read_task_evidence(ledger, task_id)
    told = (evidence or {}).get("result") or {}
    return tuple(map(_node, msgspec.convert(told.get("subDelegations", ()), tuple[SubDelegation, ...])))


def _node(told: SubDelegation) -> TreeNode:
    used = usage_amounts(told.token_usage) or msgspec.UNSET
    return TreeNode(
        task_id=TaskId(told.delegation_id),
        task=None,
        state=None,
        remote=True,
        provider=told.provider or "",
        profile=told.profile,
        status=told.status,
        usage_total=used,
        children=tuple(map(_node, told.sub_delegations)),
    )
