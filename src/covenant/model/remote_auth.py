"""The credentials for a remote agent or MCP server, as the files of the home declare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec


class RemoteAuth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The token itself (`token`, which wins), or the name of an environment variable that holds it (`token_env`)."""

    type: Literal["bearer"] = "bearer"
    token: str | None = None
    token_env: Annotated[str, msgspec.Meta(min_length=1)] | None = None

    def __repr__(self) -> str:
        """Leaves out the token, so that no log or traceback shows it."""
        return f"RemoteAuth(token_env={self.token_env!r})"

    def secret(self, environment: Mapping[str, str]) -> str | None:
        if self.token:
            return self.token
        return (environment.get(self.token_env) or None) if self.token_env else None
