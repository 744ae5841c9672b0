"""`covenant files` against a real daemon: in, out, whole or not at all."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from tests.cli.daemons import Daemon, covenant
from tests.places import short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as found:
        yield found


def stored(daemon: Daemon, folder: Path, data: bytes, *more: str) -> dict[str, object]:
    file = folder / str(uuid4())
    file.write_bytes(data)
    return daemon.json("files", "put", str(file), *more)


def test_a_file_is_put_listed_by_its_hash_and_got_again(daemon: Daemon, folder: Path) -> None:
    data = os.urandom(3_000_000)
    sha256 = hashlib.sha256(data).hexdigest()
    file = folder / "film.mp4"
    file.write_bytes(data)
    ran = daemon.run("files", "put", str(file))
    assert (ran.code, ran.out.count("\n")) == (0, 1)
    assert f"stored 2.9 MiB, SHA-256 {sha256}" in ran.err
    assert sha256 in urlsplit(ran.out.strip()).path

    listed = {each["sha256"]: each for each in daemon.json("files", "list", "--limit", "200")["files"]}
    assert (listed[sha256]["size"], listed[sha256]["references"]) == (len(data), 0)
    assert sha256 in daemon.run("files", "list", "--limit", "200").out

    target = folder / "copy.mp4"
    ran = daemon.run("files", "get", sha256[:20], str(target))
    assert (ran.code, ran.out) == (0, f"wrote 2.9 MiB to {target}\n")
    assert target.read_bytes() == data
    assert sorted(path.name for path in folder.iterdir()) == ["copy.mp4", "film.mp4"]


def test_a_file_passes_by_standard_input_and_output(daemon: Daemon, folder: Path) -> None:
    text = f"{uuid4()}\n" * 20_000
    put = covenant("--home", str(daemon.home), "files", "put", "-", "--json", stdin=text)
    got = covenant("--home", str(daemon.home), "files", "get", put.json["sha256"], cwd=folder)
    assert (got.code, got.out) == (0, text)


def test_pages_of_files_go_on_behind_the_last_hash(daemon: Daemon, folder: Path) -> None:
    mine = {str(stored(daemon, folder, os.urandom(10))["sha256"]) for _ in range(3)}
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = daemon.json("files", "list", "--limit", "2", "--after", after)
        found += [each["sha256"] for each in page["files"]]
        after = page["next"]
    assert mine <= set(found)
    assert found == sorted(set(found))


def test_what_cannot_be_done_is_refused_with_what_helps(daemon: Daemon, folder: Path) -> None:
    sha256 = str(stored(daemon, folder, b"small")["sha256"])
    there = folder / "there"
    there.write_text("mine")
    told = daemon.run("files", "get", sha256, str(there))
    assert (told.code, there.read_text()) == (1, "mine")
    assert "give --replace" in told.err
    assert daemon.run("files", "get", sha256, str(there), "--replace").code == 0
    assert there.read_text() == "small"
    for words, code, helps in (
        (("get", "0" * 64, str(folder / "x")), "unknown_file", "covenant files list"),
        (("get", "nothing", str(folder / "x")), "invalid_hash", "0-9"),
        (("get", sha256, str(folder / "no" / "x")), "cannot_write", "No such file"),
        (("list", "--tenant", "nobody"), "unknown_tenant", "nobody"),
        (("get", sha256, str(folder / "x"), "--tenant", "nobody"), "unknown_tenant", "nobody"),
    ):
        ran = daemon.run("files", *words, "--json")
        assert (ran.code, ran.json["code"]) == (1, code), words
        assert helps in ran.json["message"], words
    assert daemon.run("files", "put", str(folder / "none")).code == 2
    assert daemon.run("files", "get", sha256, "--json").code == 2
    assert not (folder / "x").exists()


def test_a_file_of_an_identity_is_its_own(daemon: Daemon, folder: Path) -> None:
    token = folder / "token"
    token.write_text(daemon.json("identities", "enroll", f"a-{uuid4().hex[:8]}@host")["token_b58"])
    as_it = ("--token-file", str(token))
    sha256 = str(stored(daemon, folder, os.urandom(100), *as_it)["sha256"])
    assert [each["sha256"] for each in daemon.json("files", "list", *as_it)["files"]] == [sha256]
    assert daemon.json("files", "get", sha256, str(folder / "own"), *as_it)["size"] == 100
    assert daemon.run("files", "get", sha256, str(folder / "other"), "--json").json["code"] == "unknown_file"
    refused = daemon.run("files", "list", "--tenant", "default", "--json", *as_it)
    assert refused.json["code"] == "operator_required"


def test_a_file_above_the_limit_is_refused_with_the_setting_that_allows_it(folder: Path) -> None:
    file = folder / "large"
    file.write_bytes(bytes(40_000_000))
    daemon = Daemon(folder / "home", env={"COVENANT_BLOBS_FILE_BYTES_MAX": "100000"})
    try:
        ran = daemon.run("files", "put", str(file), "--json")
        assert (ran.code, ran.json["code"]) == (1, "file_too_large")
        assert "blobs.file_bytes_max" in ran.json["message"]
        assert daemon.json("files", "list")["count"] == 0
    finally:
        daemon.stop()


@pytest.mark.parametrize(("size", "code"), [(500, "file_damaged"), (700_000, "wrong_hash")])
def test_bytes_that_are_not_those_that_were_stored_are_never_a_file(
    daemon: Daemon, folder: Path, size: int, code: str
) -> None:
    sha256 = str(stored(daemon, folder, os.urandom(size))["sha256"])
    (kept,) = (daemon.home / "blobs").glob(f"*/{sha256[:2]}/{sha256}/bytes")
    kept.write_bytes(os.urandom(size))
    ran = daemon.run("files", "get", sha256, str(folder / "x"), "--json")
    assert (ran.code, ran.json["code"]) == (1, code)
    assert not any(each.name.startswith((".x", "x")) for each in folder.iterdir())
    kept.unlink()
    assert daemon.run("files", "get", sha256, str(folder / "x"), "--json").code == 1
    assert not (folder / "x").exists()
