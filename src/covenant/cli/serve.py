"""`covenant serve`: run the daemon until it is told to stop. `covenant ui`: open its dashboard. `covenant mcp`: serve
its tools over stdio."""

from __future__ import annotations

import asyncio
import gc
import json
import shlex
import sys
from pathlib import Path
from typing import Final

import click

import covenant
from covenant.cli.daemon_client import Answer, Invocation, daemon_command, read_token
from covenant.cli.options import given_before, given_home, home_option, program, short_path, token_option
from covenant.cli.terminal import Failure, Unreachable, put, say
from covenant.daemon.environment import environment
from covenant.daemon.home import UnsafeHome, url_in
from covenant.daemon.settings_loader import SettingEntry, entries, load
from covenant.ledger.embedded.disk import unusable_by
from covenant.model.errors import CovenantError, SettingsError
from covenant.model.extras import install_command
from covenant.model.tenants import DEFAULT

MCP_PATH: Final = "/mcp"
MCP_CHECK_S: Final = 10.0
SHOWN: Final = frozenset(
    {
        "http.bind_addr",
        "http.port",
        "http.public_base_url",
        "ledger.durability",
        "ledger.url",
        "log.format",
        "log.level",
    }
)
"""Flags that help lists. Every other setting is a flag too, by the same rule."""
DRAIN_WAIT_S: Final = 5
STOP_S_MAX: Final = 3_700.0
"""`daemon.grace_ms` is an hour at most."""


def _flag(entry: SettingEntry) -> click.Option:
    return click.Option(
        [entry.flag, *([entry.setting.flag] if entry.setting.flag else []), f"{entry.section}__{entry.key}"],
        metavar=entry.key.rpartition("_")[2].upper(),
        help=f"{entry.setting.meaning} {entry.variable}",
        hidden=entry.name not in SHOWN,
    )


def _serve(
    *,
    files: tuple[Path, ...],
    tenant_files: tuple[tuple[str, Path], ...],
    home: str | None,
    demo: bool,
    reload: bool,
    **given: str | None,
) -> None:
    if reload and not (files or tenant_files):
        raise click.UsageError("--reload needs the files to serve")
    # Collecting garbage while modules are loaded takes a tenth of a start. The daemon switches it on when it serves.
    gc.disable()
    from covenant.agents.agent_loader import ServedFile
    from covenant.daemon.demo import make_demo_home, suggestions
    from covenant.daemon.lifecycle import DaemonAddresses, run_daemon

    flags = {name.replace("__", "."): value for name, value in given.items()}
    if demo and home is None:
        home = str(make_demo_home(Path.cwd()))

    def announce(listening: DaemonAddresses) -> None:
        put(f"covenant listens on {listening.url} and {short_path(listening.socket)}")
        for tenant, agent_id in listening.agents:
            whose = "" if tenant == DEFAULT else f" of {tenant}"
            put(f"serving {agent_id}{whose} at {listening.url}/v1/a2a/agents/{agent_id}")
        if demo:
            put(suggestions(program(), shlex.quote(short_path(listening.socket.parent)), listening.url))
        sys.stdout.flush()

    served = [*map(ServedFile, files), *(ServedFile(path, tenant) for tenant, path in tenant_files)]
    try:
        run_daemon(load(flags, environment(), home=home), announce, demo=demo, files=served, reload=reload)
    except (UnsafeHome, SettingsError) as error:
        raise Failure("cannot_serve", f"{error}; `covenant doctor` looks at all of the home") from error
    except CovenantError as error:
        raise Failure("cannot_serve", str(error)) from error
    except OSError as error:
        raise Failure("cannot_serve", str(unusable_by(error, given_home(home)))) from error


serve: Final = click.Command(
    "serve",
    callback=_serve,
    help="""Run the daemon, and the agents in FILES.

    Listens on HTTP and on the socket in its home until SIGTERM or Ctrl-C. Then it starts no more work, gives running
    work some time to end, and stops. Nothing that was acknowledged is lost, however it ends.

    FILES are Python files with agents at their top level, such as examples/summarizer.py: `covenant.Agent`s,
    `AgentExecutor`s of the official SDK, agents of pydantic-ai. They belong to the tenant `default`; those of a file
    that --tenant names belong to that tenant.

    Every setting is a flag: --SECTION-NAME VALUE, as `covenant settings show` and docs/settings.md list them.
    """,
    params=[
        click.Argument(["files"], nargs=-1, type=click.Path(path_type=Path), metavar="[FILES]..."),
        click.Option(
            ["--tenant", "tenant_files"],
            type=(str, click.Path(path_type=Path)),
            multiple=True,
            metavar="TENANT FILE",
            help="Serve the agents of FILE for TENANT. May be given several times.",
        ),
        click.Option(["--reload"], is_flag=True, help="Load FILES again whenever they change: for development."),
        click.Option(["--demo"], is_flag=True, help="Run a demo in ./.demo, with sample agents."),
        click.Option(
            ["--home"],
            metavar="FOLDER",
            callback=given_before,
            help="The home. Default: COVENANT_HOME, else ~/.covenant.",
        ),
        *(_flag(entry) for entry in entries()),
    ],
)


@daemon_command(None, "ui", "login_code", "code", "url", "lasts_ms", "opened")
@click.option("--print", "only_print", is_flag=True, help="Print the address instead of opening a browser.")
def ui(call: Invocation, *, only_print: bool) -> None:
    """Open the daemon's dashboard in a browser, logged in as the holder of the token.

    The address has a code that works once, for a minute, and never the token.
    """
    import webbrowser

    answer = call.ask("make_login_code")
    # Some browsers stay in the foreground of a terminal: those are not for this.
    opened = not (only_print or call.json) and _has_screen() and webbrowser.open(answer["url"])
    message = "opened in the browser" if opened else f"open this address within {answer['lasts_ms'] // 1000} s"
    call.show({**answer, "opened": opened}, answer["url"], message)


def _has_screen() -> bool:
    if sys.platform != "linux":
        return True
    variables = environment()
    return bool(variables.get("DISPLAY") or variables.get("WAYLAND_DISPLAY"))


@click.command("mcp")
@home_option()
@token_option()
@click.option("--url", metavar="URL", help="The daemon's HTTP address. Default: the address in its home.")
def mcp(*, home: str | None, token_file: str | None, url: str | None) -> None:
    """Serve a running daemon's tools to an MCP client over stdio.

    For clients that start their MCP servers by a command. Starts no daemon, and exits with 3 if there is none. Clients
    that speak HTTP can use the daemon's /mcp instead. Needs the extra `mcp`, here and at the daemon.
    """
    folder = given_home(home)
    token = read_token(folder, token_file, environment())
    found = url or url_in(folder)
    if found is None:
        raise Unreachable(
            "daemon_unreachable",
            f"no daemon is in {folder}; start it with `covenant serve --home {folder}`, or give its --url",
        )
    address = found.rstrip("/").removesuffix(MCP_PATH) + MCP_PATH
    _check_mcp(address, token)
    try:
        from covenant.doors.mcp.mcp_server import bridge
    except ModuleNotFoundError as missing:
        raise Failure(
            "mcp_not_installed",
            f"the package {missing.name} is not installed: {install_command('mcp')}",
        ) from missing
    asyncio.run(bridge(address, token, covenant.__version__))


def _check_mcp(address: str, token: str) -> None:
    """Checks that the daemon answers and accepts the token, before a client waits in vain."""
    import httpx2

    headers = {"authorization": f"Bearer {token}", "accept": "application/json, text/event-stream"}
    ping = {"jsonrpc": "2.0", "id": 0, "method": "ping"}
    try:
        answer = httpx2.post(address, json=ping, headers=headers, timeout=MCP_CHECK_S, trust_env=False)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise Unreachable(
            "daemon_unreachable", f"no daemon answers at {address} ({error}); start it with `covenant serve`"
        ) from error
    if answer.status_code == 401:
        raise Failure("unknown_token", "the daemon does not accept this token; name another with --token-file")
    if answer.status_code == 404:
        raise Failure("no_mcp", f"there is no MCP at {address}; is this a covenant daemon?")
    if answer.status_code == 501:
        raise Failure("mcp_not_installed", f"at the daemon: {_reason(answer.content)}")


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return "MCP is not installed"


@daemon_command(None, "drain", "drained", "handed_back", "leased", "queued", "parked", "results")
@click.option(
    "--timeout-s",
    type=click.IntRange(0, 86_400),
    help="How long running turns may take. Default: 60, or the time of a drain that has already begun.",
)
def drain(call: Invocation, *, timeout_s: int | None) -> None:
    """Stop the daemon for a deploy, when its running turns have ended.

    From now on the daemon accepts no new work: doors refuse it and say when to try again (HTTP with 503, JSON-RPC with
    the error -32603 in a 200, gRPC with UNAVAILABLE). Reads, streams, results and answers to parked tasks still work.
    Turns that run longer than the timeout are handed back: idempotent work goes to the queue, other work is marked as
    interrupted and stays leased. Tasks that are queued, parked or leased to external workers are there after the next
    start. Requests under way then have daemon.grace_ms to end, and the command returns when the daemon has stopped
    listening.
    """
    others = sum(node["alive"] for node in call.ask("list_nodes")["nodes"]) - 1
    progress = _follow_drain(call, timeout_s)
    call.client.wait_closed(STOP_S_MAX)
    kept = {name: progress[name] for name in ("leased", "queued", "parked", "results")}
    handed_back = progress["handed_back"]
    if call.answer({"handed_back": handed_back, **kept}):
        return
    put(f"drained and stopped; {handed_back} turn(s) were handed back" if handed_back else "drained and stopped")
    successor = f"the other daemons of the ledger ({others})" if others > 0 else "the next start"
    put(f"left for {successor}: " + ", ".join(f"{count} {name}" for name, count in kept.items()))


def _follow_drain(call: Invocation, timeout_s: int | None) -> Answer:
    """Begin the drain, report its progress, and return the daemon's last report."""
    progress = call.ask("begin_drain", timeout_ms=None if timeout_s is None else timeout_s * 1000)
    try:
        while not progress["drained"]:
            if progress["running"] and not call.json:
                say(f"draining: {progress['running']} turn(s) run, {progress['left_ms'] // 1000} s left")
            progress = call.ask("drain_status", wait_ms=DRAIN_WAIT_S * 1000)
    except Unreachable as error:
        raise Failure(
            "drain_cut_short",
            "the daemon stopped before the drain was over, as by a signal; running turns were handed back or are"
            " still leased: `covenant a2a status` shows them after the next start",
        ) from error
    return progress
