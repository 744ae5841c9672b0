"""Another instance: its name, its keys as it shows them, how far it is trusted, and which protocol both speak.

An instance's id is made from its identity key (see `seal.identity`), so whoever shows the id must hold that key: nobody
can take over an id, and a changed key is another instance until the old key says otherwise.

What is signed here is closed: an unknown field is refused, since nobody could say whether it was meant to be signed.
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
"""Of the envelope. 1 is what earlier systems had: not bound to its header, and open to replay. It is not spoken."""
EPOCHS: Final = 3
"""From this version on an envelope says in which life of its sender's ledger it was made."""
PRICES: Final = 4
"""From this version on a profile may say what it costs, and both tell each other how far their ledgers have come."""
QUESTIONS: Final = 5
"""From this version on a provider may ask something back, and is answered."""
HYBRID: Final = 6
"""Who lists this version shows a hybrid prekey, and whoever speaks it too seals to nothing else."""
SUPPORTED_VERSIONS: Final = (PROTOCOL_VERSION, EPOCHS, PRICES, QUESTIONS)
HYBRID_VERSIONS: Final = (*SUPPORTED_VERSIONS, HYBRID)
"""Of an instance that has hybrid prekeys."""
VERSIONS_MAX: Final = 16
SUITE: Final = "X25519-HKDF-SHA256-AES256GCM-Ed25519"
HYBRID_SUITE: Final = "X25519-MLKEM768-HKDF-SHA256-AES256GCM-Ed25519"
PREKEYS_MAX: Final = 8
CHANGES_MAX: Final = 16
"""Changes of identity that are kept and shown, the newest ones."""
WHOLE_MAX: Final = 2**53 - 1
"""What the canonical form of JSON can hold exactly."""

Whole = Annotated[int, msgspec.Meta(ge=0, le=WHOLE_MAX)]
Versions = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=1, le=1_000_000)], ...], msgspec.Meta(max_length=VERSIONS_MAX)
]
Instance = Annotated[str, msgspec.Meta(pattern=r"\Afrd1_[a-z2-7]{40}\Z")]
Key = Annotated[str, msgspec.Meta(min_length=32, max_length=44)]
Epoch = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
"""A life of a ledger: each restore from a backup begins another one. None: the first one."""
KeyId = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
Signature = Annotated[str, msgspec.Meta(min_length=1, max_length=1_024)]

_INSTANCE = re.compile(r"frd1_[a-z2-7]{40}").fullmatch


class Trust(enum.StrEnum):
    """How far a peer is believed, least first."""

    PEER = "peer"
    """Known by its id: may ask what we can do, and nothing else."""
    VERIFIED = "verified"
    """Has shown a signed bundle of keys and answered a challenge: may delegate, within limits."""
    TRUSTED = "trusted"
    """Promoted by the operator."""

    def covers(self, needed: Trust) -> bool:
        return _ORDER.index(self) >= _ORDER.index(needed)


_ORDER: Final = tuple(Trust)


class Prekey(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """A short-lived key that others seal to. `signature` is by the identity key, over the rest and its owner's id."""

    kid: KeyId
    suite: Annotated[str, msgspec.Meta(max_length=64)]
    public_key: Annotated[str, msgspec.Meta(min_length=32, max_length=1_622)]
    """Of the suite: in base58, or in base64url if it is hybrid."""
    not_before_ms: Whole
    not_after_ms: Whole
    signature: Signature = ""


class IdentityChange(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """`old_key` names its successor, and the successor agrees: each signs, so nobody can name somebody else."""

    old_id: Instance
    old_key: Key
    new_id: Instance
    new_key: Key
    issued_at_ms: Whole
    old_signature: Signature = ""
    new_signature: Signature = ""


class KeyRevocation(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """An identity key says of itself that it is dead: nothing that it signed is to be believed any more."""

    id: Instance
    key: Key
    issued_at_ms: Whole
    signature: Signature = ""


class FormerKey(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """An identity that an instance had. What it signed is believed where the present one answers for it."""

    id: Instance
    key: Key
    dead: bool = False


class KeyBundle(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """What an instance publishes of its keys. The suites and versions are signed too, so nobody can talk them down."""

    id: Instance
    identity_key: Key
    prekeys: Annotated[tuple[Prekey, ...], msgspec.Meta(min_length=1, max_length=PREKEYS_MAX)]
    versions: Versions
    issued_at_ms: Whole
    expires_at_ms: Whole
    change: IdentityChange | None = None
    """How this instance came to have its key, if it had another one before."""
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
    def has_ends(self) -> bool:
        return PRICES in self.versions


def parse_instance_id(value: str) -> InstanceId:
    if _INSTANCE(value) is None:
        raise Invalid("invalid_peer_id", "a peer's id is frd1_ and 40 characters of a-z and 2-7")
    return InstanceId(value)


def negotiate(theirs: Iterable[int], ours: Iterable[int] = SUPPORTED_VERSIONS) -> int | None:
    """The highest version that both speak; None if there is none."""
    return max(set(theirs) & set(ours), default=None)
