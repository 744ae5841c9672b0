"""Starts `covenant` again and again from one process that has imported it: each start saves most of a second of work.

What is started is a process like any other, with its own id, environment, folder, files and exit code. Run as a
program, this module is the server: whoever started it sends one message for each process, with the files that it gets.
"""

import atexit
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from tests.waits import BOUND_S

IMPORTED: Final = (
    "anyio._backends._asyncio",
    "asyncio.unix_events",
    "covenant.cli.a2a_servers",
    "covenant.cli.main",
    "covenant.cli.homes",
    "covenant.cli.serve",
    "covenant.daemon.doctor.home_check",
    "covenant.daemon.doctor.ledger_check",
    "covenant.daemon.doctor.ledger_repair",
    "covenant.daemon.lifecycle",
    "covenant.daemon.wiring.peers",
    "covenant.ledger.postgres.open_postgres",
    "covenant.outbound.guarded_transport",
    "encodings.ascii",
    "encodings.idna",
    "encodings.utf_16_be",
)
MODELS: Final = (
    "covenant.agents.model.mcp_http",
    "covenant.agents.model.mcp_stdio",
    "covenant.agents.model.model_agent",
    "pydantic_ai.models.openai",
)
"""For daemons with a language model: these take twice as long as all others together."""
MESSAGE_BYTES_MAX: Final = 200_000
PID_CHARS: Final = 10
"""The width of the process id in the pipe: the status of a process that ends at once stands right behind it."""
STANDARD_FILES: Final = 3


class ForkServerEnded(Exception):
    """It could start nothing more."""


class ForkedProcess:
    """What `subprocess.Popen` is for a program, of a process that the server forked."""

    def __init__(self, pid: int, status: int, stdout: IO[str] | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._status = status
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(("covenant", str(self.pid)), timeout or 0)
        return code

    def _look(self, timeout: float | None) -> int | None:
        with self._lock:
            if self.returncode is None:
                with selectors.DefaultSelector() as selector:
                    selector.register(self._status, selectors.EVENT_READ)
                    if selector.select(timeout):
                        told = os.read(self._status, 100)
                        os.close(self._status)
                        # Nothing: its server has ended, and has killed it.
                        self.returncode = os.waitstatus_to_exitcode(int(told or signal.SIGKILL))
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and its status is on its way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Ends with this process, and everything that it started ends with it."""

    def __init__(self, imported: Sequence[str]) -> None:
        self.nothing = os.open(os.devnull, os.O_RDONLY)
        """A standard input for who reads nothing."""
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), *imported]
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=Path(__file__).parents[2],
            )

    def close(self) -> None:
        """Everything that it started is killed."""
        self._ours.close()
        self._process.wait(BOUND_S)
        os.close(self.nothing)

    def start(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        files: tuple[int, int, int],
        stdout: IO[str] | None = None,
        constants: Mapping[str, float] | None = None,
    ) -> ForkedProcess:
        """`files`: its standard input, output and errors. `constants`: other values, by module and name."""
        told = {
            "words": list(words),
            "env": dict(env),
            "cwd": str(cwd or Path.cwd()),
            "umask": _umask(),
            "constants": dict(constants or {}),
        }
        status, theirs = os.pipe()
        try:
            data = json.dumps(told).encode()
            assert len(data) < MESSAGE_BYTES_MAX
            socket.send_fds(self._ours, [data], [*files, theirs])
        finally:
            os.close(theirs)
        pid = os.read(status, PID_CHARS)
        if not pid:
            os.close(status)
            raise ForkServerEnded(f"with {self._process.wait(BOUND_S)}")
        return ForkedProcess(int(pid), status, stdout)


_running: Final[dict[bool, ForkServer]] = {}


_making: Final = threading.Lock()
"""Two threads that ask first must get one server: a second one would end, and all that it had started."""


def fork_server(*, models: bool = False) -> ForkServer:
    """The one of this process; `models`: that of daemons with a language model."""
    with _making:
        if models not in _running:
            _running[models] = ForkServer((*IMPORTED, *MODELS) if models else IMPORTED)
        return _running[models]


def stop_fork_servers() -> None:
    """Called when the tests are over."""
    while _running:
        _running.popitem()[1].close()


def _umask() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


# The server


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Returns in each process that was forked, with what it was told, and at the end, with nothing."""
    status_of: dict[int, tuple[int, int]] = {}
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not requests:
                handle = key.fd
                pid, status = status_of.pop(handle)
                selector.unregister(handle)
                os.close(handle)
                os.write(status, str(os.waitpid(pid, 0)[1]).encode())
                os.close(status)
                continue
            data, files, _, _ = socket.recv_fds(requests, MESSAGE_BYTES_MAX, STANDARD_FILES + 1)
            if not data:
                for pid, _ in status_of.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            *standard, status = files
            pid = os.fork()
            if pid == 0:
                for number, file in enumerate(standard):
                    os.dup2(file, number)
                selector.close()
                requests.detach()
                os.closerange(STANDARD_FILES, os.sysconf("SC_OPEN_MAX"))
                told: dict[str, Any] = json.loads(data)
                return told
            for file in standard:
                os.close(file)
            os.write(status, f"{pid:{PID_CHARS}d}".encode())
            handle = os.pidfd_open(pid)
            status_of[handle] = (pid, status)
            selector.register(handle, selectors.EVENT_READ)


def run_forked(told: dict[str, Any]) -> None:
    """As if the program had just been started by its name."""
    os.environ.clear()
    os.environ.update(told["env"])
    os.umask(told["umask"])
    os.chdir(told["cwd"])
    time.tzset()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [str(Path(sys.executable).with_name("covenant")), *told["words"]]
    sys.path.pop(0)  # where this module was found, and the program's would not be
    main: Any = import_module("covenant.cli.main")
    for name, value in told["constants"].items():
        module, _, constant = name.rpartition(".")
        owner = import_module(module)
        assert hasattr(owner, constant), name
        setattr(owner, constant, value)
    try:
        main.main()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            raise
        _exit(ended.code or 0)
    _exit(0)


def _exit(code: int) -> NoReturn:
    """As the interpreter ends, but that it takes no object apart: what was imported before the fork would be copied."""
    shutdown: Any = vars(threading)["_shutdown"]
    shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in sys.argv[2:]:
        import_module(name)
    gc.collect()
    gc.freeze()
    if (asked := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        run_forked(asked)
    _exit(0)
