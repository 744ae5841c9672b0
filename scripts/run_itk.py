"""Run the official integration kit of A2A, as it is, with a daemon of this tree among its agents.

    ITK/.venv/bin/python scripts/run_itk.py ITK --covenant .venv/bin/covenant [--peers python_v10,go_v10,ts_v10,…]

ITK is a checkout of a2aproject/a2a-itk with the environments that its launchers expect. The interpreter is the one that
has the kit's own requirements. `covenant` stands in an environment that has `fastapi` and `uvicorn` too: the daemon
hosts the kit's executor for the official SDK, whose module imports them.

A case is one peer, one binding and one behaviour. The kit calls the peer; the peer calls the daemon; the daemon's agent
calls the peer. The script mounts the daemon where the kit looks for the agent under test, and takes it away at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, Final

PEERS: Final = ("python_v10", "go_v10", "ts_v10", "python_v03", "go_v03", "ts_v03")
BINDINGS: Final = ("jsonrpc", "http_json", "grpc")
BEHAVIOURS: Final = {
    "send": ("send_message", False),
    "stream": ("send_message", True),
    "push": ("push_notification", False),
    "resubscribe": ("resubscribe", True),
}
"""By a case's name: the kit's behaviour, and whether the calls are streamed."""
BOTH_WAYS: Final = ["0->1", "1->0"]
CASE_S: Final = 150.0
Case = tuple[str, str, str]
"""A peer, a binding, and the name of a behaviour."""

# The kit starts `main.py` with two ports; the daemon replaces the process, so that the kit's signal reaches it.
MOUNTED: Final = """
import os
import sys
import tempfile

ports = dict(zip(sys.argv[1::2], sys.argv[2::2]))
home = tempfile.mkdtemp(prefix="itk-")
os.environ.pop("VIRTUAL_ENV", None)
os.environ |= {{
    "COVENANT_HOME": home,
    "COVENANT_HTTP_PORT": ports["--httpPort"],
    "COVENANT_GRPC_ENABLED": "true",
    "COVENANT_GRPC_PORT": ports["--grpcPort"],
    "COVENANT_A2A_PUBLISH": "itk",
    "COVENANT_A2A_PUBLISH_ANONYMOUS": "loopback",
    "COVENANT_A2A_PUSH_NOTIFICATIONS": "true",
    "COVENANT_OUTBOUND_ALLOW": "localhost,127.0.0.1",
}}
os.execv({covenant!r}, [{covenant!r}, "serve", {agents!r}])
"""
AGENTS: Final = """
import sys

sys.path.insert(0, {folder!r})
from main import V10AgentExecutor

itk = V10AgentExecutor()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--covenant", type=Path, required=True)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--bindings", default=",".join(BINDINGS))
    parser.add_argument("--behaviours", default=",".join(BEHAVIOURS))
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    mount = checkout / "agents" / "repo" / "itk"
    mount.mkdir(parents=True)
    try:
        agents = mount / "itk_agents.py"
        agents.write_text(AGENTS.format(folder=str(checkout / "agents" / "python" / "v10")))
        (mount / "main.py").write_text(MOUNTED.format(covenant=str(options.covenant.absolute()), agents=str(agents)))
        os.chdir(checkout)
        sys.path.insert(0, str(checkout))
        cases = list(product(options.peers.split(","), options.bindings.split(","), options.behaviours.split(",")))
        passed = asyncio.run(_run(cases))
    finally:
        shutil.rmtree(mount.parent)
    print(f"ITK at {_commit(checkout)}: {passed} of {len(cases)} passed")
    return 0 if passed == len(cases) else 1


async def _run(cases: list[Case]) -> int:
    testlib = import_module("testlib")  # the kit's own, on the path only now

    peers = list(dict.fromkeys(peer for peer, _, _ in cases))
    processes, _, ports = await testlib.start_itk_cluster([*peers, "current"])
    try:
        passed = 0
        for case in cases:
            outcome = await _try(testlib.execute_itk_test, case)
            passed += outcome == "passed"
            print(*case, outcome, flush=True)
        return passed
    finally:
        testlib.stop_itk_cluster(processes, ports)


async def _try(execute: Callable[..., Awaitable[dict[str, dict[str, Any]]]], case: Case) -> str:
    peer, binding, name = case
    behaviour, streamed = BEHAVIOURS[name]
    try:
        async with asyncio.timeout(CASE_S):
            outcomes = await execute(
                sdks=[peer, "current"],
                behavior=behaviour,
                edges=BOTH_WAYS,
                scenario_name="-".join(case),
                protocols=[binding],
                streaming=streamed,
            )
    except Exception as failure:  # noqa: BLE001  a case that raises has failed; the others go on
        return f"failed: {failure!r}"
    return "passed" if all(outcome["passed"] for outcome in outcomes.values()) else "failed"


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %as"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "an unknown commit"


if __name__ == "__main__":
    sys.exit(main())
