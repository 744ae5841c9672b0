"""Proofs: a provider's signature over an offer, its transcript, its result and its usage, checked offline.

The entries of a transcript are lines in canonical JSON and the leaves of a Merkle tree (RFC 6962 and 9162, SHA-256).
The proof has the root, so a changed, missing, added or moved line breaks it, and a transcript that stays with the
provider is bound, too. The provider's id follows from the key in the proof. `Evidence` has all documents of a proof.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.constant_time import bytes_eq

from covenant.model.ids import PublicKey
from covenant.model.peers.delegation_messages import (
    CapabilityResponse,
    DelegationOffer,
    DelegationResult,
    Proof,
    Transcript,
    TranscriptEntry,
)
from covenant.model.peers.instance import InstanceId
from covenant.seal.identity import SKEW_MS, bundle_holds, instance_id, is_key_of, unsigned
from covenant.seal.keys import Uncanonical, base64url, canonical, digest
from covenant.seal.purpose_keys import PurposeKey, signed_by_instance, signer_of

_OFFER: Final = "offer"
_CAPABILITIES: Final = "capabilities"
_LEAF: Final = b"\x00"
_NODE: Final = b"\x01"
DIGEST_BYTES: Final = 32
KIND: Final = "proof"
_SALT: Final = b"covenant.transcript.salt.v1\n"
RESULT_FIELDS: Final = (
    "offerId",
    "delegationId",
    "profile",
    "status",
    "result",
    "parts",
    "error",
    "errorCode",
    "tokenUsage",
    "durationMs",
    "subDelegations",
)
"""The fields that the result's hash covers: all but the transcript, which has its own root, and the proof itself."""


def new_challenge() -> str:
    return base64url(AESGCM.generate_key(bit_length=256))


def assert_offer(key: PurposeKey, offer: DelegationOffer, *, provider: InstanceId) -> DelegationOffer:
    """The offer with its assertion, which names the provider: it cannot pass the offer on in the requester's name."""
    return msgspec.structs.replace(offer, assertion=key.sign_document(_OFFER, _assertion_document(offer, provider)))


def offer_holds(offer: DelegationOffer, *, requester: InstanceId, key: PublicKey, provider: InstanceId) -> bool:
    return (
        offer.assertion is not None
        and is_key_of(key, requester)
        and signed_by_instance(key, _OFFER, _assertion_document(offer, provider), offer.assertion)
    )


def sign_capabilities(key: PurposeKey, response: CapabilityResponse) -> CapabilityResponse:
    return msgspec.structs.replace(response, signature=key.sign_document(_CAPABILITIES, unsigned(response)))


def capabilities_hold(
    response: CapabilityResponse, *, provider: InstanceId, audience: InstanceId, challenge: str, now_ms: int
) -> bool:
    """Whether this is `provider`'s own valid answer to the challenge that `audience` sent."""
    return (
        response.provider == provider
        and response.audience == audience
        and bytes_eq(response.nonce.encode(), challenge.encode())
        and response.issued_at_ms <= now_ms + SKEW_MS
        and now_ms <= response.expires_at_ms + SKEW_MS
        and bundle_holds(response.keys, provider, now_ms)
        and signed_by_instance(
            PublicKey(response.keys.identity_key),
            _CAPABILITIES,
            unsigned(response),
            response.signature,
            at_ms=response.issued_at_ms,
        )
    )


def _assertion_document(offer: DelegationOffer, provider: InstanceId) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(offer)
    del document["assertion"]
    return {**document, "provider": provider}


def merkle_leaf(line: bytes) -> bytes:
    return hashlib.sha256(_LEAF + line).digest()


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """The root over leaves that are hashes already; without leaves, the hash of the empty string."""
    if not leaves:
        return hashlib.sha256().digest()
    level = leaves
    while len(level) > 1:
        level = _above(level)
    return level[0]


def _above(level: Sequence[bytes]) -> list[bytes]:
    """The next level: pairs from the left, and an odd last node unchanged. This is the RFC's tree without recursion."""
    return [_node(*level[at : at + 2]) if at + 1 < len(level) else level[at] for at in range(0, len(level), 2)]


def inclusion_path(leaves: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """The sibling hashes on the path from the leaf at `index` to the root, lowest first."""
    if not 0 <= index < len(leaves):
        raise IndexError(index)
    path: list[bytes] = []
    level = leaves
    while len(level) > 1:
        sibling = index ^ 1
        if sibling < len(level):
            path.append(level[sibling])
        level, index = _above(level), index // 2
    return tuple(path)


def is_included(tree_root: bytes, size: int, index: int, leaf_hash: bytes, path: Sequence[bytes]) -> bool:
    """Whether the leaf is at this index of the tree with this root and size (RFC 9162, section 2.1.3.2)."""
    if not 0 <= index < size or any(len(each) != DIGEST_BYTES for each in (leaf_hash, *path)):
        return False
    position, last_position, node = index, size - 1, leaf_hash
    for sibling in path:
        if last_position == 0:
            return False
        if position & 1 or position == last_position:
            node = _node(sibling, node)
            while not position & 1 and position:
                position, last_position = position >> 1, last_position >> 1
        else:
            node = _node(node, sibling)
        position, last_position = position >> 1, last_position >> 1
    return last_position == 0 and hmac.compare_digest(node, tree_root)


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_NODE + left + right).digest()


class Check(msgspec.Struct, frozen=True, gc=False):
    name: str
    holds: bool
    detail: str = ""


class ProofReport(msgspec.Struct, frozen=True):
    """The outcome of each check. `unchecked` names the documents that were not given."""

    checks: tuple[Check, ...]
    unchecked: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    @property
    def broken(self) -> tuple[str, ...]:
        return tuple(check.name for check in self.checks if not check.holds)


class LineProof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A proof that `entry` is at `index` of the transcript. `path` has hashes in hex, lowest first."""

    index: int
    entry: TranscriptEntry
    path: tuple[str, ...]


def offer_hash(offer: DelegationOffer) -> str:
    return digest(msgspec.to_builtins(offer))


def result_hash(result: DelegationResult) -> str:
    fields: dict[str, Any] = msgspec.to_builtins(result)
    return digest({name: fields[name] for name in RESULT_FIELDS})


def line_salt(private_key: bytes, delegation_id: str, seq: int) -> str:
    """The salt of one line, which only the provider can compute: the same whenever the transcript is rebuilt."""
    named = f"{delegation_id}\n{seq}".encode()
    return base64url(hmac.digest(private_key, _SALT + named, hashlib.sha256)[:16])


def transcript_root(transcript: Sequence[TranscriptEntry]) -> str:
    return merkle_root(_leaves(transcript)).hex()


def sign_proof(
    purpose_key: PurposeKey,
    *,
    requester: InstanceId,
    offer: DelegationOffer,
    result: DelegationResult,
    transcript: Sequence[TranscriptEntry],
    now_ms: int,
) -> Proof:
    """`transcript` is the whole one, also where `result` does not contain it."""
    key = purpose_key.identity_key
    proof = Proof(
        delegation_id=result.delegation_id,
        offer_hash=offer_hash(offer),
        result_hash=result_hash(result),
        transcript_root=transcript_root(transcript),
        entries=len(transcript),
        token_usage=result.token_usage,
        provider=instance_id(key),
        requester=requester,
        provider_key=key,
        issued_at_ms=now_ms,
    )
    return msgspec.structs.replace(proof, signature=purpose_key.sign_document(KIND, unsigned(proof)))


def verify_proof(
    proof: Proof,
    transcript: Sequence[TranscriptEntry] | None = None,
    *,
    offer: DelegationOffer | None = None,
    result: DelegationResult | None = None,
    provider: InstanceId | None = None,
    requester: InstanceId | None = None,
    budget: int | None = None,
) -> ProofReport:
    """Checks every given document. `provider` and `requester` are the expected ones, `budget` the agreed one."""
    key = PublicKey(proof.provider_key)
    usage = proof.token_usage
    checks = [
        Check("provider_key", is_key_of(key, proof.provider), f"the key gives the provider's id, {proof.provider}"),
        Check("signature", _is_signed(proof), f"signed by {proof.provider}"),
        Check("usage", usage.total == usage.prompt + usage.completion, f"{usage.total} tokens in all"),
    ]
    unchecked: list[str] = []
    if transcript is None:
        unchecked.append("transcript")
    else:
        checks.append(_check_transcript(proof, transcript))
    if offer is None:
        unchecked.append("offer")
    else:
        checks.append(Check("offer", _equal(proof.offer_hash, offer_hash, offer), "about this offer"))
    if result is None:
        unchecked.append("result")
    else:
        checks.append(Check("result", _equal(proof.result_hash, result_hash, result), "about this result"))
        same = result.delegation_id == proof.delegation_id and result.token_usage == usage
        checks.append(Check("delegation", same, "the same delegation and usage"))
    if provider is not None:
        checks.append(Check("provider", proof.provider == provider, "made by the expected provider"))
    if requester is not None:
        checks.append(Check("requester", proof.requester == requester, "made for the expected requester"))
    if budget is not None:
        checks.append(Check("budget", usage.total <= budget, f"{usage.total} of {budget} tokens"))
    return ProofReport(tuple(checks), tuple(unchecked))


def _is_signed(proof: Proof) -> bool:
    key = PublicKey(proof.provider_key)
    return signed_by_instance(key, KIND, unsigned(proof), proof.signature, at_ms=proof.issued_at_ms)


def is_asserted(offer: DelegationOffer, requester: InstanceId, provider: InstanceId) -> bool:
    """Whether the requester has signed the offer for this provider. The signature contains the requester's key."""
    key = signer_of(offer.assertion) if offer.assertion is not None else None
    return key is not None and offer_holds(offer, requester=requester, key=key, provider=provider)


def prove_line(transcript: Sequence[TranscriptEntry], index: int) -> LineProof:
    """Reveals one line, and the hashes of others: a short, easily guessed line needs a salt."""
    path = inclusion_path(_leaves(transcript), index)
    return LineProof(index, transcript[index], tuple(each.hex() for each in path))


def show_line(transcript: Any, index: int) -> dict[str, Any]:
    """`prove_line` in plain values. `ValueError` or `IndexError` if there is no such line."""
    lines = msgspec.convert(transcript, tuple[TranscriptEntry, ...])
    shown: dict[str, Any] = msgspec.to_builtins(prove_line(lines, index))
    return shown


def line_holds(proof: Proof, line: LineProof) -> bool:
    """Whether the line is part of the proven transcript. `verify_proof` checks the proof's own signature."""
    try:
        path = [bytes.fromhex(each) for each in line.path]
        shown = merkle_leaf(_line(line.entry))
        proven = bytes.fromhex(proof.transcript_root)
    except ValueError:
        return False
    return is_included(proven, proof.entries, line.index, shown, path)


def _check_transcript(proof: Proof, transcript: Sequence[TranscriptEntry]) -> Check:
    if len(transcript) != proof.entries:
        return Check("transcript", False, f"{len(transcript)} entries where {proof.entries} were proven")
    equal = _equal(proof.transcript_root, transcript_root, transcript)
    return Check("transcript", equal, "every line as it was proven" if equal else "a line is not as it was proven")


def _equal(expected: str, hashed: Any, document: Any) -> bool:
    try:
        return bool(hashed(document) == expected)
    except Uncanonical:
        return False


def _leaves(transcript: Sequence[TranscriptEntry]) -> list[bytes]:
    return [merkle_leaf(_line(entry)) for entry in transcript]


def _line(entry: TranscriptEntry) -> bytes:
    return canonical(msgspec.to_builtins(entry))


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """`transcript` is None where it stayed with the provider. Further fields are ignored."""

    proof: Proof
    offer: DelegationOffer | None = None
    result: DelegationResult | None = None
    transcript: Transcript | None = None
    line: LineProof | None = None


_READ: Final = msgspec.json.Decoder(Evidence)


def read_evidence(data: bytes) -> Evidence:
    """Decodes evidence; `ValueError` if that fails."""
    try:
        return _READ.decode(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def verify_evidence(
    data: bytes,
    *,
    provider: str | None = None,
    former_ids: Sequence[str] = (),
    requester: str | None = None,
    budget: int | None = None,
) -> ProofReport:
    """Checks evidence; `ValueError` as `read_evidence`. Without `provider`, the signer's identity stays unchecked.

    `former_ids`: the provider's former ids, under which it may have got the offer or have signed.
    """
    evidence = read_evidence(data)
    if provider is not None and evidence.proof.provider in former_ids:
        provider, former_ids = evidence.proof.provider, (*former_ids, provider)
    transcript = evidence.transcript
    if transcript is None and evidence.result is not None:
        transcript = evidence.result.transcript
    report = verify_proof(
        evidence.proof,
        offer=evidence.offer,
        result=evidence.result,
        transcript=transcript,
        provider=InstanceId(provider) if provider is not None else None,
        requester=InstanceId(requester) if requester is not None else None,
        budget=budget,
    )
    proof, offer = evidence.proof, evidence.offer
    if offer is not None:
        to = (proof.provider, *former_ids)
        asserted = any(is_asserted(offer, InstanceId(proof.requester), InstanceId(each)) for each in to)
        signed = Check("assertion", asserted, f"offered by {proof.requester}, to {proof.provider}")
        report = msgspec.structs.replace(report, checks=(*report.checks, signed))
    if provider is None:
        # A stranger's key signs as well as any other: only the reader knows whose key it should be.
        report = msgspec.structs.replace(report, unchecked=(*report.unchecked, "provider"))
    if evidence.line is None:
        return report
    shown = Check("line", line_holds(evidence.proof, evidence.line), f"line {evidence.line.index + 1} as it was proven")
    return msgspec.structs.replace(report, checks=(*report.checks, shown))
