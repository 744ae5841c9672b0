"""A daemon on a disk that is full: what it still tells, what the next start says, and that room is all it needs."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.daemons import Daemon, covenant
from tests.hostile.client import operator_token, request

pytestmark = pytest.mark.root

DISK_BYTES = 24 << 20


@pytest.fixture
def small_disk(short_path: Path) -> Iterator[Path]:
    place = short_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(place: Path) -> Path:
    """Take all that is left."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 65_536)
        except OSError:
            return filler


def test_a_full_disk_refuses_writes_tells_what_is_live_and_names_the_way_out(small_disk: Path) -> None:
    daemon = Daemon(small_disk / "home")
    home, token = daemon.home, operator_token(daemon.home)

    def ask(path: str) -> tuple[int, bytes]:
        answer = request(daemon.url, "GET", path, token=token)
        return answer.status, answer.body

    try:
        daemon.json("identities", "enroll", "bob@host")
        daemon.json("capabilities", "grant", "a2a.send.bob@host")
        sent = [daemon.json("a2a", "send", "--to", "bob@host", f"task {number}")["task_id"] for number in range(5)]
        leased = daemon.json("a2a", "next", "--all")["task"]["id"]
        filler = fill(small_disk)
        while (refused := daemon.run("a2a", "send", "--to", "bob@host", "x" * 100_000, "--json")).code == 0:
            sent.append(refused.json["task_id"])
            assert len(sent) < 1_000
        assert refused.json["code"] in ("outcome_unknown", "storage_failed")
        for path in ("/a2a/queue?limit=1000", f"/a2a/tasks/{leased}/show", f"/a2a/tasks/{sent[-1]}/show"):
            assert ask(path)[0] == 200, (path, ask(path))
        listed = [entry["task"]["id"] for entry in json.loads(ask("/a2a/queue?limit=1000")[1])["tasks"]]
        assert set(listed) == set(sent)
        assert ask("/readyz")[0] == 503
    finally:
        daemon.stop()
    fill(small_disk)
    found = covenant("doctor", "--home", str(home))
    assert found.code == 1
    assert "make room" in found.out
    again = covenant("serve", "--home", str(home), "--http-port", "0")
    assert again.code == 1
    assert str(home) in again.err
    assert "MiB are free there" in again.err
    assert "make room" in again.err
    filler.unlink()
    daemon = Daemon(home)
    try:
        kept = {entry["task"]["id"] for entry in daemon.json("a2a", "status", "--limit", "1000")["tasks"]}
        assert kept >= set(sent), "what was acknowledged is there"
    finally:
        assert daemon.stop() == 0
