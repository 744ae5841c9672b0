"""A daemon without the extras serves; one with them imports none that is switched off; each refusal names its extra."""

from pathlib import Path

import pytest

from covenant.daemon.wiring.daemon import PEER_PACKAGES
from tests.cli.daemons import Daemon, covenant

EXTRAS = ("a2a", "asyncpg", "dns", "grpc", "ifaddr", "mcp", "opentelemetry", "pydantic_ai", "zeroconf")
AGENT = """
from covenant import Agent, Turn

shout = Agent("shout", description="Says it louder")


@shout
async def answer(turn: Turn) -> str:
    return turn.text.upper()
"""


def without(folder: Path, *modules: str) -> dict[str, str]:
    """An environment in which these modules are not installed."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({modules}))\n")
    return {"PYTHONPATH": str(folder)}


def write_agent(folder: Path) -> str:
    path = folder / "agents.py"
    path.write_text(AGENT)
    return str(path)


def test_the_core_serves_an_agent_without_any_extra(short_path: Path) -> None:
    daemon = Daemon(short_path / "home", write_agent(short_path), env=without(short_path, *EXTRAS))
    try:
        token = str(daemon.home / "operator.token")
        said = covenant("call", f"{daemon.url}/v1/a2a/agents/shout", "hello", "--token-file", token)
        assert (said.code, said.out.strip()) == (0, "HELLO"), said
    finally:
        assert daemon.stop() == 0


def test_a_daemon_imports_no_extra_that_is_switched_off(short_path: Path) -> None:
    daemon = Daemon(short_path / "home", write_agent(short_path), env={"PYTHONPROFILEIMPORTTIME": "1"})
    try:
        lines = [line for line in daemon.log.splitlines() if line.startswith("import time:")]
    finally:
        assert daemon.stop() == 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert {"covenant", "uvloop", "starlette"} <= imported
    assert imported.isdisjoint({*EXTRAS} - {"mcp"})


@pytest.mark.parametrize(("module", "package"), PEER_PACKAGES.items())
def test_peers_without_their_extra_are_refused_before_the_home_is_made(
    short_path: Path, module: str, package: str
) -> None:
    home = short_path / "home"
    env = {**without(short_path, module), "COVENANT_PEERS_ENABLED": "true"}
    ran = covenant("serve", "--home", str(home), "--http-port", "0", env=env)
    assert (ran.code, ran.out) == (1, "")
    assert f"peers.enabled needs the package {package}" in ran.err
    assert "pip install 'covenant-a2a[peers]'" in ran.err
    assert not (home / "ledger").exists()


def test_name_servers_without_their_extra_are_refused(short_path: Path) -> None:
    env = {**without(short_path, "dns"), "COVENANT_OUTBOUND_NAME_SERVERS": "127.0.0.1"}
    ran = covenant("serve", "--home", str(short_path / "home"), "--http-port", "0", env=env)
    assert (ran.code, ran.out) == (1, "")
    assert "outbound.name_servers needs the package dnspython" in ran.err
    assert "pip install 'covenant-a2a[peers]'" in ran.err
