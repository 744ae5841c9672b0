"""The blob store in a folder: `kill -9` at each durable step, a full disk, links, and what is broken on the disk."""

import asyncio
import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.blobs import Blob, BlobUsage
from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.blob_folder import BYTES, INCOMING, BlobFolder
from covenant.ledger.embedded.fault_points import BLOB_POINTS
from covenant.model.errors import NotFound, Unavailable
from tests.ledger_contract import fault_plans
from tests.ledger_contract.blobs import ACME, LATER_MS, NOBODY, PIECE, get, knows, put
from tests.ledger_contract.fault_injection import FAULT as FAULT_VARIABLE
from tests.ledger_contract.fault_injection import FAULTS, HOME, NOTES
from tests.ledger_contract.samples import task_id
from tests.matrices import first_of
from tests.waits import BOUND_S, eventually

ROOT = Path(__file__).parents[3]
FIRST, SECOND = PIECE * 3, b"second" * 10_000
LIFE = """
import asyncio, hashlib, sys
from pathlib import Path
from covenant.ledger.clock import uuid_source
from covenant.ledger.embedded.blob_folder import BlobFolder
from covenant.model.errors import Unavailable
from tests.ledger.embedded.test_blob_folder import FIRST, SECOND
from tests.ledger_contract.blobs import ACME, LATER_MS, NOBODY, knows, put
from tests.ledger_contract.samples import task_id

async def live(folder):
    store = BlobFolder(folder, uuid_source())
    async def told(name, work):
        try:
            await work
        except (Unavailable, OSError):
            print("refused", name, flush=True)
        else:
            print(name, flush=True)
    await told("first", put(store, FIRST, task_id(1)))
    await told("referred", store.refer(ACME, hashlib.sha256(FIRST).hexdigest(), task_id(2)))
    await told("again", put(store, FIRST, task_id(2)))
    await told("second", put(store, SECOND, task_id(3)))
    await told("collected", store.collect(knows([task_id(1), task_id(2)]), LATER_MS))

asyncio.run(live(Path(sys.argv[1])))
"""


def live(folder: Path, notes: Path, fault: str | None) -> tuple[int, list[str]]:
    """A life of a store under a fault: how it ended, and what was acknowledged."""
    notes.mkdir()
    path = os.pathsep.join((str(ROOT / "tests/faults/site"), str(ROOT)))
    environment = {**os.environ, NOTES: str(notes), "PYTHONPATH": path}
    environment.pop(HOME, None)
    if fault is not None:
        environment[FAULT_VARIABLE] = fault
    ran = subprocess.run(
        [sys.executable, "-c", LIFE, str(folder)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        start_new_session=True,
        timeout=50,
        check=False,
    )
    return ran.returncode, ran.stdout.decode().splitlines()


@pytest.mark.parametrize("fault", first_of(each for each in FAULTS if each != "lose"))
@pytest.mark.parametrize("point", BLOB_POINTS)
async def test_what_was_acknowledged_survives_a_fault_at_every_step(tmp_path: Path, point: str, fault: str) -> None:
    code, told = live(tmp_path / "blobs", tmp_path / "notes", f"{point}:1:{fault}")
    assert (code == -9) == (fault in ("kill", "tear")), told
    store = BlobFolder(tmp_path / "blobs", uuid_source())
    first = Blob(hashlib.sha256(FIRST).hexdigest(), len(FIRST))
    second = Blob(hashlib.sha256(SECOND).hexdigest(), len(SECOND))
    if "first" in told:
        assert await get(store, first) == FIRST
        assert await store.find(ACME, first.sha256, task_id(1)) == first.size
    if "referred" in told and "first" in told:
        assert await store.find(ACME, first.sha256, task_id(2)) == first.size
    # Whatever stands in its place is whole.
    faults = await store.check(knows([task_id(1), task_id(2), task_id(3)]), hashes=True)
    assert [fault for fault in faults if fault.kind != "orphan"] == []
    # And nothing is left behind: once nothing is known, a pass empties the store.
    assert list((tmp_path / "blobs" / INCOMING).iterdir()) == []
    await store.collect(knows(NOBODY), LATER_MS)
    assert await store.usage() == BlobUsage(0, 0)
    assert await put(store, SECOND, task_id(3)) == second
    assert await get(store, second) == SECOND


async def test_a_full_disk_refuses_the_file_and_the_store_goes_on(tmp_path: Path) -> None:
    store = BlobFolder(tmp_path / "blobs", uuid_source())
    for point in ("blobs.write", "blobs.sync", "blobs.rename", "blobs.sync_staged"):
        with fault_plans.armed(fault_plans.Plan(point, fault_plans.fail(errno.ENOSPC, written=7))):
            with pytest.raises(Unavailable) as refused:
                await put(store, PIECE, task_id(1))
            assert "No space left" in refused.value.message
        assert await store.usage(ACME) == BlobUsage(0, 0)
        assert list((tmp_path / "blobs" / INCOMING).iterdir()) == []
    assert await get(store, await put(store, PIECE, task_id(1))) == PIECE


async def test_bytes_that_are_damaged_truncated_or_gone_are_replaced_when_they_come_again(tmp_path: Path) -> None:
    store = BlobFolder(tmp_path / "blobs", uuid_source())
    blob = await put(store, PIECE, task_id(1))
    path = store.place(ACME, blob.sha256) / BYTES
    for damage in ("wrong", "truncated", "gone", "a link", "a folder"):
        path.unlink()
        if damage in ("wrong", "truncated"):
            path.write_bytes(PIECE[:-1] + b"?" if damage == "wrong" else PIECE[:7])
        elif damage == "a link":
            path.symlink_to(tmp_path / "elsewhere")
        elif damage == "a folder":
            path.mkdir()
        assert await put(store, PIECE, task_id(2)) == blob
        assert await get(store, blob) == PIECE
        assert await store.find(ACME, blob.sha256, task_id(1)) == blob.size, "earlier references stay"
        assert await store.usage(ACME) == BlobUsage(1, blob.size)
        assert await store.check(knows([task_id(1)]), hashes=True) == []
    assert list((tmp_path / "blobs" / INCOMING).iterdir()) == []


async def test_a_reader_goes_on_while_the_same_bytes_come_again(tmp_path: Path) -> None:
    store, data = BlobFolder(tmp_path / "blobs", uuid_source()), PIECE * 10
    blob = await put(store, data, task_id(1))
    reading = store.read(ACME, blob.sha256, 0, blob.size)
    first = await anext(reading)
    await put(store, data)
    assert first + b"".join([piece async for piece in reading]) == data


async def test_a_link_in_the_store_is_followed_nowhere(tmp_path: Path) -> None:
    store = BlobFolder(tmp_path / "blobs", uuid_source())
    secret = tmp_path / "secret"
    secret.write_bytes(PIECE)
    blob = await put(store, PIECE, task_id(1))
    place = store.place(ACME, blob.sha256)
    (place / BYTES).unlink()
    (place / BYTES).symlink_to(secret)
    with pytest.raises(NotFound):
        await get(store, blob)
    assert await store.find(ACME, blob.sha256, task_id(1)) is None
    (fault,) = await store.check(knows([task_id(1)]), hashes=True)
    assert fault.kind == "not_a_file"
    (tmp_path / "blobs" / ("0" * 32)).symlink_to(tmp_path)
    assert (await store.usage()).files == 1
    assert secret.read_bytes() == PIECE


async def test_what_is_broken_on_the_disk_is_told_and_never_given_out_whole(tmp_path: Path) -> None:
    store = BlobFolder(tmp_path / "blobs", uuid_source())
    cut, lost, changed = [await put(store, PIECE + bytes([n]), task_id(1)) for n in range(3)]
    os.truncate(store.place(ACME, cut.sha256) / BYTES, 100)
    (store.place(ACME, lost.sha256) / BYTES).unlink()
    (store.place(ACME, changed.sha256) / BYTES).write_bytes(PIECE + b"!")
    with pytest.raises(NotFound):
        await get(store, cut)
    assert await store.find(ACME, cut.sha256) == 100
    faults = {fault.sha256: fault.kind for fault in await store.check(knows([task_id(1)]), hashes=True)}
    assert faults == {cut.sha256: "wrong_hash", lost.sha256: "missing", changed.sha256: "wrong_hash"}
    # The same content again makes each of them whole.
    for blob, data in ((cut, PIECE + b"\0"), (lost, PIECE + b"\1")):
        assert await put(store, data, task_id(2)) == blob
        assert await get(store, blob) == data


async def test_many_small_files_are_stored_counted_and_collected_in_bounded_passes(tmp_path: Path) -> None:
    store = BlobFolder(tmp_path / "blobs", uuid_source())
    count = 2_500
    for at in range(0, count, 100):
        await asyncio.gather(*(put(store, f"{each}".encode()) for each in range(at, at + 100)))
    assert (await store.usage(ACME)).files == count
    passes = [await store.collect(knows(NOBODY), LATER_MS) for _ in range(3)]
    assert [each.blobs for each in passes] == [1_000, 1_000, 500]
    assert [each.more for each in passes] == [True, True, False]
    assert await store.usage(ACME) == BlobUsage(0, 0)


async def test_a_canceled_upload_ends_with_its_thread_and_leaves_a_whole_file_or_none(tmp_path: Path) -> None:
    """The daemon cancels an upload that takes too long, and an agent's turn that saves a file."""
    store = BlobFolder(tmp_path / "blobs", uuid_source())
    reached, goes_on = threading.Event(), threading.Event()

    def hold(_step: fault_points.FaultPoint) -> None:
        reached.set()
        assert goes_on.wait(BOUND_S)

    with fault_plans.armed(fault_plans.Plan("blobs.rename", hold)):
        uploading = asyncio.ensure_future(put(store, PIECE, task_id(1)))
        assert await asyncio.to_thread(reached.wait, BOUND_S)
        uploading.cancel()
        early, _ = await asyncio.wait((uploading,), timeout=0.3)
        goes_on.set()
        assert not early, "nothing in the staged folder may be removed while a thread publishes it"
        with pytest.raises(asyncio.CancelledError):
            await uploading
    assert await store.check(knows([task_id(1)]), hashes=True) == []
    assert await store.usage(ACME) == BlobUsage(1, len(PIECE))
    assert list((tmp_path / "blobs" / INCOMING).iterdir()) == []


async def test_a_reader_that_is_canceled_while_its_file_is_opened_leaves_no_file_open(tmp_path: Path) -> None:
    store = BlobFolder(tmp_path / "blobs", uuid_source())
    blob = await put(store, PIECE)
    path = store.place(ACME, blob.sha256) / BYTES
    path.unlink()
    os.mkfifo(path)  # it is opened only when somebody writes into it
    reading = asyncio.ensure_future(get(store, blob))
    writer = -1

    async def is_canceled() -> bool:
        nonlocal writer
        with suppress(OSError):  # nobody is about to read
            writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            reading.cancel()
        return writer >= 0

    async def is_closed() -> bool:
        try:
            with suppress(BlockingIOError):
                os.write(writer, b"?")
        except BrokenPipeError:
            return True
        return False

    await eventually(is_canceled)
    try:
        with pytest.raises(asyncio.CancelledError):
            await reading
        await eventually(is_closed)
    finally:
        os.close(writer)


async def test_a_disk_that_cannot_be_read_is_not_told_as_a_missing_file(tmp_path: Path) -> None:
    store = BlobFolder(tmp_path / "blobs", uuid_source())
    blob = await put(store, FIRST, task_id(1))
    path = store.place(ACME, blob.sha256) / BYTES
    path.unlink()
    with pytest.raises(NotFound, match=blob.sha256[:12]):
        await get(store, blob)
    path.mkdir()  # it can be opened, and not be read
    with pytest.raises(IsADirectoryError):
        await get(store, blob)


async def test_listings_of_one_space_leave_the_threads_to_others(tmp_path: Path) -> None:
    store = BlobFolder(tmp_path / "blobs", uuid_source())
    await put(store, PIECE, task_id(1))
    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        listings = [asyncio.ensure_future(store.listing(ACME, "", 50)) for _ in range(100)]
        await asyncio.sleep(0)
        await asyncio.to_thread(threading.get_ident)
        listed = sum(each.done() for each in listings)
        assert all(len(found) == 1 for found in await asyncio.gather(*listings))
    assert listed < 10, "others had to wait for them"


async def test_a_file_of_many_tasks_is_listed_at_the_cost_of_reading_their_names(tmp_path: Path) -> None:
    store, count = BlobFolder(tmp_path / "blobs", uuid_source()), 20_000
    place = store.place(ACME, (await put(store, PIECE)).sha256)
    names = sorted(task_id(number) for number in range(count))
    for name in names:
        os.close(os.open(place / name, os.O_CREAT, 0o600))
    (found,) = await store.listing(ACME, "", 50)
    listed_s = read_s = float("inf")
    for _ in range(3):
        before_s = time.process_time()
        (found,) = await store.listing(ACME, "", 50)
        listed_s, before_s = min(listed_s, time.process_time() - before_s), time.process_time()
        assert sum(1 for _ in os.scandir(place)) == count + 1
        read_s = min(read_s, time.process_time() - before_s)
    assert (found.references, found.tasks) == (count, tuple(names[:10]))
    assert listed_s < 10 * read_s
