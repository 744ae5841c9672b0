"""`covenant doctor`: what it finds, that it changes nothing, and how a damaged journal is mended."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from covenant.ledger.log.record import decode_line
from covenant.ledger.log.segments import list_segments
from tests.cli.daemons import Daemon, Ran, covenant
from tests.places import short_folder


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


@pytest.mark.parametrize(
    ("spoil", "way_out"),
    [
        (open_token, "chmod 600"),
        (open_home, "chmod 700"),
        (lose_key, "backup"),
        (spoil_settings, "did you mean http.port?"),
        (spoil_archive, "backup"),
    ],
)
def test_what_is_wrong_is_said_with_its_way_out(home: Path, spoil: Callable[[Path], None], way_out: str) -> None:
    spoil(home)
    before = files(home)
    ran = doctor(home)
    assert ran.code == 1, ran
    wrong = ran.out[ran.out.index("WRONG") :]
    assert way_out in wrong
    assert files(home) == before


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


def test_a_segment_that_is_gone_is_mended_from_what_the_archive_covers(home: Path) -> None:
    segment(home).unlink()
    ran = doctor(home)
    assert ran.code == 1
    assert "missing" in ran.out
    assert doctor(home, "--accept-loss", "--yes").code == 0
    assert doctor(home).code == 0
