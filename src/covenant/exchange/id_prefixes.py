"""Ids by how they begin: a task, a lease, a push configuration, a parent; and anything else that has a name.

The beginning of an id stands for the one thing, among those that the caller may see, whose id begins so. What the
caller may not see is neither found nor counted, so a refusal tells nobody of another's ids. A whole id is never looked
up here: it costs a look at its length.
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
"""What is shorter is the beginning of one."""
CANDIDATES_MAX: Final = 10
"""So many are named where the beginning of an id is that of several."""
QUOTED_MAX: Final = 80
_PLURALS: Final = {"identity": "identities", "push": "pushes"}
_DIGITS: Final = frozenset("0123456789abcdef-")


def choose(
    given: str, found: Sequence[T], what: str, show: Callable[[T], str] = str, *, code: str = "ambiguous_id"
) -> T:
    """The only one that was found; `what` it is, and how each is shown, stand in the refusal."""
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFound(f"unknown_{what}", f"no {what} begins with {given[:QUOTED_MAX]!r}")
    listed = [f"  {show(each)}" for each in found[:CANDIDATES_MAX]] + ["  …"] * (len(found) > CANDIDATES_MAX)
    said = f"several {_PLURALS.get(what, f'{what}s')} begin with {given[:QUOTED_MAX]!r}; write more of it:"
    raise Conflict(code, "\n".join([said, *listed]))


async def find_task_id(ledger: TaskLedger, given: str, whose: TaskQuery = EVERY) -> TaskId:
    """Of the one task that begins so, live or finished; `whose` says among which tasks."""
    if len(given) >= UUID_LENGTH:
        return parse_task_id(given)
    begun = given.lower()
    if not begun:
        raise Invalid("invalid_id", "a task id must be a UUID, or how one begins")
    if not _DIGITS.issuperset(begun):
        return choose(given, (), "task")
    query = msgspec.structs.replace(whose, id=begun, limit=CANDIDATES_MAX + 1)
    page = await ledger.find(query)
    found = list(page.tasks)
    while page.next is not None and len(found) <= CANDIDATES_MAX:  # a page may end early
        page = await ledger.find(msgspec.structs.replace(query, after=page.next))
        found += page.tasks
    one = choose(given, found, "task", lambda each: f"{each.task_id}  {each.outcome or each.state}  {each.agent}")
    return TaskId(one.task_id)


async def find_lease_id(ledger: TaskLedger, caller: Principal | None, task_id: TaskId, given: str) -> LeaseId:
    """Of the lease under which the task is held, if the caller may know of it."""
    if len(given) >= UUID_LENGTH:
        return parse_lease_id(given)
    if not given:
        raise Invalid("invalid_id", "a lease_id must be a UUID, or how one begins")
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
    """Of a push configuration of the task. Whoever is not the operator is refused by the operation itself."""
    if not caller.operator:
        return given
    found = [push.id for push in await ledger.pushes(task_id)]
    if given in found:
        return given
    return choose(given, [each for each in found if each.startswith(given)] if given else [], "push")
