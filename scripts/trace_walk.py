"""Count the modules that one SendMessage passes through, from the socket to the synced answer.

    python scripts/trace_walk.py            # how many modules, and how many hops between them
    python scripts/trace_walk.py --list     # and which, in the order in which they are entered

A daemon runs in this process, on a home of its own, with an agent that echoes. Two messages warm it up; the calls of
Python functions during the third are recorded. A hop is a call from one module of ours into another, counted once.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, Final

AGENT: Final = """
from covenant import Agent

echo = Agent("echo")


@echo
async def say(turn):
    return turn.text
"""
WAIT_S: Final = 30.0


class Recorder:
    """Knows which modules were entered, and from which, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.entered: dict[str, None] = {}
        self.hops: dict[tuple[str, str], None] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.on or event != "call":
            return
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("covenant."):
            return
        self.entered[module] = None
        caller = frame.f_back
        while caller is not None and not caller.f_globals.get("__name__", "").startswith("covenant."):
            caller = caller.f_back
        if caller is not None and caller.f_globals["__name__"] != module:
            self.hops[caller.f_globals["__name__"], module] = None


def _send(url: str, token: str, number: int) -> None:
    message = {"messageId": f"m-{number}", "role": "ROLE_USER", "parts": [{"text": "hello"}]}
    body = {"jsonrpc": "2.0", "id": number, "method": "SendMessage", "params": {"message": message}}
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json", "a2a-version": "1.0"}
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=WAIT_S)
    connection.request("POST", "/v1/a2a/agents/echo", json.dumps(body), headers)
    assert b"TASK_STATE_COMPLETED" in connection.getresponse().read()
    connection.close()


def _drive(home: Path, recorder: Recorder) -> None:
    until_s = time.monotonic() + WAIT_S
    while not (home / "http.url").exists():
        if time.monotonic() > until_s:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(0.05)
    url, token = (home / "http.url").read_text().strip(), (home / "operator.token").read_text().strip()
    for number in range(3):
        recorder.on = number == 2
        _send(url, token, number)
    recorder.on = False
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="name the modules, too")
    shows = parser.parse_args().list
    from covenant.cli.main import main as covenant  # noqa: PLC0415  (after the arguments were read)

    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        home, agents = Path(folder) / "h", Path(folder) / "agents.py"
        agents.write_text(AGENT)
        sys.argv = ["covenant", "serve", str(agents), "--home", str(home), "--http-port", "0", "--log-level", "error"]
        threading.Thread(target=_drive, args=(home, recorder), daemon=True).start()
        sys.setprofile(recorder)
        try:
            covenant()
        except SystemExit:
            pass
        finally:
            sys.setprofile(None)
    print(f"SendMessage: {len(recorder.entered)} modules, {len(recorder.hops)} hops")
    if shows:
        print("".join(f"    {module}\n" for module in recorder.entered), end="")


if __name__ == "__main__":
    main()
