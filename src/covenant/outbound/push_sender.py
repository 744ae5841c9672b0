"""The push sender: delivers every step of a task to its push configurations, in order, until it is accepted or given
up.

Deliveries are at least once, and in order for each configuration; no step is skipped. A configuration of A2A 1.0 gets
each step, one of 0.3 the whole task after each step. Steps come from memory while they are recent (`RecentSteps`), else
from the archive. Cursors are saved soon after, many at a time; a crash in between repeats a delivery. A configuration
that fails pauses, longer each time; once given up, it waits for the operator. No configuration waits for another's host
(`FairScheduler`). Deleting or replacing one stops its delivery; those of a disabled tenant wait. `run` may be canceled
and called again: it begins with what the ledger knows.
"""

from __future__ import annotations

import asyncio
import base64
import heapq
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.commands import MovePushes
from covenant.model.errors import Invalid, Refusal
from covenant.model.ids import TaskId
from covenant.model.push import FAILURE_LENGTH_MAX, Push, PushMove, move_of
from covenant.model.rate_limits import Backoff
from covenant.model.settings import PushSettings
from covenant.model.task import Task
from covenant.model.task_event import ArtifactUpdate, Began, Ended, Step
from covenant.model.task_view import TaskViewBuilder
from covenant.outbound.call_errors import AddressRefused, CallFailed, retry_after
from covenant.outbound.concurrency import FairScheduler, MoveSaver, wait_at_most
from covenant.outbound.http_fetcher import Fetcher
from covenant.outbound.recent_steps import RecentSteps
from covenant.outbound.urls import InvalidUrl, read_url
from covenant.seal.keys import WebhookSigner
from covenant.wire.a2a.dialects import V03, V1
from covenant.wire.a2a.parts_v1 import Link, unlinked

MEDIA_TYPES: Final = {V1.version.value: "application/a2a+json", V03.version.value: "application/json"}
"""The content type of a delivery, by the version of its configuration."""
GONE: Final = 410
log = logging.getLogger(__name__)
STEPS_AT_ONCE: Final = 8
"""How many steps one delivery reads from history at once, and so holds in memory."""
STEPS_FOLDED_AT_ONCE: Final = 256
BURST_MAX: Final = 32
"""How many deliveries of one configuration are made in a row before another one at its host has a turn."""
PAUSE_FACTOR: Final = 3
JITTER: Final = 0.2
LOOK_AGAIN_MS: Final = 60_000
"""The longest sleep without a look at the wall clock, which may have been set."""
DISABLED_LOOK_MS: Final = 60_000
"""The pause before a disabled tenant is looked at again: its deliveries wait until it is enabled."""
LEDGER_RETRY_MS: Final = 1_000
"""The pause after the ledger could not be read, which does not count as the receiver's failure."""
STOP_S: Final = 2.0
"""How long a stop waits for deliveries under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFailure:
    """`gone`: the receiver accepts no more deliveries, ever.

    `retry_after_ms`: when it may take the next one.
    """

    reason: str
    gone: bool = False
    retry_after_ms: int = 0


class WebhookClient:
    """Posts one step of a task to a webhook, authenticated as its owner asked, and signed (docs/formats/push.md).

    The address is checked when it is called, and not when it was registered: by then the name may lead to another
    address, and a refusal at registration would tell strangers about the internal network.
    """

    def __init__(self, fetcher: Fetcher, signer: WebhookSigner, now_ms: Callable[[], int]) -> None:
        self._fetcher = fetcher
        self._signer = signer
        self._now_ms = now_ms

    async def deliver(self, push: Push, step: Step, body: bytes, *, attempt: int) -> PushFailure | None:
        headers = self._headers(push, step, attempt, body)
        try:
            answer = await self._fetcher.fetch("POST", push.config.url, headers=headers, content=body)
        except (AddressRefused, CallFailed) as failed:
            return PushFailure(reason=failed.detail[:FAILURE_LENGTH_MAX])
        except Invalid as wrong:
            return PushFailure(reason=wrong.message[:FAILURE_LENGTH_MAX])
        if 200 <= answer.status < 300:
            return None
        return PushFailure(
            reason=f"HTTP {answer.status}",
            gone=answer.status == GONE,
            retry_after_ms=int((retry_after(answer.headers, self._now_ms()) or 0.0) * 1000),
        )

    def _headers(self, push: Push, step: Step, attempt: int, body: bytes) -> Mapping[str, str]:
        delivery_id, timestamp_s = f"{push.key}-{step.generation}", self._now_ms() // 1000
        headers = {
            "content-type": MEDIA_TYPES[push.config.version],
            "a2a-version": push.config.version,
            "webhook-id": delivery_id,
            "webhook-timestamp": str(timestamp_s),
            "webhook-signature": self._signer.sign(delivery_id, timestamp_s, body),
            "covenant-key-id": self._signer.key_id,
            "covenant-task-id": push.task_id,
            "covenant-generation": str(step.generation),
            "covenant-push-id": push.id,
            "covenant-attempt": str(attempt),
        }
        return headers | auth_headers(push)


def auth_headers(push: Push) -> dict[str, str]:
    """The headers that authenticate us to the receiver, as the configuration's owner gave them."""
    config, headers = push.config, {}
    if config.token is not None:
        headers["x-a2a-notification-token"] = config.token
    known = config.authentication
    if known is not None and known.credentials is not None:
        credentials = known.credentials
        if known.scheme.lower() == "basic" and ":" in credentials:
            # Base64 has no colon, so this is a plain name and password.
            credentials = base64.b64encode(credentials.encode()).decode()
        headers["authorization"] = f"{known.scheme} {credentials}"
    return headers


Key = tuple[TaskId, str]

Encode = Callable[[Step, bool], bytes | None]
"""The body of a step, and whether more steps follow it at once. None: the step has no body of its own."""

replace = msgspec.structs.replace


@dataclass(slots=True)
class _Delivery:
    """A delivery that is running. `again`: there may be more steps than it has read."""

    push: Push
    tenant: str
    host: str
    task: asyncio.Task[None] | None = None
    again: bool = False


class PushSender:
    """`tally` is called with the outcome of each attempt: delivered, failed or dead. `chance`: a number from 0 to 1."""

    def __init__(
        self,
        ledger: Ledger,
        webhooks: WebhookClient,
        limits: PushSettings,
        *,
        chance: Callable[[], float],
        tally: Callable[[str], None] = lambda _: None,
        disabled_look_ms: int = DISABLED_LOOK_MS,
        shared: bool = False,
        link: Link = unlinked,
    ) -> None:
        """`shared`: other nodes write steps of the same tasks, and this node learns of them later."""
        self._ledger = ledger
        self._webhooks = webhooks
        self._limits = limits
        self._chance = chance
        self._tally = tally
        self._disabled_look_ms = disabled_look_ms
        self._shared = shared
        self._link = link
        self.saved = asyncio.Event()
        """Set each time that cursors were saved."""
        self._reset()

    def _reset(self) -> None:
        limits = self._limits
        # One tenant gets at most half of the places.
        per_tenant = max(1, limits.at_once_max // 2)
        self._scheduler: FairScheduler[_Delivery] = FairScheduler(
            at_once=limits.at_once_max, per_tenant=per_tenant, per_host=limits.at_once_per_host_max
        )
        self._deliveries: dict[Key, _Delivery] = {}
        """Waiting for a turn, or under way."""
        self._sleeping: dict[Key, int] = {}
        self._alarms: list[tuple[int, Key]] = []
        self._saver: MoveSaver[Key, PushMove] = MoveSaver(
            lambda moves: self._ledger.commit(MovePushes(moves=moves)), lambda _: self.saved.set()
        )
        self._touched: dict[TaskId, None] = {}
        """Tasks with new steps."""
        self._recent = RecentSteps()
        self._changed = asyncio.Event()
        self._read_ms = 0

    async def run(self) -> None:
        """Runs until canceled.

        If cursors cannot be saved any more, nothing is delivered: every delivery would be repeated.
        """
        self._reset()
        self._ledger.on_push(self._on_change)
        await self._read_outbox()
        saving = asyncio.create_task(self._saver.run(self._note_unsaved if self._shared else None))
        saving.add_done_callback(lambda _: self._changed.set())
        try:
            await self._dispatch(saving)
        finally:
            await self._stop(saving)

    async def _read_outbox(self) -> None:
        self._read_ms = self._ledger.clock.monotonic_ms()
        for push in await self._ledger.outbox():
            self._schedule(push)

    async def _dispatch(self, saving: asyncio.Task[None]) -> None:
        while not saving.done():
            self._changed.clear()
            while self._touched:
                task_id = next(iter(self._touched))
                del self._touched[task_id]
                await self._update_task(task_id)
            await self._wake()
            while (delivery := self._scheduler.next()) is not None:
                delivery.task = asyncio.create_task(self._run_delivery(delivery))
            await self._pause()
            if self._shared and self._ledger.clock.monotonic_ms() - self._read_ms >= LOOK_AGAIN_MS:
                await self._read_outbox()  # steps that this node learned of too late, or never
        error = saving.exception()
        assert isinstance(error, Refusal), error
        log.error("push.stopped", extra={"code": error.code, "reason": error.message})
        for delivery in tuple(self._deliveries.values()):
            if delivery.task is not None:
                delivery.task.cancel()
        await asyncio.Event().wait()

    async def _pause(self) -> None:
        wait_ms = LOOK_AGAIN_MS
        if self._alarms:
            wait_ms = min(wait_ms, max(0, self._alarms[0][0] - self._ledger.clock.monotonic_ms()))
        await wait_at_most(self._changed, wait_ms / 1000)

    async def _stop(self, saving: asyncio.Task[None]) -> None:
        """Gives deliveries under way a moment to end, and saves their cursors."""
        self._ledger.on_push(lambda _, __: None)
        under_way = [delivery.task for delivery in self._deliveries.values() if delivery.task is not None]
        if under_way:
            await asyncio.wait(under_way, timeout=STOP_S)
        for task in (*under_way, saving):
            task.cancel()
        await asyncio.gather(*under_way, saving, return_exceptions=True)
        try:
            await self._saver.save()
        except Refusal as refusal:
            self._note_unsaved(refusal)

    def _note_unsaved(self, refusal: Refusal) -> None:
        log.warning("push.unsaved", extra={"code": refusal.code, "count": len(self._saver.unsaved)})

    def _on_change(self, task_id: TaskId, step: Step | None) -> None:
        """A task with configurations, or a configuration, has a new durable record."""
        if step is not None:
            self._recent.add(task_id, step)
        elif self._shared:
            self._recent.forget(task_id)  # another node may have written newer steps
        self._touched[task_id] = None
        self._changed.set()

    async def _update_task(self, task_id: TaskId) -> None:
        known = {push.id: push for push in await self._ledger.pushes(task_id)}
        for push in known.values():
            self._schedule(push)
        for (of_task, push_id), delivery in tuple(self._deliveries.items()):
            if of_task == task_id and delivery.task is not None and not _same(delivery.push, known.get(push_id)):
                delivery.task.cancel()

    def _schedule(self, push: Push, *, pause_over: bool = False) -> None:
        """Schedules a delivery, if one is due. `pause_over`: its pause has ended, even if the wall clock was set."""
        key = (push.task_id, push.id)
        delivery = self._deliveries.get(key)
        if delivery is not None:
            delivery.again = True
            return
        if push.dead_at_ms is not None or push.done:
            return  # given up; or made after the end of its task, so that it gets none of its steps
        move = self._progress_of(push)
        if move.dead:
            return
        now_ms = self._ledger.now_ms()
        if move.next_ms > now_ms and not pause_over:
            if key not in self._sleeping:
                # A clock that was set back must not make a pause longer than the longest one.
                self._sleep(key, min(move.next_ms - now_ms, self._limits.pause_ms_max))
            return
        tenant, host = push.recipient.display.rpartition("@")[2], _host(push)
        if self._disabled(tenant):
            if key not in self._sleeping:
                self._sleep(key, self._disabled_look_ms)
            return
        self._sleeping.pop(key, None)
        self._deliveries[key] = delivery = _Delivery(push, tenant, host)
        self._scheduler.wait(tenant, host, delivery)
        self._changed.set()

    def _sleep(self, key: Key, pause_ms: int) -> None:
        until_ms = self._ledger.clock.monotonic_ms() + pause_ms
        if self._sleeping.get(key) != until_ms:
            self._sleeping[key] = until_ms
            heapq.heappush(self._alarms, (until_ms, key))
            self._changed.set()

    async def _wake(self) -> None:
        now_ms = self._ledger.clock.monotonic_ms()
        while self._alarms and self._alarms[0][0] <= now_ms:
            until_ms, key = heapq.heappop(self._alarms)
            if self._sleeping.get(key) == until_ms:
                del self._sleeping[key]
                push = await self._find(key)
                if push is not None:
                    self._schedule(push, pause_over=True)

    def _disabled(self, tenant: str) -> bool:
        known = self._ledger.tenant(tenant)
        return known is not None and known.disabled_at_ms is not None

    async def _find(self, key: Key) -> Push | None:
        return next((push for push in await self._ledger.pushes(key[0]) if push.id == key[1]), None)

    def _progress_of(self, push: Push, before: PushMove | None = None) -> PushMove:
        """How far a delivery is. `before`: its unsaved move just before `push` was read. It may be saved by now."""
        standing = move_of(push)
        for ahead in (before, self._saver.unsaved.get((push.task_id, push.id))):
            if ahead is not None and (ahead.key, ahead.revision) == (push.key, push.revision):
                standing = max(standing, ahead, key=lambda move: move.progress)
        return standing

    async def _run_delivery(self, delivery: _Delivery) -> None:
        key = (delivery.push.task_id, delivery.push.id)
        try:
            before = self._saver.unsaved.get(key)
            push = await self._find(key)
            if push is not None and push.dead_at_ms is None:
                delivery.push = push
                await self._deliver(delivery, self._progress_of(push, before))
        except Refusal as refusal:
            log.warning("push.unread", extra={"task_id": key[0], "code": refusal.code})
            self._sleep(key, LEDGER_RETRY_MS)
        except Exception:
            log.exception("push.fault", extra={"task_id": key[0], "push_id": key[1]})
            failed = PushFailure(reason="internal error; the daemon's log has the trace")
            self._fail(delivery.push, self._progress_of(await self._find(key) or delivery.push), failed)
        finally:
            del self._deliveries[key]
            self._scheduler.done(delivery.tenant, delivery.host)
            self._changed.set()
            await self._schedule_again(delivery, key)

    async def _schedule_again(self, delivery: _Delivery, key: Key) -> None:
        """Schedules the next delivery, if there are more steps by now."""
        try:
            push = await self._find(key)
        except Refusal:
            self._sleep(key, LEDGER_RETRY_MS)
            return
        if push is not None and (not _same(delivery.push, push) or (delivery.again and key not in self._sleeping)):
            self._schedule(push)

    async def _deliver(self, delivery: _Delivery, standing: PushMove) -> None:
        push, count, encode = delivery.push, 0, None
        while count < BURST_MAX and not (standing.dead or self._disabled(delivery.tenant)):
            delivery.again = False
            # The steps read here are durable, and so is the configuration that was found before.
            steps = await self._steps(push.task_id, standing.delivered, STEPS_AT_ONCE)
            if not steps:
                return
            if encode is None:
                encode = await self._encoder(push, standing.delivered, steps[0])
            for step in steps:
                body = encode(step, step is not steps[-1])
                if body is None:
                    continue
                failed = await self._webhooks.deliver(push, step, body, attempt=standing.attempts + 1)
                if failed is not None:
                    self._fail(push, standing, failed)
                    return
                standing = replace(standing, delivered=step.generation, attempts=0, next_ms=0, failure=None)
                self._saver.keep((push.task_id, push.id), standing)
                self._tally("delivered")
                count += 1
            if isinstance(steps[-1].what, Ended):
                return
        delivery.again = True

    async def _steps(self, task_id: TaskId, after: int, limit: int) -> Sequence[Step]:
        recent = self._recent.after(task_id, after, limit)
        return recent if recent is not None else await self._ledger.steps(task_id, after, limit)

    async def _encoder(self, push: Push, delivered: int, first: Step) -> Encode:
        """For 1.0 a body has one step, as in a stream; for 0.3 the whole task after a step."""
        link = self._link
        if push.config.version != V03.version:
            task = first.what.task if isinstance(first.what, Began) else await self._task(push.task_id)
            return lambda step, _: V1.responses.encode_step(task, step, link)
        built = TaskViewBuilder()
        while built.generation < delivered:
            limit = min(STEPS_FOLDED_AT_ONCE, delivered - built.generation)
            built.catch_up(await self._steps(push.task_id, built.generation, limit))

        def encode_task(step: Step, more: bool) -> bytes | None:  # noqa: FBT001  (as `Encode` says)
            built.add(step)
            if more and isinstance(step.what, ArtifactUpdate):
                return None
            return V03.responses.encode_task(built.existing_view(), None, link)

        return encode_task

    async def _task(self, task_id: TaskId) -> Task:
        task = self._recent.task(task_id)
        if task is None and (entry := await self._ledger.entry(task_id)) is not None:
            task = entry.task
        if task is None:
            (first,) = await self._ledger.steps(task_id, 0, 1)
            assert isinstance(first.what, Began)
            task = first.what.task
        self._recent.keep_task(task)
        return task

    def _fail(self, push: Push, standing: PushMove, failed: PushFailure) -> None:
        limits = self._limits
        attempts = standing.attempts + 1
        dead = failed.gone or attempts >= limits.attempts_max
        backoff = Backoff(limits.pause_ms, limits.pause_ms_max, PAUSE_FACTOR, JITTER)
        pause_ms = int(backoff.pause(attempts, self._chance()))
        pause_ms = min(max(pause_ms, failed.retry_after_ms), limits.pause_ms_max)
        next_ms = self._ledger.now_ms() + pause_ms
        move = replace(standing, attempts=attempts, failure=failed.reason, dead=dead, next_ms=0 if dead else next_ms)
        self._saver.keep((move.task_id, move.id), move)
        self._tally("dead" if dead else "failed")
        words = {"task_id": push.task_id, "push_id": push.id, "host": _host(push), "attempts": attempts}
        words |= {"generation": standing.delivered + 1, "reason": failed.reason}
        if dead:
            log.warning("push.dead", extra={**words, "look": "covenant a2a push list"})
        else:
            log.info("push.failed", extra={**words, "again_in_ms": pause_ms})
            self._sleep((push.task_id, push.id), pause_ms)


def _same(ours: Push, now: Push | None) -> bool:
    return now is not None and (ours.key, ours.revision) == (now.key, now.revision)


def _host(push: Push) -> str:
    """A webhook's host and port: the part of its address that is no secret."""
    try:
        return read_url(push.config.url).authority
    except InvalidUrl:
        return ""
