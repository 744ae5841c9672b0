"""Run an official compatibility kit of A2A, as it is, against a daemon of this tree, and print what it counts.

    python scripts/run_kit.py 1.0 CHECKOUT [--python PYTHON] [--token] [-- ARGUMENTS OF THE KIT]
    python scripts/run_kit.py 0.3 CHECKOUT [--python PYTHON] [--token] [-- ARGUMENTS OF THE KIT]

CHECKOUT is a checkout of a2aproject/a2a-tck: its branch `1.0-dev` or `0.3.x`. PYTHON is an interpreter that has the kit
installed (`pip install -e CHECKOUT`). The kit of 1.0 brings an executor for the official SDK, which runs here as it is.
The kit of 0.3 needs an agent whose tasks can be continued and canceled after each answer, and cards that give the
address of gRPC as a URL. Both kits call the published agent without a token. `--token` sends the operator's token with
each request of the kit, over HTTP and gRPC.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
START_S: Final = 60.0
KIT_S: Final = 1_800.0
COUNTED: Final = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|deselected)")

FORMS: Final = {"1.0": "1.0", "0.3": "both"}
"""The form of the root card. The kit of 1.0 refuses a card that has the fields of 0.3 too."""
EXECUTOR: Final = "TckAgentExecutor"
AGENT_03: Final = """
from collections.abc import AsyncIterator
from typing import Any

from covenant import Agent, Turn

tck = Agent("tck", description="Answers each message, and asks for the next")


@tck
async def answer(turn: Turn) -> AsyncIterator[Any]:
    yield f"You said: {turn.text}"
    yield turn.need_input("What else?")
"""
# Loaded by the kit's interpreter before anything else.
SIGN_IN: Final = """
import os
from contextlib import suppress

import grpc
import httpx

HEADER = "Bearer " + os.environ["KIT_TOKEN"]


def with_token(kind):
    made = kind.__init__

    def init(self, *arguments, **options):
        made(self, *arguments, **options)
        self.headers.setdefault("authorization", HEADER)

    kind.__init__ = init


with_token(httpx.Client)
with_token(httpx.AsyncClient)
with suppress(ImportError):  # one of the kits has it
    import requests

    with_token(requests.Session)


class Adds(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def add(self, proceed, call, request):
        call = call._replace(metadata=[*(call.metadata or ()), ("authorization", HEADER)])
        return proceed(call, request)

    intercept_unary_unary = intercept_unary_stream = add


plain = grpc.insecure_channel
grpc.insecure_channel = lambda *arguments, **options: grpc.intercept_channel(plain(*arguments, **options), Adds())
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("version", choices=("1.0", "0.3"))
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has the kit installed")
    parser.add_argument("--token", action="store_true", help="send the operator's token with each request")
    ours, _, theirs = " ".join(sys.argv[1:]).partition(" -- ")
    options = parser.parse_args(ours.split(), argparse.Namespace(arguments=theirs.split()))
    with tempfile.TemporaryDirectory(prefix="kit-") as name:
        folder = Path(name)
        (folder / "tck.py").write_text(_executor(options.checkout) if options.version == "1.0" else AGENT_03)
        with _daemon(folder, options.version) as url:
            output = _run_kit(options, folder, url)
    print(output)
    counts = {word: int(number) for line in output.splitlines()[-15:] for number, word in COUNTED.findall(line)}
    print(f"A2A {options.version} at {_commit(options.checkout)}: {counts}")
    return 0


def _executor(checkout: Path) -> str:
    """The kit's own executor with the imports that it needs, and without the server around it."""
    tree = ast.parse((checkout / "sut" / "a2a-python" / "sut_agent.py").read_text())
    (executor,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == EXECUTOR)
    used = {node.id for node in ast.walk(executor) if isinstance(node, ast.Name)}
    lines = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [name for name in node.names if (name.asname or name.name).partition(".")[0] in used]
            lines += [ast.unparse(node)] if node.names else []
    return "\n".join([*lines, ast.unparse(executor), f"tck = {EXECUTOR}()", ""])


@contextmanager
def _daemon(folder: Path, version: str) -> Iterator[str]:
    home, grpc_port = folder / "home", _free_port()
    settings = {
        "COVENANT_HOME": str(home),
        "COVENANT_HTTP_PORT": "0",
        "COVENANT_GRPC_ENABLED": "true",
        "COVENANT_GRPC_PORT": str(grpc_port),
        "COVENANT_GRPC_PUBLIC_ADDRESS": f"http://127.0.0.1:{grpc_port}" if version == "0.3" else "",
        "COVENANT_A2A_PUBLISH": "tck",
        "COVENANT_A2A_PUBLISH_ANONYMOUS": "loopback",
        "COVENANT_A2A_ANONYMOUS_LISTS": "true",
        "COVENANT_A2A_PUSH_NOTIFICATIONS": "true",
        "COVENANT_CARDS_ROOT_FORM": FORMS[version],
        "COVENANT_OUTBOUND_ALLOW": "localhost,127.0.0.1",
    }
    daemon = subprocess.Popen(
        [str(Path(sys.executable).parent / "covenant"), "serve", str(folder / "tck.py")],
        env={**os.environ, **settings},  # noqa: TID251  (what is called needs the whole of it)
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("w"),
    )
    try:
        end_s, at = time.monotonic() + START_S, home / "http.url"
        while not at.exists():
            if daemon.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"the daemon did not start:\n{(folder / 'log').read_text()}")
            time.sleep(0.1)
        yield at.read_text().strip()
    finally:
        daemon.terminate()
        daemon.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port: int = held.getsockname()[1]
        return port


def _run_kit(options: argparse.Namespace, folder: Path, url: str) -> str:
    more = options.arguments or ([] if options.version == "1.0" else ["--category", "mandatory"])
    target = "--sut-host" if options.version == "1.0" else "--sut-url"
    environment = dict(os.environ)  # noqa: TID251  (what is called needs the whole of it)
    if options.token:
        (folder / "sitecustomize.py").write_text(SIGN_IN)
        token = (folder / "home" / "operator.token").read_text().strip()
        environment |= {"PYTHONPATH": str(folder), "KIT_TOKEN": token}
    ran = subprocess.run(
        [options.python, "run_tck.py", target, url if options.version == "1.0" else f"{url}/v1/a2a/agents/tck", *more],
        cwd=options.checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=KIT_S,
        check=False,
    )
    return ran.stdout


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %as"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "an unknown commit"


if __name__ == "__main__":
    sys.exit(main())
