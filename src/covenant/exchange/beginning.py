"""Beginning a task: accepted, and handed in the same record to whoever can start on it in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from covenant.exchange.hands import Hands, Slot
from covenant.exchange.tracing import accepting
from covenant.ledger.contract import Ledger
from covenant.ledger.machine.commands import Accept, Accepted, LeasedTask
from covenant.ledger.machine.states import State
from covenant.model.asking import PushConfig
from covenant.model.task import Task
from covenant.model.tracing import DUPLICATE, OFF, Trace, Tracer, trace_of, traced


class Beginnings:
    def __init__(self, ledger: Ledger, hands: Hands, tracer: Tracer = OFF) -> None:
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
        with accepting(self._tracer, task, trace) as span:
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

    async def _start_later(self, task: Task, slot: Slot) -> None:
        entry = await self._ledger.entry(task.id)
        lease = entry.lease if entry is not None and entry.state is State.LEASED else None
        starter = slot.starter
        if lease is not None and (lease.leased_to, lease.boot, lease.attempt) == (starter.holder, starter.boot, 1):
            slot.start(LeasedTask(task, lease))
        else:
            slot.give_back()
