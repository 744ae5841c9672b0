"""`covenant identities`: who holds a token."""

from __future__ import annotations

from typing import Any, Final

import click

from covenant.cli.daemon_client import Invocation, complete_identities, daemon_command, purge_command
from covenant.cli.options import CommandGroup, certificate_option, limit_option
from covenant.cli.terminal import ago, print_table, say

identities: Final = CommandGroup("identities", help="Identities: the holders of tokens.", no_args_is_help=True)


@daemon_command(identities, "enroll", "identity_enrolled", "display", "pubkey_b58", "token_b58", "granted")
@click.argument("display", metavar="NAME@HOST")
@click.option(
    "--grant",
    "actions",
    multiple=True,
    metavar="ACTION",
    help="Grant this action to the identity as well. May be repeated.",
)
@click.option("--pubkey", metavar="B58", help="The identity's Ed25519 public key. Default: a new key.")
@certificate_option("the identity")
def enroll(
    call: Invocation, *, display: str, actions: tuple[str, ...], pubkey: str | None, certificate: str | None
) -> None:
    """Enrol an identity and print its token. The token is shown once, and stored nowhere.

    Put it where the agent finds it, in a file that only its owner can read:

    \b
        (umask 077; covenant identities enroll bob@host --grant a2a.respond.alice@host > bob.token)
    """
    answer = call.ask("enroll_identity", display=display, actions=list(actions), pubkey=pubkey, certificate=certificate)
    granted = [grant["action"] if isinstance(grant, dict) else grant for grant in answer["granted"]]
    call.show(
        answer,
        answer["token_b58"] or f"x509 {certificate}",
        f"enrolled {answer['display']} with pubkey {answer['pubkey_b58']}",
        *(f"granted {action}" for action in granted),
    )


@daemon_command(
    identities,
    "list",
    "identity_list",
    "limit",
    "filter_pubkey_prefix",
    "matched_count",
    "identities",
    "operator_pubkey_b58",
    "truncated",
)
@limit_option(20)
@click.option("--prefix", metavar="TEXT", help="Only identities whose name, pubkey or token starts with this.")
@click.option("--live-only", is_flag=True, help="Only identities that may call.")
@click.option("--revoked-only", is_flag=True, help="Only identities that were revoked.")
def list_identities(call: Invocation, *, limit: int, prefix: str | None, live_only: bool, revoked_only: bool) -> None:
    """List identities, newest first."""
    if live_only and revoked_only:
        raise click.UsageError("--live-only and --revoked-only exclude each other; give one of them")
    status = "live" if live_only else "revoked" if revoked_only else None
    answer = call.ask("list_identities", limit=limit, prefix=prefix, status=status)
    found, operator = answer["identities"], answer["operator_pubkey_b58"]
    listed = {
        "limit": limit,
        "filter_pubkey_prefix": prefix,
        "matched_count": len(found),
        "identities": found,
        "operator_pubkey_b58": operator,
        "truncated": answer["truncated"],
    }
    if call.answer(listed):
        return
    if not found:
        say("no matching identities")
        return
    print_table(("who", "pubkey", "token", "enrolled", "state"), (_row(each, operator) for each in found))
    if answer["truncated"]:
        say("there are more; raise --limit or narrow with --prefix")


@daemon_command(identities, "revoke", "identity_revoked", "display", "pubkey_b58", "token_prefix", "revoked_at")
@click.argument("which", shell_complete=complete_identities)
@click.option("--force", is_flag=True, help="Revoke the operator's own token, too. The next start makes a new one.")
def revoke(call: Invocation, *, which: str, force: bool) -> None:
    """Revoke the token of WHICH: name@host, a pubkey, or the start of either or of a token. Ends its connections."""
    answer = call.ask("revoke_identity", identity=which, force=force)
    call.show(answer, f"revoked {answer['display']} ({answer['token_prefix']}…)")


@daemon_command(identities, "rotate", "identity_token_rotated", "display", "token_b58")
@click.argument("which", required=False, shell_complete=complete_identities)
def rotate(call: Invocation, *, which: str | None) -> None:
    """Give WHICH a new token, and end the old one. Default: the operator's own, which is saved in the home."""
    answer = call.ask("rotate_token", identity=which)
    display, token = answer["display"], answer["token_b58"]
    call.show(
        {"display": display, "token_b58": token},
        token,
        f"this is the token of {display} now; the old one is refused from here on",
    )


purge_command(
    identities,
    "purge_identities",
    "identities_purged",
    "revoked token(s)",
    "Forget identities whose token was revoked long ago.",
)


def _row(identity: dict[str, Any], operator: str) -> tuple[str, ...]:
    who, revoked_at = identity["agent_id"], identity["revoked_at"]
    name = who["display"] + (" (self)" if who["pubkey"] == operator else "")
    style, state = ("", "live") if revoked_at is None else ("dim", f"revoked {ago(revoked_at)}")
    return style, name, who["pubkey"], f"{identity['token_prefix']}…", ago(identity["registered_at"]), state
