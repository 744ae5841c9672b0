"""Agents of peers: another instance does the task, over sealed messages, and proves its result.

The offer has the task's own id, and every message about it is in the ledger: a later attempt continues from the offer's
state, so a daemon may stop or die at any moment. Updates of the task show the state of the delegation; the last one is
the proof of its result. A task that ends here ends at the peer, too, as soon as the peer can be reached. If the peer's
agent asks a question, the task asks its own sender. The answer is the task's next turn, and goes to the peer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final, Protocol, cast

import msgspec

from covenant.agents.remote_agent import renew_lease
from covenant.agents.runtime.job import Job
from covenant.model.content import Content, Json, Resource, ResourceLink, Text
from covenant.model.errors import OverLimit, Refusal, Unavailable
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import ARTIFACT, CANCELLED, CANCELLING, COMPLETED, LOST, PROOF, TIMEOUT, Delegation
from covenant.model.peers.delegation_messages import DelegationResult, usage_amounts
from covenant.model.rate_limits import Backoff
from covenant.model.sanitizer import unreserved_parts, without_reserved
from covenant.model.task import REMOTE, TIMED_OUT, Target, Task, target_of
from covenant.model.task_event import ArtifactUpdate, StatusUpdate
from covenant.model.task_view import TaskState
from covenant.seal.keys import base64url
from covenant.wire.redaction import SecretFinding, describe_findings

OFFER_BACKOFF: Final = Backoff(0.5, 15.0)
"""Pauses between attempts to reach a peer that must be asked before a task can be offered to it."""
LAST_RESULT_S: Final = 10.0
"""How long a provider that broke the terms has to send its result after the cancel."""
EVIDENCE_BYTES_MAX: Final = 3 * 1024 * 1024
"""The most bytes of evidence in one update. Larger evidence is split over several."""
NAME_CHARS_MAX: Final = 256
"""The longest name or id of an artifact from a peer."""
_MARKABLE: Final = (Text, Json, Resource, ResourceLink)

log = logging.getLogger(__name__)


class PeerRequester(Protocol):
    async def offer(
        self, task: Task, target: Target, on_findings: Callable[[tuple[SecretFinding, ...]], None]
    ) -> Delegation: ...
    def is_passing(self, delegation: Delegation, task: Task) -> bool: ...
    def follow(self, task_id: TaskId) -> AsyncIterator[Delegation]: ...
    async def withdraw(self, task_id: TaskId, reason: str) -> None: ...
    async def note_asked(self, delegation: Delegation) -> None: ...
    async def answer(self, task_id: TaskId, turn: int, parts: tuple[Content, ...]) -> bool: ...


class PeerAgent:
    def __init__(self, requester: PeerRequester, target: Target | None = None) -> None:
        """`target`: the `peer` (empty: any that offers the profile) and the `profile`, for tasks without a target."""
        self._requester = requester
        self._target = target

    async def run(self, job: Job) -> None:
        target = target_of(job.task) or self._target
        if target is None or not target.profile:
            job.fail("neither the task nor the agent names a peer's profile")
            return
        renewal = asyncio.ensure_future(renew_lease(job))
        try:
            delegation = await self._delegate(job, target)
            question = delegation.question
            if question is not None and not delegation.ended:
                # The task's sender is asked on behalf of the provider. The answer is the next turn, which goes on here.
                await self._requester.note_asked(delegation)
                job.park(StatusUpdate(question.text, TaskState.INPUT_REQUIRED.value, parts=question.parts))
                return
            self._conclude(job, delegation)
        except Refusal as refusal:
            _fail(job, refusal.code, refusal.message)
        except asyncio.CancelledError:
            # If the local task has ended, the delegation is canceled. If not, the next attempt continues the
            # delegation.
            await asyncio.shield(self._requester.withdraw(job.task.id, "canceled by the requester"))
            raise
        finally:
            renewal.cancel()

    async def _delegate(self, job: Job, target: Target) -> Delegation:
        """Offers the task until a peer has done it, or has refused for good."""
        while True:
            await self._offer(job, target)
            turn = job.leased.turn
            if turn > 1:
                parts = tuple(part for message in job.messages for part in message.parts)
                await self._requester.answer(job.task.id, turn, parts)
            delegation = await self._follow(job)
            if not self._requester.is_passing(delegation, job.task):
                return delegation

    async def _offer(self, job: Job, target: Target) -> None:
        attempts, task = 0, job.task
        if task.parts and job.files is not None:
            task = msgspec.structs.replace(task, parts=await job.files.portable(task.parts))
        while True:
            try:
                await self._requester.offer(task, target, lambda findings: _report_findings(job, findings))
                return
            except (Unavailable, OverLimit) as later:
                if not attempts:
                    job.add_update(
                        StatusUpdate(f"the peer cannot be reached now; the daemon tries again: {later.message}")
                    )
                attempts += 1
                await asyncio.sleep(OFFER_BACKOFF.pause(attempts))

    async def _follow(self, job: Job) -> Delegation:
        """Reports each change of the delegation until it ends or has a question, or its provider is overdue."""
        loop, reporter = asyncio.get_running_loop(), _StateReporter(job)
        following = cast("AsyncGenerator[Delegation, None]", self._requester.follow(job.task.id))
        delegation: Delegation | None = None
        try:
            async with asyncio.timeout(None) as bound, aclosing(following):
                async for delegation in following:
                    reporter.report(delegation)
                    if delegation.ended or delegation.question is not None:
                        break
                    at_fault = delegation.state is CANCELLING and delegation.code is not None
                    if at_fault and bound.when() is None:
                        bound.reschedule(loop.time() + LAST_RESULT_S)
                    if job.full:
                        await job.room()
        except TimeoutError:
            log.info("peer.result_overdue", extra=job.fields())
        assert delegation is not None, "`follow` yields the current state first"
        return delegation

    def _conclude(self, job: Job, delegation: Delegation) -> None:
        result = delegation.result
        job.spend(usage_amounts(delegation.usage))
        if result is not None:
            _record_evidence(job, delegation, result)
        if delegation.broken or delegation.overspent:
            _fail(job, delegation.code or "not_believed", delegation.reason or "")
        elif delegation.state is COMPLETED and result is not None:
            _complete(job, result)
        elif delegation.state is TIMEOUT:
            job.notes["code"] = "timeout"
            job.fail(TIMED_OUT)
        elif delegation.state is CANCELLED and delegation.code is None:
            job.end_canceled(delegation.reason or "the peer canceled it")
        elif result is not None and result.error is not None:
            _fail(job, delegation.code, result.error)
        else:
            _fail(job, delegation.code, delegation.reason or f"the peer reported {delegation.state.value}")


class _StateReporter:
    """Writes an update of the task for each change of its delegation."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._last: tuple[Any, ...] = ()
        self._message: str | None = None

    def report(self, delegation: Delegation) -> None:
        now = (delegation.state, delegation.message, delegation.usage, delegation.progress)
        if now == self._last:
            return
        self._last = now
        text = delegation.message if delegation.message != self._message else None
        self._message = delegation.message
        if delegation.question is not None:
            text = None  # the task's own status has the question
        if delegation.state is LOST:
            text = f"the peer does not answer: {delegation.reason}"
        self._job.add_update(StatusUpdate(text or "", metadata={REMOTE: delegation_note(delegation)}))


def delegation_note(delegation: Delegation) -> dict[str, Any]:
    """The state of a delegation, for the updates of its task and for its tree."""
    note: dict[str, Any] = {
        "peer": delegation.peer,
        "profile": delegation.profile,
        "task_id": delegation.delegation_id,
        "status": delegation.status,
        "state": delegation.state.value,
        "usage": msgspec.to_builtins(delegation.usage),
        "budget": delegation.budget,
    }
    if delegation.progress is not None:
        note["progress"] = delegation.progress
    return note


def _record_evidence(job: Job, delegation: Delegation, result: DelegationResult) -> None:
    """Writes the proof and all that it covers into the task, so that anybody can check it later."""
    evidence = {
        "offer": msgspec.to_builtins(delegation.offer),
        "result": msgspec.to_builtins(msgspec.structs.replace(result, transcript=None, proof=None)),
        "transcript": msgspec.to_builtins(result.transcript),
        "proof": msgspec.to_builtins(result.proof),
        "broken": list(delegation.broken),
    }
    whole = msgspec.json.encode(evidence)
    if len(whole) <= EVIDENCE_BYTES_MAX:
        job.exempt(len(whole))
        # As it will be read back, with lists for tuples: the ledger need not compare and encode it a second time.
        job.add_update(StatusUpdate(metadata={PROOF: msgspec.json.decode(whole)}), len(whole))
        return
    text, sha256 = base64url(whole), hashlib.sha256(whole).hexdigest()
    pieces = [text[at : at + EVIDENCE_BYTES_MAX] for at in range(0, len(text), EVIDENCE_BYTES_MAX)]
    job.exempt(len(text))
    for number, piece in enumerate(pieces):
        part = {"sha256": sha256, "part": number, "of": len(pieces), "data": piece}
        job.add_update(StatusUpdate(metadata={PROOF: part}), len(piece))


def _complete(job: Job, result: DelegationResult) -> None:
    content: list[Content] = []
    made: dict[str, str] = {}
    for part in result.parts:
        mark = (part.metadata or {}).get(ARTIFACT) if isinstance(part, _MARKABLE) else None
        if not isinstance(mark, dict) or not isinstance(mark.get("id"), str) or len(mark["id"]) > NAME_CHARS_MAX:
            content += unreserved_parts((part,))
            continue
        assert isinstance(part, _MARKABLE)
        plain = msgspec.structs.replace(part, metadata=without_reserved(part.metadata))
        name = mark["name"][:NAME_CHARS_MAX] if isinstance(mark.get("name"), str) else None
        job.add_update(ArtifactUpdate(mark["id"], (plain,), name, append=mark["id"] in made))
        made[mark["id"]] = made.get(mark["id"], "") + (plain.text if isinstance(plain, Text) else "")
    if not content and result.result and result.result not in ("\n".join(filter(None, made.values())), ""):
        content.append(Text(result.result))
    job.complete(*content, partial=result.error_code is not None)


def _fail(job: Job, code: str | None, message: str) -> None:
    if code is not None:
        job.notes["code"] = code
    text = message if code is None or message.startswith(code) else f"{code}: {message}"
    log.info("peer.failed", extra=job.fields(code=code, reason=message))
    job.fail(text.removesuffix(": "))


def _report_findings(job: Job, findings: tuple[SecretFinding, ...]) -> None:
    """Tells the sender what was found in its task."""
    places = describe_findings(findings)
    found = [{"path": each.path, "kind": each.kind, "count": each.count} for each in findings]
    job.add_update(
        StatusUpdate(f"secrets were found in the message to the peer: {places}", metadata={"covenant.redacted": found})
    )
