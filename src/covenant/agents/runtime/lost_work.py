"""Work whose holder is lost: leases that an earlier run of a daemon, or another node, had taken for its agents.

Only the pool's leases name the run that took them, so only the work of hosted agents is found here. The agent's
`on_lost` decides about it. Held work is marked: watchers of its task see it, and an operator decides within a time
limit. The ledger keeps the mark and the bound, so a further restart neither repeats nor prolongs them. Work that its
own job has held, such as that of a changed function, is left to the operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Final, Protocol

from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import QueueEntry, QueueQuery
from covenant.ledger.machine.commands import Interrupt, Repair
from covenant.ledger.machine.states import LEASED
from covenant.model.agent_definition import OnLost
from covenant.model.errors import Conflict, NotFound, Refusal
from covenant.model.ids import AgentId, LeaseId, PublicKey
from covenant.model.retry_policy import ForceError, Posture, RepairCommand, Requeue

ATTEMPTS_MAX: Final = 3
"""How often lost work begins again by itself, unless its agent has more attempts; after that an operator decides."""
LOOK_S: Final = 2.0
"""How often the number of lost holders is read: another node may be lost at any time."""
ROUNDS_MAX: Final = 30
"""After this many rounds the lost work itself is read again, even if its count is the same."""
LOST_AT_ONCE_MAX: Final = 10_000
STOPPED: Final = "the daemon stopped while the agent worked"
OUTLOOKS: Final[Mapping[OnLost, str]] = {
    "hold": "",
    "fail": "the task fails when the daemon starts again",
    "requeue": "the work begins again when the daemon starts again",
}
"""What happens to work that a stop interrupted; empty: an operator decides."""

log = logging.getLogger(__name__)


class LossPolicy(Protocol):
    """The declaration of an agent about its lost work."""

    @property
    def identity(self) -> AgentId: ...
    @property
    def on_lost(self) -> OnLost: ...
    @property
    def follows(self) -> bool: ...
    @property
    def agent(self) -> object: ...


def attempts_max(agent: LossPolicy) -> int:
    """The most attempts at a turn of the agent. An agent with retries of its own has `attempts`."""
    return max(ATTEMPTS_MAX, getattr(agent.agent, "attempts", ATTEMPTS_MAX))


class LostWork:
    def __init__(self, ledger: Ledger, agents: Mapping[PublicKey, LossPolicy], hold_ms: int) -> None:
        self._ledger = ledger
        self._agents = agents
        self._hold_ms = hold_ms
        self._check_now = asyncio.Event()
        self._count = 0
        self._rounds_left = 0
        self._held: set[LeaseId] = set()
        self._unserved: set[LeaseId] = set()

    def check_again(self) -> None:
        """Decides about held work again: a new or changed agent may have another `on_lost`."""
        self._rounds_left = 0
        self._held.clear()
        self._check_now.set()

    async def run(self) -> None:
        """Runs until canceled."""
        refused: str | None = None
        while True:
            self._check_now.clear()
            try:
                await self.step()
                refused = None
            except Refusal as refusal:
                if refusal.code != refused:
                    log.warning("agent.lost_refused", extra={"code": refusal.code, "reason": refusal.message})
                refused = refusal.code
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._check_now.wait(), LOOK_S)

    async def step(self) -> None:
        """Runs one round. It reads only a count, unless there may be new lost work."""
        count = (await self._ledger.counts()).holders_lost
        if count == self._count and self._rounds_left > 0:
            self._rounds_left -= 1
            return
        query = QueueQuery(limit=min(count, LOST_AT_ONCE_MAX), state_filter=LEASED.wire_name)
        found = (await self._ledger.queue(query)).tasks if count else ()
        unserved, self._unserved, contested, ended = self._unserved, set(), False, 0
        for entry in found:
            lease_id, agent = entry.lease_id, self._agents.get(entry.task.recipient.pubkey)
            if not entry.holder_lost or lease_id is None or lease_id in self._held:
                continue
            if agent is None and lease_id not in unserved:
                # The agent may only be late: such work is held when it is seen for the second time.
                self._unserved.add(lease_id)
            elif agent is not None and agent.on_lost != "hold" and await self._is_held(entry):
                self._held.add(lease_id)
            elif not await self._handle(agent, entry, lease_id):
                contested = True
            elif lease_id not in self._held:
                ended += 1  # no longer counted; as many may be lost before the next round
        self._count, self._rounds_left = count - ended, 0 if self._unserved or contested else ROUNDS_MAX

    async def _is_held(self, lost: QueueEntry) -> bool:
        """Whether the work's own job has held it for an operator."""
        entry = await self._ledger.entry(lost.task.id)
        hold = entry.hold if entry is not None else None
        if hold is None:
            return False
        return hold.reason != STOPPED if hold.by_agent is None else hold.by_agent

    async def _handle(self, agent: LossPolicy | None, entry: QueueEntry, lease_id: LeaseId) -> bool:
        """Decides about one lost lease. False: a node or an operator was faster; the next round checks again."""
        task_id, recipient = entry.task.id, entry.task.recipient
        on_lost: OnLost = agent.on_lost if agent is not None else "hold"
        if on_lost == "requeue" and agent is not None and not agent.follows and entry.attempt >= attempts_max(agent):
            on_lost = "hold"
        try:
            if on_lost == "hold":
                hold = Interrupt(
                    task_id=task_id, holder=recipient, lease_id=lease_id, reason=STOPPED, hold_ms=self._hold_ms
                )
                await self._ledger.commit(hold)
                self._held.add(lease_id)
            else:
                command: RepairCommand = Requeue(Posture.IDEMPOTENT, lease_id)
                if on_lost == "fail":
                    command = ForceError("the agent was lost while it worked on this task", lease_id)
                reason = f"its holder was lost, and the agent says on_lost={on_lost}"
                await self._ledger.commit(Repair(task_id=task_id, by=recipient, command=command, reason=reason))
        except (Conflict, NotFound):
            return False
        log.info("agent.lost", extra={"task_id": task_id, "on_lost": on_lost, "attempts": entry.attempt})
        return True
