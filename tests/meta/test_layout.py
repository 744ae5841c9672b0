"""The layout: how much a newcomer has to find their way through, and that the map is true."""

import re
from pathlib import Path

import pytest

from scripts.count_modules import count, modules

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "covenant"
MAPS = ("ARCHITECTURE.md", "CONTRIBUTING.md")
PLACE = re.compile(r"`([a-z_]+(?:/[a-z_0-9]+)+)(?:\.py)?`")
OUTSIDE = ("docs/", "tests/", "scripts/", "bench/", "examples/", "requirements/")


def test_the_tree_stays_within_its_bounds(subtests: pytest.Subtests) -> None:
    for row in count(modules()):
        with subtests.test(row.what):
            assert row.found <= row.bound, "\n".join(row.members) or row.found


@pytest.mark.parametrize("name", MAPS)
def test_every_package_and_module_that_a_map_names_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = [place for place in PLACE.findall(text) if not place.startswith(OUTSIDE)]
    assert named
    missing = [place for place in named if not ((SOURCE / place).is_dir() or (SOURCE / f"{place}.py").is_file())]
    assert missing == []
    packages = re.findall(r"^\| `([a-z]+)` \|", text, re.MULTILINE)
    there = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert name != "ARCHITECTURE.md" or set(packages) == there


def test_the_map_fits_two_pages() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 130
