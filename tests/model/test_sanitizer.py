"""Names of files from others: single segments, however they are spelled."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.content import Embedded, Image, Json, Resource, ResourceLink, Text
from covenant.model.ids import TaskId
from covenant.model.sanitizer import NAME_CHARS_MAX, file_name_of, is_file_name, named_safely
from covenant.model.task import Result, ResultStatus
from covenant.model.task_event import ArtifactUpdate, MessageUpdate, StatusUpdate

WRONG = {
    "../../x": "x",
    "/etc/passwd": "passwd",
    "..\\..\\boot.ini": "boot.ini",
    "a/b\\c": "c",
    "..": "file",
    ".": "file",
    " . ": "file",
    "a/": "file",
    "": "file",
    "\x00": "file",
    "a\nb.txt": "ab.txt",
    "x\u2028y\u202ez": "xyz",
    "a" * 300 + ".pdf": "a" * 251 + ".pdf",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_name_becomes_its_last_segment(name: str) -> None:
    assert file_name_of(name) == WRONG[name]
    assert not is_file_name(name)
    assert is_file_name(file_name_of(name))


@pytest.mark.parametrize("name", ["a.txt", "Übersicht 2024 (2).pdf", ".gitignore", "a..b", "日本.png", "x" * 255])
def test_an_ordinary_name_stays(name: str) -> None:
    assert is_file_name(name)
    assert file_name_of(name) == name


@given(st.text())
def test_whatever_the_name_is_it_is_one_segment_afterwards(name: str) -> None:
    made = file_name_of(name)
    assert is_file_name(made)
    assert 0 < len(made) <= NAME_CHARS_MAX
    assert "/" not in made
    assert "\\" not in made
    assert made not in (".", "..")
    assert made.isprintable()


BLOCKS: list[Any] = [
    Text("x", filename="../../x"),
    Json({}, filename="../../x"),
    Resource(Embedded("", blob="eA=="), filename="../../x"),
    ResourceLink("https://host/x", "../../x"),
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: type(block).__name__)
def test_every_block_of_every_kind_of_word_is_named_safely(block: Any) -> None:
    result = Result(task_id=TaskId("t"), status=ResultStatus.OK, content=(Image("", "image/png"), block))
    said: list[Any] = [
        ArtifactUpdate("a", (block,), "../y"),
        MessageUpdate(parts=(block,)),
        StatusUpdate("", parts=(block,)),
    ]
    safe = [named_safely(each) for each in said]
    blocks = [named_safely(result).content[1], *(each.parts[0] for each in safe)]
    assert {getattr(each, "filename", None) or getattr(each, "name", None) for each in blocks} == {"x"}
    assert safe[0].name == "y"
    assert all(named_safely(each) is each for each in safe)
