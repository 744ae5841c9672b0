"""Write docs/formats/extension-vectors.json: whole flows of sealed delegation, with every key that opens them.

Sealing draws a new key for each envelope, so another run writes other bytes of the same meaning. The seeds of the
identities are those of RFC 8032. `tests/conformance/test_extension.py` reads the file by the documents alone.

    .venv/bin/python scripts/extension_vectors.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from covenant.model.peers.delegation_messages import (
    CapabilityQuery,
    CapabilityResponse,
    DelegationAccept,
    DelegationCancel,
    DelegationInput,
    DelegationMessage,
    DelegationOffer,
    DelegationReject,
    DelegationResult,
    Profile,
    StatusReport,
    TokenUsage,
    TranscriptEntry,
)
from covenant.model.peers.instance import (
    CERTIFIED,
    HYBRID_SUITE,
    HYBRID_VERSIONS,
    SUPPORTED_VERSIONS,
    KeyPurpose,
    Prekey,
    Trust,
)
from covenant.seal.envelope import receipt, seal
from covenant.seal.identity import InstanceIdentity, PrivatePrekey, new_prekey, sign_bundle
from covenant.seal.keys import derived_secret
from covenant.seal.proofs import assert_offer, line_salt, sign_capabilities, sign_proof
from covenant.seal.purpose_keys import PurposeKey, certify
from covenant.seal.tokens import Narrowing, issue, narrow
from covenant.wire import peers as wire

FILE: Final = Path(__file__).parents[1] / "docs" / "formats" / "extension-vectors.json"
NOW: Final = 1_800_000_000_000
SEEDS: Final = {
    "requester": "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
    "provider": "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
}
CERTIFIED_SEEDS: Final = {
    "requester": "833fe62409237b9d62ec77587520911e9a759cec1d19755b7da901b96dca3d42",
    "provider": "0305334e381af78f141cb666f6199f57bc3495335a256a95bd2a55bf546663f6",
}
HYBRID_SEEDS: Final = {
    "requester": "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
    "provider": "f5e5767cf153319517630f226876b86c8160cc583bc013744c6bf255f5cc0ee5",
}


class Side:
    def __init__(self, name: str, seed: str, *, hybrid: bool = False, certified: bool = False) -> None:
        self.name = name
        self.seed = bytes.fromhex(seed)
        self.identity = InstanceIdentity(self.seed)
        own = PurposeKey(self.seed)
        keys = {each: certify(self.seed, each, NOW - 60_000) if certified else own for each in KeyPurpose}
        self.envelopes = InstanceIdentity(*keys[KeyPurpose.ENVELOPES])
        self.proofs, self.tokens = keys[KeyPurpose.PROOFS], keys[KeyPurpose.TOKENS]
        self.prekey: PrivatePrekey = new_prekey(self.seed, NOW - 60_000)
        self.hybrid: PrivatePrekey | None = new_prekey(self.seed, NOW - 60_000, HYBRID_SUITE) if hybrid else None
        spoken = HYBRID_VERSIONS if hybrid else SUPPORTED_VERSIONS
        self.versions = tuple(each for each in spoken if certified or each != CERTIFIED)
        self.keys = sign_bundle(self.seed, [self.prekey.prekey], NOW - 60_000, versions=self.versions)

    @property
    def hybrid_prekey(self) -> Prekey | None:
        return self.hybrid.prekey if self.hybrid is not None else None

    def shown(self) -> dict[str, Any]:
        introduction = wire.Introduction(name=self.name, keys=self.keys, hybrid_prekey=self.hybrid_prekey)
        return {
            "name": self.name,
            "seed": self.seed.hex(),
            "prekeyPrivate": self.prekey.private_key.hex(),
            **({"hybridPrekeySeed": self.hybrid.private_key.hex()} if self.hybrid is not None else {}),
            "introduction": msgspec.to_builtins(introduction),
        }


class Flow:
    """Steps in the order in which they are sent."""

    def __init__(self, sides: dict[str, Side], name: str, about: str) -> None:
        self._sides = sides
        self._numbers = dict.fromkeys(sides, 0)
        self.name, self.about = name, about
        self.steps: list[dict[str, Any]] = []

    def add(self, sender: str, message: DelegationMessage, *, numbered: bool = True) -> None:
        recipient = next(each for each in self._sides if each != sender)
        if numbered:
            self._numbers[sender] += 1
        a, b = self._sides[sender], self._sides[recipient]
        body = wire.encode(message)
        now_ms = NOW + 1_000 * len(self.steps)
        envelope = seal(
            body,
            typ=wire.type_of(message),
            sender=a.envelopes,
            to=b.identity.id,
            prekey=b.hybrid_prekey or b.prekey.prekey,
            jti=f"{self.name}-{len(self.steps) + 1}",
            now_ms=now_ms,
            seq=self._numbers[sender] if numbered else None,
        )
        self.steps.append(
            {
                "from": a.name,
                "to": b.name,
                "atMs": now_ms,
                "envelope": json.loads(envelope),
                "bytes": envelope.decode(),
                "body": body.decode(),
                "receipt": receipt(b.envelopes, envelope),
                **({"certificate": msgspec.to_builtins(given)} if (given := b.envelopes.certificate) else {}),
            }
        )


def main() -> None:
    sides = {name: Side(name, seed) for name, seed in SEEDS.items()}
    hybrids = {name: Side(f"hybrid-{name}", seed, hybrid=True) for name, seed in HYBRID_SEEDS.items()}
    certified = {name: Side(f"certified-{name}", seed, certified=True) for name, seed in CERTIFIED_SEEDS.items()}
    token = _verify(
        sides, verified := Flow(sides, "verify", "The requester challenges the provider, and gets a token.")
    )
    flows = [
        verified,
        _complete(sides, token),
        _reject(sides, token),
        _cancel(sides, token),
        _ask(sides, token),
        _hybrid(hybrids),
        _certified(certified),
    ]
    document = {
        "uri": wire.SEALED_DELEGATION,
        "instances": {side.name: side.shown() for side in (*sides.values(), *hybrids.values(), *certified.values())},
        "flows": [{"name": each.name, "about": each.about, "steps": each.steps} for each in flows],
    }
    FILE.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {FILE.name}: {sum(len(each.steps) for each in flows)} envelopes")


def _verify(sides: dict[str, Side], flow: Flow) -> str:
    requester, provider = sides["requester"], sides["provider"]
    query = CapabilityQuery(
        nonce="A" * 43, versions=requester.versions, keys=requester.keys, hybrid_prekey=requester.hybrid_prekey
    )
    terms = Narrowing(profiles=frozenset({"coder"}), budget=50_000, depth=2, expires_at_ms=NOW + 86_400_000)
    token = issue(provider.tokens, requester.identity.id, terms)
    response = CapabilityResponse(
        provider=provider.identity.id,
        audience=requester.identity.id,
        nonce=query.nonce,
        versions=provider.versions,
        profiles=(Profile(name="coder", description="Writes code.", max_token_budget=50_000),),
        active_delegations=0,
        free_slots=5,
        trust_level=Trust.VERIFIED,
        keys=provider.keys,
        issued_at_ms=NOW,
        expires_at_ms=NOW + 300_000,
        token=token,
    )
    flow.add("requester", query, numbered=False)
    flow.add("provider", sign_capabilities(provider.proofs, response), numbered=False)
    return token


def _hybrid(sides: dict[str, Side]) -> Flow:
    flow = Flow(sides, "hybrid", "As verify, then an offer and its reject, all sealed with the hybrid suite.")
    offer = _offer(sides, _verify(sides, flow), 9, profile="painter")
    flow.add("requester", offer)
    flow.add("provider", DelegationReject(offer_id=offer.offer_id, code="no_profile", reason="no profile painter"))
    return flow


def _certified(sides: dict[str, Side]) -> Flow:
    flow = Flow(sides, "certified", "As verify and complete, each signature by the certified key of its purpose.")
    return _completed(sides, _verify(sides, flow), flow)


def _offer(sides: dict[str, Side], token: str, number: int, profile: str = "coder") -> DelegationOffer:
    requester, provider = sides["requester"], sides["provider"]
    offer_id = f"00000000-0000-4000-8000-00000000000{number}"
    further = Narrowing(profiles=frozenset({"coder"}), budget=1_000, depth=1, offer_id=offer_id)
    offer = DelegationOffer(
        offer_id=offer_id,
        profile=profile,
        task="Write a test, please: ✓",
        max_token_budget=1_000,
        timeout=60_000,
        depth_remaining=1,
        context="the repository is in Python",
        deadline_ms=NOW + 120_000,
        via=(requester.identity.id,),
        token=narrow(token, provider.identity.key, further, sealed=True),
    )
    return assert_offer(requester.proofs, offer, provider=provider.identity.id)


def _delegation_id(number: int) -> str:
    return f"00000000-0000-5000-8000-00000000000{number}"


def _accept(offer: DelegationOffer, number: int) -> DelegationAccept:
    return DelegationAccept(
        offer_id=offer.offer_id,
        delegation_id=_delegation_id(number),
        max_token_budget=1_000,
        timeout=60_000,
        status_interval=5_000,
    )


def _complete(sides: dict[str, Side], token: str) -> Flow:
    return _completed(sides, token, Flow(sides, "complete", "An offer is accepted, reported on, completed and proven."))


def _completed(sides: dict[str, Side], token: str, flow: Flow) -> Flow:
    offer, provider = _offer(sides, token, 1), sides["provider"]
    usage = TokenUsage(prompt=10, completion=5, total=15)
    flow.add("requester", offer)
    flow.add("provider", _accept(offer, 1))
    report = StatusReport(
        offer_id=offer.offer_id,
        delegation_id=_delegation_id(1),
        seq=1,
        status="running",
        progress=0.5,
        message="thinking",
        token_usage=TokenUsage(prompt=10, completion=0, total=10),
    )
    flow.add("provider", report)
    salt_key = derived_secret(provider.seed, "transcript")
    question_line = TranscriptEntry(seq=1, role="user", content=offer.task, at_ms=NOW + 1)
    answer_line = TranscriptEntry(seq=2, role="assistant", content="assert 1 + 1 == 2", at_ms=NOW + 2)
    lines = tuple(
        msgspec.structs.replace(line, salt=line_salt(salt_key, _delegation_id(1), line.seq))
        for line in (question_line, answer_line)
    )
    result = DelegationResult(
        offer_id=offer.offer_id,
        delegation_id=_delegation_id(1),
        profile="coder",
        status="completed",
        result="assert 1 + 1 == 2",
        token_usage=usage,
        duration_ms=1_200,
    )
    proof = sign_proof(
        provider.proofs,
        requester=sides["requester"].identity.id,
        offer=offer,
        result=result,
        transcript=lines,
        now_ms=NOW + 3_000,
    )
    flow.add("provider", msgspec.structs.replace(result, transcript=lines, proof=proof))
    return flow


def _reject(sides: dict[str, Side], token: str) -> Flow:
    flow = Flow(sides, "reject", "An offer of a profile that there is not is rejected.")
    offer = _offer(sides, token, 2, profile="poet")
    flow.add("requester", offer)
    flow.add(
        "provider", DelegationReject(offer_id=offer.offer_id, code="no_profile", reason="there is no such profile")
    )
    return flow


def _ask(sides: dict[str, Side], token: str) -> Flow:
    flow = Flow(sides, "ask", "The provider's agent asks something, and goes on with the answer.")
    offer, provider = _offer(sides, token, 4), sides["provider"]
    flow.add("requester", offer)
    flow.add("provider", _accept(offer, 4))
    question = StatusReport(
        offer_id=offer.offer_id,
        delegation_id=_delegation_id(4),
        seq=1,
        status="input_required",
        message="which colour?",
        question=3,
    )
    flow.add("provider", question)
    answer = DelegationInput(offer_id=offer.offer_id, delegation_id=_delegation_id(4), question=3, text="blue")
    flow.add("requester", answer)
    result = DelegationResult(
        offer_id=offer.offer_id,
        delegation_id=_delegation_id(4),
        profile="coder",
        status="completed",
        result="it is blue",
        token_usage=TokenUsage(),
        duration_ms=900,
    )
    proof = sign_proof(
        provider.proofs,
        requester=sides["requester"].identity.id,
        offer=offer,
        result=result,
        transcript=(),
        now_ms=NOW,
    )
    flow.add("provider", msgspec.structs.replace(result, proof=proof))
    return flow


def _cancel(sides: dict[str, Side], token: str) -> Flow:
    flow = Flow(sides, "cancel", "An offer that was accepted is cancelled.")
    offer, provider = _offer(sides, token, 3), sides["provider"]
    flow.add("requester", offer)
    flow.add("provider", _accept(offer, 3))
    cancel = DelegationCancel(offer_id=offer.offer_id, delegation_id=_delegation_id(3), reason="changed my mind")
    flow.add("requester", cancel)
    result = DelegationResult(
        offer_id=offer.offer_id,
        delegation_id=_delegation_id(3),
        profile="coder",
        status="cancelled",
        error="cancelled by the peer",
        token_usage=TokenUsage(),
        duration_ms=500,
    )
    proof = sign_proof(
        provider.proofs,
        requester=sides["requester"].identity.id,
        offer=offer,
        result=result,
        transcript=(),
        now_ms=NOW,
    )
    flow.add("provider", msgspec.structs.replace(result, proof=proof))
    return flow


if __name__ == "__main__":
    main()
