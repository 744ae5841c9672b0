"""What needs a person: one list, the worst first, each with the verb that mends it; and how much there is in all.

Each look is bounded: of each kind of trouble so many are listed, and `count` says how many there are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from starlette.types import Receive, Scope, Send

from covenant.dashboard.session_operations import SESSION, role_forbidden
from covenant.dashboard.sessions import Role, UiSession
from covenant.doors.http.endpoint import Endpoint
from covenant.doors.http.responses import MAILBOX, reply
from covenant.doors.operator_api.operation import ApiContext, Services, encode
from covenant.exchange import push as pushes
from covenant.exchange import task_search
from covenant.exchange.access.principals import Principal
from covenant.exchange.audit_search import AuditFilter, find_audit
from covenant.ledger.contract.ledger import Counts
from covenant.ledger.contract.tasks import QueueQuery
from covenant.model.task_event import Interruption
from covenant.wire.mailbox import FindRequest

LISTED_MAX: Final = 50
"""Of each kind of trouble."""
PARKED_MS: Final = 3_600_000
WAITS_FOR_SENDER: Final = frozenset(Interruption)
"""Others that are parked wait for a moment, or for a signal."""
"""A task that has waited for its sender so long may have been forgotten."""
BEHIND_MAX: Final = 10_000
"""Records that history may lack before somebody should know."""
LOGINS_MS: Final = 3_600_000
AUDIT_ROWS: Final = 500
MINUTES: Final = 60
MINUTE_S: Final = 60.0


class Need(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`act` names the verb that mends it, and where."""

    what: str
    severity: str
    title: str
    detail: str
    since_ms: int | None = None
    count: int = 1
    task_id: str | None = None
    peer: str | None = None
    push_id: str | None = None
    act: dict[str, str] | None = None


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """How many tasks ended in each of the last minutes, the oldest first; and how many of them failed."""

    settled: tuple[int, ...]
    failed: tuple[int, ...]
    step_ms: int = 60_000


class RateSampler:
    """Looks at the running totals once a minute."""

    def __init__(self, services: Services, operator: Principal) -> None:
        self._services = services
        self._operator = operator
        self._settled: deque[int] = deque([0] * MINUTES, MINUTES)
        self._failed: deque[int] = deque([0] * MINUTES, MINUTES)
        self._before: tuple[int, int] | None = None

    async def run(self) -> None:
        """As long as the daemon runs."""
        while True:
            await self.sample()
            await asyncio.sleep(MINUTE_S)

    async def sample(self) -> None:
        lanes = (await task_search.count(self._services.ledger, self._operator)).lanes
        ended, failed = lanes.result_pending + lanes.failed + lanes.done, lanes.failed
        if self._before is not None:
            # Totals shrink when history is purged.
            self._settled.append(max(0, ended - self._before[0]))
            self._failed.append(max(0, failed - self._before[1]))
        self._before = ended, failed

    @property
    def rates(self) -> Rates:
        return Rates(settled=tuple(self._settled), failed=tuple(self._failed))


class Attention(msgspec.Struct, frozen=True, kw_only=True, tag="a2a_attention", tag_field="kind"):
    at_ms: int
    items: tuple[Need, ...]
    numbers: Any
    sparks: Rates


class AttentionEndpoint(Endpoint):
    """For the operator and for viewers."""

    def __init__(self, api: ApiContext, sampler: RateSampler) -> None:
        super().__init__("ui_attention", MAILBOX, api.meter)
        self._services = api.services
        self._sampler = sampler

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  (of every endpoint)
        session: UiSession = scope[SESSION]
        if session.role is Role.TENANT:
            raise role_forbidden(session.role, "attention")
        sees_all = msgspec.structs.replace(session.principal, operator=True)
        counted = await task_search.count(self._services.ledger, sees_all)
        found = Attention(
            at_ms=self._services.ledger.now_ms(),
            items=tuple(await find_needs(self._services, sees_all)),
            numbers=counted.lanes,
            sparks=self._sampler.rates,
        )
        await reply(send, 200, encode(found))


async def find_needs(services: Services, operator: Principal) -> list[Need]:
    """The worst first."""
    ledger = services.ledger
    counts = await ledger.counts()
    return [
        *_of_storage(counts, ledger.now_ms()),
        *await _lost_holders(services, operator, counts),
        *await _lost_delegations(services, counts),
        *await _dead_pushes(services, operator),
        *await _parked(services, operator),
        *await _refused_logins(services, operator),
    ]


def _of_storage(counts: Counts, now_ms: int) -> Iterator[Need]:
    if counts.failure is not None:
        detail = f"{counts.failure}. Mend the disk and restart the daemon."
        yield Need(what="writer_failed", severity="bad", title="Nothing can be written", detail=detail, since_ms=now_ms)
    if counts.history_failure is not None or counts.behind > BEHIND_MAX or counts.rejected:
        detail = (
            counts.history_failure or f"{counts.behind} records are not in history yet, {counts.rejected} set aside"
        )
        yield Need(what="archive_lag", severity="warn", title="History lags behind", detail=detail, since_ms=now_ms)


async def _lost_holders(services: Services, operator: Principal, counts: Counts) -> Sequence[Need]:
    if not counts.holders_lost:
        return ()
    found = await services.exchange.queue(operator, QueueQuery(limit=LISTED_MAX, state_filter="in_flight"))
    return [
        Need(
            what="holder_lost",
            severity="bad",
            count=counts.holders_lost,
            title=each.task.intent_text[:120] or each.task.id,
            detail=f"its holder is gone: {each.leased_to.display if each.leased_to else ''}; attempt {each.attempt}",
            since_ms=each.renewed_at_ms or each.leased_at_ms,
            task_id=each.task.id,
            act=_act("Repair", "repair", task=each.task.id, lease=each.lease_id or ""),
        )
        for each in found.tasks
        if each.holder_lost
    ]


async def _lost_delegations(services: Services, counts: Counts) -> Sequence[Need]:
    if services.peers is None or not counts.delegations_lost:
        return ()
    found = [each for each in await services.peers.delegations() if each.state.value == "lost"]
    return [
        Need(
            what="delegation_lost",
            severity="bad",
            count=len(found),
            title=f"A delegation of {each.profile} is lost",
            detail=f"the peer {each.peer} was not heard of",
            since_ms=each.moved_at_ms,
            task_id=each.task_id,
            peer=each.peer,
            act=_act("Offer again", "delegation", id=each.task_id, do="offer_again"),
        )
        for each in found[:LISTED_MAX]
    ]


async def _dead_pushes(services: Services, operator: Principal) -> Sequence[Need]:
    found = await pushes.outbox(services.ledger, operator, dead=True)
    return [
        Need(
            what="push_dead",
            severity="warn",
            count=len(found),
            title="A push notification was given up",
            detail=each.failure or "",
            since_ms=each.dead_at_ms,
            task_id=each.task_id,
            push_id=each.id,
            act=_act("Try again", "push", task=each.task_id, push=each.id),
        )
        for each in found[:LISTED_MAX]
    ]


async def _parked(services: Services, operator: Principal) -> Sequence[Need]:
    asked = FindRequest(state="parked", order="moved", ascending=True, limit=LISTED_MAX)
    page = await task_search.find(services.ledger, operator, asked)
    before_ms = services.ledger.now_ms() - PARKED_MS
    return [
        Need(
            what="parked_long",
            severity="warn",
            title=each.intent or each.task_id,
            detail=f"{each.agent} waits for {each.sender}",
            since_ms=each.updated_at_ms,
            task_id=each.task_id,
            act=_act("Answer", "answer", task=each.task_id),
        )
        for each in page.tasks
        if each.updated_at_ms < before_ms and each.a2a_state in WAITS_FOR_SENDER
    ]


async def _refused_logins(services: Services, operator: Principal) -> Sequence[Need]:
    asked = AuditFilter(type="authentication_failed", since_ms=services.ledger.now_ms() - LOGINS_MS)
    page = await find_audit(services.ledger, operator, asked, AUDIT_ROWS)
    refused = [msgspec.json.decode(record.row) for record in page.records]
    if not refused:
        return ()
    count = len(refused) + sum(row["kind"].get("suppressed_before") or 0 for row in refused)
    addresses = sorted({str(row["kind"].get("address")) for row in refused})
    return [
        Need(
            what="login_refused",
            severity="warn",
            count=count,
            title=f"{count} refused logins in the last hour",
            detail=f"from {', '.join(addresses[:5])}",
            since_ms=max(row["timestamp_ms"] for row in refused),
            act={"verb": "Look", "href": "/ui/audit?type=authentication_failed"},
        )
    ]


def _act(words: str, verb: str, **fields: str) -> dict[str, str]:
    return {"verb": words, "href": f"/ui/act/{verb}?{urlencode(fields)}"}
