"""No Python in the documents uses a name that nothing there defines."""

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"```python\n(.*?)```", re.DOTALL)
INDENTED = re.compile(r"(?:^(?:    .*)?\n)+", re.MULTILINE)
IS_PYTHON = re.compile(r"^(?:from \w|import \w|def |async def |@)", re.MULTILINE)


def snippets(text: str) -> Iterator[str]:
    yield from FENCED.findall(text)
    for block in INDENTED.findall(FENCED.sub("", text)):
        snippet = textwrap.dedent(block).strip("\n")
        if IS_PYTHON.search(snippet):
            yield snippet


def undefined(snippet: str) -> str:
    compile(snippet, "snippet", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "concise", "-"]
    done = subprocess.run(ruff, input=snippet, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout if done.returncode else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_snippets_of_a_page_define_what_they_use(page: Path) -> None:
    assert "".join(map(undefined, snippets(page.read_text(encoding="utf-8")))) == ""


def test_a_name_that_nothing_defines_is_found() -> None:
    (fenced,) = snippets("```python\nprint(token)\n```\n")
    (indented,) = snippets("Text\n\n    @agent\n    def f():\n        return 1\n\nText\n")
    assert "token" in undefined(fenced)
    assert "agent" in undefined(indented)
