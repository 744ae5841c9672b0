"""An agent whose failed turns are begun again as its definition says.

A function has its own attempts (`Agent(attempts=…)`), with exceptions. What a program or a model does is told by words.
"""

from __future__ import annotations

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
        self._retry_on = frozenset(retries.retry_on)
        self._policy = AttemptPolicy(
            attempts=retries.attempts,
            backoff=Backoff(pauses.first, pauses.longest, factor=pauses.factor, jitter=pauses.jitter),
        )

    async def run(self, job: Job) -> None:
        lease = job.leased.lease
        if lease.attempt > 1 and job.leased.turn == 1 and not await job.durable_steps():
            # The budget is the task's: failed attempts count. Durable steps bring what they used with them.
            await recall_usage(job)
        await self._body.run(job)
        job.retry_failed(self._policy.pause_s(lease.attempt, chance_of(lease.lease_id)), self._retry_on)


def chance_of(lease_id: LeaseId) -> float:
    """From 0 to 1, the same for a lease each time: its id was made by chance."""
    return int(lease_id[:8], 16) / 0xFFFFFFFF
