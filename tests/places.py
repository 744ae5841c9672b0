"""Where tests put what has a socket in it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder, for a while, whose name leaves room for a socket's path: that may have some hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="cov-") as name:
        yield Path(name)
