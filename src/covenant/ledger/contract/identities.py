"""Who is known here: identities, grants, tenants and their stored agents, and the audit of what was refused and done.

These registers are small, and every request asks them: a look-up costs a look in memory. It may see a change that is
not durable yet; whoever waits for `durable` first is told only what is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from covenant.ledger.contract import Commits
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.grant import AuditReport, Grant, Identity
from covenant.model.ids import AgentId, PublicKey
from covenant.model.tenants import Tenant


class Register(enum.Enum):
    IDENTITIES = "identities"
    TENANTS = "tenants"
    AGENTS = "agents"


class RegisterChange(NamedTuple):
    """`name` is the hash of an identity's token, a tenant, or the tenant whose stored agents changed."""

    register: Register
    name: str


class IdentityLedger(Commits, Protocol):
    def on_registers(self, callback: Callable[[RegisterChange], None]) -> None:
        """Called when an identity, a tenant or a stored agent was changed, by whomever, and that is durable.

        For as many listeners as there are.
        """

    def identity(self, token_sha256: str) -> Identity | None:
        """Who holds this token now."""

    def enrolled(self, agent: AgentId) -> AgentId | None:
        """The live identity with this display or this key, if there is one; equal to `agent` if both agree."""

    def tenant(self, name: str) -> Tenant | None: ...
    def tenant_of(self, token_sha256: str) -> Tenant | None:
        """Whose token this is now."""

    def agent(self, tenant: str, agent_id: str) -> CatalogueAgent | None:
        """An agent that is stored for the tenant."""

    def agents(self, tenant: str) -> Sequence[CatalogueAgent]:
        """Those stored for the tenant, the oldest first."""

    async def tenants(self) -> Sequence[Tenant]:
        """The oldest first."""

    async def identities(self) -> Sequence[Identity]: ...
    async def grants(self) -> Sequence[Grant]: ...


LAST: Final = 2**63 - 1
"""A place, and a time, that nothing is beyond."""


class AuditRecord(msgspec.Struct, frozen=True, gc=False):
    """`row` is the row's exact text. Each writer has a chain of its own; a ledger with one writer has one, unnamed.

    `place` is the row's among those of all chains.
    """

    index: int
    timestamp_ms: int
    row: str
    chain: str = ""
    place: int = 0


class AuditMark(NamedTuple):
    """What a purge would drop of one chain: how many rows, through which index, and the chain hash there."""

    rows: int
    through: int
    anchor_hash: str
    chain: str = ""


class AuditLedger(Commits, Protocol):
    async def audit_recent(
        self, issuer: PublicKey | None, limit: int, since_ms: int | None, before_ms: int = LAST, below: int = LAST
    ) -> Sequence[AuditRecord]:
        """The newest rows that pass, oldest first. `below`: of places before this one."""

    async def audited(self, timeout_ms: int) -> bool:
        """Wait until a row is written to the audit, by whomever, from the first await on. For a look before it."""

    async def audit_before(self, before_ms: int) -> Sequence[AuditMark]:
        """What a purge would drop, chain by chain."""

    async def audit_heads(self) -> Sequence[AuditMark]:
        """The last row of each chain, if there are several: once it is in another chain, a cut end shows."""

    async def audit_verify(self) -> AuditReport:
        """Compute every chain again."""

    async def audit_verify_new(self) -> AuditReport:
        """Only the rows that no verification has covered yet: what a start does."""
