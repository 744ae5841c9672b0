"""A client for remote agents over A2A.

    reply = await remote.send("Summarise this")
    if reply.waits:
        reply = await reply.continue_("In English, please")

    async for event in remote.stream("Summarise this"):
        if isinstance(event, RemoteArtifact):
            print(event.text, end="")

A remote gets the message, its own credential and, if the caller gives it, the depth of the call; nothing else of ours.
Its answer is bounded in size and time. Canceling the call, or running out of time, cancels the remote task.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self
from weakref import WeakSet

from covenant.model.a2a_requests import Message, SendMessage
from covenant.model.agent_card import GRPC, RemoteCard, RemoteInterface
from covenant.model.errors import Invalid
from covenant.model.task import Hop
from covenant.model.task_view import RemoteEvent, RemoteTask
from covenant.outbound.call_errors import RemoteError, RemoteTimedOut
from covenant.outbound.http_fetcher import Fetcher
from covenant.outbound.remote.a2a_transport import A2ATransport, HttpTransport
from covenant.outbound.remote.remote_registry import Credentials
from covenant.outbound.remote.remote_task import Reply, Sendable, parts_of, reply_of
from covenant.outbound.remote.task_follower import OutgoingMessage, TaskFollower
from covenant.wire.call_headers import call_context_headers, call_context_metadata

TIMEOUT_S: Final = 300.0
KEY_HEADER: Final = "idempotency-key"
FIRST_S: Final = 5.0
"""How long a caller that leaves waits for the first event, to learn which task to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    timeout_s: float = TIMEOUT_S
    poll_s: float = 3.0
    stream: bool | None = None
    """None: streams unless its card says that it has none."""
    chance: Callable[[], float] = lambda: 0.5
    left_ms: Callable[[int], int | None] | None = None
    """The time until a deadline; None if the clock cannot tell now."""


class Remote:
    """Made by `covenant.connect`."""

    def __init__(
        self,
        interfaces: Sequence[RemoteInterface],
        fetcher: Fetcher,
        credentials: Credentials,
        *,
        card: RemoteCard | None = None,
        options: RemoteOptions | None = None,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.card = card
        self._interfaces = list(interfaces)
        self._fetcher = fetcher
        self._credentials = credentials
        self._options = options or RemoteOptions()
        self._close = close
        self._open: WeakSet[RemoteStream] = WeakSet()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes streams that were left. Their remote tasks continue."""
        for stream in tuple(self._open):
            with suppress(RuntimeError):  # a reader that still uses the stream gets an error
                await stream.aclose()
        if self._close is not None:
            await self._close()

    @property
    def interface(self) -> RemoteInterface:
        """The transport in use: the card's best interface, or the one that was found to work."""
        return self._interfaces[0]

    async def send(self, what: Sendable, **options: Any) -> Reply:
        """Sends a message, and waits for the answer. Takes the arguments of `stream`."""
        stream = self.stream(what, **options)
        async for _ in stream:
            pass
        return stream.reply

    def stream(
        self,
        what: Sendable,
        *,
        task_id: str | None = None,
        context_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        message_id: str | None = None,
        idempotency_key: str | None = None,
        hop: Hop | None = None,
        output_modes: Sequence[str] = (),
        timeout_s: float | None = None,
        stream: bool | None = None,
        stays: Callable[[], bool] | None = None,
        troubled: Callable[[str], None] = lambda _: None,
    ) -> RemoteStream:
        """Sends a message, and yields the agent's events as they come.

        `idempotency_key` makes it safe to post the message again if no answer comes, with agents that know the header
        `Idempotency-Key`. `stream=False` polls. `stays` is called when the caller is canceled: whether the agent shall
        continue all the same. `troubled` is called with the reason each time that the agent did not answer and is asked
        again. Leaving the stream early leaves the agent at work; `cancel` does not.
        """
        context_metadata = call_context_metadata(hop) if hop is not None else {}
        ask = SendMessage(
            message=Message(
                message_id=message_id or str(uuid.uuid4()),
                parts=parts_of(what),
                task_id=task_id,
                context_id=context_id,
                metadata={**(metadata or {}), **context_metadata} or None,
            ),
            output_modes=tuple(output_modes),
        )
        headers = call_context_headers(hop) if hop is not None else {}
        if idempotency_key is not None:
            headers[KEY_HEADER] = idempotency_key
        wanted = self._options.stream if stream is None else stream
        within_s = self._within(timeout_s, hop)
        outgoing = OutgoingMessage(
            ask=ask,
            headers=headers,
            streaming=(self.card is None or self.card.streaming is not False) if wanted is None else wanted,
            repeatable=idempotency_key is not None,
            troubled=troubled,
            poll_s=self._options.poll_s,
            within_ms=max(1, int(within_s * 1000)),
            chance=self._options.chance,
        )
        opened = RemoteStream(self, TaskFollower(self._transports, outgoing), within_s, stays)
        self._open.add(opened)
        return opened

    async def get(self, task_id: str) -> RemoteTask:
        return await next(self._transports()).get(task_id)

    async def cancel(self, task_id: str) -> RemoteTask:
        return await next(self._transports()).cancel(task_id)

    def learned(self, interface: RemoteInterface) -> None:
        """Notes that this transport works: it is tried first from now on."""
        if self._interfaces[0] != interface:
            self._interfaces.remove(interface)
            self._interfaces.insert(0, interface)

    def _within(self, timeout_s: float | None, hop: Hop | None) -> float:
        within_s = self._options.timeout_s if timeout_s is None else timeout_s
        if hop is not None and hop.deadline_ms is not None and self._options.left_ms is not None:
            left_ms = self._options.left_ms(hop.deadline_ms)
            within_s = within_s if left_ms is None else min(within_s, left_ms / 1000)
        if within_s <= 0:
            raise RemoteTimedOut("the time for this call was over before it began")
        return within_s

    def _transports(self) -> Iterator[A2ATransport]:
        for interface in tuple(self._interfaces):
            yield open_transport(interface, self._fetcher, self._credentials, self.card)


def open_transport(
    interface: RemoteInterface, fetcher: Fetcher, credentials: Credentials, card: RemoteCard | None, channel: Any = None
) -> A2ATransport:
    """`channel`: carries the calls of gRPC in place of the network."""
    if interface.binding != GRPC:
        return HttpTransport(interface, fetcher, credentials, card)
    try:
        from covenant.outbound.remote.grpc_transport import GrpcTransport  # noqa: PLC0415  (needs an extra)
    except ImportError as error:
        raise RemoteError(f"{interface.url} is called over gRPC: install the extra `grpc`") from error
    return GrpcTransport(interface, fetcher, credentials, card, channel)


class RemoteStream:
    """The events of one message as they come; then `reply`. To be read once."""

    def __init__(
        self, remote: Remote, follower: TaskFollower, within_s: float, stays: Callable[[], bool] | None = None
    ) -> None:
        self._stays = stays
        self._remote = remote
        self._follower = follower
        self._within_s = within_s
        self._until_s: float | None = None
        self._events: AsyncGenerator[RemoteEvent] = follower.events()
        self._first: asyncio.Future[RemoteEvent] | None = None
        """The pending read of the first event."""
        self._begun = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RemoteEvent:
        loop = asyncio.get_running_loop()
        if self._until_s is None:
            self._until_s = loop.time() + self._within_s
        try:
            async with asyncio.timeout_at(self._until_s):
                event = await (anext(self._events) if self._begun else self._read_first())
        except StopAsyncIteration:
            self._learn()
            raise
        except TimeoutError as error:
            await self._leave_first(0)
            await self._follower.cancel()
            words = f"no answer within {self._within_s:g} s{self.cancel_note}"
            raise RemoteTimedOut(words, task_id=self.task_id) from error
        except asyncio.CancelledError:
            stays = self._stays is not None and self._stays()
            await self._leave_first(0 if stays else FIRST_S)
            if not stays:
                await self._follower.cancel()
            raise
        self._learn()
        return event

    async def _read_first(self) -> RemoteEvent:
        """Reading continues if the caller leaves meanwhile: only the first event names the task to stop."""
        first = self._first = asyncio.ensure_future(anext(self._events))
        try:
            return await asyncio.shield(first)
        finally:
            if first.done():
                self._first, self._begun = None, True

    async def _leave_first(self, within_s: float) -> None:
        """Waits a little for the first event, if there was none yet, and then stops reading."""
        first, self._first = self._first, None
        if first is not None:
            try:
                await asyncio.wait((first,), timeout=within_s)
            finally:
                first.cancel()
            await asyncio.wait((first,))
            if not first.cancelled():
                first.exception()  # no caller is left to raise it to

    @property
    def task_id(self) -> str | None:
        """The remote's task, as soon as it is known."""
        return self._follower.known.task_id

    @property
    def usage(self) -> dict[str, float]:
        """The usage that the remote has reported so far, normalised."""
        return self._follower.known.usage

    @property
    def cancel_note(self) -> str:
        """Whether the remote was told to stop, as the end of a sentence; empty if there was no task to stop."""
        stopped = self._follower.canceled
        if stopped is None:
            return ""
        return f"; task {self.task_id} {'was' if stopped else 'could not be'} told to stop"

    @property
    def reply(self) -> Reply:
        """The answer, once the stream is over; before that, what is known so far."""
        if not self._follower.known.known:
            raise Invalid("not_answered", "there is no answer yet: read the stream first")
        return reply_of(self._follower.known, self._remote)

    async def cancel(self) -> None:
        """Leaves the stream, and tells the remote to stop."""
        await self._leave_first(FIRST_S)
        await self._events.aclose()
        await self._follower.cancel()

    async def aclose(self) -> None:
        """Leaves the stream. The remote task continues."""
        await self._leave_first(0)
        await self._events.aclose()

    def _learn(self) -> None:
        if self._follower.transport is not None and self._follower.known.known:
            self._remote.learned(self._follower.transport.interface)
