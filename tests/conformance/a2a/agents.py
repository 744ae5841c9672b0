"""The agents that are spoken to: the first word of what they are told says what they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from covenant.agents.api import Agent, Turn

EXTENSION: Final = "https://example.com/extensions/manners/v1"
BYTES: Final = bytes(range(256))
FLOOD: Final = "x" * 4096


class Gates:
    """Where an agent waits until a test lets it go on. Both sides may come first."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Event] = {}
        self._reached: dict[str, asyncio.Event] = {}

    async def wait(self, name: str) -> None:
        self._event(self._reached, name).set()
        await self._event(self._open, name).wait()

    async def reached(self, name: str) -> None:
        await self._event(self._reached, name).wait()

    def open(self, name: str) -> None:
        self._event(self._open, name).set()

    @staticmethod
    def _event(events: dict[str, asyncio.Event], name: str) -> asyncio.Event:
        return events.setdefault(name, asyncio.Event())


def make_agents(gates: Gates) -> tuple[Agent, ...]:
    return (
        actor(gates),
        actor(gates, "other"),
        actor(gates, "open"),
        actor(gates, "plain", input_modes=["text/plain", "image/*"]),
        actor(gates, "mannered", extensions=[EXTENSION]),
        actor(gates, "brief", timeout_ms=50),
        actor(gates, "busy", concurrency=1),
    )


def actor(gates: Gates, name: str = "actor", **declared: Any) -> Agent:
    agent = Agent(name, description="Does as it is told", **declared)

    @agent
    async def act(turn: Turn) -> AsyncIterator[Any]:
        verb, _, rest = turn.text.replace("\n", " ").partition(" ")
        if turn.turn > 1 and verb != "again":
            said = [message.parts[0].text for message in turn.history]  # type: ignore[union-attr]  # all are text
            yield f"turn {turn.turn}: {turn.text} (before: {'|'.join(said)})"
            return
        match verb:
            case "gate":
                yield "before "
                await gates.wait(rest)
                yield "after"
            case "linger":
                # In vain: whatever it says after its end is not heard.
                try:
                    await gates.wait(rest)
                finally:
                    yield "too late"
            case "hang":
                await asyncio.Event().wait()
            case _:
                for said in says(turn, verb, rest):
                    yield said

    return agent


def says(turn: Turn, verb: str, rest: str) -> Any:
    match verb:
        case "words":
            yield from (f"{word} " for word in rest.split())
        case "ask":
            yield "one moment. "
            yield turn.need_input(rest or "which language?")
        case "again":
            yield turn.need_input(f"and after {rest}?")
        case "auth":
            yield turn.need_auth("sign in at https://example.com")
        case "refuse":
            yield turn.reject("not today")
        case "reply":
            yield turn.reply(rest)
        case "raise":
            yield "so far "
            raise RuntimeError("a secret of the agent")
        case "nonsense":
            yield object()
        case "flood":
            while True:
                yield FLOOD
        case "surrogate":
            yield "\ud800"
        case "deep":
            yield turn.data(nested(100))
        case "file":
            yield turn.file("all.bin", BYTES)
            yield turn.file("page.html", b"<p>", media_type="text/html")
        case "mirror":
            yield from (part for part in turn.parts[1:])
        case "status":
            yield turn.status("looking")
            yield "found"
        case "spend":
            turn.spend(tokens=7)
            yield "spent"
        case "silent":
            return
        case "told":
            yield turn.data({"metadata": turn.metadata, "references": list(turn.task.reference_task_ids)})
            yield turn.data({"modes": list(turn.task.output_modes), "context": turn.context_id})
        case _:
            yield turn.text


def nested(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found
