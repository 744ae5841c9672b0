"""`covenant identities`, `capabilities` and `audit`: who holds a token, who may do what, and who did or was refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, Final

import click

from covenant.cli.daemon_client import Invocation, complete_identities, daemon_command, purge_command, write_lines
from covenant.cli.options import (
    CommandGroup,
    certificate_option,
    combined,
    file_argument,
    follow_option,
    limit_option,
    replace_option,
)
from covenant.cli.terminal import ExitCode, Failure, ago, brief, clock_time, distance, put, say

PREFIXES: Final = ("a2a.send.", "a2a.recv.", "a2a.respond.")
MATCHES_MAX: Final = 16
PUBKEY_LENGTH_MIN: Final = 43
"""The shortest base58 of 32 bytes that are not mostly zeros: a text of this length is a key, not the start of one."""
AUDIT_VERIFY_S: Final = 3_600.0
AUDIT_FOLLOW_MS: Final = 10_000
AUDIT_ROWS_MAX: Final = 1_000

identities: Final = CommandGroup("identities", help="Identities: the holders of tokens.", no_args_is_help=True)
capabilities: Final = CommandGroup(
    "capabilities", help="Capabilities: grants of actions to identities.", no_args_is_help=True
)
audit: Final = CommandGroup(
    "audit", help="The audit: admitted and refused callers, grants and repairs.", no_args_is_help=True
)


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
    """Enroll an identity and print its token. The token is shown once, and stored nowhere.

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
    columns, rows = ("who", "pubkey", "token", "enrolled", "state"), (_identity_row(each, operator) for each in found)
    call.show_table(listed, columns, rows, empty="no matching identities")
    if answer["truncated"] and not call.json:
        say("there are more; raise --limit or narrow with --prefix")


@daemon_command(identities, "revoke", "identity_revoked", "display", "pubkey_b58", "token_prefix", "revoked_at")
@click.argument("which", shell_complete=complete_identities)
@click.option("--force", is_flag=True, help="Revoke the operator's own token, too. The next start makes a new one.")
def revoke_identity(call: Invocation, *, which: str, force: bool) -> None:
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


def _identity_row(identity: dict[str, Any], operator: str) -> tuple[str, ...]:
    who, revoked_at = identity["agent_id"], identity["revoked_at"]
    name = who["display"] + (" (self)" if who["pubkey"] == operator else "")
    style, state = ("", "live") if revoked_at is None else ("dim", f"revoked {ago(revoked_at)}")
    return style, name, who["pubkey"], f"{identity['token_prefix']}…", ago(identity["registered_at"]), state


@daemon_command(capabilities, "recent", "capability_list", "limit", "capabilities")
@limit_option(10)
def recent_capabilities(call: Invocation, *, limit: int) -> None:
    """List the newest grants of the caller. The operator sees all grants."""
    grants = call.ask("recent_capabilities", limit=limit)["capabilities"]
    columns = ("who", "may", "granted", "state", "scope", "signature")
    empty = "nothing is granted; grant with `covenant capabilities grant ACTION --to NAME@HOST`"
    call.show_table({"limit": limit, "capabilities": grants}, columns, map(_grant_row, grants), empty=empty)


def _grant_row(grant: dict[str, Any]) -> tuple[str, ...]:
    style, state = "" if grant["effective"] == "live" else "dim", grant["effective"]
    if state == "live" and grant["expires_at"] is not None:
        state = f"ends {distance(grant['expires_at'])}"
    scope = brief(str(grant["scope"])) if grant["scope"] else ""
    who, may = grant["subject"]["display"], grant["action"]
    return style, who, may, ago(grant["granted_at"]), state, scope, grant["signature_b58"]


@daemon_command(
    capabilities, "grant", "capability_granted", "subject_display", "action", "signature_b58", "scope", "expires_at"
)
@click.argument("action")
@click.option("--to", metavar="NAME@HOST", help="The identity that gets the capability. Default: the operator.")
@click.option("--scope", metavar="JSON", help='What the grant is limited to, such as {"task_id": "…", "max_uses": 1}.')
@click.option("--expires-at", type=click.IntRange(min=1), metavar="MS", help="Epoch millisecond when the grant ends.")
def grant(call: Invocation, *, action: str, to: str | None, scope: str | None, expires_at: int | None) -> None:
    """Grant ACTION, such as a2a.send.bob@host, a2a.respond.alice@host, a2a.repair.requeue or a2a.compact.

    In a2a.send.…, a2a.recv.… and a2a.respond.… the beginning of an enrolled identity's pubkey is enough.
    """
    pinned = _scope(scope)
    answer = call.ask("grant_capability", action=_expanded(call, action), to=to, scope=pinned, expires_at=expires_at)
    if not call.answer(answer):
        put(f"granted: {answer['subject_display']} → {answer['action']}")
        put(f"signature: {answer['signature_b58']}")


@daemon_command(capabilities, "revoke", "capability_revoked", "signature_b58", "removed")
@click.argument("signature")
def revoke_capability(call: Invocation, *, signature: str) -> None:
    """Revoke the grant with this SIGNATURE, or the beginning of one, as `covenant capabilities recent` shows it.

    It is no error if there is no such grant any more.
    """
    answer = call.ask("revoke_capability", signature_b58=signature)
    found = answer["signature_b58"]
    call.show(answer, f"revoked {found}" if answer["removed"] else f"there is no live grant {found}")


purge_command(
    capabilities,
    "purge_capabilities",
    "capabilities_purged",
    "revoked grant(s)",
    "Forget grants that were revoked long ago.",
)


def _scope(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        scope = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--scope is no JSON: {error}") from error
    if not isinstance(scope, dict):
        raise click.UsageError('--scope must be a JSON object, such as {"max_uses": 1}')
    return scope


def _expanded(call: Invocation, action: str) -> str:
    """The action with a key's start spelled out: a tail without `.` or `@` is no display."""
    for prefix in PREFIXES:
        tail = action.removeprefix(prefix)
        if tail != action and tail and "." not in tail and "@" not in tail and len(tail) < PUBKEY_LENGTH_MIN:
            return prefix + _pubkey(call, tail)
    return action


def _pubkey(call: Invocation, start: str) -> str:
    listed = call.ask("list_identities", prefix=start, limit=1_000)["identities"]
    found = [row for row in listed if row["agent_id"]["pubkey"].startswith(start)]
    live = {row["agent_id"]["pubkey"]: row for row in found if row["revoked_at"] is None}
    if len(live) == 1:
        return str(next(iter(live)))
    if live:
        raise Failure(
            "ambiguous_prefix", f"{start!r} is the start of several keys; write more of it:{_named(live.values())}"
        )
    if found:
        raise Failure("unknown_prefix", f"{start!r} is the start of revoked identities only:{_named(found)}")
    known = call.ask("list_identities", status="live", limit=MATCHES_MAX)["identities"]
    raise Failure("unknown_prefix", f"{start!r} is the start of no enrolled key; these are enrolled:{_named(known)}")


def _named(rows: Iterable[dict[str, Any]]) -> str:
    agents = (row["agent_id"] for row in rows)
    return "".join(f"\n  {agent['pubkey']} {agent['display']}" for agent in islice(agents, MATCHES_MAX))


audit_filters: Final = combined(
    click.option("--before-ms", type=click.IntRange(min=0), help="Only rows before this epoch millisecond."),
    click.option("--since-ms", type=click.IntRange(min=0), help="Only rows from this epoch millisecond on."),
    click.option("--issuer", help="Only rows whose issuer's name begins with this."),
    click.option("--type", "kind", help="Only rows of this kind: for example authentication_failed."),
)


@daemon_command(audit, "recent", "audit_recent", "limit", "since_ms", "events")
@limit_option(50)
@audit_filters
@follow_option("Continue with new rows.")
def recent_audit(call: Invocation, *, limit: int, follow: bool, kind: str | None, **filters: Any) -> None:
    """List the audit rows of the caller, the newest at the end. The operator sees all rows.

    With --json and --follow it prints an object whenever rows were written.
    """
    filters["type"], since_ms = kind, filters["since_ms"]
    pages = list(_audit_pages(call, filters, limit))
    events = [event for page in reversed(pages) for event in page]
    answer = {"limit": limit, "since_ms": since_ms, "events": events}
    call.show_table(answer, ("when", "who", "what", "details"), map(_audit_row, events), empty="no audit rows")
    if follow:
        with suppress(KeyboardInterrupt):
            _follow_audit(call, events, filters)


def _audit_pages(call: Invocation, filters: dict[str, Any], most: int | None) -> Iterator[list[dict[str, Any]]]:
    """Pages of rows, the newest page first, until there are `most` rows or no more.

    With a filter, the daemon looks at a bounded number of rows for one page, so a page may have few.
    """
    found, below = 0, None
    while most is None or found < most:
        limit = AUDIT_ROWS_MAX if most is None else most - found
        page = call.ask("recent_audit", limit=limit, below=below, **filters)
        yield page["events"]
        found, below = found + len(page["events"]), page["next"]
        if below is None:
            return


@daemon_command(audit, "export", "audit_exported", "file", "count")
@file_argument
@audit_filters
@replace_option
def export_audit(call: Invocation, *, file: str | None, replace: bool, kind: str | None, **filters: Any) -> None:
    """Write all audit rows that match the filters to FILE: one JSON object a line, the newest first.

    Without FILE, or with `-`, it writes to standard output. FILE appears when it is complete; only its owner can read
    it.
    """
    pages = _audit_pages(call, filters | {"type": kind}, None)
    newest_first = (event for page in pages for event in reversed(page))
    write_lines(call, file, newest_first, "audit row(s)", replace=replace)


def _follow_audit(call: Invocation, events: list[dict[str, Any]], filters: dict[str, Any]) -> None:
    after = None
    while True:
        if events:
            filters["since_ms"], after = events[-1]["timestamp_ms"], events[-1]["id"]
        events = call.ask_through_restarts(
            "recent_audit", AUDIT_FOLLOW_MS, limit=AUDIT_ROWS_MAX, after=after, **filters
        )["events"]
        if not events or call.answer({"limit": AUDIT_ROWS_MAX, "since_ms": filters["since_ms"], "events": events}):
            continue
        for event in events:
            _, _, *cells = _audit_row(event)
            put(" ".join((clock_time(event["timestamp_ms"]), *cells)))


@daemon_command(audit, "verify", "audit_integrity", "report")
def verify_audit(call: Invocation) -> None:
    """Check every audit row against the hash chain. Exits with 1 if one was changed, moved or is missing."""
    report = call.ask("verify_audit_integrity", within_s=AUDIT_VERIFY_S)["report"]
    if not call.answer({"report": report}):
        put(f"{'valid' if report['valid'] else 'INVALID'}: {report['events']} row(s), root {report['root_hash_hex']}")
        for failure in report["failures"]:
            say(failure)
    if not report["valid"]:
        raise click.exceptions.Exit(ExitCode.REFUSED)


purge_command(
    audit,
    "purge_audit",
    "audit_purged",
    "audit row(s)",
    "Drop old audit rows. A marker row says how many, and where the chain is anchored now.",
)


def _audit_row(event: dict[str, Any]) -> tuple[str, ...]:
    kind, who = event["kind"], event["issuer"]["display"]
    style = "red" if _is_refusal(kind) else ""
    return style, ago(event["timestamp_ms"]), who, kind["type"].replace("_", " "), brief(_audit_details(kind), 100)


def _audit_details(kind: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in kind.items() if name != "type" and value not in (None, [], {}))


def _is_refusal(kind: dict[str, Any]) -> bool:
    return kind.get("passed") is False or kind["type"].endswith(("_rejected", "_failed", "_mismatch", "_required"))
