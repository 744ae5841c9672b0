// Other instances: trust, fingerprints to compare, messages that wait for each, and delegations.

import { get, post, rest, session } from "./api.js";
import { attempt, begin, navigate } from "./app.js";
import { linkOut } from "./conversation.js";
import { act, button, chip, click, el, fill, find, icon, mark, number, plural, quiet, rows, shortId, tag, when } from "./view.js";

const PATH = "api/v1/a2a";
const TRUST = {
  peer: mark("Known", "plain", "queued", "may read our capabilities, and nothing else"),
  verified: mark("Verified", "leased", "good", "has proved its key: may delegate, within limits"),
  trusted: mark("Trusted", "good", "audit", "promoted by the operator"),
  denied: mark("Denied", "bad", "failed", "its messages are refused"),
};
const PRESENCE = {
  online: mark("Online", "good", "good"),
  offline: mark("Away", "bad", "lost"),
  unknown: mark("Not seen lately", "plain", "queued"),
};
const TONES = { completed: "good", failed: "bad", cancelled: "plain", lost: "bad", timeout: "bad" };
const SIGNS = { completed: "good", lost: "lost" };

/** A key in groups of four characters, to be read aloud. */
const fingerprint = (key) => el("span", { class: "finger" }, key?.match(/.{1,4}/g)?.join(" ") ?? "–");

async function load() {
  const user = await session();
  find("#off").hidden = user.peers;
  find("#on").hidden = !user.peers;
  if (!user.peers) return;
  const [chosen] = rest();
  const [found, { delegations }] = await Promise.all([get(`${PATH}/peers`, { limit: 100 }), get(`${PATH}/delegations`, { limit: 100 })]);
  fill(find("#ours"), { name: found.name, id: [fingerprint(found.id)] });
  rows("#rows", "peer", found.peers, (peer) => peer.id, (peer) => peerRow(peer, chosen), "#none");
  const peer = found.peers.find((each) => each.id === chosen);
  find("#one").hidden = !peer;
  if (peer) showPeer(peer, user);
  const shown = peer ? delegations.filter((each) => each.peerId === peer.id) : delegations;
  rows("#delegations", "delegation", shown, (each) => each.id, (each) => delegationRow(each, user), "#no-delegations");
}

function peerRow(peer, chosen) {
  return {
    name: { text: peer.name, href: `/ui/peers/${encodeURIComponent(peer.id)}`, "aria-current": peer.id === chosen ? "true" : null },
    id: [fingerprint(peer.id.slice(0, 16))],
    trust: [chip(peer.denied ? TRUST.denied : TRUST[peer.trustLevel])],
    presence: [chip(PRESENCE[peer.status])],
    seen: [when(peer.lastSeen)],
    waits: peer.waiting?.count ? plural(peer.waiting.count, "message") : "–",
    conflict: peer.conflict,
  };
}

function showPeer(peer, user) {
  fill(find("#one"), {
    name: peer.name,
    id: [fingerprint(peer.id)],
    key: [fingerprint(peer.publicKey)],
    url: peer.url ? [linkOut(peer.url)] : "none: it polls for its messages",
    source: peer.source,
    added: [when(peer.addedAtMs)],
    verified: [when(peer.verifiedAtMs)],
    failure: peer.waiting?.failure,
    profiles: peer.capabilities.map((profile) => tag(profile.name, profile.description)),
    trust: user.may("trust") ? { href: act("trust", { peer: peer.id }) } : null,
    revoke: user.may("revoke") ? { href: act("revoke", { peer: peer.id }) } : null,
  });
}

function delegationRow(each, user) {
  const lost = each.state === "lost";
  const status = lost ? "lost" : each.status;
  return {
    ...each,
    task: { text: shortId(each.id), href: `/ui/task/${each.id}` },
    way: [icon(...(each.role === "requester" ? ["out", "to"] : ["in", "from"])), ` ${each.peer}`],
    state: [chip(mark(status, TONES[status] ?? "leased", SIGNS[status] ?? (TONES[status] ? "canceled" : "elsewhere")))],
    tokens: `${number(each.tokenUsage?.total ?? each.tokenUsage?.tokens ?? 0)} of ${number(each.maxTokenBudget)}`,
    proof: each.proven ? [chip(mark("Proof holds", "good", "audit")), " ", el("a", { class: "button plain", href: `/ui/api/${PATH}/delegations/${each.id}/proof`, download: `proof-${shortId(each.id)}.json` }, icon("download"), "Proof")] : [quiet(each.broken?.length ? each.broken.join(", ") : "–")],
    acts: lost && user.role === "operator" ? [button("delegation", { id: each.id, do: "offer_again" }, "Offer again"), " ", button("delegation", { id: each.id, do: "force_error" }, "Give up")] : [],
  };
}

async function discover() {
  const { discovered } = await post(`${PATH}/discover`, {});
  find("#no-candidates").textContent = "No other instance was found.";
  const values = (each) => ({ name: each.name || each.host, id: [fingerprint(each.instanceId)], url: each.url, source: each.source, conflict: each.conflict ?? each.reason });
  rows("#candidates", "candidate", discovered, (each) => `${each.instanceId} ${each.url}`, values, "#no-candidates");
}

click("#discover", () => attempt(discover));
navigate(find("#rows"), "a.row");
addEventListener("popstate", () => attempt(load));
session().then((user) => (find("#discover").hidden = user.role !== "operator"));
begin(load, ["peers"], 1_000);
