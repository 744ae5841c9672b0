"""Effects of events beyond the entry of their task, the same for every engine. Pure: functions return the effects.

A settled task ends its push configurations. A cache key has a leader at work, and followers. A request id is recorded
with the tasks or results that it was given. A peer whose envelope was received is known to be alive.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from itertools import takewhile
from typing import Final

from msgspec.structs import replace

from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import (
    LeaseReleased,
    ResultDrained,
    ResultReturned,
    TaskClosed,
    TaskEvent,
    TaskFollowed,
    TaskLeased,
    TaskPromoted,
    TaskSent,
    TaskSettled,
)
from covenant.ledger.machine.view import Cached, Remembered
from covenant.model.clock_steps import Ages
from covenant.model.ids import PublicKey
from covenant.model.peers.delegation import LoggedMessage, OutboxMessage, OutboxMove, Peer, ReceivedEnvelope
from covenant.model.push import Push, PushMove

POLL: Final = "poll"
QUERY: Final = "capability_query"
RESPONSE: Final = "capability_response"
QUERY_ID_CHARS: Final = 16

RequestKey = tuple[str, PublicKey, str]
"""Verb (take or drain), caller and request id."""

_NOTHING: Final = Remembered(())
MAY_GO_FIRST: Final = frozenset({ResultReturned, LeaseReleased})


class Sharing(enum.Enum):
    """The effect of an event on the work that its task's cache key names."""

    LEADS = enum.auto()
    """The task leads, unless another one does: a replayed task is sent and settled in one record."""
    FOLLOWS = enum.auto()
    TAKES_OVER = enum.auto()
    ENDS = enum.auto()


_SHARING: Final[dict[type[TaskEvent], Sharing]] = {
    TaskSent: Sharing.LEADS,
    TaskFollowed: Sharing.FOLLOWS,
    TaskPromoted: Sharing.TAKES_OVER,
    TaskSettled: Sharing.ENDS,
    TaskClosed: Sharing.ENDS,
}


def sharing(event: TaskEvent) -> Sharing | None:
    return _SHARING.get(type(event))


def goes_first(event: TaskEvent) -> bool:
    """Whether the task goes to the head of its queue: the caller never got the lease, or the drained result."""
    return isinstance(event, ResultReturned) or (isinstance(event, LeaseReleased) and event.undelivered)


def ends_pushes(event: TaskEvent) -> bool:
    return isinstance(event, TaskSettled)


def ended_push(push: Push, generation: int) -> Push:
    """The configuration of a task that has ended, with its last generation."""
    return replace(push, ended=generation)


def moved_push(push: Push, move: PushMove, ts_ms: int) -> Push:
    return replace(
        push,
        moved_at_ms=ts_ms,
        delivered=max(push.delivered, move.delivered),
        attempts=move.attempts,
        next_ms=move.next_ms,
        failure=move.failure,
        dead_at_ms=ts_ms if move.dead else None,
    )


def moved_message(message: OutboxMessage, move: OutboxMove) -> OutboxMessage:
    return replace(message, attempts=move.attempts, next_ms=move.next_ms, failure=move.failure)


def cacheable(event: TaskEvent, ts_ms: int) -> Cached | None:
    """The result that answers the same work from now on, if the event has one."""
    if not isinstance(event, TaskSettled) or not event.cached:
        return None
    return Cached(source_task_id=event.task_id, result=event.result, cached_at_ms=ts_ms)


def request_given(event: TaskLeased | ResultDrained, entry: Entry) -> tuple[RequestKey, Remembered]:
    """The request that got a lease or a result by this event, and that lease or result."""
    assert event.request_id is not None
    if isinstance(event, TaskLeased):
        caller = event.by or event.lease.leased_to.pubkey
        return ("take", caller, event.request_id), Remembered((event.task_id,), (event.lease.lease_id,))
    return ("drain", event.by or entry.task.sender.pubkey, event.request_id), Remembered((event.task_id,))


def merge_remembered(known: Remembered | None, more: Remembered) -> Remembered:
    known = known or _NOTHING
    return Remembered((*known.task_ids, *more.task_ids), (*known.lease_ids, *more.lease_ids))


def envelope_logged(envelope: ReceivedEnvelope, offer_id: str | None, ts_ms: int) -> tuple[LoggedMessage, ...]:
    """The rows of the message log for a received envelope: the envelope, and the answer that it gets at once.

    A poll is not logged: polls come all day, and would push out the rows that matter.
    """
    sender, typ, jti = envelope.sender, envelope.typ, envelope.jti
    if typ == POLL:
        return ()
    came = LoggedMessage(at_ms=ts_ms, direction="received", peer=sender, typ=typ, id=jti, offer_id=offer_id)
    if typ != QUERY:
        return (came,)
    return came, LoggedMessage(at_ms=ts_ms, direction="sent", peer=sender, typ=RESPONSE, id=jti)


def query_logged(before: Peer | None, peer: Peer, ts_ms: int) -> LoggedMessage | None:
    """The log row of the query that goes to a peer with a new challenge."""
    challenge = peer.challenge
    if challenge is None or (before is not None and before.challenge == challenge):
        return None
    return LoggedMessage(at_ms=ts_ms, direction="sent", peer=peer.id, typ=QUERY, id=challenge.nonce[:QUERY_ID_CHARS])


def forgettable(results: Iterable[Entry], retention_ms: int, now_ms: int, ages: Ages) -> list[Entry]:
    """The undrained results that are older than the retention time. `results`: all of them, the oldest first."""
    return list(takewhile(lambda entry: ages.age_ms(entry.updated_at_ms, now_ms) > retention_ms, results))


def last_heard(peer: Peer, ts_ms: int) -> Peer:
    """The peer after an envelope of it was received."""
    return replace(peer, heard_at_ms=ts_ms)
