"""Beginning a task: accepted, and handed in the same record to whoever can start on it in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Protocol

from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.commands import Accept, Accepted, LeasedTask, Starter
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.states import State
from covenant.model.a2a_requests import PushConfig
from covenant.model.errors import Refusal
from covenant.model.ids import PublicKey
from covenant.model.result import Result, ResultStatus
from covenant.model.task import Task
from covenant.model.tracing import (
    AGENT_NAME,
    ATTEMPT,
    DUPLICATE,
    ENDING,
    INVOKE_AGENT,
    LEASE,
    OFF,
    OPERATION,
    TURN,
    Span,
    Trace,
    Tracer,
    attributes_of,
    trace_of,
    traced,
)


class WorkerSlot(Protocol):
    """A place kept free for one task. Used once: `start` it, or give it back."""

    @property
    def starter(self) -> Starter: ...
    def start(self, leased: LeasedTask) -> None:
        """The lease is durable: begin. Does not wait."""

    def give_back(self) -> None:
        """The task was not leased: it is queued, known already, or refused."""


class LocalWorkers(Protocol):
    def reserve(self, recipient: PublicKey) -> WorkerSlot | None:
        """None if nobody here works for this recipient, or nobody is free."""


class TaskAcceptor:
    def __init__(self, ledger: Ledger, hands: LocalWorkers, tracer: Tracer = OFF) -> None:
        self._ledger = ledger
        self._hands = hands
        self._tracer = tracer
        self._starting: set[asyncio.Future[None]] = set()

    def accept(
        self,
        task: Task,
        digest: str,
        push: PushConfig | None = None,
        trace: Trace | None = None,
        *,
        minted: bool = False,
    ) -> Awaitable[Accepted]:
        """`trace`: whose it is, where the task does not say so itself. `minted`: its id is new, and from here."""
        if not self._tracer.on:
            return self._accept(task if trace is None else traced(task, trace), digest, push, minted=minted)
        return self._accept_traced(task, digest, push, trace or trace_of(task), minted=minted)

    async def _accept_traced(
        self, task: Task, digest: str, push: PushConfig | None, trace: Trace | None, *, minted: bool
    ) -> Accepted:
        with accept_span(self._tracer, task, trace) as span:
            accepted = await self._accept(traced(task, span.trace), digest, push, minted=minted)
            span.note({DUPLICATE: accepted.duplicate})
        return accepted

    async def _accept(self, task: Task, digest: str, push: PushConfig | None, *, minted: bool) -> Accepted:
        slot = self._hands.reserve(task.recipient.pubkey)
        starter, started = None if slot is None else slot.starter, False
        try:
            accepted = await self._ledger.commit(
                Accept(task=task, digest=digest, starter=starter, push=push, minted=minted)
            )
            if slot is not None and accepted.leased is not None:
                slot.start(accepted.leased)
                started = True
        except asyncio.CancelledError:
            # The caller has left, and what was decided stands: whoever was to start must hear of it all the same.
            if slot is not None:
                started = True
                self._starting.add(starting := asyncio.ensure_future(self._start_later(task, slot)))
                starting.add_done_callback(self._starting.discard)
            raise
        finally:
            if slot is not None and not started:
                slot.give_back()
        return accepted

    async def _start_later(self, task: Task, slot: WorkerSlot) -> None:
        entry = await self._ledger.entry(task.id)
        lease = entry.lease if entry is not None and entry.state is State.LEASED else None
        starter = slot.starter
        if lease is not None and (lease.leased_to, lease.boot, lease.attempt) == (starter.holder, starter.boot, 1):
            slot.start(LeasedTask(task, lease))
        else:
            slot.give_back()


@contextmanager
def accept_span(tracer: Tracer, task: Task, parent: Trace | None) -> Iterator[Span]:
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


def record_attempt(tracer: Tracer, before: Entry, result: Result) -> None:
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
