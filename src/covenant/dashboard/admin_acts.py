"""Acts on those who are known here: peers, identities, grants and tenants; and on what was delegated to peers."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote

from covenant.dashboard.act_pages import Act, ActContext, ActDone, ActForm
from covenant.dashboard.form_page import EMPTY, FormPage, facts, field, joined, long_field, select, tag
from covenant.model.errors import Invalid
from covenant.model.peers.instance import Trust

TRUST: Final = (
    (Trust.PEER.value, "peer: may ask what we can do, and nothing else"),
    (Trust.VERIFIED.value, "verified: may delegate, within limits"),
    (Trust.TRUSTED.value, "trusted: may delegate as the settings say for those"),
)


class TrustAct(Act):
    kind = "trust_peer"

    async def form(self, context: ActContext) -> ActForm:
        peer = (await context.run("show_peer", peerId=context.text("peer"))).peer
        rows: list[tuple[str, Any]] = [
            ("Peer", peer.name),
            ("Id", tag("code", peer.id)),
            ("Fingerprint", tag("code", peer.fingerprint)),
            ("Its key", tag("code", peer.public_key or "not shown yet")),
            ("Trust now", peer.trust_level.value),
        ]
        chosen = context.text("level") or peer.trust_level.value
        fields = joined((facts(rows), select("Trust from now on", "level", TRUST, chosen)))
        lead = (
            "Compare the fingerprint with what the peer's operator reads out to you, by another way than the network. "
            "The level says what the peer may ask of this daemon."
        )
        return ActForm("Trust a peer", lead, fields, "Set the trust", {"peer": peer.id}, f"/ui/peers/{quote(peer.id)}")

    async def act(self, context: ActContext) -> ActDone:
        await context.run("trust_peer", peerId=context.text("peer"), trustLevel=context.text("level"))
        return ActDone(context.next(f"/ui/peers/{quote(context.text('peer'))}"))


class RevokeAct(Act):
    """Of an identity its token, of a grant the grant, of a peer every token that it was given."""

    kind = "revoke_identity"

    async def form(self, context: ActContext) -> ActForm:
        what, given = _revoked(context)
        lead = {
            "identity": "Its token ends at once, with its connections and sessions. Its tasks stay.",
            "grant": "Whoever holds it may not do this any more. Work that has begun goes on.",
            "peer": "Every token that the peer was given ends. What it has delegated to us goes on.",
        }[what]
        shown = facts([(what.capitalize(), tag("code", given))])
        return ActForm("Revoke", lead, shown, "Revoke", {what: given}, context.next("/ui/audit"), danger=True)

    async def act(self, context: ActContext) -> ActDone:
        what, given = _revoked(context)
        if what == "identity":
            await context.run("revoke_identity", identity=given)
        elif what == "grant":
            await context.run("revoke_capability", signature_b58=given)
        else:
            await context.run("revoke_peer_tokens", peerId=given)
        return ActDone(context.next("/ui/audit"))


def _revoked(context: ActContext) -> tuple[str, str]:
    for what in ("identity", "grant", "peer"):
        if given := context.text(what):
            return what, given
    raise Invalid("invalid_form", "say what to revoke: identity, grant or peer")


class GrantAct(Act):
    kind = "grant_capability"

    async def form(self, context: ActContext) -> ActForm:
        fields = joined(
            (
                field("Action", "action", context.text("action"), required=True),
                field("To", "to", context.text("to"), required=True),
            )
        )
        lead = "The identity may do this from now on, until the grant is revoked."
        return ActForm("Grant a capability", lead, fields, "Grant", {}, context.next())

    async def act(self, context: ActContext) -> ActDone:
        await context.run("grant_capability", action=context.text("action"), to=context.text("to"))
        return ActDone(context.next())


TENANT_ACTS: Final = {
    "rotate": ("Rotate a tenant's token", "The old token ends at once, with its streams and sessions.", "Rotate"),
    "disable": ("Disable a tenant", "Nobody speaks for it from now on. What it has running goes on.", "Disable"),
    "enable": ("Enable a tenant", "Its token opens its doors again.", "Enable"),
}


class TenantAct(Act):
    kind = "change_tenant"

    async def form(self, context: ActContext) -> ActForm:
        do, name = _tenant_act(context), context.text("name")
        title, lead, button = TENANT_ACTS[do]
        shown = facts([("Tenant", name)])
        return ActForm(title, lead, shown, button, {"name": name, "do": do}, "/ui/tenants", danger=do != "enable")

    async def act(self, context: ActContext) -> ActDone:
        do, name = _tenant_act(context), context.text("name")
        if do != "rotate":
            await context.run("change_tenant", name=name, disabled=do == "disable")
            return ActDone(context.next("/ui/tenants"))
        rotated = await context.run("rotate_tenant", name=name)
        body = joined((facts([("Token", tag("code", rotated.token))]), tag("p", tag("a", "Back", href="/ui/tenants"))))
        done = f"{name} has a new token. It is told here once, and stored nowhere."
        return ActDone(page=FormPage("A new token", body=body, done=done))


def _tenant_act(context: ActContext) -> str:
    do = context.text("do")
    if do not in TENANT_ACTS:
        raise Invalid("invalid_form", f"say what to do: {', '.join(TENANT_ACTS)}")
    return do


DELEGATION_ACTS: Final = {
    "offer_again": ("Offer a delegation again", "The same offer is sent again, under the same id.", "Offer again"),
    "force_error": ("Give a delegation up", "Its task here ends as failed. A late result is not taken.", "Give it up"),
    "cancel": ("Cancel a delegation", "It is canceled here, and at the peer as soon as that is told.", "Cancel it"),
}


class DelegationAct(Act):
    kind = "cancel_delegation"

    async def form(self, context: ActContext) -> ActForm:
        do = _delegation_act(context)
        title, lead, button = DELEGATION_ACTS[do]
        shown = (await context.run("show_delegation", delegationId=context.text("id"))).delegation
        rows = facts([("Task", shown.id), ("Peer", shown.peer), ("Profile", shown.profile), ("State", shown.state)])
        reason = long_field("Reason (for the audit)", "reason", context.text("reason"), required=True)
        fields = joined((rows, EMPTY if do == "offer_again" else reason))
        kept = {"id": context.text("id"), "do": do}
        return ActForm(title, lead, fields, button, kept, f"/ui/task/{quote(shown.id)}", danger=do != "offer_again")

    async def act(self, context: ActContext) -> ActDone:
        do, given = _delegation_act(context), context.text("id")
        kind = {"offer_again": "offer_again", "force_error": "force_delegation", "cancel": "cancel_delegation"}[do]
        reason = None if do == "offer_again" else context.text("reason")
        await context.run(kind, delegationId=given, reason=reason)
        return ActDone(context.next("/ui/peers"))


def _delegation_act(context: ActContext) -> str:
    do = context.text("do")
    if do not in DELEGATION_ACTS:
        raise Invalid("invalid_form", f"say what to do: {', '.join(DELEGATION_ACTS)}")
    return do
