"""One message to a remote agent, followed until the agent has answered, or waits for the caller.

The task is followed by a stream, or by polls if there is no stream or it keeps breaking. A broken stream is resumed: by
the number of its last frame, or else from a snapshot, of which only the new part counts. After a snapshot frames may
repeat what it had, so the task is read once more at the end.

The message is posted again only if that cannot do the work twice: the remote said that it did not accept it, or it was
sent under an idempotency key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from covenant.model.a2a_requests import SendMessage
from covenant.model.errors import CovenantError
from covenant.model.rate_limits import Backoff
from covenant.model.task_view import RemoteArtifact, RemoteEvent, RemoteStatus, RemoteTask
from covenant.outbound.call_errors import CallFailed, OutcomeUnknown, RemoteRefused
from covenant.outbound.remote.a2a_transport import QUIET_S, A2ATransport, NumberedEvent, StreamItem
from covenant.outbound.remote.remote_task import RemoteTaskView

log = logging.getLogger(__name__)

FAILURES_MAX: Final = 8
"""How many failures in a row, without an answer in between, end the call."""
EMPTY_STREAMS_MAX: Final = 3
"""After this many resumed streams in a row without an event, the task is polled."""
UNANSWERED_QUIETS_MAX: Final = 30
"""A stream that has named no task and was quiet this often in a row, for a minute each time, counts as broken."""
RESENDS_MAX: Final = 5
FIRST_PAUSE_S: Final = 0.25
JITTER: Final = 0.1
AFTER_FAILURES: Final = Backoff(FIRST_PAUSE_S, 30.0, jitter=JITTER)
CANCEL_S: Final = 5.0
"""The time limit of a cancel request to the remote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMessage:
    ask: SendMessage
    headers: Mapping[str, str]
    streaming: bool
    repeatable: bool
    """Whether the message has an idempotency key."""
    troubled: Callable[[str], None] = lambda _: None
    """Called with the reason each time that the remote did not answer and is asked again."""
    poll_s: float = 3.0
    """The pause between two polls; the first ones are shorter."""
    within_ms: int = 300_000
    """The time limit of a call that the remote answers only when it is done."""
    chance: Callable[[], float] = lambda: 0.5
    """From 0 to 1, for the jitter of pauses."""


class TaskFollower:
    """`events` may be read once. A caller that leaves it early uses `cancel` if the remote is to stop."""

    def __init__(self, transports: Callable[[], Iterator[A2ATransport]], outgoing: OutgoingMessage) -> None:
        """`transports` gives the transports to the remote, the best first."""
        self.known = RemoteTaskView(outgoing.ask.message.task_id)
        self.transport: A2ATransport | None = None
        self.canceled: bool | None = None
        """Whether the remote was told to stop; None if there was no task to stop."""
        self._transports = transports
        self._outgoing = outgoing
        self._streaming = outgoing.streaming
        self._last_number: str | None = None
        self._failures = 0
        self._empty_streams = 0
        self._polls = 0
        self._retry_after_s: float | None = None
        self._sending: asyncio.Task[RemoteEvent] | None = None
        self._unanswered = False
        """Whether a stream was asked for and nothing of it has arrived yet."""
        self._may_have_repeated = False
        """Whether events may have been received twice."""

    async def events(self) -> AsyncGenerator[RemoteEvent]:
        async with aclosing(self._open()) as opening:
            async for event in opening:
                yield event
        assert self.transport is not None
        while not self.known.stopped:
            following = self._resume(self.transport) if self._streaming else self._poll(self.transport)
            async with aclosing(following):
                async for event in following:
                    yield event
        if self._may_have_repeated and self.known.state.terminal:
            async with aclosing(self._read_once_more(self.transport)) as looking:
                async for event in looking:
                    yield event

    async def cancel(self) -> None:
        """Tells the remote to stop if it is known to have begun; `canceled` says whether that worked.

        Never raises.
        """
        with suppress(CovenantError, TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                if self._sending is not None and not self.known.known:
                    # The message was on its way when the caller left: its answer names the task to stop.
                    for _ in self.known.take(await self._sending):
                        pass
                elif self._unanswered and self._outgoing.repeatable and self.transport is not None:
                    # The remote may have begun. Sent again with its key, the message names the task that it began.
                    ask = msgspec.structs.replace(self._outgoing.ask, blocking=False)
                    headers, within_ms = self._outgoing.headers, self._outgoing.within_ms
                    for _ in self.known.take(await self.transport.send(ask, headers, within_ms)):
                        pass
                task_id = self.known.task_id or self._outgoing.ask.message.task_id
                if self.transport is not None and task_id is not None and not self.known.state.terminal:
                    log.info("remote.canceled", extra={"remote_task": task_id})
                    self.canceled = False
                    canceled = await self.transport.cancel(task_id)
                    self.canceled = True
                    # The remote may report its usage only now.
                    for _ in self.known.take(canceled):
                        pass
        if self._sending is not None:
            self._sending.cancel()

    async def _open(self) -> AsyncGenerator[RemoteEvent]:
        """Posts the message over the first transport that the remote understands."""
        refused: RemoteRefused | None = None
        for transport in self._transports():
            self.transport, self._streaming = transport, self._outgoing.streaming
            try:
                async with aclosing(self._post(transport)) as posting:
                    async for event in posting:
                        yield event
                return
            except RemoteRefused as refusal:
                if refusal.code != "other_dialect" or self.known.known:
                    raise
                refused = refused or refusal
        assert refused is not None
        raise refused

    async def _post(self, transport: A2ATransport) -> AsyncGenerator[RemoteEvent]:
        """Posts the message until it is known to be accepted, as often as that is safe."""
        tries = 0
        while True:
            tries += 1
            try:
                attempt = self._send_to_stream(transport) if self._streaming else self._send_to_poll(transport)
                async with aclosing(attempt):
                    async for event in attempt:
                        yield event
                if self.known.known:
                    return
                trouble: CallFailed | RemoteRefused = CallFailed(
                    "bad_response", "the stream ended before it said anything"
                )
            except CallFailed as failure:
                if self.known.task_id is not None:
                    return
                if not failure.sent:
                    raise
                trouble = failure
            except RemoteRefused as refusal:
                if self.known.task_id is not None:
                    return
                if self._streaming and refusal.code in ("unsupported", "other_dialect") and not self.known.known:
                    # The remote may know this dialect, and only lack streams.
                    self._streaming = False
                    continue
                safe = refusal.code == "over_limit" or self._outgoing.repeatable
                if not refusal.transient or not safe or tries == RESENDS_MAX:
                    raise
                self._retry_after_s, trouble = refusal.retry_after_s, refusal
            again = trouble.transient and self._outgoing.repeatable if isinstance(trouble, CallFailed) else True
            if not again or tries == RESENDS_MAX:
                raise OutcomeUnknown(
                    f"the remote did not answer ({trouble}); it may have taken the message. "
                    "Send it again only if doing it twice is harmless, or with an idempotency key"
                ) from trouble
            self._outgoing.troubled(str(trouble))
            await self._pause()

    async def _send_to_stream(self, transport: A2ATransport) -> AsyncGenerator[RemoteEvent]:
        self._unanswered = True
        async with transport.stream(self._outgoing.ask, self._outgoing.headers) as frames:
            async for event in self._stream_events(self._watched_frames(transport, frames), resumed=False):
                self._unanswered = False
                yield event

    async def _send_to_poll(self, transport: A2ATransport) -> AsyncGenerator[RemoteEvent]:
        ask = msgspec.structs.replace(self._outgoing.ask, blocking=False)
        self._sending = asyncio.create_task(transport.send(ask, self._outgoing.headers, self._outgoing.within_ms))
        event = await asyncio.shield(self._sending)
        self._sending = None
        for new in self.known.take(event):
            yield new
        if ask.message.task_id is not None and self.known.state.waits:
            # The first answer may have the state from before the remote read the message: the next one counts.
            await self._pause()
            for new in self.known.take(await transport.get(ask.message.task_id)):
                yield new

    async def _stream_events(
        self, frames: AsyncIterator[NumberedEvent], *, resumed: bool
    ) -> AsyncGenerator[RemoteEvent]:
        """The new events of one stream, until it ends."""
        for_more = self._outgoing.ask.message.task_id is not None and not resumed
        async for number, event in frames:
            if resumed and self._was_seen(number, event):
                continue
            for new in self.known.take(event):
                self._failures = self._empty_streams = 0
                yield new
            self._last_number = number or self._last_number
            # A stream of a continued task may begin with the state from before the remote read the message: only later
            # states count, and an artifact shows no state.
            waits = isinstance(event, RemoteTask) and event.state.waits
            for_more = for_more and (waits or isinstance(event, RemoteArtifact))
            if self.known.stopped and not for_more:
                return

    async def _watched_frames(
        self, transport: A2ATransport, items: AsyncIterator[StreamItem]
    ) -> AsyncGenerator[NumberedEvent]:
        """The frames. If a quiet stream has missed something, the last one is a snapshot, and polls take over."""
        quiets = 0
        async for frame in items:
            quiets = quiets + 1 if frame is None else 0
            if frame is not None:
                yield frame
            elif self.known.task_id is None and quiets >= UNANSWERED_QUIETS_MAX:
                raise CallFailed("timed_out", f"the stream had no event in {quiets * QUIET_S / 60:g} minutes")
            elif (missed := await self._missed(transport)) is not None:
                self._streaming = False
                yield None, missed
                return

    async def _missed(self, transport: A2ATransport) -> RemoteTask | None:
        """The task, if the stream has missed some of it. None while no task is known: an answer may need its time."""
        if self.known.task_id is None:
            return None
        try:
            task = await transport.get(self.known.task_id)
        except (RemoteRefused, CallFailed) as trouble:
            self._not_answered(trouble)
            return None
        self._failures = 0
        return task if self.known.lacks(task) else None

    def _was_seen(self, number: str | None, event: RemoteEvent) -> bool:
        if not isinstance(event, RemoteArtifact | RemoteStatus) or number is None or self._last_number is None:
            return False
        return number.isdecimal() and self._last_number.isdecimal() and int(number) <= int(self._last_number)

    async def _resume(self, transport: A2ATransport) -> AsyncGenerator[RemoteEvent]:
        task_id = self.known.task_id
        assert task_id is not None
        if self._failures or self._empty_streams:
            await self._pause()
        self._empty_streams += 1
        try:
            async with transport.subscribe(task_id, self._last_number) as items:
                frames = self._watched_frames(transport, items)
                first = await anext(frames, None)
                if first is None:
                    return
                if self._last_number is None and not isinstance(first[1], RemoteTask):
                    # Without event numbers and without a snapshot, missed events cannot be known.
                    self._streaming = False
                    return
                self._may_have_repeated = self._may_have_repeated or self._last_number is None
                async for event in self._stream_events(_prepend(first, frames), resumed=True):
                    yield event
        except RemoteRefused as refusal:
            self._not_answered(refusal)
            # The task has finished meanwhile, or the remote cannot resume streams: a poll finds out.
            self._streaming = self._streaming and refusal.transient
        except CallFailed as failure:
            self._not_answered(failure)
        finally:
            self._streaming = self._streaming and self._empty_streams < EMPTY_STREAMS_MAX

    async def _read_once_more(self, transport: A2ATransport) -> AsyncGenerator[RemoteEvent]:
        """Reads the task once more; if that fails, the answer is what is known so far."""
        assert self.known.task_id is not None
        with suppress(RemoteRefused, CallFailed):
            for event in self.known.take(await transport.get(self.known.task_id)):
                yield event

    async def _poll(self, transport: A2ATransport) -> AsyncGenerator[RemoteEvent]:
        task_id = self.known.task_id
        assert task_id is not None
        await (self._pause() if self._failures else self._wait_for_poll())
        try:
            task = await transport.get(task_id)
        except (RemoteRefused, CallFailed) as trouble:
            self._not_answered(trouble)
            return
        self._failures = 0
        for event in self.known.take(task):
            yield event

    def _not_answered(self, trouble: RemoteRefused | CallFailed) -> None:
        """Counts a failure, or raises it if waiting longer is of no use."""
        self._failures += 1
        if isinstance(trouble, CallFailed):
            if not trouble.transient or self._failures >= FAILURES_MAX:
                raise trouble
            self._outgoing.troubled(trouble.message)
            return
        trouble.task_id = self.known.task_id
        self._retry_after_s = trouble.retry_after_s
        if trouble.code in ("unknown_task", "not_found"):
            raise RemoteRefused(
                "unknown_task",
                f"the remote no longer knows task {self.known.task_id}: {trouble.message}",
                task_id=self.known.task_id,
                status=trouble.status,
                rpc_code=trouble.rpc_code,
            ) from trouble
        going = trouble.transient or (self._streaming and trouble.code not in ("unauthenticated", "forbidden"))
        if not going or self._failures >= FAILURES_MAX:
            raise trouble
        if trouble.transient:
            self._outgoing.troubled(trouble.message)

    async def _wait_for_poll(self) -> None:
        self._polls += 1
        polls = Backoff(FIRST_PAUSE_S, self._outgoing.poll_s, jitter=JITTER)
        await asyncio.sleep(polls.pause(self._polls, self._outgoing.chance()))

    async def _pause(self) -> None:
        pause_s = AFTER_FAILURES.pause(self._failures + self._empty_streams + 1, self._outgoing.chance())
        asked_s, self._retry_after_s = self._retry_after_s, None
        # A remote that asks for a pause gets at least that long.
        await asyncio.sleep(max(pause_s, asked_s or 0.0))


async def _prepend(first: NumberedEvent, rest: AsyncIterator[NumberedEvent]) -> AsyncIterator[NumberedEvent]:
    yield first
    async for each in rest:
        yield each
