"""Searches tasks: reads the filters, and limits the search to the tasks that the caller may see.

The operator sees every task, a tenant its own, an identity those that it sent or received. A task that the caller may
not see is not counted either.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, get_type_hints

import msgspec

from covenant.exchange.access.principals import Principal
from covenant.exchange.request_checks import check_limit
from covenant.ledger.contract.identities import IdentityLedger
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.task_query import PAGE_MAX, FoundPage, TaskCounts, TaskQuery, place_after
from covenant.ledger.machine.states import OUTCOME_FILTERS, STATE_FILTERS, State
from covenant.model.errors import Invalid, did_you_mean
from covenant.model.task import Ending
from covenant.model.tenants import DEFAULT
from covenant.wire.mailbox import FindFilters, FindRequest, TaskFilter
from covenant.wire.validation import checked

_HINTS: Final = get_type_hints(FindFilters)

NAME_CHARS_MAX: Final = 1_000
TEXT_CHARS_MAX: Final = 200
NAMES_MAX: Final = 8
"""The most displays of one key that are searched for: the present one, and the newest before it."""
_NAMES: Final = ("agent", "sender", "tenant", "task_kind", "origin", "parent", "context", "key", "cause")


def find_request(filters: FindFilters) -> FindRequest:
    """The request made from the arguments of the library's `find`, checked against their declared types."""
    for name, value in filters.items():
        if name not in _HINTS:
            raise TypeError(f"find() has no filter {name!r}{did_you_mean(name, _HINTS)}")
        checked(name, value, _HINTS[name])
    return FindRequest(**filters)


def query_of(request: TaskFilter) -> TaskQuery:
    """The query of a request, checked against its limits."""
    given = {name: value for name, value in msgspec.structs.asdict(request).items() if value is not None}
    states = _words("state", given.pop("state", None), (*STATE_FILTERS, *OUTCOME_FILTERS))
    outcomes = _words("outcome", given.pop("outcome", None), OUTCOME_FILTERS)
    return check_query(TaskQuery(**given, states=_states(states), outcomes=_outcomes(states, outcomes)))


def _states(words: tuple[str, ...]) -> tuple[State, ...]:
    return tuple(dict.fromkeys(STATE_FILTERS[word] for word in words if word in STATE_FILTERS))


def _outcomes(states: tuple[str, ...], outcomes: tuple[str, ...]) -> tuple[Ending, ...]:
    """The outcomes to search for: those of `outcome`, else the outcomes that `state` names."""
    ended = [word for word in states if word in OUTCOME_FILTERS]
    if ended and (outcomes or len(ended) < len(states)):
        raise Invalid(
            "invalid_filter",
            f"state names an outcome, {ended[0]}: put outcomes into outcome, and only states into state",
        )
    return tuple(dict.fromkeys(Ending(OUTCOME_FILTERS[word]) for word in (*outcomes, *ended)))


def _words(name: str, given: str | None, known: Iterable[str]) -> tuple[str, ...]:
    if given is None:
        return ()
    words = tuple(word.strip().replace("-", "_") for word in given[:NAME_CHARS_MAX].split(","))
    for word in words:
        if word not in known:
            raise Invalid(
                "invalid_filter", f"{name} must be one or several of {', '.join(known)}{did_you_mean(word, known)}"
            )
    return words


async def find(ledger: Ledger, principal: Principal, request: FindRequest) -> FoundPage:
    return await ledger.find(await scoped(ledger, principal, query_of(request)))


async def count(ledger: Ledger, principal: Principal) -> TaskCounts:
    return await ledger.count_lanes(await scoped(ledger, principal, TaskQuery()))


async def scoped(ledger: IdentityLedger, principal: Principal, query: TaskQuery) -> TaskQuery:
    """The query limited to what the caller may see. An agent without a host is one of the caller's tenant."""
    if query.agent is not None and "@" not in query.agent:
        display = f"{query.agent}@{query.tenant or principal.tenant or DEFAULT}"
        query = msgspec.structs.replace(query, agent=display)
    if principal.operator:
        return query
    if principal.tenant is not None:
        return msgspec.structs.replace(query, within=principal.tenant)
    me = principal.agent
    others = [each.agent.display for each in await ledger.identities() if each.agent.pubkey == me.pubkey]
    names = dict.fromkeys((me.display, *reversed(others)))
    return msgspec.structs.replace(query, viewer=me.pubkey, viewer_names=tuple(names)[:NAMES_MAX])


def check_query(query: TaskQuery) -> TaskQuery:
    check_limit(query.limit, PAGE_MAX)
    for name in _NAMES:
        _check_text(name, getattr(query, name), NAME_CHARS_MAX)
    _check_text("text", query.text, TEXT_CHARS_MAX)
    if query.id is not None and not (0 < len(query.id) <= 36 and set(query.id) <= set("0123456789abcdef-")):
        raise Invalid("invalid_filter", "id must be the beginning of a task's id: hexadecimal digits and dashes")
    for name in ("attempt_min", "since_ms", "until_ms", "moved_since_ms"):
        value = getattr(query, name)
        if value is not None and not 0 <= value < 1 << 63:
            raise Invalid("invalid_filter", f"{name} must be between 0 and 2^63-1")
    place_after(query)
    return query


def _check_text(name: str, value: str | None, most: int) -> None:
    if value is not None and not 0 < len(value) <= most:
        raise Invalid("invalid_filter", f"{name} must have 1 to {most} characters")
