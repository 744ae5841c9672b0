"""Agents written with pydantic-ai: an `Agent` runs here as it is.

The turn's text and files are its prompt, and earlier turns its message history. A file that is only linked is named in
the prompt with its URL. Nobody fetches it here: a tool that reads pages does, through the address guard. Text is
streamed as the model says it, and an output that is not text becomes data. What the run used is told with the result.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterable, Iterable
from typing import Any, Final

from pydantic_ai import messages
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.run import AgentRunResult, AgentRunResultEvent
from pydantic_ai.usage import RunUsage
from pydantic_core import to_jsonable_python

from covenant.agents import speech as saying
from covenant.agents.bounded_model import CUT
from covenant.agents.function import earlier
from covenant.agents.job import Job
from covenant.agents.speech import Speech
from covenant.model.content import Audio, Content, Image, Json, Resource, ResourceLink, Text
from covenant.model.task_event import MessageUpdate

USED: Final = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "requests", "tool_calls")


class PydanticBody:
    def __init__(self, agent: AbstractAgent[Any, Any]) -> None:
        self._agent = agent

    async def run(self, job: Job) -> None:
        speech, usage = Speech(job), RunUsage()
        before = history_of(await earlier(job))
        # Told even if somebody else ends this turn: what was used was used.
        job.spending.running = lambda: used(usage)
        try:
            async with self._agent.run_stream_events(prompt_of(job), message_history=before, usage=usage) as events:
                await listen(events, job, speech)
        finally:
            job.spend(job.spending.end_running())
        if not job.ended:
            job.complete(*speech.close())


async def listen(events: AsyncIterable[Any], job: Job, speech: Speech) -> None:
    """Say what a run says, and end the job with what it came to."""
    async for event in events:
        match event:
            case messages.PartStartEvent(part=messages.TextPart(content=text)):
                speech.say(text)
            case messages.PartDeltaEvent(delta=messages.TextPartDelta(content_delta=text)):
                speech.say(text)
            case AgentRunResultEvent(result=result):
                _result(result, job, speech)
            case _:
                pass
        if job.full:
            await job.room()


def used(usage: RunUsage) -> dict[str, float]:
    """What a run used, by name; `tokens` are all of them."""
    found = {"tokens": usage.total_tokens, **{name: getattr(usage, name, 0) for name in USED}}
    return {name: amount for name, amount in found.items() if amount}


def cut_at(stop_reason: str | None, job: Job) -> bool:
    """Whether an answer was cut where it came to its limit of tokens. Then the result says so."""
    if stop_reason != CUT:
        return False
    job.notes["stop_reason"] = CUT
    return True


def _result(result: AgentRunResult[Any], job: Job, speech: Speech) -> None:
    partial = cut_at(result.response.finish_reason, job)
    if isinstance(result.output, str):
        if not speech.text:
            speech.say_at_once(result.output)
        speech.close()
        job.complete(Text(result.output), partial=partial)
        return
    made = saying.data(to_jsonable_python(result.output))
    speech.give(made)
    speech.close()
    job.complete(made, partial=partial)


def prompt_of(job: Job) -> str | list[messages.UserContent]:
    return _prompts(part for message in job.messages for part in message.parts)


def _prompts(parts: Iterable[Content]) -> str | list[messages.UserContent]:
    said = [_prompt(part) for part in parts]
    # Some servers that speak as OpenAI's does take a text for what was said, and no list of one.
    return said[0] if len(said) == 1 and isinstance(said[0], str) else said


def _prompt(part: Content) -> messages.UserContent:
    match part:
        case Text(text):
            return text
        case Json(value):
            return saying.written(value)
        case Image(data, kind) | Audio(data, kind):
            return messages.BinaryContent(base64.b64decode(data), media_type=kind)
        case Resource(inner):
            if inner.blob is None:
                return inner.text or ""
            kind = inner.mimeType or "application/octet-stream"
            return messages.BinaryContent(base64.b64decode(inner.blob), media_type=kind)
        case ResourceLink(uri=uri, name=name, mimeType=kind):
            # As words. A URL that the library knows as one it downloads itself, past the address guard.
            about = ", ".join(filter(None, (name, kind)))
            return f"[linked file{': ' if about else ''}{about}] {uri}"


def history_of(said: tuple[MessageUpdate, ...]) -> list[messages.ModelMessage]:
    made: list[messages.ModelMessage] = []
    for message in said:
        if message.role == "user":
            made.append(messages.ModelRequest([messages.UserPromptPart(_prompts(message.parts))]))
        else:
            words = "".join(part.text for part in message.parts if isinstance(part, Text))
            made.append(messages.ModelResponse([messages.TextPart(words)]))
    return made
