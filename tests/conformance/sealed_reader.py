"""Reads the vectors of sealed delegation, by the pages on the extension, on envelopes and on messages alone.

It stands on the third implementation that the tests have, which imports nothing of Covenant, and opens envelopes by
HPKE as the tests have it from RFC 9180. It is stricter than a peer need be: everything has one spelling.
"""

import base64
import hashlib
import json
import re
import struct
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from tests.e2e.peers.independent_peer import (
    OFFER_FIELDS,
    SUITE,
    b58,
    b64,
    canonical,
    from_b58,
    from_b64,
    holds,
    id_of,
    merkle,
    speaks_for,
    without,
)
from tests.seal.rfc9180 import hybrid_context, recipient_context

HYBRID = "X25519-MLKEM768-HKDF-SHA256-AES256GCM-Ed25519"


def unbase64(text: str) -> bytes:
    raw = from_b64(text)
    assert b64(raw) == text, "another spelling"
    return raw


def check_document(key: str, kind: str, document: dict[str, Any], signature: str) -> None:
    assert holds(key, kind, document, signature), kind


def check_bundle(bundle: dict[str, Any], now_ms: int) -> bytes:
    """The identity key that it proves."""
    assert bundle["id"] == id_of(bundle["identityKey"])
    assert bundle["issuedAtMs"] <= now_ms + 60_000
    assert now_ms <= bundle["expiresAtMs"] + 60_000
    check_document(bundle["identityKey"], "bundle", without(bundle, "signature"), bundle["signature"])
    for prekey in bundle["prekeys"]:
        assert prekey["suite"] == SUITE
        check_prekey(bundle, prekey, from_b58(prekey["publicKey"]))
    return from_b58(bundle["identityKey"])


def check_hybrid(bundle: dict[str, Any], prekey: dict[str, Any] | None) -> None:
    """There is one if, and only if, the bundle says so."""
    assert (6 in bundle["versions"]) == (prekey is not None)
    if prekey is not None:
        public = unbase64(prekey["publicKey"])
        assert (prekey["suite"], len(public)) == (HYBRID, 1216)
        check_prekey(bundle, prekey, public)


def check_prekey(bundle: dict[str, Any], prekey: dict[str, Any], public: bytes) -> None:
    assert prekey["kid"] == "pk_" + base64.b32encode(hashlib.sha256(public).digest()[:10]).decode().lower()
    assert 0 < prekey["notAfterMs"] - prekey["notBeforeMs"] <= 48 * 3_600_000
    signed = {**without(prekey, "signature"), "owner": bundle["id"]}
    check_document(bundle["identityKey"], "prekey", signed, prekey["signature"])


class Instance:
    """One side, with its secrets."""

    def __init__(self, shown: dict[str, Any]) -> None:
        self.identity = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(shown["seed"]))
        self.key = self.identity.public_key().public_bytes_raw()
        self.id = id_of(b58(self.key))
        self.prekey = X25519PrivateKey.from_private_bytes(bytes.fromhex(shown["prekeyPrivate"]))
        self.keys = shown["introduction"]["keys"]
        self.hybrid = shown["introduction"].get("hybridPrekey")
        self.hybrid_seed = bytes.fromhex(shown.get("hybridPrekeySeed", ""))

    def open(self, data: bytes, *, known: dict[str, bytes], now_ms: int) -> tuple[dict[str, Any], bytes]:
        """The header and the body, by the page's order of checks."""
        envelope = json.loads(data)
        assert set(envelope) == {"protected", "ciphertext", "signature"}
        protected, ciphertext, signature = (
            unbase64(envelope[name]) for name in ("protected", "ciphertext", "signature")
        )
        assert len(protected) <= 2048
        header = json.loads(protected)
        assert canonical(header) == protected
        assert (header["v"], header["suite"]) == (2, HYBRID if self.hybrid else SUITE)
        skid, identity = from_b58(header["skid"]), header["skid"]
        if "cert" in header:
            identity = header["cert"]["issuer"]
            assert speaks_for(identity, header["cert"], "envelopes", header["skid"], header["iat"])
        assert id_of(identity) == header["from"]
        signed = b"covenant.envelope.signature.v2\n" + struct.pack(">I", len(protected)) + protected
        Ed25519PublicKey.from_public_bytes(skid).verify(signature, signed + hashlib.sha256(ciphertext).digest())
        assert header["from"] != self.id
        assert known[header["from"]] == from_b58(identity)
        assert header["to"] == self.id
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", header["jti"])
        assert 0 < header["exp"] - header["iat"] <= 300_000
        assert header["iat"] - 60_000 <= now_ms <= header["exp"] + 60_000
        info = b"covenant.envelope.seal.v2\n" + protected
        if self.hybrid:
            assert header["kid"] == self.hybrid["kid"]
            return header, hybrid_context(ciphertext[:1120], self.hybrid_seed, info).open(0, b"", ciphertext[1120:])
        assert header["kid"] == self.keys["prekeys"][0]["kid"]
        context = recipient_context(ciphertext[:32], self.prekey, info)
        return header, context.open(0, b"", ciphertext[32:])

    def check_receipt(self, data: bytes, given: str, certificate: dict[str, Any] | None, now_ms: int) -> None:
        key = self.key
        if certificate is not None:
            assert speaks_for(b58(self.key), certificate, "envelopes", certificate["key"], now_ms)
            key = from_b58(certificate["key"])
        signed = b"covenant.envelope.receipt.v2\n" + hashlib.sha256(data).digest()
        Ed25519PublicKey.from_public_bytes(key).verify(unbase64(given), signed)
        if certificate is None:
            assert given == b64(self.identity.sign(signed))


def check_token(token: str, provider_key: str, *, holder: str, offer: dict[str, Any] | None, now_ms: int) -> None:
    """Every block's signature, and every condition against this offer, if there is one."""
    assert token.startswith("cvt1.")
    raw = unbase64(token.removeprefix("cvt1."))
    chain = json.loads(raw)
    assert canonical(chain) == raw
    assert ("secret" in chain) != ("seal" in chain)
    signer, after = provider_key, ""
    for block in chain["blocks"]:
        check_document(signer, "token-block", {**without(block, "signature"), "after": after}, block["signature"])
        signer, after = block["nextKey"], block["signature"]
        assert now_ms <= block.get("expiresAtMs", now_ms)
        if offer is not None:
            assert offer["profile"] in block.get("profiles", [offer["profile"]])
            assert offer["maxTokenBudget"] <= block.get("budget", offer["maxTokenBudget"])
            assert offer["depthRemaining"] <= block.get("depth", offer["depthRemaining"])
            assert offer["offerId"] == block.get("offerId", offer["offerId"])
    assert chain["blocks"][0]["holder"] == holder
    assert chain["blocks"][0]["audience"] == id_of(provider_key)
    if "seal" in chain:
        check_document(signer, "token-seal", {"after": after}, chain["seal"])


RESULT_FIELDS = (
    "offerId delegationId profile status result parts error errorCode tokenUsage durationMs subDelegations"
).split()


def whole(message: dict[str, Any], fields: tuple[str, ...] | list[str], lists: tuple[str, ...]) -> dict[str, Any]:
    """Every field of the type present: null, or an empty list, where there is none."""
    return {name: message.get(name, [] if name in lists else None) for name in fields}


def digest(document: Any) -> str:
    return hashlib.sha256(canonical(document)).hexdigest()


def check_offer(offer: dict[str, Any], requester_key: str, provider: str) -> None:
    stated = without(whole(offer, OFFER_FIELDS, ("parts", "via")), "assertion")
    check_document(requester_key, "offer", {**stated, "provider": provider}, offer["assertion"])


def check_proof(offer: dict[str, Any], result: dict[str, Any], requester: str, provider: str) -> None:
    proof = result["proof"]
    assert (proof["requester"], proof["provider"]) == (requester, provider)
    assert id_of(proof["providerKey"]) == provider
    check_document(proof["providerKey"], "proof", without(proof, "signature"), proof["signature"])
    assert proof["offerHash"] == digest(whole(offer, OFFER_FIELDS, ("parts", "via")))
    assert proof["resultHash"] == digest(whole(result, RESULT_FIELDS, ("parts", "subDelegations")))
    lines = result.get("transcript") or []
    assert proof["entries"] == len(lines)
    assert proof["transcriptRoot"] == merkle(lines)
    usage = result["tokenUsage"]
    assert proof["tokenUsage"] == usage
    assert usage["total"] == usage["prompt"] + usage["completion"] <= offer["maxTokenBudget"]
