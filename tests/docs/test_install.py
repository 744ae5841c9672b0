"""docs/install.md: what a daemon does without an extra, and which locks there are."""

import re
from importlib.metadata import packages_distributions
from pathlib import Path
from tomllib import loads
from typing import get_args

import pytest
from packaging.requirements import Requirement

from covenant.model.extras import Extra, install_command
from tests.cli.daemons import Daemon, covenant
from tests.matrices import first_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
EXTRAS = loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NEEDED = {
    "grpc": {"COVENANT_GRPC_ENABLED": "true"},
    "mcp": {},
    "model": {"COVENANT_MODEL_NAME": "openai:llama"},
    "otel": {"OTEL_TRACES_EXPORTER": "console"},
    "peers": {"COVENANT_PEERS_ENABLED": "true"},
    "postgres": {"COVENANT_LEDGER_URL": "postgres://nobody@127.0.0.1:1/nowhere"},
}
"""What in the environment needs each extra."""


def without(extra: str, folder: Path) -> dict[str, str]:
    """The environment of a Python that does not find the packages of an extra."""
    named = {Requirement(line).name for line in EXTRAS[extra]}
    modules = [each for each, owners in packages_distributions().items() if named & set(owners)]
    if extra == "model":
        modules.append("pydantic_ai")
    assert modules
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({modules!r}))\n")
    return {"PYTHONPATH": str(folder), **NEEDED[extra]}


def consequence(extra: str) -> str:
    (found,) = re.findall(rf"^\| `{extra}` \|.*\| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("extra", first_of(get_args(Extra), 2))
def test_without_an_extra_a_start_goes_as_the_page_says(extra: Extra, short_path: Path) -> None:
    told, env, home = consequence(extra), without(extra, short_path / "hidden"), short_path / "home"
    if told == "the start is refused":
        done = covenant("serve", "--home", str(home), "--http-port", "0", env=env)
        assert done.code == 1
        assert install_command(extra) in done.err
        return
    assert told.startswith("the daemon starts")
    daemon = Daemon(home, env=env)
    try:
        assert daemon.json("a2a", "status")["kind"] == "a2a_status"
        assert ("with a warning" in told) == (install_command(extra) in daemon.log)
    finally:
        daemon.stop()


def test_the_page_lists_every_lock() -> None:
    listed = re.findall(r"^\| `(\w+\.lock)` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "requirements").glob("*.lock"))
