"""Another instance: its id, its published keys, its trust level, and the protocol versions of both sides.

An instance's id is derived from its identity key (see `seal.identity`), so an instance proves its id by holding that
key: nobody can take over an id, and a changed key is another instance until the old key signs the change.

Signed structs refuse unknown fields, since nobody could say whether such a field was meant to be signed.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import Annotated, Final, NewType

import msgspec

from covenant.model.errors import Invalid

InstanceId = NewType("InstanceId", str)
"""`frd1_` and 40 characters of base32: the first 200 bits of the SHA-256 of the identity key."""

PROTOCOL_VERSION: Final = 2
"""The envelope's version. Version 1, of earlier systems, is refused: it allows replay and does not bind its header."""
EPOCHS: Final = 3
"""From this version on an envelope carries the epoch of its sender's ledger."""
PRICES: Final = 4
"""From this version on a profile may have a price, and both sides report how many records their ledgers have."""
QUESTIONS: Final = 5
"""From this version on a provider may ask the requester a question during the work."""
HYBRID: Final = 6
"""An instance that lists this version has a hybrid prekey. A sender that speaks it too seals to that key alone."""
CERTIFIED: Final = 7
"""An instance that lists this version accepts signatures of keys that the identity key has certified for a purpose."""
SUPPORTED_VERSIONS: Final = (PROTOCOL_VERSION, EPOCHS, PRICES, QUESTIONS, CERTIFIED)
HYBRID_VERSIONS: Final = tuple(sorted((*SUPPORTED_VERSIONS, HYBRID)))
"""The versions of an instance that has hybrid prekeys."""
VERSIONS_MAX: Final = 16
SUITE: Final = "X25519-HKDF-SHA256-AES256GCM-Ed25519"
HYBRID_SUITE: Final = "X25519-MLKEM768-HKDF-SHA256-AES256GCM-Ed25519"
PREKEYS_MAX: Final = 8
CHANGES_MAX: Final = 16
"""The most identity changes that are kept and shown: the newest ones."""
WHOLE_MAX: Final = 2**53 - 1
"""The largest whole number that canonical JSON holds exactly."""

Whole = Annotated[int, msgspec.Meta(ge=0, le=WHOLE_MAX)]
Versions = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=1, le=1_000_000)], ...], msgspec.Meta(max_length=VERSIONS_MAX)
]
Instance = Annotated[str, msgspec.Meta(pattern=r"\Afrd1_[a-z2-7]{40}\Z")]
Key = Annotated[str, msgspec.Meta(min_length=32, max_length=44)]
Epoch = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
"""An epoch of a ledger: each restore from a backup begins a new one. None: the first epoch."""
KeyId = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
Signature = Annotated[str, msgspec.Meta(min_length=1, max_length=1_024)]

_INSTANCE = re.compile(r"frd1_[a-z2-7]{40}").fullmatch


class Trust(enum.StrEnum):
    """How far a peer is trusted, least first."""

    PEER = "peer"
    """The peer is known by its id. It may query our capabilities and do nothing else."""
    VERIFIED = "verified"
    """The peer has shown signed keys and answered a challenge. It may delegate, within limits."""
    TRUSTED = "trusted"
    """The operator has promoted the peer."""

    def covers(self, needed: Trust) -> bool:
        return _ORDER.index(self) >= _ORDER.index(needed)


_ORDER: Final = tuple(Trust)


class Prekey(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """A short-lived key that others encrypt to. The identity key signs the other fields and its owner's id."""

    kid: KeyId
    suite: Annotated[str, msgspec.Meta(max_length=64)]
    public_key: Annotated[str, msgspec.Meta(min_length=32, max_length=1_622)]
    """The public key of the suite: base58, or base64url if it is hybrid."""
    not_before_ms: Whole
    not_after_ms: Whole
    signature: Signature = ""


class KeyPurpose(enum.StrEnum):
    """The one use of a certified key."""

    ENVELOPES = "envelopes"
    """The key signs envelopes and receipts."""
    PROOFS = "proofs"
    """The key signs documents that can be shown to others later: offers, capability responses, proofs."""
    TOKENS = "tokens"
    """The key signs the first block of a token."""


class KeyCertificate(
    msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename="camel"
):
    """The identity key `issuer` certifies `key` for one purpose and a time. Each signature carries its certificate."""

    issuer: Key
    key: Key
    purpose: KeyPurpose
    not_before_ms: Whole
    not_after_ms: Whole
    void_before_ms: Whole = 0
    """Certificates of this identity that began earlier are void: one of their keys may be stolen."""
    signature: Signature = ""


class IdentityChange(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """`old_key` names its successor, and both sign: nobody can name another instance's key as successor."""

    old_id: Instance
    old_key: Key
    new_id: Instance
    new_key: Key
    issued_at_ms: Whole
    old_signature: Signature = ""
    new_signature: Signature = ""


class KeyRevocation(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """An identity key revokes itself: nothing that it signed is accepted any more."""

    id: Instance
    key: Key
    issued_at_ms: Whole
    signature: Signature = ""


class FormerKey(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A former identity of an instance. Its signatures are accepted if the present identity answers for them."""

    id: Instance
    key: Key
    dead: bool = False


class KeyBundle(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """An instance's published keys. Suites and versions are signed too, so that nobody can force a downgrade."""

    id: Instance
    identity_key: Key
    prekeys: Annotated[tuple[Prekey, ...], msgspec.Meta(min_length=1, max_length=PREKEYS_MAX)]
    versions: Versions
    issued_at_ms: Whole
    expires_at_ms: Whole
    change: IdentityChange | None = None
    """The change of identity that led to this key, if the instance had another key before."""
    signature: Signature = ""

    @property
    def has_epochs(self) -> bool:
        return EPOCHS in self.versions

    @property
    def has_questions(self) -> bool:
        return QUESTIONS in self.versions

    @property
    def has_hybrid(self) -> bool:
        return HYBRID in self.versions

    @property
    def has_certificates(self) -> bool:
        return CERTIFIED in self.versions

    @property
    def has_ledger_ends(self) -> bool:
        return PRICES in self.versions


def is_instance_id(text: str) -> bool:
    return _INSTANCE(text) is not None


def parse_instance_id(value: str) -> InstanceId:
    if not is_instance_id(value):
        raise Invalid("invalid_peer_id", "a peer's id is frd1_ and 40 characters of a-z and 2-7")
    return InstanceId(value)


def negotiate(theirs: Iterable[int], ours: Iterable[int] = SUPPORTED_VERSIONS) -> int | None:
    """The highest version that both sides speak; None if there is none."""
    return max(set(theirs) & set(ours), default=None)
