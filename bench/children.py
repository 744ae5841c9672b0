"""What is measured runs in processes of its own, each of which prints one JSON object and ends.

So every round begins with a fresh interpreter, and what one did to its heap does not burden the next.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from bench import machine

ROOT: Final = Path(__file__).parents[1]
PEER_PYTHON: Final = ROOT / ".venv-bench" / "bin" / "python"
COVENANT: Final = str(Path(sys.executable).with_name("covenant"))
STOP_S: Final = 20.0

T = TypeVar("T")


class ChildFailedError(Exception):
    """A process that should have measured something did not."""


def ours(module: str, answer: type[T], *arguments: object, timeout_s: float, given: bytes = b"") -> T:
    """Run `python -m bench.<module>` with this interpreter."""
    return _run([sys.executable, "-m", f"bench.{module}", *map(str, arguments)], answer, timeout_s, given)


def peer(script: str, answer: type[T], *arguments: object, timeout_s: float) -> T:
    """Run a script of `bench/peers` with the interpreter of the separate environment."""
    return _run(peer_command(script, *arguments), answer, timeout_s)


def peer_command(script: str, *arguments: object) -> list[str]:
    if not PEER_PYTHON.exists():
        raise ChildFailedError(f"{PEER_PYTHON} is not there; `make bench` makes it")
    return [str(PEER_PYTHON), str(ROOT / "bench" / "peers" / f"{script}.py"), *map(str, arguments)]


def _run(command: Sequence[str], answer: type[T], timeout_s: float, given: bytes = b"") -> T:
    done = subprocess.run(command, input=given, cwd=ROOT, capture_output=True, timeout=timeout_s + STOP_S, check=False)
    if done.returncode != 0:
        raise ChildFailedError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr.decode()[-4_000:]}")
    return msgspec.json.decode(done.stdout, type=answer)


class Server:
    """A process that serves until it is told to stop."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self) -> str:
        """The next line it prints, or what it said instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildFailedError(f"{self._process.args!r} said nothing and ended with {self._process.wait(STOP_S)}")
        return line.decode()

    def cpu_s(self) -> float:
        return machine.cpu_s(self.pid)


@contextmanager
def server(command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """Start it; stop it at the end, gently and then not. Its stderr goes to `log`."""
    with log.open("ab") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors)
    try:
        yield Server(process)
    except ChildFailedError as failed:
        raise ChildFailedError(f"{failed}\n{log.read_text(encoding='utf-8')[-4_000:]}") from failed
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
