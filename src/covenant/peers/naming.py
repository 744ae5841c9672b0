"""What peers are called, and where they are said to be: names, addresses and entries of the settings, checked."""

from __future__ import annotations

import hashlib
import re
from typing import Final, NamedTuple

from covenant.model.peers.peer_record import NAME_CHARS_MAX, Peer
from covenant.model.errors import Invalid
from covenant.model.ids import AgentId, PublicKey, base58
from covenant.model.peers.instance import InstanceId, parse_instance_id
from covenant.outbound.location import Unreadable, read_url

ID_TAIL: Final = 8
PATH_CHARS_MAX: Final = 200

_NAME = re.compile(r"[A-Za-z0-9_.\-]+").fullmatch
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.\-]+")
_PATH = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9_.~-]*)*").fullmatch


class Place(NamedTuple):
    """A peer as a setting gives it."""

    url: str | None
    peer_id: str | None
    name: str | None


def check_name(name: str) -> str:
    """What stands before `/profile` where somebody names a target, and in front of `@peer` in the audit."""
    if len(name) > NAME_CHARS_MAX or _NAME(name) is None or name.startswith("frd1_"):
        raise Invalid(
            "invalid_name",
            f"a peer's name is 1 to {NAME_CHARS_MAX} of A-Z a-z 0-9 _ . - and does not begin like an id",
        )
    return name


def name_from(said: str, peer_id: InstanceId) -> str:
    """What a peer calls itself, as far as that can be a name here; otherwise the end of its id."""
    name = _NOT_IN_NAMES.sub("-", said).strip("-")[:NAME_CHARS_MAX]
    return name if name and not name.startswith("frd1_") else peer_id[-ID_TAIL:]


def apart(name: str, peer_id: InstanceId) -> str:
    """Another name for one whose own is taken."""
    tail = peer_id[-ID_TAIL:]
    return tail if name == tail else f"{name[: NAME_CHARS_MAX - ID_TAIL - 1]}-{tail}"


def read_place(text: str) -> str:
    """The address in its one spelling, without a final slash. Its path is where all paths of the peer begin."""
    try:
        location = read_url(text.strip())
    except Unreadable as wrong:
        raise Invalid("invalid_url", f"{text[:80]!r} cannot be a peer's address: {wrong}") from None
    path = location.target.rstrip("/")
    if len(path) > PATH_CHARS_MAX or "#" in text or _PATH(path) is None:
        raise Invalid(
            "invalid_url",
            f"{text[:80]!r} cannot be a peer's address: write https://host, https://host:port or https://host/base",
        )
    return f"{location.scheme}://{location.authority}{path}"


def read_entry(text: str) -> Place:
    """`https://host`, `<id>@https://host`, `name=https://host`, `name=<id>@https://host` or `name=<id>`."""
    head, equals, rest = text.strip().partition("=")
    name, given = (check_name(head), rest) if equals and "/" not in head else (None, text.strip())
    before, at, after = given.partition("@")
    if at and before.startswith("frd1_"):
        return Place(read_place(after), parse_instance_id(before), name)
    if given.startswith("frd1_"):
        return Place(None, parse_instance_id(given), name)
    return Place(read_place(given), None, name)


def as_agent(peer: Peer) -> AgentId:
    """The peer where an agent is asked for: in the audit, and as the sender of a task."""
    return AgentId(f"{peer.name or peer.id[-ID_TAIL:]}@peer", _key_of(peer))


def _key_of(peer: Peer) -> PublicKey:
    if peer.keys is not None:
        return PublicKey(peer.keys.identity_key)
    # It has not shown its key, and nothing was taken from it yet: this stands for it, and is nobody's key.
    return PublicKey(base58(hashlib.sha256(f"covenant.peer.v1\n{peer.id}".encode()).digest()))
