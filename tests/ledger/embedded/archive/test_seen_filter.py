"""The filter of finished ids: never a wrong no, few wrong yeses, and a file that is whole or not there."""

import errno
import os
import sys
import uuid
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.ledger.embedded.archive import seen_filter as seen_module
from covenant.ledger.embedded.archive.apply_batch import apply_lines
from covenant.ledger.embedded.archive.archive_file import open_writer
from covenant.ledger.embedded.archive.history import History
from covenant.ledger.embedded.archive.seen_filter import SeenIds
from covenant.ledger.embedded.disk import replace_private
from tests.ledger.embedded.recorded import BOOT, Recorded, sent, settled, task_id


def ids(first: int, count: int) -> list[str]:
    return [
        str(uuid.UUID(int=number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)))
        for number in range(first, first + count)
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "seen.bin"


@given(st.sets(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=200))
def test_an_added_id_is_never_denied(names: set[str]) -> None:
    seen = SeenIds()
    for name in names:
        seen.add(name)
    assert all(seen.maybe(name) for name in names)


def test_an_empty_filter_has_seen_nothing() -> None:
    assert not any(SeenIds().maybe(name) for name in ids(1, 100))


def test_it_grows_by_layers_and_stays_right_about_almost_all_new_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_module, "FIRST_CAPACITY", 1_024)
    seen = SeenIds()
    added = ids(1, 15_000)
    for name in added:
        seen.add(name)
    assert len(seen._layers) == 4
    assert all(seen.maybe(name) for name in added)
    wrong = sum(seen.maybe(name) for name in ids(1_000_000, 10_000))
    assert wrong < 50
    size = sum(8 * len(layer.words) for layer in seen._layers)
    assert size < 2 * len(added) * seen_module.BITS_PER_ID / 8


def test_adding_an_id_again_takes_no_room() -> None:
    seen = SeenIds()
    for _ in range(3):
        for name in ids(1, 100):
            seen.add(name)
    assert len(seen) <= 100


def test_a_saved_filter_is_loaded_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_module, "FIRST_CAPACITY", 1_024)
    seen = SeenIds()
    seen.cover(ids(1, 3_000), 77)
    replace_private(path, seen.encode())
    loaded = SeenIds.load(path)
    assert loaded is not None
    assert (loaded.covered, len(loaded)) == (77, len(seen))
    assert loaded.encode() == seen.encode()
    loaded.add("one more")
    assert loaded.maybe("one more")
    assert path.stat().st_mode & 0o077 == 0


def test_no_file_is_no_filter(path: Path) -> None:
    assert SeenIds.load(path) is None


def test_a_file_that_was_changed_or_cut_is_not_trusted(path: Path) -> None:
    seen = SeenIds()
    seen.cover(ids(1, 10), 5)
    data = seen.encode()
    for broken in (b"", data[:3], data[:20], data[:-1], data + b"x", data[:50] + b"\xff" + data[51:]):
        path.write_bytes(broken)
        assert SeenIds.load(path) is None


def test_a_file_of_another_version_is_not_trusted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_module, "_VERSION", 1)
    replace_private(path, SeenIds().encode())
    monkeypatch.undo()
    assert SeenIds.load(path) is None


def test_a_file_means_the_same_to_every_version_that_reads_it() -> None:
    seen = SeenIds()
    for name in ids(1, 1_000):
        seen.add(name)
    if sys.byteorder == "big":
        for layer in seen._layers:
            layer.words.byteswap()
    (layer,) = seen._layers
    assert sha256(layer.words).hexdigest() == "49520e35affb10b25e60bf5e6d4b9c70de20901b7a57fc4dc6fb2e1a27268740"


def test_a_file_with_other_sizes_of_layers_is_not_trusted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_module, "BITS_PER_ID", 8)
    replace_private(path, SeenIds().encode())
    monkeypatch.undo()
    assert SeenIds.load(path) is None


def test_a_save_that_fails_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = SeenIds()
    first.cover(["a"], 1)
    replace_private(path, first.encode())

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    second = SeenIds()
    second.cover(["b"], 2)
    with pytest.raises(OSError, match="space"):
        replace_private(path, second.encode())
    kept = SeenIds.load(path)
    assert kept is not None
    assert kept.covered == 1


async def test_it_is_brought_up_from_the_archive_by_when_tasks_ended(tmp_path: Path) -> None:
    recorded = Recorded()
    archive = tmp_path / "archive.db"
    db = open_writer(archive, lasting=True)
    history = History(archive, boot=BOOT)
    recorded.each([sent(1), sent(2), sent(3), settled(2, 2)])
    apply_lines(db, recorded.read_through(0, 4), 0)
    seen = SeenIds()
    seen.cover(*await history.finished(seen.covered, 100))
    assert [seen.maybe(task_id(number)) for number in (1, 2, 3)] == [False, True, False]
    # Task 1 was sent before the place that is covered, and ends after it.
    recorded.record(settled(1, 2))
    apply_lines(db, recorded.read_through(4, 5), 4)
    found, through = await history.finished(seen.covered, 100)
    assert found == (task_id(1),)
    seen.cover(found, through)
    assert [seen.maybe(task_id(number)) for number in (1, 2, 3)] == [True, True, False]
    assert await history.finished(seen.covered, 100) == ((), seen.covered)
    await history.close()
    db.close()
