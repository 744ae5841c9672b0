"""Time the two ways of a stranger to a first answer: from a clone with `make run`, and from a wheel with pip.

    python scripts/time_first_answer.py               # both
    python scripts/time_first_answer.py clone
    python scripts/time_first_answer.py wheel --runs 3

Each run begins in an empty folder: the environment is made, the packages come from the configured index (pip's cache is
used as it is), the daemon starts, and an agent answers. Building the wheel is not part of its time. The machine's load
and a measure of its speed are printed, because both change the numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
START_S: Final = 300.0
BOUNDS_S: Final = {"clone": 35.0, "wheel": 15.0}
HASHED_BYTES: Final = 256 * 1024 * 1024


class Watch:
    """Prints how long each step took."""

    def __init__(self) -> None:
        self._began_s = self._last_s = time.monotonic()
        self._cpu_s = cpu_s()

    def step(self, name: str) -> None:
        now_s = time.monotonic()
        print(f"  {now_s - self._last_s:6.1f} s  {name}", flush=True)
        self._last_s = now_s

    def end(self, daemon: subprocess.Popen[bytes]) -> float:
        """Stop the daemon, and say how long it took in all. A busy machine takes longer than its processors work."""
        os.killpg(daemon.pid, signal.SIGTERM)
        daemon.wait()
        total_s = self._last_s - self._began_s
        print(f"  {total_s:6.1f} s  in all, of which processors worked {cpu_s() - self._cpu_s:.1f} s")
        return total_s


def cpu_s() -> float:
    """The CPU time of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=variables(), capture_output=True, text=True)  # noqa: PLW1510
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def variables() -> dict[str, str]:
    """The environment without settings of Covenant and without this script's own environment of Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COVENANT_", "VIRTUAL_ENV"))}  # noqa: TID251  (what is called needs the rest of it)
    return {**kept, "COVENANT_HTTP_PORT": "0"}


def serve(*words: str | Path, cwd: Path, url: Path) -> subprocess.Popen[bytes]:
    """Starts a daemon in a process group of its own, and waits until it listens."""
    with (cwd / "output.log").open("wb") as output:
        command = [str(word) for word in words]
        daemon = subprocess.Popen(
            command, cwd=cwd, env=variables(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    end_s = time.monotonic() + START_S
    while not url.exists():
        if daemon.poll() is not None or time.monotonic() > end_s:
            sys.exit(f"{' '.join(command)} did not serve:\n{(cwd / 'output.log').read_text()}")
        time.sleep(0.02)
    return daemon


def time_clone(folder: Path, _: Path) -> float:
    watch, tree = Watch(), folder / "covenant"
    run("git", "clone", "--quiet", ROOT, tree, cwd=folder)
    watch.step("git clone")
    daemon = serve("make", "run", cwd=tree, url=tree / ".demo" / "http.url")
    try:
        watch.step("make run, until the daemon listens")
        words = ("--home", ".demo", "a2a", "send", "--to", "echo@local", "--wait", "hello")
        answer = run(tree / ".venv" / "bin" / "covenant", *words, cwd=tree)
        watch.step(f"covenant a2a send: {answer.strip()}")
    finally:
        total_s = watch.end(daemon)
    return total_s


def time_wheel(folder: Path, wheel: Path) -> float:
    watch, programs = Watch(), folder / "env" / "bin"
    run(sys.executable, "-m", "venv", "env", cwd=folder)
    watch.step("python -m venv")
    run(programs / "pip", "install", "--quiet", wheel, cwd=folder)
    watch.step("pip install")
    run(programs / "covenant", "--home", "home", "init", cwd=folder)
    watch.step("covenant init")
    url = folder / "home" / "http.url"
    daemon = serve(programs / "covenant", "--home", "home", "serve", "agents.py", cwd=folder, url=url)
    try:
        watch.step("covenant serve, until the daemon listens")
        answer = run(programs / "covenant", "--home", "home", "call", "hello", "world", cwd=folder)
        watch.step(f"covenant call: {answer.strip()}")
    finally:
        total_s = watch.end(daemon)
    return total_s


PATHS: Final[dict[str, Callable[[Path, Path], float]]] = {"clone": time_clone, "wheel": time_wheel}


def machine() -> str:
    """What the numbers depend on: cores, load, and how long one core takes to hash 256 MiB."""
    began_s = time.process_time()
    hashlib.sha256(bytes(HASHED_BYTES)).hexdigest()
    hashed_s = time.process_time() - began_s
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    python = platform.python_version()
    return f"{os.cpu_count()} cores, load {load}, SHA-256 of 256 MiB in {hashed_s:.2f} s, Python {python}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="clone | wheel", default=list(PATHS))
    parser.add_argument("--runs", type=int, default=1)
    given = parser.parse_args()
    if unknown := [path for path in given.paths if path not in PATHS]:
        parser.error(f"no such path: {', '.join(unknown)}; there are {', '.join(PATHS)}")
    slow = False
    with tempfile.TemporaryDirectory(prefix="first-answer-") as name:
        wheels = Path(name) / "wheels"
        if "wheel" in given.paths:
            run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", wheels, ROOT, cwd=Path(name))
        for path in given.paths:
            for number in range(given.runs):
                print(f"{path}: {machine()}", flush=True)
                folder = Path(name) / f"{path}-{number}"
                folder.mkdir()
                total_s = PATHS[path](folder, next(wheels.glob("*.whl"), wheels))
                if total_s > BOUNDS_S[path]:
                    print(f"  more than the bound of {BOUNDS_S[path]:g} s", flush=True)
                    slow = True
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
