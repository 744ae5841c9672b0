"""Strangers' cards: of either version, ours, with more or less in them than there should be."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.agent_card import (
    AgentCard,
    Capabilities,
    CardCredential,
    HttpAuth,
    Interface,
    RemoteInterface,
    Scopes,
    SecurityRequirement,
    SecurityScheme,
)
from covenant.wire.a2a.card_codec import BadCard, card_fields, encode_card, read_card, v1_fields
from tests.wire.a2a.a2a_samples import json

PLACE = "https://h.example/.well-known/agent-card.json"
OURS = AgentCard(
    name="echo",
    description="Says it again",
    supported_interfaces=(
        Interface(url="https://h.example/rpc", protocol_binding="JSONRPC", protocol_version="1.0"),
        Interface(url="https://h.example/rest", protocol_binding="HTTP+JSON", protocol_version="1.0"),
    ),
    version="7",
    capabilities=Capabilities(streaming=True, push_notifications=False, extended_agent_card=True),
    security_schemes={"bearer": SecurityScheme(http_auth_security_scheme=HttpAuth(scheme="Bearer"))},
    security_requirements=(SecurityRequirement(schemes={"bearer": Scopes()}),),
    default_input_modes=("text/plain",),
    default_output_modes=("text/plain",),
    skills=(),
)


def test_our_own_card_is_read_in_both_forms() -> None:
    newer = read_card(encode_card(OURS), PLACE)
    assert newer.interfaces == (
        RemoteInterface(url="https://h.example/rpc", binding="JSONRPC", version="1.0"),
        RemoteInterface(url="https://h.example/rest", binding="HTTP+JSON", version="1.0"),
    )
    assert (newer.streaming, newer.extended, newer.credentials) == (True, True, (CardCredential(scheme="bearer"),))
    both = read_card(encode_card(OURS, combined=True), PLACE)
    assert both.interfaces == (
        *newer.interfaces,
        RemoteInterface(url="https://h.example/rpc", binding="JSONRPC", version="0.3"),
    )


def test_a_card_of_both_versions_without_the_older_one_is_the_newer_one() -> None:
    assert v1_fields(read_card(encode_card(OURS, combined=True), PLACE).fields) == card_fields(OURS)


def test_a_card_of_0_3_is_read() -> None:
    card = read_card(
        json(
            {
                "protocolVersion": "0.3.0",
                "name": "old",
                "version": "1",
                "url": "https://h.example/a",
                "additionalInterfaces": [{"url": "https://h.example/g", "transport": "GRPC"}],
                "capabilities": {"streaming": False},
                "skills": [{"id": "s", "name": "S", "description": "d", "tags": ["t", 5], "examples": ["e"]}],
            }
        ),
        PLACE,
    )
    assert card.interfaces == (
        RemoteInterface(url="https://h.example/a", binding="JSONRPC", version="0.3"),
        RemoteInterface(url="https://h.example/g", binding="GRPC", version="0.3"),
    )
    assert (card.streaming, card.skills[0].tags, card.skills[0].examples) == (False, ("t",), ("e",))


@pytest.mark.parametrize(("version", "dialect"), [("1.0", "1.0"), ("1.0.3", "1.0"), ("1.1", "1.0"), ("0.3.0", "0.3")])
def test_an_interface_says_its_own_version(version: str, dialect: str) -> None:
    way = {"url": "https://h.example", "protocolBinding": "JSONRPC", "protocolVersion": version, "tenant": "acme"}
    card = read_card(json({"name": "x", "version": "1", "supportedInterfaces": [way]}), PLACE)
    assert card.interfaces == (
        RemoteInterface(url="https://h.example", binding="JSONRPC", version=dialect, tenant="acme"),
    )


def test_an_interface_of_an_unknown_version_is_left_out() -> None:
    way = {"url": "https://h.example", "protocolBinding": "JSONRPC", "protocolVersion": "7.0"}
    assert read_card(json({"name": "x", "version": "1", "supportedInterfaces": [way]}), PLACE).interfaces == ()


_anything = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["url", "schemes", "id", "name", "in", "type", "streaming"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
_NAMES = (
    "description supportedInterfaces url additionalInterfaces capabilities skills securitySchemes security "
    "securityRequirements signatures preferredTransport"
).split()


@given(st.dictionaries(st.sampled_from(_NAMES), _anything))
def test_with_a_name_and_a_version_everything_is_a_card(fields: dict[str, Any]) -> None:
    card = read_card(json({**fields, "name": "x", "version": "1"}), PLACE)
    assert (card.name, card.version) == ("x", "1")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 10_000])
def test_what_is_no_object_is_no_card(data: bytes) -> None:
    with pytest.raises(BadCard):
        read_card(data, PLACE)
