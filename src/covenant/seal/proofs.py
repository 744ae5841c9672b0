"""What a result proves: the provider's signature over what was asked, what was said, what came of it and what it cost.

A transcript's entries are lines in canonical JSON and the leaves of a Merkle tree. The proof has the root, so one
changed, missing, added or moved line is another proof; a single line can be shown with an inclusion proof, and where
the transcript may not leave the provider the root alone still binds it (metadata only).

Everything can be checked offline: the provider's key is in the proof and gives the provider's id.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from covenant.model.peers.delegation_messages import DelegationResult, DelegationOffer, Proof, TranscriptEntry
from covenant.model.ids import PublicKey
from covenant.model.peers.instance import InstanceId
from covenant.seal import merkle
from covenant.seal.documents import Uncanonical, base64url, canonical, digest, document_holds, sign_document
from covenant.seal.identity import instance_id, is_key_of, unsigned
from covenant.seal.keys import public_key

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
"""What the result's hash covers: everything but the transcript, which has its own root, and the proof itself."""


class Check(msgspec.Struct, frozen=True, gc=False):
    name: str
    holds: bool
    detail: str = ""


class ProofReport(msgspec.Struct, frozen=True):
    """Each thing that was checked. What was not given could not be checked, and is in `unchecked`."""

    checks: tuple[Check, ...]
    unchecked: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    @property
    def broken(self) -> tuple[str, ...]:
        return tuple(check.name for check in self.checks if not check.holds)


class LineProof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """That `entry` is at `index` of the transcript. `path` has hashes in hex, lowest first."""

    index: int
    entry: TranscriptEntry
    path: tuple[str, ...]


def offer_hash(offer: DelegationOffer) -> str:
    return digest(msgspec.to_builtins(offer))


def result_hash(result: DelegationResult) -> str:
    fields: dict[str, Any] = msgspec.to_builtins(result)
    return digest({name: fields[name] for name in RESULT_FIELDS})


def line_salt(private_key: bytes, delegation_id: str, seq: int) -> str:
    """Chance for one line, that only the provider knows: the same whenever the transcript is made again."""
    named = f"{delegation_id}\n{seq}".encode()
    return base64url(hmac.digest(private_key, _SALT + named, hashlib.sha256)[:16])


def transcript_root(transcript: Sequence[TranscriptEntry]) -> str:
    return merkle.root(_leaves(transcript)).hex()


def sign_proof(
    private_key: bytes,
    *,
    requester: InstanceId,
    offer: DelegationOffer,
    result: DelegationResult,
    transcript: Sequence[TranscriptEntry],
    now_ms: int,
) -> Proof:
    """`transcript` is the whole one, also where `result` does not carry it."""
    key = public_key(private_key)
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
    return msgspec.structs.replace(proof, signature=sign_document(private_key, KIND, unsigned(proof)))


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
    """Checks all that it is given; `provider` and `requester` are who they should be, `budget` what was agreed."""
    key = PublicKey(proof.provider_key)
    usage = proof.token_usage
    checks = [
        Check("provider_key", is_key_of(key, proof.provider), "the key gives the provider's id"),
        Check("signature", document_holds(key, KIND, unsigned(proof), proof.signature), "signed by the provider"),
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
        checks.append(Check("provider", proof.provider == provider, "made by whom it was expected of"))
    if requester is not None:
        checks.append(Check("requester", proof.requester == requester, "made for whom it should be"))
    if budget is not None:
        checks.append(Check("budget", usage.total <= budget, f"{usage.total} of {budget} tokens"))
    return ProofReport(tuple(checks), tuple(unchecked))


def prove_line(transcript: Sequence[TranscriptEntry], index: int) -> LineProof:
    """Shows one line, and hashes of others: what is short and easily guessed there needs a salt."""
    path = merkle.inclusion(_leaves(transcript), index)
    return LineProof(index, transcript[index], tuple(each.hex() for each in path))


def line_holds(proof: Proof, line: LineProof) -> bool:
    """Whether the line is part of what was proven. The proof's own signature is for `verify_proof`."""
    try:
        path = [bytes.fromhex(each) for each in line.path]
        shown = merkle.leaf(_line(line.entry))
        proven = bytes.fromhex(proof.transcript_root)
    except ValueError:
        return False
    return merkle.includes(proven, proof.entries, line.index, shown, path)


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
    return [merkle.leaf(_line(entry)) for entry in transcript]


def _line(entry: TranscriptEntry) -> bytes:
    return canonical(msgspec.to_builtins(entry))
