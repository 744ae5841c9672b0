"""Finding tasks: what may be asked, and whose tasks whoever asks is told of.

The operator sees every task, a tenant its own, an identity those that it sent or is to do. A task that the caller may
not see is not counted either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar, get_type_hints

import msgspec

from covenant.exchange.access.principals import Principal
from covenant.ledger.contract.identities import IdentityLedger
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.task_query import PAGE_MAX, STATES, FoundPage, TaskCounts, TaskQuery, place_after
from covenant.ledger.machine.states import DRAINED
from covenant.model.errors import Invalid, did_you_mean
from covenant.model.task import Ending
from covenant.wire.mailbox import FindFilters, FindRequest, TaskFilter
from covenant.wire.validation import checked

W = TypeVar("W")

_STATES: Final = {
    **STATES,
    DRAINED.wire_name: DRAINED,
    **{word.replace("_", "-"): each for word, each in STATES.items()},
}
_HINTS: Final = get_type_hints(FindFilters)
_OUTCOMES: Final = {ending.value: ending for ending in Ending}

NAME_CHARS_MAX: Final = 1_000
TEXT_CHARS_MAX: Final = 200
NAMES_MAX: Final = 8
"""Under so many displays of one key tasks are looked for: the present one, and the newest before it."""
_NAMES: Final = ("agent", "sender", "tenant", "task_kind", "origin", "parent", "context", "key", "cause")


def find_request(filters: FindFilters) -> FindRequest:
    """From the arguments of the library's verb, checked against their declared types."""
    for name, value in filters.items():
        if name not in _HINTS:
            raise TypeError(f"find() has no filter {name!r}{did_you_mean(name, _HINTS)}")
        checked(name, value, _HINTS[name])
    return FindRequest(**filters)


def query_of(request: TaskFilter) -> TaskQuery:
    """What a caller asks for, understood and within its limits."""
    given = {name: value for name, value in msgspec.structs.asdict(request).items() if value is not None}
    given["states"] = _words("state", given.pop("state", None), _STATES)
    given["outcomes"] = _words("outcome", given.pop("outcome", None), _OUTCOMES)
    return check_query(TaskQuery(**given))


def _words(name: str, given: str | None, known: Mapping[str, W]) -> tuple[W, ...]:
    if given is None:
        return ()
    words = [word.strip() for word in given[:NAME_CHARS_MAX].split(",")]
    for word in words:
        if word not in known:
            listed = ", ".join(each for each in known if "-" not in each and each != DRAINED.wire_name)
            raise Invalid("invalid_filter", f"{name} must be one or several of {listed}{did_you_mean(word, known)}")
    return tuple(dict.fromkeys(known[word] for word in words))


async def find(ledger: Ledger, principal: Principal, request: FindRequest) -> FoundPage:
    return await ledger.find(await scoped(ledger, principal, query_of(request)))


async def count(ledger: Ledger, principal: Principal) -> TaskCounts:
    return await ledger.count_lanes(await scoped(ledger, principal, TaskQuery()))


async def scoped(ledger: IdentityLedger, principal: Principal, query: TaskQuery) -> TaskQuery:
    """The query of this caller: what it may not see is not looked for."""
    if principal.operator:
        return query
    if principal.tenant is not None:
        return msgspec.structs.replace(query, within=principal.tenant)
    me = principal.agent
    others = [each.agent.display for each in await ledger.identities() if each.agent.pubkey == me.pubkey]
    names = dict.fromkeys((me.display, *reversed(others)))
    return msgspec.structs.replace(query, viewer=me.pubkey, viewer_names=tuple(names)[:NAMES_MAX])


def check_query(query: TaskQuery) -> TaskQuery:
    """Refuse what no query may ask."""
    if not 1 <= query.limit <= PAGE_MAX:
        raise Invalid("invalid_limit", f"limit must be between 1 and {PAGE_MAX}")
    for name in _NAMES:
        _check_text(name, getattr(query, name), NAME_CHARS_MAX)
    _check_text("text", query.text, TEXT_CHARS_MAX)
    if query.id is not None and not (0 < len(query.id) <= 36 and set(query.id) <= set("0123456789abcdef-")):
        raise Invalid("invalid_filter", "id must be how the id of a task begins: hexadecimal digits and dashes")
    for name in ("attempt_min", "since_ms", "until_ms", "moved_since_ms"):
        value = getattr(query, name)
        if value is not None and not 0 <= value < 1 << 63:
            raise Invalid("invalid_filter", f"{name} must be between 0 and 2^63-1")
    place_after(query)
    return query


def _check_text(name: str, value: str | None, most: int) -> None:
    if value is not None and not 0 < len(value) <= most:
        raise Invalid("invalid_filter", f"{name} must have 1 to {most} characters")
