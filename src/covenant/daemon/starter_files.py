"""What `covenant init` writes: a settings file in which every line is commented out, and a first `agents.py`.

A file that is there already is left as it is.
"""

from __future__ import annotations

import itertools
import json
import textwrap
from pathlib import Path
from typing import Any, Final

from covenant.daemon.home import make_home
from covenant.daemon.settings_loader import FILE_NAME, SettingEntry, entries

AGENTS_NAME: Final = "agents.py"
WIDTH: Final = 110

AGENTS: Final = '''"""Agents of this daemon: `covenant serve agents.py` serves every `Agent` at the top level."""

from covenant import Agent, Turn

hello = Agent("hello", description="Greets whoever writes")


@hello
async def greet(turn: Turn):
    # A string is a chunk of the answer, and is streamed. Returning completes the task; raising fails it.
    yield f"Hello, {turn.text}!"
'''

HEAD: Final = """\
# Settings of this daemon. Each key has its default. To change it, remove the `#` before section and key.
# A variable of the environment or a flag of `covenant serve` is stronger. `covenant settings show` prints what is in
# force, and where it came from.
"""


def write_starter_files(home: Path, agents: Path) -> list[tuple[Path, bool]]:
    """Each file, and whether it is new. Raises UnsafeHome and OSError."""
    make_home(home)
    return [(path, _write_new(path, text)) for path, text in ((home / FILE_NAME, settings_text()), (agents, AGENTS))]


def _write_new(path: Path, text: str) -> bool:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


def settings_text() -> str:
    sections = itertools.groupby(entries(), key=lambda entry: entry.section)
    return HEAD + "".join(f"\n# [{name}]\n" + "".join(map(_lines, found)) for name, found in sections)


def _lines(entry: SettingEntry) -> str:
    meaning = textwrap.wrap(entry.setting.meaning, WIDTH, initial_indent="## ", subsequent_indent="## ")
    return "\n".join([*meaning, f"# {entry.key} = {_toml(entry.default)}", ""])


def _toml(value: Any) -> str:
    """JSON writes these as TOML does."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
