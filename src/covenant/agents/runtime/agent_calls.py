"""Calls: what an agent at work asks of other agents, and what they answer.

Each call is a task of its own in the ledger, a child of the task at hand (see `exchange.delegation`). Its id follows
from the turn, the agent, the words and how often they were said before, or from the author's `key`: an attempt that
begins anew finds the children of the one before it. A call that is canceled, or whose time is over, cancels its child.
A daemon that stops leaves children at work.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from covenant.exchange.delegation import Callee, DelegatedTask, Delegations, call_id, digest_of, target_of
from covenant.model.content import Content
from covenant.model.errors import Conflict, Invalid, OverLimit, Refusal
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import budget_of, with_budget
from covenant.model.question import asks_approval
from covenant.model.task import DELEGATION, Result, Task
from covenant.model.task_view import Artifact, TaskState, TaskView
from covenant.model.usage import tokens_of, usage_in
from covenant.outbound.remote.remote_task import Sendable, answer_text, parts_of
from covenant.wire.validation import checked

if TYPE_CHECKING:
    from covenant.agents.runtime.job import Job

INVOCATION_LIMIT: Final = "INVOCATION_LIMIT"
UNIQUE_AGENT_LIMIT: Final = "UNIQUE_AGENT_LIMIT"
COOLDOWN: Final = "COOLDOWN"
REMOTE_FAILURE: Final = "remote_failure"
"""In a result's metadata: a `RemoteFailure`."""


class CallLimit(OverLimit):
    """This task may not call (now). `reason` is INVOCATION_LIMIT, UNIQUE_AGENT_LIMIT or COOLDOWN."""

    def __init__(self, reason: str, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(reason.lower(), f"{reason}: {message}", retry_after_ms=retry_after_ms)
        self.reason = reason


class RemoteFailure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why an agent elsewhere was not asked, or did not take the message."""

    code: str
    message: str
    """What the remote said, where it said something."""
    rpc_code: int | None = None
    status: int | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a call. `state` says how: `completed`, or `failed`, `canceled`, `rejected`, or `input-required`."""

    text: str
    """What was said: the message at the end, or what was made where that is the answer; or what went wrong."""
    parts: tuple[Content, ...]
    artifacts: tuple[Artifact, ...]
    state: TaskState
    task_id: TaskId
    usage: dict[str, float]
    """What it took, with all that it delegated in turn."""
    remote_failure: RemoteFailure | None = None
    """Set if the callee is elsewhere and could not be asked."""
    asks_approval: bool = False
    """It waits for a person to approve or deny something."""

    @property
    def ok(self) -> bool:
        return self.state is TaskState.COMPLETED

    @property
    def waits(self) -> bool:
        """It asks something: `turn.answer` it, or pass the question on with `turn.need_input`."""
        return self.state.waits

    @property
    def tokens(self) -> float:
        return tokens_of(self.usage)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One of several calls. A tuple of agent and words is one too."""

    agent: Any
    what: Any
    timeout_ms: int | None = None
    key: str | None = None
    idempotent: bool | None = None


Calling = Call | tuple[Any, Sendable]
_CALL_TYPES: Final = {"what": Sendable, "timeout_ms": int | None, "key": str | None, "idempotent": bool | None}


class NotEnough(Conflict):
    """Fewer have completed than were asked for. `answers` are those that came, of whatever kind."""

    def __init__(self, wanted: int, answers: Sequence[Answer]) -> None:
        done = sum(answer.ok for answer in answers)
        why = "; ".join(f"{answer.state}: {answer.text[:200]}" for answer in answers if not answer.ok)
        super().__init__("not_enough_answers", f"{wanted} were to complete, and {done} did ({why})")
        self.answers = tuple(answers)


class TurnCalls(Protocol):
    """`AgentCalls`, or the calls of an isolated program."""

    async def one(self, call: Call) -> Answer: ...
    async def all(self, calls: Sequence[Calling]) -> tuple[Answer, ...]: ...
    async def quorum(self, wanted: int, calls: Sequence[Calling]) -> tuple[Answer, ...]: ...
    async def answer(self, child: Answer | str, what: Sendable) -> Answer: ...


class AgentCalls:
    def __init__(self, job: Job, delegations: Delegations) -> None:
        self._job = job
        self._delegations = delegations
        self._said: Counter[TaskId] = Counter()
        self._made: dict[TaskId, str | None] = {}
        """The children of this task, and who it is elsewhere that they are for."""
        self._last_ms: int | None = None
        """When an agent elsewhere was called last."""
        self._charged: set[TaskId] = set()
        self._recalled: asyncio.Task[None] | None = None

    async def one(self, call: Call) -> Answer:
        (asked,) = await self._prepare((call,))
        async with self._job.slot.lent():
            return await self._perform(asked)

    async def all(self, calls: Sequence[Calling]) -> tuple[Answer, ...]:
        if not calls:
            return ()
        asked = await self._prepare(calls)
        async with self._job.slot.lent():
            answers = await self._gather(asked, None)
        return tuple(answers[place] for place in range(len(calls)))

    async def quorum(self, wanted: int, calls: Sequence[Calling]) -> tuple[Answer, ...]:
        """The first `wanted` that complete, as they come; the others are canceled. Raises NotEnough."""
        if not 1 <= checked("count", wanted, int) <= len(calls):
            raise Invalid("invalid_quorum", f"a quorum of {wanted} needs as many calls, and there are {len(calls)}")
        asked = await self._prepare(calls)
        async with self._job.slot.lent():
            answers = tuple((await self._gather(asked, wanted)).values())
        done = tuple(answer for answer in answers if answer.ok)[:wanted]
        if len(done) < wanted:
            raise NotEnough(wanted, answers)
        return done

    async def answer(self, child: Answer | str, what: Sendable) -> Answer:
        """The next message to a child that waits for one."""
        child_id = TaskId(checked("call", child.task_id if isinstance(child, Answer) else child, str))
        parts, job = parts_of(checked("what", what, Sendable)), self._job
        base = call_id(job.task.id, str(job.leased.turn), "answer", child_id, digest_of(parts))
        self._said[base] += 1
        message_id = call_id(base, str(self._said[base]))
        async with job.slot.lent():
            return self._answered(await self._delegations.answer(child_id, job.task, parts, message_id))

    async def _prepare(self, calls: Sequence[Calling]) -> list[DelegatedTask]:
        """Refuses what cannot be asked before any call is made."""
        if self._recalled is None:
            self._recalled = asyncio.ensure_future(self._recall())
        await asyncio.shield(self._recalled)
        found: list[DelegatedTask] = []
        callees: dict[TaskId, Callee] = {}
        for call in calls:
            if isinstance(call, tuple):
                agent, what = call
                call = Call(agent=agent, what=what)  # noqa: PLW2901
            asked, callee = await self._asked(call)
            found.append(asked)
            callees[asked.task.id] = callee
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
            msgspec.structs.replace(asked, task=with_budget(asked.task, share)) if asked.task.id in new else asked
            for asked in found
        ]

    async def _asked(self, call: Call) -> tuple[DelegatedTask, Callee]:
        job, delegations = self._job, self._delegations
        name = checked("agent", getattr(call.agent, "name", call.agent), str)
        for field, kind in _CALL_TYPES.items():
            checked(field, getattr(call, field), kind)
        callee = delegations.callee(job.holder, name)
        parts = parts_of(call.what)
        if call.key is not None:
            task_id = call_id(job.task.id, "key", call.key)
        else:
            base = call_id(job.task.id, str(job.leased.turn), callee.name, digest_of(parts))
            self._said[base] += 1
            task_id = call_id(base, str(self._said[base]))
        until_ms = await delegations.until_ms(job.task, call.timeout_ms, job.left_ms)
        asked = delegations.delegated(
            job.task, job.holder, callee, parts, task_id=task_id, until_ms=until_ms, idempotent=call.idempotent
        )
        return asked, callee

    def _admit(self, new: dict[TaskId, Callee]) -> None:
        limits, now_ms = self._delegations.limits, self._delegations.ledger.clock.monotonic_ms()
        if len(self._made) + len(new) > limits.children_max:
            raise CallLimit(INVOCATION_LIMIT, f"this task may make {limits.children_max} calls, and has made them")
        elsewhere = {task_id: callee.name for task_id, callee in new.items() if callee.elsewhere}
        if elsewhere:
            called = [name for name in self._made.values() if name is not None]
            if len(called) + len(elsewhere) > limits.calls_max:
                raise CallLimit(INVOCATION_LIMIT, f"this task may call agents elsewhere {limits.calls_max} times")
            if len({*called, *elsewhere.values()}) > limits.agents_max:
                raise CallLimit(
                    UNIQUE_AGENT_LIMIT, f"this task may call {limits.agents_max} different agents elsewhere"
                )
            # Peers have limits of their own, by which they say when to come back.
            paced = any(callee.remote is not None and not callee.remote.of_peer for callee in new.values())
            wait_ms = (self._last_ms or 0) + limits.cooldown_ms - now_ms
            if paced and self._last_ms is not None and wait_ms > 0:
                raise CallLimit(
                    COOLDOWN,
                    f"this task called an agent elsewhere just now; it may again in {wait_ms} ms",
                    retry_after_ms=wait_ms,
                )
            if paced:
                self._last_ms = now_ms
        for task_id in new:
            self._made[task_id] = elsewhere.get(task_id)

    async def _recall(self) -> None:
        """Count what earlier turns and attempts have called: the limits are the task's."""
        job = self._job
        if job.leased.turn == 1 and job.leased.lease.attempt == 1:
            return
        clock = self._delegations.ledger.clock
        tree = await self._delegations.ledger.tree(job.task.id, None)
        for child in tree.children:
            if child.task is None or child.task.origin != DELEGATION:
                continue
            if job.leased.turn > 1 and child.result_status is not None:
                self._charged.add(child.task_id)  # by an earlier turn, whose usage counts on
            name = _elsewhere(child.task)
            self._made[child.task_id] = name
            if job.spending.budget is not None and child.result_status is None:
                target = target_of(child.task)
                share = target.budget if target is not None and target.of_peer else budget_of(child.task)
                job.spending.budget.reserved[child.task_id] = share or 0
            if name is not None:
                made_ms = clock.monotonic_ms() - clock.age_ms(child.created_at_ms or 0)
                self._last_ms = made_ms if self._last_ms is None else max(self._last_ms, made_ms)

    async def _perform(self, asked: DelegatedTask) -> Answer:
        try:
            return self._answered(await self._delegations.perform(asked))
        except asyncio.CancelledError:
            if self._job.stopping is None and not self._job.over:
                # The author does not wait for it any more. Whoever stops the whole job says what becomes of its calls.
                await self._withdraw(asked.task)
            raise
        except Refusal:
            self._release(asked.task.id)
            raise

    async def _withdraw(self, task: Task) -> None:
        canceling = asyncio.ensure_future(self._delegations.cancel(task, "its caller does not wait for it any more"))
        with suppress(Refusal):
            while not canceling.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(canceling)
            self._charge(task.id, usage_of(canceling.result()))
        self._release(task.id)

    def _release(self, task_id: TaskId) -> None:
        """What it was given and did not use."""
        if self._job.spending.budget is not None:
            self._job.spending.budget.release(task_id)

    async def _gather(self, asked: Sequence[DelegatedTask], wanted: int | None) -> dict[int, Answer]:
        """By their place, as they come, until `wanted` have completed, or cannot any more. The rest is withdrawn."""

        def is_enough() -> bool:
            done = sum(answer.ok for answer in answers.values())
            return wanted is not None and (done >= wanted or done + len(pending) < wanted)

        places = {asyncio.ensure_future(self._perform(each)): place for place, each in enumerate(asked)}
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
        return Answer(
            text=answer_text(view.state, view.message, view.artifacts, view.history),
            parts=view.message.parts if view.message is not None else (),
            artifacts=view.artifacts,
            state=view.state,
            task_id=view.task.id,
            usage=usage,
            remote_failure=_remote_failure(view.result),
            asks_approval=view.state.waits and view.message is not None and asks_approval(view.message.metadata),
        )

    def _charge(self, task_id: TaskId, usage: dict[str, float]) -> None:
        """Once for each call, however often its answer is heard."""
        if task_id not in self._charged:
            self._charged.add(task_id)
            self._release(task_id)
            self._job.spend(usage, delegated=True)


def usage_of(result: Result | None) -> dict[str, float]:
    return usage_in(result.metadata) if result is not None else {}


def _remote_failure(result: Result | None) -> RemoteFailure | None:
    told = (result.metadata or {}).get(REMOTE_FAILURE) if result is not None else None
    return msgspec.convert(told, RemoteFailure) if told is not None else None


def _elsewhere(task: Task) -> str | None:
    """The callee's name, as `Callee.name` has it."""
    target = target_of(task)
    return None if target is None else task.recipient.pubkey + target.label
