"""Where tests put what has a socket in it."""

import random
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.waits import until


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder, for a while, whose name leaves room for a socket's path: that may have some hundred bytes."""
    folder = Path(tempfile.mkdtemp(prefix="cov-"))
    try:
        yield folder
    finally:
        until(lambda: _is_removed(folder))


def _is_removed(folder: Path) -> bool:
    """A process of a killed daemon may write for a moment longer."""
    with suppress(OSError):
        shutil.rmtree(folder)
    return not folder.exists()


_kept: Final[list[int]] = []


def free_port() -> int:
    """One that stays free while its daemon is away: below those that the system gives to whoever calls out.

    This process keeps the port of the same number for datagrams, so that nobody else is given it here meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 30_000)
        with socket.socket() as tried, socket.socket(type=socket.SOCK_DGRAM) as keeps:
            try:
                keeps.bind(("127.0.0.1", port))
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            _kept.append(keeps.detach())
            return port
