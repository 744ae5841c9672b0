"""The registers as decisions read them. Uses of grants are rows of their own: they change with every use."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from covenant.ledger.postgres.missing_rows import LoadedRows, WantUses
from covenant.ledger.postgres.registers import Registers
from covenant.model.grant import Grant
from covenant.model.ids import PublicKey


class RegisterView(LoadedRows):
    def __init__(self, registers: Registers) -> None:
        self.registers = registers
        self.grant, self.grants_revoked_before = registers.grant, registers.grants_revoked_before
        self.identity, self.identities = registers.identity, registers.identities
        self.identities_revoked_before = registers.identities_revoked_before
        self.tenant, self.tenant_count = registers.tenant, registers.tenant_count
        self.agent, self.agent_count = registers.agent, registers.agent_count
        self.peer, self.peer_named, self.token_revoked = registers.peer, registers.peer_named, registers.token_revoked
        self.uses_put: dict[str, int] = {}

    def use_grant(self, signature: str) -> None:
        want = WantUses(signature)
        self.uses_put[signature] = used = self.loaded(want) + 1
        self.load(want, used)

    def grants(self, subject: PublicKey, action: str) -> Sequence[Grant]:
        return [self._with_uses(grant) for grant in self.registers.grants(subject, action)]

    def _with_uses(self, grant: Grant) -> Grant:
        if grant.max_uses is None:
            return grant
        return replace(grant, used=self.loaded(WantUses(grant.signature_b58)))

    def peer_count(self) -> int:
        return len(self.registers.peers)
