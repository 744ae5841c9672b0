"""The agent `index`: receives tasks that name no agent, and picks one for each turn.

With a model, the model picks by its tools. Without one, agents are ranked by the words that their cards share with the
request. The best one gets the work if its score is high enough, and the route says why. Otherwise `index` answers with
a list of the agents. A further attempt finds the route and the child task of the attempt before it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, Protocol

from covenant.agents.agent_directory import AgentDirectory, CallableAgent
from covenant.agents.keyword_match import THRESHOLD, KeywordIndex, KeywordMatch
from covenant.agents.model.toolbox import call_agent, files_of
from covenant.agents.runtime.agent_calls import Answer
from covenant.agents.runtime.job import Job, RunnableAgent
from covenant.agents.runtime.turn_output import TurnOutput
from covenant.exchange.native import inline_of
from covenant.exchange.tasks.builder import text_of
from covenant.model.agent_definition import INDEX, INDEX_DEFINITION, AgentDefinition
from covenant.model.content import Content, Text
from covenant.model.errors import CovenantError
from covenant.model.extras import install_command
from covenant.model.task_event import StatusUpdate

ROUTE: Final = "covenant.route"
"""Key in the metadata of a status and of the result: the chosen agent, and why."""
ASKING: Final = "covenant.asking"
"""Key in the metadata of a status: the agent and task that wait for the sender's answer."""
RUNNERS_UP_MAX: Final = 3
LISTED_MAX: Final = 50
RANKINGS_MAX: Final = 256
NO_MATCH: Final = "No agent here matches this request, and no model is configured that could answer it."
NO_MODEL: Final = f'no model is configured: set model.name = "provider:name" and {install_command("model")}'


class RouterAgent:
    """`index` without a model."""

    def __init__(self, directory: AgentDirectory) -> None:
        self._directory = directory
        self._rankings: OrderedDict[str, tuple[tuple[CallableAgent, ...], KeywordIndex]] = OrderedDict()

    async def run(self, job: Job) -> None:
        output = TurnOutput(job)
        parts = tuple(part for message in job.messages for part in message.parts)
        asking = await job.stored_note(ASKING) if job.leased.turn > 1 else None
        if isinstance(asking, dict):
            await self._forward(job, output, asking, parts)
            return
        tenant = job.holder.display.partition("@")[2]
        chosen = await self._chosen(job, tenant) if job.leased.lease.attempt > 1 else None
        if chosen is not None:
            await self._hand_over(job, output, chosen, parts)
            return
        ranked = self._ranking(tenant).rank(text_of(parts))
        best = ranked[0] if ranked else None
        route = {**_route(ranked), "turn": job.leased.turn}
        job.notes[ROUTE] = route
        if best is None or best.score < THRESHOLD:
            output.write_status(StatusUpdate(f"Answering this myself: {route['why']}", metadata={ROUTE: route}))
            output.write_whole_text(self._describe_agents(tenant))
            job.complete(*output.close())
            return
        output.write_status(StatusUpdate(f"Handing this to {best.listed.name}: {best.why}", metadata={ROUTE: route}))
        await self._hand_over(job, output, best.listed, parts)

    async def _chosen(self, job: Job, tenant: str) -> CallableAgent | None:
        """The agent that an earlier attempt at this turn picked, if it still exists."""
        route = await job.stored_note(ROUTE)
        if not isinstance(route, dict) or route.get("turn") != job.leased.turn:
            return None
        found = next((each for each in self._directory.all(tenant) if each.name == route.get("agent")), None)
        if found is not None:
            job.notes[ROUTE] = route
        return found

    async def _hand_over(self, job: Job, output: TurnOutput, listed: CallableAgent, parts: tuple[Content, ...]) -> None:
        # A remote agent receives only the text.
        content = text_of(parts) if listed.text_only or all(type(part) is Text for part in parts) else parts
        label = f"{'a2a' if listed.remote else 'agent'}:{listed.name}"
        try:
            answer = await call_agent(job, listed.name, content)
        except CovenantError as error:
            output.record_tool(label, ok=False)
            job.fail(f"{listed.name}: {error}")
            return
        _write_answer(job, output, answer, agent=listed.name, label=label)

    async def _forward(self, job: Job, output: TurnOutput, asking: dict[str, Any], parts: tuple[Content, ...]) -> None:
        """Forwards the sender's message to the agent whose question it answers."""
        name, label = str(asking.get("agent")), str(asking.get("label"))
        job.notes[ROUTE] = {"agent": name, "why": "it had asked for this", "by": "question"}
        answer = await job.calls.answer(str(asking.get("task_id")), parts)
        _write_answer(job, output, answer, agent=name, label=label)

    def _ranking(self, tenant: str) -> KeywordIndex:
        listed = self._directory.all(tenant)
        known = self._rankings.get(tenant)
        if known is None or known[0] is not listed:
            known = listed, KeywordIndex(listed)
            self._rankings[tenant] = known
            if len(self._rankings) > RANKINGS_MAX:
                self._rankings.popitem(last=False)
        return known[1]

    def _describe_agents(self, tenant: str) -> str:
        listed = self._directory.all(tenant)
        if not listed:
            return f"{NO_MATCH} There are no agents yet: add one with /v1/agents, or serve one with `covenant serve`."
        lines = [f"- {each.line}{' (elsewhere)' if each.remote else ''}" for each in listed[:LISTED_MAX]]
        if len(listed) > LISTED_MAX:
            lines.append(f"- and {len(listed) - LISTED_MAX} more")
        return "\n".join((NO_MATCH, "There are:", *lines))


def _route(ranked: list[KeywordMatch]) -> dict[str, Any]:
    best = ranked[0] if ranked else None
    others = [{"agent": each.listed.name, "score": each.score} for each in ranked[1 : 1 + RUNNERS_UP_MAX]]
    if best is None:
        return {"agent": INDEX, "why": "no agent's card shares a word with the request", "by": "ranking"}
    if best.score < THRESHOLD:
        why = f"the best match is {best.listed.name} with {best.score:g}, and {THRESHOLD:g} is needed: {best.why}"
        others = [{"agent": best.listed.name, "score": best.score}, *others][:RUNNERS_UP_MAX]
        return {"agent": INDEX, "why": why, "others": others, "by": "ranking"}
    return {
        "agent": best.listed.name,
        "remote": best.listed.remote,
        "score": best.score,
        "why": best.why,
        "others": others,
        "by": "ranking",
    }


def _write_answer(job: Job, output: TurnOutput, answer: Answer, *, agent: str, label: str) -> None:
    output.record_tool(label, ok=answer.ok or answer.waits)
    output.record_answer(agent, job.task.depth + 1, answer.text)
    if answer.waits:
        asking = {"agent": agent, "label": label, "task_id": answer.task_id}
        job.park(StatusUpdate(answer.text, answer.state.value, metadata={ASKING: asking}))
        return
    if not answer.ok:
        job.fail(f"{agent}: {answer.text or 'it failed'}")
        return
    files = [part for artifact in files_of(answer) for part in artifact.parts]
    for part in files:
        output.write_content(part)
    output.write_whole_text(answer.text)
    job.complete(*(output.close() or files))


class ModelProvider(Protocol):
    def model(self, definition: AgentDefinition, *, remembers: bool = True) -> RunnableAgent | None:
        """A model agent in this role; None if no model is configured."""


class UnavailableAgent:
    """Stands in for an agent that cannot work here: fails each task, and says why."""

    def __init__(self, why: str = NO_MODEL) -> None:
        self._why = why

    async def run(self, job: Job) -> None:
        job.fail(self._why)


class IndexAgent:
    """`index`: a model, or the router. For a request that brings its own agent definition, that agent."""

    def __init__(self, models: ModelProvider, directory: AgentDirectory) -> None:
        self._models = models
        model = models.model(INDEX_DEFINITION)
        self._body: RunnableAgent = model or RouterAgent(directory)
        self.repeatable = model is None
        """Whether the daemon may repeat an interrupted turn by itself: routing yes, a model's work no."""

    async def run(self, job: Job) -> None:
        inline = inline_of(job.task)
        if inline is None:
            await self._body.run(job)
        else:
            await (self._models.model(inline, remembers=False) or UnavailableAgent()).run(job)
