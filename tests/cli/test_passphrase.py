"""`covenant passphrase`: the keys stay what they are, and nobody learns the words by it."""

import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from covenant.cli.homes import passphrase
from covenant.cli.terminal import json_shape
from covenant.daemon.home import KEY_NAME, make_home
from covenant.daemon.keystore import PREKEYS_NAME, Keystore
from covenant.ledger.embedded.journal.recovery import lock_home
from covenant.seal.identity import PrivatePrekey, new_prekey
from covenant.seal.keys import COST_MIN, is_locked, new_private_key
from tests.cli.daemons import COVENANT, Ran, covenant, environment
from tests.waits import BOUND_S

OLD: Final = "correct horse ✓"
NEW: Final = "battery staple ✓"
NOW: Final = 1_800_000_000_000
ON_A_TERMINAL: Final = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
"""Its standard input is from then on the terminal that it belongs to: a passphrase is asked for there."""


class Home:
    """With a key and a prekey, locked or not. To unlock what the command has locked takes a while."""

    def __init__(self, folder: Path, passphrase: str | None) -> None:
        make_home(folder)
        self.folder = folder
        store = Keystore(folder, passphrase, cost=COST_MIN)
        self.key = store.make_key(new_private_key)
        self.prekeys = (new_prekey(self.key, NOW),)
        store.save_prekeys(self.prekeys)

    @property
    def files(self) -> list[bytes]:
        return [(self.folder / name).read_bytes() for name in (KEY_NAME, PREKEYS_NAME)]

    @property
    def names(self) -> set[str]:
        return {path.name for path in (self.folder / "identity").iterdir()}

    def opened(self, passphrase: str | None) -> tuple[bytes | None, tuple[PrivatePrekey, ...]]:
        store = Keystore(self.folder, passphrase)
        return store.read_key(), tuple(store.read_prekeys())

    def run(self, *words: str, env: dict[str, str] | None = None) -> Ran:
        ran = covenant("passphrase", "--home", str(self.folder), *words, env=env)
        assert OLD not in ran.out + ran.err
        assert NEW not in ran.out + ran.err
        return ran


@pytest.fixture
def new_file(tmp_path: Path) -> Path:
    path = tmp_path / "new"
    path.write_text(f"{NEW}\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(("before", "change"), [(None, "set"), (OLD, "changed")])
def test_keys_are_locked_with_what_a_file_says(tmp_path: Path, new_file: Path, before: str | None, change: str) -> None:
    home = Home(tmp_path / "home", before)
    ran = home.run("--new-file", str(new_file), "--json", env={"COVENANT_PASSPHRASE": before} if before else None)
    assert ran.code == 0, ran
    assert ran.json == {"kind": "passphrase", "home": str(home.folder), "change": change, "prekeys_kept": True}
    assert passphrase.epilog == json_shape("passphrase", *list(ran.json)[1:])
    assert all(is_locked(each) for each in home.files)
    assert home.opened(NEW) == (home.key, home.prekeys)
    assert home.names == {"local.key", "prekeys.json"}


def test_a_passphrase_is_removed_and_people_are_told_what_would_bring_it_back(tmp_path: Path) -> None:
    home = Home(tmp_path / "home", OLD)
    old_file = tmp_path / "old"
    old_file.write_text(OLD)
    old_file.chmod(0o600)
    ran = home.run("--remove", env={"COVENANT_PASSPHRASE_FILE": str(old_file)})
    assert (ran.code, ran.out) == (0, ""), ran
    assert "unset COVENANT_PASSPHRASE and COVENANT_PASSPHRASE_FILE" in ran.err
    assert home.opened(None) == (home.key, home.prekeys)
    again = home.run("--remove", "--json")
    assert (again.code, again.json["code"]) == (1, "not_locked")


def test_without_the_right_one_nothing_changes(tmp_path: Path, new_file: Path) -> None:
    home = Home(tmp_path / "home", OLD)
    before = home.files
    wrong = home.run("--new-file", str(new_file), "--json", env={"COVENANT_PASSPHRASE": "wrong"})
    assert (wrong.code, wrong.json["code"]) == (1, "wrong_passphrase")
    assert "the passphrase is wrong" in wrong.err
    unsaid = home.run("--new-file", str(new_file), "--json")
    assert (unsaid.code, unsaid.json["code"]) == (1, "no_terminal")
    assert "COVENANT_PASSPHRASE_FILE" in unsaid.err
    assert home.files == before


def test_a_new_one_that_others_could_read_or_that_is_none_is_refused(tmp_path: Path, new_file: Path) -> None:
    home = Home(tmp_path / "home", None)
    before = home.files
    new_file.chmod(0o644)
    assert "chmod 600" in home.run("--new-file", str(new_file)).err
    new_file.write_text("\n")
    new_file.chmod(0o600)
    empty = home.run("--new-file", str(new_file))
    assert (empty.code, "is empty" in empty.err) == (1, True)
    assert home.run("--new-file", str(new_file), "--remove").code == 2
    assert (home.files, home.run("--json").json["code"]) == (before, "no_terminal")


def test_it_keeps_out_of_a_home_that_is_open_or_has_no_key(tmp_path: Path, new_file: Path) -> None:
    home = Home(tmp_path / "home", None)
    before = home.files
    with lock_home(home.folder):
        ran = home.run("--new-file", str(new_file), "--json")
    assert (ran.code, ran.json["code"], home.files) == (1, "daemon_runs", before)
    assert f"is already open in process {os.getpid()}; stop it first" in ran.err
    nowhere = covenant("passphrase", "--home", str(tmp_path / "nowhere"), "--json")
    assert (nowhere.code, nowhere.json["code"]) == (1, "no_key")
    assert not (tmp_path / "nowhere").exists()


def test_on_a_terminal_it_asks_for_both_and_shows_neither(tmp_path: Path) -> None:
    home = Home(tmp_path / "home", OLD)
    ours, theirs = pty.openpty()
    words = [sys.executable, "-c", ON_A_TERMINAL, str(COVENANT), "passphrase", "--home", str(home.folder)]
    process = subprocess.Popen(words, env=environment(), stdin=theirs)
    try:
        os.close(theirs)
        shown = ""
        for prompt, answer in (("Passphrase:", OLD), ("New passphrase:", NEW), ("Repeat for confirmation:", NEW)):
            # The space comes once nothing is echoed any more.
            shown += read_until(ours, f"{prompt} ")
            os.write(ours, f"{answer}\n".encode())
        shown += read_until(ours, "names\r\n")
        assert process.wait(BOUND_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert (OLD in shown, NEW in shown) == (False, False)
    assert "locked with the new passphrase" in shown
    assert home.opened(NEW) == (home.key, home.prekeys)


def read_until(terminal: int, end: str) -> str:
    shown = b""
    while end.encode() not in shown:
        assert select.select([terminal], [], [], BOUND_S)[0], shown
        shown += os.read(terminal, 4_096)
    return shown.decode()


def test_doctor_names_the_variable_whose_file_is_missing_once(tmp_path: Path) -> None:
    home = Home(tmp_path / "home", OLD)
    env = {"COVENANT_PASSPHRASE_FILE": str(tmp_path / "nowhere")}
    found = covenant("--home", str(home.folder), "doctor", env=env).out
    assert found.count("WRONG") == 1
    assert "WRONG  COVENANT_PASSPHRASE_FILE: there is no file" in found
    assert "→ name the file that has the passphrase" in found
