"""The generated documents are those that are committed, and they cover everything."""

import click
import pytest

from covenant.cli.main import command as root
from covenant.daemon.settings_loader import entries
from scripts.generate_docs import DOCUMENTS, ROOT, leaves


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_generated_document_is_up_to_date(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == DOCUMENTS[name](), f"{name} is old; run `make docs`"


def test_every_command_is_documented_and_says_what_it_is_for() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for path, command in leaves(root):
        assert f"## covenant {' '.join(path)}\n" in text
        assert command.help
        assert all(option.help for option in command.params if isinstance(option, click.Option)), path


def test_every_command_that_answers_does_so_in_json_and_says_how() -> None:
    for path, command in leaves(root):
        if path not in (("serve",), ("mcp",)):
            assert any(parameter.name == "as_json" for parameter in command.params), path
            assert "With --json: {" in (command.epilog or ""), path


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    named = {entry.name: "<br>".join(f"`{name}`" for name in (entry.name, *entry.variables)) for entry in entries()}
    assert [name for name, names in named.items() if f"| {names} |" not in text] == []
