"""Traces: the interface of spans and tracers, and the trace that a task belongs to.

A task carries the W3C trace context of its last span, and so does every call that it makes: a trace is the tree of
delegated work. `OFF` is a tracer that does nothing; callers check `tracer.on` first, so that an unused trace costs
nothing. A span has names, times, counts and outcomes; it has the text of messages only if `content` is on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal, Protocol

import msgspec

from covenant.model.task import Hop, Task

Value = str | int | float | bool | Sequence[str]
SpanKind = Literal["server", "client", "internal"]

AGENT_NAME: Final = "gen_ai.agent.name"
AGENT_ID: Final = "gen_ai.agent.id"
CONVERSATION: Final = "gen_ai.conversation.id"
OPERATION: Final = "gen_ai.operation.name"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
INVOKE_AGENT: Final = "invoke_agent"
CHAT: Final = "chat"
EXECUTE_TOOL: Final = "execute_tool"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
CACHE_READ: Final = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE: Final = "gen_ai.usage.cache_creation.input_tokens"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOOL_CALL: Final = "gen_ai.tool.call.id"
COST: Final = "covenant.cost"
CURRENCY: Final = "covenant.cost.currency"
BINDING: Final = "a2a.protocol.binding"
CARD_URL: Final = "a2a.agent.card.url"
REFERENCES: Final = "a2a.message.referenced_task_ids"
INPUT: Final = "gen_ai.input.messages"
OUTPUT: Final = "gen_ai.output.messages"
CONTENT_CHARS_MAX: Final = 8_000
TASK: Final = "covenant.task.id"
PARENT: Final = "covenant.task.parent"
TENANT: Final = "covenant.tenant"
ORIGIN: Final = "covenant.origin"
DEPTH: Final = "covenant.depth"
TURN: Final = "covenant.turn"
ATTEMPT: Final = "covenant.attempt"
LEASE: Final = "covenant.lease.id"
ENDING: Final = "covenant.ending"
CANCELED: Final = "canceled"
"""An outcome that is not an error."""
DUPLICATE: Final = "covenant.duplicate"

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}").fullmatch


class Trace(msgspec.Struct, frozen=True, gc=False):
    """A reference to a span: its trace context."""

    traceparent: str
    tracestate: str | None = None


class Span(Protocol):
    @property
    def trace(self) -> Trace | None: ...
    def note(self, attributes: Mapping[str, Value]) -> None: ...
    def end(self, *, failed: str | None = None, at_ms: int | None = None) -> None:
        """Ends the span. `failed` is an error code or the name of an error, never the text of a message."""

    def current(self) -> AbstractContextManager[object]:
        """A context in which this span is current: spans that begin in it are its children."""


class Tracer(Protocol):
    @property
    def on(self) -> bool: ...
    @property
    def content(self) -> bool:
        """Whether spans contain the text of messages. Off unless the operator switched it on."""

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, Value],
        *,
        parent: Trace | None = None,
        at_ms: int | None = None,
    ) -> Span:
        """Begins a span. Without `parent`, the span that is current here is its parent."""

    def within(self, trace: Trace) -> AbstractContextManager[object]:
        """A context in which the span of `trace`, of another process, is current."""


class _NoSpan:
    trace: None = None

    def note(self, attributes: Mapping[str, Value]) -> None: ...
    def end(self, *, failed: str | None = None, at_ms: int | None = None) -> None: ...
    def current(self) -> AbstractContextManager[object]:
        return nullcontext()


class NoTracer:
    on: bool = False
    content: bool = False

    def begin(self, *_: object, **__: object) -> Span:
        return _NO_SPAN

    def within(self, trace: Trace) -> AbstractContextManager[object]:  # noqa: ARG002  (as a tracer is called)
        return nullcontext()


_NO_SPAN: Final = _NoSpan()
OFF: Final[Tracer] = NoTracer()


def trace_of(source: Task | Hop) -> Trace | None:
    """The valid trace context of a task or hop, or None. An invalid one is ignored: no request is refused for it."""
    parent = source.traceparent
    return Trace(parent, source.tracestate) if parent is not None and _PARENT(parent) else None


def traced(task: Task, trace: Trace | None) -> Task:
    """The task with another trace context. The digest does not cover it, so the request stays the same."""
    if trace is None:
        return task
    return msgspec.structs.replace(task, traceparent=trace.traceparent, tracestate=trace.tracestate)


def attributes_of(task: Task) -> dict[str, Value]:
    agent = task.recipient.display
    found: dict[str, Value] = {
        AGENT_NAME: agent.partition("@")[0],
        AGENT_ID: agent,
        CONVERSATION: task.context_id or task.id,
        TASK: task.id,
        ORIGIN: task.origin,
        DEPTH: task.depth,
    }
    if task.tenant is not None:
        found[TENANT] = task.tenant
    if task.parent is not None:
        found[PARENT] = task.parent
    if task.reference_task_ids:
        found[REFERENCES] = task.reference_task_ids
    return found


def message(role: str, text: str) -> str:
    """Encodes a message in the JSON form of the OpenTelemetry conventions."""
    parts = [{"type": "text", "content": text[:CONTENT_CHARS_MAX]}]
    return msgspec.json.encode([{"role": role, "parts": parts}]).decode()
