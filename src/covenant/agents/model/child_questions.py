"""Approval questions of agents that a model has called. A person answers them, never the model.

A call whose agent waits for an approval is deferred, and the caller's task is parked with that agent's question. The
person's answer to the caller is passed on to the agent; an answer to the called agent's own task ends the wait, too
(`signal_caller`). The call's result is then a durable step, and the model reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from covenant.agents.runtime.agent_calls import Answer
from covenant.agents.runtime.job import Job
from covenant.exchange.delegation import answered_signal
from covenant.model.ids import TaskId
from covenant.model.question import QUESTION_CHARS_MAX, PersonDecision, Question


class ChildQuestion(msgspec.Struct, frozen=True):
    """A called agent's question: the agent's task, and the question's id in that task if it has one."""

    agent: str
    task_id: TaskId
    text: str
    question_id: str | None = None


class ChildResult(msgspec.Struct, frozen=True):
    agent: str
    text: str
    ok: bool


class ChildQuestionsRaised(Exception):
    """Called agents wait for a person. `told` has the answer of each call of a tool use; None if it waits."""

    def __init__(self, questions: Sequence[ChildQuestion], told: Sequence[str | None] = (None,)) -> None:
        super().__init__("; ".join(f"{each.agent} waits for a person" for each in questions))
        self.questions = tuple(questions)
        self.told = tuple(told)

    @property
    def metadata(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins({"children": self.questions, "told": self.told})
        return plain


def question_of(agent: str, answer: Answer) -> ChildQuestion:
    return ChildQuestion(agent, answer.task_id, answer.text, answer.question_id)


async def ask_person(job: Job, child: ChildQuestion, result_of: Callable[[str, Answer], ChildResult]) -> ChildResult:
    """Asks a person until the called agent waits for no approval. `result_of` turns its answer into a result."""
    steps, rounds = job.steps, 0
    while True:
        rounds += 1
        about = {"agent": child.agent, "task_id": child.task_id, "question_id": child.question_id}
        text = f"{child.agent} asks: {child.text}"[:QUESTION_CHARS_MAX]
        question = Question(kind="approval", text=text, tool="agent", arguments=about)
        reply = await steps.ask(question, None, signal=answered_signal(child.task_id))
        step = await steps.begin(f"answer of {child.task_id} {rounds}")
        kept = step.found.result if step.found is not None else None
        if kept is None:
            try:
                decision = None
                if reply:
                    decision = PersonDecision(approved=reply["approved"], reason=reply["reason"], id=child.question_id)
                answer = await job.calls.pass_on(child.task_id, decision, str(rounds))
                more = question_of(child.agent, answer) if answer.asks_approval else None
                kept = {"more": more} if more is not None else {"result": result_of(child.agent, answer)}
                kept = await steps.end(step, kept)
            finally:
                steps.give_up(step)
        if "result" in kept:
            return msgspec.convert(kept["result"], ChildResult)
        child = msgspec.convert(kept["more"], ChildQuestion)
