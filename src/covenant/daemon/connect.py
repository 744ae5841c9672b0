"""`covenant.connect`: from a URL, or a name in the home's `a2a_agents.json`, to a remote agent.

async with covenant.connect("https://agent.example/a2a") as remote:
    reply = await remote.send("Hello")
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

import covenant
from covenant.daemon.environment import environment, find_home, now_ms
from covenant.exchange.argument_checks import checks_arguments
from covenant.model.agent_card import RemoteCard
from covenant.model.errors import Invalid
from covenant.model.extras import not_installed
from covenant.outbound.address_guard import AddressGuard, NameServerResolver, SystemResolver
from covenant.outbound.http_fetcher import CallObserver, Fetcher
from covenant.outbound.outbound_settings import OutboundSettings
from covenant.outbound.remote.card_lookup import card_or_none, choose_interfaces, find_card, verified
from covenant.outbound.remote.remote_client import TIMEOUT_S, Remote, RemoteOptions
from covenant.outbound.remote.remote_registry import Credentials, RemoteEntry, RemoteRegistry
from covenant.outbound.urls import DNS_PORT, read_address

PRIVATE: Final = (
    "127.0.0.0/8",
    "::1/128",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "100.64.0.0/10",
    "fc00::/7",
)
"""The networks that `allow_private=True` allows. A cloud's metadata address is not among them."""

# Without a configured logger, log lines do not appear in the terminal.
logging.getLogger("covenant").addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of `connect`. `repr` shows no secret."""

    token: str | None = None
    token_env: str | None = None
    headers: Mapping[str, str] | None = None
    timeout_s: float | None = None
    poll_s: float = 3.0
    stream: bool | None = None
    verify: bool = False
    allow_private: bool | Sequence[str] = False
    trusted_origins: Sequence[str] = ()
    fetcher: Fetcher | None = None
    home: str | Path | None = None
    typed_by_user: bool = False
    """The user typed the URL, so its host may be called even at a private address, like a host in `a2a_agents.json`."""

    def __repr__(self) -> str:
        return "Options(…)"


class RemoteConnection:
    """Await it for a `Remote` that the caller closes, or enter it for one that closes itself."""

    def __init__(self, make: Callable[[], Awaitable[Remote]]) -> None:
        self._make = make
        self._remote: Remote | None = None

    def __await__(self) -> Generator[Any, None, Remote]:
        return self._make().__await__()

    async def __aenter__(self) -> Remote:
        self._remote = await self._make()
        return self._remote

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._remote is not None:
            await self._remote.close()


@checks_arguments
def connect(
    url_or_name: str,
    *,
    token: str | None = None,
    token_env: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    poll_s: float = 3.0,
    stream: bool | None = None,
    verify: bool = False,
    allow_private: bool | Sequence[str] = False,
    trusted_origins: Sequence[str] = (),
    fetcher: Fetcher | None = None,
    home: str | Path | None = None,
) -> RemoteConnection:
    """A remote agent by its URL, its card's URL, or its name in `a2a_agents.json`.

    `token` (or the variable `token_env`) is a bearer, or the API key that the card asks for; it and `headers` go to the
    origin of the URL and to `trusted_origins`, never to where only a card or a redirect leads. `verify` demands a card
    that is signed by a key from its own origin. `allow_private` lets private and loopback addresses be called: all of
    them, or those that are listed as in the setting `outbound.allow`; hosts in `a2a_agents.json` are allowed without
    it. A caller's own `fetcher` has its own guard and limits.
    """
    options = Options(
        token=token,
        token_env=token_env,
        headers=headers,
        timeout_s=timeout_s,
        poll_s=poll_s,
        stream=stream,
        verify=verify,
        allow_private=allow_private,
        trusted_origins=trusted_origins,
        fetcher=fetcher,
        home=home,
    )
    return RemoteConnection(lambda: open_remote(url_or_name, options))


async def open_remote(url_or_name: str, options: Options) -> Remote:
    async with AsyncExitStack() as stack:
        entry, fetcher, credentials = await stack.enter_async_context(_open_caller(url_or_name, options))
        lookup = find_card(fetcher, entry.url, credentials)
        card = await card_or_none(lookup, entry.url) if not options.verify else await verified(fetcher, await lookup)
        interfaces = choose_interfaces(card, entry.url, credentials.covers)
        remote_options = RemoteOptions(
            timeout_s=options.timeout_s or entry.timeout or TIMEOUT_S,
            poll_s=options.poll_s,
            stream=options.stream,
            chance=random.random,
            left_ms=lambda deadline_ms: deadline_ms - now_ms(),
        )
        close = stack.pop_all().aclose
        return Remote(interfaces, fetcher, credentials, card=card, options=remote_options, close=close)


async def open_card(url_or_name: str, options: Options, *, verify: bool) -> RemoteCard:
    """The card alone. Raises NoCard, and what fetching it raises."""
    async with _open_caller(url_or_name, options) as (entry, fetcher, credentials):
        card = await find_card(fetcher, entry.url, credentials)
        return await verified(fetcher, card) if verify else card


@asynccontextmanager
async def _open_caller(url_or_name: str, options: Options) -> AsyncIterator[tuple[RemoteEntry, Fetcher, Credentials]]:
    """The agent's entry, with the fetcher and the credentials that call it. A caller's own fetcher stays open."""
    entry = find_entry(url_or_name, options.home)
    credentials = _credentials(entry, options)
    if options.fetcher is not None:
        yield entry, options.fetcher, credentials
        return
    allow = PRIVATE if options.allow_private is True else tuple(options.allow_private or ())
    async with AsyncExitStack() as stack:
        try:
            outbound = await stack.enter_async_context(open_outbound(OutboundSettings(allow=allow)))
            fetcher = outbound.fetcher.allowing(*_private_places(url_or_name, entry, options))
        except ValueError as error:
            raise Invalid("bad_allow_list", str(error)) from error
        stack.push_async_callback(fetcher.close)
        yield entry, fetcher, credentials


def find_entry(url_or_name: str, home: str | Path | None) -> RemoteEntry:
    if "://" in url_or_name:
        return RemoteEntry(url=url_or_name)
    folder, _ = find_home(home, environment())
    return RemoteRegistry(folder).entry(url_or_name)


def _private_places(url_or_name: str, entry: RemoteEntry, options: Options) -> Sequence[str]:
    """The hosts that may be called even at a private address: those that the registry or the user names.

    A typed address allows every port of its host, since the card may name another port, as for gRPC.
    """
    if options.typed_by_user:
        return entry.host_and_port, entry.host_and_port.rpartition(":")[0]
    return (entry.host_and_port,) if "://" not in url_or_name else ()


def _credentials(entry: RemoteEntry, options: Options) -> Credentials:
    variables, token = environment(), options.token
    if token is None and options.token_env is not None:
        token = variables.get(options.token_env)
        if not token:
            raise Invalid(
                "no_token", f"the environment has no token in {options.token_env}; set it, or give another token_env"
            )
    return Credentials(
        entry.url,
        token=entry.token(variables) if token is None else token,
        headers={**entry.headers, **(options.headers or {})},
        trusted=options.trusted_origins,
    )


class Outbound(NamedTuple):
    guard: AddressGuard
    """Checks URLs that users give."""
    fetcher: Fetcher


@asynccontextmanager
async def open_outbound(settings: OutboundSettings, observer: CallObserver | None = None) -> AsyncIterator[Outbound]:
    """No connection is opened before the first call. Raises ValueError if an entry of `allow` cannot be read."""
    timeout_s = settings.connect_ms / 1000
    resolver = _resolver(settings, timeout_s)
    try:
        guard = AddressGuard(settings.allow, resolver=resolver, resolve_s=timeout_s)
        fetcher = Fetcher(guard, settings, user_agent=f"covenant/{covenant.__version__}", observer=observer)
        try:
            yield Outbound(guard, fetcher)
        finally:
            await fetcher.close()
    finally:
        resolver.close()


def _resolver(settings: OutboundSettings, timeout_s: float) -> SystemResolver | NameServerResolver:
    if not settings.name_servers:
        return SystemResolver()
    if find_spec("dns") is None:
        raise not_installed("outbound.name_servers", "peers", "dnspython")
    servers = [read_address(text, DNS_PORT) for text in settings.name_servers]
    return NameServerResolver(servers, timeout_s=timeout_s)
