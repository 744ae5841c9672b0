"""Count the modules that a request passes through, in real daemons.

    python scripts/trace_walk.py send          # one SendMessage, from the socket to the synced answer
    python scripts/trace_walk.py delegate      # a task for an agent of a peer, at both daemons, until its proven result
    python scripts/trace_walk.py send --list   # and which modules, in the order in which they are entered
    python scripts/trace_walk.py send --hops   # and which module calls which others

Each daemon runs on a home of its own and serves an agent that echoes. Two requests warm it up; calls of Python
functions during the third are recorded. A hop is a call from one module of ours into another, counted once. What the
event loop calls is called by no module. What the daemon does while nobody asks for anything is recorded before, and
left out: its timers are no part of the walk.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
OURS: Final = "covenant."
LOOP: Final = "run_to_end"
"""The function that runs the event loop: its frame is below each callback."""
WAIT_S: Final = 30.0
WARM: Final = 2
SETTLE_S: Final = 2.0
IDLE_S: Final = 8.0


class Recorder:
    """Which modules are entered, and from which, between SIGUSR1 and SIGUSR2; each with what the event loop called."""

    def __init__(self, out: Path) -> None:
        self._on = False
        self._calls: dict[tuple[str, str, str], None] = {}
        """From where, into which module, and below which callback."""
        self._out = out

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._on or event != "call":
            return
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(OURS):
            return
        ours = [each for each in _stack(frame) if each.f_globals["__name__"].startswith(OURS)]
        source = ours[1].f_globals["__name__"] if len(ours) > 1 else ""
        callback = ours[-1].f_code.co_qualname if ours else LOOP
        self._calls[source, module, callback] = None

    def begin(self, *_: object) -> None:
        self._on = True
        self._calls = {}
        self._out.write_text("{}")

    def end(self, *_: object) -> None:
        self._on = False
        self._out.write_text(json.dumps({"calls": list(self._calls)}))


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """From this frame up to what the event loop called."""
    while frame is not None and frame.f_code.co_name != LOOP:
        if "__name__" in frame.f_globals:
            yield frame
        frame = frame.f_back


def serve(out: Path, words: list[str]) -> None:
    """In a process of its own: `covenant serve`, recorded."""
    from covenant.cli.main import main as covenant  # noqa: PLC0415  (the counting process needs none of it)

    recorder = Recorder(out)
    signal.signal(signal.SIGUSR1, recorder.begin)
    signal.signal(signal.SIGUSR2, recorder.end)
    sys.argv = ["covenant", "serve", *words]
    sys.setprofile(recorder)
    covenant()


class Daemon:
    def __init__(self, process: subprocess.Popen[bytes], home: Path, out: Path) -> None:
        self._process, self.home, self._out = process, home, out
        _until((home / "http.url").exists)
        self.url = (home / "http.url").read_text().strip()
        self.token = (home / "operator.token").read_text().strip()

    def record(self, number: int) -> dict[str, Any]:
        self._process.send_signal(number)
        wanted = number == signal.SIGUSR2
        _until(lambda: self._out.exists() and bool(_read(self._out)) is wanted)
        return _read(self._out)

    def covenant(self, *words: str) -> None:
        """A command against it."""
        command = [str(Path(sys.executable).with_name("covenant")), "--home", str(self.home), *words]
        subprocess.run(command, check=True, capture_output=True, timeout=WAIT_S)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError:  # just being written
        return {}
    return found


def _until(met: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not met():
        if time.monotonic() > end_s:
            raise TimeoutError(f"the daemon was not ready within {WAIT_S:g} s")
        time.sleep(0.05)


@contextmanager
def daemon(folder: Path, name: str) -> Iterator[Daemon]:
    home, out, agents = folder / name, folder / f"{name}.json", folder / "agents.py"
    agents.write_text(AGENT)
    command = [sys.executable, __file__, "serve", str(out), str(agents)]
    command += ["--home", str(home), "--http-port", "0", "--log-level", "error", "--peers-enabled", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield Daemon(process, home, out)
    finally:
        process.terminate()
        process.wait(WAIT_S)


def _send(to: Daemon, number: int) -> None:
    message = {"messageId": f"m-{number}", "role": "ROLE_USER", "parts": [{"text": "hello"}]}
    body = {"jsonrpc": "2.0", "id": number, "method": "SendMessage", "params": {"message": message}}
    headers = {"authorization": f"Bearer {to.token}", "content-type": "application/json", "a2a-version": "1.0"}
    connection = http.client.HTTPConnection(to.url.removeprefix("http://"), timeout=WAIT_S)
    connection.request("POST", "/v1/a2a/agents/echo", json.dumps(body), headers)
    answer = connection.getresponse().read()
    connection.close()
    if b"TASK_STATE_COMPLETED" not in answer:
        raise RuntimeError(answer.decode())


class Walk:
    """The calls between modules. `idle`: what the event loop calls while nobody asks for anything is no part of it."""

    def __init__(self, daemons: list[Daemon], act: Callable[[], None], idle: Walk | None = None) -> None:
        for each in daemons:
            each.record(signal.SIGUSR1)
        act()
        found = [call for each in daemons for call in each.record(signal.SIGUSR2)["calls"]]
        self.callbacks = {callback for _, _, callback in found}
        left_out = idle.callbacks if idle is not None else set()
        calls = [(source, target) for source, target, callback in found if callback not in left_out]
        self.entered = dict.fromkeys(target for _, target in calls)
        self.hops = {call for call in calls if call[0] not in ("", call[1])}


def walk(what: str, folder: Path) -> Walk:
    with ExitStack() as stack:
        daemons = [stack.enter_context(daemon(folder, "office"))]
        office = daemons[0]
        if what == "delegate":
            lab = stack.enter_context(daemon(folder, "lab"))
            daemons.append(lab)
            lab.covenant("peers", "add", office.url, "--name", "office")
            office.covenant("peers", "add", lab.url, "--name", "lab")
            office.covenant("peers", "verify", "lab")
            lab.covenant("peers", "verify", "office")

        def ask(number: int) -> None:
            if what == "delegate":
                office.covenant("peers", "delegate", "echo", f"hello {number}", "--peer", "lab")
            else:
                _send(office, number)

        for number in range(WARM):
            ask(number)
        time.sleep(SETTLE_S)
        idle = Walk(daemons, lambda: time.sleep(IDLE_S))
        return Walk(daemons, lambda: ask(WARM), idle)


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("what", nargs="?", choices=("send", "delegate"), default="send")
    parser.add_argument("--list", action="store_true", help="name the modules, too")
    parser.add_argument("--hops", action="store_true", help="name the modules that each module calls, too")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = walk(chosen.what, Path(folder))
    print(f"{chosen.what}: {len(found.entered)} modules, {len(found.hops)} hops")
    if chosen.list:
        print("".join(f"    {module}\n" for module in found.entered), end="")
    if chosen.hops:
        for source in sorted({source for source, _ in found.hops}):
            targets = sorted(target for caller, target in found.hops if caller == source)
            print(f"{source} ({len(targets)})", *(f"    {target}" for target in targets), sep="\n")


if __name__ == "__main__":
    main()
