"""Proofs: what a result says of itself holds, and one changed line does not."""

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.content import Json
from covenant.model.peers.delegation_messages import (
    CapabilityResponse,
    DelegationOffer,
    DelegationResult,
    Profile,
    Proof,
    TokenUsage,
    TranscriptEntry,
)
from covenant.model.peers.instance import SUPPORTED_VERSIONS, Trust
from covenant.seal.identity import SKEW_MS, sign_bundle
from covenant.seal.proofs import (
    assert_offer,
    capabilities_hold,
    inclusion_path,
    is_included,
    line_holds,
    merkle_leaf,
    merkle_root,
    new_challenge,
    offer_hash,
    offer_holds,
    prove_line,
    result_hash,
    show_line,
    sign_capabilities,
    sign_proof,
    transcript_root,
    verify_evidence,
    verify_proof,
)
from covenant.seal.purpose_keys import PurposeKey
from covenant.wire.peers import decode, encode
from tests.seal.instances import NOW, OFFER_ID, Instance, offer, result, transcript

replace: Callable[..., Any] = msgspec.structs.replace
R, P, MALLORY = Instance(), Instance(), Instance()
OFFER, RESULT, LINES = offer(), result(), transcript()


def proof_of(lines: tuple[TranscriptEntry, ...] = LINES, by: Instance = P) -> Proof:
    return sign_proof(
        PurposeKey(by.private_key), requester=R.id, offer=OFFER, result=RESULT, transcript=lines, now_ms=NOW
    )


PROOF = proof_of()


# The seven leaves of the reference implementation of Certificate Transparency, and its roots for the first n of them.
CT_LEAVES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
CT_ROOTS = {
    0: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    4: "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    5: "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    6: "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    7: "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}


@pytest.mark.parametrize("size", CT_ROOTS)
def test_roots_are_those_of_certificate_transparency(size: int) -> None:
    leaves = [merkle_leaf(bytes.fromhex(text)) for text in CT_LEAVES[:size]]
    assert merkle_root(leaves).hex() == CT_ROOTS[size]


@given(size=st.integers(1, 70), data=st.data())
def test_each_line_is_included_at_its_place_and_nowhere_else(size: int, data: st.DataObject) -> None:
    leaves = [merkle_leaf(bytes([n])) for n in range(size)]
    index = data.draw(st.integers(0, size - 1))
    root, path = merkle_root(leaves), inclusion_path(leaves, index)
    assert is_included(root, size, index, leaves[index], path)
    other = data.draw(st.integers(-1, size + 1))
    if other != index:
        assert not is_included(root, size, other, leaves[index], path)
    assert not is_included(root, size, index, merkle_leaf(b"other"), path)
    assert not is_included(root, size, index, leaves[index], (*path, bytes(32)))
    assert not path or not is_included(root, size, index, leaves[index], path[:-1])


def test_there_is_no_line_outside_the_tree() -> None:
    with pytest.raises(IndexError):
        prove_line(LINES, len(LINES))


def test_a_node_cannot_be_passed_off_as_a_leaf() -> None:
    left, right = merkle_leaf(b"a"), merkle_leaf(b"b")
    assert merkle_leaf(left + right) != merkle_root([left, right])
    assert merkle_root([left, right]) == hashlib.sha256(b"\x01" + left + right).digest()


def test_an_honest_proof_holds_in_every_respect() -> None:
    report = verify_proof(
        PROOF, LINES, offer=OFFER, result=RESULT, provider=P.id, requester=R.id, budget=OFFER.max_token_budget
    )
    assert report.holds
    assert report.unchecked == ()
    assert {check.name for check in report.checks} >= {"signature", "transcript", "offer", "result", "budget"}


def test_a_proof_is_checked_offline_after_a_trip_over_the_wire() -> None:
    again = msgspec.json.decode(msgspec.json.encode(PROOF), type=Proof)
    lines = msgspec.json.decode(msgspec.json.encode(LINES), type=tuple[TranscriptEntry, ...])
    assert verify_proof(again, lines).holds


@given(
    at=st.integers(0, len(LINES) - 1),
    change=st.sampled_from(
        [
            {"content": "another"},
            {"content": "line 1 ✓ "},
            {"role": "tool"},
            {"at_ms": 0},
            {"token_count": 1},
            {"salt": "x"},
            {"tool_calls": "[]"},
            {"seq": 9},
        ]
    ),
)
def test_one_changed_line_fails(at: int, change: dict[str, Any]) -> None:
    lines = [*LINES[:at], replace(LINES[at], **change), *LINES[at + 1 :]]
    report = verify_proof(PROOF, lines)
    assert not report.holds
    assert report.broken == ("transcript",)


@pytest.mark.parametrize(
    "lines",
    [LINES[:-1], LINES[1:], (*LINES, LINES[-1]), (LINES[1], LINES[0], *LINES[2:]), ()],
    ids=["last missing", "first missing", "one twice", "two swapped", "none"],
)
def test_a_missing_added_or_moved_line_fails(lines: tuple[TranscriptEntry, ...]) -> None:
    assert verify_proof(PROOF, lines).broken == ("transcript",)


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({"offer_hash": "0" * 64}, {"signature", "offer"}),
        ({"result_hash": "0" * 64}, {"signature", "result"}),
        ({"entries": 4}, {"signature", "transcript"}),
        ({"token_usage": TokenUsage(prompt=1, completion=1, total=2)}, {"signature", "delegation"}),
        ({"requester": MALLORY.id}, {"signature", "requester"}),
        ({"provider": MALLORY.id}, {"signature", "provider_key", "provider"}),
        ({"provider_key": MALLORY.identity.key}, {"signature", "provider_key"}),
        ({"issued_at_ms": NOW + 1}, {"signature"}),
        ({"signature": "x"}, {"signature"}),
        ({"signature": proof_of(by=MALLORY).signature}, {"signature"}),
    ],
)
def test_a_changed_proof_fails_and_says_where(change: dict[str, Any], broken: set[str]) -> None:
    report = verify_proof(replace(PROOF, **change), LINES, offer=OFFER, result=RESULT, provider=P.id, requester=R.id)
    assert set(report.broken) == broken


def test_a_proof_of_somebody_else_is_not_taken_for_the_providers() -> None:
    assert verify_proof(proof_of(by=MALLORY), LINES, provider=P.id).broken == ("provider",)


def test_another_offer_or_result_than_was_proven_fails() -> None:
    assert verify_proof(PROOF, offer=offer(task="write another test")).broken == ("offer",)
    assert verify_proof(PROOF, result=result(result="more")).broken == ("result",)
    assert verify_proof(PROOF, result=result(parts=(Json(2**60),))).broken == ("result",)


def test_more_tokens_than_were_agreed_are_seen() -> None:
    assert verify_proof(PROOF, budget=14).broken == ("budget",)


def test_a_provider_cannot_hide_tokens_in_a_sum_that_is_none() -> None:
    usage = TokenUsage(prompt=1_000, completion=5, total=15)
    proof = sign_proof(
        PurposeKey(P.private_key),
        requester=R.id,
        offer=OFFER,
        result=result(token_usage=usage),
        transcript=(),
        now_ms=NOW,
    )
    assert verify_proof(proof).broken == ("usage",)


def test_without_the_transcript_the_proof_still_binds_it_and_says_what_was_not_checked() -> None:
    """Metadata only: the root leaves the provider, the lines do not; shown later, they must be those."""
    report = verify_proof(PROOF, result=RESULT, offer=OFFER)
    assert report.holds
    assert report.unchecked == ("transcript",)
    assert PROOF.transcript_root == transcript_root(LINES)


@pytest.mark.parametrize("index", range(len(LINES)))
def test_a_single_line_can_be_shown_without_the_others(index: int) -> None:
    line = prove_line(LINES, index)
    assert line_holds(PROOF, line)
    assert not line_holds(PROOF, replace(line, entry=replace(line.entry, content="another")))
    assert not line_holds(PROOF, replace(line, index=index + 1))
    assert not line_holds(PROOF, replace(line, path=("zz", *line.path[1:])))
    assert not line_holds(proof_of(LINES[:3]), line)


def test_evidence_of_one_line_holds_without_the_transcript() -> None:
    line = show_line(msgspec.to_builtins(LINES), 1)
    evidence = {"proof": msgspec.to_builtins(PROOF), "line": line}
    report = verify_evidence(msgspec.json.encode(evidence))
    assert report.holds
    assert report.unchecked == ("transcript", "offer", "result", "provider")
    line["entry"]["content"] = "another"
    assert verify_evidence(msgspec.json.encode(evidence)).broken == ("line",)
    with pytest.raises(IndexError):
        show_line(msgspec.to_builtins(LINES), len(LINES))
    with pytest.raises(ValueError, match="Expected"):
        show_line(None, 0)


def test_a_salt_hides_what_a_neighbouring_line_could_be_guessed_from() -> None:
    plain, salted = transcript(2), tuple(replace(each, salt="a1b2") for each in transcript(2))
    assert prove_line(plain, 0).path != prove_line(salted, 0).path


def test_an_offers_assertion_is_for_one_provider_and_one_offer() -> None:
    signed = assert_offer(PurposeKey(R.private_key), OFFER, provider=P.id)
    assert offer_holds(signed, requester=R.id, key=R.identity.key, provider=P.id)
    assert not offer_holds(signed, requester=R.id, key=R.identity.key, provider=MALLORY.id)
    assert not offer_holds(signed, requester=MALLORY.id, key=MALLORY.identity.key, provider=P.id)
    assert not offer_holds(signed, requester=R.id, key=MALLORY.identity.key, provider=P.id)
    for change in ({"max_token_budget": 60_000}, {"profile": "x"}, {"depth_remaining": 3}, {"token": "t"}):
        assert not offer_holds(replace(signed, **change), requester=R.id, key=R.identity.key, provider=P.id)
    assert not offer_holds(OFFER, requester=R.id, key=R.identity.key, provider=P.id)
    huge = replace(signed, parts=(Json(2**60),))
    assert not offer_holds(huge, requester=R.id, key=R.identity.key, provider=P.id)


def capabilities(challenge: str) -> CapabilityResponse:
    return sign_capabilities(
        PurposeKey(P.private_key),
        CapabilityResponse(
            provider=P.id,
            audience=R.id,
            nonce=challenge,
            versions=SUPPORTED_VERSIONS,
            profiles=(Profile(name="coder", max_token_budget=80_000),),
            active_delegations=0,
            free_slots=5,
            trust_level=Trust.PEER,
            keys=sign_bundle(P.private_key, [P.prekey.prekey], NOW),
            issued_at_ms=NOW,
            expires_at_ms=NOW + 60_000,
        ),
    )


def test_capabilities_hold_as_the_answer_to_one_challenge_by_one_requester_for_a_while() -> None:
    challenge = new_challenge()
    response = capabilities(challenge)
    asked = {"provider": P.id, "audience": R.id, "challenge": challenge, "now_ms": NOW}
    assert capabilities_hold(response, **asked)  # type: ignore[arg-type]  # the values differ in type
    for change in (
        {"challenge": new_challenge()},
        {"audience": MALLORY.id},
        {"provider": MALLORY.id},
        {"now_ms": NOW + 60_000 + SKEW_MS + 1},
        {"now_ms": NOW - SKEW_MS - 1},
    ):
        assert not capabilities_hold(response, **{**asked, **change})  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize(
    "change",
    [
        {"free_slots": 6},
        {"trust_level": Trust.TRUSTED},
        {"versions": (1,)},
        {"profiles": ()},
        {"token": "t"},
        {"signature": ""},
        {"keys": sign_bundle(MALLORY.private_key, [MALLORY.prekey.prekey], NOW)},
    ],
)
def test_changed_capabilities_do_not_hold(change: dict[str, Any]) -> None:
    challenge = new_challenge()
    response = replace(capabilities(challenge), **change)
    assert not capabilities_hold(response, provider=P.id, audience=R.id, challenge=challenge, now_ms=NOW)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_whatever_a_message_can_carry_has_one_hash_on_both_sides(value: Any) -> None:
    given_offer, given_result = offer(parts=(Json(value),)), result(parts=(Json(value),))
    read_offer = decode("delegation_offer", encode(given_offer))
    read_result = decode("delegation_result", encode(given_result))
    assert isinstance(read_offer, DelegationOffer)
    assert isinstance(read_result, DelegationResult)
    assert offer_hash(read_offer) == offer_hash(given_offer)
    assert result_hash(read_result) == result_hash(given_result)


def test_the_offers_id_is_what_both_sides_call_it() -> None:
    assert OFFER.offer_id == RESULT.offer_id == OFFER_ID
