"""docs/model-agents.md: its settings and its agent definitions, as they stand, read by a daemon."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.daemons import Daemon

PAGE = (Path(__file__).parents[2] / "docs" / "model-agents.md").read_text(encoding="utf-8")
BLOCKS = [
    "\n".join(line[4:] for line in block.splitlines())
    for block in re.findall(r"(?:^    \S.*\n)+(?:^     *\S.*\n)*", PAGE, re.MULTILINE)
]
DEFINITIONS: list[dict[str, Any]] = [json.loads(block) for block in BLOCKS if block.startswith("{")]
SETTINGS = [block.removeprefix("[model]\n") for block in BLOCKS if "name = " in block]


@pytest.mark.parametrize("settings", SETTINGS, ids=[re.split(r'"', block)[1] for block in SETTINGS])
def test_a_daemon_takes_the_settings_of_the_page_and_every_definition(short_path: Path, settings: str) -> None:
    assert len(DEFINITIONS) >= 3
    home = short_path / "home"
    (home / "agents").mkdir(parents=True)
    home.chmod(0o700)
    (home / "settings.toml").write_text(f"[model]\n{settings}\n")
    for number, definition in enumerate(DEFINITIONS):
        written = {**definition, "id": f"{definition['id']}-{number}", "kind": "model"}
        (home / "agents" / f"{written['id']}.json").write_text(json.dumps(written))
    daemon = Daemon(home, env={"ANTHROPIC_API_KEY": "none", "OPENAI_API_KEY": "none", "MY_KEY": "none"})
    try:
        named = re.search(r'name = "([^"]+)"', settings)
        assert named is not None
        shown = {each["name"]: each["value"] for each in daemon.json("settings", "show")["settings"]}
        assert named.group(1) in shown["model.name"]
        listed = {agent["id"] for agent in daemon.json("agents", "list")["agents"]}
        assert {f"{definition['id']}-{number}" for number, definition in enumerate(DEFINITIONS)} <= listed
    finally:
        daemon.stop()
