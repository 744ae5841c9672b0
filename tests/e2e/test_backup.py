"""Backups of a real daemon that is killed under load, while it is backed up and while it ships segments.

Every task that was acknowledged before the position of a backup is in what is restored from it.
"""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from covenant.daemon.environment import now_ms
from covenant.ledger.embedded.backup_file import STAGED_NAME
from covenant.ledger.embedded.journal.shipped_segments import read_status
from covenant.ledger.embedded.open import open_ledger
from covenant.model.ids import TaskId
from tests.cli.daemons import COVENANT, Daemon, covenant, environment
from tests.doors.clients import Ipc
from tests.waits import BOUND_S, until

SENDERS = 4
SETTINGS = "[ledger]\nsegment_bytes = 16384\n"


class Load:
    """Senders that remember what was acknowledged, of whichever daemon is there."""

    def __init__(self, home: Path, *flags: str) -> None:
        self.home = home
        self.flags = flags
        self.acknowledged: list[str] = []
        self.daemon = Daemon(home, *flags)
        self.daemon.json("agents", "add", "helper", "--kind", "worker")
        self.token = (home / "operator.token").read_text().strip()

    def kill(self) -> None:
        self.daemon.stop(signal.SIGKILL)

    def start(self, *flags: str) -> None:
        self.daemon = Daemon(self.home, *self.flags, *flags)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        senders = [asyncio.create_task(self._send()) for _ in range(SENDERS)]
        try:
            yield
        finally:
            for sender in senders:
                sender.cancel()
            await asyncio.gather(*senders, return_exceptions=True)

    async def more(self, count: int) -> None:
        there = len(self.acknowledged)
        await asyncio.to_thread(until, lambda: len(self.acknowledged) >= there + count)

    async def _send(self) -> None:
        body = {"message": {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "x" * 500}]}}
        params: dict[str, Any] = {**body, "configuration": {"returnImmediately": True}}
        async with httpx2.AsyncClient(timeout=BOUND_S, trust_env=False) as http:
            while True:
                try:
                    answer = await http.post(
                        f"{self.daemon.url}/v1/a2a/agents/helper",
                        json={"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params},
                        headers={"authorization": f"Bearer {self.token}"},
                    )
                except httpx2.HTTPError:
                    await asyncio.sleep(0.05)
                    continue
                if answer.status_code == 200 and "result" in answer.json():
                    self.acknowledged.append(answer.json()["result"]["task"]["id"])


async def missing(home: Path, task_ids: list[str]) -> list[str]:
    ledger = await open_ledger(home, clock=now_ms)
    try:
        return [each for each in task_ids if await ledger.show(TaskId(each), None, 1) is None]
    finally:
        await ledger.close()


async def run(*words: str, code: int = 0) -> dict[str, Any]:
    done = await asyncio.to_thread(covenant, *words, "--json")
    assert done.code == code, done
    return done.json


@pytest.fixture
def load(short_path: Path) -> Load:
    home = short_path / "home"
    home.mkdir(mode=0o700)
    (home / "settings.toml").write_text(SETTINGS)
    return Load(home)


async def test_a_backup_under_load_has_all_that_was_acknowledged_before_it(load: Load, short_path: Path) -> None:
    file, copy = short_path / "one.backup", short_path / "copy"
    async with load.running():
        await load.more(50)
        before = list(load.acknowledged)
        told = await run("--home", str(load.home), "backup", str(file))
        await load.more(20)
        load.kill()
    assert file.stat().st_mode & 0o777 == 0o600
    assert not list((load.home / STAGED_NAME).iterdir())
    done = await run("restore", str(file), "--home", str(copy))
    assert done["position"] == told["position"]
    assert done["queued"] >= len(before)
    assert await missing(copy, before) == []
    # Whoever knew the old daemon knows the restored one: its keys and its token are the same.
    daemon = Daemon(copy)
    try:
        assert daemon.json("a2a", "show", before[0])["task"]["id"] == before[0]
        rows = daemon.json("audit", "recent")["events"]
        assert [row["kind"]["incarnation"] for row in rows if row["kind"]["type"] == "ledger_restored"] == [
            done["incarnation"]
        ]
        assert daemon.json("audit", "verify")["report"]["valid"]
    finally:
        daemon.stop()


async def test_a_stopped_and_a_killed_home_can_be_backed_up(load: Load, short_path: Path) -> None:
    async with load.running():
        await load.more(30)
        load.kill()
    for name in ("killed", "again"):
        await run("--home", str(load.home), "backup", str(short_path / name))
    await run("restore", str(short_path / "again"), "--home", str(short_path / "copy"))
    assert await missing(short_path / "copy", load.acknowledged) == []
    half = short_path / "half"
    half.write_bytes((whole := (short_path / "again").read_bytes())[: len(whole) // 2])
    told = await run("restore", str(half), "--home", str(short_path / "other"), code=1)
    assert told["message"].startswith(f"{half} cannot be restored: it ")


async def test_a_daemon_that_is_killed_while_it_is_backed_up_loses_nothing_and_leaves_nothing(
    load: Load, short_path: Path
) -> None:
    async with load.running():
        await load.more(30)
        async with Ipc(load.home / "sock") as ipc:
            await ipc.authenticate(load.token)
            begun = await ipc.ask("begin_backup")
        asking = asyncio.create_task(
            asyncio.to_thread(covenant, "--home", str(load.home), "backup", str(short_path / "cut"))
        )
        staged = load.home / STAGED_NAME
        await asyncio.to_thread(until, lambda: asking.done() or len(list(staged.iterdir())) > 1)
        load.kill()
        await asking
        load.start()
        await load.more(10)
        told = list(load.acknowledged)
        assert not staged.exists() or not Path(begun["folder"]).exists()
        await run("--home", str(load.home), "backup", str(short_path / "whole"))
        load.kill()
    if (short_path / "cut").exists():
        await run("restore", str(short_path / "cut"), "--home", str(short_path / "early"))
    assert not list(short_path.glob(".cut*"))
    await run("restore", str(short_path / "whole"), "--home", str(short_path / "copy"))
    assert await missing(short_path / "copy", told) == []


SHIP = """
import os, shutil, sys, time
path, name, to = sys.argv[1:]
shutil.copy(path, os.path.join(to, "." + name))
if os.path.exists(os.path.join(to, "hold")):
    open(os.path.join(to, "held"), "w").close()
    time.sleep(600)
os.replace(os.path.join(to, "." + name), os.path.join(to, name))
"""


async def test_segments_shipped_by_daemons_that_are_killed_bring_an_old_backup_up_to_date(
    load: Load, short_path: Path
) -> None:
    to = short_path / "segments"
    to.mkdir()
    (short_path / "ship.py").write_text(SHIP)
    command = shlex.join([sys.executable, str(short_path / "ship.py"), "{path}", "{name}", str(to)])
    (load.home / "settings.toml").write_text(
        f"{SETTINGS}[backup]\ncommand = {json.dumps(command)}\nseal_ms = 1000\ncommand_ms = 600000\n"
    )
    load.daemon.stop()
    load.start()
    async with load.running():
        await load.more(20)
        old = await run("--home", str(load.home), "backup", str(short_path / "old"))
        await load.more(100)
        load.kill()
        load.start()
        (to / "hold").touch()
        await load.more(100)
        await asyncio.to_thread(until, (to / "held").exists)
        load.kill()
        (to / "hold").unlink()
        load.start()
        await load.more(50)
    ended = list(load.acknowledged)
    durable = read_status(load.home).shipped_seq
    await asyncio.to_thread(until, lambda: read_status(load.home).shipped_seq > durable)
    sealed = await _position(load)
    await asyncio.to_thread(until, lambda: read_status(load.home).shipped_seq >= sealed)
    load.kill()
    done = await run("restore", str(short_path / "old"), "--home", str(short_path / "copy"), "--segments", str(to))
    assert done["position"] >= sealed
    assert await missing(short_path / "copy", ended) == []
    until_position = _segment_between(to, old["position"], done["position"])
    early = await run(
        *("restore", str(short_path / "old"), "--home", str(short_path / "early"), "--segments", str(to)),
        *("--until", str(until_position)),
    )
    assert early["position"] == until_position
    assert len(await missing(short_path / "early", ended)) > 0


def _segment_between(folder: Path, after: int, until: int) -> int:
    """The first record of a segment that begins between these positions, in the middle of such segments."""
    starts = sorted(start for path in folder.glob("*.jsonl") if after < (start := int(path.stem)) <= until)
    return starts[len(starts) // 2]


async def _position(load: Load) -> int:
    """A position that is not before anything acknowledged so far."""
    file = load.home.parent / "position"
    told = await run("--home", str(load.home), "backup", str(file))
    position: int = told["position"]
    return position


async def test_a_backup_goes_through_a_pipe(load: Load, short_path: Path) -> None:
    async with load.running():
        await load.more(10)
    env = environment()
    with (short_path / "piped").open("wb") as out:
        subprocess.run(
            [str(COVENANT), "--home", str(load.home), "backup", "-"], stdout=out, env=env, check=True, timeout=BOUND_S
        )
    load.kill()
    with (short_path / "piped").open("rb") as source:
        subprocess.run(
            [str(COVENANT), "restore", "-", "--home", str(short_path / "copy")],
            stdin=source,
            env=env,
            check=True,
            timeout=BOUND_S,
        )
    assert await missing(short_path / "copy", load.acknowledged) == []


def test_refusals_say_what_to_do(load: Load, short_path: Path) -> None:
    file = short_path / "one"
    assert covenant("--home", str(load.home), "backup", str(file)).code == 0
    again = covenant("--home", str(load.home), "backup", str(file))
    assert (again.code, "name a new file" in again.err) == (1, True)
    nowhere = covenant("--home", str(short_path / "nowhere"), "backup", str(short_path / "two"))
    assert (nowhere.code, "there is no ledger" in nowhere.err) == (1, True)
    used = covenant("restore", str(file), "--home", str(load.home))
    assert (used.code, "stop it first" in used.err) == (1, True)
    other = load.daemon.json("identities", "enroll", "ann@host")["token_b58"]
    stranger = covenant("--home", str(load.home), "backup", str(short_path / "two"), env={"COVENANT_TOKEN": other})
    assert (stranger.code, "operator" in stranger.err) == (1, True)
    load.daemon.stop()
    full = covenant("restore", str(file), "--home", str(load.home))
    assert (full.code, "is not empty" in full.err) == (1, True)
    early = covenant("restore", str(file), "--home", str(short_path / "copy"), "--until", "1")
    assert (early.code, "--segments" in early.err) == (2, True)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    changed = covenant("restore", str(file), "--home", str(short_path / "copy"))
    assert changed.code == 1
    assert covenant("doctor", "--home", str(short_path / "copy")).code == 1


def owners(home: Path) -> set[int]:
    return {each.lstat().st_uid for each in (home, *home.rglob("*"))}


@pytest.mark.root
async def test_what_root_does_with_a_stopped_home_leaves_it_to_its_owner(load: Load, short_path: Path) -> None:
    async with load.running():
        await load.more(30)
        load.kill()
    someone = 65_534
    for path in (load.home, *load.home.rglob("*")):
        with suppress(FileNotFoundError):  # the archive's writer ends a moment after the daemon, and removes its log
            os.chown(path, someone, someone, follow_symlinks=False)
    await run("--home", str(load.home), "backup", str(short_path / "file"))
    assert owners(load.home) == {someone}
    assert (short_path / "file").stat().st_uid == 0
    told = await run("--home", str(load.home), "doctor")
    assert [each for each in told["findings"] if not each["well"]] == []
    assert owners(load.home) == {someone}
    copy = short_path / "copy"
    copy.mkdir(mode=0o700)
    os.chown(copy, someone, someone)
    await run("restore", str(short_path / "file"), "--home", str(copy))
    assert owners(copy) == {someone}


@pytest.mark.root
def test_root_follows_no_link_of_the_owner_of_a_home(load: Load, short_path: Path) -> None:
    load.kill()
    for path in (load.home, *load.home.rglob("*")):
        os.chown(path, 65_534, 65_534, follow_symlinks=False)
    of_root = short_path / "of_root"
    of_root.write_text("kept")
    (load.home / "lock").unlink()
    (load.home / "lock").symlink_to(of_root)
    done = covenant("--home", str(load.home), "backup", str(short_path / "file"))
    assert done.code == 1
    assert "Traceback" not in done.err
    assert (of_root.read_text(), of_root.stat().st_uid) == ("kept", 0)
