"""Spans of what the exchange does: accepting a task, and the attempts of workers outside at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from covenant.ledger.machine.entry import Entry
from covenant.model.errors import Refusal
from covenant.model.result import Result, ResultStatus
from covenant.model.task import Task
from covenant.model.tracing import (
    AGENT_NAME,
    ATTEMPT,
    ENDING,
    INVOKE_AGENT,
    LEASE,
    OPERATION,
    TURN,
    Span,
    Trace,
    Tracer,
    attributes_of,
    trace_of,
)


@contextmanager
def accepting(tracer: Tracer, task: Task, parent: Trace | None) -> Iterator[Span]:
    """While it is made durable."""
    attributes = attributes_of(task)
    span = tracer.begin(f"accept {attributes[AGENT_NAME]}", "server", attributes, parent=parent)
    failed: str | None = "canceled"
    try:
        yield span
        failed = None
    except Refusal as refusal:
        failed = refusal.code
        raise
    finally:
        span.end(failed=failed)


def tell_attempt(tracer: Tracer, before: Entry, result: Result) -> None:
    """The spans of an attempt by a worker outside, told when it is over: it may have outlived this daemon."""
    task, lease = before.task, before.lease
    if lease is None:
        return
    attributes = {**attributes_of(task), TURN: before.turn, ATTEMPT: lease.attempt}
    parent, name, leased_ms = trace_of(task), str(attributes[AGENT_NAME]), lease.leased_at_ms
    if before.turn == lease.attempt == 1:
        waited = tracer.begin(f"queue {name}", "internal", attributes, parent=parent, at_ms=before.accepted_at_ms)
        waited.end(at_ms=leased_ms)
    attributes |= {OPERATION: INVOKE_AGENT, LEASE: lease.lease_id, ENDING: result.status.value}
    span = tracer.begin(f"{INVOKE_AGENT} {name}", "internal", attributes, parent=parent, at_ms=leased_ms)
    span.end(failed="error" if result.status is ResultStatus.ERROR else None)
