"""Evidence: everything that a result's proof is about, in one document, checked by anybody, anywhere, offline."""

from __future__ import annotations

from typing import Final

import msgspec

from covenant.model.peers.delegation_messages import DelegationResult, DelegationOffer, Proof, Transcript
from covenant.model.peers.instance import InstanceId
from covenant.seal.proofs import ProofReport, verify_proof


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """`transcript` is None where it stayed with the provider. Further fields are not looked at."""

    proof: Proof
    offer: DelegationOffer | None = None
    result: DelegationResult | None = None
    transcript: Transcript | None = None


_READ: Final = msgspec.json.Decoder(Evidence)


def verify_evidence(
    data: bytes, *, provider: str | None = None, requester: str | None = None, budget: int | None = None
) -> ProofReport:
    """`ValueError` if it cannot be read as evidence at all."""
    try:
        evidence = _READ.decode(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    transcript = evidence.transcript
    if transcript is None and evidence.result is not None:
        transcript = evidence.result.transcript
    return verify_proof(
        evidence.proof,
        offer=evidence.offer,
        result=evidence.result,
        transcript=transcript,
        provider=InstanceId(provider) if provider is not None else None,
        requester=InstanceId(requester) if requester is not None else None,
        budget=budget,
    )
