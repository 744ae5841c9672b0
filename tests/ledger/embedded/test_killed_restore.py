"""A restore that is killed before each of its steps on the disk: a home opens whole, or not at all and says what to do.

Python tells an audit hook of each file that is opened for writing, made, renamed and removed. The hook of the restoring
process counts them, and kills it before one. `kill -9` takes back nothing that was written, so what happens between two
such steps (writes and syncs) leaves nothing that these do not.
"""

import asyncio
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from covenant.daemon.home_backup import CannotRestore
from covenant.ledger.embedded.open import RESTORING_NAME, open_ledger
from covenant.model.errors import HomeUnusable
from tests.ledger.embedded.test_backup import back_up, known, opened, restored, send
from tests.ledger_contract.fake_clock import FakeClock
from tests.matrices import first_of
from tests.waits import BOUND_S

TASKS = range(1, 41)
AT_ONCE = 8
RESTORE = """
import asyncio, io, os, signal, sys
from pathlib import Path
from covenant.daemon.home_backup import restore

backup, home, segments, nth = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
steps = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "sqlite3.connect"}
count = 0

def hook(event, args):
    global count
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if (writes or event in steps) and any(str(arg).startswith(str(home)) for arg in args):
        count += 1
        if count == nth:
            os.kill(os.getpid(), signal.SIGKILL)

data = io.BytesIO(backup.read_bytes())
sys.addaudithook(hook)
asyncio.run(restore(data, home, now_ms=lambda: 1_700_000_000_000, segments=segments))
print(count)
"""


class Backup:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "backup"
        self.segments = folder / "segments"

    async def make(self) -> None:
        """A backup of most tasks, and the journal with the rest."""
        home = self.folder / "home"
        async with opened(home, FakeClock()) as ledger:
            await send(ledger, *TASKS[:30])
            self.file.write_bytes(await back_up(home, ledger))
            await send(ledger, *TASKS[30:])
        shutil.copytree(home / "journal", self.segments)

    def run(self, home: Path, nth: int) -> subprocess.CompletedProcess[str]:
        words = [str(self.file), str(home), str(self.segments), str(nth)]
        return subprocess.run(
            [sys.executable, "-c", RESTORE, *words], capture_output=True, text=True, timeout=BOUND_S, check=False
        )


@pytest.fixture
async def backup(tmp_path: Path) -> Backup:
    made = Backup(tmp_path)
    await made.make()
    return made


async def is_whole(home: Path) -> bool:
    """Whether the home opens with all tasks. One that does not open says what to do, and has nothing of its own yet."""
    if not home.exists() or not any(path.name != "lock" for path in home.iterdir()):
        return False
    if (home / RESTORING_NAME).exists():
        with pytest.raises(HomeUnusable, match="was cut off; empty the folder, and restore again"):
            await open_ledger(home, clock=FakeClock())
        return False
    assert await known(home, FakeClock(), TASKS) == list(TASKS)
    return True


@pytest.mark.parametrize("part", first_of(range(AT_ONCE)))
async def test_a_restore_that_is_killed_at_any_step_leaves_a_whole_home_or_none(
    backup: Backup, tmp_path: Path, part: int
) -> None:
    counted = backup.run(tmp_path / "counted", 0)
    assert counted.returncode == 0, counted.stderr
    steps = int(counted.stdout)
    assert steps > 3 * AT_ONCE, "the hook sees the restore's steps"
    for nth in range(1 + part, steps + 1, AT_ONCE):
        home = tmp_path / f"at-{nth}"
        killed = await asyncio.to_thread(backup.run, home, nth)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        if await is_whole(home):
            assert nth > steps - 2, "only the last steps come when everything is in its place"
            continue
        # As the refusal says.
        shutil.rmtree(home, ignore_errors=True)
        await restored(backup.file.read_bytes(), home, FakeClock(), backup.segments)
        assert await is_whole(home)


async def test_a_home_that_is_half_restored_is_not_restored_into(backup: Backup, tmp_path: Path) -> None:
    home = tmp_path / "half"
    steps = int(backup.run(tmp_path / "counted", 0).stdout)
    backup.run(home, steps // 2)
    with pytest.raises(CannotRestore, match="was cut off; empty the folder, and restore again"):
        await restored(backup.file.read_bytes(), home, FakeClock())
