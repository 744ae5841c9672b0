"""Runs of a model in one turn, over the questions that they put to a person.

A tool call that waits for a person (an approval, or a result that only a person knows) ends a run of pydantic-ai as
`DeferredToolRequests`. What was said so far becomes a durable step, each question another one, and the task is parked.
Whatever runs the turn again goes on from there: no answer of the model is asked for twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import msgspec
from pydantic_ai import AgentRunResult, DeferredToolRequests, DeferredToolResults, ToolDenied, messages

from covenant.agents.runtime import turn_output
from covenant.agents.runtime.job import Job
from covenant.agents.runtime.turn_steps import StepError
from covenant.model.question import QUESTION_CHARS_MAX, Question, QuestionKind

ASK_USER: Final = "ask_user"
"""The tool whose call is the question itself."""
CONVERSATION_BYTES_MAX: Final = 2 << 20
"""Of what was said to a model and by it, at the moment when a person is asked."""
QUESTIONS_MAX: Final = 16
"""Rounds of questions in one turn."""
ARGUMENTS_CHARS_MAX: Final = 4_000
_messages = messages.ModelMessagesTypeAdapter


class RunInput(NamedTuple):
    prompt: str | list[messages.UserContent] | None
    history: list[messages.ModelMessage]
    answers: DeferredToolResults | None = None


class _PutOff(msgspec.Struct, frozen=True):
    """A tool call that waits for a person: for an approval, or for its result."""

    kind: QuestionKind
    id: str
    tool: str
    arguments: dict[str, Any]

    @property
    def question(self) -> Question:
        asked = self.arguments.get("question")
        if self.kind == "input" and self.tool == ASK_USER and isinstance(asked, str):
            return Question(kind="input", text=asked[:QUESTION_CHARS_MAX] or "?")
        what = turn_output.written(self.arguments)
        what = what if len(what) <= ARGUMENTS_CHARS_MAX else f"{what[:ARGUMENTS_CHARS_MAX]}…"
        text = f"May I use {self.tool} with {what}? (approve, or deny: why)"
        if self.kind == "input":
            text = f"What is the result of {self.tool} with {what}?"
        return Question(kind=self.kind, text=text, tool=self.tool, arguments=self.arguments)


class ModelConversation:
    """Of one turn: a name for each of its runs."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rounds = 0

    async def hold(
        self,
        run: Callable[[RunInput], Awaitable[AgentRunResult[Any]]],
        prompt: str | list[messages.UserContent] | None,
        history: list[messages.ModelMessage],
    ) -> AgentRunResult[Any]:
        steps, asked = self._job.steps, RunInput(prompt, history)
        while True:
            self._rounds += 1
            step = await steps.begin(f"conversation {self._rounds}")
            kept = step.found.result if step.found is not None else None
            if kept is None:
                try:
                    result = await run(asked)
                    if not isinstance(result.output, DeferredToolRequests):
                        return result
                    if self._rounds > QUESTIONS_MAX:
                        raise StepError("too_many_questions", f"people were asked {QUESTIONS_MAX} times in one turn")
                    kept = await steps.end(step, _kept(result, result.output), bytes_max=CONVERSATION_BYTES_MAX)
                finally:
                    steps.give_up(step)
            history = _messages.validate_python(kept["messages"])
            asked = RunInput(None, history, await self._ask(msgspec.convert(kept["calls"], tuple[_PutOff, ...])))

    async def _ask(self, calls: tuple[_PutOff, ...]) -> DeferredToolResults:
        answers = DeferredToolResults()
        for call in calls:
            said = await self._job.steps.ask(call.question, None)
            if call.kind == "input":
                answers.calls[call.id] = said["text"]
            elif said["approved"]:
                answers.approvals[call.id] = True
            else:
                answers.approvals[call.id] = ToolDenied(f"A person denied this. {said['reason']}".strip())
        return answers


def _kept(result: AgentRunResult[Any], put_off: DeferredToolRequests) -> dict[str, Any]:
    calls = [
        {"kind": kind, "id": call.tool_call_id, "tool": call.tool_name, "arguments": call.args_as_dict()}
        for kind, found in (("approval", put_off.approvals), ("input", put_off.calls))
        for call in found
    ]
    return {"messages": _messages.dump_python(result.all_messages(), mode="json"), "calls": calls}
