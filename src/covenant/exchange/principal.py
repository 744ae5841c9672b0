"""Who is calling: the operator, or an identity. Decides what a caller may look at before anything is looked up."""

from __future__ import annotations

import msgspec

from covenant.model.ids import AgentId, PublicKey


class Principal(msgspec.Struct, frozen=True, gc=False):
    agent: AgentId
    operator: bool
    token_sha256: str

    @property
    def viewer(self) -> PublicKey | None:
        """Whose tasks are visible: one's own; all, to the operator."""
        return None if self.operator else self.agent.pubkey
