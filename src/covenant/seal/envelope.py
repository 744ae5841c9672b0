"""Envelopes: the signed and sealed messages between instances.

    {"protected": …, "ciphertext": …, "signature": …}        each in base64url, in its one form

`protected` is a header in canonical JSON. The body is sealed by HPKE (RFC 9180, base mode, a fresh key each time) to a
prekey of the recipient, with the whole header in HPKE's `info`. The signature covers the header and a hash of the
ciphertext, and is checked before anything is opened.

Reading raises only `EnvelopeRefused`, whatever the input. Its code is for our log and audit; `peer_refusal` is the
answer for the other side.
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
from covenant.model.peers.delegation import ReceivedEnvelope
from covenant.model.peers.instance import (
    PROTOCOL_VERSION,
    Epoch,
    Instance,
    InstanceId,
    Key,
    KeyCertificate,
    KeyId,
    KeyPurpose,
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
from covenant.seal.purpose_keys import certificate_holds
from covenant.seal.suites import HYBRID_ENC_BYTES, SUITES, TAG_BYTES

BODY_BYTES_MAX: Final = 8 * 1024 * 1024
HEADER_BYTES_MAX: Final = 2_048
OVERHEAD_BYTES_MAX: Final = HYBRID_ENC_BYTES + TAG_BYTES
"""The most bytes that sealing adds to a body."""
ENVELOPE_BYTES_MAX: Final = (BODY_BYTES_MAX + OVERHEAD_BYTES_MAX + HEADER_BYTES_MAX) * 4 // 3 + 512

RELAYED_LIFE_MS_MAX: Final = 24 * 3_600_000
"""The longest life of an envelope that waits at a relay. A recently published prekey lives longer."""

_SIGNED: Final = b"covenant.envelope.signature.v2\n"
_SEALED: Final = b"covenant.envelope.seal.v2\n"
_SIGNATURE_BYTES: Final = 64
_RECEIPT: Final = b"covenant.envelope.receipt.v2\n"


class Code(enum.StrEnum):
    """Why an envelope was not opened, in the order of the checks."""

    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    VERSION_NOT_SUPPORTED = "version_not_supported"
    SUITE_NOT_SUPPORTED = "suite_not_supported"
    HEADER_MISMATCH = "header_mismatch"
    """The sender's key is not the key of the sender's id, nor certified by it for this time."""
    BAD_SIGNATURE = "bad_signature"
    REFLECTED = "reflected"
    UNKNOWN_SENDER = "unknown_sender"
    KEY_VOID = "key_void"
    """The sender has declared the key's certificate void."""
    WRONG_RECIPIENT = "wrong_recipient"
    BAD_LIFETIME = "bad_lifetime"
    """The envelope expires before it begins, or lives longer than any envelope may."""
    FROM_FUTURE = "from_future"
    STALE = "stale"
    REPLAYED = "replayed"
    UNKNOWN_PREKEY = "unknown_prekey"
    PREKEY_EXPIRED = "prekey_expired"
    CANNOT_OPEN = "cannot_open"


class EnvelopeRefused(CovenantError):
    """Deliberately not a `Refusal`: doors answer the other side by `peer_refusal` alone.

    `sender` is the sender whose signature was verified; None while it is not a known peer.
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
    """The recipient's prekey that the body is sealed to."""
    skid: Key
    """The signing key: the sender's identity key, which must match the sender's id, or a key with a certificate."""
    jti: KeyId
    """The envelope's id. It is accepted once from each sender."""
    iat: Whole
    exp: Whole
    suite: Annotated[str, msgspec.Meta(max_length=64)]
    seq: Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)] | None = None
    """The message's number among the sender's messages about one delegation."""
    epoch: Epoch | None = None
    """The epoch of the sender's ledger, within which `seq` counts. Set for recipients that know epochs."""
    cert: KeyCertificate | None = None
    """The certificate of `skid`, if it is not the identity key. Set for recipients that know certificates."""


class Checked(NamedTuple):
    """An envelope whose header is verified, and whose body is not opened yet."""

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
    """Seals a body to `prekey`, which was checked (`prekey_holds`, `bundle_holds`). `ValueError` if either is unusable.

    Recipients must know certificates if `sender` has one.
    """
    if len(body) > BODY_BYTES_MAX or not 0 < life_ms <= RELAYED_LIFE_MS_MAX:
        raise ValueError("the body is too large, or the life too long, for an envelope")
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
        cert=sender.certificate,
    )
    fields = msgspec.to_builtins(header)
    # The recipient would call an invalid header malformed; the caller here can still do something about it.
    msgspec.convert(fields, Header)
    protected = canonical(fields)
    ciphertext = suite.seal(body, prekey.public_key, _SEALED + protected)
    signature = sender.sign(_signed_bytes(protected, ciphertext))
    return msgspec.json.encode(_Envelope(base64url(protected), base64url(ciphertext), base64url(signature)))


def check(
    data: bytes,
    *,
    us: InstanceId,
    now_ms: int,
    known: Callable[[InstanceId], bool],
    void_before_ms: Callable[[InstanceId], int] = lambda _: 0,
    life_ms_max: int = ENVELOPE_LIFE_MS_MAX,
) -> Checked:
    """Makes every check that needs no private key, except for replays.

    `void_before_ms`: the sender's declaration about its earlier certificates. `life_ms_max`: longer for a relayed one.
    """
    protected, ciphertext, signature = _parts(data)
    header = _header(protected)
    if len(ciphertext) < SUITES[header.suite].overhead:
        raise _malformed("cut short")
    # The signature first: a sender that has not signed cannot learn which peers we know, not even by timing.
    try:
        checked_key(PublicKey(header.skid)).verify(signature, _signed_bytes(protected, ciphertext))
    except (InvalidSignature, ValueError):
        raise EnvelopeRefused(Code.BAD_SIGNATURE, "the signature is invalid") from None
    sender = InstanceId(header.sender)
    if sender == us:
        raise EnvelopeRefused(Code.REFLECTED, "this instance itself sent the envelope")
    if not known(sender):
        raise EnvelopeRefused(Code.UNKNOWN_SENDER, f"{sender} is not a peer")
    if header.cert is not None and header.cert.not_before_ms < void_before_ms(sender):
        raise EnvelopeRefused(Code.KEY_VOID, f"{sender} has declared this key void", sender)
    _check_place_and_time(header, sender, us, now_ms, life_ms_max)
    return Checked(header, protected, ciphertext)


def open_checked(checked: Checked, prekey: PrivatePrekey | None, *, now_ms: int) -> bytes:
    """Opens the body. Before acting on it, the caller records (sender, jti) durably, and stops if it was known."""
    header, protected, ciphertext = checked
    sender = InstanceId(header.sender)
    if prekey is None or prekey.prekey.kid != header.kid:
        raise EnvelopeRefused(
            Code.UNKNOWN_PREKEY, "sealed to a prekey that is not ours; ask for our keys again", sender
        )
    if not prekey_opens(prekey.prekey, now_ms):
        raise EnvelopeRefused(
            Code.PREKEY_EXPIRED, "sealed to a prekey that has expired; ask for our keys again", sender
        )
    if prekey.prekey.suite != header.suite:
        raise EnvelopeRefused(Code.SUITE_NOT_SUPPORTED, "its suite is not that of the prekey", sender)
    try:
        return SUITES[header.suite].open(ciphertext, prekey.private_key, _SEALED + protected)
    except (InvalidTag, ValueError):
        raise EnvelopeRefused(
            Code.CANNOT_OPEN, "its body cannot be opened with the prekey that its header names", sender
        ) from None


def replayed(header: Header) -> EnvelopeRefused:
    sender = InstanceId(header.sender)
    return EnvelopeRefused(Code.REPLAYED, f"envelope {header.jti} was received before", sender)


def peer_refusal(refused: EnvelopeRefused) -> Refusal:
    """The answer for the other side. An unknown sender gets the same bytes whatever was wrong."""
    if refused.sender is None:
        version = f"this instance speaks version {PROTOCOL_VERSION} of the protocol"
        return Invalid("refused", f"this envelope is not accepted; {version}")
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
            raise EnvelopeRefused(Code.VERSION_NOT_SUPPORTED, f"version {terms.v} is not supported")
        if terms.suite not in SUITES:
            raise EnvelopeRefused(Code.SUITE_NOT_SUPPORTED, f"no suite {terms.suite[:64]!r}")
        header = _READ_HEADER.decode(protected)
        # A header has exactly one encoding: no reader can be shown other bytes than the signer saw.
        if canonical(msgspec.to_builtins(header)) != protected:
            raise _malformed("the header is not in canonical form")
    except (ValueError, RecursionError):
        raise _malformed("not a header of this version") from None
    if not _speaks_for_sender(header):
        raise EnvelopeRefused(Code.HEADER_MISMATCH, "the key is not that of the sender")
    return header


def _speaks_for_sender(header: Header) -> bool:
    certificate = header.cert
    if certificate is None:
        return is_key_of(PublicKey(header.skid), header.sender)
    issuer = PublicKey(certificate.issuer)
    return (
        certificate.key == header.skid
        and is_key_of(issuer, header.sender)
        and certificate_holds(certificate, issuer, KeyPurpose.ENVELOPES, at_ms=header.iat)
    )


def _check_place_and_time(header: Header, sender: InstanceId, us: InstanceId, now_ms: int, life_ms_max: int) -> None:
    if header.to != us:
        raise EnvelopeRefused(Code.WRONG_RECIPIENT, f"it is for {header.to}", sender)
    if not 0 < header.exp - header.iat <= life_ms_max:
        raise EnvelopeRefused(Code.BAD_LIFETIME, f"an envelope lives {life_ms_max} ms at most", sender)
    if header.iat > now_ms + SKEW_MS:
        raise EnvelopeRefused(
            Code.FROM_FUTURE, f"it is from {header.iat - now_ms} ms in the future, by our clock", sender
        )
    if now_ms > header.exp + SKEW_MS:
        raise EnvelopeRefused(Code.STALE, f"expired {now_ms - header.exp} ms ago, by our clock", sender)


def _malformed(message: str) -> EnvelopeRefused:
    return EnvelopeRefused(Code.MALFORMED, message)


def _signed_bytes(protected: bytes, ciphertext: bytes) -> bytes:
    return b"".join((_SIGNED, struct.pack(">I", len(protected)), protected, hashlib.sha256(ciphertext).digest()))


def remember_until_ms(header: Header) -> int:
    """How long (sender, jti) must be remembered: afterwards a replay is refused as stale."""
    return header.exp + SKEW_MS


def envelope_record(header: Header, our_epoch: str | None) -> ReceivedEnvelope:
    """The ledger's record of an opened envelope. `our_epoch`: the epoch of our ledger that received it."""
    return ReceivedEnvelope(
        sender=InstanceId(header.sender),
        jti=header.jti,
        typ=header.typ,
        until_ms=remember_until_ms(header),
        seq=header.seq,
        sent_at_ms=header.iat,
        epoch=header.epoch,
        our_epoch=our_epoch,
    )


def receipt(recipient: InstanceIdentity, envelope: bytes) -> str:
    return base64url(recipient.sign(_receipted(envelope)))


def receipt_holds(
    recipient: PublicKey, envelope: bytes, signature: str, certificate: KeyCertificate | None = None, *, now_ms: int = 0
) -> bool:
    """Whether the instance with this identity key signed this receipt. `certificate`: that of another key."""
    key = recipient
    if certificate is not None:
        if not certificate_holds(certificate, recipient, KeyPurpose.ENVELOPES, at_ms=now_ms):
            return False
        key = PublicKey(certificate.key)
    try:
        checked_key(key).verify(from_base64url(signature), _receipted(envelope))
    except (InvalidSignature, ValueError):
        return False
    return True


def _receipted(envelope: bytes) -> bytes:
    return _RECEIPT + hashlib.sha256(envelope).digest()
