"""Asking an instance who it is: one public document, signed by the key that its id is made of.

    GET <url>/api/v1/a2a/identity   →   {"name": …, "keys": its bundle of keys (docs/formats/envelope.md)}

What is returned holds: the id is that of the key, and the key has signed all of it but the name. That says who somebody
claims to be, not who is on the line: anybody can show another's public keys. Only an answered challenge proves more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from covenant.model.errors import CovenantError, Invalid
from covenant.model.peers.instance import KeyBundle, negotiate, parse_instance_id
from covenant.outbound.fetching import Fetcher
from covenant.peers.discovery.candidate import shown_name
from covenant.peers.discovery.settings import root_of
from covenant.peers.line import IDENTITY
from covenant.seal.identity import bundle_holds
from covenant.wire.peers import decode_introduction

TOTAL_MS: Final = 5_000

WhyNot = Literal["no_identity", "version_not_supported", "unverified_keys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    url: str
    """In its one spelling."""
    bundle: KeyBundle
    name: str
    """Not signed; may be empty."""


class NotShown(CovenantError):
    """There is an answer, and it is not an identity that we could take."""

    def __init__(self, code: WhyNot, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


async def ask_identity(fetcher: Fetcher, url: str, now_ms: Callable[[], int]) -> Shown:
    """Raises NotShown, and what fetching raises: AddressRefused, CallFailed. ValueError if `url` is none."""
    root = root_of(url)
    asked = root + IDENTITY
    answer = await fetcher.fetch("GET", asked, headers={"accept": "application/json"}, total_ms=TOTAL_MS)
    if answer.url != asked:
        raise NotShown("no_identity", "it sends on to somebody else")
    if answer.status != 200:
        raise NotShown("no_identity", f"answered {answer.status} where an instance shows its keys")
    try:
        shown = decode_introduction(answer.body)
    except Invalid as error:
        raise NotShown("no_identity", f"what it shows is not who an instance is: {error.message}") from error
    bundle = shown.keys
    if negotiate(bundle.versions) is None:
        raise NotShown("version_not_supported", f"speaks versions {', '.join(map(str, bundle.versions)) or 'none'}")
    if not bundle_holds(bundle, parse_instance_id(bundle.id), now_ms()):
        raise NotShown("unverified_keys", "the keys that it showed do not hold")
    return Shown(url=root, bundle=bundle, name=shown_name(shown.name))
