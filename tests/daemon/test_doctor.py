"""`covenant doctor`: what it finds, that it changes nothing, and how a damaged journal is mended."""

import base64
import hashlib
import http.server
import json
import os
import shutil
import sqlite3
import subprocess
import threading
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from covenant.daemon.doctor.home_check import check
from covenant.ledger.embedded.archive.archive_file import PAGE_BYTES
from covenant.ledger.embedded.journal.record import decode_line
from covenant.ledger.embedded.journal.segments import list_segments
from tests.cli.daemons import COVENANT, Daemon, Ran, covenant, environment
from tests.hostile.client import request
from tests.matrices import first_of
from tests.places import short_folder
from tests.waits import BOUND_S


def doctor(home: Path, *flags: str, stdin: str = "") -> Ran:
    return covenant("doctor", "--home", str(home), *flags, stdin=stdin)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("lock", "archive.db-shm", "archive.db-wal")
    }


@pytest.fixture(scope="module")
def used_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that a daemon has worked in and left: three tasks for bob, the first of them leased."""
    kept = tmp_path_factory.mktemp("used") / "home"
    with short_folder() as folder:
        daemon = Daemon(folder / "home")
        token = daemon.json("identities", "enroll", "bob@host")["token_b58"]
        daemon.json("capabilities", "grant", "a2a.send.bob@host")
        for number in range(3):
            daemon.json("a2a", "send", "--to", "bob@host", f"task {number}")
        assert daemon.run("a2a", "next", env={"COVENANT_TOKEN": token}).code == 0
        assert daemon.stop() == 0
        shutil.copytree(daemon.home, kept)
    return kept


@pytest.fixture
def home(used_home: Path, short_path: Path) -> Path:
    copy = short_path / "home"
    shutil.copytree(used_home, copy)
    copy.chmod(0o700)
    return copy


def segment(home: Path) -> Path:
    return list_segments(home / "journal")[-1].path


def lines(home: Path) -> list[bytes]:
    return segment(home).read_bytes().splitlines(keepends=True)


def line_of(home: Path, words: bytes) -> int:
    """The number of the first line that says this, from 0."""
    return next(number for number, line in enumerate(lines(home)) if words in line)


def damage(home: Path, number: int) -> None:
    changed = lines(home)
    changed[number] = changed[number].replace(b'"events"', b'"evemts"', 1)
    segment(home).write_bytes(b"".join(changed))


def test_a_healthy_home_is_well_and_stays_as_it_is(home: Path) -> None:
    before = files(home)
    ran = doctor(home)
    assert ran.code == 0, ran
    assert "WRONG" not in ran.out
    assert "the journal is whole" in ran.out
    told = doctor(home, "--json").json
    assert (told["well"], told["losses"], told["set_aside"]) == (True, [], None)
    assert files(home) == before


def test_a_home_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    ran = doctor(tmp_path / "nowhere")
    assert ran.code == 1
    assert "there is no home" in ran.out


def test_an_empty_home_is_well(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert doctor(tmp_path).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_home_in_use_is_left_alone(home: Path) -> None:
    daemon = Daemon(home)
    try:
        ran = doctor(home, "--accept-loss", "--yes")
        assert ran.code == 0
        assert f"is already open in process {daemon.process.pid}" in ran.out
        assert "journal is" not in ran.out
    finally:
        assert daemon.stop() == 0


def open_token(home: Path) -> None:
    (home / "operator.token").chmod(0o644)


def open_home(home: Path) -> None:
    home.chmod(0o777)


def lose_key(home: Path) -> None:
    (home / "identity" / "local.key").unlink()


def spoil_settings(home: Path) -> None:
    (home / "settings.toml").write_text("[http]\nprot = 1\n")


def spoil_archive(home: Path) -> None:
    (home / "archive.db").write_bytes(b"no database" * 1_000)


def garble_token(home: Path) -> None:
    (home / "operator.token").write_text("nonsense")


def garble_key(home: Path) -> None:
    (home / "identity" / "local.key").write_text("nonsense")


def change_key(home: Path) -> None:
    (home / "identity" / "local.key").write_text("17" * 32)


def garble_settings(home: Path) -> None:
    (home / "settings.toml").write_bytes(b"\xff\x00")


def lose_journal(home: Path) -> None:
    shutil.rmtree(home / "journal")


def overwrite_page(home: Path) -> None:
    data = bytearray((home / "archive.db").read_bytes())
    data[3 * PAGE_BYTES : 4 * PAGE_BYTES] = b"\xa5" * PAGE_BYTES
    (home / "archive.db").write_bytes(data)


def overwrite_index(home: Path) -> None:
    """Another index's root takes the place of this one's: each page is good, but index and table do not agree."""
    path = home / "archive.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        roots = dict(db.execute("SELECT name, rootpage FROM sqlite_schema WHERE type = 'index'"))
    target, source = ((roots[name] - 1) * PAGE_BYTES for name in ("live", "children"))
    data = bytearray(path.read_bytes())
    data[target : target + PAGE_BYTES] = data[source : source + PAGE_BYTES]
    path.write_bytes(data)


def write_layout_of_the_future(home: Path) -> None:
    with closing(sqlite3.connect(home / "archive.db")) as db:
        db.execute("PRAGMA user_version = 99")


def write_snapshot(home: Path, text: str) -> None:
    (home / "journal" / f"snapshot-{1:020d}.jsonl").write_text(text)


def tear_snapshot(home: Path) -> None:
    write_snapshot(home, '{"type":"head","seq":1,"audit_head":')


def write_snapshot_of_the_future(home: Path) -> None:
    head = {"index": 0, "chain_hash": "0" * 64}
    write_snapshot(home, json.dumps({"type": "head", "seq": 1, "audit_head": head, "audit_anchor": head, "version": 9}))


def set_record_aside(home: Path) -> None:
    with closing(sqlite3.connect(home / "archive.db")) as db:
        db.execute("INSERT INTO rejects VALUES (3, 'UNIQUE constraint failed', x'7b7d0a')")
        db.commit()


def leave_stray_task(home: Path) -> None:
    """As an accepted loss used to do."""
    with closing(sqlite3.connect(home / "archive.db")) as db:
        db.execute("UPDATE a2a_tasks SET task_id = '00000000-0000-4000-8000-00000000dead' WHERE settled_place IS NULL")
        db.commit()


def change_archive(home: Path, sql: str) -> None:
    with closing(sqlite3.connect(home / "archive.db")) as db:
        db.executescript(sql)


def drop_old_ids(home: Path) -> None:
    change_archive(home, "DROP TABLE ids_old")


def drop_handovers(home: Path) -> None:
    change_archive(home, "DROP TABLE handovers")


def drop_column(home: Path) -> None:
    change_archive(home, "ALTER TABLE handovers DROP COLUMN reason")


def drop_archived_seq(home: Path) -> None:
    change_archive(home, "DELETE FROM meta WHERE key = 'archived_seq'")


def garble_archived_seq(home: Path) -> None:
    change_archive(home, "UPDATE meta SET value = 'many' WHERE key = 'archived_seq'")


def negate_archived_seq(home: Path) -> None:
    change_archive(home, "UPDATE meta SET value = -1 WHERE key = 'archived_seq'")


def forget_layout(home: Path) -> None:
    change_archive(home, "PRAGMA user_version = 0")


ARCHIVE_SPOILS = [
    drop_old_ids,
    drop_handovers,
    drop_column,
    drop_archived_seq,
    garble_archived_seq,
    negate_archived_seq,
    forget_layout,
]


def put_folder_for_url(home: Path) -> None:
    (home / "http.url").mkdir()


def put_folder_for_new_url(home: Path) -> None:
    (home / "http.new").mkdir()


def put_file_for_socket(home: Path) -> None:
    (home / "sock").unlink(missing_ok=True)
    (home / "sock").write_text("")


def spoil_servers(home: Path) -> None:
    (home / "mcp_servers.json").write_text("{")


def name_program_that_is_not_there(home: Path) -> None:
    write_servers(home, {"gone": {"command": "no-such-program-here"}})


def name_server_that_does_not_answer(home: Path) -> None:
    write_servers(home, {"far": {"url": "http://127.0.0.1:9/mcp"}})


def show_secrets_of_servers(home: Path) -> None:
    write_servers(home, {"sh": {"command": "sh", "env": {"KEY": "s3cret"}}})
    (home / "mcp_servers.json").chmod(0o644)


def write_servers(home: Path, servers: dict[str, object]) -> None:
    (home / "mcp_servers.json").write_text(json.dumps({"servers": servers}))
    (home / "mcp_servers.json").chmod(0o600)


def spoil_prices(home: Path) -> None:
    (home / "model_prices.json").write_text('{"currency": "euro"}')


def spoil_remotes(home: Path) -> None:
    (home / "a2a_agents.json").write_text("{")


@pytest.mark.parametrize(
    ("spoil", "way_out"),
    [
        (open_token, "chmod 600"),
        (open_home, "chmod 700"),
        (garble_token, "remove it, and the next start makes a new one"),
        (lose_key, "backup"),
        (garble_key, "backup"),
        (change_key, "put the journal and identity/ back"),
        (spoil_settings, "did you mean http.port?"),
        (garble_settings, "docs/settings.md"),
        (spoil_archive, "--accept-loss"),
        (overwrite_page, "--accept-loss"),
        (overwrite_index, "--accept-loss"),
        (lose_journal, "--accept-loss"),
        (write_layout_of_the_future, "run the version that wrote it"),
        (tear_snapshot, "backup"),
        (write_snapshot_of_the_future, "run the newer program"),
        (set_record_aside, "--rebuild-archive"),
        (leave_stray_task, "--rebuild-archive"),
        *((spoil, "--accept-loss") for spoil in ARCHIVE_SPOILS),
        (put_file_for_socket, "move it away"),
        (put_folder_for_url, "move it away"),
        (put_folder_for_new_url, "move it away"),
        (spoil_servers, "take the file away"),
        (spoil_prices, "a running daemon reads it again by itself"),
        (name_program_that_is_not_there, "install it, or change its command"),
        (name_server_that_does_not_answer, "start it, or change its entry"),
        (show_secrets_of_servers, "chmod 600"),
        (spoil_remotes, "change it"),
    ],
)
def test_what_is_wrong_is_said_with_its_way_out(home: Path, spoil: Callable[[Path], None], way_out: str) -> None:
    spoil(home)
    before = files(home)
    found = check(home, {})
    wrong = [finding for finding in found.findings if not finding.well]
    assert any(way_out in f"{finding.what} {finding.way_out}" for finding in wrong), found.findings
    assert all(finding.way_out for finding in wrong)
    assert files(home) == before


@pytest.mark.parametrize("spoil", [open_token, overwrite_page, lose_journal])
def test_the_command_says_the_same_in_words_and_as_json(home: Path, spoil: Callable[[Path], None]) -> None:
    spoil(home)
    wrong = [finding for finding in check(home, {}).findings if not finding.well]
    ran, told = doctor(home), doctor(home, "--json")
    assert (ran.code, ran.err, told.code, told.err) == (1, "", 1, "")
    assert all(f"WRONG  {finding.what}\n       → {finding.way_out}\n" in ran.out for finding in wrong)
    assert [finding for finding in told.json["findings"] if not finding["well"]] == [
        finding._asdict() for finding in wrong
    ]


@pytest.mark.parametrize(
    "spoil",
    [
        garble_token,
        lose_key,
        change_key,
        garble_settings,
        lose_journal,
        spoil_archive,
        tear_snapshot,
        write_layout_of_the_future,
        drop_archived_seq,
        garble_archived_seq,
        negate_archived_seq,
        forget_layout,
        put_file_for_socket,
        put_folder_for_url,
    ],
)
def test_a_start_that_stumbles_names_the_doctor(home: Path, spoil: Callable[[Path], None]) -> None:
    spoil(home)
    ran = covenant("serve", "--home", str(home), "--http-port", "0")
    assert ran.code == 1
    assert "Traceback" not in ran.err
    assert "covenant doctor" in ran.err


def test_a_home_that_is_too_deep_for_a_socket_is_said_so(tmp_path: Path) -> None:
    home = tmp_path / ("h" * 120)
    home.mkdir(mode=0o700)
    ran = doctor(home)
    assert ran.code == 1
    assert "choose a shorter home" in ran.out


def test_a_home_that_is_a_file_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    for home in (tmp_path / "home", tmp_path / "home" / "inside"):
        ran = doctor(home)
        assert (ran.code, ran.err) == (1, "")
        assert "choose another home" in ran.out


def powerless(*words: str) -> Ran:
    """The command by a user whom permissions bind: root may do everything unless that is taken away."""
    bound = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
    done = subprocess.run(
        [*bound, str(COVENANT), *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=BOUND_S,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("mode", [0o500, 0o000], ids=oct)
def test_a_home_that_cannot_be_written_is_said_so_by_doctor_and_start(home: Path, mode: int) -> None:
    home.chmod(mode)
    try:
        for words in (("doctor", "--json"), ("doctor",), ("serve", "--http-port", "0")):
            ran = powerless(*words, "--home", str(home))
            assert ran.code == 1
            assert "Traceback" not in ran.err
            assert "chmod" in ran.out or "covenant doctor" in ran.err
    finally:
        home.chmod(0o700)


@pytest.mark.parametrize("name", first_of(["journal", "archive.db", "identity", "settings.toml"]))
def test_a_file_that_cannot_be_read_is_said_so(home: Path, name: str) -> None:
    path = home / name
    if not path.exists():
        path.write_text("")
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        ran = powerless("doctor", "--home", str(home))
        assert ran.code == 1
        assert str(path) in ran.out
        assert "Traceback" not in ran.err
    finally:
        path.chmod(mode)


@pytest.mark.root
def test_a_home_of_another_user_is_said_so(home: Path) -> None:
    for path in (home, *home.rglob("*")):
        os.chown(path, 65_534, 65_534)
    ran = powerless("doctor", "--home", str(home))
    assert ran.code == 1
    assert "belongs to user" in ran.out
    assert "Traceback" not in ran.err
    ran = powerless("serve", "--home", str(home), "--http-port", "0")
    assert ran.code == 1
    assert "Traceback" not in ran.err


def get(daemon: Daemon, path: str) -> tuple[int, str]:
    answer = request(daemon.url, "GET", path)
    return answer.status, answer.body.decode()


def test_a_record_that_was_set_aside_is_told_everywhere_and_can_be_tried_again(home: Path) -> None:
    """The archive has a task that the journal is told of only later."""
    task_id = "00000000-0000-4000-8000-00000000beef"
    with closing(sqlite3.connect(home / "archive.db")) as db:
        db.execute("INSERT INTO ids_new VALUES (?, 1)", (task_id,))
        db.commit()
    daemon = Daemon(home)
    try:
        assert daemon.run("a2a", "send", "--to", "bob@host", "--id", task_id, "again").code == 0
        assert daemon.json("a2a", "status")["kind"] == "a2a_status"
        status, body = get(daemon, "/readyz")
        assert (status, json.loads(body)["status"]) == (200, "degraded")
        assert "set aside 1 record(s)" in body
        assert "covenant_archive_set_aside_records 1.0" in get(daemon, "/metrics")[1]
    finally:
        assert daemon.stop() == 0
    ran = doctor(home)
    assert ran.code == 1
    assert "UNIQUE constraint failed" in ran.out
    mended = doctor(home, "--rebuild-archive", "--json")
    assert mended.code == 0
    assert task_id in Path(mended.json["set_aside"]).read_text()
    assert doctor(home).code == 0
    daemon = Daemon(home)
    try:
        assert json.loads(get(daemon, "/readyz")[1]) == {"status": "ready", "reasons": []}
        assert daemon.json("a2a", "show", task_id)["task"]["intent_text"] == "again"
    finally:
        assert daemon.stop() == 0


@pytest.mark.parametrize("spoil", first_of(ARCHIVE_SPOILS, 2))
def test_an_archive_that_lacks_a_part_is_made_again(home: Path, spoil: Callable[[Path], None]) -> None:
    spoil(home)
    ran = doctor(home, "--accept-loss", "--yes")
    assert ran.code == 0, ran
    assert "the archive (" in ran.err
    assert doctor(home).code == 0
    daemon = Daemon(home)
    try:
        assert len(daemon.json("a2a", "status")["tasks"]) == 3
        assert json.loads(get(daemon, "/readyz")[1]) == {"status": "ready", "reasons": []}
    finally:
        assert daemon.stop() == 0


def _replace_by(make: Callable[[Path], None], name: str) -> Callable[[Path], None]:
    def spoil(home: Path) -> None:
        path = segment(home) if name == "segment" else home / name
        path.unlink(missing_ok=True)
        make(path)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(_replace_by(os.mkfifo, "archive.db"), id="archive, a pipe"),
        pytest.param(_replace_by(os.mkfifo, "segment"), id="segment, a pipe"),
        pytest.param(_replace_by(lambda path: path.symlink_to("nowhere"), "archive.db"), id="archive, a dangling link"),
        pytest.param(_replace_by(lambda path: path.symlink_to(path), "archive.db"), id="archive, a loop"),
        pytest.param(_replace_by(Path.mkdir, "archive.db-wal"), id="write-ahead log, a folder"),
        pytest.param(_replace_by(Path.mkdir, "segment"), id="segment, a folder"),
    ],
)
def test_what_is_no_file_is_named_and_not_waited_for(home: Path, spoil: Callable[[Path], None]) -> None:
    spoil(home)
    ran = doctor(home)
    assert ran.code == 1
    assert "is not a file" in ran.out


def test_a_key_of_another_home_is_found_before_a_start_finds_it(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    assert daemon.stop() == 0
    key = daemon.home / "identity" / "local.key"
    key.write_text("ab" * 32 + "\n")
    ran = doctor(daemon.home)
    assert (ran.code, "is not the key this home was made with" in ran.out) == (1, True), ran


def test_an_archive_that_was_made_and_never_written_is_no_fault(home: Path) -> None:
    for path in home.glob("archive.db*"):
        path.unlink()
    (home / "archive.db").touch(0o600)
    assert doctor(home).code == 0


@pytest.mark.parametrize("flipped", [False, True])
def test_an_archive_with_a_wrong_index_is_made_again(home: Path, *, flipped: bool) -> None:
    overwrite_index(home)
    if flipped:
        damage(home, line_of(home, b"task 1"))
    assert doctor(home).code == 1
    ran = doctor(home, "--accept-loss", "--yes")
    assert ran.code == 0, ran
    assert "the archive (" in ran.err
    assert doctor(home).code == 0
    daemon = Daemon(home)
    try:
        assert len(daemon.json("a2a", "status")["tasks"]) == (2 if flipped else 3)
        assert json.loads(get(daemon, "/readyz")[1]) == {"status": "ready", "reasons": []}
    finally:
        assert daemon.stop() == 0


def test_an_archive_that_cannot_be_mended_is_said_so_with_a_way_out(home: Path) -> None:
    """It takes nothing, for a reason that no check looks for."""
    set_record_aside(home)
    with closing(sqlite3.connect(home / "archive.db")) as db:
        db.execute("CREATE TRIGGER refuse BEFORE INSERT ON meta BEGIN SELECT raise(ABORT, 'taken over'); END")
    ran = doctor(home, "--rebuild-archive")
    assert (ran.code, "Traceback" in ran.err) == (1, False)
    assert "taken over; move archive.db" in ran.err
    for path in home.glob("archive.db*"):
        path.unlink()
    assert doctor(home, "--accept-loss", "--yes").code == 0
    assert doctor(home).code == 0


def test_a_torn_tail_is_no_fault(home: Path) -> None:
    with segment(home).open("ab") as file:
        file.write(b'{"seq":99,"ts_ms"')
    before = files(home)
    ran = doctor(home)
    assert ran.code == 0
    assert "never acknowledged" in ran.out
    assert files(home) == before


def test_damage_is_named_with_file_and_line_and_nothing_is_changed(home: Path) -> None:
    number = line_of(home, b"task 1")
    damage(home, number)
    before = files(home)
    ran = doctor(home)
    assert ran.code == 1
    assert f"{segment(home)}, line {number + 1}: the checksum does not match" in ran.out
    assert "--accept-loss" in ran.out
    assert files(home) == before


def test_a_loss_is_accepted_only_after_a_yes(home: Path) -> None:
    damage(home, line_of(home, b"task 1"))
    before = files(home)
    ran = doctor(home, "--accept-loss", stdin="n\n")
    assert ran.code == 1
    assert "nothing was changed" in ran.err
    assert files(home) == before


def test_accepting_the_loss_keeps_everything_but_the_unreadable_record(home: Path) -> None:
    number = line_of(home, b"task 1")
    seq = decode_line(lines(home)[number]).seq
    damage(home, number)
    damaged, name = segment(home).read_bytes(), segment(home).name
    ran = doctor(home, "--accept-loss", stdin="y\n")
    assert ran.code == 0, ran
    assert f"record {seq} ({name}, line {number + 1}): the checksum does not match" in ran.err
    aside = next(home.glob("journal.damaged-*"))
    assert str(aside) in ran.err
    assert (aside / name).read_bytes() == damaged
    assert doctor(home).code == 0
    daemon = Daemon(home)
    try:
        # Bob's lease of task 0 and task 2, which came after the lost record, are still there.
        tasks = daemon.json("a2a", "next", "--all")
        assert tasks["task"]["intent_text"] == "task 2"
        in_flight = daemon.json("a2a", "status", "--state", "in_flight")["tasks"]
        assert {entry["task"]["intent_text"] for entry in in_flight} == {"task 0", "task 2"}
    finally:
        assert daemon.stop() == 0


def test_what_depends_on_a_lost_record_is_lost_with_it_and_listed(home: Path) -> None:
    number = line_of(home, b"task 0")
    damage(home, number)
    told = doctor(home, "--json").json
    unreadable, leased = told["losses"]
    assert unreadable["said"] == []
    assert leased["said"][0].startswith("task leased ")
    assert "makes no sense without what is lost" in leased["reason"]
    mended = doctor(home, "--accept-loss", "--yes", "--json")
    assert mended.code == 0
    assert mended.json["set_aside"] is not None
    daemon = Daemon(home)
    try:
        assert daemon.json("a2a", "next", "--all")["task"]["intent_text"] == "task 1"
    finally:
        assert daemon.stop() == 0


def test_a_journal_whose_end_was_cut_off_is_mended(home: Path) -> None:
    segment(home).write_bytes(b"".join(lines(home)[:-2]))
    ran = doctor(home)
    assert ran.code == 1
    assert "the archive holds records up to" in ran.out
    assert doctor(home, "--accept-loss", "--yes").code == 0
    daemon = Daemon(home)
    assert daemon.json("a2a", "status")["kind"] == "a2a_status"
    assert daemon.stop() == 0


def test_a_task_that_was_given_up_can_be_sent_again_and_everything_goes_on(home: Path) -> None:
    number = line_of(home, b"task 1")
    (task_id,) = (event["task_id"] for event in json.loads(lines(home)[number])["events"] if "task" in event)
    damage(home, number)
    assert doctor(home, "--accept-loss", "--yes").code == 0
    daemon = Daemon(home)
    try:
        again = ("a2a", "send", "--to", "bob@host", "--id", task_id, "task 1")
        assert not daemon.json(*again).get("duplicate")
        assert daemon.json(*again)["duplicate"]
        assert daemon.json("a2a", "show", task_id)["state"] == "queued"
        daemon.json("capabilities", "grant", "a2a.compact")
        daemon.json("a2a", "compact")
        assert json.loads(get(daemon, "/readyz")[1]) == {"status": "ready", "reasons": []}
    finally:
        assert daemon.stop() == 0
    daemon = Daemon(home)
    try:
        assert daemon.json("a2a", "show", task_id)["state"] == "queued"
        assert len(daemon.json("a2a", "status")["tasks"]) == 3
    finally:
        assert daemon.stop() == 0
    assert doctor(home).code == 0


def test_a_segment_that_is_gone_is_mended_from_what_the_archive_covers(home: Path) -> None:
    segment(home).unlink()
    ran = doctor(home)
    assert ran.code == 1
    assert "missing" in ran.out
    assert doctor(home, "--accept-loss", "--yes").code == 0
    assert doctor(home).code == 0


@pytest.mark.parametrize("packed", [True, False])
def test_files_of_finished_tasks_that_are_missing_and_files_of_no_task_are_told(
    short_path: Path, *, packed: bool
) -> None:
    daemon = Daemon(short_path / "home")
    said = "x" * (10 if packed else 300_000)
    yes = json.dumps({"type": "assistant", "text": "yes"})
    daemon.json("agents", "add", "cat", "--command", f"printf '%s\\n' '{yes}'")
    data = os.urandom(300_000)
    (short_path / "orphan").write_bytes(os.urandom(1000))
    orphan = daemon.json("files", "put", str(short_path / "orphan"))["sha256"]
    parts = [{"raw": base64.b64encode(data).decode()}, {"text": said}]
    message = {"messageId": "m", "role": "ROLE_USER", "parts": parts}
    body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
    token = (daemon.home / "operator.token").read_text().strip()
    asked = urllib.request.Request(
        f"{daemon.url}/v1/a2a/agents/cat",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json", "A2A-Version": "1.0"},
    )
    with urllib.request.urlopen(asked, timeout=BOUND_S) as answer:
        task = json.load(answer)["result"]["task"]
    assert task["status"]["state"] == "TASK_STATE_COMPLETED"
    assert daemon.stop() == 0
    well = doctor(daemon.home)
    assert well.code == 0, well.out
    assert "no task refers to 1 of them" in well.out
    sha256 = hashlib.sha256(data).hexdigest()
    (place,) = (daemon.home / "blobs").glob(f"*/*/{sha256}")
    shutil.rmtree(place)
    ill = doctor(daemon.home)
    assert ill.code == 1
    assert f"1 file(s) of finished tasks are missing: {sha256} of {task['id']}" in ill.out
    assert orphan not in ill.out


def test_mcp_servers_that_can_be_used_are_told_as_that(home: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/mcp"
        auth = {"token_env": "MCP_TOKEN"}
        write_servers(home, {"near": {"command": "sh"}, "far": {"url": url, "auth": auth}})
        told = doctor(home)
        refused = covenant("doctor", "--home", str(home), env={"MCP_TOKEN": "wrong"})
        server.shutdown()
    assert told.code == 0, told
    assert "the MCP server far answers" in told.out
    assert "the MCP server far has no token here: MCP_TOKEN" in told.out
    assert refused.code != 0
    assert "refuses the daemon's credentials (HTTP 401)" in refused.out
    assert "wrong" not in refused.out.replace("what is wrong", "")


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(401 if "authorization" in self.headers else 405)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass
