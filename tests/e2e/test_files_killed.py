"""Files in a daemon of its own process: killed in the middle, and watched for the memory that it takes."""

import base64
import hashlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from covenant.ledger.embedded.blob_folder import INCOMING
from tests.cli.daemons import Daemon
from tests.waits import BOUND_S, until

MIB = 1 << 20
AGENT = """
from covenant import Agent, Turn
agent = Agent("same")

@agent
async def same(turn: Turn):
    for part in turn.parts:
        yield await turn.save_file("same.bin", turn.open_file(part))
"""


def sizes(mib: int) -> pytest.MarkDecorator:
    """So many MiB each time; a whole GiB in `make test-all`."""
    return pytest.mark.parametrize("mib", [mib, pytest.param(1_024, marks=pytest.mark.slow)])


def started(folder: Path) -> Daemon:
    agent = folder / "same.py"
    agent.write_text(AGENT)
    return Daemon(folder / "home", str(agent))


def client_of(daemon: Daemon) -> httpx2.Client:
    token = (daemon.home / "operator.token").read_text().strip()
    headers = {"authorization": f"Bearer {token}"}
    return httpx2.Client(base_url=daemon.url, headers=headers, timeout=BOUND_S)


def send(client: httpx2.Client, *parts: dict[str, Any]) -> dict[str, Any]:
    message = {"messageId": "m", "role": "ROLE_USER", "parts": list(parts)}
    body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
    task: dict[str, Any] = client.post("/v1/a2a/agents/same", json=body).json()["result"]["task"]
    return task


def url_of(part: dict[str, Any]) -> str:
    split = urlsplit(part["url"])
    return f"{split.path}?{split.query}"


@sizes(8)
def test_a_kill_in_the_middle_of_an_upload_leaves_nothing_behind(tmp_path: Path, mib: int) -> None:
    daemon = started(tmp_path)
    blobs = daemon.home / "blobs"
    token = (daemon.home / "operator.token").read_text().strip()
    where = urlsplit(daemon.url)
    with socket.create_connection((where.hostname, where.port)) as half:
        head = f"POST /v1/files HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: Bearer {token}\r\n"
        half.sendall(f"{head}Content-Length: {mib * MIB}\r\n\r\n".encode())
        for _ in range(mib // 2):
            half.sendall(b"x" * MIB)
        until(lambda: sum(path.stat().st_size for path in (blobs / INCOMING).rglob("bytes")) >= (mib // 2 - 1) * MIB)
        daemon.stop(signal.SIGKILL)
    again = started(tmp_path)
    try:
        assert [path for path in blobs.rglob("*") if path.is_file()] == []
        with client_of(again) as client:
            whole = (b"x" * MIB for _ in range(mib))
            assert client.post("/v1/files", content=whole).json()["size"] == mib * MIB
            assert client.get("/v1/files").json()["count"] == 1
    finally:
        again.stop()


def test_a_file_of_an_acknowledged_task_outlives_a_kill(tmp_path: Path) -> None:
    data = os.urandom(700_000)
    daemon = started(tmp_path)
    with client_of(daemon) as client:
        task = send(client, {"raw": base64.b64encode(data[:600_000]).decode(), "filename": "raw.bin"})
        stored = client.post("/v1/files", content=data).json()
        other = send(client, {"url": stored["url"], "filename": "linked.bin"})
        daemon.stop(signal.SIGKILL)
    again = started(tmp_path)
    try:
        with client_of(again) as client:
            for task_id, expected in ((task["id"], data[:600_000]), (other["id"], data)):
                body = {"jsonrpc": "2.0", "id": 1, "method": "GetTask", "params": {"id": task_id}}
                told = client.post("/v1/a2a/agents/same", json=body).json()["result"]
                (came,) = told["history"][0]["parts"]
                (made,) = [part for each in told["artifacts"] for part in each["parts"] if "url" in part]
                assert client.get(url_of(came)).content == client.get(url_of(made)).content == expected
    finally:
        again.stop()
    checkup = again.run("doctor", "--json")
    findings = [each["what"] for each in json.loads(checkup.out)["findings"]]
    assert any("2 files of tasks have" in each for each in findings), findings
    next((daemon.home / "blobs").rglob("bytes")).write_bytes(b"other")
    checkup = again.run("doctor", "--json")
    broken = [each for each in json.loads(checkup.out)["findings"] if "wrong_hash" in each["what"]]
    assert len(broken) == 1, checkup


@sizes(192)
def test_files_go_in_through_an_agent_and_out_with_flat_memory(tmp_path: Path, mib: int) -> None:
    """A file that is uploaded, read and saved again by an agent, and downloaded: in less than 64 MiB more."""
    daemon = started(tmp_path)
    size, piece = mib * MIB, os.urandom(MIB)

    def pieces() -> Iterator[bytes]:
        for number in range(mib):
            yield number.to_bytes(8) + piece[8:]

    expected = hashlib.sha256()
    for each in pieces():
        expected.update(each)
    try:
        with client_of(daemon) as client:
            send(client, {"raw": base64.b64encode(piece[:300_000]).decode()})  # everything is imported by now
            before = peak_of(daemon)
            stored = client.post("/v1/files", content=pieces()).json()
            assert (stored["size"], stored["sha256"]) == (size, expected.hexdigest())
            task = send(client, {"url": stored["url"]})
            (made,) = [part for each in task["artifacts"] for part in each["parts"]]
            found = hashlib.sha256()
            with client.stream("GET", url_of(made)) as answer:
                for each in answer.iter_bytes():
                    found.update(each)
            assert found.digest() == expected.digest()
            assert peak_of(daemon) - before < 64 * MIB
    finally:
        daemon.stop()


def peak_of(daemon: Daemon) -> int:
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
