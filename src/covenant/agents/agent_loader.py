"""Loads agents from Python files: each object at the top level of a module that is an agent.

That is an `Agent`, an `AgentExecutor` of the official SDK, or an agent of pydantic-ai. The last two are looked for only
in files that import those libraries. An agent without a name is called what its variable is called.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

import msgspec

from covenant.agents.api import Agent
from covenant.agents.function_agent import FunctionAgent
from covenant.agents.isolated_agent import PROCESSES_MAX, IsolatedAgent
from covenant.agents.runtime.job import Job, RunnableAgent
from covenant.model.agent_definition import AgentDefinition, read_agent_definition
from covenant.model.errors import CovenantError, Refusal

SDK: Final = "a2a.server.agent_execution"
PYDANTIC: Final = "pydantic_ai.agent"

DECLARED: Final = (
    *"name description input_modes output_modes timeout_ms idempotent on_lost extensions".split(),
    *"default_project schedules".split(),
)
"""What a definition takes from an `Agent` as it is."""
_LOADERS: Final = ("<frozen importlib._bootstrap_external>", "<frozen importlib._bootstrap>")


class CannotLoad(CovenantError):
    """A file whose agents cannot be served; says which, and why."""


class LoadedAgent(msgspec.Struct, frozen=True):
    definition: AgentDefinition
    body: Any
    path: Path


def load_agents(paths: Sequence[Path]) -> list[LoadedAgent]:
    """The agents of these files, in order. Runs the files."""
    found: list[LoadedAgent] = []
    for path in paths:
        here = list(_agents(_module(path), path))
        if not here:
            raise CannotLoad(f"{path} has no agents: define one at its top level, agent = Agent(…)")
        found += here
    seen: dict[str, LoadedAgent] = {}
    for second in found:
        first = seen.setdefault(second.definition.id, second)
        if first is not second:
            raise CannotLoad(f"agent {first.definition.id!r} is in {first.path} and again in {second.path}")
    return found


def find_agent(path: Path, name: str) -> Agent:
    """The agent of this name in this file. Runs the file."""
    for value in vars(_module(path)).values():
        if isinstance(value, Agent) and value.name == name:
            return value
    raise CannotLoad(f"{path} has no agent {name!r}")


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise CannotLoad(f"there is no file {path}; give a Python file with agents")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        # As when a script is run: what lies beside it can be imported.
        sys.path.insert(0, folder)
    name = f"covenant_agents_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CannotLoad(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Known before it runs: what it defines may be looked up by its module's name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CannotLoad(f"{path} cannot be run; correct it, and start again:\n{_told(error)}") from error
    return module


def _told(error: BaseException) -> str:
    """Where in its author's files it went wrong, without how the file came to be run."""
    at = error.__traceback__
    while at is not None and (at.tb_frame.f_code.co_filename in (__file__, *_LOADERS)):
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error, at, limit=-3)).rstrip()


def _agents(module: ModuleType, path: Path) -> Iterator[LoadedAgent]:
    seen: list[object] = []
    for variable, value in vars(module).items():
        if any(value is known for known in seen):
            continue
        seen.append(value)
        try:
            ours = load_agent(value, path) if isinstance(value, Agent) else None
            made = ours or _executors(variable, value, module) or _pydantic(variable, value)
        except (Refusal, TypeError) as wrong:
            raise CannotLoad(f"{path}: {variable}: {wrong}") from wrong
        if made is not None:
            yield LoadedAgent(made[0], made[1], path)


def load_agent(agent: Agent, path: Path | None = None) -> tuple[AgentDefinition, RunnableAgent]:
    """What the catalogue says of an agent that was written in Python, and what does its work.

    `path`: the file that it is in, from which an isolated one is imported again.
    """
    if agent.isolate and path is None:
        raise TypeError(f"agent {agent.name!r} can be isolated only where it is served from a file")
    declared = {name: getattr(agent, name) for name in DECLARED} | {
        "id": agent.name,
        "skills": [msgspec.to_builtins(skill) for skill in agent.skills],
        "rate_per_min": agent.rate_per_min,
        "concurrency": agent.concurrency or (PROCESSES_MAX if agent.isolate else 0),
    }
    body: RunnableAgent = IsolatedAgent(agent, path) if agent.isolate and path is not None else FunctionAgent(agent)
    return _definition(declared), body


def _executors(variable: str, value: object, module: ModuleType) -> tuple[AgentDefinition, RunnableAgent] | None:
    library = sys.modules.get(SDK)
    if library is None or not isinstance(value, library.AgentExecutor):
        return None
    from covenant.agents.sdk_executor import SdkExecutorAgent, described  # noqa: PLC0415  (needs an extra)

    declared = {"id": variable, "name": variable, "description": inspect.cleandoc(type(value).__doc__ or "")}
    others = [each for each in vars(module).values() if isinstance(each, library.AgentExecutor)]
    if len(others) == 1:
        declared |= described(vars(module).values())
    return _definition(declared), SdkExecutorAgent(value)


def _pydantic(variable: str, value: object) -> tuple[AgentDefinition, RunnableAgent] | None:
    library = sys.modules.get(PYDANTIC)
    if library is None or not isinstance(value, library.AbstractAgent):
        return None
    from covenant.agents.model.pydantic_agent import PydanticAiAgent  # noqa: PLC0415  (needs an extra)

    declared = {"id": value.name or variable, "name": value.name or variable, "description": value.description or ""}
    return _definition(declared), PydanticAiAgent(value)


def _definition(declared: dict[str, Any]) -> AgentDefinition:
    return read_agent_definition({**declared, "kind": "function"})


class AgentStacks:
    """Which agent of a served file is at work. Its code may also run in tasks that it has begun itself."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def learn(self, found: Iterable[LoadedAgent]) -> None:
        """These are served from now on."""
        names: dict[str, list[str]] = {}
        for each in found:
            names.setdefault(str(each.path.resolve()), []).append(each.definition.id)
        self._names = names

    def agent_at(self, frame: FrameType | None) -> str | None:
        """May be called from any thread. By the job at the bottom of the stack, or by the file of one of its calls."""
        named = None
        while frame is not None:
            if frame.f_code is Job.run.__code__:
                return str(frame.f_locals["self"].holder.display)
            names = self._names.get(frame.f_code.co_filename)
            if names is not None and named is None:
                named = " or ".join(names)
            frame = frame.f_back
        return named
