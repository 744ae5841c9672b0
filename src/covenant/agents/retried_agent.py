"""An agent whose failed turns begin again as its definition says.

A function has its own attempts (`Agent(attempts=…)`), chosen by exceptions. Here the code of the failure decides.
"""

from __future__ import annotations

from typing import Final

from covenant.agents.runtime.job import Job, RunnableAgent
from covenant.agents.runtime.turn_limits import recall_usage
from covenant.model.agent_definition import Retries
from covenant.model.ids import LeaseId
from covenant.model.rate_limits import Backoff
from covenant.model.retry_policy import AttemptPolicy


class RetriedAgent:
    def __init__(self, body: RunnableAgent, retries: Retries) -> None:
        pauses = retries.backoff
        self._body = body
        self.attempts: Final = retries.attempts
        self._retry_on = frozenset(retries.retry_on)
        self._policy = AttemptPolicy(
            attempts=retries.attempts,
            backoff=Backoff(pauses.first, pauses.longest, factor=pauses.factor, jitter=pauses.jitter),
        )

    async def run(self, job: Job) -> None:
        lease = job.leased.lease
        await recall_attempts(job)
        try:
            await self._body.run(job)
        finally:  # also if the daemon stops while the body cleans up after its failure
            job.retry_failed(self._policy.pause_s(lease.attempt, chance_of(lease.lease_id)), self._retry_on)


async def recall_attempts(job: Job) -> None:
    """Counts earlier attempts' usage: the budget is the task's. Durable steps bring their usage with them."""
    if job.leased.lease.attempt > 1 and job.leased.turn == 1 and not await job.durable_steps():
        await recall_usage(job)


def chance_of(lease_id: LeaseId) -> float:
    """A number from 0 to 1 that is always the same for a lease; its id is random."""
    return int(lease_id[:8], 16) / 0xFFFFFFFF
