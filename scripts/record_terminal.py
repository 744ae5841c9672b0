"""Record the headline as a picture: a task at work, `kill -9`, a restart, `requeue`, and a stream that goes on.

Everything in the picture happens while this runs: a daemon with an agent, a client that follows one task, and an
operator who types COMMANDS. What each of them prints is drawn at the moment at which it was printed, with long pauses
shortened. The picture is an SVG without scripts, for light and dark pages; at its end it shows all that was said.

    .venv/bin/python scripts/record_terminal.py docs/images/kill-and-requeue.svg
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

COVENANT: Final = Path(sys.executable).with_name("covenant")
BOUND_S: Final = 120.0
COUNT: Final = 12
KILLED_AT: Final = "4 "
AGENT: Final = f"""
import asyncio

from covenant import Agent, Turn

counter = Agent("counter", description="Counts, one number at a time")


@counter
async def count(turn: Turn):
    for number in range(1, {COUNT} + 1):
        yield f"{{number}} "
        await asyncio.sleep(0.6)
"""

SERVE: Final = "covenant serve agents.py 2>daemon.log &"
GRANT: Final = "covenant capabilities grant a2a.repair.requeue | head -1"
CALL: Final = "covenant call counter --stream 'count, please'"
KILL: Final = "kill -9 %1"
STATUS: Final = "covenant a2a status"
REQUEUE: Final = "covenant a2a requeue {task} --reason 'daemon was killed' --duplicate-risk operator-accepted"
COMMANDS: Final = (SERVE, GRANT, CALL, KILL, SERVE, STATUS, REQUEUE)

COLUMNS: Final = 112
PAUSE_S_MAX: Final = 1.2
TYPED_S: Final = 0.7
CHARACTER_PX: Final = 7.2
LINE_PX: Final = 18
MARGIN_PX: Final = 14


class Piece(NamedTuple):
    """Something that appeared in a terminal."""

    at_s: float
    pane: str
    text: str
    kind: str
    """`typed`, `said` (printed by a program), or `note`: an explanation that nobody printed."""


class Recorder:
    def __init__(self, folder: Path) -> None:
        self.pieces: list[Piece] = []
        self._folder = folder
        inherited = os.environ.items()  # noqa: TID251  (what the recorded programs inherit)
        kept = {name: value for name, value in inherited if not name.startswith("COVENANT_")}
        path = f"{COVENANT.parent}{os.pathsep}{kept.get('PATH', '')}"
        port = {"COVENANT_HOME": str(folder / "home"), "COVENANT_HTTP_PORT": str(_free_port())}
        self._env = {**kept, **port, "PATH": path, "COLUMNS": str(COLUMNS), "PYTHONUNBUFFERED": "1"}

    def add(self, pane: str, text: str, kind: str) -> None:
        self.pieces.append(Piece(time.monotonic(), pane, text, kind))

    def start(self, pane: str, command: str) -> subprocess.Popen[bytes]:
        """Types a command that keeps running, as a process of its own without a shell around it."""
        self.add(pane, f"$ {command}\n", "typed")
        words = "exec " + command.partition(" 2>")[0]
        with (self._folder / "daemon.log").open("ab") as log:
            return subprocess.Popen(
                ["/bin/sh", "-c", words], cwd=self._folder, env=self._env, stdout=subprocess.PIPE, stderr=log
            )

    def run(self, pane: str, command: str) -> str:
        """Types a command, and waits for its end."""
        self.add(pane, f"$ {command}\n", "typed")
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self._folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BOUND_S,
            check=True,
        )
        self.add(pane, done.stdout, "said")
        return done.stdout

    def follow(self, pane: str, process: subprocess.Popen[bytes], until: str | None) -> str:
        """Records what a program prints until it has printed this; None: until its end."""
        assert process.stdout is not None
        output = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while until is None or until.encode() not in output:
                if not selector.select(BOUND_S):
                    raise TimeoutError(f"{process.args!r} printed {output!r} and no more")
                more = os.read(process.stdout.fileno(), 4_096)
                if not more:
                    if until is None:
                        break
                    raise RuntimeError(f"{process.args!r} ended after {output!r}; {self._log()}")
                output += more
                self.add(pane, more.decode(), "said")
        return output.decode()

    def _log(self) -> str:
        return (self._folder / "daemon.log").read_text(encoding="utf-8")


def record(folder: Path) -> list[Piece]:
    (folder / "agents.py").write_text(AGENT, encoding="utf-8")
    recorder = Recorder(folder)
    with ExitStack() as ends:
        daemon = recorder.start("operator", SERVE)
        ends.callback(_end, daemon)
        recorder.follow("operator", daemon, "agents/counter\n")
        recorder.run("operator", GRANT)
        client = recorder.start("client", CALL)
        ends.callback(_end, client)
        recorder.follow("client", client, KILLED_AT)
        recorder.add("operator", f"$ {KILL}\n", "typed")
        daemon.send_signal(signal.SIGKILL)
        daemon.wait(BOUND_S)
        recorder.add("client", "  (the daemon is dead; the client waits)  ", "note")
        daemon = recorder.start("operator", SERVE)
        ends.callback(_end, daemon)
        recorder.follow("operator", daemon, "agents/counter\n")
        status = recorder.run("operator", STATUS)
        lost = next(line.split() for line in status.splitlines() if line.startswith("holder lost"))
        recorder.run("operator", REQUEUE.format(task=lost[2]))
        recorder.follow("client", client, None)
        if client.wait(BOUND_S) != 0:
            raise RuntimeError(f"the client failed: {recorder.pieces}")
    return recorder.pieces


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    process.wait(BOUND_S)
    if process.stdout is not None:
        process.stdout.close()


def shortened(pieces: list[Piece]) -> list[Piece]:
    """The same at times from 0 on, with no pause longer than `PAUSE_S_MAX`, and some time for each command."""
    at_s, before_s, shown = 0.5, pieces[0].at_s, list[Piece]()
    for piece in pieces:
        pause_s = min(piece.at_s - before_s, PAUSE_S_MAX)
        at_s += max(pause_s, TYPED_S) if piece.kind == "typed" else pause_s
        before_s = piece.at_s
        shown.append(piece._replace(at_s=round(at_s, 2)))
    return shown


STYLE: Final = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; white-space: pre;
  animation: appear 0.01s linear both }
.page { fill: #f6f8fa; stroke: #d0d7de } .typed { font-weight: 600 } .note { fill: #9a6700 } .name { fill: #59636e }
@keyframes appear { from { opacity: 0 } to { opacity: 1 } }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .page { fill: #0d1117; stroke: #30363d } .note { fill: #d29922 } .name { fill: #8b949e }
}
@media (prefers-reduced-motion: reduce) { text { animation: none } }
"""


def drawn(pieces: list[Piece]) -> str:
    """The picture: one terminal above the other."""
    body: list[str] = []
    top = MARGIN_PX
    for pane, name in (("client", "a client"), ("operator", "the operator")):
        rows = _rows([piece for piece in pieces if piece.pane == pane])
        height = (len(rows) + 1) * LINE_PX + 2 * MARGIN_PX
        width = COLUMNS * CHARACTER_PX + 2 * MARGIN_PX
        body.append(f'<rect class="page" x="1" y="{top}" width="{width:g}" height="{height}" rx="6"/>')
        body.append(_text(0, top + MARGIN_PX, Piece(0, pane, name, "name")))
        for number, row in enumerate(rows, start=1):
            y = top + MARGIN_PX + number * LINE_PX
            body += [_text(column, y, piece) for column, piece in row]
        top += height + MARGIN_PX
    width = COLUMNS * CHARACTER_PX + 2 * MARGIN_PX + 2
    title = "A client's stream goes on after the daemon was killed, started again, and its task requeued."
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {top}" role="img"><title>{title}</title>'
    return "\n".join([head, f"<style>{STYLE}</style>", *body, "</svg>"]) + "\n"


def _rows(pieces: list[Piece]) -> list[list[tuple[int, Piece]]]:
    """Where each piece stands: lines, and in each the pieces with the column at which they begin."""
    rows: list[list[tuple[int, Piece]]] = [[]]
    column = 0
    for piece in pieces:
        for number, line in enumerate(piece.text.expandtabs().split("\n")):
            if number:
                rows.append([])
                column = 0
            for start in range(0, len(line), COLUMNS):
                part = line[start : start + COLUMNS]
                if column + len(part) > COLUMNS:
                    rows.append([])
                    column = 0
                if part.strip():
                    rows[-1].append((column, piece._replace(text=part.rstrip())))
                column += len(part)
    while rows and not rows[-1]:
        rows.pop()
    return rows


def _text(column: int, y: int, piece: Piece) -> str:
    x = MARGIN_PX + column * CHARACTER_PX
    delay = f' style="animation-delay:{piece.at_s:g}s"' if piece.at_s else ""
    length = len(piece.text) * CHARACTER_PX
    fixed = f'textLength="{length:g}" lengthAdjust="spacingAndGlyphs"'
    return f'<text class="{piece.kind}" x="{x:g}" y="{y}" {fixed}{delay}>{escape(piece.text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="the SVG to write")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="covenant-") as folder:
        picture = drawn(shortened(record(Path(folder))))
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    given.picture.write_text(picture, encoding="utf-8")
    print(f"{given.picture}: {len(picture.encode()):,} bytes")


if __name__ == "__main__":
    main()
