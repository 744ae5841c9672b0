"""Function agents: a body that calls the author's async function, and says what it yields or returns."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator
from typing import Any, Final

from covenant.agents.authoring import Agent, Rejection, Reply, Turn
from covenant.agents.job import Job
from covenant.agents.speech import Speech
from covenant.model.content import Audio, Image, Json, Resource, ResourceLink, Text
from covenant.model.errors import WrongType
from covenant.model.task import NATIVE
from covenant.model.update import MessageUpdate, StatusUpdate
from covenant.wire.decoding import TOLD_NESTING_MAX
from covenant.wire.validation import checked

SAYABLE: Final = "text, turn.file(…), turn.data(…), turn.status(…) and the other words of a turn"
_CONTENT: Final = (Text, Json, Image, Audio, Resource, ResourceLink)
_VALUES: Final = (*_CONTENT, StatusUpdate, Rejection, Reply)
_WRAPPING: Final = 4
"""Levels of the value itself, around what its author put into it."""


class FunctionBody:
    def __init__(self, agent: Agent) -> None:
        if agent.function is None:
            raise TypeError(f"agent {agent.name!r} has no function: decorate one with it")
        self._function: Any = agent.function
        self._yields = inspect.isasyncgenfunction(agent.function)

    async def run(self, job: Job) -> None:
        has_past = job.leased.turn > 1 or job.task.origin == NATIVE
        turn = Turn(job, await earlier(job) if has_past else ())
        speech = Speech(job)
        if self._yields:
            await self._listen(self._function(turn), job, speech)
        else:
            _say_returned(await self._function(turn), job, speech)
        if not job.ended:
            job.complete(*speech.close())

    async def _listen(self, generator: AsyncGenerator[Any, None], job: Job, speech: Speech) -> None:
        try:
            async for said in generator:
                if type(said) is str:
                    speech.say(said)
                else:
                    _say_checked(said, job, speech, "yielded")
                    if job.ended:
                        return
                if job.full:
                    await job.room()
        finally:
            await generator.aclose()


async def earlier(job: Job) -> tuple[MessageUpdate, ...]:
    """What was said before this turn. What it is about came in the meantime, and is not part of it."""
    if job.leased.turn == 1:
        return await job.thread()
    view = await job.view()
    return tuple(said for said in view.history if said not in job.messages) if view is not None else ()


def _say_returned(returned: Any, job: Job, speech: Speech) -> None:
    if returned is None:
        return
    if isinstance(returned, str):
        speech.say_at_once(str.__str__(returned))
    elif isinstance(returned, list | tuple):
        for said in returned:
            if not job.ended:
                _say_checked(said, job, speech, "returned")
    else:
        _say_checked(returned, job, speech, "returned")


def _say_checked(said: Any, job: Job, speech: Speech, how: str) -> None:
    """What is no plain text is a value of ours, whose fields may be anything: authors make some of them by hand."""
    try:
        if isinstance(said, _VALUES):
            said = checked(type(said).__name__, said, type(said), TOLD_NESTING_MAX + _WRAPPING)
    except WrongType as wrong:
        job.fail(f"the agent {how} what cannot be said: {wrong.message}")
    else:
        _say(said, job, speech, how)


def _say(said: Any, job: Job, speech: Speech, how: str) -> None:
    match said:
        case str():
            speech.say(str.__str__(said))
        case StatusUpdate(state="working"):
            speech.status(said)
        case StatusUpdate():
            speech.close()
            job.park(said)
        case Rejection(text):
            job.reject(text)
        case Reply(content):
            _reply(content, job, speech)
        case _ if isinstance(said, _CONTENT):
            speech.give(said)
        case _:
            job.fail(f"the agent {how} {_article(type(said).__name__)}, which cannot be said; it may be {SAYABLE}")


def _reply(content: tuple[Any, ...], job: Job, speech: Speech) -> None:
    if speech.text:
        job.fail("the agent replied with a bare message after it had streamed text; a reply is all there is to say")
    elif not all(isinstance(block, _CONTENT) for block in content):
        job.fail("the agent replied with something that is neither text nor content")
    else:
        # From the second turn on its sender knows of the task.
        job.complete(*content, reply=job.leased.turn == 1)


def _article(name: str) -> str:
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"
