"""`covenant tenants`: the tenants, their tokens and their limits."""

from __future__ import annotations

import sys
from typing import Any, Final

import click

from covenant.cli.daemon_client import Invocation, daemon_command
from covenant.cli.options import CommandGroup, Function, certificate_option
from covenant.cli.terminal import Failure, ago, print_table, put, say
from covenant.model.tenants import TenantLimits

LIMITS: Final = {
    "concurrency": ("Most turns worked on at once.", "at once"),
    "rate_per_min": ("Most requests a minute.", "a minute"),
    "burst": ("Most requests at once.", "in a burst"),
    "connections": ("Most requests under way.", "connections"),
    "streams": ("Most open streams.", "streams"),
    "live_tasks": ("Most live tasks.", "live tasks"),
    "queued_bytes": ("Most bytes of live tasks.", "bytes queued"),
    "kept_hours": ("Most hours a finished task is kept.", "hours kept"),
    "kept_bytes": ("Most bytes of finished tasks.", "bytes kept"),
}
"""Each limit: what it means, and its unit in a list."""
USED: Final = {
    "concurrency": "at once",
    "requests": "requests spent",
    "connections": "connections",
    "streams": "streams",
    "live_tasks": "live tasks",
    "queued_bytes": "bytes queued",
    "kept_bytes": "bytes kept",
    "files": "files",
    "file_bytes": "bytes of files",
}
"""What a tenant may use, in the order of a list."""

SEARCH_S: Final = 3_600.0
"""The search reads everything, which takes minutes in a large home."""
WAIT_MS: Final = 20_000

tenants: Final = CommandGroup(
    "tenants", help="Tenants: separate callers, each with its agents and tasks.", no_args_is_help=True
)
REMOVAL: Final = "name done stage tasks digest canceled agents identities grants pushes cached places left problem"


def limit_options(function: Function) -> Function:
    """The limits of a tenant. What is not given is the daemon's own default."""
    for name in reversed(TenantLimits.__struct_fields__):
        count = click.IntRange(0, TenantLimits.most(name))
        otherwise = "a minute's" if name == "burst" else "as the settings say"
        meaning = f"{LIMITS[name][0]} 0: {otherwise}."
        function = click.option(f"--{name.replace('_', '-')}", type=count, default=0, help=meaning)(function)
    return function


@daemon_command(tenants, "add", "tenant_added", "tenant", "token")
@click.argument("name")
@certificate_option("the tenant")
@limit_options
def add(call: Invocation, *, name: str, certificate: str | None, **limits: int) -> None:
    """Add a tenant and print its token. The token is shown once, and stored nowhere.

    \b
        (umask 077; covenant tenants add acme > acme.token)
    """
    answer = call.ask("add_tenant", name=name, limits=limits, certificate=certificate)
    added = answer["tenant"]["name"]
    call.show(
        answer, answer["token"] or f"x509 {certificate}", f"added the tenant {added}; its callers are client@{added}"
    )


@daemon_command(tenants, "list", "tenant_list", "tenants")
def list_tenants(call: Invocation) -> None:
    """List tenants, the oldest first, each with its usage and its limits.

    The list shows the limits that a tenant has of its own, and its other usage. Running turns, requests, connections
    and streams are those of the daemon that answers.
    """
    answer = call.ask("list_tenants")
    columns = ("tenant", "token", "agents", "used of its limits", "added", "state")
    call.show_table(answer, columns, map(_row, answer["tenants"]))


@daemon_command(tenants, "limit", "tenant_changed", "tenant")
@click.argument("name")
@limit_options
def limit(call: Invocation, *, name: str, **limits: int) -> None:
    """Change all limits of a tenant at once. Limits that are not given are reset to the daemon's defaults."""
    answer = call.ask("change_tenant", name=name, limits=limits)
    call.show(answer, f"{answer['tenant']['name']}: {_limits(answer['tenant'])}")


@daemon_command(tenants, "disable", "tenant_changed", "tenant")
@click.argument("name")
def disable(call: Invocation, *, name: str) -> None:
    """Refuse a tenant's token from now on. Its open streams end at once; its tasks continue."""
    answer = call.ask("change_tenant", name=name, disabled=True)
    call.show(answer, f"disabled {answer['tenant']['name']}")


@daemon_command(tenants, "enable", "tenant_changed", "tenant")
@click.argument("name")
def enable(call: Invocation, *, name: str) -> None:
    """Accept a disabled tenant's token again."""
    answer = call.ask("change_tenant", name=name, disabled=False)
    call.show(answer, f"enabled {answer['tenant']['name']}")


@daemon_command(tenants, "rotate", "tenant_rotated", "tenant", "token")
@click.argument("name")
@certificate_option("the tenant")
def rotate(call: Invocation, *, name: str, certificate: str | None) -> None:
    """Give a tenant a new token and print it. The old one is refused from then on, and its open streams end."""
    answer = call.ask("rotate_tenant", name=name, certificate=certificate)
    what = "token" if certificate is None else "certificate"
    message = f"this is the {what} of {answer['tenant']['name']} now; the old one is refused from here on"
    call.show(answer, answer["token"] or f"x509 {certificate}", message)


@daemon_command(tenants, "remove", "tenant_removal", *REMOVAL.split(), "holdings?")
@click.argument("name")
@click.option("--dry-run", is_flag=True, help="Say what would be erased, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--cancel-live", is_flag=True, help="Cancel live tasks. Without it, live tasks make the command fail.")
@click.option("--reason", help="Why, for the audit.")
def remove(call: Invocation, *, name: str, dry_run: bool, yes: bool, cancel_live: bool, reason: str | None) -> None:
    """Erase all data of a tenant, and search every file for what is left of it.

    The command lists the data, asks, and waits until the removal is complete and verified. A removal continues by
    itself once it has begun, even after a restart of the daemon.

    \b
        covenant tenants remove acme --dry-run
        covenant tenants remove acme --reason "contract ended" --cancel-live
    """
    if not dry_run and reason is None:
        raise click.UsageError("the removal needs a reason; give --reason")
    would = call.ask("remove_tenant", within_s=SEARCH_S, name=name) if dry_run or not yes else {}
    if dry_run:
        if not call.answer(would):
            _put_holdings(name, would["holdings"])
        return
    if not yes:
        if call.json or not sys.stdin.isatty():
            raise click.UsageError("a removal cannot be undone; look at it with --dry-run, then give --yes")
        _put_holdings(name, would["holdings"])
        click.confirm(f"Erase all of this? Nothing brings {name} back", abort=True, err=True)
    answer = call.ask("remove_tenant", name=name, dry_run=False, reason=reason, cancel_live=cancel_live)
    stage = ""
    while not answer["done"] and not answer["problem"]:
        if answer["stage"] != stage:
            stage = answer["stage"]
            say(f"{name}: {stage}")
        answer = call.ask_through_restarts("tenant_removal", WAIT_MS, name=name)
    if not call.answer(answer):
        _put_removal(answer)
    if not answer["done"]:
        raise Failure("traces_left", answer["problem"])


@daemon_command(tenants, "traces", "tenant_traces", "name", "places", "left")
@click.argument("name")
def traces(call: Invocation, *, name: str) -> None:
    """Search every file and table for traces of a tenant, existing or removed. Exits with 1 if it finds any."""
    answer = call.ask("tenant_traces", within_s=SEARCH_S, name=name)
    if not call.answer(answer):
        _put_places(answer)
    if answer["left"]:
        raise click.exceptions.Exit(1)


def _put_holdings(name: str, held: dict[str, Any]) -> None:
    live = ", ".join(f"{count} {state}" for state, count in held["live"].items()) or "none"
    put(f"{name} has")
    put(f"  tasks that have not ended: {live}")
    put(f"  finished tasks: {held['finished']}")
    put(f"  stored agents: {held['agents']}; files of agents and their memory: {held['files']}")
    put(f"  identities: {', '.join(held['identities']) or 'none'}; grants: {held['grants']}")
    put(f"  push configurations: {held['pushes']}; cached results: {held['cached']}")


def _put_removal(answer: dict[str, Any]) -> None:
    _put_places(answer)
    if answer["done"]:
        put(f"removed {answer['name']}: {answer['tasks']} tasks, digest {answer['digest']}")
        say("backups and shipped segments made before this still have its data: they are out of reach from here")


def _put_places(answer: dict[str, Any]) -> None:
    rows = [
        (
            "" if each["found"] == each.get("kept", 0) else "red",
            each["place"],
            str(each["found"]),
            str(each.get("kept", 0)),
        )
        for each in answer["places"]
        if each["found"]
    ]
    if rows:
        print_table(("place", "traces", "kept on purpose"), rows)
    put(f"searched {len(answer['places'])} places; {answer['left']} traces are left")


def _row(tenant: dict[str, Any]) -> tuple[str, ...]:
    token = f"{tenant['token_prefix']}…" if tenant["token_prefix"] else "none yet"
    style, state = ("dim", f"disabled {ago(tenant['disabled_at_ms'])}") if tenant["disabled"] else ("", "live")
    return style, tenant["name"], token, str(tenant["agents"]), _used(tenant), ago(tenant["created_at_ms"]), state


def _used(tenant: dict[str, Any]) -> str:
    """Usage, and the tenant's own limits: "3/100 live tasks"; without a limit "3 live tasks"."""
    own, parts = tenant["limits"], []
    for name, unit in USED.items():
        used, most = tenant["use"][name]["used"], tenant["use"][name]["most"]
        limited = own.get(name) or (name == "requests" and (own["rate_per_min"] or own["burst"]))
        if used or limited:
            shown = "?" if used is None else str(used)
            parts.append(f"{shown}/{most} {unit}" if most else f"{shown} {unit}")
    if own["kept_hours"]:
        parts.append(f"{own['kept_hours']} {LIMITS['kept_hours'][1]}")
    return ", ".join(parts) or "nothing"


def _limits(tenant: dict[str, Any]) -> str:
    limits = tenant["limits"]
    parts = [f"{limits[name]} {unit}" for name, (_, unit) in LIMITS.items() if limits.get(name)]
    return ", ".join(parts) or "the daemon's"
