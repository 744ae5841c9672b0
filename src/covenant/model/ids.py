"""Identifiers: task and lease ids, and the identity of an agent.

An `AgentId` is a display name for people and a public key for decisions: receive, drain, visibility and grants all
match by the key, so a renamed agent loses nothing.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, NewType

import msgspec

from covenant.model.errors import Invalid

TaskId = NewType("TaskId", str)
LeaseId = NewType("LeaseId", str)
PublicKey = NewType("PublicKey", str)
"""Base58 of the 32 bytes of an Ed25519 public key."""

KEY_BYTES: Final = 32
DISPLAY_LENGTH_MAX: Final = 128
REQUEST_ID_LENGTH_MAX: Final = 128

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}").fullmatch
_DISPLAY = re.compile(r"[A-Za-z0-9_.\-]+@[A-Za-z0-9_.\-]+").fullmatch
ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGIT: Final = {character: value for value, character in enumerate(ALPHABET)}
_BASE58_LENGTH_MAX: Final = 128


class AgentId(msgspec.Struct, frozen=True, gc=False):
    """An agent's identity: `display` is `name@host`, `pubkey` is base58 of 32 bytes."""

    display: str
    pubkey: PublicKey


def parse_uuid(value: str, field: str) -> str:
    """Returns the canonical (lower case, hyphenated) form of a UUID, or refuses and names the field."""
    lowered = value.lower()
    if _UUID(lowered) is None:
        raise Invalid("invalid_id", f"{field} must be a UUID such as 123e4567-e89b-42d3-a456-426614174000")
    return lowered


def uuid_of(digest: bytes) -> str:
    """Formats the first 16 bytes of a digest as a UUID of version 8."""
    h = digest.hex()
    return f"{h[:8]}-{h[8:12]}-8{h[13:16]}-{'89ab'[int(h[16], 16) & 3]}{h[17:20]}-{h[20:32]}"


def derived_task_id(parent: str, *texts: str) -> TaskId:
    """The id of a delegated task: the same parent and the same texts give the same id."""
    return TaskId(uuid_of(hashlib.sha256("\0".join((parent, *texts)).encode()).digest()))


def parse_task_id(value: str) -> TaskId:
    return TaskId(parse_uuid(value, "task id"))


def parse_lease_id(value: str) -> LeaseId:
    return LeaseId(parse_uuid(value, "lease_id"))


def check_display(display: str) -> str:
    if len(display) > DISPLAY_LENGTH_MAX or _DISPLAY(display) is None:
        raise Invalid("invalid_agent_id", f"{display[:80]!r} is not the name of an identity; write name@host")
    return display


def check_pubkey(pubkey: str) -> PublicKey:
    size = base58_size(pubkey)
    if size != KEY_BYTES:
        raise Invalid("invalid_agent_id", f"pubkey must decode to {KEY_BYTES} bytes, got {size}")
    return PublicKey(pubkey)


def base58(data: bytes) -> str:
    """Encodes bytes in Bitcoin's base58 without checksum. Identities, tokens and signatures are written so."""
    number = int.from_bytes(data, "big")
    digits: list[str] = []
    while number:
        number, rest = divmod(number, 58)
        digits.append(ALPHABET[rest])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(digits))


def from_base58(text: str) -> bytes:
    """Decodes base58. Raises `ValueError` if `text` is not base58, or longer than any key, token or signature."""
    if len(text) > _BASE58_LENGTH_MAX:
        raise ValueError("too long for base58")
    number = 0
    for character in text:
        digit = _DIGIT.get(character)
        if digit is None:
            raise ValueError("not base58")
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


def base58_size(text: str) -> int:
    """The number of bytes that `text` encodes; 0 if it is not base58."""
    try:
        return len(from_base58(text))
    except ValueError:
        return 0
