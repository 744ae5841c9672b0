"""What "Backup and restore" of the operating guide says to type is typed here, as it stands."""

import os
import re
import subprocess
from pathlib import Path

from covenant.ledger.embedded.journal.shipped_segments import read_status
from tests.cli.daemons import COVENANT, Daemon, environment
from tests.waits import BOUND_S, until

GUIDE = (Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
SECTION = GUIDE.partition("\n## Backup and restore\n")[2].partition("\n## ")[0]
MOUNTED = "/mnt/segments"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)


def typed(text: str, folder: Path, home: Path) -> str:
    env = environment(COVENANT_HOME=str(home))
    env["PATH"] = f"{COVENANT.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-e", "-c", text], cwd=folder, env=env, capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_backup_guide_does_what_it_says(short_path: Path) -> None:
    home, segments = short_path / "home", short_path / "segments"
    home.mkdir(mode=0o700)
    (setting,) = blocks("toml")
    assert MOUNTED in setting
    (home / "settings.toml").write_text(setting.replace(MOUNTED, str(segments)) + "seal_ms = 1000\n")
    first, later = (text.replace(MOUNTED, str(segments)) for text in blocks("sh"))
    moment = re.search(r"--until (\S+)", later)
    assert moment is not None
    daemon = Daemon(home)
    try:
        assert "restored restored at position" not in typed(first, short_path, home)
        assert (short_path / "restored" / "journal").is_dir()
        daemon.json("agents", "add", "helper", "--kind", "worker")
        position = daemon.json("backup", str(short_path / "after"))["position"]
        until(lambda: read_status(home).shipped_seq >= position)
        status = daemon.json("a2a", "status")
    finally:
        assert daemon.stop() == 0
    assert "warnings" not in status
    said = typed(later.replace(moment[1], "2999-01-01T00:00:00Z"), short_path, home)
    assert len(said.splitlines()) == 2
    for name in ("restored", "later", "earlier"):
        again = Daemon(short_path / name)
        assert ("helper" in str(again.json("agents", "list"))) is (name != "restored")
        again.stop()
