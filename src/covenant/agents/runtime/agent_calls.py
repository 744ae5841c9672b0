"""Calls: an agent's requests to other agents during its turn, and their answers.

Each call is a task of its own in the ledger, a child of the task at hand (see `exchange.delegation`). Its id is derived
from the turn, the durable step that makes it, the agent, the text and how often it was sent there before, or from the
author's `key`: a further attempt finds the children of the one before it. A call that is canceled, or whose time is
over, cancels its child. A daemon that stops leaves children at work.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from covenant.agents.runtime.durable_step import finish
from covenant.exchange.delegation import Callee, DelegatedTask, Delegations, digest_of
from covenant.model.content import Content
from covenant.model.errors import Conflict, Invalid, OverLimit, Refusal
from covenant.model.ids import TaskId, derived_task_id
from covenant.model.peers.delegation import budget_of, with_budget
from covenant.model.question import PersonDecision, asks_approval, id_of_question
from covenant.model.task import DELEGATION, Result, Task, target_of
from covenant.model.task_event import StatusUpdate
from covenant.model.task_view import Artifact, TaskState, TaskView, answer_text
from covenant.model.usage import tokens_of, usage_in
from covenant.outbound.remote.remote_task import Sendable, parts_of
from covenant.wire.validation import checked

if TYPE_CHECKING:
    from covenant.agents.runtime.job import Job

INVOCATION_LIMIT: Final = "INVOCATION_LIMIT"
UNIQUE_AGENT_LIMIT: Final = "UNIQUE_AGENT_LIMIT"
COOLDOWN: Final = "COOLDOWN"
REMOTE_FAILURE: Final = "remote_failure"
"""Key in a result's metadata: a `RemoteFailure`."""
_CALL_TYPES: Final = {"what": Sendable, "timeout_ms": int | None, "key": str | None, "idempotent": bool | None}


class CallLimit(OverLimit):
    """This task may not call (now). `reason` is INVOCATION_LIMIT, UNIQUE_AGENT_LIMIT or COOLDOWN."""

    def __init__(self, reason: str, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(reason.lower(), f"{reason}: {message}", retry_after_ms=retry_after_ms)
        self.reason = reason
        self.detail = message


class RemoteFailure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a remote agent could not be called, or refused the message."""

    code: str
    message: str
    """The remote agent's own message, if it sent one."""
    rpc_code: int | None = None
    status: int | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a call. `state`: `completed`, `failed`, `canceled`, `rejected`, or a question (`waits`)."""

    text: str
    """The final message, or the artifacts' text if that is the answer; or the error."""
    parts: tuple[Content, ...]
    artifacts: tuple[Artifact, ...]
    state: TaskState
    task_id: TaskId
    usage: dict[str, float]
    """The call's usage, with all that it delegated in turn."""
    remote_failure: RemoteFailure | None = None
    """Set if the callee is remote and could not be called."""
    asks_approval: bool = False
    """Whether the callee waits for a person to approve or deny something."""
    question_id: str | None = None
    """The id of the callee's question, if it has one."""

    @property
    def ok(self) -> bool:
        return self.state is TaskState.COMPLETED

    @property
    def waits(self) -> bool:
        """The callee asks something: `turn.answer` it, or pass the question on with `turn.need_input`."""
        return self.state.waits

    @property
    def tokens(self) -> float:
        return tokens_of(self.usage)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One of several calls. A tuple of agent and text is one too."""

    agent: Any
    what: Any
    timeout_ms: int | None = None
    key: str | None = None
    idempotent: bool | None = None


Calling = Call | tuple[Any, Sendable]


class NotEnough(Conflict):
    """Fewer calls have completed than were needed. `answers` are all answers that came."""

    def __init__(self, wanted: int, answers: Sequence[Answer]) -> None:
        done = sum(answer.ok for answer in answers)
        why = "; ".join(f"{answer.state}: {answer.text[:200]}" for answer in answers if not answer.ok)
        super().__init__("not_enough_answers", f"{wanted} calls had to complete, and {done} did ({why})")
        self.answers = tuple(answers)


class TurnCalls(Protocol):
    """`AgentCalls`, or the calls of an isolated program. `step`: the name of the durable step that makes the call."""

    async def one(self, call: Call, *, step: str = "") -> Answer: ...
    async def all(self, calls: Sequence[Calling], *, step: str = "") -> tuple[Answer, ...]: ...
    async def quorum(self, wanted: int, calls: Sequence[Calling], *, step: str = "") -> tuple[Answer, ...]: ...
    async def answer(self, child: Answer | str, what: Sendable, *, step: str = "") -> Answer: ...


class AgentCalls:
    def __init__(self, job: Job, delegations: Delegations) -> None:
        self._job = job
        self._delegations = delegations
        self._sent: Counter[TaskId] = Counter()
        self._made: dict[TaskId, str | None] = {}
        """The children of this task, each with the name of its remote agent, if it has one."""
        self._last_ms: int | None = None
        """The time of the last call of a remote agent."""
        self._charged: set[TaskId] = set()
        self._recalled: asyncio.Task[None] | None = None

    async def one(self, call: Call, *, step: str = "") -> Answer:
        (delegated,) = await self._prepare((call,), step)
        async with self._job.slot.released():
            return await self._perform(delegated)

    async def all(self, calls: Sequence[Calling], *, step: str = "") -> tuple[Answer, ...]:
        if not calls:
            return ()
        delegated = await self._prepare(calls, step)
        async with self._job.slot.released():
            answers = await self._gather(delegated, None)
        return tuple(answers[place] for place in range(len(calls)))

    async def quorum(self, wanted: int, calls: Sequence[Calling], *, step: str = "") -> tuple[Answer, ...]:
        """The first `wanted` answers that complete; the other calls are canceled. Raises NotEnough."""
        if not 1 <= checked("count", wanted, int) <= len(calls):
            raise Invalid("invalid_quorum", f"a quorum of {wanted} needs as many calls; there are {len(calls)}")
        delegated = await self._prepare(calls, step)
        async with self._job.slot.released():
            answers = tuple((await self._gather(delegated, wanted)).values())
        done = tuple(answer for answer in answers if answer.ok)[:wanted]
        if len(done) < wanted:
            raise NotEnough(wanted, answers)
        return done

    async def answer(self, child: Answer | str, what: Sendable, *, step: str = "") -> Answer:
        """Sends the next message to a child that waits for one."""
        child_id = TaskId(checked("call", child.task_id if isinstance(child, Answer) else child, str))
        parts, job = parts_of(checked("what", what, Sendable)), self._job
        message_id = self._next_id(step, "answer", child_id, digest_of(parts))
        await job.ensure_running()
        async with job.slot.released():
            return self._answered(await self._delegations.answer(child_id, job.task, parts, message_id))

    def _next_id(self, step: str, *what: str) -> TaskId:
        """The id of a call or message. A replay does not do a step again, so calls are counted within their step."""
        base = derived_task_id(self._job.task.id, str(self._job.leased.turn), *what)
        base = derived_task_id(base, "step", step) if step else base
        self._sent[base] += 1
        return derived_task_id(base, str(self._sent[base]))

    async def pass_on(self, child_id: TaskId, decision: PersonDecision | None, place: str) -> Answer:
        """Sends a person's decision to a child that asks for it. None: the person has told the child directly."""
        job, message_id = self._job, derived_task_id(child_id, "decision", place)
        await job.ensure_running()
        async with job.slot.released():
            return self._answered(await self._delegations.pass_on(child_id, job.task, decision, message_id))

    async def _prepare(self, calls: Sequence[Calling], step: str) -> list[DelegatedTask]:
        """Prepares calls. Refuses all of them before any is made, if one is refused."""
        if self._recalled is None:
            self._recalled = asyncio.ensure_future(self._recall())
        await asyncio.shield(self._recalled)
        found: list[DelegatedTask] = []
        callees: dict[TaskId, Callee] = {}
        for call in calls:
            if isinstance(call, tuple):
                agent, what = call
                call = Call(agent=agent, what=what)  # noqa: PLW2901
            delegated, callee = await self._prepare_one(call, step)
            found.append(delegated)
            callees[delegated.task.id] = callee
        new = {task_id: callee for task_id, callee in callees.items() if task_id not in self._made}
        budget = self._job.spending.budget
        if budget is None or not new:
            self._admit(new)
            return found
        share = await budget.reserve(tuple(new))
        try:
            self._admit(new)
        except CallLimit:
            for task_id in new:
                budget.release(task_id)
            raise
        return [
            msgspec.structs.replace(delegated, task=with_budget(delegated.task, share))
            if delegated.task.id in new
            else delegated
            for delegated in found
        ]

    async def _prepare_one(self, call: Call, step: str) -> tuple[DelegatedTask, Callee]:
        job, delegations = self._job, self._delegations
        name = checked("agent", getattr(call.agent, "name", call.agent), str)
        for field, kind in _CALL_TYPES.items():
            checked(field, getattr(call, field), kind)
        callee = delegations.callee(job.holder, name)
        parts = parts_of(call.what)
        if call.key is not None:
            task_id = derived_task_id(job.task.id, "key", call.key)
        else:
            task_id = self._next_id(step, callee.name, digest_of(parts))
        until_ms = await delegations.until_ms(job.task, call.timeout_ms, job.left_ms)
        delegated = delegations.build(
            job.task, job.holder, callee, parts, task_id=task_id, until_ms=until_ms, idempotent=call.idempotent
        )
        return delegated, callee

    def _admit(self, new: dict[TaskId, Callee]) -> None:
        limits, now_ms = self._delegations.limits, self._delegations.ledger.clock.monotonic_ms()
        if len(self._made) + len(new) > limits.children_max:
            raise CallLimit(INVOCATION_LIMIT, f"this task has made all its {limits.children_max} calls")
        remote = {task_id: callee.name for task_id, callee in new.items() if callee.remote is not None}
        if remote:
            called = [name for name in self._made.values() if name is not None]
            if len(called) + len(remote) > limits.calls_max:
                raise CallLimit(INVOCATION_LIMIT, f"this task may call remote agents at most {limits.calls_max} times")
            if len({*called, *remote.values()}) > limits.agents_max:
                raise CallLimit(
                    UNIQUE_AGENT_LIMIT, f"this task may call at most {limits.agents_max} different remote agents"
                )
            # Peers have limits of their own, and say when to try again.
            paced = any(callee.remote is not None and not callee.remote.of_peer for callee in new.values())
            wait_ms = (self._last_ms or 0) + limits.cooldown_ms - now_ms
            if paced and self._last_ms is not None and wait_ms > 0:
                raise CallLimit(
                    COOLDOWN,
                    f"this task called a remote agent just now; it may call again in {wait_ms} ms",
                    retry_after_ms=wait_ms,
                )
            if paced:
                self._last_ms = now_ms
        for task_id, callee in new.items():
            self._made[task_id] = remote.get(task_id)
            if why := self._delegations.absence(callee):
                self._job.add_update(StatusUpdate(f"a call waits: {why}"))

    async def _recall(self) -> None:
        """Counts the calls of earlier turns and attempts: the limits are the task's."""
        job = self._job
        if job.leased.turn == 1 and job.leased.lease.attempt == 1:
            return
        clock = self._delegations.ledger.clock
        tree = await self._delegations.ledger.tree(job.task.id, None)
        for child in tree.children:
            if child.task is None or child.task.origin != DELEGATION:
                continue
            if job.leased.turn > 1 and child.result_status is not None:
                self._charged.add(child.task_id)  # charged by an earlier turn, whose usage still counts
            name = _remote_name(child.task)
            self._made[child.task_id] = name
            if job.spending.budget is not None and child.result_status is None:
                target = target_of(child.task)
                share = target.budget if target is not None and target.of_peer else budget_of(child.task)
                job.spending.budget.reserved[child.task_id] = share or 0
            if name is not None:
                made_ms = clock.monotonic_ms() - clock.age_ms(child.created_at_ms or 0)
                self._last_ms = made_ms if self._last_ms is None else max(self._last_ms, made_ms)

    async def _perform(self, delegated: DelegatedTask) -> Answer:
        await self._job.ensure_running()
        try:
            return self._answered(await self._delegations.perform(delegated))
        except asyncio.CancelledError:
            if self._job.stopping is None and not self._job.over:
                # Only this call was canceled. Calls of a job that stops go on, or end as orphans of its task.
                await self._withdraw(delegated.task)
            raise
        except Refusal:
            self._release(delegated.task.id)
            raise

    async def _withdraw(self, task: Task) -> None:
        with suppress(Refusal):
            ended, _ = await finish(self._delegations.cancel(task, "its caller no longer waits for it"))
            self._charge(task.id, usage_of(ended))
        self._release(task.id)

    def _release(self, task_id: TaskId) -> None:
        """Returns the unused part of the call's token share."""
        if self._job.spending.budget is not None:
            self._job.spending.budget.release(task_id)

    async def _gather(self, delegated: Sequence[DelegatedTask], wanted: int | None) -> dict[int, Answer]:
        """Answers by their place, until `wanted` have completed, or cannot. The remaining calls are withdrawn."""

        def is_enough() -> bool:
            done = sum(answer.ok for answer in answers.values())
            return wanted is not None and (done >= wanted or done + len(pending) < wanted)

        places = {asyncio.ensure_future(self._perform(each)): place for place, each in enumerate(delegated)}
        pending, answers = set(places), dict[int, Answer]()
        try:
            while pending and not is_enough():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for each in sorted(done, key=places.__getitem__):
                    answers[places[each]] = each.result()
            return answers
        finally:
            for each in pending:
                each.cancel()
            if pending:
                await asyncio.gather(*pending, return_exceptions=True)

    def _answered(self, view: TaskView) -> Answer:
        usage = usage_of(view.result)
        if view.state.terminal:
            self._charge(view.task.id, usage)
        metadata = view.message.metadata if view.state.waits and view.message is not None else None
        return Answer(
            text=answer_text(view.state, view.message, view.artifacts, view.history),
            parts=view.message.parts if view.message is not None else (),
            artifacts=view.artifacts,
            state=view.state,
            task_id=view.task.id,
            usage=usage,
            remote_failure=_remote_failure(view.result),
            asks_approval=asks_approval(metadata),
            question_id=id_of_question(metadata),
        )

    def _charge(self, task_id: TaskId, usage: dict[str, float]) -> None:
        """Charges the usage of a call once, however often its answer is read."""
        if task_id not in self._charged:
            self._charged.add(task_id)
            self._release(task_id)
            self._job.spend(usage, delegated=True)


def usage_of(result: Result | None) -> dict[str, float]:
    return usage_in(result.metadata) if result is not None else {}


def _remote_failure(result: Result | None) -> RemoteFailure | None:
    found = (result.metadata or {}).get(REMOTE_FAILURE) if result is not None else None
    return msgspec.convert(found, RemoteFailure) if found is not None else None


def _remote_name(task: Task) -> str | None:
    """The callee's name, as `Callee.name` has it; None for a local one."""
    target = target_of(task)
    return None if target is None else task.recipient.pubkey + target.label
