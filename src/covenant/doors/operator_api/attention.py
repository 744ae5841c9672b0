"""Things that need an operator, the worst first, each with the command that fixes it; and counts of tasks.

The list is bounded: it has a few entries of each kind of trouble, and `count` says how many there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import urlencode

import msgspec

from covenant.doors.operator_api.operation import AnyApiOperation, ApiAnswer, ApiOperation, Services
from covenant.exchange import push as pushes
from covenant.exchange import task_search
from covenant.exchange.access.principals import Principal, require_operator
from covenant.exchange.audit_search import AuditFilter, find_audit
from covenant.ledger.contract.ledger import Counts
from covenant.ledger.contract.task_query import FoundTask, LaneCounts, TaskQuery
from covenant.ledger.contract.tasks import QueueQuery
from covenant.ledger.machine.states import PARKED
from covenant.model.peers.delegation import LOST, DelegationRole
from covenant.model.task_event import Interruption
from covenant.wire.mailbox import EmptyRequest

LISTED_MAX: Final = 50
"""The most entries of each kind of trouble."""
PARKED_MS: Final = 3_600_000
"""A task that has waited for its sender for this long may have been forgotten."""
PARKED_PAGES_MAX: Final = 10
"""The most pages that are read: a page may be short, since sleeping tasks are left out."""
BEHIND_MAX: Final = 10_000
"""How many records the archive may be behind before that is listed."""
LOGINS_MS: Final = 3_600_000
AUDIT_ROWS: Final = 500


class Need(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`act` has the verb of the fix and the path of its form on the dashboard; `command` does the same in a shell."""

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
    command: str | None = None


class Attention(ApiAnswer, frozen=True, kw_only=True, tag="a2a_attention"):
    """`needs`: how many things need an operator; `items` lists some of each kind. The first of a kind says in
    `count` how many of it there are. `numbers` are of all tasks, lane by lane.
    """

    at_ms: int
    needs: int
    items: tuple[Need, ...]
    numbers: LaneCounts


async def show_attention(services: Services, caller: Principal, _: EmptyRequest) -> Attention:
    await require_operator(services.ledger, caller, "what needs attention")
    items = tuple(await find_needs(services, caller))
    return Attention(
        at_ms=services.ledger.now_ms(),
        needs=count_needs(items),
        items=items,
        numbers=(await task_search.count(services.ledger, caller)).lanes,
    )


async def find_needs(services: Services, operator: Principal) -> list[Need]:
    """The things that need an operator, the worst first."""
    ledger = services.ledger
    counts = await ledger.counts()
    return [
        *storage_needs(counts, ledger.now_ms()),
        *await _lost_holders(services, operator, counts),
        *await _lost_delegations(services, counts),
        *await _dead_pushes(services, operator),
        *await _parked(services, operator),
        *await _refused_logins(services, operator),
    ]


def count_needs(items: Sequence[Need]) -> int:
    """The sum over all kinds: the number listed, or the `count` of the first entry."""
    listed = Counter(item.what for item in items)
    counts = {item.what: item.count for item in reversed(items)}
    return sum(max(count, counts[what]) for what, count in listed.items())


def storage_needs(counts: Counts, now_ms: int) -> Iterator[Need]:
    if counts.failure is not None:
        detail = f"{counts.failure}. Mend the disk and restart the daemon."
        title, command = "Nothing can be written", "covenant doctor"
        yield Need(what="writer_failed", severity="bad", title=title, detail=detail, since_ms=now_ms, command=command)
    if counts.history_failure is not None or counts.behind > BEHIND_MAX or counts.rejected:
        detail = (
            counts.history_failure or f"{counts.behind} records are not in history yet, {counts.rejected} set aside"
        )
        title, command = "History lags behind", "covenant doctor"
        yield Need(what="archive_lag", severity="warn", title=title, detail=detail, since_ms=now_ms, command=command)


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
            command=f"covenant a2a requeue {each.task.id}",
        )
        for each in found.tasks
        if each.holder_lost
    ]


async def _lost_delegations(services: Services, counts: Counts) -> Sequence[Need]:
    if services.peers is None or not counts.delegations_lost:
        return ()
    live = await services.ledger.delegations_live(DelegationRole.REQUESTER)
    found = sorted((each for each in live if each.state is LOST), key=lambda each: -each.moved_at_ms)
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
            command=f"covenant peers offer-again {each.task_id}",
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
            command=f"covenant a2a push retry {each.task_id} {each.id}",
        )
        for each in found[:LISTED_MAX]
    ]


async def _parked(services: Services, operator: Principal) -> Sequence[Need]:
    """The tasks that were sent first; of these, the longest wait comes first."""
    found, total = await _waiting_for_sender(services, operator)
    found.sort(key=lambda task: task.updated_at_ms)
    return [
        Need(
            what="parked_long",
            severity="warn",
            count=total,
            title=each.intent or each.task_id,
            detail=f"{each.agent} waits for {each.sender}",
            since_ms=each.updated_at_ms,
            task_id=each.task_id,
            act=_act("Answer", "answer", task=each.task_id),
            command=f"covenant a2a show {each.task_id}",
        )
        for each in found
    ]


async def _waiting_for_sender(services: Services, operator: Principal) -> tuple[list[FoundTask], int]:
    """Some of the tasks that have waited for long, and how many there are."""
    filters = TaskQuery(
        states=(PARKED,),
        interruptions=tuple(Interruption),
        moved_until_ms=services.ledger.now_ms() - PARKED_MS,
        ascending=True,
        limit=LISTED_MAX,
        count=True,
    )
    query = await task_search.scoped(services.ledger, operator, filters)
    page = await services.ledger.find(query)
    found, total = [*page.tasks], page.total or 0
    for _ in range(PARKED_PAGES_MAX):
        if page.next is None or len(found) >= min(total, LISTED_MAX):
            break
        page = await services.ledger.find(msgspec.structs.replace(query, after=page.next, count=False))
        found += page.tasks
    return found[:LISTED_MAX], total


async def _refused_logins(services: Services, operator: Principal) -> Sequence[Need]:
    filters = AuditFilter(type="authentication_failed", since_ms=services.ledger.now_ms() - LOGINS_MS)
    page = await find_audit(services.ledger, operator, filters, AUDIT_ROWS)
    refused = [msgspec.json.decode(record.row) for record in page.records]
    if not refused:
        return ()
    count = len(refused) + sum(row["kind"].get("suppressed_before") or 0 for row in refused)
    count += services.registry.refusals_unreported(LOGINS_MS)
    addresses = sorted({str(row["kind"].get("address")) for row in refused})
    return [
        Need(
            what="login_refused",
            severity="warn",
            title=f"{count} refused login{'' if count == 1 else 's'} in the last hour",
            detail=f"from {', '.join(addresses[:5])}",
            since_ms=max(row["timestamp_ms"] for row in refused),
            act={"verb": "Look", "href": "/ui/audit?type=authentication_failed"},
            command="covenant audit recent --type authentication_failed",
        )
    ]


def _act(words: str, verb: str, **fields: str) -> dict[str, str]:
    return {"verb": words, "href": f"/ui/act/{verb}?{urlencode(fields)}"}


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("GET", "/a2a/attention", show_attention, "Things that need a person, each with its fix"),
)
