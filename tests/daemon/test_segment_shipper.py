"""`backup.command`: run for each sealed segment, again after a failure, and its failures are seen."""

import asyncio
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec

from covenant.daemon.doctor.home_check import check
from covenant.ledger.embedded.journal.shipped_segments import read_status, sealed_segments
from covenant.ledger.machine.identity_commands import WriteAuditRow
from tests.cli.daemons import covenant
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.waits import BOUND_S, LOOK_S

SEGMENT_BYTES = 4_096


def python(program: str) -> str:
    return shlex.join([sys.executable, "-c", program])


async def until(met: Callable[[], object]) -> None:
    end_s = time.monotonic() + BOUND_S
    while not met():
        assert time.monotonic() < end_s, "it did not come to pass"
        await asyncio.sleep(LOOK_S)


async def fill(daemon: DaemonUnderTest, segments: int = 3) -> None:
    """Until so many more segments are sealed."""
    folder = daemon.home / "journal"
    there = len(sealed_segments(folder))
    while len(sealed_segments(folder)) < there + segments:
        row: dict[str, object] = {"type": "filled", "text": "x" * 1_000}
        await daemon.ledger.commit(WriteAuditRow(by=daemon.operator.agent, row=row))


def shipping(home: Path, command: str, **more: Any) -> AbstractAsyncContextManager[DaemonUnderTest]:
    backup = {"command": command, **more}
    return open_daemon_under_test(home, backup=backup, ledger={"segment_bytes": SEGMENT_BYTES})


async def test_each_sealed_segment_is_shipped_once_whole_and_in_order(short_path: Path) -> None:
    home, to = short_path / "home", short_path / "shipped"
    to.mkdir()
    log = short_path / "log"
    words = ["/bin/sh", "-c", f'cp "$1" "{to}/$2" && echo "$2 $3 $COVENANT_SEGMENT_SHA256" >> {log}', "ship"]
    command = shlex.join([*words, "{path}", "{name}", "{incarnation}"])
    async with shipping(home, command) as daemon:
        await fill(daemon)
        sealed = sealed_segments(home / "journal")
        await until(lambda: read_status(home).shipped_seq >= sealed[-1].last_seq)
        for segment in sealed:
            assert (to / segment.path.name).read_bytes() == segment.path.read_bytes()
        lines = [line.split() for line in log.read_text().splitlines()]
        assert [line[0] for line in lines[: len(sealed)]] == [segment.path.name for segment in sealed]
        assert {line[1] for line in lines} == {"original"}
        assert all(len(line[2]) == 64 for line in lines)


async def test_a_command_that_fails_is_seen_and_run_again(short_path: Path) -> None:
    home, gate = short_path / "home", short_path / "gate"
    command = shlex.join(["/bin/sh", "-c", f"test -e {gate} || {{ echo the disk is gone >&2; exit 7; }}"])
    async with shipping(home, command) as daemon:
        await fill(daemon)
        await until(lambda: read_status(home).failures >= 2)
        said = "it ended with 7: the disk is gone"
        status = (await daemon.ask("GET", "/a2a/queue")).json()
        assert said in status["warnings"][0]
        ran = await asyncio.to_thread(covenant, "--home", str(home), "a2a", "status")
        assert "warning: backup.command has failed" in ran.out
        metrics = (await daemon.ask("GET", "/metrics")).text
        assert "covenant_backup_failing 1.0" in metrics
        assert "covenant_backup_shipped_position 0.0" in metrics
        findings = [each for each in check(home, {}).findings if said in each.what]
        assert [(each.well, each.way_out) for each in findings] == [(False, "correct it, the daemon tries again")]
        gate.touch()
        await until(lambda: read_status(home).shipped_seq > 0)
        assert read_status(home).warning is None
        assert "warnings" not in (await daemon.ask("GET", "/a2a/queue")).json()


async def test_a_command_that_does_not_end_is_killed_with_all_that_it_started(short_path: Path) -> None:
    home, pid = short_path / "home", short_path / "pid"
    command = shlex.join(["/bin/sh", "-c", f"sleep 600 & echo $! > {pid}; wait"])
    async with shipping(home, command, command_ms=200) as daemon:
        await fill(daemon)
        await until(lambda: read_status(home).failures)
        assert "did not end within 200 ms" in str(read_status(home).failure)
        await until(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists() or zombie(pid.read_text().strip()))


def zombie(pid: str) -> bool:
    """Nobody waits for what has lost its parent in a container without init."""
    return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()


async def test_a_program_that_is_not_there_is_seen(short_path: Path) -> None:
    home = short_path / "home"
    async with shipping(home, "/nowhere/ship {path}") as daemon:
        await fill(daemon)
        await until(lambda: read_status(home).failures)
        assert "/nowhere/ship" in str(read_status(home).failure)


async def test_a_quiet_ledger_is_shipped_after_a_while(short_path: Path) -> None:
    home = short_path / "home"
    async with shipping(home, "true", seal_ms=1_000) as daemon:
        durable = (await daemon.ledger.counts()).gauges["durable_seq"]
        await until(lambda: read_status(home).shipped_seq >= durable > 0)


async def test_what_the_command_says_is_bounded(short_path: Path) -> None:
    home = short_path / "home"
    program = "import sys; sys.stderr.write('x' * 10_000_000); sys.exit(1)"
    async with shipping(home, python(program)) as daemon:
        await fill(daemon)
        await until(lambda: read_status(home).failures)
        assert len(msgspec.json.encode(read_status(home))) < 1_000
