"""Spans of agents' work: a task's time in the queue, each attempt at it, and each call to a remote agent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from covenant.exchange.tasks.builder import text_of
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.commands import LeasedTask
from covenant.model import tracing
from covenant.model.errors import CovenantError, Refusal
from covenant.model.task import Cause, Hop
from covenant.model.task_view import first_message
from covenant.model.tracing import INVOKE_AGENT, Span, Tracer, Value

if TYPE_CHECKING:
    from covenant.agents.runtime.job import Job
    from covenant.outbound.remote.remote_client import Remote

LOST: Final = "lost"
"""The reason for stopping a job whose lease was taken away."""
TOKENS: Final = {"input_tokens": tracing.INPUT_TOKENS, "output_tokens": tracing.OUTPUT_TOKENS}


def begin_attempt(tracer: Tracer, leased: LeasedTask) -> tuple[Span, LeasedTask]:
    """Begins the span of an attempt. Returns it, and the leased task with that span as parent of its calls."""
    task, lease = leased.task, leased.lease
    attributes = tracing.attributes_of(task)
    attributes |= {
        tracing.OPERATION: INVOKE_AGENT,
        tracing.TURN: leased.turn,
        tracing.ATTEMPT: lease.attempt,
        tracing.LEASE: lease.lease_id,
    }
    if tracer.content:
        messages = leased.messages or (first_message(task),)
        attributes[tracing.INPUT] = tracing.message("user", "\n".join(text_of(each.parts) for each in messages))
    name = f"{INVOKE_AGENT} {attributes[tracing.AGENT_NAME]}"
    span = tracer.begin(name, "internal", attributes, parent=tracing.trace_of(task), at_ms=lease.leased_at_ms)
    return span, msgspec.structs.replace(leased, task=tracing.traced(task, span.trace))


async def trace_queue(tracer: Tracer, leased: LeasedTask, ledger: Ledger) -> None:
    """Makes the span of a first attempt's wait. The time when a later attempt was queued is not recorded."""
    task, lease = leased.task, leased.lease
    entry = await ledger.entry(task.id)
    if entry is None or leased.turn != 1 or lease.attempt != 1:
        return
    attributes = {**tracing.attributes_of(task), tracing.TURN: leased.turn, tracing.ATTEMPT: lease.attempt}
    name = f"queue {attributes[tracing.AGENT_NAME]}"
    tracer.begin(name, "internal", attributes, parent=tracing.trace_of(task), at_ms=entry.accepted_at_ms).end(
        at_ms=lease.leased_at_ms
    )


def end_attempt(span: Span, job: Job) -> None:
    ending, failed = job.outcome
    attributes: dict[str, Value] = {tracing.ENDING: ending}
    usage = job.notes.get("usage")
    if isinstance(usage, dict):
        attributes |= {TOKENS[name]: int(used) for name, used in usage.items() if name in TOKENS}
    if job.tracer.content and (text := text_of(job.result_content)):
        attributes[tracing.OUTPUT] = tracing.message("assistant", text)
    span.note(attributes)
    span.end(failed=ending if failed else None)


async def end_lost(span: Span, job: Job, ledger: Ledger) -> None:
    """Ends the span of an attempt that somebody else ended. A cancel is no error, nor is work that begins again."""
    at_ms, ending, failed = ledger.now_ms(), LOST, None
    try:
        found = await ledger.show(job.task.id, None, 0)
    except Refusal:
        found = None
    if found is not None and found.cause is not None:
        ending = tracing.CANCELED if found.cause == Cause.CANCEL else found.cause
        failed = None if ending == tracing.CANCELED else ending
    span.note({tracing.ENDING: ending})
    span.end(failed=failed, at_ms=at_ms)


@contextmanager
def trace_call(job: Job, remote: Remote, hop: Hop) -> Iterator[Hop]:
    """A span of a call to a remote agent; the agent gets this span's context."""
    tracer, task = job.tracer, job.task
    if not tracer.on:
        yield hop
        return
    card, interface = remote.card, remote.interface
    name = card.name if card is not None else interface.url
    attributes: dict[str, Value] = {
        tracing.OPERATION: INVOKE_AGENT,
        tracing.AGENT_NAME: name,
        tracing.CONVERSATION: task.context_id or task.id,
        tracing.TASK: task.id,
        tracing.BINDING: interface.binding,
        "server.address": interface.url,
    }
    if card is not None and card.url:
        attributes[tracing.CARD_URL] = card.url
    span = tracer.begin(f"{INVOKE_AGENT} {name}", "client", attributes, parent=tracing.trace_of(task))
    trace, failed = span.trace, None
    if trace is not None:
        hop = msgspec.structs.replace(hop, traceparent=trace.traceparent, tracestate=trace.tracestate)
    try:
        yield hop
    except BaseException as error:
        code = error.code if isinstance(error, CovenantError) and hasattr(error, "code") else type(error).__name__
        if isinstance(error, asyncio.CancelledError):
            span.note({tracing.ENDING: tracing.CANCELED})
        else:
            failed = str(code)
        raise
    finally:
        span.end(failed=failed)
