"""Agents from files, and how the daemon notices that a file has changed.

Definitions are `agents/*.json` and `*.toml` in the home for the first tenant, and `agents/<tenant>/…` for others. A
file has one definition; its id is the file's name unless it says another. The folder is listed once a second, and
changed files are read. A bad file is reported once, with the key that is wrong; its agent stays as it was before. So is
a file whose agent's id a served Python file has: it is used once that agent is gone.

With `covenant serve --reload` the served Python files are loaded again when one of them changes, for development. The
files, and the modules beside and below them, are checked a few times a second. When one has changed, all served files
are run again in a thread, with the modules that they import from there. Only if all of them run do the new agents
replace the old ones: new turns run the new code, turns under way end with the old code, and agents that are gone take
no more work. A file that cannot be run changes nothing and is logged once. Doors, streams and leases stay open.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import stat
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import msgspec

from covenant.agents.agent_loader import CannotLoad, LoadedAgent, ServedFile, load_agents
from covenant.daemon.home import OTHERS
from covenant.daemon.telemetry import Log
from covenant.daemon.watched_file import FileStamp, file_stamp
from covenant.exchange.catalogue import Catalogue
from covenant.model.agent_definition import DEFINITION_BYTES_MAX, AgentDefinition, read_agent_definition
from covenant.model.errors import Conflict, Invalid, NotFound, Refusal
from covenant.model.tenants import DEFAULT

FOLDER_NAME: Final = "agents"
FILES_MAX: Final = 1_000
INTERVAL_S: Final = 1.0
RELOAD_INTERVAL_S: Final = 0.3
PYTHON_FILES_MAX: Final = 2_000
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})

PythonStamps = dict[Path, FileStamp]


class AgentFile(NamedTuple):
    tenant: str
    path: Path
    stamp: FileStamp
    changed_at_ms: int
    problem: str = ""


class AgentFiles:
    """`problems` are the bad files now, and what is wrong with each."""

    def __init__(self, home: Path, catalogue: Catalogue, log: Log) -> None:
        self._home = home
        self._catalogue = catalogue
        self._log = log
        self._seen: dict[Path, FileStamp] = {}
        self._declared: dict[Path, tuple[str, str]] = {}
        """The tenant and id of the agent that each good file declares."""
        self._unusable: set[Path] = set()
        """Good files that cannot be used yet, since their tenant does not exist or their agent's name is taken."""
        self.problems: dict[Path, str] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.update(await asyncio.to_thread(list_agent_files, self._home))

    def refresh(self) -> None:
        self.update(list_agent_files(self._home))

    def update(self, files: list[AgentFile]) -> None:
        paths = {file.path for file in files}
        for path in [path for path in self._seen if path not in paths]:
            self._forget(path)
        for file in files:
            if (declared := self._declared.get(file.path)) is not None and not self._is_from_file(*declared):
                del self._declared[file.path]  # a served Python file has an agent of this id now
            elif self._seen.get(file.path) == file.stamp and file.path not in self._unusable:
                continue
            self._seen[file.path] = file.stamp
            self._unusable.discard(file.path)
            try:
                self._declare(file)
                self.problems.pop(file.path, None)
            except Refusal as refusal:
                if isinstance(refusal, (NotFound, Conflict)):
                    self._unusable.add(file.path)
                if self.problems.get(file.path) != refusal.message:
                    name, kept = self._name(file.path), file.path in self._declared
                    self._log.warning("agents.bad_file", file=name, problem=refusal.message, agent_stays_as_it_was=kept)
                self.problems[file.path] = refusal.message

    def _declare(self, found: AgentFile) -> None:
        definition = read_agent(found)
        key = (found.tenant, definition.id)
        for path, other in self._declared.items():
            if other == key and path != found.path:
                raise Conflict("agent_exists", f"/id: {definition.id!r} is declared in {self._name(path)} already")
        resident = self._catalogue.agent(*key)
        if resident is not None and resident.source == "code":
            raise Conflict("agent_exists", f"/id: {definition.id!r} is served from a Python file; choose another id")
        # Declare the new agent before the old one goes: if that fails, the old one stays.
        self._catalogue.add_resident(found.tenant, definition, "file", changed_at_ms=found.changed_at_ms)
        old = self._declared.get(found.path)
        if old is not None and old != key:
            self._catalogue.remove_resident(*old)
        self._declared[found.path] = key
        self._log.info("agents.file_read", file=self._name(found.path), agent=definition.id, tenant=found.tenant)

    def _forget(self, path: Path) -> None:
        del self._seen[path]
        self._unusable.discard(path)
        self.problems.pop(path, None)
        declared = self._declared.pop(path, None)
        if declared is not None and self._is_from_file(*declared):
            self._catalogue.remove_resident(*declared)
            self._log.info("agents.file_gone", file=self._name(path), agent=declared[1], tenant=declared[0])

    def _is_from_file(self, tenant: str, agent_id: str) -> bool:
        agent = self._catalogue.agent(tenant, agent_id)
        return agent is not None and agent.source == "file"

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._home))


def list_agent_files(home: Path) -> list[AgentFile]:
    """The agent files of a home, by tenant and name. Reads none of them."""
    folder = home / FOLDER_NAME
    try:
        exposed = bool(home.stat().st_mode & OTHERS)
        tenants = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []
    found = list(_in_folder(folder, DEFAULT, exposed=exposed))
    for path in tenants:
        found += _in_folder(path, path.name, exposed=exposed)
    return found[:FILES_MAX]


def _in_folder(folder: Path, tenant: str, *, exposed: bool) -> Iterator[AgentFile]:
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".toml"))
        loose = exposed and bool(folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    except OSError:
        return
    for path in paths:
        if path.name.startswith("."):
            continue
        try:
            status = path.stat()
        except OSError:
            continue  # gone again, or a link to nowhere
        problem = ""
        if not stat.S_ISREG(status.st_mode):
            problem = "is not a plain file"
        elif loose or (exposed and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            problem = f"others may write to it, or to its folder; run: chmod go-w {folder} {path}"
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        yield AgentFile(tenant, path, stamp, status.st_mtime_ns // 1_000_000, problem)


def read_agent(found: AgentFile) -> AgentDefinition:
    if found.problem:
        raise Invalid("invalid_agent", found.problem)
    definition = read_definition(found.path)
    definition.setdefault("id", found.path.stem)
    return read_agent_definition(definition)


def read_definition(path: Path) -> dict[str, Any]:
    """An agent definition as its author wrote it, unchecked: TOML if the file's name says so, otherwise JSON."""
    try:
        with path.open("rb") as file:
            raw = file.read(DEFINITION_BYTES_MAX + 1)
    except OSError as error:
        raise Invalid("invalid_agent", f"cannot be read: {error.strerror}") from error
    if len(raw) > DEFINITION_BYTES_MAX:
        raise Invalid("invalid_agent", f"may have at most {DEFINITION_BYTES_MAX} bytes")
    try:
        definition = tomllib.loads(raw.decode()) if path.suffix == ".toml" else msgspec.json.decode(raw)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise Invalid("invalid_agent", f"not {kind}: {error}") from error
    if not isinstance(definition, dict):
        raise Invalid("invalid_agent", "the definition must be an object")
    return definition


class AgentReloader:
    """Loads served files again when they change. `serve` replaces the agents that were served before."""

    def __init__(self, files: Sequence[ServedFile], serve: Callable[[Sequence[LoadedAgent]], None], log: Log) -> None:
        self._files = files
        self._serve = serve
        self._log = log
        self._seen: PythonStamps = stamps(files)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_INTERVAL_S)
            await self.step()

    async def step(self) -> bool:
        """Loads the files again if one has changed. Returns whether new agents are served."""
        now = await asyncio.to_thread(stamps, self._files)
        if now == self._seen:
            return False
        changed = [path for path in now | self._seen if now.get(path) != self._seen.get(path)]
        self._seen = now
        try:
            found = await asyncio.to_thread(_reload_modules, self._files, changed)
            self._serve(found)
        except (CannotLoad, Refusal) as wrong:
            self._log.warning("agents.not_reloaded", problem=str(wrong))
            return False
        self._log.info("agents.reloaded", agents=", ".join(agent.definition.id for agent in found))
        return True


def _reload_modules(files: Sequence[ServedFile], changed: Sequence[Path]) -> list[LoadedAgent]:
    """Runs the files and the modules that they import from beside and below them. A failure changes nothing."""
    for path in changed:
        # Bytecode has a stamp in whole seconds: after two changes within a second, Python would run old bytecode.
        with suppress(OSError, NotImplementedError):
            Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    importlib.invalidate_caches()
    folders = _folders(files)
    before = _modules(folders)
    for name in before:
        del sys.modules[name]
    try:
        return load_agents(files)
    except BaseException:
        for name in _modules(folders):
            del sys.modules[name]
        sys.modules.update(before)
        raise


def _modules(folders: Sequence[Path]) -> dict[str, ModuleType]:
    """The modules that were imported from these folders, except installed packages."""
    found: dict[str, ModuleType] = {}
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name == "__main__" or name.partition(".")[0] == "covenant" or not isinstance(file, str):
            continue
        path = Path(file)
        if any(path.is_relative_to(folder) for folder in folders) and _INSTALLED.isdisjoint(path.parts):
            found[name] = module
    return found


def _folders(files: Sequence[ServedFile]) -> list[Path]:
    return sorted({file.path.resolve().parent for file in files})


def stamps(files: Sequence[ServedFile]) -> PythonStamps:
    """The stamps of the served Python files, and of those beside and below them that they may import."""
    found: PythonStamps = {}
    for folder in _folders(files):
        for path in folder.rglob("*.py"):
            if len(found) >= PYTHON_FILES_MAX:
                break
            if (stamp := file_stamp(path)) is not None:
                found[path] = stamp
    return found
