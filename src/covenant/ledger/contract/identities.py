"""Identities, grants, tenants and their stored agents, and the audit of refusals and changes.

These registers are small, and every request reads them: a look-up only reads memory. It may see a change that is not
durable yet; a caller that awaits `durable` first sees only durable ones.
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

LAST: Final = 2**63 - 1
"""A place, and a time, after all others."""


class Register(enum.Enum):
    IDENTITIES = "identities"
    TENANTS = "tenants"
    AGENTS = "agents"
    SECRETS = "secrets"


class RegisterChange(NamedTuple):
    """`name`: the hash of an identity's token, a tenant, the tenant whose stored agents changed, or a secret's name."""

    register: Register
    name: str


class Resident(msgspec.Struct, frozen=True, gc=False):
    """An agent from code or a file, and the node that serves it. `alive`: that node is alive now."""

    node: str
    agent: CatalogueAgent
    alive: bool = True


class IdentityLedger(Commits, Protocol):
    def on_registers(self, callback: Callable[[RegisterChange], None]) -> None:
        """Registers a callback for each durable change of an identity, tenant, stored agent or secret, by any node.

        There may be any number of listeners.
        """

    def identity(self, token_sha256: str) -> Identity | None:
        """The identity that this token belongs to now."""

    def enrolled(self, agent: AgentId) -> AgentId | None:
        """The live identity with this display or this key, or None; it equals `agent` if both match."""

    def grants_of(self, subject: PublicKey, action: str) -> Sequence[Grant]:
        """The key's grants for the action, expired ones too. Their counts of uses may be outdated."""

    def tenant(self, name: str) -> Tenant | None: ...
    def tenant_of(self, token_sha256: str) -> Tenant | None:
        """The tenant that this token belongs to now."""

    def agent(self, tenant: str, agent_id: str) -> CatalogueAgent | None:
        """An agent that is stored for the tenant."""

    def agents(self, tenant: str) -> Sequence[CatalogueAgent]:
        """The agents that are stored for the tenant, oldest first."""

    async def announce(self, agents: Sequence[CatalogueAgent]) -> None:
        """Announces this node's agents from code and files to the other nodes, replacing its earlier announcement.

        Every living node knows it when this returns.
        """

    def residents(self) -> Sequence[Resident]:
        """The agents that other nodes have announced, unless those nodes are long gone.

        A change of them is reported to listeners as one of stored agents.
        """

    async def tenants(self) -> Sequence[Tenant]:
        """All tenants, oldest first."""

    async def identities(self) -> Sequence[Identity]: ...
    async def grants(self) -> Sequence[Grant]: ...


class AuditRecord(msgspec.Struct, frozen=True, gc=False):
    """`row` is the row's exact text. Each writer has its own chain; a ledger with one writer has one, unnamed.

    `place` is the row's position among the rows of all chains.
    """

    index: int
    timestamp_ms: int
    row: str
    chain: str = ""
    place: int = 0


class AuditMark(NamedTuple):
    """The rows of one chain that a purge would drop: their number, the last index, and the chain hash there."""

    rows: int
    through: int
    anchor_hash: str
    chain: str = ""


class AuditLedger(Commits, Protocol):
    async def audit_recent(
        self, issuer: PublicKey | None, limit: int, since_ms: int | None, before_ms: int = LAST, below: int = LAST
    ) -> Sequence[AuditRecord]:
        """The newest matching rows, oldest first. `below`: only rows at places before this one."""

    async def audited(self, timeout_ms: int) -> bool:
        """Waits until any node writes an audit row.

        Only rows after the beginning of the wait count: begin it, then read the rows, then await it.
        """

    async def audit_before(self, before_ms: int) -> Sequence[AuditMark]:
        """The rows that a purge would drop, chain by chain."""

    async def audit_heads(self) -> Sequence[AuditMark]:
        """The last row of each chain, if there are several. Another chain that has recorded it reveals a cut end."""

    async def audit_verify(self) -> AuditReport:
        """Verifies every chain from its beginning."""

    async def audit_verify_new(self) -> AuditReport:
        """Verifies only the rows that no verification has covered yet, as a start does."""
