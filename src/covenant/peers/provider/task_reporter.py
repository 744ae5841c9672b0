"""Reports on one task to the peer that delegated it: status while it runs, then the result with its proof.

The agent's progress is sent as status; a newer status replaces one that is not on its way yet. A silent agent is
reported as running. While a task waits for input, each status repeats its question. If the requester cannot answer
questions, the task is canceled. All reports are made from the ledger, so the reporter of the next run says the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from covenant.exchange.tasks.builder import text_of
from covenant.exchange.tasks.reader import PAGE, read_tree
from covenant.ledger.machine.commands import Cancel, Continue
from covenant.ledger.machine.peer_commands import DelegationChanges, PeerMessage, SendToPeer
from covenant.ledger.watchers import TaskWatch
from covenant.model.content import Content, File, Text
from covenant.model.errors import Conflict, NotFound
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import ACCEPTED, CANCELLING, Delegation, DelegationKey
from covenant.model.peers.delegation_messages import STATUS_TREE_MAX, StatusReport, SubDelegation
from covenant.model.peers.instance import KeyPurpose
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
    build_result,
    sub_delegations_of,
    usage_of,
)
from covenant.seal.proofs import line_salt

PAUSE_S: Final = 0.25
"""The shortest time between two status messages that say something new."""
FIRST_S: Final = 0.05
SHORTEST_S: Final = 0.001
TREE_S: Final = 1.0
"""The shortest time between two looks at the tasks that this one has delegated."""
ASKS_BACK: Final = "it asks something back, and the peer cannot answer questions"
HELD: Final = "the agent was lost while it worked on this; an operator decides how it goes on"

log = logging.getLogger(__name__)


class TaskReporter(PeerService):
    def __init__(
        self,
        context: PeerContext,
        key: DelegationKey,
        used: Callable[[TaskId], Mapping[str, Any] | None],
        task_id: TaskId | None = None,
    ) -> None:
        super().__init__(context)
        self._usage_of_running = used
        self._key = key
        self.task_id = task_id
        """None until it is known."""
        self._view_builder = TaskViewBuilder()
        self._transcript_builder = TranscriptBuilder()
        self._started = False
        self._message: str | None = None
        """Uncut, since it is searched for secrets before it is cut."""
        self._progress: float | None = None
        self._unreported = False
        """Whether there is progress that was not sent to the peer yet."""
        self._question: str | None = None
        self._question_parts: tuple[int, tuple[Content, ...]] = (0, ())
        """The generation of the update that asks, which numbers the question, and the update's parts."""
        self._tree: tuple[SubDelegation, ...] = ()
        self._tree_s = -TREE_S
        # The first status waits a little: for a task that ends at once, the result is enough.
        self._reported_s = asyncio.get_running_loop().time() - PAUSE_S + FIRST_S

    async def run(self) -> None:
        delegation = await self._delegation()
        if delegation is None or delegation.ended:
            return
        self.task_id = delegation.task_id
        if delegation.state is CANCELLING:
            # An earlier run was asked to cancel, and perhaps did not get to it.
            await self._cancel(delegation.task_id, "cancelled by the peer")
        if delegation.answer is not None:
            await self.take_answer(delegation)
        while not self._view_builder.state.terminal:
            with self._ledger.watch(delegation.task_id) as watch:
                await self._read(delegation.task_id)
                await self._follow(delegation, watch)
        await self._finish()

    async def _follow(self, delegation: Delegation, watch: TaskWatch) -> None:
        """Reports until the task has ended, or until the watch was cut because it fell too far behind."""
        interval_s = max(PAUSE_S, delegation.status_interval_ms / 1000)
        while not watch.cut and not self._view_builder.state.terminal:
            if self._view_builder.state.waits and not await self._can_ask():
                await self._refuse_question(delegation.task_id)
            elif self._due_s(interval_s) <= 0:
                await self._report()
            for step in await watch.next(max(SHORTEST_S, self._due_s(interval_s))):
                self._add_step(step)

    def _due_s(self, interval_s: float) -> float:
        pause_s = PAUSE_S if self._unreported else interval_s
        return pause_s - (asyncio.get_running_loop().time() - self._reported_s)

    async def _delegation(self) -> Delegation | None:
        """The delegation, found by its task: the peer may have another identity by now."""
        if self.task_id is None:
            return await self._ledger.delegation(self._key)
        return await self._ledger.delegation_of(self.task_id)

    async def _read(self, task_id: TaskId) -> None:
        while True:
            steps = await self._ledger.steps(task_id, self._view_builder.generation, PAGE)
            for step in steps:
                self._add_step(step)
            if len(steps) < PAGE:
                return

    def _add_step(self, step: Step) -> None:
        if step.generation <= self._view_builder.generation:
            return
        self._view_builder.add(step)
        self._transcript_builder.add(step)
        what = step.what
        if isinstance(what, Started):
            self._started = self._unreported = True
        elif isinstance(what, StatusUpdate):
            text = text_of(what.parts) or what.text
            if self._view_builder.state.waits:
                self._question, self._question_parts = text, (step.generation, what.parts)
                self._unreported = True
            elif text:
                self._message, self._unreported = text, True
            progress = (what.metadata or {}).get(PROGRESS)
            if isinstance(progress, int | float) and not isinstance(progress, bool) and 0 <= progress <= 1:
                self._progress, self._unreported = float(progress), True
        elif isinstance(what, MessageUpdate) and what.role != "user" and (text := text_of(what.parts)):
            self._message, self._unreported = text, True

    async def _can_ask(self) -> bool:
        delegation = await self._delegation()
        peer = self._ledger.peer(delegation.peer) if delegation is not None else None
        asks = self._view_builder.state is TaskState.INPUT_REQUIRED
        return asks and peer is not None and peer.keys is not None and peer.keys.has_questions

    async def take_answer(self, delegation: Delegation) -> None:
        """Hands the peer's answer to the task, and then drops it from the record. A repeat reaches the task once."""
        answer = delegation.answer
        assert answer is not None
        message_id = f"{delegation.task_id}.{answer.question}"
        parts = (*((Text(answer.text),) if answer.text else ()), *blocks_named_safely(unreserved_parts(answer.parts)))
        message = MessageUpdate(role="user", parts=parts, message_id=message_id)
        with suppress(NotFound, Conflict):  # the task has ended meanwhile
            await self._ledger.commit(
                Continue(task_id=delegation.task_id, message=message, message_id=message_id, by=self._us)
            )
        await self._ledger.commit(SendToPeer(key=delegation.key, changes=DelegationChanges(answer=None)))

    async def _refuse_question(self, task_id: TaskId) -> None:
        """The requester cannot answer: the task is canceled, and the delegation notes why."""
        if (delegation := await self._delegation()) is not None:
            await self._ledger.commit(SendToPeer(key=delegation.key, changes=DelegationChanges(code=INPUT_REQUIRED)))
        await self._cancel(task_id, ASKS_BACK)

    async def _cancel(self, task_id: TaskId, reason: str) -> None:
        with suppress(NotFound):
            await self._ledger.commit(Cancel(task_id=task_id, by=self._us, reason=reason))

    # Messages to the requester

    async def _report(self) -> None:
        delegation = await self._delegation()
        self._unreported, self._reported_s = False, asyncio.get_running_loop().time()
        if delegation is None or delegation.ended or delegation.delegation_id is None:
            return
        entry = await self._ledger.entry(delegation.task_id)
        held = entry is not None and entry.holder_lost(self._ledger.alive)
        used = self._usage_of_running(delegation.task_id)
        report_made = StatusReport(
            offer_id=delegation.offer_id,
            delegation_id=delegation.delegation_id,
            seq=delegation.status_seq + 1,
            status="running" if self._started else "pending",
            progress=self._progress,
            message=HELD if held else self._message,
            token_usage=usage_of(used) if used else delegation.usage,
            sub_delegations=await self._sub_delegations(delegation.task_id) or msgspec.UNSET,
        )
        if self._view_builder.state.waits:
            number, question_parts = self._question_parts
            parts = tuple(part for part in question_parts if not isinstance(part, File))
            rest = () if text_of(parts) == self._question and all(type(each) is Text for each in parts) else parts
            report_made = msgspec.structs.replace(
                report_made, status="input_required", message=self._question, question=number, parts=rest
            )
        cleared = await redact_aside(report_made, self._settings.redaction, self._key)
        report = cleared.message
        command = SendToPeer(
            key=delegation.key,
            transitions=("start", "status") if self._started and delegation.state is ACCEPTED else ("status",),
            changes=DelegationChanges(
                status_seq=report.seq,
                usage=report.token_usage,
                progress=report.progress,
                message=report.message,
                redacted=delegation.redacted + cleared.found,
            ),
            # A message on its way must not be replaced: its acknowledgement would count for the newer message, too.
            messages=(outgoing(report, latest=self._in_flight(delegation.key) < delegation.sent_seq),),
        )
        # A cancel, or another identity of the peer, may have come in between; then the next report says so.
        with suppress(Conflict, NotFound):
            await self._ledger.commit(command)

    async def _sub_delegations(self, task_id: TaskId) -> tuple[SubDelegation, ...]:
        """The tasks that this one has delegated, read at most once in `TREE_S`."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._tree_s + TREE_S:
            tree = await read_tree(self._ledger, task_id, None)
            self._tree_s, self._tree = now_s, sub_delegations_of(tree, STATUS_TREE_MAX)
        return self._tree

    async def _finish(self) -> None:
        """Sends the result. A restored requester may have made its offer again, or may have another identity by now:
        then the proof is built again, for the offer and the identity that the requester has now.
        """
        while (delegation := await self._delegation()) is not None and not delegation.ended:
            try:
                await self._send_result(delegation)
            except (Conflict, NotFound) as refusal:
                present = await self._delegation()
                changed = refusal.code == "offer_changed" or (present is not None and present.key != delegation.key)
                if present is not None and not present.ended and not changed:
                    raise

    async def _send_result(self, delegation: Delegation) -> None:
        built = await self._build_result(delegation)
        log_findings(self._key, built.findings)
        result = built.result
        changes = DelegationChanges(
            usage=result.token_usage,
            code=result.error_code,
            reason=result.error[:500] if result.error is not None else None,
            redacted=delegation.redacted + sum(each.count for each in built.findings),
            proof=result.proof,
        )
        await self._ledger.commit(
            SendToPeer(
                key=delegation.key,
                transitions=(f"result_{result.status}",),
                changes=changes,
                messages=(built.message,),
                about=delegation.offer,
            )
        )

    async def repeat_result(self, delegation: Delegation, accept: PeerMessage) -> None:
        """Sends the result of a task that has ended once more. `delegation` has the offer, which the ledger dropped."""
        await self._read(delegation.task_id)
        built = await self._build_result(delegation)
        await self._ledger.commit(SendToPeer(key=delegation.key, messages=(accept, built.message)))

    async def _build_result(self, delegation: Delegation) -> BuiltResult:
        view = self._view_builder.view()
        assert view is not None, "what has ended has begun"
        if self._context.files is not None:
            view = await self._context.files.portable_view(view)
        delegation_id = delegation.delegation_id or delegation.task_id
        question = self._question if delegation.code == INPUT_REQUIRED else None
        lines = self._transcript_builder.entries(partial(line_salt, self._keyring.salt_key, delegation_id))
        tree = await read_tree(self._ledger, delegation.task_id, None)
        work = FinishedWork(delegation, view, lines, sub_delegations_of(tree), question)
        settings, now_ms = self._settings, self._ledger.now_ms()
        peer = self._ledger.peer(delegation.peer)
        key = self._keyring.signing(KeyPurpose.PROOFS, peer.keys if peer is not None else None, now_ms)
        if sum(len(line.content) + len(line.tool_result or "") for line in lines) < HEAVY_CHARS and not _large(work):
            return build_result(work, key, settings, now_ms)
        return await asyncio.to_thread(build_result, work, key, settings, now_ms)


def _large(work: FinishedWork) -> bool:
    return bool(work.view.artifacts) and len(msgspec.json.encode(work.view.artifacts)) >= HEAVY_CHARS
