"""The wall clock of a real daemon is set while it works: by a day, both ways."""

import asyncio
import signal
import struct
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from covenant.model.grant import REQUEUE_ACTION
from tests.cli.daemons import Daemon
from tests.hostile.client import RawConnection, operator_token, request
from tests.ledger_contract.postgres_server import Databases
from tests.waits import BOUND_S, until

DAY_MS = 86_400_000
RETRIES = {
    "COVENANT_A2A_AUTO_RETRY_SCHEDULER": "true",
    "COVENANT_A2A_AUTO_RETRY_INTERVAL_MS": "100",
    "COVENANT_A2A_AUTO_RETRY_MIN_LEASE_AGE_MS": "600000",
    "COVENANT_DAEMON_SWEEP_INTERVAL_MS": "50",
}
TICKS = """
from pathlib import Path
from covenant import Agent, Schedule, Turn

tick = Agent("tick", schedules=[Schedule(id="often", every_s=1, text="now", catch_up_s=90)])


@tick
async def note(turn: Turn):
    with Path(__file__).with_name("runs").open("a") as file:
        file.write(f"{turn.task.metadata['schedule']['moment_ms']}\\n")
"""


class Stepped:
    """A daemon, and the clock of the machine that it believes to be on."""

    def __init__(self, folder: Path, *files: str, ledger: str = "") -> None:
        self._folder = folder
        self._files = (*files, "--ledger", ledger, "--ledger-durability", "os") if ledger else files
        self._offset = folder / "offset"
        self.set(0)
        self.daemon = self._start()

    def _start(self) -> Daemon:
        program = (sys.executable, str(Path(__file__).with_name("stepped.py")), str(self._offset))
        return Daemon(self._folder / "home", *self._files, env=RETRIES, inside=program)

    def set(self, offset_ms: int) -> None:
        """Written in place: the daemon has the file mapped."""
        self._offset.touch()
        with self._offset.open("r+b") as file:
            file.write(struct.pack("<q", offset_ms))

    def restart(self, offset_ms: int) -> None:
        """The clock is set while nothing runs."""
        assert self.daemon.stop() == 0
        self.set(offset_ms)
        self.daemon = self._start()

    def kill(self) -> None:
        """Without a warning, and started again."""
        assert self.daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        self.daemon = self._start()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        token = operator_token(self.daemon.home)
        answer = request(self.daemon.url, method, path, token=token, body=body, bound_s=BOUND_S)
        assert answer.status < 300, answer
        return answer.json

    def send(self, intent: str, **fields: Any) -> str:
        task_id: str = self.ask("POST", "/a2a/tasks", {**new_task(intent), **fields})["task_id"]
        return task_id

    def receive(self, wait_ms: int = 0) -> Any:
        return self.ask("GET", f"/a2a/tasks/next?scope=all&wait_ms={wait_ms}")["task"]

    def state(self, task_id: str) -> str:
        state: str = self.ask("GET", f"/a2a/tasks/{task_id}/show")["state"]
        return state

    def metric(self, name: str) -> float:
        text = request(self.daemon.url, "GET", "/metrics").body.decode()
        found = [each.value for family in text_string_to_metric_families(text) for each in family.samples]
        named = [each.name for family in text_string_to_metric_families(text) for each in family.samples]
        return found[named.index(name)]


def new_task(intent: str) -> dict[str, Any]:
    return {"id": str(uuid.uuid4()), "recipient": {"display": "worker@test"}, "intent_text": intent}


@pytest.fixture
def stepped(short_path: Path) -> Iterator[Stepped]:
    found = Stepped(short_path)
    found.ask("POST", "/identities/enroll", {"display": "worker@test"})
    for action in ("a2a.send.worker@test", REQUEUE_ACTION):
        found.ask("POST", "/capabilities/grant", {"action": action})
    yield found
    if found.daemon.process.poll() is None:
        found.daemon.stop()


def test_a_day_forward_neither_expires_what_waits_nor_retries_what_was_just_leased(stepped: Stepped) -> None:
    deadline_ms = int(time.time() * 1000) + 3_600_000
    held = stepped.send(
        "held", task_kind="work", idempotency={"key": "k", "duplicate_safety": "idempotent"}, timeout_ms=600_000
    )
    assert stepped.receive()["id"] == held
    waiting = [stepped.send("waits", deadline_ms=deadline_ms) for _ in range(2)]
    stepped.set(DAY_MS)
    until(lambda: stepped.metric("covenant_clock_steps_total") == 1)
    ready = request(stepped.daemon.url, "GET", "/readyz")
    assert ready.status == 200
    assert abs(ready.json["clock"]["stepped_ms"] - DAY_MS) < 5_000
    assert 0 < ready.json["clock"]["paused_ms"] <= 60_000
    assert stepped.metric("covenant_clock_paused") == 1
    assert [stepped.receive()["id"] for _ in waiting] == waiting
    report = stepped.ask("POST", "/a2a/retry-stale", {"min_lease_age_ms": 0})["report"]
    assert {each["reason"] for each in report["skipped"]} == {"clock_stepped"}
    # Several passes of the scheduler and the sweep have seen the step by now.
    until(lambda: _passes(stepped) >= 5)
    assert stepped.state(held) == "in_flight"
    assert "clock_stepped" in str(stepped.ask("GET", "/audit/recent?limit=1000"))


def _passes(stepped: Stepped) -> int:
    return stepped.daemon.log.count("retry.scanned")


def test_a_day_back_lets_a_long_poll_end_in_its_own_time(stepped: Stepped) -> None:
    """Two wait for anybody's task, and one comes: the other must not wait until the clock is where it was."""
    token = operator_token(stepped.daemon.home)
    head = "GET /a2a/tasks/next?scope=all&wait_ms={} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {}\r\n\r\n"
    begun = time.monotonic()
    with RawConnection(stepped.daemon.url) as first, RawConnection(stepped.daemon.url) as second:
        for connection, wait_ms in ((first, 50_000), (second, 1_500)):
            connection.send(head.format(wait_ms, token).encode())
            # What is answered after this was sent shows that it has been read.
            assert request(stepped.daemon.url, "GET", "/readyz").status == 200
        stepped.set(-DAY_MS)
        task_id = stepped.send("for one of them")
        assert first.read_answer().json["task"]["id"] == task_id
        assert second.read_answer().json["task"] is None
    assert time.monotonic() - begun >= 1.4


def test_a_start_in_the_past_of_its_own_journal_serves_and_reports_it(stepped: Stepped) -> None:
    stepped.set(DAY_MS)
    task_id = stepped.send("from the future", timeout_ms=600_000)
    stepped.restart(0)
    until(lambda: "clock" in request(stepped.daemon.url, "GET", "/readyz").json)
    assert stepped.receive()["id"] == task_id
    assert "clock.stepped" in stepped.daemon.log


def test_a_kill_within_the_pause_ends_no_pause(stepped: Stepped) -> None:
    """A wrong clock may also be the reason why a supervisor starts the daemon again."""
    waiting = stepped.send("waits", deadline_ms=int(time.time() * 1000) + DAY_MS // 2)
    stepped.set(DAY_MS)
    until(lambda: stepped.metric("covenant_clock_steps_total") == 1)
    stepped.kill()
    assert stepped.metric("covenant_clock_paused") == 1
    stepped.set(0)
    until(lambda: stepped.metric("covenant_clock_steps_total") == 1)
    assert stepped.receive()["id"] == waiting


def test_a_kill_within_the_pause_ends_no_pause_on_a_database_either(short_path: Path, databases: Databases) -> None:
    stepped = Stepped(short_path, ledger=asyncio.run(databases.make()))
    try:
        stepped.set(DAY_MS)
        until(lambda: stepped.metric("covenant_clock_steps_total") == 1)
        stepped.kill()
        assert stepped.metric("covenant_clock_paused") == 1
    finally:
        stepped.daemon.stop(signal.SIGKILL)


def test_a_file_of_clock_steps_that_cannot_be_read_prevents_no_start(stepped: Stepped) -> None:
    (stepped.daemon.home / "clock.json").write_bytes(b"{")
    stepped.restart(0)
    assert stepped.metric("covenant_clock_paused") == 0
    assert "clock.not_read" in stepped.daemon.log


@pytest.mark.matrix
def test_no_moment_of_a_schedule_has_two_runs_over_kills_and_steps_of_the_clock(short_path: Path) -> None:
    (short_path / "ticks.py").write_text(TICKS)
    (short_path / "runs").touch()
    stepped = Stepped(short_path, str(short_path / "ticks.py"))

    def runs() -> list[int]:
        return [int(line) for line in (short_path / "runs").read_text().splitlines()]

    try:
        until(lambda: len(runs()) >= 2)
        for offset_ms in (0, -4_000, 600_000, 0):  # each start looks again at the moments of the last 90 s
            stepped.set(offset_ms)
            stepped.kill()
            enough = len(runs()) + 3
            until(lambda: len(runs()) >= enough)  # noqa: B023  (it ends within the round)
        moments = runs()
        assert len(set(moments)) == len(moments), "a moment has two runs"
        listed = stepped.ask("GET", "/a2a/tasks?agent=tick&limit=200")["tasks"]
        assert len(listed) >= len(moments)
    finally:
        if stepped.daemon.process.poll() is None:
            stepped.daemon.stop()
