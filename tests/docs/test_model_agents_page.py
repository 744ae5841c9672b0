"""docs/model-agents.md: its settings and its agent definitions, as they stand, read by a daemon."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from covenant.doors.metrics import Meter
from covenant.model.model_prices import ModelCall, ModelTokens, ToolCall, read_model_prices
from tests.agents.model.test_model_calls import NO_COUNTS
from tests.cli.daemons import Daemon

PAGE = (Path(__file__).parents[2] / "docs" / "model-agents.md").read_text(encoding="utf-8")
BLOCKS = [
    "\n".join(line[4:] for line in block.splitlines())
    for block in re.findall(r"(?:^    \S.*\n)+(?:^     *\S.*\n)*", PAGE, re.MULTILINE)
]
DEFINITIONS: list[dict[str, Any]] = [json.loads(block) for block in BLOCKS if block.startswith("{")]
SETTINGS = [block.removeprefix("[model]\n") for block in BLOCKS if "name = " in block]


@pytest.mark.parametrize("settings", SETTINGS, ids=[" ".join(block.split()) for block in SETTINGS])
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


def test_the_prices_of_the_page_price_a_call() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    prices = read_model_prices(json.loads(block))
    tokens = ModelTokens(input=1_000_000, output=100_000, cache_read=500_000)
    assert prices.cost("anthropic:claude-sonnet-5", tokens) == pytest.approx(0.5 * 3 + 0.5 * 0.3 + 0.1 * 15)
    assert prices.cost("openai:llama", tokens) == 0


def test_the_metrics_of_the_page_are_those_that_a_daemon_tells() -> None:
    meter = Meter()
    meter.model_called(ModelCall("a@t", "p:m", "completed", 1.0, ModelTokens(1, 1), 1.0, "USD"))
    meter.tool_called(ToolCall("a@t", "write", "completed", 1.0))
    named = set(re.findall(r"^\| `(covenant_(?:model|tool)_\w+)`", PAGE, re.MULTILINE))
    lines = meter.read(NO_COUNTS, models=True).text().decode().splitlines()
    told = {line.split()[2] for line in lines if line.startswith(("# TYPE covenant_model_", "# TYPE covenant_tool_"))}
    assert named == told
