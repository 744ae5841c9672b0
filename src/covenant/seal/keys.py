"""Ed25519 keys and their signatures, bearer tokens, sealed cursors, and private keys locked by a passphrase.
No file and no clock.

The signature of a document is a detached JWS (RFC 7515, appendix F) over its canonical form (RFC 8785), written as
`<header>..<value>`. The key and the kind of document determine the header: there is no algorithm to choose, and a
signature for one kind is invalid for any other.

A locked key is JSON (scrypt, then AES-256-GCM); its parameters are authenticated. A `Locker` keeps the keys that it has
derived, so locking again is quick. Unlocking never takes more memory than `COST_MAX` needs, whatever the file says.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
import unicodedata
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
import rfc8785
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from covenant.model.errors import CovenantError
from covenant.model.grant import Grant
from covenant.model.ids import PublicKey, base58, from_base58

TOKEN_PREFIX_LENGTH: Final = 6
TENANT_TOKEN: Final = "atr_"  # noqa: S105  (a token's prefix)
TENANT_TOKEN_PREFIX_LENGTH: Final = len(TENANT_TOKEN) + TOKEN_PREFIX_LENGTH

_DERIVED: Final = b"covenant.identity.v1\n"
_SECRET: Final = b"covenant.secret.v1\n"
BAD_CURSOR: Final = "!"
"""A cursor that no ledger gives out."""
ALGORITHM: Final = "Ed25519"
PREFIX: Final = "covenant-"
# A key of small order has a signature that is valid for every message, so that its owner could later claim that any
# message was signed. These are all encodings of such keys, also those that are not canonical, without the sign bit.
_SMALL_ORDER: Final = frozenset(
    bytes.fromhex(text)
    for text in (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)
VERSION: Final = "v1a"
_CONTEXT = b"covenant.grant.v1\n"
FORMAT: Final = "covenant-locked-key-v1"
COST: Final = 17
"""log2 of scrypt's N: 128 MiB and about half a second."""
COST_MIN: Final = 10
COST_MAX: Final = 18
KEY_BYTES_MAX: Final = 6_000
LOCKED_BYTES_MAX: Final = 16_384
_R: Final = 8
_NONCE_BYTES: Final = 12


def new_private_key() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes_raw()


def public_key(private_key: bytes) -> PublicKey:
    raw = Ed25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()
    return PublicKey(base58(raw))


def derived_key(private_key: bytes, display: str) -> bytes:
    """The private key of an identity that the daemon holds. It is derived from the name, so nothing is stored.

    HKDF-SHA256: one derived key reveals neither another one nor the key that they come from.
    """
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=_DERIVED + display.encode()).derive(private_key)


def derived_secret(private_key: bytes, purpose: str) -> bytes:
    """32 bytes for one purpose of the daemon, derived as in `derived_key`, so that nothing is stored."""
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=_SECRET + purpose.encode()).derive(private_key)


def sign(private_key: bytes, message: bytes) -> str:
    """The signature in base58; it has 64 bytes."""
    return base58(Ed25519PrivateKey.from_private_bytes(private_key).sign(message))


def verify(pubkey: PublicKey, message: bytes, signature_b58: str) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(from_base58(pubkey)).verify(from_base58(signature_b58), message)
    except (InvalidSignature, ValueError):
        return False
    return True


def new_token() -> str:
    """A bearer token: 32 random bytes in base58. It is shown once; only its hash is stored."""
    return base58(AESGCM.generate_key(bit_length=256))


def new_tenant_token() -> str:
    """A tenant's bearer token: `atr_` and 32 random bytes in hex."""
    return TENANT_TOKEN + AESGCM.generate_key(bit_length=256).hex()


def token_hash(token: str) -> str:
    """The hash that is stored and looked up. A token has 256 random bits, so it needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


def nonce() -> str:
    return AESGCM.generate_key(bit_length=128).hex()


class CursorSeal:
    """Seals the cursor of a page for its reader. A plain cursor would show the reader how many tasks others have.

    AES-SIV: the same cursor is sealed the same each time, and needs no nonce.
    """

    def __init__(self, private_key: bytes) -> None:
        self._cipher = AESSIV(derived_secret(private_key, "cursors"))

    def seal(self, reader: str, cursor: str) -> str:
        return base64url(self._cipher.encrypt(cursor.encode(), [reader.encode()])) if cursor else ""

    def open(self, reader: str, sealed: str) -> str:
        """The cursor, or `BAD_CURSOR` if it was not sealed for this reader. The first page has none."""
        try:
            return self._cipher.decrypt(from_base64url(sealed), [reader.encode()]).decode() if sealed else ""
        except (InvalidTag, ValueError):
            return BAD_CURSOR


class Uncanonical(CovenantError, ValueError):
    """The value has no canonical JSON: a whole number beyond 2^53 - 1, NaN, or half of a surrogate pair."""


def canonical(document: Any) -> bytes:
    try:
        return rfc8785.dumps(document)
    except (ValueError, RecursionError, TypeError) as wrong:
        raise Uncanonical(str(wrong)) from None


def digest(document: Any) -> str:
    return hashlib.sha256(canonical(document)).hexdigest()


def sign_document(
    private_key: bytes, kind: str, document: Mapping[str, Any], certificate: Mapping[str, Any] | None = None
) -> str:
    """`certificate`: the certificate by which the key signs for another one; it goes into the header."""
    header = _header(public_key(private_key), kind, certificate)
    value = Ed25519PrivateKey.from_private_bytes(private_key).sign(_signed_bytes(header, document))
    return f"{header}..{base64url(value)}"


def document_holds(
    key: PublicKey,
    kind: str,
    document: Mapping[str, Any],
    signature: str,
    certificate: Mapping[str, Any] | None = None,
) -> bool:
    """Whether this key signed the document, under this certificate. The certificate itself is not checked here."""
    header, dots, value = signature.partition("..")
    try:
        if not dots or header != _header(key, kind, certificate):
            return False
        checked_key(key).verify(from_base64url(value), _signed_bytes(header, document))
    except (InvalidSignature, ValueError):
        return False
    return True


def _header(key: PublicKey, kind: str, certificate: Mapping[str, Any] | None) -> str:
    certified = {"cert": certificate} if certificate is not None else {}
    return base64url(canonical({"alg": ALGORITHM, **certified, "kid": key, "typ": PREFIX + kind}))


def _signed_bytes(header: str, document: Mapping[str, Any]) -> bytes:
    return f"{header}.{base64url(canonical(document))}".encode()


def checked_key(key: PublicKey) -> Ed25519PublicKey:
    """The key to verify with; `ValueError` if it is invalid, not encoded in its one form, or of small order."""
    raw = from_base58(key)
    if len(raw) != 32 or raw[:31] + bytes([raw[31] & 0x7F]) in _SMALL_ORDER:
        raise ValueError("not a usable Ed25519 key")
    return Ed25519PublicKey.from_public_bytes(raw)


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_base64url(text: str) -> bytes:
    """Decodes strictly: each sequence of bytes has exactly one text, so that no text can be changed unnoticed."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as wrong:
        raise ValueError(str(wrong)) from None
    if base64url(data) != text:
        raise ValueError("not canonical base64url")
    return data


class WebhookSigner:
    """Signs with one Ed25519 key, whose public half is in our JSON Web Key Set under `key_id`."""

    def __init__(self, private_key: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private_key)
        self.key_id: PublicKey = public_key(private_key)

    def sign(self, delivery_id: str, timestamp_s: int, body: bytes) -> str:
        signature = self._key.sign(signed_bytes(delivery_id, timestamp_s, body))
        return f"{VERSION},{base64.b64encode(signature).decode()}"


def signed_bytes(delivery_id: str, timestamp_s: int, body: bytes) -> bytes:
    assert "." not in delivery_id
    return f"{delivery_id}.{timestamp_s}.".encode() + body


def grant_bytes(grant: Grant) -> bytes:
    return b"".join(
        (
            _CONTEXT,
            from_base58(grant.subject.pubkey),
            _sized(grant.action.encode()),
            _sized(grant.scope_json.encode()),
            from_base58(grant.granted_by.pubkey),
            struct.pack(">?QQ", grant.expires_at is not None, grant.expires_at or 0, grant.granted_at_ms),
            _sized(grant.nonce.encode()),
        )
    )


def sign_grant(private_key: bytes, grant: Grant) -> str:
    return sign(private_key, grant_bytes(grant))


def verify_grant(grant: Grant) -> bool:
    return verify(grant.granted_by.pubkey, grant_bytes(grant), grant.signature_b58)


def _sized(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


_Text = Annotated[str, msgspec.Meta(max_length=8_192)]


class KeyLocked(CovenantError):
    """The key stays locked. `code` is `wrong_passphrase` (or a changed file: both look alike) or `malformed`."""

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
    """A passphrase, with the keys that were derived from it so far. Safe for several threads."""

    def __init__(self, passphrase: str, *, cost: int = COST) -> None:
        if not passphrase:
            raise ValueError("a passphrase cannot be empty")
        if not COST_MIN <= cost <= COST_MAX:
            raise ValueError(f"cost must be from {COST_MIN} to {COST_MAX}")
        self._passphrase = passphrase
        self._derived_keys: dict[tuple[bytes, int], bytes] = {}
        # The crypto library's own randomness, as for keys: salt and nonce need nothing more.
        self._salt_and_cost = (AESGCM.generate_key(bit_length=128), cost)

    def __repr__(self) -> str:
        return "Locker()"

    def lock(self, secret: bytes) -> bytes:
        if not 0 < len(secret) <= KEY_BYTES_MAX:
            raise ValueError(f"a key to lock must have 1 to {KEY_BYTES_MAX} bytes")
        salt, cost = self._salt_and_cost
        nonce = AESGCM.generate_key(bit_length=128)[:_NONCE_BYTES]
        locked = _Locked(FORMAT, "scrypt", cost, base64url(salt), base64url(nonce), "")
        sealed = AESGCM(self._key(salt, cost)).encrypt(nonce, secret, _authenticated(locked))
        return msgspec.json.encode(msgspec.structs.replace(locked, ciphertext=base64url(sealed))) + b"\n"

    def unlock(self, locked: bytes) -> bytes:
        """The unlocked secret. Later locks use the same salt, if its cost is not below ours."""
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
            secret = AESGCM(self._key(salt, read.cost)).decrypt(nonce, sealed, _authenticated(read))
        except InvalidTag:
            raise KeyLocked("wrong_passphrase", "the passphrase is wrong, or the file was changed") from None
        if read.cost >= self._salt_and_cost[1]:
            self._salt_and_cost = (salt, read.cost)
        return secret

    def _key(self, salt: bytes, cost: int) -> bytes:
        key = self._derived_keys.get((salt, cost))
        if key is None:
            key = self._derived_keys[salt, cost] = _derived(self._passphrase, salt, cost)
        return key


def is_locked(data: bytes) -> bool:
    return FORMAT.encode() in data[:LOCKED_BYTES_MAX]


def _derived(passphrase: str, salt: bytes, cost: int) -> bytes:
    # One passphrase may be typed as different bytes on two keyboards; normalisation makes them equal.
    typed = unicodedata.normalize("NFKC", passphrase).encode("utf-8", "surrogateescape")
    return Scrypt(salt=salt, length=32, n=1 << cost, r=_R, p=1).derive(typed)


def _authenticated(locked: _Locked) -> bytes:
    document = msgspec.to_builtins(locked)
    del document["ciphertext"]
    return canonical(document)
