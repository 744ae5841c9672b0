"""The last word on a delegation: from what came of the provider's task to the result that is sent, with its proof.

What leaves is cleared of secrets first (see `egress`), and the proof is signed over what is sent. A result must fit
into one envelope: what does not is left out from the end of its parts, and the result says so; the transcript is left
out before anything else, and its root stays in the proof.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from covenant.exchange.delegation import target_of
from covenant.ledger.contract import TreeNode
from covenant.ledger.machine.settling import DEADLINE_MESSAGE, TIMEOUT_MESSAGE
from covenant.model.content import Content, Json, Resource, ResourceLink, Text
from covenant.model.peers.delegation import ARTIFACT, BUDGET_EXCEEDED, Delegation
from covenant.model.peers.delegation_messages import (
    PARTS_MAX,
    RESULT_CHARS_MAX,
    TREE_DEPTH_MAX,
    TREE_NODES_MAX,
    DelegationResult,
    DelegationOutcome,
    DelegationStatus,
    SubDelegation,
    TokenUsage,
    TranscriptEntry,
)
from covenant.model.task_view import Artifact, TaskState, TaskView
from covenant.model.peers.instance import WHOLE_MAX
from covenant.model.usage import read_usage, tokens_of, usage_in
from covenant.outbound.reply import answer_text
from covenant.peers import egress
from covenant.peers.settings import PeerSettings
from covenant.seal.documents import Uncanonical
from covenant.seal.envelope import BODY_BYTES_MAX
from covenant.seal.proofs import sign_proof
from covenant.wire import peers as wire
from covenant.wire.redaction import SecretFinding

INPUT_REQUIRED: Final = "input_required"
LEFT_OUT: Final = "result_too_large"
TEXT_CHARS_MAX: Final = 2_000_000
"""Of a result that is too large: in any script, this fits."""
SPARE_BYTES: Final = 16 * 1024
"""For the proof, and for saying what was left out."""

_STATUS: Final[dict[str, DelegationStatus]] = {
    "submitted": "pending",
    "completed": "completed",
    "failed": "failed",
    "rejected": "failed",
    "canceled": "cancelled",
}
_IS_INSTANCE: Final = re.compile(r"frd1_[a-z2-7]{40}").fullmatch
_MARKABLE: Final = (Text, Json, Resource, ResourceLink)
replace = msgspec.structs.replace


class Work(NamedTuple):
    """All that is known of work that has ended. `question`: what it wanted to know, if it ended by asking."""

    delegation: Delegation
    view: TaskView
    transcript: tuple[TranscriptEntry, ...]
    below: tuple[SubDelegation, ...]
    question: str | None = None


class Conclusion(NamedTuple):
    result: DelegationResult
    body: bytes
    findings: tuple[SecretFinding, ...]


def conclude(work: Work, private_key: bytes, settings: PeerSettings, now_ms: int) -> Conclusion:
    """Pure, and slow where much was said: hashes and signs all of it."""
    delegation = work.delegation
    assert delegation.offer is not None, "a delegation keeps its offer until it has ended"
    cleared = egress.clear_result(_result(work), settings.redaction)
    lines = egress.clear_transcript(work.transcript, settings.redaction)
    held_back = cleared.message.error_code == egress.HELD_BACK
    result = _fitting(cleared.message)

    def signed(result: DelegationResult) -> DelegationResult:
        assert delegation.offer is not None
        proof = sign_proof(
            private_key,
            requester=delegation.peer,
            offer=delegation.offer,
            result=result,
            transcript=lines.message,
            now_ms=now_ms,
        )
        return replace(result, proof=proof)

    try:
        proven = signed(result)
    except Uncanonical:
        # A number that the canonical form cannot hold: it would not be taken on the other side either.
        proven = signed(_without_parts(result, "its parts hold numbers that cannot be signed"))
    body = wire.encode(proven)
    if settings.transcripts == "full" and not held_back:
        whole = replace(proven, transcript=lines.message)
        encoded = wire.encode(whole)
        if len(encoded) <= BODY_BYTES_MAX:
            proven, body = whole, encoded
    return Conclusion(proven, body, (*cleared.findings, *lines.findings))


def usage_of(used: Any, spent: Any = None) -> TokenUsage:
    """As agents say it. `spent`: all tokens, where somebody has counted them as they went."""
    amounts = read_usage(used)
    total = spent if isinstance(spent, int | float) and math.isfinite(spent) else tokens_of(amounts)
    whole = max(0, min(math.ceil(total), WHOLE_MAX))
    prompt = max(0, min(math.ceil(amounts.get("input_tokens", 0)), whole))
    return TokenUsage(prompt=prompt, completion=whole - prompt, total=whole)


def below(tree: TreeNode) -> tuple[SubDelegation, ...]:
    """What was delegated for a task, bounded as the protocol wants it."""
    left = [TREE_NODES_MAX]

    def told(nodes: Sequence[TreeNode], depth: int) -> tuple[SubDelegation, ...]:
        if depth >= TREE_DEPTH_MAX:
            return ()
        found: list[SubDelegation] = []
        for node in nodes:
            if node.task is None or left[0] <= 0:
                continue
            left[0] -= 1
            found.append(_sub(node, told(node.children, depth + 1)))
        return tuple(found)

    return told(tree.children, 0)


def _sub(node: TreeNode, subs: tuple[SubDelegation, ...]) -> SubDelegation:
    assert node.task is not None
    target = target_of(node.task)
    profile = (target.profile if target is not None else None) or node.task.recipient.display.partition("@")[0]
    provider = (target.peer if target is not None else None) or ""
    state = node.a2a_state if isinstance(node.a2a_state, str) else ""
    return SubDelegation(
        delegation_id=node.task_id,
        profile=profile[:64] or "-",
        status=_STATUS.get(state, "running"),
        remote=target is not None,
        provider=provider if _IS_INSTANCE(provider) else None,
        token_usage=usage_of(node.usage_total),
        sub_delegations=subs,
    )


def _result(work: Work) -> DelegationResult:
    """With all its words: they are searched for secrets before they are cut."""
    delegation, view = work.delegation, work.view
    metadata = view.result.metadata if view.result is not None else None
    notes = metadata if isinstance(metadata, dict) else {}
    # Work that was stopped, or whose agent died, says nothing more: what was told of it before stands.
    usage = max(usage_of(usage_in(notes), notes.get("spent")), delegation.usage, key=lambda each: each.total)
    status, error, code = _outcome(work, usage)
    done = status == "completed"
    text = answer_text(view.state, view.message, view.artifacts, view.history) if done else None
    left_out = f"the answer was cut at {RESULT_CHARS_MAX} characters" if len(text or "") > RESULT_CHARS_MAX else None
    assert delegation.delegation_id is not None
    return DelegationResult(
        offer_id=delegation.offer_id,
        delegation_id=delegation.delegation_id,
        profile=delegation.profile,
        status=status,
        result=text,
        parts=_parts(view, text),
        error=error or left_out or None,
        error_code=code or (LEFT_OUT if left_out else None),
        token_usage=usage,
        duration_ms=max(0, view.updated_at_ms - view.created_at_ms),
        sub_delegations=work.below,
    )


def _outcome(work: Work, usage: TokenUsage) -> tuple[DelegationOutcome, str | None, str | None]:
    """How it ended, why, and why for machines."""
    view, result = work.view, work.view.result
    said = result.error_message if result is not None and isinstance(result.error_message, str) else ""
    metadata = result.metadata if result is not None and isinstance(result.metadata, dict) else {}
    code = metadata.get("code")
    if usage.total > work.delegation.budget:
        # Of an agent that is not stopped from here, like a worker.
        spent = f"{usage.total} tokens were used, and {work.delegation.budget} were agreed"
        return "failed", said if code == BUDGET_EXCEEDED else spent, BUDGET_EXCEEDED
    if view.state is TaskState.COMPLETED:
        return "completed", None, None
    if work.question is not None:
        return "failed", f"it asks something, which a delegation cannot: {work.question}", INPUT_REQUIRED
    if view.state is TaskState.CANCELED:
        return "cancelled", said or "it was cancelled", None
    if said in (TIMEOUT_MESSAGE, DEADLINE_MESSAGE):
        return "timeout", said, "timeout"
    if view.state is TaskState.REJECTED:
        return "failed", said or "the agent will not do this", "rejected"
    return "failed", said or "the agent failed", code[:64] if isinstance(code, str) else "agent_failed"


def _parts(view: TaskView, text: str | None) -> tuple[Content, ...]:
    """What the answer's text does not say: the message in full if it is more than text, then what was made."""
    message = view.message.parts if view.message is not None and view.state is TaskState.COMPLETED else ()
    plain = all(type(part) is Text and part == Text(part.text) for part in message)
    made = (part for each in view.artifacts if each.parts != (Text(text or ""),) for part in _marked(each))
    return (*(() if plain else message), *made)[:PARTS_MAX]


def _marked(artifact: Artifact) -> list[Content]:
    mark = {ARTIFACT: {"id": artifact.artifact_id, "name": artifact.name}}
    return [
        replace(part, metadata={**(part.metadata or {}), **mark}) if isinstance(part, _MARKABLE) else part
        for part in artifact.parts
    ]


def _fitting(result: DelegationResult) -> DelegationResult:
    """Without what does not go into one envelope."""
    most = BODY_BYTES_MAX - SPARE_BYTES
    if len(wire.encode(result)) <= most:
        return result
    parts = list(result.parts)
    sizes = [len(msgspec.json.encode(part)) + 1 for part in parts]
    over = len(wire.encode(result)) - most
    left_out = 0
    while parts and over > 0:
        parts.pop()
        over -= sizes.pop()
        left_out += 1
    why = f"{left_out} parts were left out, since a result has at most {BODY_BYTES_MAX} bytes"
    fitting = replace(result, parts=tuple(parts), error=result.error or why, error_code=result.error_code or LEFT_OUT)
    if len(wire.encode(fitting)) > most and fitting.result is not None:
        fitting = replace(fitting, result=fitting.result[:TEXT_CHARS_MAX])
    return fitting if len(wire.encode(fitting)) <= most else replace(fitting, result=None, sub_delegations=())


def _without_parts(result: DelegationResult, why: str) -> DelegationResult:
    return replace(result, parts=(), error=result.error or f"its parts were left out: {why}", error_code=LEFT_OUT)
