"""Verifies Ed25519 signatures (RFC 8032, section 5.1.7), so that the kit needs no crypto library.

It is slow and not constant-time: it verifies what servers under test send, and handles no secret.
"""

from __future__ import annotations

import hashlib
from typing import Final

_P: Final = 2**255 - 19
_ORDER: Final = 2**252 + 27742317777372353535851937790883648493
_D: Final = -121665 * pow(121666, -1, _P) % _P
_ROOT: Final = pow(2, (_P - 1) // 4, _P)

# A point is (x, y) of the twisted Edwards curve -x² + y² = 1 + d·x²·y².
Point = tuple[int, int]


def _add(one: Point, two: Point) -> Point:
    (x1, y1), (x2, y2) = one, two
    product = _D * x1 * x2 * y1 * y2 % _P
    x = (x1 * y2 + x2 * y1) * pow(1 + product, -1, _P)
    y = (y1 * y2 + x1 * x2) * pow(1 - product, -1, _P)
    return x % _P, y % _P


def _times(number: int, point: Point) -> Point:
    total: Point = (0, 1)
    while number:
        if number & 1:
            total = _add(total, point)
        point = _add(point, point)
        number >>= 1
    return total


def _point(encoded: bytes) -> Point | None:
    y = int.from_bytes(encoded, "little")
    sign, y = y >> 255, y & (2**255 - 1)
    if len(encoded) != 32 or y >= _P:
        return None
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * _ROOT % _P
    if (x * x - square) % _P or (x == 0 and sign):
        return None
    return (_P - x if x & 1 != sign else x), y


_BASE_Y: Final = 4 * pow(5, -1, _P) % _P
_BASE: Final = _point(_BASE_Y.to_bytes(32, "little"))


def is_valid(public_key: bytes, signature: bytes, message: bytes) -> bool:
    if len(signature) != 64:
        return False
    key, nonce, scalar = _point(public_key), _point(signature[:32]), int.from_bytes(signature[32:], "little")
    if key is None or nonce is None or scalar >= _ORDER:
        return False
    assert _BASE is not None
    digest = hashlib.sha512(signature[:32] + public_key + message).digest()
    challenge = int.from_bytes(digest, "little") % _ORDER
    return _times(scalar, _BASE) == _add(nonce, _times(challenge, key))
