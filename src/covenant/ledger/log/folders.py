"""Folders for their owner alone, whatever the umask is."""

from __future__ import annotations

import os
from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """Unless it is there. Folders that lead to it and are missing can be read by others, and changed by nobody else."""
    missing = [parent for parent in folder.parents if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(mode=0o755, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open`."""
    return os.open(path, flags, 0o600)
