"""Building the result of a delegation from its finished task: transcript, redaction, size limit and proof.

Secrets are removed first, and the proof is signed over what is sent. A result must fit into one envelope. If it does
not, the transcript is left out; its root stays in the proof. Then parts are left out from the end, which the result
says.

In the transcript the role `user` has the request, `assistant` the agent's output, `tool` its tool calls and the answers
of other agents, and `system` the number of lines that were left out. An artifact is one line, at the place of its first
chunk. Content other than text is shown by its kind and the hash of its bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec

from covenant.exchange.tasks.builder import media_type_of
from covenant.ledger.contract.tasks import TreeNode
from covenant.ledger.machine.peer_commands import PeerMessage
from covenant.model.content import Content, File, Json, Resource, ResourceLink, SentContent, Text
from covenant.model.peers.delegation import ARTIFACT, BUDGET_EXCEEDED, Delegation
from covenant.model.peers.delegation_messages import (
    PARTS_MAX,
    RESULT_CHARS_MAX,
    TRANSCRIPT_MAX,
    TREE_DEPTH_MAX,
    TREE_NODES_MAX,
    DelegationOutcome,
    DelegationResult,
    DelegationStatus,
    SubDelegation,
    TokenUsage,
    TranscriptEntry,
)
from covenant.model.peers.instance import WHOLE_MAX, is_instance_id
from covenant.model.task import Cause, target_of
from covenant.model.task_event import ArtifactUpdate, Began, Continued, Ended, MessageUpdate, StatusUpdate, Step
from covenant.model.task_view import Artifact, TaskState, TaskView, answer_text, final_message, first_message
from covenant.model.usage import read_usage, tokens_of, usage_in
from covenant.peers.message_redaction import HELD_BACK, redact, redact_transcript
from covenant.peers.peer_settings import PeerSettings
from covenant.seal.envelope import BODY_BYTES_MAX
from covenant.seal.keys import Uncanonical
from covenant.seal.proofs import sign_proof
from covenant.seal.purpose_keys import PurposeKey
from covenant.wire import peers as wire
from covenant.wire.redaction import SecretFinding

CHARS_MAX: Final = 4_000_000
"""The most characters of all lines together."""
LINES_MAX: Final = TRANSCRIPT_MAX - 1
TOOL_ARTIFACTS: Final = frozenset({"tool_call", "sub_agent_response"})
"""Artifacts with these names tell which tools the agent used, and what other agents answered."""

Role = Literal["user", "assistant", "tool"]

_encode = msgspec.json.Encoder(order="deterministic").encode
INPUT_REQUIRED: Final = "input_required"
LEFT_OUT: Final = "result_too_large"
TEXT_CHARS_MAX: Final = 2_000_000
"""The text of a result that is too large is cut to this length, which fits in any script."""
SPARE_BYTES: Final = 16 * 1024
"""Room for the proof, and for the note that says what was left out."""
_STATUS: Final[dict[str, DelegationStatus]] = {
    "submitted": "pending",
    "completed": "completed",
    "failed": "failed",
    "rejected": "failed",
    "canceled": "cancelled",
}
_MARKABLE: Final = (Text, Json, Resource, ResourceLink)


@dataclass(slots=True)
class _Line:
    role: Role
    at_ms: int
    kept: bool
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class TranscriptBuilder:
    """Takes the steps of a task one by one, in order. Keeps a bounded number of lines and characters."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._artifacts: dict[str, _Line] = {}
        self._characters = 0
        self._left_out = 0

    def add(self, step: Step) -> None:
        match step.what:
            case Began(task):
                self._add_message("user", first_message(task), step.ts_ms)
            case Continued(message):
                self._add_message("user", message, step.ts_ms)
            case StatusUpdate() as status:
                self._write(self._new_line("assistant", step.ts_ms), _text_of(status.parts) or status.text)
            case MessageUpdate() as message:
                self._add_message("user" if message.role == "user" else "assistant", message, step.ts_ms)
            case ArtifactUpdate() as update:
                self._add_artifact(update, step.ts_ms)
            case Ended(ending, result):
                last = final_message(result, ending)
                if last is not None and all(line.text != _text_of(last.parts) for line in self._artifacts.values()):
                    self._add_message("assistant", last, step.ts_ms)
            case _:
                pass

    def entries(self, salt: Callable[[int], str]) -> tuple[TranscriptEntry, ...]:
        lines = [line for line in self._lines if line.pieces]
        entries = [_entry(seq, line, salt(seq)) for seq, line in enumerate(lines, 1)]
        if self._left_out:
            seq = len(entries) + 1
            note = f"{self._left_out} more were left out"
            at_ms = entries[-1].at_ms if entries else 0
            entries.append(TranscriptEntry(seq=seq, role="system", content=note, at_ms=at_ms, salt=salt(seq)))
        return tuple(entries)

    def _add_message(self, role: Role, message: MessageUpdate, at_ms: int) -> None:
        self._write(self._new_line(role, at_ms), _text_of(message.parts))

    def _add_artifact(self, update: ArtifactUpdate, at_ms: int) -> None:
        line = self._artifacts.get(update.artifact_id)
        if line is None:
            role: Role = "tool" if update.name in TOOL_ARTIFACTS else "assistant"
            self._artifacts[update.artifact_id] = line = self._new_line(role, at_ms)
        elif not update.append:
            self._characters -= sum(map(len, line.pieces))
            line.pieces.clear()
        self._write(line, _text_of(update.parts, joined=""))

    def _new_line(self, role: Role, at_ms: int) -> _Line:
        line = _Line(role, at_ms, kept=len(self._lines) < LINES_MAX)
        if line.kept:
            self._lines.append(line)
        return line

    def _write(self, line: _Line, text: str) -> None:
        if not text:
            return
        if not line.kept or self._characters + len(text) > CHARS_MAX:
            # The whole line is dropped, since half of a secret would not be recognised as one.
            self._characters -= sum(map(len, line.pieces))
            line.pieces.clear()
            line.kept = False
            self._left_out += 1
            return
        self._characters += len(text)
        line.pieces.append(text)


def _entry(seq: int, line: _Line, salt: str) -> TranscriptEntry:
    if line.role == "tool":
        return TranscriptEntry(seq=seq, role="tool", content="", tool_result=line.text, at_ms=line.at_ms, salt=salt)
    return TranscriptEntry(seq=seq, role=line.role, content=line.text, at_ms=line.at_ms, salt=salt)


def _text_of(parts: tuple[Content, ...], joined: str = "\n") -> str:
    return joined.join(map(_part_text, parts))


def _part_text(part: Content) -> str:
    if isinstance(part, Text):
        return part.text
    if isinstance(part, Json):
        return _encode(part.value).decode()
    encoded = _encode(part)
    return _encode(
        {"type": media_type_of(part), "bytes": len(encoded), "sha256": hashlib.sha256(encoded).hexdigest()}
    ).decode()


replace = msgspec.structs.replace


class FinishedWork(NamedTuple):
    """A task that has ended. `question`: what it asked, if it was canceled because the requester could not answer."""

    delegation: Delegation
    view: TaskView
    transcript: tuple[TranscriptEntry, ...]
    sub_delegations: tuple[SubDelegation, ...]
    question: str | None = None


class BuiltResult(NamedTuple):
    result: DelegationResult
    message: PeerMessage
    findings: tuple[SecretFinding, ...]


def build_result(work: FinishedWork, key: PurposeKey, settings: PeerSettings, now_ms: int) -> BuiltResult:
    """Pure. Slow for a long transcript, since all of it is hashed."""
    delegation = work.delegation
    assert delegation.offer is not None, "a delegation keeps its offer until it has ended"
    cleared = redact(_result(work), settings.redaction)
    lines = redact_transcript(work.transcript, settings.redaction)
    held_back = cleared.message.error_code == HELD_BACK
    result = _fitting(cleared.message)

    def signed(result: DelegationResult) -> DelegationResult:
        assert delegation.offer is not None
        proof = sign_proof(
            key,
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
        # The parts hold a number that the canonical form cannot have. The requester would refuse it, too.
        why = result.error or "its parts were left out, since they hold numbers that cannot be signed"
        proven = signed(replace(result, parts=(), error=why, error_code=LEFT_OUT))
    whole = replace(proven, transcript=lines.message) if settings.transcripts == "full" and not held_back else proven
    body = wire.encode(whole)
    if whole is not proven and len(body) > BODY_BYTES_MAX:
        whole, body = proven, wire.encode(proven)
    message = PeerMessage(typ=wire.type_of(whole), body=msgspec.Raw(body))
    return BuiltResult(whole, message, (*cleared.findings, *lines.findings))


def usage_of(used: Any, spent: Any = None) -> TokenUsage:
    """Usage as agents report it. `spent`: all tokens, if the daemon counted them during the work."""
    amounts = read_usage(used)
    total = spent if isinstance(spent, int | float) and math.isfinite(spent) else tokens_of(amounts)
    whole = max(0, min(math.ceil(total), WHOLE_MAX))
    prompt = max(0, min(math.ceil(amounts.get("input_tokens", 0)), whole))
    return TokenUsage(prompt=prompt, completion=whole - prompt, total=whole)


def sub_delegations_of(tree: TreeNode, most: int = TREE_NODES_MAX) -> tuple[SubDelegation, ...]:
    """The tasks that a task has delegated, within the protocol's limits."""
    remaining = [most]

    def build(nodes: Sequence[TreeNode], depth: int) -> tuple[SubDelegation, ...]:
        if depth >= TREE_DEPTH_MAX:
            return ()
        found: list[SubDelegation] = []
        for node in nodes:
            if remaining[0] <= 0:
                break
            remaining[0] -= 1
            found.append(_sub_delegation(node, build(node.children, depth + 1)))
        return tuple(found)

    return build(tree.children, 0)


def _sub_delegation(node: TreeNode, subs: tuple[SubDelegation, ...]) -> SubDelegation:
    if node.task is None:
        # A task that a peer of ours has delegated, as that peer reported it.
        return SubDelegation(
            delegation_id=node.task_id,
            profile=node.profile if isinstance(node.profile, str) else "-",
            status=cast("DelegationStatus", node.status),
            remote=True,
            provider=node.provider if isinstance(node.provider, str) and node.provider else None,
            token_usage=usage_of(node.usage_total if isinstance(node.usage_total, dict) else None),
            sub_delegations=subs,
        )
    target = target_of(node.task)
    profile = (target.profile if target is not None else None) or node.task.recipient.display.partition("@")[0]
    provider = (target.peer if target is not None else None) or ""
    state = node.a2a_state if isinstance(node.a2a_state, str) else ""
    return SubDelegation(
        delegation_id=node.task_id,
        profile=profile[:64] or "-",
        status=_STATUS.get(state, "running"),
        remote=target is not None,
        provider=provider if is_instance_id(provider) else None,
        token_usage=usage_of(node.usage_total),
        sub_delegations=subs,
    )


def _result(work: FinishedWork) -> DelegationResult:
    """The result before it is cut, since the whole text is searched for secrets."""
    delegation, view = work.delegation, work.view
    metadata = view.result.metadata if view.result is not None else None
    notes = metadata if isinstance(metadata, dict) else {}
    # Work that was stopped, or whose agent died, reports no usage at its end: the last status counts.
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
        sub_delegations=work.sub_delegations,
    )


def _outcome(work: FinishedWork, usage: TokenUsage) -> tuple[DelegationOutcome, str | None, str | None]:
    """The outcome, the error's text, and its code."""
    view, result = work.view, work.view.result
    message = result.error_message if result is not None and isinstance(result.error_message, str) else ""
    metadata = result.metadata if result is not None and isinstance(result.metadata, dict) else {}
    code = metadata.get("code")
    if usage.total > work.delegation.budget:
        # Some agents, such as workers, are not stopped by the daemon when they exceed the budget.
        spent = f"{usage.total} tokens were used, and {work.delegation.budget} were agreed"
        return "failed", message if code == BUDGET_EXCEEDED else spent, BUDGET_EXCEEDED
    if view.state is TaskState.COMPLETED:
        return "completed", None, None
    if work.question is not None:
        return "failed", f"it asks something, which a delegation cannot: {work.question}", INPUT_REQUIRED
    if view.state is TaskState.CANCELED:
        return "cancelled", message or "it was cancelled", None
    if view.cause in (Cause.TIMEOUT, Cause.DEADLINE) or code == "timeout":
        return "timeout", message, "timeout"
    if view.state is TaskState.REJECTED:
        return "failed", message or "the agent will not do this", "rejected"
    return "failed", message or "the agent failed", code[:64] if isinstance(code, str) else "agent_failed"


def _parts(view: TaskView, text: str | None) -> tuple[SentContent, ...]:
    """Parts beyond the answer's text: the message, if it is more than text, then the artifacts."""
    message = view.message.parts if view.message is not None and view.state is TaskState.COMPLETED else ()
    plain = all(type(part) is Text and part == Text(part.text) for part in message)
    made = (part for each in view.artifacts if each.parts != (Text(text or ""),) for part in _marked(each))
    parts = (*(() if plain else message), *made)[:PARTS_MAX]
    # The view has the bytes of files already; a file that is left could not be read.
    return tuple(part for part in parts if not isinstance(part, File))


def _marked(artifact: Artifact) -> list[Content]:
    mark = {ARTIFACT: {"id": artifact.artifact_id, "name": artifact.name}}
    return [
        replace(part, metadata={**(part.metadata or {}), **mark}) if isinstance(part, _MARKABLE) else part
        for part in artifact.parts
    ]


def _fitting(result: DelegationResult) -> DelegationResult:
    """The result without the parts that do not fit into one envelope."""
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
