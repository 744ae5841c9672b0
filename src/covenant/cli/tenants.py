"""`covenant tenants`: whose agents and tasks are whose, and how much each tenant may ask for."""

from __future__ import annotations

from typing import Any, Final

import click

from covenant.cli.options import CommandGroup, Function, Invocation, certificate_option, daemon_command
from covenant.cli.terminal import ago, print_table
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

tenants: Final = CommandGroup(
    "tenants", help="Tenants: separate callers, each with its agents and tasks.", no_args_is_help=True
)


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
    """Add a tenant and print its token. The token is told once, and stored nowhere.

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
    """List tenants, the oldest first."""
    answer = call.ask("list_tenants")
    if call.answer(answer):
        return
    print_table(("tenant", "token", "agents", "limits", "added", "state"), map(_row, answer["tenants"]))


@daemon_command(tenants, "limit", "tenant_changed", "tenant")
@click.argument("name")
@limit_options
def limit(call: Invocation, *, name: str, **limits: int) -> None:
    """Change all limits of a tenant at once. A limit that is not given is the daemon's default again."""
    answer = call.ask("change_tenant", name=name, limits=limits)
    call.show(answer, f"{answer['tenant']['name']}: {_limits(answer['tenant'])}")


@daemon_command(tenants, "disable", "tenant_changed", "tenant")
@click.argument("name")
def disable(call: Invocation, *, name: str) -> None:
    """Refuse a tenant's token from now on. Ends its open streams at once; its tasks go on."""
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
    said = f"this is the {what} of {answer['tenant']['name']} now; the old one is refused from here on"
    call.show(answer, answer["token"] or f"x509 {certificate}", said)


def _row(tenant: dict[str, Any]) -> tuple[str, ...]:
    token = f"{tenant['token_prefix']}…" if tenant["token_prefix"] else "none yet"
    style, state = ("dim", f"disabled {ago(tenant['disabled_at_ms'])}") if tenant["disabled"] else ("", "live")
    return style, tenant["name"], token, str(tenant["agents"]), _limits(tenant), ago(tenant["created_at_ms"]), state


def _limits(tenant: dict[str, Any]) -> str:
    limits = tenant["limits"]
    said = [f"{limits[name]} {unit}" for name, (_, unit) in LIMITS.items() if limits.get(name)]
    return ", ".join(said) or "the daemon's"
