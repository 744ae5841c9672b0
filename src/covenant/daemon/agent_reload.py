"""Agents of served files, loaded again in place when a file changes: for development.

The files are looked at a few times a second. When one of them, or a module beside or below it, has changed, all of them
are run anew in a thread, with what they import from there. Only if all of it works do the new agents take the places of
the old ones: new turns run the new code, turns under way end with the old one, and agents that are not there any more
take no more work. What cannot be run changes nothing, and is told once.

The doors, streams and leases notice nothing.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Final

from covenant.agents.agent_loader import CannotLoad, LoadedAgent, load_agents
from covenant.daemon.telemetry import Log
from covenant.model.errors import Refusal

LOOK_S: Final = 0.3
FILES_MAX: Final = 2_000
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})

Stamps = dict[Path, tuple[int, int]]


class AgentReloader:
    """`serve` puts loaded agents into the places of those that were served before."""

    def __init__(self, files: Sequence[Path], serve: Callable[[Sequence[LoadedAgent]], None], log: Log) -> None:
        self._files = files
        self._serve = serve
        self._log = log
        self._seen: Stamps = stamps(files)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.step()

    async def step(self) -> bool:
        """One look; whether other agents are served now."""
        now = await asyncio.to_thread(stamps, self._files)
        if now == self._seen:
            return False
        changed = [path for path in now | self._seen if now.get(path) != self._seen.get(path)]
        self._seen = now
        try:
            found = await asyncio.to_thread(_load_anew, self._files, changed)
            self._serve(found)
        except (CannotLoad, Refusal) as wrong:
            self._log.warning("agents.not_reloaded", problem=str(wrong), the_old_ones="go on")
            return False
        self._log.info("agents.reloaded", agents=", ".join(agent.definition.id for agent in found))
        return True


def _load_anew(files: Sequence[Path], changed: Sequence[Path]) -> list[LoadedAgent]:
    """Run the files with what they import from beside and below them. If that fails, all is as it was before."""
    for path in changed:
        # Its stamp has seconds: bytecode of a file that was changed twice in one would be taken for the newer one's.
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
    """Those that were imported from these folders, and are nobody's installed package."""
    found: dict[str, ModuleType] = {}
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name == "__main__" or name.partition(".")[0] == "covenant" or not isinstance(file, str):
            continue
        path = Path(file)
        if any(path.is_relative_to(folder) for folder in folders) and _INSTALLED.isdisjoint(path.parts):
            found[name] = module
    return found


def _folders(files: Sequence[Path]) -> list[Path]:
    return sorted({file.resolve().parent for file in files})


def stamps(files: Sequence[Path]) -> Stamps:
    """The Python files that are served, and those beside and below them that they may import."""
    found: Stamps = {}
    for folder in _folders(files):
        for path in folder.rglob("*.py"):
            if len(found) >= FILES_MAX:
                break
            try:
                is_now = path.stat()
            except OSError:
                continue
            found[path] = (is_now.st_mtime_ns, is_now.st_size)
    return found
