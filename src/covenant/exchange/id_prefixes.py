"""Finds things by the beginning of their id: a task, a lease, a push configuration, a parent, or a name.

A prefix must match exactly one thing that the caller may see. Things that the caller may not see are
neither found nor counted, so a refusal reveals nobody else's ids. A whole id is not looked up here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from covenant.exchange.access.principals import Principal
from covenant.ledger.contract.task_query import TaskQuery
from covenant.ledger.contract.tasks import PushLedger, TaskLedger
from covenant.model.errors import Conflict, Invalid, NotFound
from covenant.model.ids import LeaseId, TaskId, parse_lease_id, parse_task_id

T = TypeVar("T")

EVERY: Final = TaskQuery()
UUID_LENGTH: Final = 36
"""A shorter text is a prefix."""
CANDIDATES_MAX: Final = 10
"""The most candidates that an ambiguous prefix is answered with."""
QUOTED_MAX: Final = 80
_PLURALS: Final = {"identity": "identities", "push": "pushes"}
_DIGITS: Final = frozenset("0123456789abcdef-")


def choose(
    given: str, found: Sequence[T], what: str, show: Callable[[T], str] = str, *, code: str = "ambiguous_id"
) -> T:
    """The only thing found. `what` it is and `show` are for the refusal."""
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFound(f"unknown_{what}", f"no {what} begins with {given[:QUOTED_MAX]!r}")
    listed = [f"  {show(each)}" for each in found[:CANDIDATES_MAX]] + ["  …"] * (len(found) > CANDIDATES_MAX)
    heading = f"several {_PLURALS.get(what, f'{what}s')} begin with {given[:QUOTED_MAX]!r}; write more of it:"
    raise Conflict(code, "\n".join([heading, *listed]))


async def find_task_id(ledger: TaskLedger, given: str, among: TaskQuery = EVERY) -> TaskId:
    """The id of the one task, live or finished, whose id begins with this; `among` limits the tasks."""
    if len(given) >= UUID_LENGTH:
        return parse_task_id(given)
    prefix = given.lower()
    if not prefix:
        raise Invalid("invalid_id", "a task id must be a UUID, or the beginning of one")
    if not _DIGITS.issuperset(prefix):
        return choose(given, (), "task")
    query = msgspec.structs.replace(among, id=prefix, limit=CANDIDATES_MAX + 1)
    page = await ledger.find(query)
    found = list(page.tasks)
    while page.next is not None and len(found) <= CANDIDATES_MAX:  # a page may end early
        page = await ledger.find(msgspec.structs.replace(query, after=page.next))
        found += page.tasks
    one = choose(given, found, "task", lambda each: f"{each.task_id}  {each.outcome or each.state}  {each.agent}")
    return TaskId(one.task_id)


async def find_lease_id(ledger: TaskLedger, caller: Principal | None, task_id: TaskId, given: str) -> LeaseId:
    """The id of the lease under which the task is held, if the caller may see it."""
    if len(given) >= UUID_LENGTH:
        return parse_lease_id(given)
    if not given:
        raise Invalid("invalid_id", "a lease_id must be a UUID, or the beginning of one")
    entry = await ledger.entry(task_id)
    lease = entry.lease if entry is not None else None
    if entry is None or lease is None or not lease.lease_id.startswith(given.lower()):
        return choose(given, (), "lease")
    task, seen = entry.task, caller is None or caller.operator
    if caller is not None and caller.tenant is not None:
        seen = task.tenant == caller.tenant
    elif caller is not None:
        seen = seen or caller.agent.pubkey in (lease.leased_to.pubkey, task.sender.pubkey, task.recipient.pubkey)
    return choose(given, (lease.lease_id,) if seen else (), "lease")


async def find_push_id(ledger: PushLedger, caller: Principal, task_id: TaskId, given: str) -> str:
    """The id of a push configuration of the task. For others than the operator, the operation itself refuses."""
    if not caller.operator:
        return given
    found = [push.id for push in await ledger.pushes(task_id)]
    if given in found:
        return given
    return choose(given, [each for each in found if each.startswith(given)] if given else [], "push")
