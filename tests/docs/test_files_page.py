"""docs/files.md: its commands and its agent, as they stand, against a daemon."""

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

from tests.cli.daemons import COVENANT, Daemon, environment
from tests.hostile.client import request
from tests.waits import BOUND_S

PAGE = (Path(__file__).parents[2] / "docs" / "files.md").read_text(encoding="utf-8")
FILM = b"a film of some words\n" * 40_000


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_a_file_is_sent_worked_on_and_read_as_the_page_shows(short_path: Path) -> None:
    (agent,), (upload,) = blocks("python"), blocks("sh")
    (short_path / "upper.py").write_text(agent)
    (short_path / "film.mp4").write_bytes(FILM)
    daemon = Daemon(short_path / "home", str(short_path / "upper.py"))
    try:
        asked = upload.replace("http://127.0.0.1:8421", daemon.url)
        assert asked != upload
        env = environment(COVENANT_HOME=str(daemon.home), PATH=f"{COVENANT.parent}:{os.environ['PATH']}")
        done = subprocess.run(
            ["sh", "-ec", asked], cwd=short_path, env=env, capture_output=True, timeout=BOUND_S, check=True
        )
        stored = json.loads(done.stdout)
        assert {"sha256", "size", "url", "expires_at_ms"} <= set(stored)
        assert stored["sha256"] == hashlib.sha256(FILM).hexdigest()

        part = {"url": stored["url"], "filename": "film.mp4"}
        message = {"messageId": "m1", "role": "ROLE_USER", "parts": [part]}
        call = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
        token = (daemon.home / "operator.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "A2A-Version": "1.0", "Content-Type": "application/json"}
        answer = request(daemon.url, "POST", "/v1/a2a/agents/upper", body=json.dumps(call).encode(), headers=headers)
        told = json.loads(answer.body)
        assert "result" in told, told
        links = re.findall(r'"url": ?"([^"]+)"', json.dumps(told["result"]["task"]["artifacts"]))
        loud = request(daemon.url, "GET", links[0].removeprefix(daemon.url))
        assert loud.body == FILM.upper()

        put = subprocess.run(
            ["covenant", "files", "put", "film.mp4"], cwd=short_path, env=env, capture_output=True, check=True
        )
        assert stored["sha256"] in put.stdout.decode()
    finally:
        daemon.stop()
