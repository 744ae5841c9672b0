"""Agents written with pydantic-ai: an `Agent` runs here as it is.

The turn's text and files are its prompt. Its history is what was said in earlier turns and, within bounds, in earlier
tasks of the same context. A linked file is named in the prompt with its
URL, and not fetched. Text is streamed, other output becomes data, and the result says what the run used.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from pydantic_ai import DeferredToolRequests, RunContext, messages
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelConnectionError,
    ModelHTTPError,
    ModelOverloadedError,
    ModelRateLimitError,
    ModelRequestTimeout,
    ModelTimeoutError,
    ModelUnavailableError,
    UnexpectedModelBehavior,
)
from pydantic_ai.messages import ModelMessage, ModelResponse
from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.run import AgentRunResult, AgentRunResultEvent
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import RunUsage
from pydantic_core import to_jsonable_python

from covenant.agents.function_agent import earlier
from covenant.agents.model.conversation import ModelConversation, RunInput
from covenant.agents.runtime import turn_output
from covenant.agents.runtime.job import Job
from covenant.agents.runtime.turn_output import TurnOutput
from covenant.model.content import Audio, Content, File, Image, Json, Resource, ResourceLink, Text
from covenant.model.task_event import MessageUpdate

USED: Final = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "requests", "tool_calls")


class PydanticAiAgent:
    def __init__(self, agent: AbstractAgent[Any, Any]) -> None:
        self._agent = agent
        kinds = agent.output_type
        known = list(kinds) if isinstance(kinds, list | tuple) else [kinds]
        self._output_type: Any = known if DeferredToolRequests in known else [*known, DeferredToolRequests]

    async def run(self, job: Job) -> None:
        output, usage = TurnOutput(job), RunUsage()
        before = history_of(await earlier(job, context=True))
        # Told even if somebody else ends this turn: what was used was used.
        job.spending.running = lambda: used(usage)

        async def run(asked: RunInput) -> AgentRunResult[Any]:
            async with self._agent.run_stream_events(
                asked.prompt,
                output_type=self._output_type,
                message_history=asked.history,
                deferred_tool_results=asked.answers,
                usage=usage,
            ) as events:
                return await listen(events, job, output)

        try:
            say_result(await ModelConversation(job).hold(run, prompt_of(job), before), job, output)
        finally:
            job.spend(job.spending.end_running())
        if not job.ended:
            job.complete(*output.close())


async def listen(events: AsyncIterable[Any], job: Job, output: TurnOutput) -> AgentRunResult[Any]:
    """Say what a run says; what it came to."""
    found: AgentRunResult[Any] | None = None
    async for event in events:
        match event:
            case messages.PartStartEvent(part=messages.TextPart(content=text)):
                output.say(text)
            case messages.PartDeltaEvent(delta=messages.TextPartDelta(content_delta=text)):
                output.say(text)
            case AgentRunResultEvent(result=result):
                found = result
            case _:
                pass
        if job.full:
            await job.room()
    if found is None:
        raise UnexpectedModelBehavior("the run came to nothing")
    return found


def used(usage: RunUsage) -> dict[str, float]:
    """What a run used, by name; `tokens` are all of them."""
    found = {"tokens": usage.total_tokens, **{name: getattr(usage, name, 0) for name in USED}}
    return {name: amount for name, amount in found.items() if amount}


def cut_at(stop_reason: str | None, job: Job) -> bool:
    """Whether an answer was cut where it came to its limit of tokens. The result says why it ended."""
    if stop_reason is not None:
        job.notes["stop_reason"] = stop_reason
    return stop_reason == CUT


def say_result(result: AgentRunResult[Any], job: Job, output: TurnOutput) -> None:
    partial = cut_at(result.response.finish_reason, job)
    if isinstance(result.output, str):
        if not output.text:
            output.say_at_once(result.output)
        output.close()
        job.complete(Text(result.output), partial=partial)
        return
    made = turn_output.data(to_jsonable_python(result.output))
    output.give(made)
    output.close()
    job.complete(made, partial=partial)


def prompt_of(job: Job) -> str | list[messages.UserContent]:
    return _prompts(part for message in job.messages for part in message.parts)


def _prompts(parts: Iterable[Content]) -> str | list[messages.UserContent]:
    said = [_prompt(part) for part in parts]
    # Some servers that speak as OpenAI's does take a text for what was said, and no list of one.
    return said[0] if len(said) == 1 and isinstance(said[0], str) else said


def _prompt(part: Content) -> messages.UserContent:
    match part:
        case Text(text):
            return text
        case Json(value):
            return turn_output.written(value)
        case Image(data, kind) | Audio(data, kind):
            return messages.BinaryContent(base64.b64decode(data), media_type=kind)
        case Resource(inner):
            if inner.blob is None:
                return inner.text or ""
            kind = inner.mimeType or "application/octet-stream"
            return messages.BinaryContent(base64.b64decode(inner.blob), media_type=kind)
        case ResourceLink(uri=uri, name=name, mimeType=kind):
            # As words. A URL that the library knows as one it downloads itself, past the address guard.
            about = ", ".join(filter(None, (name, kind)))
            return f"[linked file{': ' if about else ''}{about}] {uri}"
        case File(filename=name, mimeType=kind, size=size):
            return f"[file: {', '.join(filter(None, (name, kind, f'{size} bytes')))}; too large to be shown]"


def history_of(said: tuple[MessageUpdate, ...]) -> list[messages.ModelMessage]:
    made: list[messages.ModelMessage] = []
    for message in said:
        if message.role == "user":
            made.append(messages.ModelRequest([messages.UserPromptPart(_prompts(message.parts))]))
        else:
            words = "".join(part.text for part in message.parts if isinstance(part, Text))
            made.append(messages.ModelResponse([messages.TextPart(words)]))
    return made


CUT: Final = "length"
"""Why a model stopped: its answer came to the tokens that it may have."""


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


def why_unable(error: ModelAPIError) -> str | None:
    """In one word, why a model cannot answer just now, although the question is right. None: its failure is another.

    It is read from the kind of the error and from its status, never from its text.
    """
    for kind, word in UNABLE_KINDS:
        if isinstance(error, kind):
            return word
    return UNABLE_STATUS.get(error.status_code) if isinstance(error, ModelHTTPError) else None


Fallback = Callable[[str, str, str], None]
"""Told of a change of models: which could not answer, why, and which is asked now."""


class BoundedModel(WrapperModel):
    """A model whose whole answer has a time limit, its retries included. For one run.

    The library's own timeout is for each read of a connection, and begins again with every retry: a server that sends a
    word now and then could take any time. `stop_reason`: why the last answer ended, in the library's words.

    When a model cannot answer just now, and has said nothing yet, the next of `fallbacks` is asked, for the rest of the
    run. So a run changes models at most as often as it has fallbacks.
    """

    def __init__(
        self, model: Model, answer_s: float, fallbacks: Sequence[Model] = (), changed: Fallback | None = None
    ) -> None:
        super().__init__(model)
        self._answer_s = answer_s
        self._asked = model
        self._left = list(fallbacks)
        self._changed = changed
        self.stop_reason: str | None = None
        self._streamed: StreamedResponse | None = None
        self._tokens_before = 0

    @property
    def model_name(self) -> str:
        """Of the model that is asked now."""
        return self._asked.model_name

    def with_streamed(self, usage: RunUsage) -> RunUsage:
        """A run's usage, with that of the answer under way as far as its provider has told it.

        The run adds an answer when it is over. A run that is canceled may never do so.
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
            said = self._prepared(messages, model_request_parameters)
            try:
                with self._named():
                    async with asyncio.timeout(self._answer_s):
                        response = await self._asked.request(said, model_settings, model_request_parameters)
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
            said = self._prepared(messages, model_request_parameters)
            try:
                with self._named():
                    async with (
                        asyncio.timeout(self._answer_s),
                        self._asked.request_stream(
                            said, model_settings, model_request_parameters, run_context
                        ) as stream,
                    ):
                        opened = True
                        self._streamed = stream
                        self._tokens_before = run_context.usage.total_tokens if run_context is not None else 0
                        try:
                            yield stream
                        finally:
                            self.stop_reason = stream.finish_reason
            except ModelAPIError as error:
                if opened or not self._fall_back(error):
                    raise

    def _prepared(self, messages: list[ModelMessage], parameters: ModelRequestParameters) -> list[ModelMessage]:
        """The run has prepared them for the model that it began with."""
        return messages if self._asked is self.wrapped else self._asked.prepare_messages(messages, parameters)

    def _fall_back(self, error: ModelAPIError) -> bool:
        why = why_unable(error) if self._left else None
        if why is None:
            return False
        unable, self._asked = self._asked, self._left.pop(0)
        if self._changed is not None:
            self._changed(unable.model_name, why, self._asked.model_name)
        return True

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as late:
            raise ModelTimeoutError(self.model_name, f"no whole answer within {self._answer_s:g} s") from late
