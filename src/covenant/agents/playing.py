"""Who plays the agents that a model is meant to play: a model where there is one, an honest answer where there is none.

`index` is always played. An agent that came with a request, for that request alone, is played in its place.
"""

from __future__ import annotations

from typing import Final, Protocol

from covenant.agents.job import Body, Job
from covenant.agents.master import RoutingBody
from covenant.agents.roster import Roster
from covenant.exchange.native import inline_of
from covenant.model.agent_definition import INDEX_DEFINITION, AgentDefinition

NO_MODEL: Final = 'no model is configured: set model.name = "provider:name" and pip install "covenant[model]"'


class Casting(Protocol):
    def model(self, constitution: AgentDefinition, *, remembers: bool = True) -> Body | None:
        """A model in this role; None if there is no model."""


class NoModelBody:
    async def run(self, job: Job) -> None:
        job.fail(NO_MODEL)


class IndexBody:
    def __init__(self, casting: Casting, roster: Roster) -> None:
        self._casting = casting
        model = casting.model(INDEX_DEFINITION)
        self._master: Body = model or RoutingBody(roster)
        self.repeatable = model is None
        """Whether a turn that was cut short may be begun again by itself: routing may, a model's work may not."""

    async def run(self, job: Job) -> None:
        inline = inline_of(job.task)
        if inline is None:
            await self._master.run(job)
        else:
            await (self._casting.model(inline, remembers=False) or NoModelBody()).run(job)
