// Other instances: how far each is trusted, the fingerprint to compare, what waits for it, and what was delegated.

import { get, post, rest, session } from "./api.js";
import { attempt, begin, stayHere } from "./app.js";
import { linkOut } from "./conversation.js";
import { copy, download, el, fill, find, icon, list } from "./dom.js";
import { chip, number, plural, shortId, when } from "./format.js";

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
const fingerprint = (key) => el("span", { class: "finger" }, (key ?? "").match(/.{1,4}/g)?.join(" ") ?? "–");

async function load() {
  const known = await session();
  find("#off").hidden = known.peers;
  find("#on").hidden = !known.peers;
  if (!known.peers) return;
  const [chosen] = rest();
  const [found, { delegations }] = await Promise.all([get(`${PATH}/peers`, { limit: 100 }), get(`${PATH}/delegations`, { limit: 100 })]);
  fill(find("#ours"), { name: found.name, id: [fingerprint(found.id)] });
  find("#none").hidden = found.peers.length > 0;
  list(find("#rows"), found.peers, (peer) => peer.id, () => copy("peer"), (row, peer) => peerRow(row, peer, chosen));
  const peer = found.peers.find((each) => each.id === chosen);
  find("#one").hidden = !peer;
  if (peer) one(peer, known);
  const shown = peer ? delegations.filter((each) => each.peerId === peer.id) : delegations;
  find("#no-delegations").hidden = shown.length > 0;
  list(find("#delegations"), shown, (each) => each.id, () => copy("delegation"), (row, each) => delegationRow(row, each, known));
}

function peerRow(row, peer, chosen) {
  fill(row, {
    name: { text: peer.name, href: `/ui/peers/${encodeURIComponent(peer.id)}`, "aria-current": peer.id === chosen ? "true" : null },
    id: [fingerprint(peer.id.slice(0, 16))],
    trust: [chip(peer.denied ? TRUST.denied : TRUST[peer.trustLevel])],
    presence: [chip(PRESENCE[peer.status])],
    seen: [when(peer.lastSeen)],
    waits: peer.waiting?.count ? plural(peer.waiting.count, "message") : "–",
    conflict: peer.conflict,
  });
}

function one(peer, known) {
  const act = (verb, more) => `/ui/act/${verb}?${new URLSearchParams({ peer: peer.id, next: location.pathname, ...more })}`;
  fill(find("#one"), {
    name: peer.name,
    id: [fingerprint(peer.id)],
    key: [fingerprint(peer.publicKey)],
    url: peer.url ? [linkOut(peer.url)] : "none: it fetches what there is for it",
    source: peer.source,
    added: [when(peer.addedAtMs)],
    verified: [when(peer.verifiedAtMs)],
    failure: peer.waiting?.failure ?? null,
    profiles: peer.capabilities.map((profile) => el("span", { class: "tag", title: profile.description ?? "" }, profile.name)),
    trust: known.may("trust") ? { href: act("trust") } : null,
    revoke: known.may("revoke") ? { href: act("revoke") } : null,
  });
}

function delegationRow(row, each, known) {
  const lost = each.state === "lost";
  const act = (verb, label) => el("a", { class: "button", href: `/ui/act/delegation?${new URLSearchParams({ id: each.id, do: verb, next: location.pathname })}` }, label);
  fill(row, {
    task: { text: shortId(each.id), href: `/ui/task/${each.id}` },
    way: [icon(each.role === "requester" ? "out" : "in", each.role === "requester" ? "to" : "from"), ` ${each.peer}`],
    profile: each.profile,
    state: [chip({ label: lost ? "lost" : each.status, tone: lost ? "bad" : (TONES[each.status] ?? "leased"), sign: lost ? "lost" : (TONES[each.status] === "good" ? "good" : "elsewhere") })],
    tokens: `${number(each.tokenUsage?.total ?? each.tokenUsage?.tokens ?? 0)} of ${number(each.maxTokenBudget)}`,
    moved: [when(each.movedAtMs)],
    proof: each.proven ? [chip({ label: "Proof holds", tone: "good", sign: "audit" }), proof(each)] : [el("span", { class: "quiet" }, each.broken?.length ? each.broken.join(", ") : "–")],
    acts: lost && known.role === "operator" ? [act("offer_again", "Offer again"), " ", act("force_error", "Give up")] : [],
  });
}

function proof(each) {
  const button = el("button", { class: "plain", title: "covenant peers verify-proof checks it anywhere" }, "Read");
  button.addEventListener("click", () =>
    attempt(async () => {
      const found = await get(`${PATH}/delegations/${each.id}/proof`);
      button.replaceWith(download(`proof-${shortId(each.id)}.json`, "application/json", () => JSON.stringify(found, null, 2)));
    }),
  );
  return button;
}

async function discover() {
  const { discovered } = await post(`${PATH}/discover`, {});
  find("#no-candidates").hidden = discovered.length > 0;
  find("#no-candidates").textContent = "Nobody else was found.";
  list(find("#candidates"), discovered, (each) => `${each.instanceId} ${each.url}`, () => copy("candidate"), (row, each) => {
    fill(row, { name: each.name || each.host, id: [fingerprint(each.instanceId)], url: each.url, source: each.source, conflict: each.conflict ?? each.reason ?? null });
  });
}

find("#discover").addEventListener("click", () => attempt(discover));
stayHere(find("#rows"), "a.row", () => attempt(load));
addEventListener("popstate", () => attempt(load));
session().then((known) => (find("#discover").hidden = known.role !== "operator"));
begin(load, ["peers"], 1_000);
