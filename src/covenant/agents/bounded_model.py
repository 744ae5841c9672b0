"""A model whose answers have a time limit each: from the first byte that is sent to the last that is read.

The library's own timeout is for each read of a connection, and begins again with every retry: a server that sends a
word now and then, or fails slowly, could take any time. This one bounds the whole answer, its retries included.

Needs pydantic-ai, as `covenant.agents.model` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from pydantic_ai import RunContext
from pydantic_ai.exceptions import ModelTimeoutError
from pydantic_ai.messages import ModelMessage, ModelResponse
from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import RunUsage

CUT: Final = "length"
"""Why a model stopped: its answer came to the tokens that it may have."""


class BoundedModel(WrapperModel):
    """For one run. `stop_reason`: why the last answer ended, in the library's words."""

    def __init__(self, model: Model, answer_s: float) -> None:
        super().__init__(model)
        self._answer_s = answer_s
        self.stop_reason: str | None = None
        self._streamed: StreamedResponse | None = None
        self._tokens_before = 0

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
        with self._named():
            async with asyncio.timeout(self._answer_s):
                response = await super().request(messages, model_settings, model_request_parameters)
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
        with self._named():
            async with (
                asyncio.timeout(self._answer_s),
                super().request_stream(messages, model_settings, model_request_parameters, run_context) as stream,
            ):
                self._streamed = stream
                self._tokens_before = run_context.usage.total_tokens if run_context is not None else 0
                try:
                    yield stream
                finally:
                    self.stop_reason = stream.finish_reason

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as late:
            raise ModelTimeoutError(self.model_name, f"no whole answer within {self._answer_s:g} s") from late
