"""The eight messages on the wire: names, limits, what is ignored and what is refused."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.content import Json
from covenant.model.errors import Invalid
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
    Proof,
    StatusReport,
    SubDelegation,
    TokenUsage,
    TranscriptEntry,
)
from covenant.model.peers.instance import KeyBundle, Prekey, Trust
from covenant.wire.peers import REQUESTER_SENDS, TYPES, decode, encode, type_of

ID = "0b0e3c52-4f6f-4b8e-8d0a-6a1f1d2c3b4a"
PEER = "frd1_" + "a" * 40
KEY = "1" * 32
USAGE = TokenUsage(prompt=1, completion=2, total=3)
PREKEY = Prekey(kid="pk_a", suite="s", public_key=KEY, not_before_ms=1, not_after_ms=2, signature="x")
BUNDLE = KeyBundle(
    id=PEER, identity_key=KEY, prekeys=(PREKEY,), versions=(2,), issued_at_ms=1, expires_at_ms=2, signature="x"
)
PROOF = Proof(
    delegation_id=ID,
    offer_hash="0" * 64,
    result_hash="1" * 64,
    transcript_root="2" * 64,
    entries=1,
    token_usage=USAGE,
    provider=PEER,
    requester=PEER,
    provider_key=KEY,
    issued_at_ms=1,
    signature="x",
)
MESSAGES: dict[str, DelegationMessage] = {
    "delegation_offer": DelegationOffer(
        offer_id=ID,
        profile="coder",
        task="write",
        max_token_budget=50_000,
        timeout=300_000,
        depth_remaining=2,
        context="because",
        parts=(Json({"a": [1.5]}),),
        deadline_ms=9,
        traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
        parent_id=ID,
        correlation_id="c",
        token="t",
        assertion="x",
    ),
    "delegation_accept": DelegationAccept(offer_id=ID, delegation_id=ID, max_token_budget=1, timeout=1),
    "delegation_reject": DelegationReject(
        offer_id=ID, code="rate_limited", reason="later", retry_after=1_000, versions=(2,)
    ),
    "delegation_status": StatusReport(
        offer_id=ID, delegation_id=ID, seq=1, status="running", progress=0.5, message="m", token_usage=USAGE
    ),
    "delegation_result": DelegationResult(
        offer_id=ID,
        delegation_id=ID,
        profile="coder",
        status="completed",
        result="done",
        token_usage=USAGE,
        duration_ms=5,
        sub_delegations=(SubDelegation(delegation_id=ID, profile="x", status="failed", remote=True, provider=PEER),),
        transcript=(TranscriptEntry(seq=1, role="user", content="hi", at_ms=1),),
        proof=PROOF,
    ),
    "delegation_input": DelegationInput(offer_id=ID, delegation_id=ID, question=7, text="blue"),
    "delegation_cancel": DelegationCancel(offer_id=ID, delegation_id=ID, reason="enough"),
    "capability_query": CapabilityQuery(nonce="n" * 16, versions=(2, 3)),
    "capability_response": CapabilityResponse(
        provider=PEER,
        audience=PEER,
        nonce="n" * 16,
        versions=(2,),
        profiles=(Profile(name="coder", description="codes", max_token_budget=80_000),),
        active_delegations=1,
        free_slots=4,
        trust_level=Trust.VERIFIED,
        keys=BUNDLE,
        issued_at_ms=1,
        expires_at_ms=2,
        token="t",
        signature="x",
    ),
}
SIGNED = {"delegation_offer", "capability_response"}


def fields(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(encode(MESSAGES[name]))
    return read


def refused(name: str, **changes: Any) -> Invalid:
    with pytest.raises(Invalid) as why:
        decode(name, json.dumps({**fields(name), **changes}).encode())
    return why.value


def test_there_are_nine_messages_and_a_requester_sends_four() -> None:
    assert MESSAGES.keys() == TYPES.keys()
    assert (len(TYPES), len(REQUESTER_SENDS & TYPES.keys())) == (9, 4)


@pytest.mark.parametrize("name", TYPES)
def test_a_message_is_itself_again_under_its_type(name: str) -> None:
    message = MESSAGES[name]
    assert type_of(message) == name
    assert decode(name, encode(message)) == message


def test_names_on_the_wire_are_those_of_the_protocol() -> None:
    assert fields("delegation_offer").keys() >= {"offerId", "profile", "task", "context", "maxTokenBudget", "timeout"}
    assert fields("delegation_accept").keys() >= {"delegationId", "maxTokenBudget", "timeout", "statusInterval"}
    assert fields("delegation_reject").keys() >= {"code", "reason", "retryAfter"}
    assert fields("delegation_result").keys() >= {
        "delegationId",
        "profile",
        "status",
        "result",
        "error",
        "tokenUsage",
        "durationMs",
        "subDelegations",
        "proof",
    }
    assert fields("delegation_result")["tokenUsage"] == {"prompt": 1, "completion": 2, "total": 3}
    assert fields("capability_response").keys() >= {"profiles", "freeSlots", "versions", "trustLevel", "nonce", "keys"}


@pytest.mark.parametrize("name", sorted(TYPES.keys() - SIGNED))
def test_a_field_that_this_version_does_not_know_is_ignored(name: str) -> None:
    assert decode(name, json.dumps({**fields(name), "novelty": [1]}).encode()) == MESSAGES[name]


@pytest.mark.parametrize("name", sorted(SIGNED))
def test_what_is_signed_has_no_field_that_nobody_knows(name: str) -> None:
    assert "novelty" in refused(name, novelty=1).message


def test_a_type_that_does_not_exist_is_refused() -> None:
    with pytest.raises(Invalid) as why:
        decode("delegation_surprise", b"{}")
    assert why.value.code == "type_not_supported"


BAD: list[tuple[str, dict[str, Any]]] = [
    ("delegation_offer", {"offerId": "x"}),
    ("delegation_offer", {"offerId": ID + "\n"}),
    ("delegation_offer", {"task": ""}),
    ("delegation_offer", {"task": "x" * 50_001}),
    ("delegation_offer", {"context": "x" * 100_001}),
    ("delegation_offer", {"maxTokenBudget": 0}),
    ("delegation_offer", {"maxTokenBudget": 500_001}),
    ("delegation_offer", {"maxTokenBudget": "50000"}),
    ("delegation_offer", {"maxTokenBudget": 1.5}),
    ("delegation_offer", {"maxTokenBudget": True}),
    ("delegation_offer", {"timeout": 600_001}),
    ("delegation_offer", {"depthRemaining": 11}),
    ("delegation_offer", {"depthRemaining": -1}),
    ("delegation_offer", {"profile": "x" * 65}),
    ("delegation_offer", {"traceparent": "x"}),
    ("delegation_offer", {"parts": [{"type": "json", "value": {"a": [2**53]}}]}),
    ("delegation_offer", {"parts": [{"type": "surprise"}]}),
    ("delegation_accept", {"delegationId": None}),
    ("delegation_reject", {"code": "because"}),
    ("delegation_status", {"status": "completed"}),
    ("delegation_status", {"progress": 1.1}),
    ("delegation_status", {"seq": 0}),
    ("delegation_result", {"status": "running"}),
    ("delegation_result", {"tokenUsage": {"total": -1}}),
    ("delegation_result", {"proof": {"delegationId": ID}}),
    ("delegation_result", {"parts": [{"type": "json", "value": -(2**60)}]}),
    ("capability_query", {"nonce": "short"}),
    ("capability_query", {"versions": []}),
    ("capability_query", {"versions": [2] * 17}),
    ("capability_query", {"versions": [0]}),
    ("capability_response", {"trustLevel": "full"}),
    ("capability_response", {"provider": "somebody"}),
]


@pytest.mark.parametrize(("name", "changes"), BAD)
def test_what_is_over_a_limit_or_of_another_kind_is_refused(name: str, changes: dict[str, Any]) -> None:
    assert refused(name, **changes).code == "invalid_request"


def nested(depth: int, width: int = 1) -> list[dict[str, Any]]:
    tree: list[dict[str, Any]] = []
    for _ in range(depth):
        one = {"delegationId": ID, "profile": "x", "status": "completed", "subDelegations": tree}
        tree = [one] * width
    return tree


def test_a_tree_is_bounded_in_depth_and_as_a_whole() -> None:
    body = json.dumps({**fields("delegation_result"), "subDelegations": nested(20)}).encode()
    assert isinstance(decode("delegation_result", body), DelegationResult)
    assert "deep" in refused("delegation_result", subDelegations=nested(21)).message
    assert "more than 1000" in refused("delegation_result", subDelegations=nested(10, 2)).message
    assert "more than 100 " in refused("delegation_status", subDelegations=nested(6, 2)).message
    assert "deep" in refused("delegation_status", subDelegations=nested(21)).message


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"\xff", b"null", b'{"offerId":"\xed\xa0\x80"}'])
@pytest.mark.parametrize("name", TYPES)
def test_what_is_no_message_is_refused(name: str, body: bytes) -> None:
    with pytest.raises(Invalid):
        decode(name, body)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@given(name=st.sampled_from(sorted(TYPES)), data=st.data())
def test_whatever_stands_in_a_field_is_read_or_refused(name: str, data: st.DataObject) -> None:
    changed = fields(name)
    changed[data.draw(st.sampled_from(sorted(changed)))] = data.draw(ANYTHING)
    try:
        body = json.dumps(changed).encode()
        message = decode(name, body)
    except Invalid:
        return
    assert decode(name, encode(message)) == message


@given(st.sampled_from(sorted(TYPES)), st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(name: str, body: bytes) -> None:
    with contextlib.suppress(Invalid):
        assert isinstance(decode(name, body), msgspec.Struct)
