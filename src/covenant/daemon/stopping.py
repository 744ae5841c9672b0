"""A mailbox that can be told to stop handing out work, while everything else goes on.

Results, renewals and reads are served until the doors close: stopping must not make anybody lose what they did.
"""

from __future__ import annotations

from covenant.exchange.mailbox import MailboxExchange
from covenant.exchange.principal import Principal
from covenant.ledger.machine.commands import Leased
from covenant.model.errors import Unavailable


class StoppableExchange(MailboxExchange):
    leasing = True

    async def take(
        self,
        principal: Principal,
        *,
        everyone: bool = False,
        count: int = 1,
        wait_ms: int = 0,
        request_id: str | None = None,
    ) -> Leased:
        if not self.leasing:
            raise Unavailable("stopping", "the daemon is stopping; ask again", retry_after_ms=1_000)
        return await super().take(principal, everyone=everyone, count=count, wait_ms=wait_ms, request_id=request_id)
