"""What only the operator may do. Whoever else tries is in the audit before they are told so."""

from __future__ import annotations

from covenant.exchange.principal import Principal
from covenant.ledger.contract import Ledger
from covenant.ledger.machine.commands import Note
from covenant.model.errors import Forbidden


async def require_operator(ledger: Ledger, principal: Principal, what: str, *, action: str | None = None) -> None:
    if principal.operator:
        return
    await ledger.commit(
        Note(
            by=principal.agent,
            row={
                "type": "operator_required",
                "peer_display": principal.agent.display,
                "peer_pubkey_b58": principal.agent.pubkey,
                "what": what,
                "action": action,
            },
        )
    )
    raise Forbidden("operator_required", f"{what} requires the operator's token")
