"""The collector of files: a round looks up what has become old since the round before, and after an erasure all."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from covenant.daemon.environment import now_ms
from covenant.exchange.file_links import FileLinks
from covenant.exchange.stored_files import WHOLE_ROUNDS, StoredFiles
from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.blobs import Collected, Known
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.retention import EraseTasks
from covenant.ledger.embedded.blob_folder import BlobFolder
from covenant.ledger.embedded.open import memory_ledger
from covenant.ledger.machine.commands import Accept, Cancel
from covenant.model.errors import Unavailable
from covenant.model.ids import TaskId
from covenant.model.settings import BlobSettings
from covenant.model.task import A2A, fingerprint
from tests.ledger_contract.blobs import ACME, PIECE, put
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.samples import ALICE, make_task, task_id

KEPT_MS = 3_600_000


class CountedFolder(BlobFolder):
    """Notes which tasks a collector asks for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, uuid_source())
        self.asked: list[TaskId] = []
        self.fails = False

    async def collect(self, known: Known, before_ms: int, since_ms: int = 0) -> Collected:
        async def asked(each: TaskId) -> bool:
            self.asked.append(each)
            if self.fails:
                raise Unavailable("storage_failed", "the ledger cannot be read")
            return await known(each)

        return await super().collect(asked, before_ms, since_ms)

    def asked_now(self) -> list[TaskId]:
        asked, self.asked = self.asked, []
        return sorted(asked)


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[StoredFiles, CountedFolder, FakeClock, Ledger]]:
    """Files that are as old as the clock says: it begins when files of now have become old."""
    clock = FakeClock(now_ms() + KEPT_MS + 60_000)
    ledger, store = await memory_ledger(clock=clock, monotonic_ms=clock.monotonic_ms), CountedFolder(folder)
    links, settings = FileLinks(b"secret", ledger.now_ms, 1_000), BlobSettings(kept_ms=KEPT_MS)
    yield StoredFiles(store, ledger, links, settings), store, clock, ledger
    await ledger.close()


async def accept(ledger: Ledger, number: int) -> TaskId:
    task = make_task(number, tenant="acme", origin=A2A)
    await ledger.commit(Accept(task=task, digest=fingerprint(task)[0]))
    return task.id


async def test_a_reference_that_was_found_known_is_not_looked_up_in_each_pass(tmp_path: Path) -> None:
    async with opened(tmp_path / "blobs") as (files, store, clock, ledger):
        known = await accept(ledger, 1)
        await put(store, PIECE, known)
        await put(store, b"another", task_id(2))
        assert ((await files.collect()).blobs, store.asked_now()) == (1, [known, task_id(2)])
        clock.advance(60_000)
        assert ((await files.collect()).looked, store.asked_now()) == (0, [])


async def test_a_reference_is_looked_up_when_it_has_become_old(tmp_path: Path) -> None:
    async with opened(tmp_path / "blobs") as (files, store, clock, _):
        clock.advance(-10 * 60_000)
        await files.collect()
        blob = await put(store, PIECE, task_id(1))
        await files.collect()
        assert (await store.find(ACME, blob.sha256), store.asked_now()) == (blob.size, [])
        clock.advance(10 * 60_000)
        assert ((await files.collect()).blobs, store.asked_now()) == (1, [task_id(1)])


async def test_after_an_erasure_all_references_are_looked_up_again_but_not_in_each_pass(tmp_path: Path) -> None:
    async with opened(tmp_path / "blobs") as (files, store, clock, ledger):
        ids = [await accept(ledger, number) for number in (1, 2)]
        for each in ids:
            await put(store, each.encode(), each)
        await files.collect()
        store.asked_now()
        everything = EraseTasks(tenant="acme", before_ms=1 << 62)
        for left in (ids, ids[1:]):
            await ledger.commit(Cancel(task_id=left[0], by=ALICE, reason="test"))
            clock.advance(1_000)
            assert (await ledger.erase_tasks(everything)).tasks == 1
            assert ((await files.collect()).blobs, store.asked_now()) == (0, []), "not yet"
            clock.advance(KEPT_MS // WHOLE_ROUNDS)
            assert ((await files.collect()).blobs, store.asked_now()) == (1, left)


async def test_a_round_that_failed_is_begun_again(tmp_path: Path) -> None:
    async with opened(tmp_path / "blobs") as (files, store, _, __):
        await put(store, PIECE, task_id(1))
        store.fails = True
        with pytest.raises(Unavailable):
            await files.collect()
        store.fails = False
        collected = [await files.collect() for _ in range(2)]
        assert sum(each.blobs for each in collected) == 1
