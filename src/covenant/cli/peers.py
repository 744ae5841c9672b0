"""`covenant peers`: other instances."""

from __future__ import annotations

from typing import Any, Final

import click

from covenant.cli.daemon_client import Answer, Invocation, daemon_command
from covenant.cli.delegations import delegations
from covenant.cli.homes import revocation, rotate_identity
from covenant.cli.options import CommandGroup, limit_option
from covenant.cli.terminal import ago, brief, narrow, print_table, put, say
from covenant.model.peers.usage_by_day import COUNTED

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


@daemon_command(peers, "list", "peers", "peers", "total", "id", "name")
@click.option("--trust", type=click.Choice(["peer", "verified", "trusted"]), help="Only peers with this trust.")
@limit_option(100, 100)
def list_peers(call: Invocation, *, trust: str | None, limit: int) -> None:
    """List the peers of this instance, and its own id and name."""
    answer = call.ask("list_peers", trustLevel=trust, limit=limit)
    if not call.json:
        say(f"this is {answer['name']}, {answer['id']}")
    columns = ("name", "trust", "status", "last seen", "where", "id", "")
    empty = "no peers; add one with: covenant peers add https://HOST"
    call.show_table(answer, columns, map(_peer_row, answer["peers"]), empty=empty)


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
    put(f"last seen {ago(found['lastSeen'])}, verified {ago(found['verifiedAtMs'])}")
    for profile in found["capabilities"]:
        name, description = brief(profile["name"], 64), brief(profile.get("description", ""), 500)
        put(f"  {name}  {profile['maxTokenBudget']} tokens  {description}")
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
    request: dict[str, Any] = {"peerId": peer, "name": name, "url": url}
    if any(each is not None for each in limits.values()):
        known = call.ask("show_peer", peerId=peer)["peer"]["limits"]
        given = {WIRE_NAMES[option]: limit for option, limit in limits.items() if limit is not None}
        request["limits"] = {**known, **given}
    _show_peer(call, call.ask("change_peer", **request))


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


peers.commands.update(delegations.commands)


@daemon_command(peers, "messages", "peer_messages", "messages", "total")
@click.option("--peer", metavar="PEER", help="Only messages to and from this peer.")
@click.option("--type", "typ", metavar="TYPE", help="Only messages of this type, such as delegation_offer.")
@limit_option(20, 100)
def messages(call: Invocation, *, peer: str | None, typ: str | None, limit: int) -> None:
    """List the latest messages to and from peers, the newest first. Their contents are sealed, and not shown."""
    answer = call.ask("list_peer_messages", peerId=peer, type=typ, limit=limit)
    rows = (
        ("", ago(each["atMs"]), each["direction"], each["type"], each["peer"], each.get("offerId", ""))
        for each in answer["messages"]
    )
    call.show_table(answer, ("when", "", "type", "peer", "of"), rows)


@daemon_command(peers, "config", "peer_config", "id", "name", "config")
def config(call: Invocation) -> None:
    """Show the settings of peers in force, and the id and name of this instance."""
    answer = call.ask("peer_config")
    if call.answer(answer):
        return
    put(f"{answer['name']}  {answer['id']}")
    for name, value in answer["config"].items():
        put(f"{name} = {value}")


@daemon_command(peers, "usage", "peer_usage", "usage", "total", "quotas")
@click.argument("peer", required=False)
@click.option("--profile", metavar="PROFILE", help="Only usage of this profile.")
@click.option(
    "--role",
    type=click.Choice(["requester", "provider"]),
    help="Only delegations that this instance asked for, or worked on.",
)
@click.option(
    "--days", type=click.IntRange(1, 92), default=7, show_default=True, help="Number of days, today included."
)
@limit_option(100, 1000)
def usage(call: Invocation, *, peer: str | None, profile: str | None, role: str | None, days: int, limit: int) -> None:
    """Show how much peers used this instance (provider), and this instance its peers (requester), by profile and day.

    Days are in UTC. An offer counts on the day it was made, its outcome and its tokens on the day it ended.

    \b
        covenant peers usage lab --days 30
    """
    answer = call.ask("peer_usage", peerId=peer, profile=profile, role=role, days=days, limit=limit)
    if call.answer(answer):
        return
    columns, rows = ("day", "as", "peer", "profile"), map(_usage_row, answer["usage"])
    if answer["usage"]:
        print_table((*columns, "counts") if narrow() else (*columns, *COUNTED), rows)
    else:
        say("nothing was delegated on these days")
    for quota in answer["quotas"]:
        parts = [
            f"{quota[used]} of {quota[most]} {what}"
            for used, most, what in (
                ("acceptedToday", "offersPerDay", "offers"),
                ("tokensToday", "tokensPerDay", "tokens"),
            )
            if quota.get(most) is not None
        ]
        put(f"{quota['peer']} has had {' and '.join(parts)} today")


def _usage_row(each: dict[str, Any]) -> tuple[str, ...]:
    """In a narrow terminal, one cell has the counts that are not zero."""
    about = (each["day"], each["role"], *(brief(each[name] or "-", 64) for name in ("peer", "profile")))
    if narrow():
        return "", *about, ", ".join(f"{each[name]} {name}" for name in COUNTED if each[name])
    return "", *about, *(str(each[name]) for name in COUNTED)


def _show_peer(call: Invocation, answer: Answer) -> None:
    call.show(answer, _peer_line(answer["peer"]))


def _peer_line(peer: dict[str, Any]) -> str:
    where = peer["url"] or "no address; it fetches"
    return f"{peer['name']}  {peer['id']}  {peer['trustLevel']}  {where}"


def _warnings(peer: dict[str, Any]) -> str:
    found = ["denied"] if peer["denied"] else []
    if peer["conflict"]:
        found.append(peer["conflict"])
    waiting = peer["waiting"]
    if waiting.get("count"):
        why = f" ({brief(waiting['failure'], 80)})" if waiting.get("failure") else ""
        found.append(f"{waiting['count']} messages wait{why}")
    return ", ".join(found)


def _peer_row(peer: dict[str, Any]) -> tuple[str, ...]:
    style = "red" if peer["conflict"] else "dim" if peer["denied"] else ""
    where = peer["url"] or "fetches by itself"
    seen, troubles = ago(peer["lastSeen"]), _warnings(peer)
    return style, peer["name"], peer["trustLevel"], peer["status"], seen, where, peer["id"], troubles


def _candidate_row(found: dict[str, Any]) -> tuple[str, ...]:
    wrong = found.get("conflict")
    about = f"{wrong}: {found['detail']}" if wrong else found.get("note") or ""
    name, where = brief(found["name"], 32), brief(found["url"] or found["announcedAs"], 60)
    return "red" if wrong else "", found["source"], name, where, found["instanceId"] or "unknown", brief(about, 80)
