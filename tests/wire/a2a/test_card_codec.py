"""Both forms of a card, and what one has that the other has not."""

import json
from typing import Any

import msgspec
import pytest

from covenant.model.agent_card import (
    AgentCard,
    Capabilities,
    CardSkill,
    Extension,
    HttpAuth,
    Interface,
    Provider,
    Scopes,
    SecurityRequirement,
    SecurityScheme,
    Signature,
)
from covenant.wire.a2a.card_codec import card_fields, encode_card, reads_v1

URL = "https://agents.example/v1/a2a/agents/summarizer"

CARD = AgentCard(
    name="Summarizer",
    description="reader — says what matters",
    supported_interfaces=(
        Interface(url=URL, protocol_binding="JSONRPC", protocol_version="1.0"),
        Interface(url=URL, protocol_binding="HTTP+JSON", protocol_version="1.0"),
        Interface(url="agents.example:8431", protocol_binding="GRPC", protocol_version="1.0", tenant="summarizer"),
        Interface(url=URL, protocol_binding="JSONRPC", protocol_version="0.3"),
    ),
    version="1760000000000",
    capabilities=Capabilities(streaming=True, push_notifications=False, extended_agent_card=True),
    security_schemes={"bearer": SecurityScheme(http_auth_security_scheme=HttpAuth(scheme="bearer"))},
    security_requirements=(SecurityRequirement(schemes={"bearer": Scopes()}),),
    default_input_modes=("text/plain",),
    default_output_modes=("text/plain", "application/json"),
    skills=(CardSkill(id="chat", name="chat", description="Talks", tags=("text",)),),
)


def clean(card: AgentCard) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(encode_card(card))
    return fields


def both(card: AgentCard) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(encode_card(card, combined=True))
    return fields


def test_the_clean_form_is_that_of_the_specification_and_nothing_else() -> None:
    assert clean(CARD) == {
        "name": "Summarizer",
        "description": "reader — says what matters",
        "supportedInterfaces": [
            {"url": URL, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"},
            {"url": URL, "protocolBinding": "HTTP+JSON", "protocolVersion": "1.0"},
            {
                "url": "agents.example:8431",
                "protocolBinding": "GRPC",
                "protocolVersion": "1.0",
                "tenant": "summarizer",
            },
            {"url": URL, "protocolBinding": "JSONRPC", "protocolVersion": "0.3"},
        ],
        "version": "1760000000000",
        "capabilities": {"streaming": True, "pushNotifications": False, "extendedAgentCard": True},
        "securitySchemes": {"bearer": {"httpAuthSecurityScheme": {"scheme": "bearer"}}},
        "securityRequirements": [{"schemes": {"bearer": {}}}],
        "defaultInputModes": ["text/plain"],
        "defaultOutputModes": ["text/plain", "application/json"],
        "skills": [{"id": "chat", "name": "chat", "description": "Talks", "tags": ["text"]}],
    }


def test_optional_members_appear_where_they_are_given() -> None:
    card = msgspec.structs.replace(
        CARD,
        provider=Provider(organization="Example", url="https://example.com"),
        documentation_url="https://docs.example.com",
        capabilities=msgspec.structs.replace(
            CARD.capabilities, extensions=(Extension(uri="urn:x", required=True, params={"a": 1}),)
        ),
        signatures=(Signature(protected="p", signature="s"),),
    )
    fields = clean(card)
    assert fields["provider"] == {"organization": "Example", "url": "https://example.com"}
    assert fields["documentationUrl"] == "https://docs.example.com"
    assert fields["capabilities"]["extensions"] == [{"uri": "urn:x", "required": True, "params": {"a": 1}}]
    assert fields["signatures"] == [{"protected": "p", "signature": "s"}]


def test_the_combined_form_has_every_field_that_older_clients_read() -> None:
    fields = both(CARD)
    assert fields["protocolVersion"] == "1.0"
    assert fields["url"] == URL
    assert fields["preferredTransport"] == "JSONRPC"
    assert fields["additionalInterfaces"] == [{"url": URL, "transport": "JSONRPC"}]
    assert fields["security"] == [{"bearer": []}]
    assert fields["securitySchemes"]["bearer"].items() >= {"type": "http", "scheme": "bearer"}.items()
    capabilities = {"streaming": True, "pushNotifications": False, "stateTransitionHistory": False}
    assert fields["capabilities"].items() >= capabilities.items()
    assert fields["supportsAuthenticatedExtendedCard"] is True


def test_the_combined_form_without_what_1_0_does_not_know_is_the_clean_form() -> None:
    fields = both(CARD)
    for name in ("protocolVersion", "url", "preferredTransport", "additionalInterfaces", "security"):
        del fields[name]
    del fields["supportsAuthenticatedExtendedCard"], fields["capabilities"]["stateTransitionHistory"]
    for scheme in fields["securitySchemes"].values():
        del scheme["type"], scheme["scheme"]
    assert fields == clean(CARD) == json.loads(json.dumps(card_fields(CARD)))


@pytest.mark.parametrize(
    ("version", "answer"),
    [("1.0", True), ("1.0.1", True), (None, False), ("", False), ("1", False), ("0.3", False), ("1.01", False)],
)
def test_only_a_caller_that_says_1_0_gets_the_clean_form(version: str | None, answer: bool) -> None:
    assert reads_v1(version) is answer
