"""Forms for peers, identities, grants and tenants, and for delegations to peers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from covenant.dashboard.act_pages import Act, ActContext, ActDone, ActForm
from covenant.dashboard.form_page import EMPTY, FormPage, Markup, facts, field, joined, long_field, select, tag
from covenant.model.errors import Invalid
from covenant.model.peers.instance import Trust

TRUST: Final = (
    (Trust.PEER.value, "peer: may read our capabilities, and nothing else"),
    (Trust.VERIFIED.value, "verified: may delegate, within limits"),
    (Trust.TRUSTED.value, "trusted: may delegate, within the settings for trusted peers"),
)
TENANT_ACTS: Final = {
    "rotate": ("Rotate a tenant's token", "The old token, its streams and its sessions end at once.", "Rotate"),
    "disable": ("Disable a tenant", "Its token is refused from now on. Its running tasks go on.", "Disable"),
    "enable": ("Enable a tenant", "Its token is accepted again.", "Enable"),
}
DELEGATION_ACTS: Final = {
    "offer_again": ("Offer a delegation again", "The same offer is sent again, under the same id.", "Offer again"),
    "force_error": ("Give a delegation up", "The task here ends as failed. A late result is refused.", "Give it up"),
    "cancel": ("Cancel a delegation", "The task ends here at once. The peer is told to stop.", "Cancel it"),
}


def group_by_four(key: str) -> str:
    """A key in groups of four characters, to be read aloud. The page Peers groups it in the same way."""
    return " ".join(key[at : at + 4] for at in range(0, len(key), 4))


class TrustAct(Act):
    title = "Trust a peer"
    asks = field("Peer", "peer", required=True)
    kind = "trust_peer"

    async def form(self, context: ActContext) -> ActForm:
        peer = (await context.run("show_peer", peerId=context.text("peer"))).peer
        rows: list[tuple[str, Any]] = [
            ("Peer", peer.name),
            ("Fingerprint", tag("code", group_by_four(peer.id))),
            ("Its id", tag("code", peer.id)),
            ("Its key", tag("code", group_by_four(peer.public_key or "") or "not shown yet")),
            ("Trust now", peer.trust_level.value),
        ]
        chosen = context.text("level") or peer.trust_level.value
        fields = joined((facts(rows), select("Trust from now on", "level", TRUST, chosen)))
        lead = (
            "Ask the peer's operator to read out its fingerprint, by phone or in person, and compare it with this one. "
            "The operator finds it at the top of the page Peers, and as the daemon's own id in covenant peers list. "
            "The level says what the peer may ask of this daemon."
        )
        return ActForm(lead, fields, "Set the trust", {"peer": peer.id}, f"/ui/peers/{quote(peer.id)}")

    async def act(self, context: ActContext) -> ActDone:
        await context.run("trust_peer", peerId=context.text("peer"), trustLevel=context.text("level"))
        peer, level = context.text("peer"), context.text("level")
        return ActDone(context.next(f"/ui/peers/{quote(peer)}"), f"The trust of {peer} is {level} now.")


class RevokeAct(Act):
    """Revokes an identity's token, a grant, or every token that was given to a peer."""

    title = "Revoke"
    asks = joined(
        field(name.capitalize(), name, placeholder="fill in one of the three") for name in ("identity", "grant", "peer")
    )
    kind = "revoke_identity"

    async def form(self, context: ActContext) -> ActForm:
        what, value = _thing_to_revoke(context)
        lead = {
            "identity": "The identity's token, connections and sessions end at once. Its tasks stay.",
            "grant": "The holder of the grant may not do this any more. Work that has begun goes on.",
            "peer": "Every token that was given to the peer ends. The tasks that it delegated to us go on.",
        }[what]
        shown = facts([(what.capitalize(), tag("code", value))])
        return ActForm(lead, shown, "Revoke", {what: value}, context.next("/ui/audit"), danger=True)

    async def act(self, context: ActContext) -> ActDone:
        what, value = _thing_to_revoke(context)
        if what == "identity":
            await context.run("revoke_identity", identity=value)
        elif what == "grant":
            await context.run("revoke_capability", signature_b58=value)
        else:
            await context.run("revoke_peer_tokens", peerId=value)
        message = f"The tokens of peer {value} are revoked." if what == "peer" else f"The {what} {value} is revoked."
        return ActDone(context.next("/ui/audit"), message)


def _thing_to_revoke(context: ActContext) -> tuple[str, str]:
    for what in ("identity", "grant", "peer"):
        if value := context.text(what):
            return what, value
    raise Invalid("invalid_form", "name one thing to revoke: an identity, a grant or a peer")


class GrantAct(Act):
    title = "Grant a capability"
    kind = "grant_capability"

    async def form(self, context: ActContext) -> ActForm:
        fields = joined(
            (
                field("Action", "action", context.text("action"), required=True),
                field("To", "to", context.text("to"), required=True),
            )
        )
        lead = "The identity may do this from now on, until the grant is revoked."
        return ActForm(lead, fields, "Grant", {}, context.next())

    async def act(self, context: ActContext) -> ActDone:
        action, to = context.text("action"), context.text("to")
        await context.run("grant_capability", action=action, to=to)
        return ActDone(context.next(), f"{to} now has the grant {action}.")


def _choice_of_acts(acts: Mapping[str, tuple[str, str, str]]) -> Markup:
    return select("What to do", "do", [(do, words) for do, (words, _, _) in acts.items()])


def _chosen(context: ActContext, acts: Mapping[str, tuple[str, str, str]]) -> str:
    do = context.text("do")
    if do not in acts:
        raise Invalid("invalid_form", f"choose what to do: {', '.join(acts)}")
    return do


class TenantAct(Act):
    title = "Change a tenant"
    asks = joined((field("Tenant", "name", required=True), _choice_of_acts(TENANT_ACTS)))
    kind = "change_tenant"

    async def form(self, context: ActContext) -> ActForm:
        do, name = _chosen(context, TENANT_ACTS), context.text("name")
        words, lead, button = TENANT_ACTS[do]
        shown = facts([("What to do", words), ("Tenant", name)])
        return ActForm(lead, shown, button, {"name": name, "do": do}, "/ui/tenants", danger=do != "enable")

    async def act(self, context: ActContext) -> ActDone:
        do, name = _chosen(context, TENANT_ACTS), context.text("name")
        if do != "rotate":
            await context.run("change_tenant", name=name, disabled=do == "disable")
            return ActDone(context.next("/ui/tenants"), f"Tenant {name} is {do}d now.")
        rotated = await context.run("rotate_tenant", name=name)
        body = joined((facts([("Token", tag("code", rotated.token))]), tag("p", tag("a", "Back", href="/ui/tenants"))))
        done = f"{name} has a new token. Copy it now: it is shown once, and stored nowhere."
        return ActDone(page=FormPage("A new token", body=body, done=done))


class DelegationAct(Act):
    title = "Change a delegation"
    asks = joined((field("Delegation", "id", required=True), _choice_of_acts(DELEGATION_ACTS)))
    kind = "cancel_delegation"

    async def form(self, context: ActContext) -> ActForm:
        do = _chosen(context, DELEGATION_ACTS)
        words, lead, button = DELEGATION_ACTS[do]
        shown = (await context.run("show_delegation", delegationId=context.text("id"))).delegation
        rows = facts(
            [
                ("What to do", words),
                ("Task", shown.id),
                ("Peer", shown.peer),
                ("Profile", shown.profile),
                ("State", shown.state),
            ]
        )
        reason = long_field("Reason (for the audit)", "reason", context.text("reason"), required=True)
        fields = joined((rows, EMPTY if do == "offer_again" else reason))
        kept = {"id": context.text("id"), "do": do}
        return ActForm(lead, fields, button, kept, f"/ui/task/{quote(shown.id)}", danger=do != "offer_again")

    async def act(self, context: ActContext) -> ActDone:
        do, value = _chosen(context, DELEGATION_ACTS), context.text("id")
        kind = {"offer_again": "offer_again", "force_error": "force_delegation", "cancel": "cancel_delegation"}[do]
        reason = None if do == "offer_again" else context.text("reason")
        await context.run(kind, delegationId=value, reason=reason)
        return ActDone(context.next("/ui/peers"), f"{DELEGATION_ACTS[do][0]}: done for {value}.")
