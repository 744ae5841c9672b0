"""Chains of identity changes, and self-revocations of keys.

A chain begins with any former identity of an instance and ends with its present one. Each change is signed by both of
its keys, so nobody can add, leave out or move one. A chain that names an identity twice is refused: an abandoned key is
never taken up again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from covenant.model.ids import PublicKey
from covenant.model.peers.instance import CHANGES_MAX, FormerKey, IdentityChange, InstanceId, KeyRevocation
from covenant.seal.identity import change_holds, instance_id, is_key_of, unsigned
from covenant.seal.keys import document_holds, public_key, sign_document

_REVOCATION = "identity-revocation"


def chain_holds(changes: Sequence[IdentityChange], newest: str) -> bool:
    """Whether each change follows from the one before, and the last one leads to `newest`."""
    ids = [each.old_id for each in changes] + [newest]
    return (
        0 < len(changes) <= CHANGES_MAX
        and len(set(ids)) == len(ids)
        and changes[-1].new_id == newest
        and all(before.new_id == after.old_id for before, after in pairwise(changes))
        and all(map(change_holds, changes))
    )


def chain_to(changes: Iterable[IdentityChange], newest: str) -> tuple[IdentityChange, ...]:
    """The changes that lead to this identity. Later ones are left out: they were begun, but not finished."""
    found: list[IdentityChange] = []
    wanted = newest
    for change in reversed(tuple(changes)):
        if change.new_id == wanted:
            found.append(change)
            wanted = change.old_id
    return tuple(reversed(found[:CHANGES_MAX]))


def former_keys(changes: Iterable[IdentityChange], revocations: Iterable[KeyRevocation]) -> tuple[FormerKey, ...]:
    dead = {each.id for each in revocations if revocation_holds(each)}
    return tuple(FormerKey(id=each.old_id, key=each.old_key, dead=each.old_id in dead) for each in changes)


def sign_revocation(private_key: bytes, now_ms: int) -> KeyRevocation:
    key = public_key(private_key)
    revocation = KeyRevocation(id=instance_id(key), key=key, issued_at_ms=now_ms)
    return msgspec.structs.replace(revocation, signature=sign_document(private_key, _REVOCATION, unsigned(revocation)))


def revocation_holds(revocation: KeyRevocation) -> bool:
    key = PublicKey(revocation.key)
    return is_key_of(key, InstanceId(revocation.id)) and document_holds(
        key, _REVOCATION, unsigned(revocation), revocation.signature
    )
