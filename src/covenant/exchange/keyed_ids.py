"""Ids of tasks that are sent under an idempotency key: the same key of the same caller names the same task.

An id follows from the key by a secret of the daemon: nobody else can tell which id a key of another caller has, and so
nobody can find out whether it was used, or use it up. The secret follows from the daemon's identity key, as the keys of
its agents do: it is the same after every restart, and a copy of the home has it.

Ids were once a plain hash. A task under such an id is still found by its key, for as long as the ledger has it.
"""

from __future__ import annotations

import hashlib
from typing import Final

from covenant.exchange.catalogue import Catalogue
from covenant.exchange.tenancy import Caller
from covenant.ledger.contract import Ledger
from covenant.model.errors import Invalid
from covenant.model.ids import AgentId, TaskId, uuid_of

UNGUESSABLE_LENGTH_MIN: Final = 32
"""A shorter name that somebody without a token chooses could be chosen by others too. A UUID has 36 characters."""


class KeyedIds:
    def __init__(self, ledger: Ledger, catalogue: Catalogue) -> None:
        self._ledger = ledger
        self._catalogue = catalogue

    async def find(self, caller: Caller, place: str, key: str, *, sender: AgentId, recipient: AgentId) -> TaskId:
        """The task that this caller means by this key, at this place: an agent, or a part of a door."""
        check_key(caller, key)
        unkeyed = unkeyed_id(caller, place, key)
        if self._ledger.may_know(unkeyed):
            whose = await self._ledger.parties(unkeyed)
            if whose is not None and (whose.sender, whose.recipient) == (sender, recipient):
                return unkeyed
        return TaskId(self._catalogue.secret_id(_scope(caller, place, key)))


def unkeyed_id(caller: Caller, place: str, key: str) -> TaskId:
    """As ids were made once. Good for what stays within one task, and for finding old tasks."""
    return TaskId(uuid_of(hashlib.sha256(_scope(caller, place, key).encode()).digest()))


def check_key(caller: Caller, key: str) -> None:
    """Callers without a token are told apart by nothing: two of them must not come upon the same key."""
    if caller.anonymous and len(key) < UNGUESSABLE_LENGTH_MIN:
        raise Invalid(
            "guessable_key",
            f"without a token, an idempotency key has at least {UNGUESSABLE_LENGTH_MIN} characters; use a random UUID",
        )


def _scope(caller: Caller, place: str, key: str) -> str:
    return f"{caller.tenant.name}\0{caller.name}\0{place}\0{key}"
