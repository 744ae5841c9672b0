"""A JSON file of the home that may change while the daemon runs: read at the start, and again when it changes.

A file that cannot be used stops a start. In a running daemon the contents read before stay in force, and the log says
why once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from covenant.daemon.telemetry import Log
from covenant.model.errors import Invalid, SettingsError
from covenant.wire.json_input import parse

POLL_S: Final = 1.0
FILE_BYTES_MAX: Final = 1024 * 1024

FileStamp = tuple[int, int, int]

T = TypeVar("T")
_any: Final = msgspec.json.Decoder()


def read_home_file(path: Path, read: Callable[[object], T]) -> T | None:
    """The file's contents; None if there is no file. Raises SettingsError if it cannot be used."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise SettingsError(f"{path}: has more than {FILE_BYTES_MAX} bytes")
        return read(parse(_any, data))
    except FileNotFoundError:
        return None
    except Invalid as wrong:
        raise SettingsError(f"{path}: {_problem_text(wrong)}") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error


def _problem_text(wrong: Invalid) -> str:
    return f"not JSON: {wrong.message}" if wrong.code == "invalid_json" else wrong.message


class WatchedFile(Generic[T]):
    """`problem`: why the present file cannot be used; empty if it can. `none`: the contents without a file."""

    def __init__(self, path: Path, read: Callable[[object], T], none: T, log: Log) -> None:
        self.path = path
        self.problem = ""
        self._read = read
        self._none = none
        self._log = log
        self._take: Callable[[T], None] | None = None
        self._seen = file_stamp(path)
        found = read_home_file(path, read)
        self.value: T = none if found is None else found

    def on_change(self, take: Callable[[T], None]) -> None:
        """Called on the loop with the new contents."""
        self._take = take

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.step()

    async def step(self) -> None:
        """Reads the file if it has changed since the last step."""
        # The stamp is taken before the file is read: a change in between is seen by the next step.
        stamp = await asyncio.to_thread(file_stamp, self.path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            found = await asyncio.to_thread(read_home_file, self.path, self._read)
        except SettingsError as wrong:
            if str(wrong) != self.problem:
                self.problem = str(wrong)
                self._log.warning("home.file_refused", file=self.path.name, problem=self.problem, in_force="the last")
            return
        self.problem = ""
        value = self._none if found is None else found
        if value != self.value:
            self.value = value
            if self._take is not None:
                self._take(value)
            self._log.info("home.file_read", file=self.path.name)


def file_stamp(path: Path) -> FileStamp | None:
    """A value that changes with the file; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
