"""`covenant peers`: other instances, and delegations to and from them."""

from __future__ import annotations

import json
from typing import Any, Final

import click

from covenant.cli import peer_reports
from covenant.cli.daemon_client import ANSWER_S, Answer, Invocation, daemon_command
from covenant.cli.identity_rotation import revocation, rotate_identity
from covenant.cli.options import CommandGroup, limit_option
from covenant.cli.proof_verification import verify_proof
from covenant.cli.terminal import ExitCode, Failure, ago, brief, print_table, put, say

ELSEWHERE: Final = "⇄"
GOES_ON: Final = ("offered", "accepted", "running", "cancelling", "lost")
STYLES: Final = {
    "completed": "green",
    "failed": "red",
    "rejected": "red",
    "timeout": "red",
    "lost": "bold red",
    "cancelled": "dim",
}
STATUSES: Final = ("pending", "running", "completed", "failed", "cancelled", "timeout", "lost")
ENDED: Final = frozenset({"completed", "failed", "cancelled", "timeout"})
WAIT_MS: Final = 10_000

WIRE_NAMES: Final = {
    "offers_per_min": "offersPerMin",
    "concurrent": "concurrent",
    "budget_max": "budgetMax",
    "offers_per_day": "offersPerDay",
    "tokens_per_day": "tokensPerDay",
}

peers: Final = CommandGroup(
    "peers", help="Peers: other instances, and delegations to and from them.", no_args_is_help=True
)

peer_argument: Final = click.argument("peer")
delegation_argument: Final = click.argument("delegation")


@daemon_command(peers, "list", "peers", "peers", "total", "id", "name")
@click.option("--trust", type=click.Choice(["peer", "verified", "trusted"]), help="Only peers with this trust.")
@limit_option(100, 100)
def list_peers(call: Invocation, *, trust: str | None, limit: int) -> None:
    """List the peers of this instance, and its own id and name."""
    answer = call.ask("list_peers", trustLevel=trust, limit=limit)
    if call.answer(answer):
        return
    say(f"this is {answer['name']}, {answer['id']}")
    if not answer["peers"]:
        say("no peers; add one with: covenant peers add https://HOST")
        return
    print_table(("name", "trust", "status", "heard", "where", "id", ""), map(_peer_row, answer["peers"]))


@daemon_command(peers, "add", "peer", "peer", "note?")
@click.argument("url", required=False)
@click.option("--name", metavar="NAME", help="The peer's name here. Default: the name that it gives itself.")
@click.option(
    "--id", "peer_id", metavar="ID", help="The peer's id, if you know it: the instance at the URL must prove it."
)
@click.option("--tenant", metavar="TENANT", help="The tenant that the peer is for. Default: default.")
def add(call: Invocation, *, url: str | None, name: str | None, peer_id: str | None, tenant: str | None) -> None:
    """Add another instance as a peer, by its URL; or by --id and --name, if it has no address and polls.

    The daemon asks it for its keys and challenges it to prove them. Both sides must add each other before they can
    delegate.

    \b
        covenant peers add https://lab.example.com --name lab
    """
    answer = call.ask("add_peer", url=url, id=peer_id, name=name, tenant=tenant)
    call.show(answer, _peer_line(answer["peer"]), *filter(None, [answer.get("note")]))


@daemon_command(peers, "show", "peer", "peer")
@peer_argument
def show(call: Invocation, *, peer: str) -> None:
    """Show a peer: by its name, its id, or the beginning of its id."""
    answer = call.ask("show_peer", peerId=peer)
    if call.answer(answer):
        return
    found = answer["peer"]
    put(_peer_line(found))
    put(f"heard {ago(found['lastSeen'])}, verified {ago(found['verifiedAtMs'])}")
    for profile in found["capabilities"]:
        put(f"  {profile['name']}  {profile['maxTokenBudget']} tokens  {profile.get('description', '')}")
    if troubles := _warnings(found):
        put(troubles)


@daemon_command(peers, "remove", "peer_removed", "id", "name")
@peer_argument
def remove(call: Invocation, *, peer: str) -> None:
    """Remove a peer. Its messages are refused from then on, and waiting messages to it are dropped."""
    answer = call.ask("remove_peer", peerId=peer)
    call.show(answer, f"removed {answer['name']}, {answer['id']}")


@daemon_command(peers, "trust", "peer", "peer")
@peer_argument
@click.argument("level", type=click.Choice(["peer", "verified", "trusted"]), default="trusted")
def trust(call: Invocation, *, peer: str, level: str) -> None:
    """Set the trust level of a peer.

    A `peer` may ask for the agents of this instance. A `verified` peer has proved its key, and may delegate within
    limits. A `trusted` peer may do so ten times as often. Only an operator makes a peer `trusted`.
    """
    _show_peer(call, call.ask("trust_peer", peerId=peer, trustLevel=level))


@daemon_command(peers, "change", "peer", "peer")
@peer_argument
@click.option("--name", metavar="NAME", help="A new name for the peer.")
@click.option("--url", metavar="URL", help="A new address of the peer; empty if the peer can no longer be called.")
@click.option("--offers-per-min", type=click.IntRange(0, 1_000_000), help="Most offers from the peer in a minute.")
@click.option("--concurrent", type=click.IntRange(0, 1_000_000), help="Most delegations from the peer at work at once.")
@click.option("--budget-max", type=click.IntRange(0, 1_000_000), help="Most tokens of one delegation from the peer.")
@click.option("--offers-per-day", type=click.IntRange(0), help="Most offers of the peer that are accepted in a day.")
@click.option("--tokens-per-day", type=click.IntRange(0), help="Most tokens that its delegations use in a day.")
def change(call: Invocation, *, peer: str, name: str | None, url: str | None, **limits: int | None) -> None:
    """Rename a peer, change its address, or limit its use of this instance.

    A limit that is not given stays as it is.

    \b
        covenant peers change lab --name laboratory --concurrent 2
    """
    if name is None and url is None and all(each is None for each in limits.values()):
        raise click.UsageError("nothing to change is named; give --name, --url or a limit")
    asked: dict[str, Any] = {"peerId": peer, "name": name, "url": url}
    if any(each is not None for each in limits.values()):
        known = call.ask("show_peer", peerId=peer)["peer"]["limits"]
        given = {WIRE_NAMES[option]: limit for option, limit in limits.items() if limit is not None}
        asked["limits"] = {**known, **given}
    _show_peer(call, call.ask("change_peer", **asked))


def _add_peer_command(name: str, ask: str, meaning: str, **change: bool) -> None:
    @daemon_command(peers, name, "peer", "peer")
    @peer_argument
    def run(call: Invocation, *, peer: str) -> None:
        _show_peer(call, call.ask(ask, peerId=peer, **change))

    peers.commands[name].help = meaning


_add_peer_command(
    "verify", "verify_peer", "Challenge a peer to prove its key. A peer that has proved it is `verified`."
)
_add_peer_command("deny", "change_peer", "Refuse everything from a peer, and keep its record.", denied=True)
_add_peer_command("allow", "change_peer", "Accept messages from a denied peer again.", denied=False)


@daemon_command(peers, "accept-identity", "peer", "peer")
@peer_argument
@click.argument("new_id")
def accept_identity(call: Invocation, *, peer: str, new_id: str) -> None:
    """Give a peer a new id on the operator's authority, if its old key has not signed the change.

    The peer keeps its name and its delegations, and is unverified until it answers a challenge. Compare the id with its
    operator first, over another channel than this network.
    """
    _show_peer(call, call.ask("succeed_peer", peerId=peer, newId=new_id))


peers.add_command(rotate_identity)


@daemon_command(peers, "rotate-keys", "purpose_keys_rotated", "id", "keys", "compromised")
@click.option("--compromised", is_flag=True, help="A key may be stolen: signatures of the old keys are void.")
def rotate_keys(call: Invocation, *, compromised: bool) -> None:
    """Make new keys for envelopes, proofs and tokens, certified by the identity key. Work continues.

    The daemon does so by itself each month. With --compromised, peers refuse envelopes under the old keys as soon as
    they are told, and old tokens are void; peers get new ones by themselves.
    """
    answer = call.ask("rotate_purpose_keys", compromised=compromised or None)
    call.show(answer, "\n".join(f"{each['purpose']}  {each['key']}" for each in answer["keys"]))


peers.add_command(revocation)


@daemon_command(peers, "revoke-tokens", "peer_tokens_revoked", "id", "revoked")
@peer_argument
def revoke_tokens(call: Invocation, *, peer: str) -> None:
    """Revoke every token that a peer was given. Its running delegations continue."""
    answer = call.ask("revoke_peer_tokens", peerId=peer)
    call.show(answer, f"revoked {answer['revoked']} tokens of {answer['id']}")


@daemon_command(peers, "discover", "peers_discovered", "discovered", "ways")
@click.option("--wait-ms", type=click.IntRange(0, 30_000), default=5_000, show_default=True, help="How long to look.")
def discover(call: Invocation, *, wait_ms: int) -> None:
    """Look for other instances. The command lists candidates: `covenant peers add` makes one a peer."""
    answer = call.ask("discover_peers", timeoutMs=wait_ms, within_s=wait_ms / 1000 + 30)
    if call.answer(answer):
        return
    for way in answer["ways"]:
        for failure in way.get("failures") or ():
            say(f"{way['source']}: {failure}")
    if not any(way["on"] for way in answer["ways"]):
        say("no discovery is switched on; set static, mdns or dns_domains under [peers] (docs/settings.md)")
    if not answer["discovered"]:
        say("no instance was found")
        return
    print_table(("found by", "name", "where", "id", ""), map(_candidate_row, answer["discovered"]))


@daemon_command(peers, "capabilities", "peer_capabilities", "peer", "capabilities")
@click.argument("peer", required=False)
@click.option("--fresh", is_flag=True, help="Ask the peer now, even if a recent answer is cached.")
def capabilities(call: Invocation, *, peer: str | None, fresh: bool) -> None:
    """Show what a peer offers and how busy it is; without a peer, what this instance offers."""
    answer = call.ask("peer_capabilities", peerId=peer, fresh=fresh or None)
    if call.answer(answer):
        return
    found = answer["capabilities"]
    rows = (
        ("", brief(each["name"], 64), str(each["maxTokenBudget"]), brief(each.get("description", ""), 80))
        for each in found["profiles"]
    )
    print_table(("profile", "tokens", "description"), rows)
    put(f"{found['activeDelegations']} at work, {found['freeSlots']} slots free; said {ago(found['issuedAtMs'])}")
    if peer:
        put(f"the peer takes us for {found['trustLevel']}")


@daemon_command(peers, "delegate", "delegation", "delegation", "result?", "error?")
@click.argument("profile")
@click.argument("task")
@click.option(
    "--peer", metavar="PEER", help="The peer that does the task. Default: a local agent if there is one, else any peer."
)
@click.option("--context", metavar="TEXT", help="Further text that the agent needs to know.")
@click.option("--budget", type=click.IntRange(1, 500_000), metavar="TOKENS", help="Most tokens that the task may use.")
@click.option("--timeout-ms", type=click.IntRange(1, 600_000), help="Longest time for the work.")
@click.option("--no-wait", is_flag=True, help="Return as soon as the task is accepted here.")
def delegate(
    call: Invocation,
    *,
    profile: str,
    task: str,
    peer: str | None,
    context: str | None,
    budget: int | None,
    timeout_ms: int | None,
    no_wait: bool,
) -> None:
    """Delegate a task to an agent of a peer, by the agent's name, and wait for its result.

    With --no-wait, or if an agent of this instance does it, --json answers with the kind `delegated` and the task id.

    Ctrl-C stops the waiting, not the work: `covenant peers delegations` shows it, `covenant peers cancel` ends it.

    \b
        covenant peers delegate researcher "What changed in RFC 9180?" --peer lab
    """
    begun = call.ask(
        "delegate", profile=profile, task=task, peerId=peer, context=context, maxTokenBudget=budget, timeout=timeout_ms
    )
    delegation_id = begun["delegationId"]
    if no_wait or not begun["remote"]:
        if not call.answer(begun, kind="delegated"):
            put(delegation_id)
            if not begun["remote"]:
                say(f"an agent of this daemon does the work; see: {call.again} a2a show {delegation_id}")
        return
    try:
        answer = _ended(call, delegation_id)
    except KeyboardInterrupt:
        raise Failure(
            "interrupted", f"the delegation goes on; end it with: {call.again} peers cancel {delegation_id}"
        ) from None
    _show_outcome(call, answer)


@daemon_command(peers, "delegations", "delegations", "delegations", "total")
@click.argument("delegation", required=False)
@click.option("--peer", metavar="PEER", help="Only delegations with this peer.")
@click.option("--status", type=click.Choice(STATUSES), help="Only delegations with this status.")
@click.option(
    "--role",
    type=click.Choice(["requester", "provider"]),
    help="Only delegations that this instance asked for, or works on.",
)
@limit_option(20, 100)
def delegations(
    call: Invocation, *, delegation: str | None, peer: str | None, status: str | None, role: str | None, limit: int
) -> None:
    """List delegations to and from peers, lost ones first; or show one, by the id of its task."""
    if delegation is not None:
        _show_delegation(call, delegation)
        return
    answer = call.ask("list_delegations", peerId=peer, status=status, role=role, limit=limit)
    if call.answer(answer):
        return
    columns = ("state", "task", "with", "profile", "tokens", "moved", "")
    print_table(columns, map(_delegation_row, answer["delegations"]))
    if any("question" in each for each in answer["delegations"]):
        say(_how_to_answer(call, "ID"))
    if any(each["state"] == "lost" for each in answer["delegations"]):
        say(f"lost ones wait for you: {call.again} peers offer-again ID, or force-error ID --reason WHY")


@daemon_command(peers, "cancel", "delegation", "delegation")
@delegation_argument
@click.option("--reason", default="", help="The reason, for the provider.")
def cancel(call: Invocation, *, delegation: str, reason: str) -> None:
    """Cancel a delegation. The daemon tells the provider as soon as it can, and the provider stops."""
    answer = call.ask("cancel_delegation", delegationId=delegation, reason=reason)
    call.show(answer, _delegation_line(answer["delegation"]))


@daemon_command(peers, "offer-again", "delegation", "delegation")
@delegation_argument
def offer_again(call: Invocation, *, delegation: str) -> None:
    """Offer a lost delegation again, under the same id: a provider that has it does not begin it twice."""
    answer = call.ask("offer_again", delegationId=delegation)
    call.show(answer, _delegation_line(answer["delegation"]))


@daemon_command(peers, "force-error", "delegation", "delegation")
@delegation_argument
@click.option("--reason", required=True, help="The reason, for the audit.")
def force_error(call: Invocation, *, delegation: str, reason: str) -> None:
    """Give up a lost delegation: its task fails with `provider_lost`. A later result of the provider is not used."""
    answer = call.ask("force_delegation", delegationId=delegation, reason=reason)
    call.show(answer, _delegation_line(answer["delegation"]))


@daemon_command(peers, "proof", "delegation_proof", "offer", "result", "transcript", "proof")
@delegation_argument
@click.option("--line", type=click.IntRange(1), metavar="N", help="Show only this line of the conversation.")
def proof(call: Invocation, *, delegation: str, line: int | None) -> None:
    """Write everything that proves a delegation's result, for `covenant peers verify-proof` or for somebody else.

    \b
        covenant peers proof ID > proof.json
    """
    answer = call.ask("delegation_proof", delegationId=delegation)
    if line is not None:
        from covenant.seal.proofs import show_line

        try:
            answer = {**answer, "transcript": None, "line": show_line(answer["transcript"], line - 1)}
        except (IndexError, ValueError):
            raise Failure(
                "no_line", f"this daemon does not have the conversation, or the conversation has no line {line}"
            ) from None
    call.show(answer, json.dumps(answer, ensure_ascii=False, indent=2))


peers.add_command(verify_proof)


def _ended(call: Invocation, delegation_id: str) -> Answer:
    """Waits for the outcome of a delegation, and shows its progress meanwhile."""
    said, since_ms = "", 0
    while True:
        answer = call.ask(
            "show_delegation",
            delegationId=delegation_id,
            waitMs=WAIT_MS,
            sinceMs=since_ms,
            within_s=ANSWER_S + WAIT_MS / 1000,
        )
        found = answer["delegation"]
        line = found["message"] or found["state"]
        if line != said and not call.json:
            say(line)
            said = line
            if "question" in found:
                say(_how_to_answer(call, found["id"]))
        # The local task has the result a moment after the delegation has ended.
        if found["status"] in ENDED and (answer.get("result") is not None or answer.get("error") is not None):
            return answer
        since_ms = max(found["movedAtMs"], found["heardAtMs"])


def _show_outcome(call: Invocation, answer: Answer) -> None:
    found = answer["delegation"]
    if call.answer(answer):
        if found["status"] != "completed":
            raise click.exceptions.Exit(ExitCode.REFUSED)
        return
    if found["status"] != "completed" or answer.get("error"):
        raise Failure(found["code"] or found["status"], answer.get("error") or found["reason"] or found["status"])
    put(answer.get("result") or "")
    say(_delegation_line(found))
    if found["redacted"]:
        say(f"{found['redacted']} secrets were found in what was sent; see: {call.again} a2a show {found['id']}")


def _show_delegation(call: Invocation, delegation: str) -> None:
    answer = call.ask("show_delegation", delegationId=delegation)
    if call.answer(answer, kind="delegation"):
        return
    found = answer["delegation"]
    put(_delegation_line(found))
    put(f"{_spent(found)} tokens, {'proven' if found['proven'] else 'not proven'}")
    if "question" in found:
        put(found["question"])
        say(_how_to_answer(call, found["id"]))
    for line in (found["reason"], answer.get("error"), answer.get("result")):
        if line:
            put(line)


def _show_peer(call: Invocation, answer: Answer) -> None:
    call.show(answer, _peer_line(answer["peer"]))


def _peer_line(peer: dict[str, Any]) -> str:
    where = peer["url"] or "no address; it fetches"
    return f"{peer['name']}  {peer['id']}  {peer['trustLevel']}  {where}"


def _warnings(peer: dict[str, Any]) -> str:
    """Warnings about a delegation."""
    found = ["denied"] if peer["denied"] else []
    if peer["conflict"]:
        found.append(peer["conflict"])
    waiting = peer["waiting"]
    if waiting.get("count"):
        why = f" ({brief(waiting['failure'], 80)})" if waiting.get("failure") else ""
        found.append(f"{waiting['count']} messages wait{why}")
    return ", ".join(found)


def _delegation_line(delegation: dict[str, Any]) -> str:
    way = f"{ELSEWHERE} to" if delegation["role"] == "requester" else "from"
    said = f"{_standing(delegation)} {delegation['id']} {way} {delegation['peer']}/{delegation['profile']}"
    return f"{said} {delegation['code'] or ''}".rstrip()


def _standing(delegation: dict[str, Any]) -> str:
    """The delegation's state; whether it asks; and how its task has ended, if the peer has not sent the result yet."""
    state, status = delegation["state"], delegation["status"]
    is_over = status not in ("pending", "running")
    if "question" in delegation:
        return f"{state} (asks)"
    return f"{status} ({state})" if is_over and state in GOES_ON else state


def _how_to_answer(call: Invocation, delegation_id: str) -> str:
    return f"it waits for an answer: {call.again} a2a answer {delegation_id} TEXT"


def _spent(delegation: dict[str, Any]) -> str:
    used = delegation["tokenUsage"]["total"]
    return f"{used} of {delegation['maxTokenBudget']}" + (" overspent" if delegation["overspent"] else "")


def _peer_row(peer: dict[str, Any]) -> tuple[str, ...]:
    style = "red" if peer["conflict"] else "dim" if peer["denied"] else ""
    where = peer["url"] or "fetches by itself"
    heard, troubles = ago(peer["lastSeen"]), _warnings(peer)
    return style, peer["name"], peer["trustLevel"], peer["status"], heard, where, peer["id"], troubles


def _candidate_row(found: dict[str, Any]) -> tuple[str, ...]:
    wrong = found.get("conflict")
    about = f"{wrong}: {found['detail']}" if wrong else found.get("note") or ""
    name, where = brief(found["name"], 32), brief(found["url"] or found["announcedAs"], 60)
    return "red" if wrong else "", found["source"], name, where, found["instanceId"] or "unknown", brief(about, 80)


def _delegation_row(found: dict[str, Any]) -> tuple[str, ...]:
    style, profile, moved = STYLES.get(found["state"], ""), brief(found["profile"], 64), ago(found["movedAtMs"])
    way = f"{ELSEWHERE} {found['peer']}" if found["role"] == "requester" else f"from {found['peer']}"
    about = brief(found["reason"] or found["message"] or "", 60)
    return style, _standing(found), found["id"], way, profile, _spent(found), moved, about


peers.commands.update(peer_reports.commands.commands)
