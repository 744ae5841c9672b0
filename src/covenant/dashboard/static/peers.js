// Other instances: how far each is trusted, the fingerprint to compare, what waits for it, and what was delegated.

import { get, post, rest, session } from "./api.js";
import { attempt, begin, stayHere } from "./app.js";
import { linkOut } from "./conversation.js";
import { act, chip, download, el, fill, find, icon, number, plural, quiet, rows, shortId, tag, when } from "./view.js";

const PATH = "api/v1/a2a";
const TRUST = {
  peer: { label: "Known", hint: "may ask what we can do, and nothing else", tone: "plain", sign: "queued" },
  verified: { label: "Verified", hint: "has proved its key: may delegate, within limits", tone: "leased", sign: "good" },
  trusted: { label: "Trusted", hint: "promoted by the operator", tone: "good", sign: "audit" },
  denied: { label: "Denied", hint: "nothing is taken from it", tone: "bad", sign: "failed" },
};
const PRESENCE = {
  online: { label: "Online", tone: "good", sign: "good" },
  offline: { label: "Away", tone: "bad", sign: "lost" },
  unknown: { label: "Not heard of lately", tone: "plain", sign: "queued" },
};
const TONES = { completed: "good", failed: "bad", rejected: "bad", canceled: "plain", cancelled: "plain", lost: "bad" };

/** In groups that two people can read to each other. */
const fingerprint = (key) => el("span", { class: "finger" }, key?.match(/.{1,4}/g)?.join(" ") ?? "–");

async function load() {
  const known = await session();
  find("#off").hidden = known.peers;
  find("#on").hidden = !known.peers;
  if (!known.peers) return;
  const [chosen] = rest();
  const [found, { delegations }] = await Promise.all([get(`${PATH}/peers`, { limit: 100 }), get(`${PATH}/delegations`, { limit: 100 })]);
  fill(find("#ours"), { name: found.name, id: [fingerprint(found.id)] });
  rows("#rows", "peer", found.peers, (peer) => peer.id, (peer) => peerRow(peer, chosen), "#none");
  const peer = found.peers.find((each) => each.id === chosen);
  find("#one").hidden = !peer;
  if (peer) one(peer, known);
  const shown = peer ? delegations.filter((each) => each.peerId === peer.id) : delegations;
  rows("#delegations", "delegation", shown, (each) => each.id, (each) => delegationRow(each, known), "#no-delegations");
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

function one(peer, known) {
  fill(find("#one"), {
    name: peer.name,
    id: [fingerprint(peer.id)],
    key: [fingerprint(peer.publicKey)],
    url: peer.url ? [linkOut(peer.url)] : "none: it fetches what there is for it",
    source: peer.source,
    added: [when(peer.addedAtMs)],
    verified: [when(peer.verifiedAtMs)],
    failure: peer.waiting?.failure ?? null,
    profiles: peer.capabilities.map((profile) => tag(profile.name, profile.description)),
    trust: known.may("trust") ? { href: act("trust", { peer: peer.id }) } : null,
    revoke: known.may("revoke") ? { href: act("revoke", { peer: peer.id }) } : null,
  });
}

function delegationRow(each, known) {
  const lost = each.state === "lost";
  const button = (verb, label) => el("a", { class: "button", href: act("delegation", { id: each.id, do: verb }) }, label);
  return {
    ...each,
    task: { text: shortId(each.id), href: `/ui/task/${each.id}` },
    way: [icon(each.role === "requester" ? "out" : "in", each.role === "requester" ? "to" : "from"), ` ${each.peer}`],
    state: [chip({ label: lost ? "lost" : each.status, tone: lost ? "bad" : (TONES[each.status] ?? "leased"), sign: lost ? "lost" : (TONES[each.status] === "good" ? "good" : "elsewhere") })],
    tokens: `${number(each.tokenUsage?.total ?? each.tokenUsage?.tokens ?? 0)} of ${number(each.maxTokenBudget)}`,
    proof: each.proven ? [chip({ label: "Proof holds", tone: "good", sign: "audit" }), proof(each)] : [quiet(each.broken?.length ? each.broken.join(", ") : "–")],
    acts: lost && known.role === "operator" ? [button("offer_again", "Offer again"), " ", button("force_error", "Give up")] : [],
  };
}

function proof(each) {
  const read = async (button) => {
    const found = await get(`${PATH}/delegations/${each.id}/proof`);
    button.replaceWith(download(`proof-${shortId(each.id)}.json`, "application/json", () => JSON.stringify(found, null, 2)));
  };
  const onclick = ({ currentTarget }) => attempt(() => read(currentTarget));
  return el("button", { class: "plain", title: "covenant peers verify-proof checks it anywhere", onclick }, "Read");
}

async function discover() {
  const { discovered } = await post(`${PATH}/discover`, {});
  find("#no-candidates").textContent = "Nobody else was found.";
  const values = (each) => ({ name: each.name || each.host, id: [fingerprint(each.instanceId)], url: each.url, source: each.source, conflict: each.conflict ?? each.reason ?? null });
  rows("#candidates", "candidate", discovered, (each) => `${each.instanceId} ${each.url}`, values, "#no-candidates");
}

find("#discover").addEventListener("click", () => attempt(discover));
stayHere(find("#rows"), "a.row", () => attempt(load));
addEventListener("popstate", () => attempt(load));
session().then((known) => (find("#discover").hidden = known.role !== "operator"));
begin(load, ["peers"], 1_000);
