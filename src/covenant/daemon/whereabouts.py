"""Where a daemon listens for HTTP, left in its home for the commands that call it there.

The port may be any that was free. What is left behind by a daemon that was killed is old, and a call there fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from covenant.daemon.home import UnsafeHome
from covenant.ledger.embedded.disk import open_private

URL_NAME: Final = "http.url"
LENGTH_MAX: Final = 300


def left_files(home: Path) -> tuple[Path, Path]:
    """The file with the URL, and the one that it is written to first."""
    path = home / URL_NAME
    return path, path.with_suffix(".new")


@contextmanager
def left_in(home: Path, url: str) -> Iterator[None]:
    path, aside = left_files(home)
    try:
        aside.unlink(missing_ok=True)
        with open(aside, "x", encoding="ascii", opener=open_private) as file:
            file.write(url + "\n")
        aside.replace(path)
    except OSError as error:
        raise UnsafeHome(
            f"{path} cannot be written: {error.strerror}; make room for it, or remove what is there"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def url_in(home: Path) -> str | None:
    """None if no daemon has left its address here."""
    with suppress(OSError, UnicodeDecodeError):
        url = (home / URL_NAME).read_text(encoding="ascii").strip()
        if url.startswith("http://") and len(url) <= LENGTH_MAX:
            return url
    return None
