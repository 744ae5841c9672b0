"""Spans and metrics of calls of models and tools: a span for each by the GenAI conventions, and a count.

A canceled call is no error. A span has the text of messages only if the operator wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

from covenant.model import tracing
from covenant.model.model_prices import NO_PRICES, ModelCall, ModelPrices, ModelTokens, ToolCall
from covenant.model.tracing import OFF, Tracer, Value

if TYPE_CHECKING:
    from covenant.agents.runtime.job import Job

COMPLETED: Final = "completed"
FAILED: Final = "failed"
DEFERRED: Final = "deferred"
TIMED_OUT: Final = "timed_out"
STOPPED: Final = "stopped"
"""The caller had no use for the rest of the model's answer."""
PROVIDERS: Final = {
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "google": "gcp.gemini",
    "google-cloud": "gcp.vertex_ai",
    "google-gla": "gcp.gemini",
    "google-vertex": "gcp.vertex_ai",
    "mistral": "mistral_ai",
    "grok": "x_ai",
    "xai": "x_ai",
}
"""Providers whose name in the conventions differs from that in pydantic-ai."""

FailureCode = Callable[[Exception], str | None]
"""Maps an exception to the code of a model's failure; None if the model did not fail."""


class ModelAnswer:
    """An answer so far."""

    __slots__ = ("finish_reason", "model", "tokens")

    def __init__(self) -> None:
        self.tokens: Callable[[], ModelTokens] = ModelTokens
        self.finish_reason: Callable[[], str | None] = lambda: None
        self.model: Callable[[], str | None] = lambda: None


class ToolUse:
    """`failed`: the code of the tool's failure. `deferred`: the tool was not used yet, since a person must decide."""

    __slots__ = ("deferred", "failed")

    def __init__(self) -> None:
        self.failed: str | None = None
        self.deferred = False


class CallCounter(Protocol):
    def model_called(self, call: ModelCall) -> None: ...
    def tool_called(self, call: ToolCall) -> None: ...


class ModelCalls:
    def __init__(
        self,
        tracer: Tracer = OFF,
        counter: CallCounter | None = None,
        prices: ModelPrices = NO_PRICES,
        *,
        task_tokens_max: int = 0,
    ) -> None:
        """`task_tokens_max`: the most tokens of models for one task, with all that it delegates; 0: no limit."""
        self._tracer = tracer
        self._counter = counter
        self._prices = prices
        self.task_tokens_max: Final = task_tokens_max

    def price(self, prices: ModelPrices) -> None:
        """Sets the prices from now on."""
        self._prices = prices

    @contextmanager
    def watch(
        self,
        job: Job,
        provider: str,
        model: str,
        failure: FailureCode,
        max_tokens: int | None = None,
        *,
        late: Callable[[], bool] = lambda: False,
    ) -> Iterator[ModelAnswer]:
        """A context around one call of a model, from its request to its last token. `late`: its time is over."""
        answer, began_s, span = ModelAnswer(), monotonic(), None
        if self._tracer.on:
            attributes = {
                **_owner_attributes(job),
                tracing.OPERATION: tracing.CHAT,
                tracing.PROVIDER: PROVIDERS.get(provider, provider),
                tracing.REQUEST_MODEL: model,
            }
            if max_tokens is not None:
                attributes[tracing.MAX_TOKENS] = max_tokens
            parent = tracing.trace_of(job.task)
            span = self._tracer.begin(f"{tracing.CHAT} {model}", "client", attributes, parent=parent)
        outcome, failed = tracing.CANCELED, None
        try:
            yield answer
            outcome = COMPLETED
        except Exception as error:
            code = failure(error)
            outcome, failed = code or STOPPED, code
            raise
        finally:
            if outcome == tracing.CANCELED and late():
                outcome = failed = TIMED_OUT
            tokens, named = answer.tokens(), f"{provider}:{model}"
            cost, currency = self._prices.cost(named, tokens), self._prices.currency
            if self._counter is not None:
                agent, took_s = job.holder.display, monotonic() - began_s
                self._counter.model_called(ModelCall(agent, named, outcome, took_s, tokens, cost, currency))
            if span is not None:
                span.note(_answer_attributes(answer, tokens, outcome, cost, currency))
                span.end(failed=failed)

    @contextmanager
    def watch_tool(self, job: Job, name: str, *, call_id: str | None = None) -> Iterator[ToolUse]:
        """Around one use of a tool. Spans that the tool makes in this context are below its span."""
        use, began_s, span, ending = ToolUse(), monotonic(), None, tracing.CANCELED
        if self._tracer.on:
            attributes = {
                **_owner_attributes(job),
                tracing.OPERATION: tracing.EXECUTE_TOOL,
                tracing.TOOL_NAME: name,
                tracing.TOOL_TYPE: "function",
            }
            if call_id:
                attributes[tracing.TOOL_CALL] = call_id
            parent = tracing.trace_of(job.task)
            span = self._tracer.begin(f"{tracing.EXECUTE_TOOL} {name}", "internal", attributes, parent=parent)
        try:
            with span.current() if span is not None else nullcontext():
                yield use
            ending = COMPLETED if use.failed is None else FAILED
        except Exception as error:
            ending = DEFERRED if use.deferred else FAILED
            if not use.deferred:
                use.failed = use.failed or type(error).__name__
            raise
        finally:
            if self._counter is not None and ending != DEFERRED:
                self._counter.tool_called(ToolCall(job.holder.display, name, ending, monotonic() - began_s))
            if span is not None:
                span.note({tracing.ENDING: ending})
                span.end(failed=use.failed)


def _owner_attributes(job: Job) -> dict[str, Value]:
    """The attributes of the agent and task that a call belongs to."""
    agent, task = job.holder.display, job.task
    return {
        tracing.AGENT_NAME: agent.partition("@")[0],
        tracing.AGENT_ID: agent,
        tracing.CONVERSATION: task.context_id or task.id,
        tracing.TASK: task.id,
    }


def _answer_attributes(
    answer: ModelAnswer, tokens: ModelTokens, outcome: str, cost: float | None, currency: str
) -> dict[str, Value]:
    found: dict[str, Value] = {tracing.ENDING: outcome}
    counted = {
        tracing.INPUT_TOKENS: tokens.input,
        tracing.OUTPUT_TOKENS: tokens.output,
        tracing.CACHE_READ: tokens.cache_read,
        tracing.CACHE_WRITE: tokens.cache_write,
    }
    # A server that reports no tokens has still used some.
    found |= {name: count for name, count in counted.items() if count}
    if (reason := answer.finish_reason()) is not None:
        found[tracing.FINISH_REASONS] = (reason,)
    if (model := answer.model()) is not None:
        found[tracing.RESPONSE_MODEL] = model
    if cost is not None and any(tokens):
        found |= {tracing.COST: cost, tracing.CURRENCY: currency}
    return found
