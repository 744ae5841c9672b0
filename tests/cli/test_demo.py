"""`covenant serve --demo`, as `make run` starts it: every command that it prints is run as it stands."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.daemons import COVENANT, environment, said_until, started
from tests.waits import BOUND_S

COMMAND = re.compile(r"^ +\$ (.+)$", re.MULTILINE)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """What it says first."""
    env = environment(COVENANT_HTTP_PORT="0")
    nowhere = subprocess.DEVNULL
    with started([COVENANT, "serve", "--demo"], stdout=subprocess.PIPE, stderr=nowhere, cwd=folder, env=env) as process:
        yield said_until(process, b"/a2a/queue\n")
        process.terminate()
        assert process.wait(BOUND_S) == 0


@pytest.fixture
def folder(short_path: Path) -> Path:
    made = short_path / "repository"
    made.mkdir(exist_ok=True)
    return made


def test_every_printed_command_works_as_it_stands_and_again_after_a_restart(folder: Path) -> None:
    for _ in range(2):
        with served(folder) as said:
            commands = COMMAND.findall(said)
            assert len(commands) == 10
            outputs = [run(command, folder) for command in commands]
        assert outputs[0] == "echo: hello\n"
        assert outputs[1] == "The counter found 4 words.\n"
        assert outputs[2] == "4 words\n"
        assert outputs[3].startswith("clerk ")
        assert outputs[5] == "count the stars\n"
        assert "in flight" in outputs[6]
        assert outputs[8].startswith("valid: ")
        assert outputs[9].startswith('{"kind":"a2a_queue"')


def run(command: str, folder: Path) -> str:
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, (command, done)
    return done.stdout


def test_the_demo_keeps_to_a_folder_of_its_own_that_git_leaves_alone(folder: Path) -> None:
    with served(folder):
        pass
    assert [path.name for path in folder.iterdir()] == [".demo"]
    assert (folder / ".demo" / ".gitignore").read_text() == "*\n"
