"""The registers as decisions read them. Uses of grants are rows of their own: they change with every use."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from covenant.ledger.postgres.missing_rows import Missing, WantUses
from covenant.ledger.postgres.registers import Registers
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.grant import Grant, Identity
from covenant.model.ids import PublicKey
from covenant.model.tenants import Tenant


class RegisterView:
    registers: Registers

    def __init__(self) -> None:
        self._uses: dict[str, int] = {}
        self.uses_put: dict[str, int] = {}

    def load_uses(self, signature: str, used: int) -> None:
        self._uses.setdefault(signature, used)

    def use_grant(self, signature: str) -> None:
        self._uses[signature] = self.uses_put[signature] = self._uses[signature] + 1

    def grants(self, subject: PublicKey, action: str) -> Sequence[Grant]:
        return [self._with_uses(grant) for grant in self.registers.grants(subject, action)]

    def grant(self, signature_b58: str) -> Grant | None:
        return self.registers.grant(signature_b58)

    def _with_uses(self, grant: Grant) -> Grant:
        if grant.max_uses is None:
            return grant
        used = self._uses.get(grant.signature_b58)
        if used is None:
            raise Missing(WantUses(grant.signature_b58))
        return replace(grant, used=used)

    def identity(self, token_sha256: str) -> Identity | None:
        return self.registers.identity(token_sha256)

    def identities(self, name: str) -> Sequence[Identity]:
        return self.registers.identities(name)

    def identities_revoked_before(self, before_ms: int) -> int:
        return self.registers.identities_revoked_before(before_ms)

    def grants_revoked_before(self, before_ms: int) -> int:
        return self.registers.grants_revoked_before(before_ms)

    def tenant(self, name: str) -> Tenant | None:
        return self.registers.tenant(name)

    def tenant_count(self) -> int:
        return self.registers.tenant_count()

    def agent(self, tenant: str, agent_id: str) -> CatalogueAgent | None:
        return self.registers.agent(tenant, agent_id)

    def agent_count(self, tenant: str) -> int:
        return self.registers.agent_count(tenant)
