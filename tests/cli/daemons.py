"""A real daemon in a process of its own, on a home and a port of its own, and the CLI against it."""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import pytest
from click.testing import CliRunner

from covenant.cli.main import command
from tests.cli.fork_server import ForkedProcess, fork_server
from tests.waits import BOUND_S

COVENANT = Path(sys.executable).with_name("covenant")
ASKING = frozenset("a2a attention logs capabilities audit identities tenants agents files peers".split())
"""Nouns whose commands ask a daemon and do nothing else."""


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        lines = self.out.splitlines()
        assert len(lines) == 1, f"not one JSON object: {self.out!r} {self.err!r}"
        found = json.loads(lines[0])
        assert isinstance(found, dict)
        return found


def environment(**more: str) -> dict[str, str]:
    """What the tests were started with, without any setting of ours."""
    ours = ("COVENANT_", "A2A_", "PORT", "BIND_HOST")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "COLUMNS": "200", **more}


def covenant(*words: str, stdin: str = "", env: dict[str, str] | None = None, cwd: Path | None = None) -> Ran:
    """Run a command. One that does nothing but ask a daemon runs in this process, which saves a start of Python."""
    asks = next((word for word in words if word in ASKING), None)
    if asks is not None and cwd is None and threading.current_thread() is threading.main_thread():
        return _run_here(words, stdin, environment(**(env or {})))
    given = environment(**(env or {}))
    if _python_reads(env or {}):
        done = subprocess.run(
            [str(COVENANT), *words],
            input=stdin,
            capture_output=True,
            text=True,
            env=given,
            cwd=cwd,
            timeout=BOUND_S,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)
    with TemporaryFile("w+") as typed, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        typed.write(stdin)
        typed.seek(0)
        files = (typed.fileno(), out.fileno(), err.fileno())
        process = fork_server().start(words, env=given, cwd=cwd, files=files)
        try:
            code = process.wait(BOUND_S)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return Ran(code, out.read(), err.read())


def _start(
    words: Sequence[str],
    env: dict[str, str],
    cwd: Path | None,
    *,
    log: int,
    inside: tuple[str, ...],
    constants: Mapping[str, float],
) -> "subprocess.Popen[str] | ForkedProcess":
    """With a pipe for what it says."""
    if inside or _python_reads(env):
        assert not constants
        return subprocess.Popen(
            [*inside, str(COVENANT), *words],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment(**env),
            cwd=cwd,
        )
    server = fork_server(models="COVENANT_MODEL_NAME" in env)
    ours, theirs = os.pipe()
    said = os.fdopen(ours)
    try:
        files = (server.nothing, theirs, log)
        return server.start(words, env=environment(**env), cwd=cwd, files=files, stdout=said, constants=constants)
    except BaseException:
        said.close()
        raise
    finally:
        os.close(theirs)


def _python_reads(env: dict[str, str]) -> bool:
    """Whether these variables mean something to Python itself when it starts."""
    return any(name.startswith("PYTHON") for name in env)


def _run_here(words: tuple[str, ...], stdin: str, env: dict[str, str]) -> Ran:
    hidden: dict[str, str | None] = {name: None for name in os.environ if name not in env}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(COVENANT), *words])
        done = CliRunner().invoke(command, words, input=stdin, env={**hidden, **env}, prog_name="covenant")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Ran(done.exit_code, done.stdout, done.stderr)


@contextmanager
def started(words: Sequence[str | Path], **how: Any) -> Iterator["subprocess.Popen[Any]"]:
    """A program of the test's own. It is killed and its pipes are closed, however the test ends."""
    with subprocess.Popen(words, **how) as process:
        try:
            yield process
        finally:
            process.kill()


def said_until(process: "subprocess.Popen[Any]", end: bytes) -> str:
    """What a program says on its standard output until it has said this."""
    assert process.stdout is not None
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while end not in said:
            assert selector.select(BOUND_S), said
            more = os.read(process.stdout.fileno(), 65_536)
            assert more, said
            said += more
    return said.decode()


def _let_go(process: "subprocess.Popen[str] | ForkedProcess", log: IO[str]) -> None:
    process.kill()
    process.wait(BOUND_S)
    assert process.stdout is not None
    process.stdout.close()
    log.close()


class DaemonDidNotStart(AssertionError):
    """With what it said and logged instead."""


class Daemon:
    """Started when made. One that a failed test did not stop is killed and closed when nobody knows it any more.

    `inside`: a command that runs it elsewhere.

    `constants`: values of the code that no setting changes, by module and name: shorter times than those of a service.
    """

    def __init__(
        self,
        home: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        inside: tuple[str, ...] = (),
        constants: Mapping[str, float] | None = None,
    ) -> None:
        self.home = home
        self._log = (home.parent / f"{home.name}.log").open("a+")
        words = ("serve", "--home", str(home), "--http-port", "0", *flags)
        try:
            log = self._log.fileno()
            self.process = _start(words, env or {}, cwd, log=log, inside=inside, constants=constants or {})
        except BaseException:
            self._log.close()
            raise
        self._let_go = weakref.finalize(self, _let_go, self.process, self._log)
        try:
            self.first_line = self._first_line()
        except BaseException:
            self.stop(signal.SIGKILL)
            raise
        self.url = self.first_line.split()[3]

    def _first_line(self) -> str:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(BOUND_S), f"the daemon did not start: {self.log}"
        line = self.process.stdout.readline()
        if not line.startswith("covenant listens on "):
            raise DaemonDidNotStart(f"{line!r}: {self.log}")
        return line.strip()

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def run(self, *words: str, stdin: str = "", env: dict[str, str] | None = None) -> Ran:
        return covenant("--home", str(self.home), *words, stdin=stdin, env=env)

    def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        ran = self.run(*words, "--json")
        assert ran.code == code, ran
        return ran.json

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit code. One that does not stop is killed."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(number)
            return self.process.wait(BOUND_S)
        finally:
            self._let_go()
