"""Withdrawing what is done elsewhere: a task that ends here while nobody works on it is ended there too.

Whoever works on a remote task sees to that itself. What is left are tasks that wait for an answer, that lost their
holder, or that ended just when the daemon died: they are watched, or found at the start, and the remote is told.
To tell it twice does no harm, so nothing is kept about it: after a start, what ended in the last hour is told again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from covenant.exchange.delegation import REMOTE, target_of, tenant_of
from covenant.ledger.contract import Ledger, ListQuery, QueueQuery
from covenant.model.errors import CovenantError
from covenant.model.task_view import fold
from covenant.model.ids import AgentId, TaskId
from covenant.model.result import Ending
from covenant.model.task_event import Ended, Step
from covenant.model.task import Target
from covenant.model.task_event import StatusUpdate
from covenant.outbound.failures import CallFailed
from covenant.outbound.remote import Remote
from covenant.outbound.remote_errors import PASSING, RemoteError

WATCHED_MAX: Final = 10_000
FOUND_MAX: Final = 100
"""Of each sort, at a start."""
RECENTLY_MS: Final = 3_600_000
PAUSES_S: Final = (1.0, 3.0, 9.0, 27.0, 81.0)
WATCH_S: Final = 600.0
CANCEL_S: Final = 10.0

log = logging.getLogger(__name__)

Open = Callable[[str, Target], Awaitable[Remote]]
"""A remote agent for a tenant, by its URL or by its name among those that the tenant may call."""


class Withdrawals:
    def __init__(self, ledger: Ledger, open_remote: Open) -> None:
        self._ledger = ledger
        self._open = open_remote
        self._under_way: dict[asyncio.Task[None], None] = {}

    def watch(self, tenant: str, task_id: TaskId, target: Target, remote_task_id: str) -> None:
        """Until it has ended; if not by an answer, the remote is told."""
        self._begin(partial(self._watch, tenant, task_id, target, remote_task_id))

    def tell(self, tenant: str, target: Target, remote_task_id: str) -> None:
        """Nobody waits for this any more."""
        self._begin(partial(self._tell, tenant, target, remote_task_id))

    def look_after(self, identity: AgentId, target: Target | None) -> None:
        """What an earlier run of this daemon has left of a remote agent's tasks."""
        self._begin(partial(self._find, identity, target))

    async def stop(self) -> None:
        under_way = tuple(self._under_way)
        for each in under_way:
            each.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def _begin(self, work: Callable[[], Awaitable[None]]) -> None:
        if len(self._under_way) >= WATCHED_MAX:
            log.warning("remote.unwatched", extra={"watched": len(self._under_way)})
            return
        doing = asyncio.ensure_future(self._unharmed(work))
        self._under_way[doing] = None
        doing.add_done_callback(lambda done: self._under_way.pop(done, None))

    async def _unharmed(self, work: Callable[[], Awaitable[None]]) -> None:
        """`work` is called here, and not by whoever begins it: a start that fails ends this before its first step."""
        try:
            await work()
        except CovenantError as error:
            log.warning("remote.not_withdrawn", extra={"reason": str(error)})

    async def _watch(self, tenant: str, task_id: TaskId, target: Target, remote_task_id: str) -> None:
        with self._ledger.watch(task_id) as watch:
            # It may have ended before anybody watched.
            if await self._ledger.finished(task_id, 0):
                steps = await self._ledger.steps(task_id, 0, 1_000)
                ended = next((step.what for step in reversed(steps) if isinstance(step.what, Ended)), None)
            else:
                ended = None
                while ended is None and not watch.cut:
                    news = await watch.next(WATCH_S)
                    ended = next((step.what for step in news if isinstance(step.what, Ended)), None)
        if ended is None or ended.ending in (Ending.CANCELED, Ending.FAILED):
            await self._tell(tenant, target, remote_task_id)

    async def _tell(self, tenant: str, target: Target, remote_task_id: str) -> None:
        for pause_s in (*PAUSES_S, None):
            try:
                async with asyncio.timeout(CANCEL_S):
                    remote = await self._open(tenant, target)
                    try:
                        await remote.cancel(remote_task_id)
                    finally:
                        await remote.close()
                log.info("remote.withdrawn", extra={"remote_task": remote_task_id})
                return
            except (RemoteError, CallFailed, TimeoutError) as failure:
                code = getattr(failure, "code", "timed_out")
                passing = isinstance(failure, TimeoutError | CallFailed) or code in PASSING or code == "no_card"
                if not passing or pause_s is None:
                    # It has ended, most likely. If it has not, it ends with its deadline.
                    log.info("remote.not_withdrawn", extra={"remote_task": remote_task_id, "code": code})
                    return
                await asyncio.sleep(pause_s)

    async def _find(self, identity: AgentId, target: Target | None) -> None:
        ledger, me, tenant = self._ledger, identity.pubkey, tenant_of(identity)
        for state in ("in_flight", "parked"):
            query = QueueQuery(viewer=me, limit=FOUND_MAX, state_filter=state)
            for entry in (await ledger.queue(query)).tasks:
                if entry.task.recipient.pubkey != me or (state == "in_flight" and not entry.holder_lost):
                    continue
                steps = await ledger.steps(entry.task.id, 0, 1_000)
                where, there = target_of(entry.task) or target, noted(steps)
                if where and there is not None:
                    self.watch(tenant, entry.task.id, where, there)
        since_ms = ledger.now_ms() - RECENTLY_MS
        for ended in ("canceled", "failed"):
            query_ended = ListQuery(recipient=me, state=ended, moved_since_ms=since_ms, limit=FOUND_MAX)
            for steps in (await ledger.listing(query_ended)).tasks:
                view, there = fold(steps), noted(steps)
                where = (target_of(view.task) if view is not None else None) or target
                if where and there is not None:
                    self.tell(tenant, where, there)


def noted(steps: tuple[Step, ...] | Any) -> str | None:
    """Which task it is there, as it was last noted here."""
    for step in reversed(steps):
        what = step.what
        if isinstance(what, StatusUpdate) and isinstance(note := (what.metadata or {}).get(REMOTE), dict):
            with suppress(KeyError):
                return str(note["task_id"])
    return None
