"""Agents written with pydantic-ai: an `Agent` runs here unchanged.

The turn's text and files are its prompt. Its history is the messages of earlier turns and, within bounds, of earlier
tasks of the same context. A linked file is named in the prompt by its URL, and not fetched. Text is streamed, other
output becomes data, and the result reports the run's usage.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from time import monotonic
from typing import Any, Final

from pydantic_ai import DeferredToolRequests, RunContext, messages
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import (
    ApprovalRequired,
    CallDeferred,
    ModelAPIError,
    ModelConnectionError,
    ModelHTTPError,
    ModelOverloadedError,
    ModelRateLimitError,
    ModelRequestTimeout,
    ModelTimeoutError,
    ModelUnavailableError,
    UnexpectedModelBehavior,
    UsageLimitExceeded,
)
from pydantic_ai.messages import ModelMessage, ModelResponse
from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse, infer_model
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.run import AgentRunResult, AgentRunResultEvent
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.usage import RunUsage, UsageLimits
from pydantic_core import to_jsonable_python

from covenant.agents.api import Turn
from covenant.agents.function_agent import begin_again, turn_history
from covenant.agents.model.conversation import ModelConversation, RunInput
from covenant.agents.retried_agent import recall_attempts
from covenant.agents.runtime import turn_files
from covenant.agents.runtime.function_threads import TurnStopped
from covenant.agents.runtime.job import Job
from covenant.agents.runtime.model_calls import ModelAnswer
from covenant.agents.runtime.turn_output import TurnOutput
from covenant.model.content import Audio, Content, File, Image, Json, Resource, ResourceLink, Text
from covenant.model.errors import CovenantError
from covenant.model.model_prices import ModelTokens
from covenant.model.retry_policy import AttemptPolicy
from covenant.model.task_event import MessageUpdate

log = logging.getLogger(__name__)

USED: Final = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "requests", "tool_calls")

NO_ANSWER: Final = "the model gave no answer within its limits"
CUT: Final = "length"
"""The stop reason of an answer that reached its token limit."""
UNABLE_KINDS: Final[tuple[tuple[type[ModelAPIError], str], ...]] = (
    (ModelRateLimitError, "rate_limited"),
    (ModelOverloadedError, "overloaded"),
    (ModelUnavailableError, "overloaded"),
    (ModelTimeoutError, "timed_out"),
    (ModelRequestTimeout, "timed_out"),
    (ModelConnectionError, "unreachable"),
)
UNABLE_STATUS: Final = {
    408: "timed_out",
    429: "rate_limited",
    502: "unreachable",
    503: "overloaded",
    504: "unreachable",
    529: "overloaded",
}
FAILURE_CODES: Final = {
    400: "invalid_request",
    401: "auth_failed",
    403: "auth_failed",
    404: "not_found",
    413: "request_too_large",
    422: "invalid_request",
    429: "rate_limited",
}


class PydanticAiAgent:
    def __init__(
        self,
        agent: AbstractAgent[Any, Any],
        deps: Any = None,
        retry_on: tuple[type[Exception], ...] = (),
        retries: AttemptPolicy | None = None,
    ) -> None:
        """`deps`: dependencies of the agent's tools and instructions; a function makes them for each turn."""
        self._agent, self._deps = agent, deps
        self._retry_on = retry_on
        self._retries = retries or AttemptPolicy()
        self.attempts: Final = self._retries.attempts
        kinds = agent.output_type
        known = list(kinds) if isinstance(kinds, list | tuple) else [kinds]
        self._output_type: Any = known if DeferredToolRequests in known else [*known, DeferredToolRequests]

    async def run(self, job: Job) -> None:
        output, usage = TurnOutput(job), RunUsage()
        await recall_attempts(job)
        # Recorded even if somebody else ends this turn: these tokens were used.
        job.spending.running = lambda: usage_of_run(usage)
        try:
            await self._attempt(job, output, usage)
        except UsageLimitExceeded:
            job.fail(job.spending.used_up or NO_ANSWER)
        except (ModelAPIError, UnexpectedModelBehavior) as error:
            log.warning("model.failed", exc_info=True, extra=job.fields())
            job.fail(f"the model failed: {failure_code(error)}", reason=retry_reason(error))
        finally:
            job.spend(job.spending.end_running())
        if not job.ended:
            job.complete(*output.close())

    async def _attempt(self, job: Job, output: TurnOutput, usage: RunUsage) -> None:
        try:
            write_result(await self._run_model(job, output, usage), job, output)
        except UsageLimitExceeded:
            raise  # another attempt would have no tokens either
        except self._retry_on as error:
            if not begin_again(job, self._retries, error):
                raise

    async def _run_model(self, job: Job, output: TurnOutput, usage: RunUsage) -> AgentRunResult[Any]:
        thread = await turn_history(job, context=True)
        before, deps = history_of(thread), self._deps
        if inspect.isroutine(deps):
            deps = deps(Turn(job, thread, 1))
            if inspect.isawaitable(deps):
                deps = await deps
        model, tools = self._agent.model, ToolCallRecorder(output)
        watched = None if model is None else BoundedModel(infer_model(model), None, job=job)

        async def run(run_input: RunInput) -> AgentRunResult[Any]:
            async with self._agent.run_stream_events(
                run_input.prompt,
                model=watched,
                capabilities=[WatchedTools(job)],
                output_type=self._output_type,
                message_history=run_input.history,
                deferred_tool_results=run_input.answers,
                deps=deps,
                usage=usage,
                usage_limits=UsageLimits(total_tokens_limit=job.spending.tokens_max or None),
                model_settings=self._settings(job),
            ) as events:
                return await write_events(tools.record(events), job, output)

        return await ModelConversation(job, output).hold(run, prompt_of(job), before)

    def _settings(self, job: Job) -> Any:
        """Limits each answer to the tokens left for the task and to the agent's own `max_tokens`."""
        spending, own = job.spending, getattr(self._agent, "model_settings", None)
        if not spending.tokens_max:
            return None
        most = own.get("max_tokens") if isinstance(own, dict) else None

        def settings(_: RunContext[Any]) -> ModelSettings:
            # Called before each request: an earlier turn, or an agent that a tool called, may have used the rest.
            if (why := spending.used_up) is not None:
                raise UsageLimitExceeded(why)
            left = max(1, spending.tokens_left or 0)
            return ModelSettings(max_tokens=min(left, most or left))

        return settings


class ToolCallRecorder:
    """Writes an artifact for each use of a tool in a run, as model agents do."""

    def __init__(self, output: TurnOutput) -> None:
        self._output = output
        self._begun: dict[str, tuple[str, float]] = {}

    async def record(self, events: AsyncIterable[Any]) -> AsyncGenerator[Any]:
        try:
            async for event in events:
                if isinstance(event, messages.FunctionToolCallEvent):
                    self._begun[event.part.tool_call_id] = (event.part.tool_name, monotonic())
                elif isinstance(event, messages.FunctionToolResultEvent):
                    ok = getattr(event.part, "outcome", "failed") == "success"
                    self._end(event.part.tool_call_id, event.part.tool_name or "", ok=ok)
                yield event
        except Exception:
            for call_id, (name, _) in list(self._begun.items()):  # one of these calls raised it
                self._end(call_id, name, ok=False)
            raise

    def _end(self, call_id: str, name: str, *, ok: bool) -> None:
        _, begun_s = self._begun.pop(call_id, (name, monotonic()))
        self._output.record_tool(name, ok=ok, took_ms=round((monotonic() - begun_s) * 1000))


class WatchedTools(AbstractCapability[Any]):
    """Counts each use of a tool, and makes a span for it."""

    def __init__(self, job: Job) -> None:
        self._job = job

    async def wrap_tool_execute(
        self,
        ctx: RunContext[Any],  # noqa: ARG002  (as the library calls it)
        *,
        call: messages.ToolCallPart,
        tool_def: ToolDefinition,  # noqa: ARG002
        args: Any,
        handler: Callable[[Any], Awaitable[Any]],
    ) -> Any:
        with self._job.model_calls.watch_tool(self._job, call.tool_name, call_id=call.tool_call_id) as use:
            try:
                return await handler(args)
            except (ApprovalRequired, CallDeferred):
                use.deferred = True
                raise


async def write_events(events: AsyncIterable[Any], job: Job, output: TurnOutput | None) -> AgentRunResult[Any]:
    """Writes a run's text to the output, if there is one; returns the run's result."""
    found: AgentRunResult[Any] | None = None
    async for event in events:
        match event:
            case AgentRunResultEvent(result=result):
                found = result
            case _ if output is None:
                pass
            case messages.PartStartEvent(part=messages.TextPart(content=text)):
                output.write_text(text)
            case messages.PartDeltaEvent(delta=messages.TextPartDelta(content_delta=text)):
                output.write_text(text)
            case _:
                pass
        if job.full:
            await job.room()
    if found is None:
        raise UnexpectedModelBehavior("the run ended without a result")
    return found


def usage_of_run(usage: RunUsage) -> dict[str, float]:
    """A run's usage by name; `tokens` is the total."""
    found = {"tokens": usage.total_tokens, **{name: getattr(usage, name, 0) for name in USED}}
    return {name: amount for name, amount in found.items() if amount}


def note_stop_reason(stop_reason: str | None, job: Job) -> bool:
    """Notes the stop reason in the result. Returns whether the answer was cut at its token limit."""
    if stop_reason is not None:
        job.notes["stop_reason"] = stop_reason
    return stop_reason == CUT


def write_result(result: AgentRunResult[Any], job: Job, output: TurnOutput) -> None:
    partial = note_stop_reason(result.response.finish_reason, job)
    if isinstance(result.output, str):
        if not output.text:
            output.write_whole_text(result.output)
        output.close()
        job.complete(Text(result.output), partial=partial)
        return
    made = turn_files.data(to_jsonable_python(result.output))
    output.write_content(made)
    output.close()
    job.complete(made, partial=partial)


def prompt_of(job: Job) -> str | list[messages.UserContent]:
    return _prompts(part for message in job.messages for part in message.parts)


def _prompts(parts: Iterable[Content]) -> str | list[messages.UserContent]:
    contents = [_prompt(part) for part in parts]
    # Some OpenAI-compatible servers accept a text as content, but not a list with one text.
    return contents[0] if len(contents) == 1 and isinstance(contents[0], str) else contents


def _prompt(part: Content) -> messages.UserContent:
    match part:
        case Text(text):
            return text
        case Json(value):
            return turn_files.written(value)
        case Image(data, kind) | Audio(data, kind):
            return messages.BinaryContent(base64.b64decode(data), media_type=kind)
        case Resource(inner):
            if inner.blob is None:
                return inner.text or ""
            kind = inner.mimeType or "application/octet-stream"
            return messages.BinaryContent(base64.b64decode(inner.blob), media_type=kind)
        case ResourceLink(uri=uri, name=name, mimeType=kind):
            # As text: the library would download a URL by itself, past the address guard.
            about = ", ".join(filter(None, (name, kind)))
            return f"[linked file{': ' if about else ''}{about}] {uri}"
        case File(filename=name, mimeType=kind, size=size):
            return f"[file: {', '.join(filter(None, (name, kind, f'{size} bytes')))}; too large to be shown]"


def history_of(thread: tuple[MessageUpdate, ...]) -> list[messages.ModelMessage]:
    made: list[messages.ModelMessage] = []
    for message in thread:
        if message.role == "user":
            made.append(messages.ModelRequest([messages.UserPromptPart(_prompts(message.parts))]))
        else:
            text = "".join(part.text for part in message.parts if isinstance(part, Text))
            made.append(messages.ModelResponse([messages.TextPart(text)]))
    return made


def why_unable(error: ModelAPIError) -> str | None:
    """The code of the reason why a model cannot answer a valid request now; None for any other failure.

    The reason is derived from the error's type and status, never from its text.
    """
    for kind, code in UNABLE_KINDS:
        if isinstance(error, kind):
            return code
    return UNABLE_STATUS.get(error.status_code) if isinstance(error, ModelHTTPError) else None


def retry_reason(error: Exception) -> str:
    """The `RetryReason` of an error; empty if the same request would fail again."""
    if not isinstance(error, ModelAPIError):
        return ""
    rejected = isinstance(error, ModelHTTPError) and error.status_code < 500
    return why_unable(error) or ("" if rejected else "provider_error")


def failure_code(error: Exception) -> str:
    """The code of a provider's failure for the sender."""
    if isinstance(error, ModelHTTPError):
        return FAILURE_CODES.get(error.status_code, "provider_error")
    if isinstance(error, ModelTimeoutError):
        return "timed_out"
    return "provider_error"


def call_failure_code(error: Exception) -> str | None:
    """The code of a failed call for spans and metrics; None if the caller itself ended the call."""
    if isinstance(error, (CovenantError, TurnStopped, UsageLimitExceeded)):
        return None
    return (why_unable(error) if isinstance(error, ModelAPIError) else None) or failure_code(error)


def _set_answer(answer: ModelAnswer, response: ModelResponse | StreamedResponse) -> None:
    """Sets the tokens, the model and the finish reason of an answer. Those of a stream are read when it is over."""

    def tokens() -> ModelTokens:
        used = response.usage
        return ModelTokens(used.input_tokens, used.output_tokens, used.cache_read_tokens, used.cache_write_tokens)

    answer.tokens = tokens
    answer.finish_reason = lambda: response.finish_reason
    answer.model = lambda: response.model_name


OnFallback = Callable[[str, str, str], None]
"""Called when another model is asked: with the name of the one that could not answer, the reason, and the new name."""


class BoundedModel(WrapperModel):
    """A model whose whole answer has a time limit, retries included. For one run.

    The library's own timeout is for each read of a connection and begins again with every retry, so a server that sends
    a token now and then could take any time. `stop_reason`: why the last answer ended, as the library names it.

    When a model cannot answer just now, and has sent nothing yet, the next of `fallbacks` is asked for the rest of the
    run. So a run changes models at most as often as it has fallbacks.
    """

    def __init__(
        self,
        model: Model,
        answer_s: float | None,
        fallbacks: Sequence[Model] = (),
        on_fallback: OnFallback | None = None,
        *,
        job: Job,
    ) -> None:
        """`job` owns the spans and metrics of the calls. `answer_s`: None sets no limit."""
        super().__init__(model)
        self._answer_s = answer_s
        self._job = job
        self._current = model
        self._fallbacks = list(fallbacks)
        self._on_fallback = on_fallback
        self.stop_reason: str | None = None
        self._streamed: StreamedResponse | None = None
        self._limit: asyncio.Timeout | None = None
        self._tokens_before = 0

    @property
    def model_name(self) -> str:
        """The name of the model that is asked now."""
        return self._current.model_name

    @property
    def late(self) -> bool:
        """Whether the last answer took too long. The library may report that as a cancellation of its run."""
        return self._limit is not None and self._limit.expired()

    def with_streamed(self, usage: RunUsage) -> RunUsage:
        """A run's usage with that of the running answer, as far as its provider has reported it.

        The run adds an answer's usage only when the answer is over, and a canceled run may never do so.
        """
        counted = usage.total_tokens > self._tokens_before
        return usage if self._streamed is None or counted else usage + self._streamed.usage

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        while True:
            prepared = self._prepared(messages, model_request_parameters)
            try:
                with self._watch(model_settings) as answer, self._model_timeout():
                    async with asyncio.timeout(self._answer_s) as self._limit:
                        response = await self._current.request(prepared, model_settings, model_request_parameters)
                    _set_answer(answer, response)
            except ModelAPIError as error:
                if not self._fall_back(error):
                    raise
            else:
                self.stop_reason = response.finish_reason
                return response

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncGenerator[StreamedResponse]:
        opened = False
        while not opened:
            prepared = self._prepared(messages, model_request_parameters)
            try:
                with self._watch(model_settings) as answer, self._model_timeout():
                    async with (
                        asyncio.timeout(self._answer_s) as self._limit,
                        self._current.request_stream(
                            prepared, model_settings, model_request_parameters, run_context
                        ) as stream,
                    ):
                        opened = True
                        self._streamed = stream
                        _set_answer(answer, stream)
                        self._tokens_before = run_context.usage.total_tokens if run_context is not None else 0
                        try:
                            yield stream
                        finally:
                            self.stop_reason = stream.finish_reason
            except ModelAPIError as error:
                if opened or not self._fall_back(error):
                    raise

    def _watch(self, settings: ModelSettings | None) -> AbstractContextManager[ModelAnswer]:
        model, most = self._current, (settings or {}).get("max_tokens")
        self._limit = None
        calls = self._job.model_calls
        return calls.watch(self._job, model.system, model.model_name, call_failure_code, most, late=lambda: self.late)

    def _prepared(self, messages: list[ModelMessage], parameters: ModelRequestParameters) -> list[ModelMessage]:
        """The messages for the model asked now. The run has prepared them for the model that it began with."""
        return messages if self._current is self.wrapped else self._current.prepare_messages(messages, parameters)

    def _fall_back(self, error: ModelAPIError) -> bool:
        why = why_unable(error) if self._fallbacks else None
        if why is None:
            return False
        unable, self._current = self._current, self._fallbacks.pop(0)
        if self._on_fallback is not None:
            self._on_fallback(unable.model_name, why, self._current.model_name)
        return True

    @contextmanager
    def _model_timeout(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as late:
            raise ModelTimeoutError(self.model_name, f"no whole answer within {self._answer_s or 0:g} s") from late
