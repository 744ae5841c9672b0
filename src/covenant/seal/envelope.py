"""Envelopes: what travels between instances, signed and sealed as one.

    {"protected": …, "ciphertext": …, "signature": …}        each in base64url, in its one form

`protected` is a header in canonical JSON. The body is sealed by HPKE (RFC 9180, base mode, a fresh key each time) to a
prekey of the recipient, with the whole header in HPKE's `info`. The signature covers the header and a hash of the
ciphertext, and is checked before anything is opened.

Reading raises only `EnvelopeRefused`, whatever came in. Its code is for our log and audit; `told` says what the other
side may hear.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Callable
from typing import Annotated, Final, NamedTuple

import msgspec
from cryptography.exceptions import InvalidSignature, InvalidTag

from covenant.model.errors import Conflict, CovenantError, Invalid, Refusal
from covenant.model.ids import PublicKey
from covenant.model.peers.instance import (
    PROTOCOL_VERSION,
    Epoch,
    Instance,
    InstanceId,
    Key,
    KeyId,
    Prekey,
    Whole,
)
from covenant.seal.identity import (
    ENVELOPE_LIFE_MS_MAX,
    SKEW_MS,
    InstanceIdentity,
    PrivatePrekey,
    is_key_of,
    prekey_opens,
)
from covenant.seal.keys import base64url, canonical, checked_key, from_base64url
from covenant.seal.suites import HYBRID_ENC_BYTES, SUITES, TAG_BYTES

BODY_BYTES_MAX: Final = 8 * 1024 * 1024
HEADER_BYTES_MAX: Final = 2_048
OVERHEAD_BYTES_MAX: Final = HYBRID_ENC_BYTES + TAG_BYTES
"""What sealing adds to a body at most."""
ENVELOPE_BYTES_MAX: Final = (BODY_BYTES_MAX + OVERHEAD_BYTES_MAX + HEADER_BYTES_MAX) * 4 // 3 + 512

_SIGNED: Final = b"covenant.envelope.signature.v2\n"
_SEALED: Final = b"covenant.envelope.seal.v2\n"
_SIGNATURE_BYTES: Final = 64


class Code(enum.StrEnum):
    """Why an envelope was not opened. In the order in which they are looked for."""

    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    VERSION_NOT_SUPPORTED = "version_not_supported"
    SUITE_NOT_SUPPORTED = "suite_not_supported"
    HEADER_MISMATCH = "header_mismatch"
    """The sender's key is not the key of the sender's id."""
    BAD_SIGNATURE = "bad_signature"
    REFLECTED = "reflected"
    UNKNOWN_SENDER = "unknown_sender"
    WRONG_RECIPIENT = "wrong_recipient"
    BAD_LIFETIME = "bad_lifetime"
    """It expires before it begins, or later than any envelope may."""
    FROM_FUTURE = "from_future"
    STALE = "stale"
    REPLAYED = "replayed"
    UNKNOWN_PREKEY = "unknown_prekey"
    PREKEY_EXPIRED = "prekey_expired"
    CANNOT_OPEN = "cannot_open"


class EnvelopeRefused(CovenantError):
    """Not a `Refusal`, on purpose: no door can tell it to the other side but by `told`.

    `sender` is who proved to have sent it; None while nobody that we know did.
    """

    def __init__(self, code: Code, message: str, sender: InstanceId | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.sender = sender


class Header(
    msgspec.Struct,
    frozen=True,
    gc=False,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={"sender": "from"},
):
    v: int
    typ: Annotated[str, msgspec.Meta(pattern=r"\A[a-z][a-z_]{0,31}\Z")]
    sender: Instance
    to: Instance
    kid: KeyId
    """Which of the recipient's prekeys it is sealed to."""
    skid: Key
    """The sender's identity key, which must give the sender's id."""
    jti: KeyId
    """Names this envelope: taken once from each sender."""
    iat: Whole
    exp: Whole
    suite: Annotated[str, msgspec.Meta(max_length=64)]
    seq: Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)] | None = None
    """Its place among what this sender says of one delegation."""
    epoch: Epoch | None = None
    """The life of the sender's ledger, by which the place counts. For recipients that speak of epochs."""


class Checked(NamedTuple):
    """An envelope whose header is proven, and that nobody has opened yet."""

    header: Header
    protected: bytes
    ciphertext: bytes


class _Envelope(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    protected: str
    ciphertext: str
    signature: str


class _Terms(msgspec.Struct, frozen=True, gc=False):
    v: int
    suite: str = ""


_READ_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
_READ_TERMS: Final = msgspec.json.Decoder(_Terms)
_READ_HEADER: Final = msgspec.json.Decoder(Header)


def seal(
    body: bytes,
    *,
    typ: str,
    sender: InstanceIdentity,
    to: InstanceId,
    prekey: Prekey,
    jti: str,
    now_ms: int,
    life_ms: int = ENVELOPE_LIFE_MS_MAX,
    seq: int | None = None,
    epoch: str | None = None,
) -> bytes:
    """`prekey` has been checked (`prekey_holds`, `bundle_holds`). `ValueError` if it or the body cannot be used."""
    if len(body) > BODY_BYTES_MAX or not 0 < life_ms <= ENVELOPE_LIFE_MS_MAX:
        raise ValueError("a body too large, or a life too long, for an envelope")
    suite = SUITES.get(prekey.suite)
    if suite is None:
        raise ValueError(f"no suite {prekey.suite}")
    header = Header(
        v=PROTOCOL_VERSION,
        typ=typ,
        sender=sender.id,
        to=to,
        kid=prekey.kid,
        skid=sender.key,
        jti=jti,
        iat=now_ms,
        exp=now_ms + life_ms,
        suite=prekey.suite,
        seq=seq,
        epoch=epoch,
    )
    fields = msgspec.to_builtins(header)
    # What the recipient could only call malformed is refused here, where somebody can do something about it.
    msgspec.convert(fields, Header)
    protected = canonical(fields)
    ciphertext = suite.seal(body, prekey.public_key, _SEALED + protected)
    signature = sender.sign(_signed_bytes(protected, ciphertext))
    return msgspec.json.encode(_Envelope(base64url(protected), base64url(ciphertext), base64url(signature)))


def check(data: bytes, *, us: InstanceId, now_ms: int, known: Callable[[InstanceId], bool]) -> Checked:
    """Everything that can be said of an envelope without a secret, replays excepted."""
    protected, ciphertext, signature = _parts(data)
    header = _header(protected)
    if len(ciphertext) < SUITES[header.suite].overhead:
        raise _malformed("cut short")
    # The signature first, and with the key that the header shows: whoever has not signed learns nothing of whom we
    # know, not even by how long it takes.
    try:
        checked_key(PublicKey(header.skid)).verify(signature, _signed_bytes(protected, ciphertext))
    except (InvalidSignature, ValueError):
        raise EnvelopeRefused(Code.BAD_SIGNATURE, "the signature does not hold") from None
    sender = InstanceId(header.sender)
    if sender == us:
        raise EnvelopeRefused(Code.REFLECTED, "an envelope of our own")
    if not known(sender):
        raise EnvelopeRefused(Code.UNKNOWN_SENDER, f"{sender} is not a peer")
    _check_place_and_time(header, sender, us, now_ms)
    return Checked(header, protected, ciphertext)


def open_checked(checked: Checked, prekey: PrivatePrekey | None, *, now_ms: int) -> bytes:
    """The body. Before acting on it, the caller records (sender, jti) durably, and gives up if it was there."""
    header, protected, ciphertext = checked
    sender = InstanceId(header.sender)
    if prekey is None or prekey.prekey.kid != header.kid:
        raise EnvelopeRefused(Code.UNKNOWN_PREKEY, "sealed to a key that is not ours; ask for our keys again", sender)
    if not prekey_opens(prekey.prekey, now_ms):
        raise EnvelopeRefused(Code.PREKEY_EXPIRED, "sealed to a key that is over; ask for our keys again", sender)
    if prekey.prekey.suite != header.suite:
        raise EnvelopeRefused(Code.SUITE_NOT_SUPPORTED, "another suite than that of the key", sender)
    try:
        return SUITES[header.suite].open(ciphertext, prekey.private_key, _SEALED + protected)
    except (InvalidTag, ValueError):
        raise EnvelopeRefused(Code.CANNOT_OPEN, "it does not open with the key it names", sender) from None


def replayed(header: Header) -> EnvelopeRefused:
    sender = InstanceId(header.sender)
    return EnvelopeRefused(Code.REPLAYED, f"envelope {header.jti} was taken before", sender)


def told(refused: EnvelopeRefused) -> Refusal:
    """What the other side may hear. A stranger hears the same whatever was wrong, to the byte."""
    if refused.sender is None:
        spoken = PROTOCOL_VERSION
        return Invalid("refused", f"this envelope is not accepted; the protocol's version spoken here is {spoken}")
    kind = Conflict if refused.code is Code.REPLAYED else Invalid
    return kind(refused.code.value, refused.message)


def _parts(data: bytes) -> tuple[bytes, bytes, bytes]:
    if len(data) > ENVELOPE_BYTES_MAX:
        raise EnvelopeRefused(Code.TOO_LARGE, f"more than {ENVELOPE_BYTES_MAX} bytes")
    try:
        envelope = _READ_ENVELOPE.decode(data)
        if len(envelope.protected) > HEADER_BYTES_MAX * 4 // 3 + 1:
            raise EnvelopeRefused(Code.TOO_LARGE, f"a header has at most {HEADER_BYTES_MAX} bytes")
        parts = tuple(map(from_base64url, (envelope.protected, envelope.ciphertext, envelope.signature)))
    except (ValueError, RecursionError):
        raise _malformed("not an envelope") from None
    protected, ciphertext, signature = parts
    if len(signature) != _SIGNATURE_BYTES:
        raise _malformed("cut short")
    return protected, ciphertext, signature


def _header(protected: bytes) -> Header:
    try:
        terms = _READ_TERMS.decode(protected)
        if terms.v != PROTOCOL_VERSION:
            raise EnvelopeRefused(Code.VERSION_NOT_SUPPORTED, f"version {terms.v} is not spoken here")
        if terms.suite not in SUITES:
            raise EnvelopeRefused(Code.SUITE_NOT_SUPPORTED, f"no suite {terms.suite[:64]!r}")
        header = _READ_HEADER.decode(protected)
        # One header has one sequence of bytes: no reader can be shown another one than the signer saw.
        if canonical(msgspec.to_builtins(header)) != protected:
            raise _malformed("the header is not in canonical form")
    except (ValueError, RecursionError):
        raise _malformed("not a header of this version") from None
    if not is_key_of(PublicKey(header.skid), header.sender):
        raise EnvelopeRefused(Code.HEADER_MISMATCH, "the key is not that of the sender")
    return header


def _check_place_and_time(header: Header, sender: InstanceId, us: InstanceId, now_ms: int) -> None:
    if header.to != us:
        raise EnvelopeRefused(Code.WRONG_RECIPIENT, f"it is for {header.to}", sender)
    if not 0 < header.exp - header.iat <= ENVELOPE_LIFE_MS_MAX:
        raise EnvelopeRefused(Code.BAD_LIFETIME, f"an envelope lives {ENVELOPE_LIFE_MS_MAX} ms at most", sender)
    if header.iat > now_ms + SKEW_MS:
        raise EnvelopeRefused(Code.FROM_FUTURE, f"made {header.iat - now_ms} ms from now, by our clock", sender)
    if now_ms > header.exp + SKEW_MS:
        raise EnvelopeRefused(Code.STALE, f"expired {now_ms - header.exp} ms ago, by our clock", sender)


def _malformed(message: str) -> EnvelopeRefused:
    return EnvelopeRefused(Code.MALFORMED, message)


def _signed_bytes(protected: bytes, ciphertext: bytes) -> bytes:
    return b"".join((_SIGNED, struct.pack(">I", len(protected)), protected, hashlib.sha256(ciphertext).digest()))


def remember_until_ms(header: Header) -> int:
    """Until when (sender, jti) must be remembered: afterwards a replay is stale anyway."""
    return header.exp + SKEW_MS


_RECEIPT: Final = b"covenant.envelope.receipt.v2\n"


def receipt(recipient: InstanceIdentity, envelope: bytes) -> str:
    return base64url(recipient.sign(_receipted(envelope)))


def receipt_holds(recipient: PublicKey, envelope: bytes, given: str) -> bool:
    """Whether the holder of this key has taken in this very envelope."""
    try:
        checked_key(recipient).verify(from_base64url(given), _receipted(envelope))
    except (InvalidSignature, ValueError):
        return False
    return True


def _receipted(envelope: bytes) -> bytes:
    return _RECEIPT + hashlib.sha256(envelope).digest()
