"""Whether a worker serves a worker agent: external workers lease its tasks, and there may be none.

This daemon knows which workers are enrolled, and which have lately asked it for tasks or renewed a lease. It cannot
know which have asked another daemon on the same ledger; there, only a worker that is not enrolled is absent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from covenant.ledger.contract.identities import IdentityLedger
from covenant.model.ids import AgentId, PublicKey

QUIET_MS: Final = 60_000
"""A worker that was silent for longer is absent: an idle one asks every 20 seconds, a busy one renews every 30."""
REMEMBERED_MAX: Final = 10_000


class WorkerPresence:
    """Must be used on one event loop."""

    def __init__(self, ledger: IdentityLedger, monotonic_ms: Callable[[], int], *, shared: bool = False) -> None:
        """`shared`: other daemons use the same ledger."""
        self._ledger = ledger
        self._monotonic_ms = monotonic_ms
        self._shared = shared
        self._since_ms = monotonic_ms()
        self._asked_ms: OrderedDict[PublicKey, int] = OrderedDict()

    def note(self, agent: AgentId) -> None:
        """Notes that the worker has asked for tasks or renewed a lease."""
        self._asked_ms[agent.pubkey] = self._monotonic_ms()
        self._asked_ms.move_to_end(agent.pubkey)
        if len(self._asked_ms) > REMEMBERED_MAX:
            self._asked_ms.popitem(last=False)

    def absence(self, agent: AgentId) -> str:
        """The reason why no worker leases the agent's tasks, as text for the sender; empty if a worker may."""
        if self._ledger.enrolled(agent) != agent:
            return (
                f"no worker serves {agent.display}: no worker is enrolled; the task waits in its queue"
                f" (`covenant identities enroll {agent.display}` makes a worker's token)"
            )
        quiet_ms = self._monotonic_ms() - self._asked_ms.get(agent.pubkey, self._since_ms)
        if self._shared or quiet_ms < QUIET_MS:
            return ""
        return (
            f"no worker serves {agent.display} at the moment: none has asked for tasks in the last"
            f" {quiet_ms // 1000} seconds; the task waits in its queue"
        )
