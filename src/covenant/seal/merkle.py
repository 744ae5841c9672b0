"""Merkle trees as in RFC 6962 (and 9162), over SHA-256: one root for many lines, and short proofs that one is in.

Leaves and inner nodes are hashed with different first bytes, so that none can be passed off as the other.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

_LEAF: Final = b"\x00"
_NODE: Final = b"\x01"
DIGEST_BYTES: Final = 32


def leaf(line: bytes) -> bytes:
    return hashlib.sha256(_LEAF + line).digest()


def root(leaves: Sequence[bytes]) -> bytes:
    """The root over leaves that are hashes already; that of no leaves is the hash of nothing."""
    if not leaves:
        return hashlib.sha256().digest()
    level = list(leaves)
    # Pairing from the left, and letting an odd last one rise, gives the tree of the RFC, without its recursion.
    while len(level) > 1:
        paired = [_node(level[at], level[at + 1]) for at in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    return level[0]


def inclusion(leaves: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """The hashes beside the way from the leaf at `index` up to the root, lowest first."""
    if not 0 <= index < len(leaves):
        raise IndexError(index)
    path: list[bytes] = []
    level = list(leaves)
    while len(level) > 1:
        beside = index ^ 1
        if beside < len(level):
            path.append(level[beside])
        paired = [_node(level[at], level[at + 1]) for at in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
        index //= 2
    return tuple(path)


def includes(tree_root: bytes, size: int, index: int, leaf_hash: bytes, path: Sequence[bytes]) -> bool:
    """RFC 9162, section 2.1.3.2: whether the leaf is at this place in the tree with this root and size."""
    if not 0 <= index < size or any(len(each) != DIGEST_BYTES for each in (leaf_hash, *path)):
        return False
    at, last, reached = index, size - 1, leaf_hash
    for beside in path:
        if last == 0:
            return False
        if at & 1 or at == last:
            reached = _node(beside, reached)
            while not at & 1 and at:
                at, last = at >> 1, last >> 1
        else:
            reached = _node(reached, beside)
        at, last = at >> 1, last >> 1
    return last == 0 and hmac.compare_digest(reached, tree_root)


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_NODE + left + right).digest()
