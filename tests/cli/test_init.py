"""`covenant init`: the files it writes are what they say, serve at once, and never replace another."""

import re
import tomllib
from pathlib import Path

from covenant.daemon.settings_loader import entries
from tests.cli.daemons import Daemon, covenant


def test_what_it_writes_serves_and_answers(short_path: Path) -> None:
    home, agents = short_path / "home", short_path / "agents.py"
    ran = covenant("--home", str(home), "init", str(agents))
    assert ran.code == 0, ran.err
    assert ran.out.count("wrote ") == 2
    serve, call = re.findall(r"covenant (.*)$", ran.err, re.MULTILINE)
    assert serve == f"--home {home} serve {agents}"
    assert home.stat().st_mode & 0o077 == 0
    daemon = Daemon(home, str(agents))
    try:
        said = covenant(*call.split())
        assert (said.code, said.out) == (0, "Hello, world!\n"), said.err
    finally:
        assert daemon.stop() == 0


def test_the_settings_are_the_defaults_once_the_comments_are_removed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert covenant("init", str(tmp_path / "agents.py"), "--home", str(home)).code == 0
    text = (home / "settings.toml").read_text()
    assert tomllib.loads(text) == {}
    bare = re.sub(r"^# (\[\w+\]|\w+ = )", r"\1", text, flags=re.MULTILINE)
    given = tomllib.loads(bare)
    assert {f"{section}.{key}" for section, keys in given.items() for key in keys} == {each.name for each in entries()}
    (home / "settings.toml").write_text(bare)
    rows = covenant("settings", "show", "--json", "--home", str(home)).json["settings"]
    named = {entry.name: entry.default for entry in entries()}
    for row in rows:
        if row["name"] in named:
            default = named[row["name"]]
            assert row["value"] == (list(default) if isinstance(default, tuple) else default)
            assert row["source"] == "file"


def test_a_file_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    home, agents = tmp_path / "home", tmp_path / "mine.py"
    agents.write_text("mine = 1\n")
    ran = covenant("init", str(agents), "--home", str(home), "--json").json
    assert [(Path(each["path"]).name, each["new"]) for each in ran["files"]] == [
        ("settings.toml", True),
        ("mine.py", False),
    ]
    assert agents.read_text() == "mine = 1\n"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    ran = covenant("init", str(tmp_path / "none" / "agents.py"), "--home", str(tmp_path / "home"))
    assert ran.code == 1
    assert str(tmp_path / "none" / "agents.py") in ran.err
