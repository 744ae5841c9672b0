"""Private keys at rest: scrypt over a passphrase, then AES-256-GCM. A file's mode is its writer's business.

A locked key is JSON with everything but the passphrase, and its parameters are authenticated with it. A `Locker` makes
a key for each passphrase and salt, and keeps it, so that locking anew what changes
each day takes no time. Unlocking never takes more memory than the greatest cost below, whatever the file says.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Final, Literal

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from covenant.model.errors import CovenantError
from covenant.seal.signed_documents import base64url, canonical, from_base64url

FORMAT: Final = "covenant-locked-key-v1"
COST: Final = 17
"""log2 of scrypt's N: 128 MiB and about half a second."""
COST_MIN: Final = 10
COST_MAX: Final = 18
KEY_BYTES_MAX: Final = 4_096
LOCKED_BYTES_MAX: Final = 16_384

_R: Final = 8
_NONCE_BYTES: Final = 12
_Text = Annotated[str, msgspec.Meta(max_length=8_192)]


class KeyLocked(CovenantError):
    """The key stays locked. `code` is `wrong_passphrase` (or a changed file: the two look alike) or `malformed`."""

    def __init__(self, code: Literal["wrong_passphrase", "malformed"], message: str) -> None:
        super().__init__(message)
        self.code = code


class _Locked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal["covenant-locked-key-v1"]
    kdf: Literal["scrypt"]
    cost: Annotated[int, msgspec.Meta(ge=COST_MIN, le=COST_MAX)]
    salt: _Text
    nonce: _Text
    ciphertext: _Text


class Locker:
    """A passphrase, with the keys that were made from it so far. For several threads."""

    def __init__(self, passphrase: str, *, cost: int = COST) -> None:
        if not passphrase:
            raise ValueError("a passphrase cannot be empty")
        if not COST_MIN <= cost <= COST_MAX:
            raise ValueError("cannot be locked so")
        self._passphrase = passphrase
        self._made: dict[tuple[bytes, int], bytes] = {}
        # The library's own randomness: keys are what it makes, and salt and nonce need nothing more.
        self._locks_with = (AESGCM.generate_key(bit_length=128), cost)

    def __repr__(self) -> str:
        return "Locker()"

    def lock(self, secret: bytes) -> bytes:
        if not 0 < len(secret) <= KEY_BYTES_MAX:
            raise ValueError("cannot be locked so")
        salt, cost = self._locks_with
        nonce = AESGCM.generate_key(bit_length=128)[:_NONCE_BYTES]
        locked = _Locked(FORMAT, "scrypt", cost, base64url(salt), base64url(nonce), "")
        sealed = AESGCM(self._key(salt, cost)).encrypt(nonce, secret, _bound(locked))
        return msgspec.json.encode(msgspec.structs.replace(locked, ciphertext=base64url(sealed))) + b"\n"

    def unlock(self, locked: bytes) -> bytes:
        """What was locked. What is locked from here on has the same salt, if its cost is not less than ours."""
        if len(locked) > LOCKED_BYTES_MAX:
            raise KeyLocked("malformed", "too long to be a locked key")
        try:
            read = msgspec.json.decode(locked, type=_Locked)
            salt, nonce, sealed = map(from_base64url, (read.salt, read.nonce, read.ciphertext))
        except ValueError as wrong:
            raise KeyLocked("malformed", f"not a locked key: {wrong}") from None
        if len(salt) != 16 or len(nonce) != _NONCE_BYTES:
            raise KeyLocked("malformed", "not a locked key: salt or nonce has the wrong length")
        try:
            secret = AESGCM(self._key(salt, read.cost)).decrypt(nonce, sealed, _bound(read))
        except InvalidTag:
            raise KeyLocked("wrong_passphrase", "the passphrase is wrong, or the file was changed") from None
        if read.cost >= self._locks_with[1]:
            self._locks_with = (salt, read.cost)
        return secret

    def _key(self, salt: bytes, cost: int) -> bytes:
        made = self._made.get((salt, cost))
        if made is None:
            made = self._made[salt, cost] = _derived(self._passphrase, salt, cost)
        return made


def is_locked(data: bytes) -> bool:
    return FORMAT.encode() in data[:LOCKED_BYTES_MAX]


def _derived(passphrase: str, salt: bytes, cost: int) -> bytes:
    # One passphrase may be typed as different bytes on two keyboards; this makes them one.
    typed = unicodedata.normalize("NFKC", passphrase).encode("utf-8", "surrogateescape")
    return Scrypt(salt=salt, length=32, n=1 << cost, r=_R, p=1).derive(typed)


def _bound(locked: _Locked) -> bytes:
    document = msgspec.to_builtins(locked)
    del document["ciphertext"]
    return canonical(document)
