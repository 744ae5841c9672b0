"""`covenant ledger`: the daemons that share a ledger, and the database that it is in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import click

from covenant.cli.daemon_client import Invocation, daemon_command
from covenant.cli.options import CommandGroup, Function, given_before, home_option, local_command
from covenant.cli.terminal import Failure, Output, ago, print_table, say
from covenant.daemon.environment import PASSPHRASE_VARIABLE, environment
from covenant.daemon.settings import Settings
from covenant.daemon.settings_loader import load
from covenant.model.errors import CovenantError

T = TypeVar("T")

ledger: Final = CommandGroup(
    "ledger", help="The ledger: the daemons that share it, and its database.", no_args_is_help=True
)
url_option: Final[Callable[[Function], Function]] = click.option(
    "--ledger", "url", metavar="URL", help="The database. Default: the setting ledger.url."
)


@daemon_command(ledger, "nodes", "node_list", "nodes")
def nodes(call: Invocation) -> None:
    """List the daemons that serve this ledger: one, unless it is on PostgreSQL."""
    answer = call.ask("list_nodes")
    if not call.answer(answer):
        print_table(("node", "state", "started", "seen", "leases", "boot"), map(_row, answer["nodes"]))


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    style, state = ("", "alive") if node["alive"] else ("", "left") if node["left"] else ("red", "lost")
    times = (ago(node["started_at_ms"]), ago(node["seen_at_ms"]))
    return style, node["node"], state, *times, str(node["leases"]), node["boot"][:8]


@local_command(ledger, "init", "ledger_init", "home", "level", "shared")
@url_option
@home_option("The home of the first daemon.")
def init(output: Output, *, url: str | None, home: str | None) -> None:
    """Prepare an empty database for several daemons, without serving: its tables, and the instance's key and operator.

    The key and the operator's token are made in the home. With COVENANT_PASSPHRASE they are also left in the database,
    locked with it: a daemon with an empty home and the same passphrase takes them from there. Without a passphrase,
    copy identity/local.key and operator.token into the home of each daemon. Does nothing if the database is prepared
    already.
    """
    settings = _settings(url, home)
    level, is_shared = _run(lambda: _init(settings))
    share = f"daemons with an empty home and the same {PASSPHRASE_VARIABLE} take key and token from the database"
    copy = f"copy identity/local.key and operator.token from {settings.home} into the home of each other daemon"
    answer = {"home": str(settings.home), "level": level, "shared": is_shared}
    output.show(answer, f"the database is ready, at level {level}", share if is_shared else copy)


async def _init(settings: Settings) -> tuple[int, bool]:
    from covenant.daemon.keystore import find_passphrase
    from covenant.daemon.telemetry import Log
    from covenant.daemon.wiring.postgres_storage import import_postgres, node_name
    from covenant.daemon.wiring.storage import open_storage

    level: int = import_postgres("migrations").LEVEL
    async with open_storage(settings, Log()):
        pass
    await _admin().forget_node(settings.ledger.url, node_name(settings))
    return level, find_passphrase(environment()) is not None


@local_command(ledger, "migrate", "ledger_migrated", "before", "level")
@url_option
@home_option("The home whose settings name the database.")
def migrate(output: Output, *, url: str | None, home: str | None) -> None:
    """Raise the database's schema to the level of this version. A daemon does the same when it starts."""
    settings = _settings(url, home)
    before, level = _run(lambda: _admin().migrate_database(settings.ledger.url))
    change = "" if before == level else f"; it was at {before}"
    output.show({"before": before, "level": level}, f"the schema is at level {level}{change}")


@local_command(ledger, "restored", "ledger_restored", "fenced")
@url_option
@home_option("The home whose settings name the database.")
def restored(output: Output, *, url: str | None, home: str | None) -> None:
    """Declare that the database was restored, or that a standby without the last commits took over.

    All running daemons are fenced, because their state may be newer than the database. They start again from the state
    of the database. Writes that were acknowledged after that moment are lost: work that was done since may be done
    again.
    """
    from covenant.daemon.wiring.postgres_storage import mark_restored

    settings = _settings(url, home)
    fenced = _run(lambda: mark_restored(settings))
    output.show({"fenced": fenced}, f"{fenced} run(s) of daemons are fenced; those that still run start again")


@local_command(ledger, "move", "ledger_moved", "direction", "home", "moved")
@click.option("--out", is_flag=True, help="Move from the database into the home instead.")
@url_option
@home_option("The home that the ledger is in, or comes to.")
def move(output: Output, *, out: bool, url: str | None, home: str | None) -> None:
    """Move the ledger of a home into an empty database, or out of a database into a home.

    Everything is moved: tasks with their history, results, tenants, tokens, grants, agents, push configurations, peers,
    files and the audit. No daemon may run meanwhile. The command reads the copy back and compares it before it reports
    success. The source stays as it is, marked so that no daemon serves it. If a move was interrupted, run the same
    command again to finish it.
    """
    from covenant.daemon.wiring.postgres_storage import move_ledger

    settings = _settings(url, home)
    moved: Mapping[str, Any] = _run(lambda: move_ledger(settings, out=out))
    rows = [{"what": kind, "count": each.count, "digest": each.digest} for kind, each in moved.items()]
    if output.answer({"direction": "out" if out else "in", "home": str(settings.home), "moved": rows}):
        return
    print_table(("what", "count", "digest"), [("", kind, str(m.count), m.digest[:16]) for kind, m in moved.items()])
    if out:
        say(f"the ledger is in {settings.home}; remove ledger.url from its settings, and start the daemon there")
    else:
        say(f"the ledger is in the database; {settings.home} keeps the old files, and serves them no more")


def _admin() -> Any:
    from covenant.daemon.wiring.postgres_storage import import_postgres

    return import_postgres("database_admin")


def _settings(url: str | None, home: str | None) -> Settings:
    try:
        settings = load({"ledger.url": url}, environment(), home=given_before("home", home)).settings
    except CovenantError as error:
        raise Failure("bad_setting", str(error)) from error
    if not settings.ledger.url:
        raise Failure("no_database", "no database is named: give --ledger postgres://…, or the setting ledger.url")
    return settings


def _run(doing: Callable[[], Awaitable[T]]) -> T:
    async def run() -> T:
        return await doing()

    try:
        return asyncio.run(run())
    except CovenantError as error:
        raise Failure("ledger_unusable", str(error)) from error
