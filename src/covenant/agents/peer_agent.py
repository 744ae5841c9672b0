"""Agents of peers: a task is done by another instance, sealed and proven.

The offer has the task's own id, and all that is said about it is in the ledger: a later attempt goes on where the
offer stands, so a daemon may stop or die at any moment. Updates of the task say how the delegation stands; the last one
is the proof of its result. A task that ends here ends at the peer too, as soon as the peer can be reached. What the
peer's agent asks, the task asks its own sender; the answer is the task's next turn, and goes to the peer.
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
from covenant.exchange.delegation import REMOTE, target_of
from covenant.model.content import Content, Json, Resource, ResourceLink, Text
from covenant.model.errors import OverLimit, Refusal, Unavailable
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import (
    ARTIFACT,
    CANCELLED,
    CANCELLING,
    COMPLETED,
    LOST,
    PROOF,
    TIMEOUT,
    Delegation,
)
from covenant.model.peers.delegation_messages import DelegationResult, usage_amounts
from covenant.model.rate_limits import Backoff
from covenant.model.sanitizer import unreserved_parts, without_reserved
from covenant.model.task import TIMED_OUT, Target, Task
from covenant.model.task_event import ArtifactUpdate, StatusUpdate
from covenant.model.task_view import TaskState
from covenant.seal.keys import base64url
from covenant.wire.redaction import SecretFinding

BETWEEN_OFFERS: Final = Backoff(0.5, 15.0)
"""Between attempts to ask a peer that cannot be reached, and has to be asked before anything can be offered."""
LAST_WORD_S: Final = 10.0
"""How long a provider that was told to stop for its own fault has to say its last word."""
EVIDENCE_BYTES_MAX: Final = 3 * 1024 * 1024
"""Of one update. Larger evidence is kept in several."""
NAME_CHARS_MAX: Final = 256
"""Of an artifact that a peer made."""
_MARKABLE: Final = (Text, Json, Resource, ResourceLink)

log = logging.getLogger(__name__)


class PeerRequester(Protocol):
    async def offer(
        self, task: Task, target: Target, told: Callable[[tuple[SecretFinding, ...]], None]
    ) -> Delegation: ...
    def is_passing(self, delegation: Delegation, task: Task) -> bool: ...
    def follow(self, task_id: TaskId) -> AsyncIterator[Delegation]: ...
    async def withdraw(self, task_id: TaskId, reason: str) -> None: ...
    async def answer(self, task_id: TaskId, turn: int, parts: tuple[Content, ...]) -> bool: ...


class PeerAgent:
    def __init__(self, requester: PeerRequester, target: Target | None = None) -> None:
        """`target`: the `peer` (empty: whichever offers it) and its `profile`, for tasks that do not say so."""
        self._requester = requester
        self._target = target

    async def run(self, job: Job) -> None:
        target = target_of(job.task) or self._target
        if target is None or not target.profile:
            job.fail("nobody knows which peer does this")
            return
        beating = asyncio.ensure_future(renew_lease(job))
        try:
            delegation = await self._done(job, target)
            question = delegation.question
            if question is not None and not delegation.ended:
                # Its sender is asked in the provider's place. The answer is the next turn, which goes on with it.
                job.park(StatusUpdate(question.text, TaskState.INPUT_REQUIRED.value, parts=question.parts))
                return
            self._conclude(job, delegation)
        except Refusal as refusal:
            _fail(job, refusal.code, refusal.message)
        except asyncio.CancelledError:
            # What has ended here is not wanted there. What has not is found again by the next attempt.
            await asyncio.shield(self._requester.withdraw(job.task.id, "canceled by whoever asked for it"))
            raise
        finally:
            beating.cancel()

    async def _done(self, job: Job, target: Target) -> Delegation:
        """Offered until somebody does it, or will not."""
        while True:
            await self._offer(job, target)
            turn = job.leased.turn
            if turn > 1:
                said = tuple(part for message in job.messages for part in message.parts)
                await self._requester.answer(job.task.id, turn, said)
            delegation = await self._ended(job)
            if not self._requester.is_passing(delegation, job.task):
                return delegation

    async def _offer(self, job: Job, target: Target) -> None:
        tries, task = 0, job.task
        if task.parts and job.files is not None:
            task = msgspec.structs.replace(task, parts=await job.files.portable(task.parts))
        while True:
            try:
                await self._requester.offer(task, target, lambda findings: _tell_findings(job, findings))
                return
            except (Unavailable, OverLimit) as later:
                if not tries:
                    job.say(StatusUpdate(f"the peer cannot be asked now, and is asked again: {later.message}"))
                tries += 1
                await asyncio.sleep(BETWEEN_OFFERS.pause(tries))

    async def _ended(self, job: Job) -> Delegation:
        """Notes how the delegation stands until it has ended, or its provider's last word is overdue."""
        loop, noted = asyncio.get_running_loop(), _Noted(job)
        following = cast("AsyncGenerator[Delegation, None]", self._requester.follow(job.task.id))
        delegation: Delegation | None = None
        try:
            async with asyncio.timeout(None) as bound, aclosing(following):
                async for delegation in following:
                    noted.say(delegation)
                    if delegation.ended or delegation.question is not None:
                        break
                    at_fault = delegation.state is CANCELLING and delegation.code is not None
                    if at_fault and bound.when() is None:
                        bound.reschedule(loop.time() + LAST_WORD_S)
                    if job.full:
                        await job.room()
        except TimeoutError:
            log.info("peer.no_last_word", extra=job.fields())
        assert delegation is not None, "following tells at least how it stands"
        return delegation

    def _conclude(self, job: Job, delegation: Delegation) -> None:
        result = delegation.result
        job.spend(usage_amounts(delegation.usage))
        if result is not None:
            _prove(job, delegation, result)
        if delegation.broken or delegation.overspent:
            _fail(job, delegation.code or "not_believed", delegation.reason or "")
        elif delegation.state is COMPLETED and result is not None:
            _complete(job, result)
        elif delegation.state is TIMEOUT:
            job.notes["code"] = "timeout"
            job.fail(TIMED_OUT)
        elif delegation.state is CANCELLED and delegation.code is None:
            job.give_up(delegation.reason or "it was cancelled where it was done")
        elif result is not None and result.error is not None:
            _fail(job, delegation.code, result.error)
        else:
            _fail(job, delegation.code, delegation.reason or f"the peer's word is {delegation.state.value}")


class _Noted:
    """Notes each change of a delegation once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._last: tuple[Any, ...] = ()
        self._message: str | None = None

    def say(self, delegation: Delegation) -> None:
        now = (delegation.state, delegation.message, delegation.usage, delegation.progress)
        if now == self._last:
            return
        self._last = now
        text = delegation.message if delegation.message != self._message else None
        self._message = delegation.message
        if delegation.state is LOST:
            text = f"the peer is silent: {delegation.reason}"
        self._job.say(StatusUpdate(text or "", metadata={REMOTE: note_of(delegation)}))


def note_of(delegation: Delegation) -> dict[str, Any]:
    """How a delegation stands, as it is told in the updates of its task and in its tree."""
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


def _prove(job: Job, delegation: Delegation, result: DelegationResult) -> None:
    """Keep the proof and all that it is about, so that anybody can check it later."""
    evidence = {
        "offer": msgspec.to_builtins(delegation.offer),
        "result": msgspec.to_builtins(msgspec.structs.replace(result, transcript=None, proof=None)),
        "transcript": msgspec.to_builtins(result.transcript),
        "proof": msgspec.to_builtins(result.proof),
        "broken": list(delegation.broken),
    }
    whole = msgspec.json.encode(evidence)
    if len(whole) <= EVIDENCE_BYTES_MAX:
        job.allow(len(whole))
        job.say(StatusUpdate(metadata={PROOF: evidence}), len(whole))
        return
    text, sha256 = base64url(whole), hashlib.sha256(whole).hexdigest()
    pieces = [text[at : at + EVIDENCE_BYTES_MAX] for at in range(0, len(text), EVIDENCE_BYTES_MAX)]
    job.allow(len(text))
    for number, piece in enumerate(pieces):
        part = {"sha256": sha256, "part": number, "of": len(pieces), "data": piece}
        job.say(StatusUpdate(metadata={PROOF: part}), len(piece))


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
        job.say(ArtifactUpdate(mark["id"], (plain,), name, append=mark["id"] in made))
        made[mark["id"]] = made.get(mark["id"], "") + (plain.text if isinstance(plain, Text) else "")
    if not content and result.result and result.result not in ("\n".join(filter(None, made.values())), ""):
        content.append(Text(result.result))
    job.complete(*content, partial=result.error_code is not None)


def _fail(job: Job, code: str | None, message: str) -> None:
    if code is not None:
        job.notes["code"] = code
    said = message if code is None or message.startswith(code) else f"{code}: {message}"
    log.info("peer.failed", extra=job.fields(code=code, reason=message))
    job.fail(said.removesuffix(": "))


def _tell_findings(job: Job, findings: tuple[SecretFinding, ...]) -> None:
    """The sender hears what was found in what it sent, and never what it was."""
    places = ", ".join(f"{each.kind} at {each.path or '/'}" for each in findings[:10])
    found = [{"path": each.path, "kind": each.kind, "count": each.count} for each in findings]
    job.say(
        StatusUpdate(f"secrets were found in what goes to the peer: {places}", metadata={"covenant.redacted": found})
    )
