"""A card as a caller needs it: what a stranger says of itself, read from any version of the protocol.

Only a name and a version are sure to be there. What is said is claimed, not proven.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Way(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One way to call an agent, as its card has it. `version` is `1.0` or `0.3`."""

    url: str
    binding: str
    version: str
    tenant: str | None = None


class Offered(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A skill."""

    id: str
    name: str
    description: str = ""
    tags: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()


class Credential(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """How a card wants a secret to be shown. `header`: the one that an API key goes into; None for a bearer."""

    scheme: str
    header: str | None = None


class RemoteCard(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: str
    description: str = ""
    ways: tuple[Way, ...] = ()
    """In the card's own order of preference."""
    streaming: bool | None = None
    """None where the card does not say."""
    extended: bool = False
    skills: tuple[Offered, ...] = ()
    credentials: tuple[Credential, ...] = ()
    """Any one of these is enough; none: nothing is asked for."""
    signatures: tuple[dict[str, Any], ...] = ()
    fields: dict[str, Any] = {}
    """All of it, as it came."""
    url: str = ""
    """Where it was found."""
    signed_by: str | None = None
    """Whose signature was checked, and held."""
