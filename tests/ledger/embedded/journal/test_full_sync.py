"""Where the system has a sync that reaches the disk itself, the journal uses it."""

import fcntl
import os
from pathlib import Path

import pytest

from covenant.ledger.embedded.journal import segments
from covenant.ledger.embedded.journal.segments import Cursor, SegmentWriter, create_segment

FULL_SYNC = 51
"""Its number on macOS. Here it means nothing, so the call itself is what is seen."""


def test_every_batch_is_synced_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def full_sync(fd: int, command: int) -> int:
        asked.append((fd, command))
        os.fsync(fd)
        return 0

    monkeypatch.setattr(segments, "FULL_SYNC", FULL_SYNC)
    monkeypatch.setattr(fcntl, "fcntl", full_sync)
    os.close(create_segment(tmp_path, 1))
    writer = SegmentWriter(tmp_path, Cursor(0, 1, 0), segment_bytes=1 << 20, sync=True)
    writer.write(b"one\n", 1)
    writer.write(b"two\n", 2)
    assert [command for _, command in asked] == [FULL_SYNC, FULL_SYNC]
    writer.seal()
    assert len(asked) == 3
    writer.close()


def test_other_systems_sync_the_bytes_and_the_length(tmp_path: Path) -> None:
    assert segments.FULL_SYNC is getattr(fcntl, "F_FULLFSYNC", None)
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x")
        file.flush()
        segments.datasync(file.fileno())
