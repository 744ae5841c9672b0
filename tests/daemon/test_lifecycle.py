"""Starting and stopping a real daemon: who is refused, what survives, and how it ends."""

import http.client
import json
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from covenant import AgentId, Mailbox, Task, local_agent
from covenant.ledger.embedded.journal.segments import list_segments
from covenant.model.ids import TaskId
from covenant.seal.keys import new_private_key, public_key
from tests.cli.daemons import Daemon, Ran, covenant
from tests.waits import BOUND_S


def serve(home: Path, *flags: str, env: dict[str, str] | None = None) -> Ran:
    """A start that is expected to be refused."""
    return covenant("serve", "--home", str(home), *flags, env=env)


def get(daemon: Daemon, path: str, token: str | None = None) -> tuple[int, dict[str, Any]]:
    address = urlsplit(daemon.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=BOUND_S)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def operator_token(daemon: Daemon) -> str:
    return (daemon.home / "operator.token").read_text().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_daemon_cleanly(short_path: Path, number: int) -> None:
    daemon = Daemon(short_path / "home")
    assert get(daemon, "/readyz")[0] == 200
    assert daemon.stop(number) == 0
    assert not (daemon.home / "sock").exists()


LOOKS_AT_ITS_ADDRESS = """
import sys
from pathlib import Path
from covenant.cli.main import main
from covenant.doors.http.server.http_server import HttpServer

start, address = HttpServer.start, Path(sys.argv[1]) / "http.url"

async def look_and_start(server, listeners):
    print("an address" if address.exists() else "no address", flush=True)
    await start(server, listeners)

HttpServer.start = look_and_start
sys.argv = ["covenant", "serve", "--home", sys.argv[1], "--http-port", "0"]
main()
"""


def test_the_address_is_told_when_it_can_be_called(short_path: Path) -> None:
    program = [sys.executable, "-c", LOOKS_AT_ITS_ADDRESS, str(short_path / "home")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "no address\n"
        assert daemon.stdout.readline().startswith("covenant listens on ")
        assert (short_path / "home" / "http.url").exists()
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(BOUND_S) == 0
    assert not (short_path / "home" / "http.url").exists()


def test_the_line_says_where_it_listens(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    try:
        assert daemon.first_line == f"covenant listens on {daemon.url} and {daemon.home / 'sock'}"
        assert urlsplit(daemon.url).port
        assert stat_bits(daemon.home / "sock") == 0o600
    finally:
        daemon.stop()


def stat_bits(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_what_was_acknowledged_is_there_after_a_kill(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    daemon.json("identities", "enroll", "bob@host")
    daemon.json("capabilities", "grant", "a2a.send.bob@host")
    sent = {daemon.json("a2a", "send", "--to", "bob@host", f"task {n}")["task_id"] for n in range(3)}
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    again = Daemon(daemon.home)
    try:
        assert {entry["task"]["id"] for entry in again.json("a2a", "status")["tasks"]} == sent
        assert again.json("audit", "verify")["report"]["valid"] is True
    finally:
        assert again.stop() == 0


def test_a_second_daemon_on_one_home_refuses_and_names_the_first(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    try:
        ran = serve(daemon.home, "--http-port", "0")
        assert (ran.code, ran.out) == (1, "")
        assert f"is already open in process {daemon.process.pid}; stop it first" in ran.err
        assert daemon.json("a2a", "status")["kind"] == "a2a_status"
    finally:
        assert daemon.stop() == 0


def test_a_port_in_use_refuses_and_leaves_the_home_free(short_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = serve(short_path / "home", "--http-port", str(taken.getsockname()[1]))
    assert (ran.code, ran.out) == (1, "")
    assert "HTTP cannot listen on 127.0.0.1 port" in ran.err
    assert "--http-port" in ran.err
    assert Daemon(short_path / "home").stop() == 0


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [
        (["--http-port", "http"], {}, "http.port: 'http' from --http-port is not allowed"),
        ([], {"COVENANT_HTTP_BIND_ADDR": "here"}, "http.bind_addr: 'here' from COVENANT_HTTP_BIND_ADDR"),
        ([], {"COVENANT_A2A_AUTO_RETRY_INTERVAL_MS": "0"}, "retry.interval_ms: '0'"),
        ([], {"COVENANT_A2A_AUTO_RETRY_SCHEDULER": "maybe"}, "retry.scheduler: 'maybe'"),
    ],
)
def test_a_bad_setting_refuses_to_start(
    short_path: Path, flags: list[str], variables: dict[str, str], said: str
) -> None:
    ran = serve(short_path / "home", *flags, env=variables)
    assert (ran.code, ran.out) == (1, "")
    assert said in ran.err
    assert not (short_path / "home").exists()


def test_an_operator_token_that_others_can_read_refuses_to_start(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    daemon.stop()
    (daemon.home / "operator.token").chmod(0o644)
    ran = serve(daemon.home)
    assert ran.code == 1
    assert f"chmod 600 {daemon.home / 'operator.token'}" in ran.err


def test_a_home_whose_path_is_too_long_for_a_socket_refuses_to_start(tmp_path: Path) -> None:
    ran = serve(tmp_path / ("x" * 120))
    assert ran.code == 1
    assert "choose a shorter home" in ran.err


def test_damage_refuses_to_start_and_points_to_the_doctor(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    daemon.json("identities", "enroll", "bob@host")
    daemon.stop()
    segment = list_segments(daemon.home / "journal")[0].path
    data = bytearray(segment.read_bytes())
    data[40] ^= 1
    segment.write_bytes(data)
    ran = serve(daemon.home)
    assert ran.code == 1
    assert f"{segment}, line 1" in ran.err
    assert "covenant doctor" in ran.err


def test_a_torn_tail_is_cut_and_reported(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    daemon.stop()
    segment = list_segments(daemon.home / "journal")[-1].path
    with segment.open("ab") as file:
        file.write(b'{"seq":')
    again = Daemon(daemon.home)
    assert again.json("audit", "verify")["report"]["valid"] is True
    assert "journal.torn_tail_cut" in again.log
    assert again.stop() == 0


def test_a_forged_grant_refuses_to_start_and_is_named(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    daemon.json("capabilities", "grant", "a2a.compact")
    daemon.stop()
    (daemon.home / "identity" / "local.key").write_text("ab" * 32 + "\n")
    ran = serve(daemon.home)
    assert ran.code == 1
    assert "operator@local a2a.compact" in ran.err
    assert "not signed by this home's key" in ran.err


def test_a_changed_audit_row_is_reported_at_the_start_and_fails_the_verification(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    daemon.json("identities", "enroll", "bob@host")
    daemon.stop()
    with closing(sqlite3.connect(daemon.home / "archive.db")) as archive:
        archive.execute("UPDATE audit SET row = replace(row, 'bob@host', 'eve@host') WHERE row LIKE '%bob@host%'")
        archive.commit()
    again = Daemon(daemon.home)
    try:
        assert "audit.invalid" in again.log
        report = again.json("audit", "verify", code=1)["report"]
        assert report["valid"] is False
        assert len(report["failures"]) == 1
        told = again.run("audit", "verify")
        assert told.code == 1
        assert told.out.startswith("INVALID: ")
    finally:
        assert again.stop() == 0


def test_an_audit_whose_end_was_cut_off_is_reported_at_the_start_and_fails_the_verification(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    for number in range(3):
        daemon.json("identities", "enroll", f"bob-{number}@host")
    daemon.stop()
    with closing(sqlite3.connect(daemon.home / "archive.db")) as archive:
        (last,) = archive.execute("SELECT max(idx) FROM audit").fetchone()
        archive.execute("DELETE FROM audit WHERE idx > ?", (last - 2,))
        archive.commit()
    again = Daemon(daemon.home)
    try:
        assert "audit.invalid" in again.log
        report = again.json("audit", "verify", code=1)["report"]
        assert report["valid"] is False
        assert report["failures"][0].startswith(f"rows {last - 1} to {last} are missing")
    finally:
        assert again.stop() == 0


def test_a_lost_key_is_not_replaced_under_a_ledger_that_it_signed_for(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    daemon.stop()
    (daemon.home / "identity" / "local.key").unlink()
    ran = serve(daemon.home)
    assert ran.code == 1
    assert "identity/local.key is missing" in ran.err
    assert not (daemon.home / "identity" / "local.key").exists()


async def test_a_home_that_a_library_filled_can_be_served(short_path: Path) -> None:
    home = short_path / "home"
    alice = AgentId("alice@host", public_key(new_private_key()))
    async with Mailbox.open(home) as mailbox:
        await mailbox.send_task(Task(id=TaskId(str(uuid4())), sender=alice, recipient=alice, intent_text="kept"))
    daemon = Daemon(home)
    try:
        assert [entry["task"]["intent_text"] for entry in daemon.json("a2a", "status")["tasks"]] == ["kept"]
    finally:
        assert daemon.stop() == 0


async def test_status_begins_with_the_oldest_lease_however_much_waits(short_path: Path) -> None:
    home, bob = short_path / "home", local_agent("bob@host")
    async with Mailbox.open(home) as mailbox:
        for number in range(30):
            await mailbox.send_task(Mailbox.new_task(bob, bob, f"task {number}"))
        held = await mailbox.try_recv_task_for(bob)
    assert held is not None
    daemon = Daemon(home)
    try:
        shown = daemon.json("a2a", "status")
        assert (len(shown["tasks"]), shown["tasks"][0]["task"]["id"]) == (shown["limit"], held.id)
        assert [entry["state"] for entry in shown["tasks"]] == ["in_flight", *["queued"] * 9]
    finally:
        assert daemon.stop() == 0


def test_no_token_is_in_any_file_but_the_operators_own_in_its_file(short_path: Path) -> None:
    daemon = Daemon(short_path / "home", "--log-level", "debug")
    tokens = {"first": operator_token(daemon)}
    for number in range(2):
        tokens[f"bob {number}"] = daemon.json("identities", "enroll", f"bob-{number}@host")["token_b58"]
    tokens["bob 1 again"] = daemon.json("identities", "rotate", "bob-1@host")["token_b58"]
    tokens["operator"] = daemon.json("identities", "rotate")["token_b58"]
    assert get(daemon, "/a2a/queue", tokens["bob 0"])[0] == 200
    assert get(daemon, "/a2a/queue", tokens["bob 1"])[0] == 401
    daemon.json("capabilities", "grant", "a2a.compact")
    daemon.json("a2a", "compact")

    def found() -> set[tuple[str, str]]:
        files = {path: path.read_bytes() for path in short_path.rglob("*") if path.is_file()}
        assert {"archive.db", "home.log", "operator.token"} <= {path.name for path in files}
        return {
            (whose, path.name)
            for path, data in files.items()
            for whose, token in tokens.items()
            if token.encode() in data
        }

    assert found() == {("operator", "operator.token")}
    assert daemon.stop() == 0
    assert found() == {("operator", "operator.token")}


def test_a_token_put_into_the_file_between_two_starts_is_the_operators(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    old = operator_token(daemon)
    daemon.stop()
    fresh = "8" * 43
    (daemon.home / "operator.token").write_text(fresh + "\n")
    again = Daemon(daemon.home)
    try:
        assert get(again, "/a2a/queue", fresh)[0] == 200
        assert get(again, "/a2a/queue", old)[0] == 401
        listed = again.json("identities", "list")["identities"]
        assert [row["revoked_at"] is None for row in listed] == [True, False]
    finally:
        assert again.stop() == 0


def test_a_revoked_operator_token_is_replaced_at_the_next_start_and_stays_revoked(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    old = operator_token(daemon)
    daemon.json("identities", "revoke", "operator@local", "--force")
    assert daemon.run("a2a", "status").code == 1
    daemon.stop()
    again = Daemon(daemon.home)
    try:
        assert operator_token(again) != old
        assert again.json("a2a", "status")["kind"] == "a2a_status"
        assert get(again, "/a2a/queue", old)[0] == 401
    finally:
        assert again.stop() == 0


def test_a_wait_that_is_open_when_the_daemon_stops_is_told_so(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    token = operator_token(daemon)
    address = urlsplit(daemon.url)
    waiting = http.client.HTTPConnection(address.hostname or "", address.port, timeout=BOUND_S)
    waiting.request("GET", "/a2a/tasks/next?wait_ms=50000", headers={"Authorization": f"Bearer {token}"})
    # A round trip on another connection: by then the daemon has read what was sent before it.
    assert get(daemon, "/a2a/queue", token)[0] == 200
    assert daemon.stop() == 0
    response = waiting.getresponse()
    assert (response.status, json.loads(response.read())["code"]) == (503, "stopping")
    waiting.close()


def test_a_second_signal_ends_the_grace_time(short_path: Path) -> None:
    daemon = Daemon(short_path / "home", "--daemon-grace-ms", "3600000")
    address = urlsplit(daemon.url)
    with socket.create_connection((address.hostname or "", address.port or 0), BOUND_S) as slow:
        token = operator_token(daemon)
        head = (
            f"POST /a2a/tasks HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nContent-Length: 9\r\n\r\n"
        )
        slow.sendall(head.encode())
        assert get(daemon, "/a2a/queue", token)[0] == 200
        daemon.process.send_signal(signal.SIGTERM)
        while "daemon.stopping" not in daemon.log:
            assert daemon.process.poll() is None
        assert daemon.stop() == 0


STUBBORN = """
import asyncio, time
from covenant import Agent

async def hold_on():
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass

stubborn = Agent("stubborn")
@stubborn
async def work(turn):
    yield turn.status("begun")
    await hold_on()

begun = []
beside = Agent("beside")
@beside
async def begin(turn):
    begun.append(asyncio.create_task(hold_on()))
    return "begun"

blocking = Agent("blocking")
@blocking
async def block(turn):
    begun.append(asyncio.create_task(asyncio.to_thread(time.sleep, 600)))
    return "begun"

slow = Agent("slow", timeout_ms=1)
@slow
async def be_slow(turn):
    await hold_on()
"""


@pytest.mark.parametrize(
    ("agent", "named"),
    [
        ("stubborn", "stubborn@default"),
        pytest.param("slow", "slow@default", marks=pytest.mark.matrix),
        pytest.param("beside", "unknown", marks=pytest.mark.matrix),
        pytest.param("blocking", "unknown", marks=pytest.mark.matrix),
    ],
)
def test_a_daemon_ends_although_its_agent_does_not(short_path: Path, agent: str, named: str) -> None:
    file = short_path / "agents.py"
    file.write_text(STUBBORN)
    daemon = Daemon(short_path / "home", "--daemon-grace-ms", "100", str(file))
    message = {"messageId": "1", "role": "ROLE_USER", "parts": [{"text": "go"}]}
    params = {"message": message, "configuration": {"returnImmediately": agent == "stubborn"}}
    address = urlsplit(daemon.url)
    with closing(http.client.HTTPConnection(address.hostname or "", address.port, timeout=BOUND_S)) as connection:
        connection.request(
            "POST",
            f"/v1/a2a/agents/{agent}",
            json.dumps({"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params}),
            {"Authorization": f"Bearer {operator_token(daemon)}", "Content-Type": "application/json"},
        )
        assert "result" in json.loads(connection.getresponse().read())
    try:
        assert daemon.stop() == 0
    finally:
        daemon.process.kill()
    log = (short_path / "home.log").read_text()
    lines = [line for line in log.splitlines() if "daemon.abandoned" in line]
    assert len(lines) == 1
    assert named in lines[0]
    assert Daemon(daemon.home).stop() == 0


def test_a_daemon_that_gives_no_grace_ends_at_once(short_path: Path) -> None:
    daemon = Daemon(short_path / "home", "--daemon-grace-ms", "0")
    assert daemon.stop() == 0


def test_the_retry_scheduler_is_switched_on_by_the_environment_and_leaves_its_summary(short_path: Path) -> None:
    daemon = Daemon(
        short_path / "home",
        env={"COVENANT_A2A_AUTO_RETRY_SCHEDULER": "on", "COVENANT_A2A_AUTO_RETRY_INTERVAL_MS": "20"},
    )
    try:
        scan: list[dict[str, Any]] = []
        while not scan:
            events = daemon.json("audit", "recent")["events"]
            scan = [event["kind"] for event in events if event["kind"]["type"] == "a2a_auto_retry_scheduler_scan"]
        # Without the capability each pass is refused, and says so: the scheduler has no way of its own.
        assert "a2a.repair.requeue" in scan[0]["error"]
        daemon.json("capabilities", "grant", "a2a.repair.requeue")
        while scan[-1]["error"] is not None:
            events = daemon.json("audit", "recent")["events"]
            scan = [event["kind"] for event in events if event["kind"]["type"] == "a2a_auto_retry_scheduler_scan"]
        assert scan[-1] | {"considered": 0} == {
            "type": "a2a_auto_retry_scheduler_scan",
            "enabled": True,
            "considered": 0,
            "requeued": 0,
            "skipped": 0,
            "skipped_by_reason": {},
            "min_lease_age_ms": 300_000,
            "max_attempts": 3,
            "max_requeues": 1,
            "scan_limit": 100,
            "error": None,
        }
    finally:
        assert daemon.stop() == 0


def test_logs_are_one_json_object_a_line_where_that_is_asked_for(short_path: Path) -> None:
    daemon = Daemon(short_path / "home", "--log-format", "json", env={"COVENANT_HTTP_PROT": "1"})
    rows = [json.loads(line) for line in daemon.log.splitlines()]
    assert daemon.stop() == 0
    assert [row["event"] for row in rows] == ["settings.unknown_variable", "ledger.opened"]
    assert rows[0]["variable"] == "COVENANT_HTTP_PROT; did you mean COVENANT_HTTP_PORT?"
    assert {"ts_ms", "level"} <= rows[0].keys()


def test_an_address_that_others_can_reach_is_warned_about(short_path: Path) -> None:
    daemon = Daemon(short_path / "home", "--http-bind-addr", "0.0.0.0")
    assert "http.exposed" in daemon.log
    assert daemon.stop() == 0


def test_a_request_that_calls_the_daemon_by_another_name_is_refused(short_path: Path) -> None:
    daemon = Daemon(short_path / "home", env={"COVENANT_HTTP_ALLOWED_HOSTS": "covenant.example"})
    try:
        assert get(daemon, "/healthz")[0] == 200  # by the address it listens on
        address = urlsplit(daemon.url)
        for host, status in (("covenant.example", 200), ("evil.example", 403)):
            connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=BOUND_S)
            connection.request("GET", "/healthz", headers={"Host": host})
            assert connection.getresponse().status == status
            connection.close()
    finally:
        assert daemon.stop() == 0


def test_settings_in_the_homes_file_are_in_force(short_path: Path) -> None:
    home = short_path / "home"
    home.mkdir(mode=0o700)
    (home / "settings.toml").write_text("[doors]\nlegacy_kinds = true\n[limits]\npage_max = 7\n")
    daemon = Daemon(home)
    try:
        assert get(daemon, "/a2a/queue?limit=7", operator_token(daemon))[1]["kind"] == "a2_a_queue"
        assert get(daemon, "/a2a/queue?limit=8", operator_token(daemon))[0] == 400
        assert daemon.json("a2a", "status", "--limit", "7")["kind"] == "a2a_status"
    finally:
        assert daemon.stop() == 0
