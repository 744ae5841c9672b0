"""The master, `index`: it is sent what is addressed to nobody in particular, and picks for each turn who does it.

With a model, the model picks, by its tools. Without one, the agents are ranked by the words that a request shares with
what they say of themselves; the best one is handed the work if it fits well enough, and everybody is told why. If none
does, the master says so, and who there is. Routing again, after a crash say, finds the route and the child that are
there: nothing is done twice by that.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from covenant.agents.calls import Answer
from covenant.agents.job import Job
from covenant.agents.ranking import THRESHOLD, Ranked, Ranking
from covenant.agents.roster import Listed, Roster
from covenant.agents.speech import Speech
from covenant.agents.toolbox import ask, made_by
from covenant.exchange.tasks.builder import text_of
from covenant.model.agent_definition import INDEX
from covenant.model.content import Content, Text
from covenant.model.errors import CovenantError
from covenant.model.task_event import StatusUpdate

ROUTE: Final = "covenant.route"
"""In the metadata of a status and of the result: who does it, and why."""
ASKING: Final = "covenant.asking"
"""In the metadata of a status: which task of which agent waits for the sender's answer."""
OTHERS_MAX: Final = 3
NAMED_MAX: Final = 50
RANKINGS_MAX: Final = 256
NOBODY: Final = "None of the agents here seems to fit this request, and no model is configured to answer it myself."


class RoutingBody:
    """The master without a model."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._rankings: OrderedDict[str, tuple[tuple[Listed, ...], Ranking]] = OrderedDict()

    async def run(self, job: Job) -> None:
        speech = Speech(job)
        parts = tuple(part for message in job.messages for part in message.parts)
        asking = await job.noted(ASKING) if job.leased.turn > 1 else None
        if isinstance(asking, dict):
            await self._pass_on(job, speech, asking, parts)
            return
        tenant = job.holder.display.partition("@")[2]
        chosen = await self._chosen(job, tenant) if job.leased.lease.attempt > 1 else None
        if chosen is not None:
            await self._hand_over(job, speech, chosen, parts)
            return
        ranked = self._ranking(tenant).rank(text_of(parts))
        best = ranked[0] if ranked else None
        route = {**_route(ranked), "turn": job.leased.turn}
        job.notes[ROUTE] = route
        if best is None or best.score < THRESHOLD:
            speech.status(StatusUpdate(f"Answering this myself: {route['why']}", metadata={ROUTE: route}))
            speech.say_at_once(self._honestly(tenant))
            job.complete(*speech.close())
            return
        speech.status(StatusUpdate(f"Handing this to {best.listed.name}: {best.why}", metadata={ROUTE: route}))
        await self._hand_over(job, speech, best.listed, parts)

    async def _chosen(self, job: Job, tenant: str) -> Listed | None:
        """Whom an earlier attempt at this turn had picked, if it is still there."""
        route = await job.noted(ROUTE)
        if not isinstance(route, dict) or route.get("turn") != job.leased.turn:
            return None
        found = next((each for each in self._roster.all(tenant) if each.name == route.get("agent")), None)
        if found is not None:
            job.notes[ROUTE] = route
        return found

    async def _hand_over(self, job: Job, speech: Speech, listed: Listed, parts: tuple[Content, ...]) -> None:
        # What is elsewhere is sent the words, and nothing else.
        asked = text_of(parts) if listed.elsewhere or all(type(part) is Text for part in parts) else parts
        label = f"{'a2a' if listed.remote else 'agent'}:{listed.name}"
        try:
            answer = await ask(job, listed.name, asked)
        except CovenantError as error:
            speech.tool(label, ok=False)
            job.fail(f"{listed.name}: {error}")
            return
        _tell(job, speech, answer, agent=listed.name, label=label)

    async def _pass_on(self, job: Job, speech: Speech, asking: dict[str, Any], parts: tuple[Content, ...]) -> None:
        """The answer to what an agent asked in the turn before."""
        name, label = str(asking.get("agent")), str(asking.get("label"))
        job.notes[ROUTE] = {"agent": name, "why": "it had asked for this", "by": "question"}
        answer = await job.calls.answer(str(asking.get("task_id")), parts)
        _tell(job, speech, answer, agent=name, label=label)

    def _ranking(self, tenant: str) -> Ranking:
        """Made again only when the roster has changed."""
        listed = self._roster.all(tenant)
        known = self._rankings.get(tenant)
        if known is None or known[0] is not listed:
            known = listed, Ranking(listed)
            self._rankings[tenant] = known
            if len(self._rankings) > RANKINGS_MAX:
                self._rankings.popitem(last=False)
        return known[1]

    def _honestly(self, tenant: str) -> str:
        listed = self._roster.all(tenant)
        if not listed:
            return f"{NOBODY} There are no agents yet: add one with /v1/agents, or serve one with `covenant serve`."
        lines = [f"- {each.line}{' (elsewhere)' if each.remote else ''}" for each in listed[:NAMED_MAX]]
        if len(listed) > NAMED_MAX:
            lines.append(f"- and {len(listed) - NAMED_MAX} more")
        return "\n".join((NOBODY, "There are:", *lines))


def _route(ranked: list[Ranked]) -> dict[str, Any]:
    best = ranked[0] if ranked else None
    others = [{"agent": each.listed.name, "score": each.score} for each in ranked[1 : 1 + OTHERS_MAX]]
    if best is None:
        return {"agent": INDEX, "why": "no agent's card shares a word with the request", "by": "ranking"}
    if best.score < THRESHOLD:
        why = f"the best match is {best.listed.name} with {best.score:g}, and {THRESHOLD:g} is needed: {best.why}"
        others = [{"agent": best.listed.name, "score": best.score}, *others][:OTHERS_MAX]
        return {"agent": INDEX, "why": why, "others": others, "by": "ranking"}
    return {
        "agent": best.listed.name,
        "remote": best.listed.remote,
        "score": best.score,
        "why": best.why,
        "others": others,
        "by": "ranking",
    }


def _tell(job: Job, speech: Speech, answer: Answer, *, agent: str, label: str) -> None:
    speech.tool(label, ok=answer.ok or answer.waits)
    speech.sub(agent, job.task.depth + 1, answer.text)
    if answer.waits:
        asking = {"agent": agent, "label": label, "task_id": answer.task_id}
        job.park(StatusUpdate(answer.text, answer.state.value, metadata={ASKING: asking}))
        return
    if not answer.ok:
        job.fail(f"{agent}: {answer.text or 'it failed'}")
        return
    made = [part for artifact in made_by(answer) for part in artifact.parts]
    for part in made:
        speech.give(part)
    speech.say_at_once(answer.text)
    job.complete(*(speech.close() or made))
