"""Serving that begins again whenever its files change: for development, where a restart is the simplest sure thing.

A parent that only watches, and a child that serves. A child that ends by itself (a mistake in a file, say) is started
again with the next change. What was accepted is in the ledger, so a restart loses nothing.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from covenant.daemon.logs import Log

LOOK_S: Final = 0.3
FILES_MAX: Final = 2_000

Stamps = dict[Path, tuple[int, int]]


def serve_again_and_again(command: Sequence[str], files: Sequence[Path], log: Log) -> int:
    """Blocks until it is told to stop; the child's exit code. `command` serves once."""
    told = threading.Event()

    def tell(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, tell)
    while True:
        before = stamps(files)
        # In a session of its own: a Ctrl-C is passed on once, by us, and not a second time by the terminal.
        child = subprocess.Popen(command, start_new_session=True)  # noqa: S603  (our own command, as it was given)
        while not told.wait(LOOK_S) and stamps(files) == before:
            pass
        code = _stop(child)
        if told.is_set():
            return code
        log.info("serve.reloading")


def _stop(child: subprocess.Popen[bytes]) -> int:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    return child.wait()


def stamps(files: Sequence[Path]) -> Stamps:
    """The Python files that are served, and those beside and below them that they may import."""
    found: Stamps = {}
    for folder in {file.resolve().parent for file in files}:
        for path in folder.rglob("*.py"):
            if len(found) >= FILES_MAX:
                break
            try:
                is_now = path.stat()
            except OSError:
                continue
            found[path] = (is_now.st_mtime_ns, is_now.st_size)
    return found
