"""Running the scenario under one fault, and judging what is left of its home."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

from covenant.ledger.embedded.journal.segments import list_segments
from covenant.ledger.embedded.open import open_ledger
from tests.faults.facts import Fact, Told, check_all, read
from tests.faults.letters import check_letters, picture
from tests.faults.scenario import SEGMENT_BYTES, TASKS
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.fault_injection import DISK, FAULT, HOME, IMAGES, NOTES
from tests.ledger_contract.synced_disk import Disk
from tests.waits import BOUND_S

ROOT: Final = Path(__file__).parents[2]
SITE: Final = Path(__file__).parent / "site"


class Ran(NamedTuple):
    """How the scenario ended, what it had told by then, and the home that is left, or each that may be."""

    code: int
    facts: list[Fact]
    homes: list[Path]
    notes: Path
    errors: str

    @property
    def ended(self) -> bool:
        return any(fact.at == "ended" for fact in self.facts)

    @property
    def refused(self) -> set[str]:
        """The codes of what was refused on the way."""
        return {fact.said["code"] for fact in self.facts if fact.at == "refused" and "code" in fact.said}


def run(base: Path, folder: Path, fault: str | None = None, *, apart: bool = False) -> Ran:
    """Live on a copy of the base home, in a process group of its own; `apart`: with a process for the archive."""
    home, notes = folder / "home", folder / "notes"
    notes.mkdir(parents=True)
    shutil.copytree(base, home)
    Disk(home, notes / DISK).adopt()
    path = os.pathsep.join(filter(None, [str(SITE), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, NOTES: str(notes), HOME: str(home), "PYTHONPATH": path}
    if fault is not None:
        environment[FAULT] = fault
    reader, writer = os.pipe()
    with (folder / "errors").open("w+") as errors, os.fdopen(reader, "rb") as told:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.scenario", str(home), str(writer), *(["apart"] if apart else [])],
                cwd=ROOT,
                env=environment,
                pass_fds=(writer,),
                stderr=errors,
                start_new_session=True,
            )
        finally:
            os.close(writer)
        try:
            facts = read(told.read())  # to its end: the last process that holds the other side is gone then
            code = process.wait(BOUND_S)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        images = notes / IMAGES
        return Ran(code, facts, sorted(images.iterdir()) if images.exists() else [home], notes, errors.read())


def make_base(folder: Path) -> Path:
    """A home with a torn tail: opening it comes by every step of an opening."""
    home = folder / "base"

    async def fill() -> None:
        ledger = await open_ledger(home, clock=FakeClock(), segment_bytes=SEGMENT_BYTES, node="here")
        driver = LedgerDriver(ledger, FakeClock())
        for number in range(12):
            await driver.note(f"long ago {number}")
        await ledger.close()

    asyncio.run(fill())
    with list_segments(home / "journal")[-1].path.open("ab") as tail:
        tail.write(b'{"seq":13,"ts_ms":17000')
    return home


def judge(ran: Ran) -> None:
    """Open what is left, check it, work on it, and open and check it once more."""

    async def check(home: Path) -> None:
        told = Told(ran.facts)
        peers: dict[str, Any] = {}
        for again in (False, True):
            clock = FakeClock()
            ledger = await open_ledger(home, clock=clock, segment_bytes=SEGMENT_BYTES, node="here")
            driver = LedgerDriver(ledger, clock)
            try:
                if again:
                    await driver.check_audit()
                    assert await driver.drain(count=100) == ()
                    assert await picture(ledger) == peers
                else:
                    peers = await check_letters(ledger, told)
                    await check_all(driver, told, TASKS)
                    await ledger.compact()
                await driver.note(f"opened again {again}")
            finally:
                await ledger.close()

    for home in ran.homes:
        asyncio.run(check(home))
