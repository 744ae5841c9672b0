"""Names of things: task and lease ids, and who an agent is.

An `AgentId` is a display name for people and a public key for decisions: everything that is matched
(receive, drain, visibility, grants) is matched by the key, so a renamed agent loses nothing.
"""

from __future__ import annotations

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


class AgentId(msgspec.Struct, frozen=True, gc=False):
    """Who: `display` is `name@host`, `pubkey` is base58 of 32 bytes."""

    display: str
    pubkey: PublicKey


def parse_uuid(value: str, field: str) -> str:
    """The canonical (lower case, hyphenated) form of a UUID, or a refusal that names the field."""
    lowered = value.lower()
    if _UUID(lowered) is None:
        raise Invalid("invalid_id", f"{field} must be a UUID such as 123e4567-e89b-42d3-a456-426614174000")
    return lowered


def uuid_of(digest: bytes) -> str:
    """The first 16 bytes of a digest, shaped as a UUID (version 8)."""
    h = digest.hex()
    return f"{h[:8]}-{h[8:12]}-8{h[13:16]}-{'89ab'[int(h[16], 16) & 3]}{h[17:20]}-{h[20:32]}"


def parse_task_id(value: str) -> TaskId:
    return TaskId(parse_uuid(value, "task id"))


def parse_lease_id(value: str) -> LeaseId:
    return LeaseId(parse_uuid(value, "lease_id"))


def check_display(display: str) -> str:
    if len(display) > DISPLAY_LENGTH_MAX or _DISPLAY(display) is None:
        raise Invalid("invalid_agent_id", f"invalid AgentId.display: {display[:80]!r}; write name@host")
    return display


def check_pubkey(pubkey: str) -> PublicKey:
    size = base58_size(pubkey)
    if size != KEY_BYTES:
        raise Invalid("invalid_agent_id", f"pubkey must decode to {KEY_BYTES} bytes, got {size}")
    return PublicKey(pubkey)


ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGIT: Final = {character: value for value, character in enumerate(ALPHABET)}
_BASE58_LENGTH_MAX: Final = 128


def base58(data: bytes) -> str:
    """Bitcoin's base58 without checksum, as identities, tokens and signatures are written."""
    number = int.from_bytes(data, "big")
    digits: list[str] = []
    while number:
        number, rest = divmod(number, 58)
        digits.append(ALPHABET[rest])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(digits))


def from_base58(text: str) -> bytes:
    """The bytes behind `text`; `ValueError` if it is not base58 or too long to be any of ours."""
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
    """How many bytes `text` stands for; 0 if it is not base58."""
    try:
        return len(from_base58(text))
    except ValueError:
        return 0
