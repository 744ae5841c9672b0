"""Where tests put what has a socket in it."""

import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder, for a while, whose name leaves room for a socket's path: that may have some hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="cov-") as name:
        yield Path(name)


def free_port() -> int:
    """One that stays free while its daemon is away: below those that the system gives to whoever calls out."""
    while True:
        port = random.SystemRandom().randrange(12_000, 30_000)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
