"""Sends one large file through a daemon, in and out, and prints how long it took and how much memory the daemon had.

    python scripts/measure_files.py              # 1 GiB
    python scripts/measure_files.py --mib 256

The daemon is started in a folder that is removed again. An agent reads the upload and saves it as an artifact, which is
downloaded. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

MIB = 1 << 20
AGENT = """
from covenant import Agent, Turn
agent = Agent("same", timeout_ms=3_600_000)

@agent
async def same(turn: Turn):
    for part in turn.parts:
        yield await turn.save_file("same.bin", turn.open_file(part))
"""


def pieces(mib: int) -> Iterator[bytes]:
    body = os.urandom(MIB)
    for number in range(mib):
        yield number.to_bytes(8, "big") + body[8:]


def resident_mib(pid: int, name: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return round(int(status.partition(f"{name}:")[2].split()[0]) / 1024, 1)


def measure(folder: Path, mib: int) -> dict[str, object]:
    (folder / "same.py").write_text(AGENT, encoding="utf-8")
    covenant = str(Path(sys.executable).with_name("covenant"))
    words = ["serve", "--home", str(folder / "home"), "--http-port", "0", str(folder / "same.py")]
    daemon = subprocess.Popen([covenant, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert daemon.stdout is not None
        url = daemon.stdout.readline().split()[3]
        token = (folder / "home" / "operator.token").read_text(encoding="ascii").strip()
        headers = {"authorization": f"Bearer {token}"}
        with httpx2.Client(base_url=url, headers=headers, timeout=3_600) as client:
            return _through(client, daemon.pid, mib)
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(60)


def _through(client: httpx2.Client, pid: int, mib: int) -> dict[str, object]:
    client.post("/v1/files", content=b"first")
    before = resident_mib(pid, "VmRSS")
    sent, found = hashlib.sha256(), hashlib.sha256()

    def counted() -> Iterator[bytes]:
        for piece in pieces(mib):
            sent.update(piece)
            yield piece

    began = time.monotonic()
    stored = client.post("/v1/files", content=counted()).json()
    uploaded = time.monotonic()
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"url": stored["url"]}]}
    body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
    task = client.post("/v1/a2a/agents/same", json=body).json()["result"]["task"]
    worked = time.monotonic()
    link = urlsplit(task["artifacts"][0]["parts"][0]["url"])
    with client.stream("GET", f"{link.path}?{link.query}") as answer:
        for piece in answer.iter_bytes():
            found.update(piece)
    ended = time.monotonic()
    return {
        "mib": mib,
        "same": sent.hexdigest() == stored["sha256"] == found.hexdigest(),
        "upload_s": round(uploaded - began, 1),
        "agent_s": round(worked - uploaded, 1),
        "download_s": round(ended - worked, 1),
        "rss_before_mib": before,
        "rss_peak_mib": resident_mib(pid, "VmHWM"),
        "rss_after_mib": resident_mib(pid, "VmRSS"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=1024, help="size of the file")
    mib = parser.parse_args().mib
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), mib)))


if __name__ == "__main__":
    main()
