"""Reports on one task to the peer that delegated it: status while it runs, then the result with its proof.

What the agent says is sent as status; a newer status replaces one that is not on its way yet. A silent agent is
reported as running. A task that asks for input says what it asks with each status until it is answered; it is canceled
if the requester knows no questions. All reports are made from the ledger: the reporter of the next run says the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from covenant.exchange.tasks.builder import text_of
from covenant.exchange.tasks.reader import PAGE, read_tree
from covenant.ledger.contract.tasks import Watch
from covenant.ledger.machine.commands import Cancel, Continue
from covenant.ledger.machine.peer_commands import DelegationChanges, PeerMessage, SendToPeer
from covenant.model.content import Content, File, Text
from covenant.model.errors import Conflict, NotFound
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import ACCEPTED, CANCELLING, Delegation, DelegationKey
from covenant.model.peers.delegation_messages import StatusReport
from covenant.model.sanitizer import blocks_named_safely, unreserved_parts
from covenant.model.task_event import PROGRESS, MessageUpdate, Started, StatusUpdate, Step
from covenant.model.task_view import TaskState, TaskViewBuilder
from covenant.peers.message_redaction import HEAVY_CHARS, log_findings, outgoing, redact_aside
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.provider.result_builder import (
    INPUT_REQUIRED,
    BuiltResult,
    FinishedWork,
    TranscriptBuilder,
    below,
    build_result,
    usage_of,
)
from covenant.seal.proofs import line_salt
from covenant.wire import peers as wire

PAUSE_S: Final = 0.25
"""Between two status messages that say something new."""
FIRST_S: Final = 0.05
SHORTEST_S: Final = 0.001
ASKS_BACK: Final = "it asks something back, and the peer cannot answer questions"
HELD: Final = "the agent was lost while it worked on this; an operator decides how it goes on"

log = logging.getLogger(__name__)


class TaskReporter(PeerService):
    def __init__(
        self, context: PeerContext, key: DelegationKey, used: Callable[[TaskId], Mapping[str, Any] | None]
    ) -> None:
        super().__init__(context)
        self._used_by = used
        self._key = key
        self._task_id: TaskId | None = None
        self._folder = TaskViewBuilder()
        self._transcriber = TranscriptBuilder()
        self._started = False
        self._message: str | None = None
        """All of it: it is searched for secrets before it is cut."""
        self._progress: float | None = None
        self._news = False
        """Something was said that the peer was not told."""
        self._question: str | None = None
        self._asked: tuple[int, tuple[Content, ...]] = (0, ())
        """Which question it is, and all of it: the generation of the update that asks, and its parts."""
        # Work that ends at once is told by its result alone.
        self._told_s = asyncio.get_running_loop().time() - PAUSE_S + FIRST_S

    async def run(self) -> None:
        delegation = await self._ledger.delegation(self._key)
        if delegation is None or delegation.ended:
            return
        self._task_id = delegation.task_id
        if delegation.state is CANCELLING:
            # Asked before the daemon stopped, and perhaps not done.
            await self._cancel(delegation.task_id, "cancelled by the peer")
        if delegation.answer is not None:
            await self.take_answer(delegation)
        while not self._folder.state.terminal:
            with self._ledger.watch(delegation.task_id) as watch:
                await self._read(delegation.task_id)
                await self._follow(delegation, watch)
        await self._conclude()

    async def _follow(self, delegation: Delegation, watch: Watch) -> None:
        """Until it has ended, or more was said than could be kept for us."""
        interval_s = max(PAUSE_S, delegation.status_interval_ms / 1000)
        while not watch.cut and not self._folder.state.terminal:
            if self._folder.state.waits and not self._can_ask():
                await self._refuse_question(delegation)
            elif self._due_s(interval_s) <= 0:
                await self._report()
            for step in await watch.next(max(SHORTEST_S, self._due_s(interval_s))):
                self._take(step)

    def _due_s(self, interval_s: float) -> float:
        pause_s = PAUSE_S if self._news else interval_s
        return pause_s - (asyncio.get_running_loop().time() - self._told_s)

    async def _now(self) -> Delegation | None:
        """By its task: a peer can go by another identity while its work is done."""
        return await self._ledger.delegation_of(self._task_id) if self._task_id is not None else None

    async def _read(self, task_id: TaskId) -> None:
        while True:
            steps = await self._ledger.steps(task_id, self._folder.generation, PAGE)
            for step in steps:
                self._take(step)
            if len(steps) < PAGE:
                return

    def _take(self, step: Step) -> None:
        if step.generation <= self._folder.generation:
            return
        self._folder.add(step)
        self._transcriber.add(step)
        what = step.what
        if isinstance(what, Started):
            self._started = self._news = True
        elif isinstance(what, StatusUpdate):
            text = text_of(what.parts) or what.text
            if self._folder.state.waits:
                self._question, self._asked = text, (step.generation, what.parts)
                self._news = True
            elif text:
                self._message, self._news = text, True
            progress = (what.metadata or {}).get(PROGRESS)
            if isinstance(progress, int | float) and not isinstance(progress, bool) and 0 <= progress <= 1:
                self._progress, self._news = float(progress), True
        elif isinstance(what, MessageUpdate) and what.role != "user" and (text := text_of(what.parts)):
            self._message, self._news = text, True

    def _can_ask(self) -> bool:
        peer = self._ledger.peer(self._key.peer)
        asks = self._folder.state is TaskState.INPUT_REQUIRED
        return asks and peer is not None and peer.keys is not None and peer.keys.has_questions

    async def take_answer(self, delegation: Delegation) -> None:
        """Hand the peer's answer to its task, once however often this is done, and then forget it."""
        answer = delegation.answer
        assert answer is not None
        message_id = f"{delegation.task_id}.{answer.question}"
        parts = (*((Text(answer.text),) if answer.text else ()), *blocks_named_safely(unreserved_parts(answer.parts)))
        message = MessageUpdate(role="user", parts=parts, message_id=message_id)
        with suppress(NotFound, Conflict):  # it has ended meanwhile
            await self._ledger.commit(
                Continue(task_id=delegation.task_id, message=message, message_id=message_id, by=self._us)
            )
        await self._ledger.commit(SendToPeer(key=delegation.key, changes=DelegationChanges(answer=None)))

    async def _refuse_question(self, delegation: Delegation) -> None:
        """A delegation cannot be answered: the task is canceled, and the delegation keeps why."""
        await self._ledger.commit(SendToPeer(key=delegation.key, changes=DelegationChanges(code=INPUT_REQUIRED)))
        await self._cancel(delegation.task_id, ASKS_BACK)

    async def _cancel(self, task_id: TaskId, reason: str) -> None:
        with suppress(NotFound):
            await self._ledger.commit(Cancel(task_id=task_id, by=self._us, reason=reason))

    # What is said

    async def _report(self) -> None:
        delegation = await self._now()
        self._news, self._told_s = False, asyncio.get_running_loop().time()
        if delegation is None or delegation.ended or delegation.delegation_id is None:
            return
        entry = await self._ledger.entry(delegation.task_id)
        held = entry is not None and entry.holder_lost(self._ledger.alive)
        used = self._used_by(delegation.task_id)
        made = StatusReport(
            offer_id=delegation.offer_id,
            delegation_id=delegation.delegation_id,
            seq=delegation.status_seq + 1,
            status="running" if self._started else "pending",
            progress=self._progress,
            message=HELD if held else self._message,
            token_usage=usage_of(used) if used else delegation.usage,
        )
        if self._folder.state.waits:
            number, asked = self._asked
            parts = tuple(part for part in asked if not isinstance(part, File))
            rest = () if text_of(parts) == self._question and all(type(each) is Text for each in parts) else parts
            made = msgspec.structs.replace(
                made, status="input_required", message=self._question, question=number, parts=rest
            )
        cleared = await redact_aside(made, self._settings.redaction, self._key)
        report = cleared.message
        told = SendToPeer(
            key=delegation.key,
            happenings=("start", "status") if self._started and delegation.state is ACCEPTED else ("status",),
            changes=DelegationChanges(
                status_seq=report.seq,
                usage=report.token_usage,
                progress=report.progress,
                message=report.message,
                redacted=delegation.redacted + cleared.found,
            ),
            # What took the place of words that are on their way would be taken for delivered with them.
            said=(outgoing(report, latest=self._in_flight(delegation.key) < delegation.said),),
        )
        # A cancel may have come in between: then the next one says so.
        with suppress(Conflict):
            await self._ledger.commit(told)

    async def _conclude(self) -> None:
        delegation = await self._now()
        if delegation is None or delegation.ended:
            return
        conclusion = await self._concluded(delegation)
        log_findings(self._key, conclusion.findings)
        result = conclusion.result
        changes = DelegationChanges(
            usage=result.token_usage,
            code=result.error_code,
            reason=result.error[:500] if result.error is not None else None,
            redacted=delegation.redacted + sum(each.count for each in conclusion.findings),
            proof=result.proof,
        )
        last = PeerMessage(typ=wire.type_of(result), body=msgspec.Raw(conclusion.body))
        try:
            await self._ledger.commit(
                SendToPeer(key=delegation.key, happenings=(f"result_{result.status}",), changes=changes, said=(last,))
            )
        except Conflict:
            now = await self._now()
            if now is not None and not now.ended:
                raise

    async def tell_again(self, delegation: Delegation, accept: PeerMessage) -> None:
        """What came of work that has ended, with its offer, which is not kept."""
        await self._read(delegation.task_id)
        built = await self._concluded(delegation)
        last = PeerMessage(typ=wire.type_of(built.result), body=msgspec.Raw(built.body))
        await self._ledger.commit(SendToPeer(key=delegation.key, said=(accept, last)))

    async def _concluded(self, delegation: Delegation) -> BuiltResult:
        view = self._folder.view()
        assert view is not None, "what has ended has begun"
        if self._context.files is not None:
            view = await self._context.files.portable_view(view)
        delegation_id = delegation.delegation_id or delegation.task_id
        asked = self._question if delegation.code == INPUT_REQUIRED else None
        lines = self._transcriber.entries(lambda seq: line_salt(self._keyring.salt_key, delegation_id, seq))
        tree = await read_tree(self._ledger, delegation.task_id, None)
        work = FinishedWork(delegation, view, lines, below(tree), asked)
        settings, now_ms = self._settings, self._ledger.now_ms()
        if sum(len(line.content) + len(line.tool_result or "") for line in lines) < HEAVY_CHARS and not _large(work):
            return build_result(work, self._keyring.private_key, settings, now_ms)
        return await asyncio.to_thread(build_result, work, self._keyring.private_key, settings, now_ms)


def _large(work: FinishedWork) -> bool:
    return bool(work.view.artifacts) and len(msgspec.json.encode(work.view.artifacts)) >= HEAVY_CHARS
