"""Keys for a purpose: what they sign holds by the identity's certificate, and for nothing that it does not say."""

from typing import Any

import msgspec
import pytest

from covenant.model.peers.instance import KeyCertificate, KeyPurpose
from covenant.seal.envelope import Code, EnvelopeRefused, check, receipt, receipt_holds
from covenant.seal.identity import InstanceIdentity
from covenant.seal.keys import base64url, canonical, from_base64url, public_key, sign_document
from covenant.seal.purpose_keys import (
    CERTIFICATE_LIFE_MS,
    KEY_PERIOD_MS,
    PurposeKey,
    certificate_holds,
    certify,
    key_due,
    signed_by_instance,
    signer_of,
)
from covenant.seal.tokens import Narrowing, Use, authorize, issue, narrow
from tests.seal.instances import NOW, Instance

OFFER = {"task": "read"}
P, R, MALLORY = Instance(), Instance(), Instance()
PROOFS = certify(P.private_key, KeyPurpose.PROOFS, NOW)


def holds(signature: str, kind: str = "offer", document: dict[str, Any] = OFFER, **more: int) -> bool:
    return signed_by_instance(P.identity.key, kind, document, signature, **more)


def altered(key: PurposeKey, **changes: Any) -> PurposeKey:
    """With other words in its certificate, under the same signature."""
    assert key.certificate is not None
    return key._replace(certificate=msgspec.structs.replace(key.certificate, **changes))


def test_a_certified_key_signs_in_the_name_of_the_identity() -> None:
    signature = PROOFS.sign_document("offer", OFFER)
    assert holds(signature)
    assert holds(signature, at_ms=NOW)
    assert signer_of(signature) == P.identity.key
    assert not signed_by_instance(R.identity.key, "offer", OFFER, signature)
    assert not holds(signature, document={"task": "write"})


def test_the_identity_itself_signs_as_before() -> None:
    assert holds(sign_document(P.private_key, "offer", OFFER))
    assert PurposeKey(P.private_key).sign_document("offer", OFFER) == sign_document(P.private_key, "offer", OFFER)


def test_a_key_signs_for_its_purpose_alone() -> None:
    with pytest.raises(ValueError, match="does not sign token-block"):
        PROOFS.sign_document("token-block", OFFER)
    assert PROOFS.certificate is not None
    forced = sign_document(PROOFS.private_key, "token-block", OFFER, msgspec.to_builtins(PROOFS.certificate))
    assert not holds(forced, "token-block")
    for kind in ("bundle", "prekey", "identity-change", "identity-revocation", "key-certificate"):
        forced = sign_document(PROOFS.private_key, kind, OFFER, msgspec.to_builtins(PROOFS.certificate))
        assert not holds(forced, kind), "keys are the identity's own business"


def test_a_certified_key_certifies_no_other_one() -> None:
    below = certify(PROOFS.private_key, KeyPurpose.PROOFS, NOW)
    assert not holds(below.sign_document("offer", OFFER))
    assert not holds(altered(below, issuer=P.identity.key).sign_document("offer", OFFER))


@pytest.mark.parametrize(
    "changes",
    [
        {"not_after_ms": NOW + CERTIFICATE_LIFE_MS - 1},
        {"not_before_ms": NOW - 1},
        {"purpose": KeyPurpose.TOKENS},
        {"void_before_ms": 1},
        {"issuer": MALLORY.identity.key},
    ],
)
def test_no_word_of_a_certificate_can_be_changed(changes: dict[str, Any]) -> None:
    key = altered(PROOFS, **changes)
    assert key.certificate is not None
    signature = sign_document(PROOFS.private_key, "offer", OFFER, msgspec.to_builtins(key.certificate))
    assert not holds(signature)


def test_no_character_of_a_signature_can_be_changed() -> None:
    signature = PROOFS.sign_document("offer", OFFER)
    for at in range(0, len(signature), 7):
        other = "A" if signature[at] != "A" else "B"
        assert not holds(signature[:at] + other + signature[at + 1 :]), at


def test_what_is_in_the_header_besides_is_refused() -> None:
    signature = PROOFS.sign_document("offer", OFFER)
    header = msgspec.json.decode(from_base64url(signature.partition("..")[0]))
    for said in ({**header, "more": 1}, {**header, "kid": P.identity.key}):
        assert not holds(f"{base64url(msgspec.json.encode(said))}..{signature.partition('..')[2]}")


def test_a_certificate_holds_for_its_time() -> None:
    signature = PROOFS.sign_document("offer", OFFER)
    assert holds(signature, at_ms=NOW + CERTIFICATE_LIFE_MS)
    assert not holds(signature, at_ms=NOW + CERTIFICATE_LIFE_MS + 60_001)
    assert not holds(signature, at_ms=NOW - 60_001)
    assert not holds(signature, void_before_ms=NOW + 1)
    assert holds(signature, void_before_ms=NOW)


def test_a_certificate_for_longer_than_any_may_be_is_refused() -> None:
    made = PROOFS.certificate
    assert made is not None
    said = msgspec.structs.replace(made, not_after_ms=NOW + CERTIFICATE_LIFE_MS + 1, signature="x")
    document = msgspec.to_builtins(said)
    del document["signature"]
    signed = msgspec.structs.replace(said, signature=sign_document(P.private_key, "key-certificate", document))
    assert not certificate_holds(signed, P.identity.key, KeyPurpose.PROOFS)
    assert certificate_holds(made, P.identity.key, KeyPurpose.PROOFS)


def test_a_key_is_due_after_a_month_and_for_another_identity() -> None:
    assert not key_due(PROOFS, P.identity.key, NOW + KEY_PERIOD_MS - 1)
    assert key_due(PROOFS, P.identity.key, NOW + KEY_PERIOD_MS)
    assert key_due(PROOFS, R.identity.key, NOW)
    assert key_due(None, P.identity.key, NOW)


def test_a_token_holds_by_the_key_for_tokens_until_that_is_void() -> None:
    key = certify(P.private_key, KeyPurpose.TOKENS, NOW)
    token = narrow(
        issue(key, R.id, Narrowing(expires_at_ms=NOW + 10)), P.identity.key, Narrowing(budget=5), sealed=True
    )
    use = Use(sender=R.id, profile="p", budget=1, depth=0, offer_id="o")

    def allowed(**more: int) -> Narrowing:
        return authorize(token, P.identity.key, use, now_ms=NOW, revoked=lambda _: False, **more)

    assert allowed().budget == 5
    with pytest.raises(Exception, match="not a token of this provider"):
        allowed(void_before_ms=NOW + 1)
    with pytest.raises(Exception, match="not a token of this provider"):
        narrow(
            issue(certify(MALLORY.private_key, KeyPurpose.TOKENS, NOW), R.id, Narrowing(expires_at_ms=NOW)),
            P.identity.key,
            Narrowing(),
        )


def test_only_the_first_block_of_a_token_can_have_a_certificate() -> None:
    holder = certify(P.private_key, KeyPurpose.TOKENS, NOW)
    token = issue(PurposeKey(P.private_key), R.id, Narrowing(expires_at_ms=NOW + 10))
    chain = msgspec.json.decode(from_base64url(token.removeprefix("cvt1.")))
    last = from_base64url(chain["secret"])
    below = certify(last, KeyPurpose.TOKENS, NOW)
    block = {"nextKey": public_key(holder.private_key), "budget": 3}
    signature = below.sign_document("token-block", {**block, "after": chain["blocks"][0]["signature"]})
    forged = {"blocks": [*chain["blocks"], {**block, "signature": signature}], "secret": base64url(holder.private_key)}
    use = Use(sender=R.id, profile="p", budget=1, depth=0, offer_id="o")
    with pytest.raises(Exception, match="not a token of this provider"):
        authorize("cvt1." + base64url(canonical(forged)), P.identity.key, use, now_ms=NOW, revoked=lambda _: False)


def certified_sender(purpose: KeyPurpose = KeyPurpose.ENVELOPES, at_ms: int = NOW) -> InstanceIdentity:
    return InstanceIdentity(*certify(R.private_key, purpose, at_ms))


def refused(envelope: bytes, **more: Any) -> Code:
    with pytest.raises(EnvelopeRefused) as caught:
        check(envelope, us=P.id, now_ms=NOW, known=lambda _: True, **more)
    return caught.value.code


def test_an_envelope_names_the_key_that_signed_it_and_its_certificate() -> None:
    sender = certified_sender()
    header = check(R.seal(P, sender=sender), us=P.id, now_ms=NOW, known=lambda _: True).header
    assert (header.sender, header.skid, header.cert) == (R.id, sender.key, sender.certificate)
    assert sender.key != R.identity.key


def test_an_envelope_of_a_key_for_something_else_or_of_another_time_is_refused() -> None:
    assert refused(R.seal(P, sender=certified_sender(KeyPurpose.PROOFS))) is Code.HEADER_MISMATCH
    assert refused(R.seal(P, sender=certified_sender(at_ms=NOW + 120_000))) is Code.HEADER_MISMATCH
    assert refused(R.seal(P, sender=certified_sender(at_ms=NOW - 2 * CERTIFICATE_LIFE_MS))) is Code.HEADER_MISMATCH
    assert refused(R.seal(P, sender=certified_sender()), void_before_ms=lambda _: NOW + 1) is Code.KEY_VOID


def test_a_receipt_holds_with_its_certificate() -> None:
    recipient = InstanceIdentity(*certify(P.private_key, KeyPurpose.ENVELOPES, NOW))
    given, certificate = receipt(recipient, b"envelope"), recipient.certificate
    assert receipt_holds(P.identity.key, b"envelope", given, certificate, now_ms=NOW)
    assert not receipt_holds(P.identity.key, b"envelope", given, None, now_ms=NOW)
    assert not receipt_holds(R.identity.key, b"envelope", given, certificate, now_ms=NOW)
    other: KeyCertificate | None = PROOFS.certificate
    assert not receipt_holds(P.identity.key, b"envelope", receipt(InstanceIdentity(*PROOFS), b"envelope"), other)
