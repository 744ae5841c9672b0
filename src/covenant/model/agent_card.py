"""An agent's card: its name, the addresses where it is called, and its skills.

Names and nesting are those of A2A 1.0: encoded as JSON, a card is ProtoJSON in the form that is also signed. Fields
that the specification requires are always encoded; fields that it omits by default are omitted (its section 8.4.1).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

JSONRPC: Final = "JSONRPC"
HTTP_JSON: Final = "HTTP+JSON"
GRPC: Final = "GRPC"


class _Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The base of every struct in a card."""


class Interface(_Part, frozen=True, kw_only=True):
    """One address and binding of the agent. A caller must put `tenant`, if it is set, into each request."""

    url: str
    protocol_binding: str
    protocol_version: str
    tenant: str | None = None


class Provider(_Part, frozen=True, kw_only=True):
    organization: str
    url: str


class Extension(_Part, frozen=True, kw_only=True):
    uri: str
    description: str | None = None
    required: bool = False
    params: dict[str, Any] | None = None


class Capabilities(_Part, frozen=True, kw_only=True):
    streaming: bool
    push_notifications: bool
    extended_agent_card: bool
    extensions: tuple[Extension, ...] = ()


class CardSkill(_Part, frozen=True, kw_only=True):
    id: str
    name: str
    description: str
    tags: tuple[str, ...]
    examples: tuple[str, ...] = ()
    input_modes: tuple[str, ...] = ()
    output_modes: tuple[str, ...] = ()


class HttpAuth(_Part, frozen=True, kw_only=True):
    scheme: str
    description: str | None = None


class SecurityScheme(_Part, frozen=True, kw_only=True):
    http_auth_security_scheme: HttpAuth


class Scopes(_Part, frozen=True, kw_only=True):
    list: tuple[str, ...] = ()


class SecurityRequirement(_Part, frozen=True, kw_only=True):
    """A caller needs all of these schemes together. Of several requirements, one is enough."""

    schemes: dict[str, Scopes]


class Signature(_Part, frozen=True, kw_only=True):
    """A JWS over the card without its signatures: the protected header and the signature, each in base64url."""

    protected: str
    signature: str


class AgentCard(_Part, frozen=True, kw_only=True):
    name: str
    description: str
    supported_interfaces: tuple[Interface, ...]
    provider: Provider | None = None
    version: str
    documentation_url: str | None = None
    capabilities: Capabilities
    security_schemes: dict[str, SecurityScheme] = {}
    security_requirements: tuple[SecurityRequirement, ...] = ()
    default_input_modes: tuple[str, ...]
    default_output_modes: tuple[str, ...]
    skills: tuple[CardSkill, ...]
    signatures: tuple[Signature, ...] = ()


class RemoteInterface(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One address and binding from a remote agent's card. `version` is `1.0` or `0.3`."""

    url: str
    binding: str
    version: str
    tenant: str | None = None


class RemoteSkill(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    id: str
    name: str
    description: str = ""
    tags: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()


class CardCredential(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A credential that a card asks for. `header` is the header for an API key; None for a bearer token."""

    scheme: str
    header: str | None = None


class RemoteCard(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: str
    description: str = ""
    interfaces: tuple[RemoteInterface, ...] = ()
    """In the card's own order of preference."""
    streaming: bool | None = None
    """None: the card does not say."""
    extended: bool = False
    skills: tuple[RemoteSkill, ...] = ()
    credentials: tuple[CardCredential, ...] = ()
    """Any one of these is enough. Empty: the card asks for no credential."""
    signatures: tuple[dict[str, Any], ...] = ()
    fields: dict[str, Any] = {}
    """The whole card as it was received."""
    url: str = ""
    signed_by: str | None = None
    """The key whose signature on the card was verified."""
