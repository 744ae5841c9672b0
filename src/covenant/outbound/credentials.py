"""What a caller shows to a remote agent, and to whom: to the origin that it was given for, and to nobody else.

A card may name any address. A secret goes to the origin (scheme, host, port) of the URL that the caller itself named,
and to those that the caller trusts besides; a card cannot change that, nor can a redirect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from covenant.model.errors import Invalid
from covenant.model.agent_card import RemoteCard
from covenant.outbound.location import Location, Unreadable, read_url

# A card may name the header of its API key, but not one that means something else to us.
TAKEN: Final = frozenset(
    """
    accept a2a-extensions a2a-version content-type cookie covenant-chain covenant-deadline-ms covenant-depth
    idempotency-key last-event-id traceparent tracestate user-agent
    """.split()
)


class Credentials:
    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        trusted: Sequence[str] = (),
    ) -> None:
        """`url` is what the caller named; `trusted` are URLs whose origins may see the same. Raises Invalid."""
        self._token = token
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}
        self._origins = {_location(each).origin for each in (url, *trusted)}

    def __repr__(self) -> str:
        return "Credentials(…)"

    @property
    def given(self) -> bool:
        return self._token is not None or bool(self._headers)

    def covers(self, url: str) -> bool:
        try:
            return read_url(url).origin in self._origins
        except Unreadable:
            return False

    def headers(self, url: str, card: RemoteCard | None = None) -> dict[str, str]:
        """What goes along to this URL; nothing to another origin."""
        if not self.covers(url):
            return {}
        if self._token is None:
            return dict(self._headers)
        header, value = "authorization", f"Bearer {self._token}"
        for wanted in card.credentials[:1] if card is not None else ():
            if wanted.header is not None and wanted.header.lower() not in TAKEN:
                header, value = wanted.header.lower(), self._token
        return {header: value, **self._headers}


def _location(url: str) -> Location:
    try:
        return read_url(url)
    except Unreadable as error:
        raise Invalid("bad_url", f"this URL cannot be called: {error}") from error
