"""Agent cards in JSON: encodes ours, decodes those of remote agents.

Our cards have two forms: that of A2A 1.0, and a combined form with the fields of 0.3 beside those of 1.0. Without the
0.3 fields, the combined form equals the 1.0 form, so its signatures hold. For clients of 0.3 it names the interfaces
that speak 0.3.

A remote card of 1.0, of 0.3 or of both needs a name and a version. Any other field is ignored if it is invalid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from covenant.model.agent_card import (
    JSONRPC,
    AgentCard,
    Capabilities,
    CardCredential,
    RemoteCard,
    RemoteInterface,
    RemoteSkill,
    SecurityScheme,
)
from covenant.model.errors import Invalid
from covenant.wire.json_input import decode

PROTOCOL_VERSION: Final = "1.0"
"""The version in both forms. 0.3 clients accept any text here."""
_PROTO_V03: Final = (
    "protocolVersion",
    "name",
    "description",
    "url",
    "preferredTransport",
    "additionalInterfaces",
    "provider",
    "version",
    "documentationUrl",
    "defaultInputModes",
    "defaultOutputModes",
    "skills",
    "supportsAuthenticatedExtendedCard",
)
_CAPABILITIES_V03: Final = ("streaming", "pushNotifications", "extensions")
_COMMON_FIELDS: Final = tuple(
    name for name in AgentCard.__struct_fields__ if name not in {"capabilities", "security_schemes"}
)
INTERFACES_MAX: Final = 32
SKILLS_MAX: Final = 1_000
_any: Final = msgspec.json.Decoder()
# Members that A2A 1.0 knows. A combined card has others besides.
_CARD: Final = frozenset(
    """
    name description supportedInterfaces provider version documentationUrl capabilities securitySchemes
    securityRequirements defaultInputModes defaultOutputModes skills signatures iconUrl
    """.split()
)
_CAPABILITIES: Final = frozenset("streaming pushNotifications extensions extendedAgentCard".split())
_SCHEMES: Final = (
    "apiKeySecurityScheme",
    "httpAuthSecurityScheme",
    "oauth2SecurityScheme",
    "openIdConnectSecurityScheme",
    "mtlsSecurityScheme",
)


class CombinedCapabilities(Capabilities, frozen=True, kw_only=True):
    state_transition_history: bool


class CombinedScheme(SecurityScheme, frozen=True, kw_only=True):
    """0.3 tells schemes apart by `type`, 1.0 by the name of the member."""

    type: str
    scheme: str


class Transport(msgspec.Struct, frozen=True):
    url: str
    transport: str


class CombinedCard(AgentCard, frozen=True, kw_only=True):
    protocol_version: str
    url: str
    preferred_transport: str
    additional_interfaces: tuple[Transport, ...]
    security: tuple[dict[str, tuple[str, ...]], ...]
    supports_authenticated_extended_card: bool
    # The types of the 1.0 form, with members of 0.3 added.
    capabilities: CombinedCapabilities
    security_schemes: dict[str, CombinedScheme]  # type: ignore[assignment]  # read only: narrower is fine


def encode_card(card: AgentCard, *, combined: bool = False) -> bytes:
    """Encodes a card in the form of A2A 1.0, or in the combined form."""
    return msgspec.json.encode(combined_card(card) if combined else card)


def encode_proto_card_v03(card: AgentCard) -> bytes:
    """Encodes a card as 0.3 has it over gRPC, unsigned: signatures are over the form of 1.0."""
    combined = combined_card(card)
    fields: dict[str, Any] = msgspec.to_builtins(combined)
    proto: dict[str, Any] = {name: fields[name] for name in _PROTO_V03 if name in fields}
    proto["capabilities"] = {
        name: fields["capabilities"][name] for name in _CAPABILITIES_V03 if name in fields["capabilities"]
    }
    proto["securitySchemes"] = msgspec.to_builtins(card.security_schemes)
    proto["security"] = msgspec.to_builtins(card.security_requirements)
    return msgspec.json.encode(proto)


def card_fields(card: AgentCard) -> dict[str, Any]:
    """The form of A2A 1.0 as plain values: the signed form, which is also nested in other answers."""
    fields: dict[str, Any] = msgspec.json.decode(encode_card(card))
    return fields


def combined_card(card: AgentCard) -> CombinedCard:
    interfaces = card.supported_interfaces
    preferred = next((each for each in interfaces if each.protocol_binding == JSONRPC), interfaces[0])
    old = [each for each in interfaces if each.protocol_version == "0.3"] or [preferred]
    return CombinedCard(
        **{name: getattr(card, name) for name in _COMMON_FIELDS},
        protocol_version=PROTOCOL_VERSION,
        url=preferred.url,
        preferred_transport=preferred.protocol_binding,
        additional_interfaces=tuple(Transport(each.url, each.protocol_binding) for each in old),
        security=tuple(
            {name: scopes.list for name, scopes in requirement.schemes.items()}
            for requirement in card.security_requirements
        ),
        supports_authenticated_extended_card=card.capabilities.extended_agent_card,
        capabilities=CombinedCapabilities(
            **{name: getattr(card.capabilities, name) for name in Capabilities.__struct_fields__},
            state_transition_history=False,
        ),
        security_schemes={name: _combined_scheme(scheme) for name, scheme in card.security_schemes.items()},
    )


def reads_v1(version: str | None) -> bool:
    """Whether a caller with this `A2A-Version` reads 1.0: `1.0` with any patch. Only older clients say `1`."""
    return version is not None and (version == PROTOCOL_VERSION or version.startswith(f"{PROTOCOL_VERSION}."))


def _combined_scheme(scheme: SecurityScheme) -> CombinedScheme:
    auth = scheme.http_auth_security_scheme
    return CombinedScheme(type="http", scheme=auth.scheme, http_auth_security_scheme=auth)


class BadCard(Invalid):
    """The text is not a card, or lacks a required field. `field` names the field that is wrong."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__("bad_card", f"{field}: {description}")
        self.field = field


def read_card(data: bytes, url: str) -> RemoteCard:
    """Decodes a remote agent's card. Raises BadCard."""
    try:
        fields = decode(_any, data)
    except Invalid as wrong:
        raise BadCard("card", f"is not JSON: {wrong.message}") from wrong
    if not isinstance(fields, dict):
        raise BadCard("card", "is not a JSON object")
    capabilities = _object(fields.get("capabilities"))
    streaming = capabilities.get("streaming")
    extended = fields.get("supportsAuthenticatedExtendedCard") is True or capabilities.get("extendedAgentCard") is True
    return RemoteCard(
        name=_required(fields, "name"),
        version=_required(fields, "version"),
        description=_text(fields.get("description")),
        interfaces=tuple(_interfaces(fields))[:INTERFACES_MAX],
        streaming=streaming if isinstance(streaming, bool) else None,
        extended=extended,
        skills=tuple(_skills(fields.get("skills")))[:SKILLS_MAX],
        credentials=tuple(_credentials(fields)),
        signatures=tuple(each for each in _list(fields.get("signatures")) if isinstance(each, dict)),
        fields=fields,
        url=url,
    )


def v1_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The 1.0 members of a combined card, which its signatures cover."""
    kept = {name: value for name, value in fields.items() if name in _CARD}
    if isinstance(capabilities := kept.get("capabilities"), dict):
        kept["capabilities"] = {name: value for name, value in capabilities.items() if name in _CAPABILITIES}
    if isinstance(schemes := kept.get("securitySchemes"), dict):
        kept["securitySchemes"] = {
            name: {member: value for member, value in scheme.items() if member in _SCHEMES}
            if isinstance(scheme, dict)
            else scheme
            for name, scheme in schemes.items()
        }
    return kept


def _required(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        raise BadCard(name, "is required")
    if not isinstance(value, str) or not value.strip():
        raise BadCard(name, "must be a non-empty text")
    return value


def _interfaces(fields: Mapping[str, Any]) -> Iterable[RemoteInterface]:
    found: dict[tuple[str, str, str], RemoteInterface] = {}
    for interface in (*_interfaces_v1(fields), *_interfaces_v03(fields)):
        found.setdefault((interface.url, interface.binding, interface.version), interface)
    return found.values()


def _interfaces_v1(fields: Mapping[str, Any]) -> Iterator[RemoteInterface]:
    for each in _list(fields.get("supportedInterfaces")):
        interface = _object(each)
        url, binding = _text(interface.get("url")), _text(interface.get("protocolBinding"))
        version = _version(_text(interface.get("protocolVersion")) or "1.0")
        if url and binding and version:
            yield RemoteInterface(
                url=url, binding=binding.upper(), version=version, tenant=_text(interface.get("tenant")) or None
            )


def _interfaces_v03(fields: Mapping[str, Any]) -> Iterator[RemoteInterface]:
    """The interfaces of a 0.3 card: `url` and the additional ones. All speak 0.3, also those that claim 1.0."""
    if url := _text(fields.get("url")):
        yield RemoteInterface(
            url=url, binding=(_text(fields.get("preferredTransport")) or JSONRPC).upper(), version="0.3"
        )
    for each in _list(fields.get("additionalInterfaces")):
        interface = _object(each)
        url, binding = _text(interface.get("url")), _text(interface.get("transport"))
        if url and binding:
            yield RemoteInterface(url=url, binding=binding.upper(), version="0.3")


def _version(text: str) -> str | None:
    """The dialect for a protocol version; None if we do not speak it."""
    major, _, minor = text.partition(".")
    if major == "1":
        return "1.0"
    return "0.3" if major == "0" and minor.partition(".")[0] in ("2", "3") else None


def _skills(value: Any) -> Iterator[RemoteSkill]:
    for each in _list(value):
        skill = _object(each)
        identity, name = _text(skill.get("id")), _text(skill.get("name"))
        if identity or name:
            yield RemoteSkill(
                id=identity or name,
                name=name or identity,
                description=_text(skill.get("description")),
                tags=_texts(skill.get("tags")),
                examples=_texts(skill.get("examples")),
            )


def _credentials(fields: Mapping[str, Any]) -> Iterator[CardCredential]:
    """A credential for each requirement that a single secret can meet, in the card's order."""
    schemes = _object(fields.get("securitySchemes"))
    required = [_object(_object(each).get("schemes")) for each in _list(fields.get("securityRequirements"))]
    required = required or [_object(each) for each in _list(fields.get("security"))]
    for names in required:
        if len(names) == 1:
            credential = _credential(_object(schemes.get(next(iter(names)))))
            if credential is not None:
                yield credential


def _credential(scheme: Mapping[str, Any]) -> CardCredential | None:
    key = _object(scheme.get("apiKeySecurityScheme")) or (scheme if scheme.get("type") == "apiKey" else {})
    if key:
        place, name = key.get("location") or key.get("in"), _text(key.get("name"))
        return CardCredential(scheme="api_key", header=name) if place == "header" and name else None
    auth = _object(scheme.get("httpAuthSecurityScheme")) or (scheme if scheme.get("type") == "http" else {})
    if auth:
        return CardCredential(scheme="bearer") if _text(auth.get("scheme")).lower() == "bearer" else None
    newer = {"oauth2SecurityScheme", "openIdConnectSecurityScheme"} & scheme.keys()
    return CardCredential(scheme="bearer") if newer or scheme.get("type") in ("oauth2", "openIdConnect") else None


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(each for each in _list(value) if isinstance(each, str))
