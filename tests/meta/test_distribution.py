"""The distribution as its metadata and the repository's texts name it: one name, one version, a small core."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from packaging.requirements import Requirement

from covenant.model.extras import DISTRIBUTION, Extra, install_command
from tests.meta.tidiness import kept_files

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DEPENDENCIES_MAX = 14

# With a gap in the middle, so that this file is not the first to hold what it looks for.
OTHERS_NAME = re.compile(r"\binstall (?:-\S+ )*['\"]?cove" r"nant(?![\w.-])|(?<![\w./-])cove" r"nant\[")


def other_distributions(root: Path) -> Iterator[str]:
    """Texts that make a reader install the distribution of somebody else."""
    for path in kept_files(root):
        text = path.read_bytes().decode("utf-8", errors="replace")
        name = path.relative_to(root).as_posix()
        yield from (f"{name}: {match[0]}" for match in OTHERS_NAME.finditer(text))


def test_every_text_names_our_distribution() -> None:
    assert list(other_distributions(ROOT)) == []


@pytest.mark.parametrize(
    "words", ["pip install {}", "pip install -U '{}[mcp]'", "the extra {}[grpc]", "uv tool install {}"]
)
def test_the_name_of_somebody_else_is_found(tmp_path: Path, words: str) -> None:
    (tmp_path / "guide.md").write_text(words.format("covenant"), encoding="utf-8")
    assert list(other_distributions(tmp_path))


def test_our_own_name_is_accepted(tmp_path: Path) -> None:
    said = f"pip install {DISTRIBUTION}; {install_command('mcp')}; covenant serve; pip install ./covenant-a2a"
    (tmp_path / "guide.md").write_text(said, encoding="utf-8")
    assert list(other_distributions(tmp_path)) == []


def test_the_metadata_has_the_name_that_messages_give() -> None:
    assert PROJECT["project"]["name"] == DISTRIBUTION


def test_the_version_is_written_once() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "covenant.__version__"}}


def test_every_extra_that_a_message_can_name_exists() -> None:
    assert set(PROJECT["project"]["optional-dependencies"]) == set(get_args(Extra))


def test_the_page_on_installing_lists_every_extra() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    extras = page.partition("| extra |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z]+)` \|", extras, re.MULTILINE)) == set(get_args(Extra))
    assert f"{len(PROJECT['project']['dependencies'])} direct dependencies" in page


def test_the_core_has_few_direct_dependencies() -> None:
    assert len(PROJECT["project"]["dependencies"]) <= DEPENDENCIES_MAX


def test_no_dependency_of_the_core_is_one_of_an_extra() -> None:
    core = {Requirement(line).name for line in PROJECT["project"]["dependencies"]}
    for lines in PROJECT["project"]["optional-dependencies"].values():
        assert core.isdisjoint(Requirement(line).name for line in lines)
