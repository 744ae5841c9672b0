"""Cards in JSON, in two forms: that of A2A 1.0, and one that clients of 0.3 can read as well.

The combined form has every field of the 1.0 form, signatures included, and beside them the fields of 0.3. Whoever
drops what 1.0 does not know from it has the 1.0 form again, so its signatures still hold. For clients of 0.3 it names
only what they can use: their JSON-RPC dialect, and not the bindings that exist in 1.0 alone.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from covenant.model.card import JSONRPC, AgentCard, Capabilities, Interface, SecurityScheme

PROTOCOL_VERSION: Final = "1.0"
"""What both forms say. 0.3 clients take any text here."""


class CombinedCapabilities(Capabilities, frozen=True, kw_only=True):
    state_transition_history: bool


class CombinedScheme(SecurityScheme, frozen=True, kw_only=True):
    """Told apart by `type` in 0.3, by the name of the member in 1.0."""

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
    # As in the 1.0 form, with members of 0.3 inside.
    capabilities: CombinedCapabilities
    security_schemes: dict[str, CombinedScheme]  # type: ignore[assignment]  # read only: narrower is fine


def encode_card(card: AgentCard) -> bytes:
    """The form of A2A 1.0."""
    return msgspec.json.encode(card)


def encode_combined(card: AgentCard) -> bytes:
    """Both forms in one."""
    return msgspec.json.encode(combined(card))


def card_fields(card: AgentCard) -> dict[str, Any]:
    """The form of A2A 1.0 as plain values: what is signed, and what stands inside other answers."""
    fields: dict[str, Any] = msgspec.json.decode(encode_card(card))
    return fields


def combined(card: AgentCard) -> CombinedCard:
    preferred = _for_old_clients(card.supported_interfaces)
    return CombinedCard(
        **{name: getattr(card, name) for name in _SAME},
        protocol_version=PROTOCOL_VERSION,
        url=preferred.url,
        preferred_transport=preferred.protocol_binding,
        additional_interfaces=(Transport(preferred.url, preferred.protocol_binding),),
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


def wants_clean(version: str | None) -> bool:
    """Whether a caller that says this `A2A-Version` reads 1.0: `1.0`, any patch. `1` is what only older clients say."""
    return version is not None and (version == PROTOCOL_VERSION or version.startswith(f"{PROTOCOL_VERSION}."))


_SAME: Final = tuple(name for name in AgentCard.__struct_fields__ if name not in {"capabilities", "security_schemes"})


def _for_old_clients(interfaces: tuple[Interface, ...]) -> Interface:
    return next((one for one in interfaces if one.protocol_binding == JSONRPC), interfaces[0])


def _combined_scheme(scheme: SecurityScheme) -> CombinedScheme:
    auth = scheme.http_auth_security_scheme
    return CombinedScheme(type="http", scheme=auth.scheme, http_auth_security_scheme=auth)
