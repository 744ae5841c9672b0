"""The server under test: started by its command, killed with its process group, started again on the same home."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import socket
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from covenant.prove.a2a_client import ServerUnreachable, fetch_object
from covenant.prove.protocol import ServerRefused

POLL_S: Final = 0.05
PORTS_TRIED: Final = 100
STOP_S: Final = 30.0
"""How long a server may take to stop after a signal, before it is killed."""
LOG_TAIL: Final = 600


class StartFailed(Exception):
    """The server ended, or did not answer with its card in time."""


class ServerUnderTest:
    """`folder` is this server's own: it has the home, the log and the file of executions. The port stays the same."""

    def __init__(self, command: str, card: str, folder: Path, *, token_file: str | None, start_s: float) -> None:
        self.port = free_port()
        self.home = folder / "home"
        self.home.mkdir()
        self.runs_file = folder / "runs.txt"
        self.runs_file.touch()
        self.card_url = self._fill_in(card)
        self.starts = 0
        self._log = folder / "server.log"
        self._argv = [self._fill_in(word) for word in shlex.split(command)]
        self._token_file = None if token_file is None else Path(self._fill_in(token_file))
        self._start_s = start_s
        self._process: asyncio.subprocess.Process | None = None

    def _fill_in(self, text: str) -> str:
        return text.replace("{port}", str(self.port)).replace("{home}", str(self.home))

    def headers(self) -> Mapping[str, str]:
        """The headers of each call. The server may write its token when it first starts."""
        if self._token_file is None or not self._token_file.is_file():
            return {}
        return {"authorization": f"Bearer {self._token_file.read_text(encoding='utf-8').strip()}"}

    def runs(self) -> Counter[str]:
        """How often the agent was executed, by key."""
        return Counter(self.runs_file.read_text(encoding="utf-8", errors="replace").split())

    async def start(self) -> dict[str, Any]:
        """Starts the server and returns its card. Raises `StartFailed`, or `Unreadable` for anything but a card."""
        with self._log.open("ab") as log:
            # `env` adds one variable to the environment without reading the others.
            self._process = await asyncio.create_subprocess_exec(
                "env", f"PROVE_RUNS={self.runs_file}", *self._argv,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.starts += 1
        end_s = time.monotonic() + self._start_s
        reason = ""
        while time.monotonic() < end_s:
            if self._process.returncode is not None:
                break
            try:
                return await fetch_object("the card", self.card_url, self.headers(), self._start_s)
            except (ServerUnreachable, ServerRefused) as failed:
                reason = str(failed)
            await asyncio.sleep(POLL_S)
        ended = self._process.returncode
        why = f"it ended with status {ended}" if ended is not None else f"no card after {self._start_s:g} s ({reason})"
        await self.end()
        raise StartFailed(f"start {self.starts}: {why}; its last words: {self._log_tail()}")

    async def kill(self, sent: signal.Signals) -> int:
        """Signals the process group, waits, and returns the exit status. A server that does not stop is killed."""
        process = self._process
        assert process is not None, "nothing was started"
        self._signal(sent)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()
        stopped = process.returncode
        await self.end()
        return stopped if stopped is not None else -signal.SIGKILL

    async def end(self) -> None:
        """Kills the process group, if one is running."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            await self._process.wait()
            self._process = None

    def _signal(self, sent: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, sent)

    def _log_tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].strip() or "none"


def free_port() -> int:
    """A port that the server keeps over its restarts: below the system's range for outgoing connections."""
    for _ in range(PORTS_TRIED):
        port = 12_000 + secrets.randbelow(18_000)  # two kits that run at once choose different ports
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise StartFailed("no free port")
