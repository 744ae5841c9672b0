"""The files of one tenant beside the ledger: definitions of its agents, and the notes of these agents."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from covenant.daemon.agent_files import FOLDER_NAME
from covenant.daemon.home import JOURNAL_NAME
from covenant.ledger.contract.retention import SearchedPlace, tenant_markers
from covenant.ledger.embedded.archive.archive_file import ARCHIVE_NAME
from covenant.ledger.embedded.blob_folder import FOLDER_NAME as BLOBS_NAME
from covenant.ledger.embedded.byte_search import count_in_file
from covenant.ledger.embedded.disk import replace_private, sync_dir

MEMORY_NAME: Final = "memory"
FOLLOWED_NAME: Final = "removals.json"
"""The version of a shared ledger's registers up to which this home has ended removals."""
_FOLDERS: Final = (FOLDER_NAME, MEMORY_NAME)


class HomeFiles:
    def __init__(self, home: Path) -> None:
        self._home = home

    def count(self, tenant: str) -> int:
        return sum(1 for name in _FOLDERS for _ in _files(self._home / name / tenant))

    async def erase(self, tenant: str) -> None:
        await asyncio.to_thread(self._erase, tenant)

    def _erase(self, tenant: str) -> None:
        for name in _FOLDERS:
            folder = self._home / name / tenant
            if folder.is_symlink():
                folder.unlink()
            elif folder.is_dir():
                shutil.rmtree(folder)
            if folder.parent.is_dir():
                sync_dir(folder.parent)

    async def followed(self) -> int | None:
        with suppress(OSError, ValueError):
            return int(await asyncio.to_thread((self._home / FOLLOWED_NAME).read_bytes))
        return None

    async def keep_followed(self, version: int) -> None:
        await asyncio.to_thread(replace_private, self._home / FOLLOWED_NAME, b"%d" % version)

    async def search(self, tenant: str, keys: Sequence[str]) -> Sequence[SearchedPlace]:
        return await asyncio.to_thread(lambda: tuple(self._search(tenant, keys)))

    def _search(self, tenant: str, keys: Sequence[str]) -> Iterator[SearchedPlace]:
        markers = [marker.encode() for marker in tenant_markers(tenant, keys)]
        for name in _FOLDERS:
            for path in _files(self._home / name / tenant):
                yield SearchedPlace(place=str(path.relative_to(self._home)), found=1)
        for path in _files(self._home):
            place = path.relative_to(self._home)
            if place.parts[0] == BLOBS_NAME:
                continue  # only the tenant's own space is counted
            if place.parts[0] == JOURNAL_NAME or place.parts[0].startswith(ARCHIVE_NAME) or tenant in place.parts[1:2]:
                continue
            try:
                found = count_in_file(path, markers)
            except FileNotFoundError:  # deleted meanwhile: the daemon goes on
                continue
            yield SearchedPlace(place=str(place), found=found)


def _files(folder: Path) -> Iterator[Path]:
    """Plain files below a folder. Links are not followed, and files that are deleted meanwhile are left out."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield path
