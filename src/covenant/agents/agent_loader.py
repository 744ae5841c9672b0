"""Loads agents from Python files: each object at the top level of a module that is an agent.

An agent is an `Agent`, an `AgentExecutor` of the official SDK, or an agent of pydantic-ai. The last two are looked for
only in files that import those libraries. An agent without a name is called like its variable.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, NamedTuple

import msgspec

from covenant.agents.api import Agent, Turn
from covenant.agents.function_agent import FunctionAgent
from covenant.agents.isolated_agent import PROCESSES_MAX, IsolatedAgent
from covenant.agents.runtime.job import Job, RunnableAgent
from covenant.model.agent_definition import AgentDefinition, read_agent_definition
from covenant.model.errors import CovenantError, Refusal
from covenant.model.tenants import DEFAULT, check_tenant_name

SDK: Final = "a2a.server.agent_execution"
PYDANTIC: Final = "pydantic_ai.agent"

DECLARED: Final = (
    *"name description input_modes output_modes timeout_ms idempotent on_lost extensions".split(),
    *"default_project schedules".split(),
)
"""Fields that a definition copies from an `Agent`."""
BESIDE_MAX: Final = 10_000
"""The most files of a folder that are inspected."""
_LOADERS: Final = ("<frozen importlib._bootstrap_external>", "<frozen importlib._bootstrap>")


class CannotLoad(CovenantError):
    """A file's agents cannot be served. The message says which, and why."""


class ServedFile(NamedTuple):
    """A Python file, and the tenant that owns all agents in it."""

    path: Path
    tenant: str = DEFAULT


class LoadedAgent(msgspec.Struct, frozen=True):
    definition: AgentDefinition
    body: Any
    path: Path
    tenant: str = DEFAULT

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant, self.definition.id


def load_agents(files: Sequence[ServedFile]) -> list[LoadedAgent]:
    """Loads the agents of these files, in order. Runs the files."""
    for file in files:
        check_tenant_name(file.tenant)
    _check_modules(files)
    found: list[LoadedAgent] = []
    for file in files:
        here = list(_agents(_module(file), file))
        if not here:
            raise CannotLoad(f"{file.path} has no agents: define one at its top level, agent = Agent(…)")
        found += here
    seen: dict[tuple[str, str], LoadedAgent] = {}
    for second in found:
        first = seen.setdefault(second.key, second)
        if first is not second:
            raise CannotLoad(f"agent {first.definition.id!r} is in {first.path} and again in {second.path}")
    return found


def _check_modules(files: Sequence[ServedFile]) -> None:
    """Refuses files by which one tenant's file would import a module of another tenant.

    Python keeps one module for a name. If two folders have a module of one name, both files get the first one.
    """
    owners: dict[str, ServedFile] = {}
    served = {file.path.resolve() for file in files}
    for file in files:
        for name in sorted(_importable(file.path.resolve().parent, served)):
            other = owners.setdefault(name, file)
            if other.tenant != file.tenant and other.path.resolve().parent != file.path.resolve().parent:
                raise CannotLoad(
                    f"the module {name!r} lies beside {other.path} of the tenant {other.tenant!r} and beside "
                    f"{file.path} of {file.tenant!r}: Python would import one of them for both; give it two names"
                )


def _importable(folder: Path, served: Container[Path]) -> Iterator[str]:
    """The module names that a file in this folder can import from it."""
    for path in islice(folder.iterdir(), BESIDE_MAX) if folder.is_dir() else ():
        if path.suffix == ".py" and path not in served:
            yield path.stem
        elif (path / "__init__.py").is_file():
            yield path.name


def find_agent(path: Path, name: str) -> Agent:
    """The agent of this name in this file. Runs the file."""
    for value in vars(_module(ServedFile(path))).values():
        if isinstance(value, Agent) and value.name == name:
            return value
    raise CannotLoad(f"{path} has no agent {name!r}")


def _module(file: ServedFile) -> ModuleType:
    path = file.path
    if not path.is_file():
        raise CannotLoad(f"there is no file {path}; give a Python file with agents")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        # As for a script: modules beside the file can be imported.
        sys.path.insert(0, folder)
    # The same file may be served for several tenants, as one module for each.
    owner = "" if file.tenant == DEFAULT else f"{file.tenant}_"
    name = f"covenant_agents_{owner}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CannotLoad(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: its definitions may be looked up by the module's name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CannotLoad(f"{path} raised an error; correct it, and start again:\n{_author_traceback(error)}") from error
    return module


def _author_traceback(error: BaseException) -> str:
    """The traceback within the author's files, without the frames that ran the file."""
    at = error.__traceback__
    while at is not None and (at.tb_frame.f_code.co_filename in (__file__, *_LOADERS)):
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error, at, limit=-3)).rstrip()


def _agents(module: ModuleType, file: ServedFile) -> Iterator[LoadedAgent]:
    path = file.path
    seen: list[object] = [each.wraps for each in vars(module).values() if isinstance(each, Agent)]
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
            yield LoadedAgent(made[0], made[1], path, file.tenant)


def load_agent(agent: Agent, path: Path | None = None) -> tuple[AgentDefinition, RunnableAgent]:
    """The catalogue's definition of an agent written in Python, and the object that runs it.

    `path`: the agent's file, which an isolated agent's process imports.
    """
    if agent.isolate and path is None:
        raise TypeError(f"agent {agent.name!r} can be isolated only where it is served from a file")
    declared = {name: getattr(agent, name) for name in DECLARED} | {
        "id": agent.name,
        "skills": [msgspec.to_builtins(skill) for skill in agent.skills],
        "rate_per_min": agent.rate_per_min,
        "concurrency": agent.concurrency or (PROCESSES_MAX if agent.isolate else 0),
    }
    if agent.wraps is not None:
        return _definition(declared), _wrapped(agent)
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

    if value.deps_type not in (object, type(None)):
        wrapped = f"Agent({value.name or variable!r}, wraps={variable}, deps=…)"
        raise TypeError(f"its deps_type is {value.deps_type.__name__}; serve it with its dependencies: {wrapped}")
    declared = {"id": value.name or variable, "name": value.name or variable, "description": value.description or ""}
    return _definition(declared), PydanticAiAgent(value)


def _wrapped(agent: Agent) -> RunnableAgent:
    library = sys.modules.get(PYDANTIC)
    if library is None or not isinstance(agent.wraps, library.AbstractAgent):
        raise TypeError(f"agent {agent.name!r} wraps a {type(agent.wraps).__name__}, which is no agent of pydantic-ai")
    from covenant.agents.model.pydantic_agent import PydanticAiAgent  # noqa: PLC0415  (needs an extra)

    return PydanticAiAgent(agent.wraps, _dependencies(agent), agent.retry_on, agent.retries)


def _dependencies(agent: Agent) -> Any:
    """The dependencies, or a function that makes them for a turn. A class, or any other callable that is not itself an
    instance of the `deps_type`, is such a function."""
    deps, needed = agent.deps, agent.wraps.deps_type
    if not callable(deps) or inspect.isroutine(deps):
        return deps
    try:
        is_one = needed is not object and isinstance(deps, needed)
    except TypeError:  # isinstance() refuses some types, such as `list[int]`
        is_one = False
    if is_one:
        return deps

    def make(turn: Turn) -> Any:
        return deps(turn)

    return make


def _definition(declared: dict[str, Any]) -> AgentDefinition:
    return read_agent_definition({**declared, "kind": "function"})


class AgentStacks:
    """Names the agent that is running, from a stack. An agent's code may also run in asyncio tasks that it started."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def set_agents(self, found: Iterable[LoadedAgent]) -> None:
        """Sets the agents that are served from now on."""
        names: dict[str, list[str]] = {}
        for each in found:
            name = each.definition.id if each.tenant == DEFAULT else f"{each.definition.id}@{each.tenant}"
            names.setdefault(str(each.path.resolve()), []).append(name)
        self._names = names

    def agent_at(self, frame: FrameType | None) -> str | None:
        """The agent on this stack: by the job at its bottom, or by a frame's file. May be called from any thread."""
        named = None
        while frame is not None:
            if frame.f_code is Job.run.__code__:
                return str(frame.f_locals["self"].holder.display)
            names = self._names.get(frame.f_code.co_filename)
            if names is not None and named is None:
                named = " or ".join(names)
            frame = frame.f_back
        return named
