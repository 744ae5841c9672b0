"""The services of the exchange over a ledger in memory, with agents that nobody runs: their tasks stay queued."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from covenant.daemon.environment import now_ms
from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.access.identities import operator_agent
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.exchange.access.tenants import Caller, TenantAccess
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.native import Conversations, NativeRun, NativeRuns
from covenant.exchange.task_lookup import TaskLookup
from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.embedded.open import memory_ledger
from covenant.model.agent_definition import AgentDefinition
from covenant.model.content import Text
from covenant.model.ids import PublicKey
from covenant.model.settings import A2aSettings
from covenant.model.tenants import DEFAULT
from covenant.seal.keys import new_private_key

AGENT = "helper"


class NoWorkers:
    def reserve(self, recipient: PublicKey) -> None:
        """Nobody here works for anybody."""


class Services(NamedTuple):
    ledger: Ledger
    catalogue: Catalogue
    a2a: A2AExchange
    tasks: TaskLookup
    """As a tenant sees them."""
    all_tasks: TaskLookup
    """As the operator sees them."""
    runs: NativeRuns
    conversations: Conversations
    mine: Caller
    other: Caller
    operator: Caller

    async def run(self, text: str = "hello", key: str | None = None) -> str:
        """The id of a task that was submitted for `mine`."""
        stream = await self.runs.start(self.mine, NativeRun(parts=(Text(text),), agent=AGENT), key)
        with stream:
            return stream.first.task.id


@asynccontextmanager
async def open_services() -> AsyncIterator[Services]:
    ledger, key = await memory_ledger(clock=now_ms), new_private_key()
    operator = operator_agent("operator@test", key)
    tenants, catalogue = TenantAccess(ledger, operator, IdentityAuth(ledger, operator)), Catalogue(ledger, key)
    await tenants.open()
    principal = Principal(operator, operator=True, token_sha256="operator's hash")
    other = (await tenants.add(principal, "other")).tenant
    default = tenants.tenant(DEFAULT)
    assert default is not None
    for tenant in (DEFAULT, "other"):
        catalogue.add_resident(tenant, AgentDefinition(id=AGENT, kind="worker"), "code")
    a2a = A2AExchange(ledger, catalogue, NoWorkers(), uuid_source(), A2aSettings())
    tasks = TaskLookup(ledger, catalogue)
    yield Services(
        ledger,
        catalogue,
        a2a,
        tasks,
        TaskLookup(ledger, catalogue, principal),
        NativeRuns(catalogue, a2a, tasks, uuid_source()),
        Conversations(ledger, catalogue, uuid_source()),
        mine=Caller(default, "my hash", operator=False, name="client@default"),
        other=Caller(other, "other hash", operator=False, name="client@other"),
        operator=Caller(default, "operator's hash", operator=True, name="operator@test"),
    )
    await ledger.close()
