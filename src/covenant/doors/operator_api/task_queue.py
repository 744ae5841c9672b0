"""The queue as an operator sees it: now, or as soon as it is another one than the caller has seen.

Whoever is ready to wait is told `next`, a digest of what is shown. Asked `after` it, the daemon answers when it
would show something else, or when the time is over. So nothing that moves between two requests is missed, a restart of
the daemon between them makes no difference, and nobody is woken by what it may not see.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Final

import msgspec

from covenant.doors.metrics import LIVE
from covenant.doors.operator_api.mailbox import LIMIT
from covenant.doors.operator_api.operation import (
    PAGE_BYTES_MAX,
    AnyApiOperation,
    ApiAnswer,
    ApiOperation,
    Services,
    encode,
    fill,
    fit,
    page_limit,
    size_of,
)
from covenant.doors.waits import Pause
from covenant.exchange.access.principals import Principal
from covenant.ledger.contract.tasks import QueueEntry, QueueQuery
from covenant.model.task import Result
from covenant.wire.mailbox import QueueRequest

LOOK_S: Final = 0.1
"""The least time between two looks of one who waits, however much moves."""
DIGEST_BYTES: Final = 16


class CountsShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How much there is of everything, whatever the filters and limits leave of it."""

    queued: int
    in_flight: int
    parked: int
    following: int
    result_pending: int
    cached: int
    holders_lost: int
    delegations_lost: int = 0
    """Of those that peers do: `covenant peers delegations` shows them."""


class QueueShown(ApiAnswer, frozen=True, kw_only=True, tag="a2a_queue"):
    """`counts` and `warnings` are for the operator. `next` is for whoever is ready to wait."""

    tasks: tuple[QueueEntry, ...]
    results: tuple[Result, ...]
    truncated: bool = False
    counts: CountsShown | None = None
    warnings: tuple[str, ...] = ()
    """What wants an operator, and is no task."""
    next: str | None = None


async def a2a_queue(services: Services, caller: Principal, request: QueueRequest) -> QueueShown:
    query = QueueQuery(
        limit=page_limit(request.limit, LIMIT),
        min_lease_age_ms=request.min_lease_age_ms,
        deadline_within_ms=request.deadline_within_ms,
        state_filter=request.state_filter.replace("-", "_") if request.state_filter else None,
    )
    found = await services.exchange.queue(caller, query)
    tasks = fit(found.tasks)
    results = fit(found.results, PAGE_BYTES_MAX - size_of(tasks))
    truncated = len(tasks) < len(found.tasks) or len(results) < len(found.results)
    answer = QueueShown(tasks=tasks, results=results, truncated=truncated)
    if not caller.operator:
        return answer
    counts = await services.ledger.counts()
    shown = fill(CountsShown, counts, **{state.wire_name: getattr(counts, state.value) for state in LIVE})
    warning = services.backups.warning if services.backups is not None else None
    return msgspec.structs.replace(answer, counts=shown, warnings=(warning,) if warning else ())


async def queue_waiting(services: Services, caller: Principal, request: QueueRequest, pause: Pause) -> QueueShown:
    """Until the queue is another one than `after` says."""
    clock, give_up_ms = services.ledger.clock, services.give_up_ms(request.wait_ms)
    while True:
        moved = services.ledger.changes.moved()  # before the look, so that nothing between the two is missed
        answer = await a2a_queue(services, caller, request)
        seen = hashlib.blake2b(encode(answer), digest_size=DIGEST_BYTES).hexdigest()
        left_ms = give_up_ms - clock.monotonic_ms()
        if seen != request.after or left_ms <= 0:
            return msgspec.structs.replace(answer, next=seen)
        await pause.until(_look_again(moved, left_ms / 1000))


async def _look_again(moved: asyncio.Future[None], left_s: float) -> None:
    await asyncio.wait((moved,), timeout=left_s)
    await asyncio.sleep(min(LOOK_S, left_s))


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation(
        "GET",
        "/a2a/queue",
        a2a_queue,
        "Leases, queued tasks and undrained results; the most worrying first",
        wait=queue_waiting,
    ),
)
