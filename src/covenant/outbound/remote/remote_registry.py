"""The remote agents that an operator has named: `a2a_agents.json` in the home.

    {"agents": {"weather": {"url": "https://weather.example/a2a",
                            "auth": {"type": "bearer", "token_env": "WEATHER_TOKEN"},
                            "timeout": 60, "headers": {"X-Team": "blue"}, "enabled": true,
                            "tenants": ["default", "acme"]}}}

Only `url` is required: the agent's address, or its card's. An entry belongs to the first tenant, `default`, unless it
lists its `tenants`: for any other tenant there is no such agent. A token is in the file (`token`, which takes
precedence) or in a variable of the environment (`token_env`). An entry that cannot be used is refused by its name; the
others still work. The file is read again when it has changed; without a file there are no remote agents.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from covenant.model.agent_card import RemoteCard
from covenant.model.agent_definition import explain_invalid
from covenant.model.errors import Invalid, NotFound
from covenant.model.remote_auth import RemoteAuth
from covenant.model.tenants import DEFAULT
from covenant.outbound.urls import InvalidUrl, host_text, origin_of, read_url
from covenant.wire.json_input import decode

FILE: Final = "a2a_agents.json"
FILE_BYTES_MAX: Final = 1024 * 1024
# A card may name the header of its API key, but not one that means something else to us.
RESERVED_HEADERS: Final = frozenset(
    """
    accept a2a-extensions a2a-version content-type cookie covenant-chain covenant-deadline-ms covenant-depth
    idempotency-key last-event-id traceparent tracestate user-agent
    """.split()
)


class RemoteEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: Annotated[str, msgspec.Meta(min_length=1)]
    auth: RemoteAuth | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None
    headers: dict[str, str] = {}
    enabled: bool = True
    tenants: tuple[str, ...] = (DEFAULT,)
    """The tenants whose agents and callers may call it."""

    def __repr__(self) -> str:
        return f"RemoteEntry(url={self.url!r})"

    def token(self, environment: Mapping[str, str]) -> str | None:
        return self.auth.secret(environment) if self.auth is not None else None

    def missing_variable(self, environment: Mapping[str, str]) -> str | None:
        """The environment variable that should hold the token and is not set."""
        return self.auth.token_env if self.auth is not None and self.token(environment) is None else None

    @property
    def host_and_port(self) -> str:
        """Host and port, in the form of `outbound.allow`. The operator wrote the entry, so this place may be called."""
        return host_and_port(self.url)


def host_and_port(url: str) -> str:
    """Host and port. Raises InvalidUrl."""
    location = read_url(url)
    return f"{host_text(location.host)}:{location.port}"


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    agents: dict[str, Any] = {}


_file: Final = msgspec.json.Decoder(_File)


class RemoteRegistry:
    """The entries, as the file has them now."""

    def __init__(self, home: Path, *, on_read: Callable[[RemoteRegistry], None] = lambda _: None) -> None:
        """`on_read` is called when the file has been read again."""
        self.path = home / FILE
        self._on_read = on_read
        self._stamp: tuple[int, int, int] | None = None
        self._entries: dict[str, RemoteEntry] = {}
        self._problems: dict[str, str] = {}
        self._unreadable: str | None = None

    def __iter__(self) -> Iterator[str]:
        self._refresh()
        return iter([name for name, entry in self._entries.items() if entry.enabled])

    @property
    def problems(self) -> Mapping[str, str]:
        """The problems, by the name of the entry or of the file."""
        self._refresh()
        return {self.path.name: self._unreadable} if self._unreadable is not None else dict(self._problems)

    def has(self, name: str) -> bool:
        """False only if the file can be read and has no entry of this name."""
        self._refresh()
        return self._unreadable is not None or name in self._problems or name in self._entries

    def entry(self, name: str) -> RemoteEntry:
        """Raises NotFound for an unknown name, and Invalid for an entry that cannot be used."""
        self._refresh()
        if self._unreadable is not None:
            raise Invalid("bad_registry", self._unreadable)
        if name in self._problems:
            raise Invalid("bad_registry", self._problems[name])
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(sorted(self._entries)) or "none"
            raise NotFound("unknown_remote", f"there is no remote agent {name!r} in {self.path}; it has {known}")
        if not entry.enabled:
            raise Invalid(
                "remote_disabled", f"the remote agent {name!r} is disabled in {self.path}; set `enabled` to true there"
            )
        return entry

    def entry_of(self, tenant: str, name: str) -> RemoteEntry:
        """As `entry`, for a tenant.

        The refusal names no other entry and no file, since the caller may be a stranger.
        """
        try:
            entry = self.entry(name)
        except NotFound:
            raise _unknown(name) from None
        except Invalid as wrong:
            if not self._may_know(tenant, name):
                raise _unknown(name) from None
            raise Invalid(
                wrong.code, f"the entry {name!r} of {FILE} cannot be used, or is disabled; `covenant doctor` says why"
            ) from wrong
        if tenant not in entry.tenants:
            raise _unknown(name)
        return entry

    def names_of(self, tenant: str) -> frozenset[str]:
        self._refresh()
        return frozenset(name for name, entry in self._entries.items() if entry.enabled and tenant in entry.tenants)

    @property
    def tenants(self) -> frozenset[str]:
        self._refresh()
        return frozenset(name for entry in self._entries.values() if entry.enabled for name in entry.tenants)

    def _may_know(self, tenant: str, name: str) -> bool:
        """Whether a tenant may learn that an entry exists which cannot be used."""
        entry = self._entries.get(name)
        return tenant == DEFAULT if entry is None else tenant in entry.tenants

    def _refresh(self) -> None:
        try:
            found = os.stat(self.path)  # noqa: PTH116  (one system call, on the way of every call)
        except FileNotFoundError:
            self._stamp, self._entries, self._problems, self._unreadable = None, {}, {}, None
            return
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        if stamp != self._stamp:
            self._stamp = stamp
            self._read()
            self._on_read(self)

    def _read(self) -> None:
        self._entries, self._problems, self._unreadable = {}, {}, None
        try:
            data = self.path.read_bytes()
            if len(data) > FILE_BYTES_MAX:
                raise Invalid("too_large", f"has more than {FILE_BYTES_MAX} bytes")
            agents = decode(_file, data).agents
        except (OSError, Invalid) as error:
            self._unreadable = f"{self.path} cannot be read: {explain_invalid(str(error), _File)}"
            return
        for name, fields in agents.items():
            try:
                entry = msgspec.convert(fields, RemoteEntry)
                read_url(entry.url)
            except msgspec.ValidationError as error:
                self._note_problem(name, explain_invalid(str(error), RemoteEntry))
            except InvalidUrl as error:
                self._note_problem(name, f"/url: {error}")
            else:
                self._entries[name] = entry

    def _note_problem(self, name: str, why: str) -> None:
        self._problems[name] = f"{self.path}: the entry {name!r} cannot be used: {why}"


def _unknown(name: str) -> NotFound:
    return NotFound("unknown_remote", f"there is no remote agent {name[:100]!r} here")


class Credentials:
    """A caller's secret for a remote agent, sent to the origin (scheme, host, port) of the URL that the caller named.

    It also goes to the other origins that the caller trusts. Neither a card nor a redirect can add one.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        trusted: Sequence[str] = (),
    ) -> None:
        """`url` is the URL that the caller named; `trusted` are URLs whose origins may get the same secret. Raises
        Invalid.
        """
        self._token = token
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}
        try:
            self._origins = {read_url(each).origin for each in (url, *trusted)}
        except InvalidUrl as error:
            raise Invalid("bad_url", f"this URL cannot be called: {error}") from error

    def __repr__(self) -> str:
        return "Credentials(…)"

    @property
    def has_secret(self) -> bool:
        return self._token is not None or bool(self._headers)

    def covers(self, url: str) -> bool:
        return origin_of(url) in self._origins

    def headers(self, url: str, card: RemoteCard | None = None) -> dict[str, str]:
        """The headers for this URL; none for an origin that is not trusted."""
        if not self.covers(url):
            return {}
        if self._token is None:
            return dict(self._headers)
        header, value = "authorization", f"Bearer {self._token}"
        for wanted in card.credentials[:1] if card is not None else ():
            if wanted.header is not None and wanted.header.lower() not in RESERVED_HEADERS:
                header, value = wanted.header.lower(), self._token
        return {header: value, **self._headers}
