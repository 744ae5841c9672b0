"""A whole daemon in the test's own process, built by the daemon's own wiring: `DaemonUnderTest`.

    async with open_daemon_under_test(tmp_path / "home", echo, a2a={"publish": "echo"}) as daemon:
        response = await daemon.ask("GET", "/healthz")

Sections of the settings are given by name. HTTP and gRPC listen on free ports. No signal is handled, and the archive is
written in this process. `clock`: a clock of the test's own; nothing then becomes due unless it is moved.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2

from covenant.agents.agent_loader import LoadedAgent, load_agent
from covenant.agents.api import Agent
from covenant.agents.runtime.job import RunnableAgent
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.daemon.home import SOCKET_NAME, TOKEN_NAME, read_token
from covenant.daemon.lifecycle import serving
from covenant.daemon.settings import Settings
from covenant.daemon.settings_loader import sections
from covenant.daemon.telemetry import Log
from covenant.daemon.wiring.daemon import Daemon, open_daemon
from covenant.daemon.wiring.storage import SYSTEM_CLOCKS, Clocks
from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.access.identities import IdentityAdmin
from covenant.exchange.access.principals import Principal
from covenant.exchange.access.tenants import TenantAccess
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.mailbox import MailboxExchange
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.model.agent_definition import AgentDefinition
from covenant.model.tenants import DEFAULT, TenantLimits
from tests.engine_under_test import ledger_settings
from tests.ledger_contract.fake_clock import FakeClock
from tests.waits import BOUND_S

NO_AUTHORITIES: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For a client of plain HTTP: reading the authorities of the system takes as long as opening a daemon."""


def make_settings(home: Path, **chosen: dict[str, Any]) -> Settings:
    """Settings with these values by section, and free ports."""
    given: dict[str, dict[str, Any]] = {"http": {"port": 0}, "grpc": {"port": 0}, "ledger": ledger_settings(home)}
    kinds = sections()
    values = {name: {**given.get(name, {}), **chosen.pop(name, {})} for name in kinds}
    assert not chosen, f"no such sections: {', '.join(chosen)}"
    return Settings(home=home, **{name: kind(**values[name]) for name, kind in kinds.items()})


@dataclass(frozen=True, slots=True)
class DaemonUnderTest:
    daemon: Daemon
    http: httpx2.AsyncClient
    """Calls with the operator's token unless another one is given."""
    tokens: dict[str, str] = field(default_factory=dict)
    """Of the tenants that were added, by name."""

    @property
    def home(self) -> Path:
        return self.daemon.base.settings.home

    @property
    def token(self) -> str:
        """The operator's, which is the first tenant's too."""
        return read_token(self.home / TOKEN_NAME)

    @property
    def url(self) -> str:
        return self.daemon.base.listeners.url

    @property
    def port(self) -> int:
        return self.daemon.base.listeners.http_at[1]

    @property
    def grpc_port(self) -> int:
        assert self.daemon.base.listeners.grpc is not None, "grpc is not switched on"
        return self.daemon.base.listeners.grpc.port

    @property
    def socket(self) -> Path:
        return self.home / SOCKET_NAME

    @property
    def ledger(self) -> EmbeddedLedger:
        ledger = self.daemon.base.storage.ledger
        assert isinstance(ledger, EmbeddedLedger)
        return ledger

    @property
    def operator(self) -> Principal:
        return self.daemon.base.storage.operator

    @property
    def catalogue(self) -> Catalogue:
        return self.daemon.base.access.catalogue

    @property
    def tenants(self) -> TenantAccess:
        return self.daemon.base.access.tenant_auth.tenancy

    @property
    def identities(self) -> IdentityAdmin:
        return self.daemon.base.access.identity_admin

    @property
    def mailbox(self) -> MailboxExchange:
        return self.daemon.base.access.mailbox

    @property
    def workers(self) -> WorkerPool:
        return self.daemon.agents.workers

    @property
    def a2a(self) -> A2AExchange:
        return self.daemon.agents.exchange

    def add_agent(self, agent: Agent, tenant: str = DEFAULT) -> None:
        """Have an agent work for a tenant from now on."""
        self.serve(*load_agent(agent), tenant)

    def serve(self, definition: AgentDefinition, body: RunnableAgent, tenant: str = DEFAULT) -> None:
        self.catalogue.add_resident(tenant, definition, "code")
        self.workers.register(
            self.catalogue.identity(tenant, definition.id),
            body,
            concurrency=definition.concurrency,
            timeout_ms=definition.timeout_ms,
            idempotent=definition.idempotent,
            on_lost=definition.on_lost,
        )

    async def add_tenant(self, name: str, *agents: Agent, **limits: int) -> str:
        """A new tenant with these agents; its token."""
        self.tokens[name] = token = (await self.tenants.add(self.operator, name, TenantLimits(**limits))).token
        for agent in agents:
            self.add_agent(agent, name)
        return token

    async def ask(self, method: str, path: str, *, token: str | None = None, **more: Any) -> httpx2.Response:
        """`token`: the operator's unless another is given; "" for none."""
        headers = dict(more.pop("headers", {}))
        if token != "":
            headers.setdefault("authorization", f"Bearer {token or self.token}")
        return await self.http.request(method, path, headers=headers, **more)


@asynccontextmanager
async def open_daemon_under_test(
    home: Path,
    *agents: Agent,
    clock: FakeClock | None = None,
    settings: Settings | None = None,
    serve: bool = True,
    **chosen: dict[str, Any],
) -> AsyncIterator[DaemonUnderTest]:
    """`serve=False`: everything is built and bound, and nothing runs."""
    served = [LoadedAgent(*load_agent(agent), Path(__file__)) for agent in agents]
    clocks = SYSTEM_CLOCKS if clock is None else Clocks(clock, clock.monotonic_ms)
    settings = settings or make_settings(home, **chosen)
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(
            open_daemon(settings, Log(), served=served, clocks=clocks, archive_process=False)
        )
        if serve:
            await stack.enter_async_context(serving(daemon))
        http = httpx2.AsyncClient(base_url=daemon.base.listeners.url, verify=NO_AUTHORITIES, timeout=BOUND_S)
        yield DaemonUnderTest(daemon, await stack.enter_async_context(http))
