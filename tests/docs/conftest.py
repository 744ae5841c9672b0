"""A folder whose name leaves room for a socket's path, which systems keep short."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="cov-"))
    yield folder
    shutil.rmtree(folder)
