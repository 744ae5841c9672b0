"""The recorded terminal: its script runs the real thing, and the picture in the repository is one of these commands."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from scripts.record_terminal import COMMANDS, COUNT
from tests.cli.daemons import environment
from tests.waits import BOUND_S

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "record_terminal.py"
PICTURE = ROOT / "docs" / "images" / "kill-and-requeue.svg"
TEXT = "{http://www.w3.org/2000/svg}text"
BYTES_MAX = 100_000


def texts(svg: Path, kind: str) -> list[str]:
    return [each.text or "" for each in ET.parse(svg).getroot().iter(TEXT) if each.get("class") == kind]


def task_in(svg: Path) -> str:
    (lost,) = [text for text in texts(svg, "said") if text.startswith("holder lost")]
    return lost.split()[2]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    svg = tmp_path_factory.mktemp("recorded") / "new.svg"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(svg)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=5 * BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return svg


def pictures(recorded: Path) -> list[Path]:
    return [recorded, PICTURE]


def test_every_command_is_in_the_picture(recorded: Path) -> None:
    *plain, requeue = COMMANDS
    for svg in pictures(recorded):
        typed = [text.removeprefix("$ ") for text in texts(svg, "typed")]
        assert Counter(typed) - Counter(plain) == Counter([requeue.format(task=task_in(svg))])


def test_the_client_gets_each_number_once_over_the_kill(recorded: Path) -> None:
    for svg in pictures(recorded):
        numbers = [word for text in texts(svg, "said") for word in text.split() if text.replace(" ", "").isdigit()]
        assert numbers == [str(number) for number in range(1, COUNT + 1)]


def test_the_operator_sees_the_lost_holder_and_requeues_the_task(recorded: Path) -> None:
    for svg in pictures(recorded):
        assert any(text.startswith(f"requeued {task_in(svg)}") for text in texts(svg, "said"))


def test_a_picture_is_small_and_has_nothing_of_the_machine_it_was_made_on(recorded: Path) -> None:
    for svg in pictures(recorded):
        drawing = svg.read_text(encoding="utf-8")
        assert len(drawing.encode()) < BYTES_MAX
        assert "<script" not in drawing
        assert "/tmp" not in drawing
        assert str(Path.home()) not in drawing
