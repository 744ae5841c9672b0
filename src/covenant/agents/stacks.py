"""Whose code is running: from a stack of the loop's thread to the agent, if it is an agent's."""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType

from covenant.agents.discovery import Found
from covenant.agents.job import Job


class AgentStacks:
    """`found`: the agents of served files. Their code may also run in tasks that they have begun themselves."""

    def __init__(self, found: Iterable[Found]) -> None:
        self._names: dict[str, list[str]] = {}
        for each in found:
            self._names.setdefault(str(each.path.resolve()), []).append(each.constitution.id)

    def agent_at(self, frame: FrameType | None) -> str | None:
        """May be called from any thread. By the job at the bottom of the stack, or by the file of one of its calls."""
        named = None
        while frame is not None:
            if frame.f_code is Job._work.__code__:  # noqa: SLF001  (the one place that runs a body)
                return str(frame.f_locals["self"].holder.display)
            names = self._names.get(frame.f_code.co_filename)
            if names is not None and named is None:
                named = " or ".join(names)
            frame = frame.f_back
        return named
