"""An instance's identity: its id, which is derived from its key, short-lived prekeys, and changes of identity.

The id is `frd1_` and the base32 of the first 25 bytes of SHA-256 over the Ed25519 key. Prekeys are signed by that key
and live for two days, with a new one each day; once the private half is erased, nothing sealed to it can be opened. The
caller passes in times, stores keys and erases expired ones.

A chain of identity changes begins with any former identity of an instance and ends with its present one. Each change is
signed by both of its keys, so nobody can add, leave out or move one. A chain that names an identity twice is refused:
an abandoned key is never taken up again.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.model.ids import PublicKey, base58, from_base58
from covenant.model.peers.instance import (
    CHANGES_MAX,
    PROTOCOL_VERSION,
    SUITE,
    SUPPORTED_VERSIONS,
    FormerKey,
    IdentityChange,
    InstanceId,
    KeyBundle,
    KeyCertificate,
    KeyRevocation,
    Prekey,
    Versions,
)
from covenant.seal.keys import checked_key, document_holds, public_key, sign_document
from covenant.seal.suites import SUITES, new_prekey_secret

ID_PREFIX: Final = "frd1_"
ID_BYTES: Final = 25
PREKEY_PERIOD_MS: Final = 24 * 3_600_000
PREKEY_LIFE_MS: Final = 2 * PREKEY_PERIOD_MS
SKEW_MS: Final = 60_000
"""The largest accepted difference between two clocks."""
ENVELOPE_LIFE_MS_MAX: Final = 300_000

_KID_BYTES: Final = 10
_REVOCATION: Final = "identity-revocation"


class InstanceIdentity:
    """A key that signs for an instance: its identity key, or a key that the identity key has certified.

    The key object is kept, since making it from its bytes costs as much as a signature.
    """

    def __init__(self, private_key: bytes, certificate: KeyCertificate | None = None) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private_key)
        self.key = PublicKey(base58(self._key.public_key().public_bytes_raw()))
        self.certificate = certificate
        self.id = instance_id(PublicKey(certificate.issuer) if certificate is not None else self.key)

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"InstanceIdentity({self.id})"


class PrivatePrekey(NamedTuple):
    """A prekey with its private half: 32 bytes that never leave the instance."""

    prekey: Prekey
    private_key: bytes

    def __repr__(self) -> str:
        return f"PrivatePrekey({self.prekey.kid})"


def instance_id(key: PublicKey) -> InstanceId:
    """The id of a key. `ValueError` if `key` is not a usable key: a weak key proves nothing."""
    raw = checked_key(key).public_bytes_raw()
    return InstanceId(ID_PREFIX + base64.b32encode(hashlib.sha256(raw).digest()[:ID_BYTES]).decode().lower())


def is_key_of(key: PublicKey, claimed: str) -> bool:
    try:
        return instance_id(key) == claimed
    except ValueError:
        return False


def fingerprint(key: PublicKey) -> str:
    """A short hash for people and announcements: 16 characters of hex. It is a hint, never a proof."""
    return hashlib.sha256(from_base58(key)).hexdigest()[:16]


def fingerprint_of(claimed: InstanceId) -> str:
    """The fingerprint of every key with this id, which begins with the same hash. Announcing another is an error."""
    return base64.b32decode(claimed.removeprefix(ID_PREFIX).upper()).hex()[:16]


def new_prekey(identity_private_key: bytes, now_ms: int, suite: str = SUITE) -> PrivatePrekey:
    made = prekey_of(new_prekey_secret(), suite, now_ms, now_ms + PREKEY_LIFE_MS)
    owner = instance_id(public_key(identity_private_key))
    signature = sign_document(identity_private_key, "prekey", _prekey_document(owner, made.prekey))
    return made._replace(prekey=msgspec.structs.replace(made.prekey, signature=signature))


def prekey_of(
    private_key: bytes, suite: str, not_before_ms: int, not_after_ms: int, signature: str = ""
) -> PrivatePrekey:
    """`ValueError` if `private_key` is not the private half of a prekey of the suite."""
    known = SUITES[suite]
    public = known.public(private_key)
    prekey = Prekey(
        kid=_kid(public),
        suite=suite,
        public_key=known.write(public),
        not_before_ms=not_before_ms,
        not_after_ms=not_after_ms,
        signature=signature,
    )
    return PrivatePrekey(prekey, private_key)


def prekey_holds(key: PublicKey, prekey: Prekey) -> bool:
    """Whether a prekey is signed by `key`, named by its own hash, of a suite that we speak, and short-lived enough."""
    suite = SUITES.get(prekey.suite)
    if suite is None:
        return False
    try:
        public = suite.read(prekey.public_key)
        owner = instance_id(key)
        suite.recipient(public)
    except ValueError:
        return False
    return (
        prekey.kid == _kid(public)
        and prekey.not_before_ms < prekey.not_after_ms <= prekey.not_before_ms + PREKEY_LIFE_MS
        and document_holds(key, "prekey", _prekey_document(owner, prekey), prekey.signature)
    )


def prekey_due(prekeys: Iterable[Prekey], now_ms: int) -> bool:
    """Whether a new prekey is due. A clock that was set back does not stop rotation."""
    newest = max((each.not_before_ms for each in prekeys if each.not_before_ms <= now_ms + SKEW_MS), default=None)
    return newest is None or now_ms >= newest + PREKEY_PERIOD_MS


def prekey_to_use(prekeys: Iterable[Prekey], now_ms: int) -> Prekey | None:
    """The newest prekey that is valid now and for the life of an envelope; None if a new bundle is needed."""
    usable = (
        each
        for each in prekeys
        if each.suite in SUITES
        and each.not_before_ms <= now_ms + SKEW_MS
        and now_ms + ENVELOPE_LIFE_MS_MAX <= each.not_after_ms
    )
    return max(usable, key=lambda each: (each.not_before_ms, each.kid), default=None)


def prekey_opens(prekey: Prekey, now_ms: int) -> bool:
    return prekey.not_before_ms - SKEW_MS <= now_ms <= prekey.not_after_ms + SKEW_MS


def prekey_over(prekey: Prekey, now_ms: int) -> bool:
    """Whether the prekey's private half must be erased by now."""
    return now_ms > prekey.not_after_ms + SKEW_MS


def sign_bundle(
    identity_private_key: bytes,
    prekeys: Iterable[Prekey],
    now_ms: int,
    *,
    change: IdentityChange | None = None,
    versions: Versions = SUPPORTED_VERSIONS,
) -> KeyBundle:
    """Signs the prekeys that have not expired; `ValueError` if there is none. The newest of them limits the bundle."""
    key = public_key(identity_private_key)
    shown = sorted(
        (each for each in prekeys if now_ms < each.not_after_ms), key=lambda each: each.not_before_ms, reverse=True
    )
    if not shown:
        raise ValueError("a bundle needs a prekey that has not expired")
    bundle = KeyBundle(
        id=instance_id(key),
        identity_key=key,
        prekeys=tuple(shown[:2]),
        versions=versions,
        issued_at_ms=now_ms,
        expires_at_ms=max(each.not_after_ms for each in shown),
        change=change,
    )
    return msgspec.structs.replace(bundle, signature=sign_document(identity_private_key, "bundle", unsigned(bundle)))


def bundle_holds(bundle: KeyBundle, claimed: InstanceId, now_ms: int) -> bool:
    """Whether these are the present keys of the instance with this id; checks every signature."""
    key = PublicKey(bundle.identity_key)
    return (
        bundle.id == claimed
        and is_key_of(key, claimed)
        and bundle.issued_at_ms <= now_ms + SKEW_MS
        and now_ms < bundle.expires_at_ms + SKEW_MS
        and PROTOCOL_VERSION in bundle.versions
        and document_holds(key, "bundle", unsigned(bundle), bundle.signature)
        and all(each.suite == SUITE and prekey_holds(key, each) for each in bundle.prekeys)
        and (bundle.change is None or (bundle.change.new_id == claimed and change_holds(bundle.change)))
    )


def sign_change(old_private_key: bytes, new_private_key: bytes, now_ms: int) -> IdentityChange:
    old, new = public_key(old_private_key), public_key(new_private_key)
    change = IdentityChange(
        old_id=instance_id(old), old_key=old, new_id=instance_id(new), new_key=new, issued_at_ms=now_ms
    )
    document = _change_document(change)
    return msgspec.structs.replace(
        change,
        old_signature=sign_document(old_private_key, "identity-change", document),
        new_signature=sign_document(new_private_key, "identity-change", document),
    )


def change_holds(change: IdentityChange) -> bool:
    """Whether both the old and the new identity signed the change. Trust in the old one is not checked here."""
    old, new = PublicKey(change.old_key), PublicKey(change.new_key)
    document = _change_document(change)
    return (
        change.old_id != change.new_id
        and is_key_of(old, change.old_id)
        and is_key_of(new, change.new_id)
        and document_holds(old, "identity-change", document, change.old_signature)
        and document_holds(new, "identity-change", document, change.new_signature)
    )


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


def unsigned(signed: msgspec.Struct) -> dict[str, Any]:
    """The document that `signature` covers: all other fields, under their names on the wire."""
    document: dict[str, Any] = msgspec.to_builtins(signed)
    document.pop("signature", None)
    return document


def _kid(public: bytes) -> str:
    return "pk_" + base64.b32encode(hashlib.sha256(public).digest()[:_KID_BYTES]).decode().lower()


def _prekey_document(owner: InstanceId, prekey: Prekey) -> dict[str, Any]:
    return {**unsigned(prekey), "owner": owner}


def _change_document(change: IdentityChange) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(change)
    del document["oldSignature"], document["newSignature"]
    return document
