"""Runs a model in one turn, across its questions to a person.

A tool call that waits for a person (an approval, or a result that only a person knows) ends a run of pydantic-ai with
`DeferredToolRequests`. The messages so far become a durable step, each question another one, and the task is parked. A
later attempt at the turn goes on from there: the model is never asked for the same answer twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import msgspec
from pydantic_ai import AgentRunResult, DeferredToolRequests, DeferredToolResults, ToolDenied, messages

from covenant.agents.model.child_questions import ChildQuestion, ask_person
from covenant.agents.model.tool_specs import label
from covenant.agents.model.toolbox import Toolbox
from covenant.agents.runtime import turn_files
from covenant.agents.runtime.durable_step import StepError
from covenant.agents.runtime.job import Job
from covenant.agents.runtime.turn_output import TurnOutput
from covenant.model.question import QUESTION_CHARS_MAX, Question, QuestionKind

ASK_USER: Final = "ask_user"
"""The tool that asks the user; its call is the question itself."""
CONVERSATION_BYTES_MAX: Final = 2 << 20
"""The most bytes of a conversation when a person is asked."""
QUESTIONS_MAX: Final = 16
"""The most rounds of questions in one turn."""
ARGUMENTS_CHARS_MAX: Final = 4_000
_messages = messages.ModelMessagesTypeAdapter


class RunInput(NamedTuple):
    prompt: str | list[messages.UserContent] | None
    history: list[messages.ModelMessage]
    answers: DeferredToolResults | None = None


class _DeferredCall(msgspec.Struct, frozen=True):
    """A tool call that waits for a person: for an approval, or for its result."""

    kind: QuestionKind
    id: str
    tool: str
    arguments: dict[str, Any]
    children: tuple[ChildQuestion, ...] = ()
    """Questions of agents that the tool has called; `told` has the answers of the other calls of that use."""
    told: tuple[str | None, ...] = ()

    @property
    def question(self) -> Question:
        prompt = self.arguments.get("question")
        if self.kind == "input" and self.tool == ASK_USER and isinstance(prompt, str):
            return Question(kind="input", text=prompt[:QUESTION_CHARS_MAX] or "?")
        what = turn_files.written(self.arguments)
        what = what if len(what) <= ARGUMENTS_CHARS_MAX else f"{what[:ARGUMENTS_CHARS_MAX]}…"
        text = f"May I use {self.tool} with {what}? (approve, or deny: why)"
        if self.kind == "input":
            text = f"What is the result of {self.tool} with {what}?"
        return Question(kind=self.kind, text=text, tool=self.tool, arguments=self.arguments)


class ModelConversation:
    """The runs of a model in one turn. Each run that ends with questions is a durable step."""

    def __init__(self, job: Job, output: TurnOutput, toolbox: Toolbox | None = None) -> None:
        """`toolbox` resumes tool calls that called other agents."""
        self._job = job
        self._toolbox = toolbox
        self._output = output
        self._rounds = 0

    async def hold(
        self,
        run: Callable[[RunInput], Awaitable[AgentRunResult[Any]]],
        prompt: str | list[messages.UserContent] | None,
        history: list[messages.ModelMessage],
    ) -> AgentRunResult[Any]:
        steps, run_input = self._job.steps, RunInput(prompt, history)
        while True:
            self._rounds += 1
            step = await steps.begin(f"conversation {self._rounds}")
            kept = step.found.result if step.found is not None else None
            if kept is None:
                self._output.begin_round(self._rounds)
                try:
                    result = await run(run_input)
                    if not isinstance(result.output, DeferredToolRequests):
                        return result
                    if self._rounds > QUESTIONS_MAX:
                        raise StepError("too_many_questions", f"people were asked {QUESTIONS_MAX} times in one turn")
                    self._output.close()
                    kept = await steps.end(step, _kept(result, result.output), bytes_max=CONVERSATION_BYTES_MAX)
                finally:
                    steps.give_up(step)
            history = _messages.validate_python(kept["messages"])
            run_input = RunInput(
                None, history, await self._ask(msgspec.convert(kept["calls"], tuple[_DeferredCall, ...]))
            )

    async def _ask(self, calls: tuple[_DeferredCall, ...]) -> DeferredToolResults:
        answers = DeferredToolResults()
        for call in calls:
            if call.children and self._toolbox is not None:
                answers.calls[call.id] = await self._answer_of_children(call, self._toolbox)
                continue
            answer = await self._job.steps.ask(call.question, None)
            if call.kind == "input":
                answers.calls[call.id] = answer["text"]
            elif answer["approved"]:
                answers.approvals[call.id] = True
            else:
                if self._toolbox is not None:  # for its own agents pydantic-ai reports it
                    self._output.begin_round(self._rounds + 1)
                    self._output.record_tool(label(call.tool, call.arguments), ok=False)
                answers.approvals[call.id] = ToolDenied(f"A person denied this. {answer['reason']}".strip())
        return answers

    async def _answer_of_children(self, call: _DeferredCall, toolbox: Toolbox) -> str:
        self._output.begin_round(self._rounds + 1)
        found = [await ask_person(self._job, child, toolbox.child_result) for child in call.children]
        return toolbox.resume(call.tool, call.arguments, call.told, found)


def _kept(result: AgentRunResult[Any], deferred: DeferredToolRequests) -> dict[str, Any]:
    calls = [
        {
            "kind": kind,
            "id": call.tool_call_id,
            "tool": call.tool_name,
            "arguments": call.args_as_dict(),
            **_children_of(deferred, call.tool_call_id),
        }
        for kind, found in (("approval", deferred.approvals), ("input", deferred.calls))
        for call in found
    ]
    return {"messages": _messages.dump_python(result.all_messages(), mode="json"), "calls": calls}


def _children_of(deferred: DeferredToolRequests, call_id: str) -> dict[str, Any]:
    """Questions and answers of the agents that a deferred call has called."""
    found = deferred.metadata.get(call_id) or {}
    return {name: found[name] for name in ("children", "told") if name in found}
