// One task: what it is, its story in time, what was said, and what can be done about it.

import { get, on, post, rest, session } from "./api.js";
import { attempt, begin, refuse, tabs } from "./app.js";
import { drawFrame, drawTurn, readConversation, showParts } from "./conversation.js";
import { leaseOf, openRepair } from "./repair.js";
import { drawWaterfall, readTimeline } from "./waterfall.js";
import { chip, clipped, duration, el, exact, fill, find, isOver, number, rows, shortId, shortName, stateOf, throttled, to, when } from "./view.js";

const [id] = rest();
const path = `a2a/tasks/${id}`;
let shown = null;
let known = null;

async function load() {
  known ??= await session();
  const pushed = known.role === "tenant" ? { pushes: [] } : get("a2a/pushes", { task_id: id });
  const [detail, calls, { pushes }] = await Promise.all([get(`${path}/show`), get("a2a/tasks", { parent: id, limit: 100, ascending: true }), pushed]);
  shown = detail;
  header();
  // What a call elsewhere is named by, and who does it, the tree knows.
  const elsewhere = calls.tasks.some((call) => call.remote) ? (await get(`${path}/tree`)).tree.children : [];
  drawWaterfall(find("#fall"), readTimeline(shown, calls.tasks, elsewhere, pushes));
  talk();
  steps();
  await attempts();
  if (known.frames) await frames();
}

function header() {
  const { task } = shown;
  const over = isOver(shown.state);
  document.title = `${shortId(id)} ${stateOf(shown).label} · Covenant`;
  const usage = shown.result?.metadata?.usage?.tokens;
  fill(find("main"), {
    title: clipped(task.intent_text || "(no text)", 160),
    state: [chip(stateOf(shown))],
    id,
    agent: [el("a", { href: to("tasks", { agent: task.recipient.display }) }, shortName(task.recipient.display))],
    sender: shortName(task.sender.display),
    tenant: task.tenant ?? null,
    origin: task.origin ?? "mailbox",
    key: task.idempotency?.key ?? null,
    attempt: `${number(shown.attempt)} in turn ${number(shown.turn)}`,
    created: [when(shown.created_at_ms)],
    took: duration((over ? shown.updated_at_ms : Date.now()) - shown.created_at_ms),
    deadline: task.deadline_ms ? [when(task.deadline_ms)] : null,
    tokens: usage ? number(usage) : null,
    holder: leaseOf(shown) ? [shortName(leaseOf(shown).leased_to.display), shown.holder_lost ? el("b", {}, " (lost)") : ""] : null,
    cause: over && shown.cause && shown.cause !== "result" ? shown.cause : null,
    chain: task.parent ? [el("a", { href: `/ui/task/${task.parent}` }, `called by ${shortId(task.parent)}`), task.depth ? ` · ${task.depth} deep` : ""] : null,
    error: shown.result?.error_message ?? null,
    tree: { href: `/ui/tree/${id}` },
    repair: leaseOf(shown) && known.may("repair") ? {} : null,
    cancel: !over && known.may("cancel") ? {} : null,
  });
  const waits = shown.state === "parked" && known.may("answer");
  find("#answer").hidden = !waits;
}

function talk() {
  const { said, artifacts } = readConversation(shown);
  const log = find("#said");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  log.replaceChildren(...said.map(drawTurn));
  if (atEnd) log.scrollTop = log.scrollHeight;
  find("#no-artifacts").hidden = artifacts.length > 0;
  find("#artifacts").replaceChildren(
    ...artifacts.map((made) => el("li", { class: "stack" }, el("h3", {}, made.name, " ", el("span", { class: "quiet small" }, when(made.at_ms))), made.description ? el("p", { class: "quiet" }, made.description) : null, ...showParts(made.parts))),
  );
}

function steps() {
  rows("#steps", "step", shown.updates, (step) => step.generation, (step) => ({
    generation: step.generation,
    kind: [el("b", {}, step.kind), el("br"), el("span", { class: "quiet", title: exact(step.ts_ms) }, `+${duration(step.ts_ms - shown.created_at_ms)}`)],
    body: step.body ? clipped(JSON.stringify(step.body), 4_000) : "",
  }));
}

/** Who has repaired the leases of this task, by lease: the audit knows. */
async function repairs(ended) {
  if (known.role === "tenant" || !ended.some((lease) => lease.reason)) return new Map();
  const { events } = await get("audit/recent", { type: "a2a_repair_applied", since_ms: shown.created_at_ms, limit: 200 });
  return new Map(events.filter(({ kind }) => kind.task_id === id).map((row) => [row.kind.lease_id, row]));
}

async function attempts() {
  const ended = shown.leases.filter((lease) => lease.reason || !["settled", null].includes(lease.outcome ?? null));
  const by = await repairs(ended);
  const values = (lease) => ({ what: `Attempt ${lease.attempt}: ${lease.outcome ?? "under way"}`, why: lease.reason ?? null, who: told(by.get(lease.lease_id), lease), at: [when(lease.ended_at_ms)] });
  rows("#repairs", "lease", ended, (lease) => lease.lease_id, values, "#no-repairs");
}

function told(row, lease) {
  const holder = `held by ${shortName(lease.leased_to.display)}`;
  if (!row) return holder;
  const risk = { idempotent: "said to be idempotent", operator_accepted: "accepting that it may run twice" }[row.kind.duplicate_risk];
  return [`${row.kind.action} by ${shortName(row.issuer.display)}`, risk, holder].filter(Boolean).join(", ");
}

async function frames() {
  const { frames: found, left_out: gone = 0, lost = 0 } = await get(`${path}/frames`);
  const notes = [gone ? `${number(gone)} older frames are not kept.` : "", lost ? `${number(lost)} calls came faster than they could be kept.` : ""].filter(Boolean);
  find("#no-frames").textContent = found.length ? notes.join(" ") : ["No frame is kept for this task.", ...notes].join(" ");
  find("#frames").replaceChildren(...found.map((frame) => drawFrame(frame, frame.what, [frame.door])));
}

/** The request that would send this task again, or the one that reads it, for a shell. The token stays out of it. */
function curl() {
  const { task } = shown;
  const made = { a2a: a2aRequest, mailbox: mailboxRequest }[task.origin ?? "mailbox"];
  const { path: place, headers = [], body } = made ? made(task) : { path: `/a2a/tasks/${id}/show` };
  const words = [`curl -s ${quote(known.url + place)} -H "Authorization: Bearer $COVENANT_TOKEN"`];
  if (body) words.push(["Content-Type: application/json", ...headers].map((header) => `-H ${quote(header)}`).join(" "), `-d ${quote(JSON.stringify(body))}`);
  return words.join(" \\\n  ");
}

/** Also where the page came over plain HTTP, and the browser makes no UUID. */
const newId = () => "10000000-1000-4000-8000-100000000000".replace(/[01]/g, () => Math.floor(Math.random() * 16).toString(16));

function a2aRequest(task) {
  const parts = task.parts?.length ? task.parts.map(partOf) : [{ text: task.intent_text }];
  const message = { messageId: newId(), role: "ROLE_USER", parts };
  return {
    path: `/v1/a2a/agents/${encodeURIComponent(task.recipient.display.replace(/@.*$/, ""))}`,
    headers: ["A2A-Version: 1.0", ...(task.idempotency ? [`Idempotency-Key: ${task.idempotency.key}`] : [])],
    body: { jsonrpc: "2.0", id: 1, method: "SendMessage", params: { message } },
  };
}

function mailboxRequest({ recipient, intent_text, parts, idempotency }) {
  return { path: "/a2a/tasks", body: { id: newId(), recipient: { display: recipient.display }, intent_text, ...(parts?.length ? { parts } : {}), ...(idempotency ? { idempotency } : {}) } };
}

/** A part of A2A 1.0 from content as the ledger has it. */
function partOf({ type, text, value, data, uri, name, filename, resource, mimeType, space, task_id, sha256 }) {
  const said = {
    text: () => ({ text }),
    json: () => ({ data: value }),
    resource_link: () => ({ url: uri }),
    file: () => ({ url: `${known.url}/v1/files/${space}/${task_id}/${sha256}` }),
    resource: () => (resource.blob ? { raw: resource.blob } : { text: resource.text ?? "" }),
  }[type]?.() ?? { raw: data };
  const file = filename ?? name;
  const media = mimeType ?? resource?.mimeType;
  return { ...said, ...(file ? { filename: file } : {}), ...(media ? { mediaType: media } : {}) };
}

const quote = (words) => `'${words.replaceAll("'", "'\\''")}'`;

async function copyCurl({ target }) {
  const button = target.closest("button");
  try {
    await navigator.clipboard.writeText(curl());
    find("span", button).textContent = "Copied";
  } catch {
    refuse(curl());
  }
  setTimeout(() => (find("span", button).textContent = "Copy as curl"), 2_000);
}

tabs(find("#sides"));
session().then((found) => (find("#tab-frames").hidden = !found.frames)).catch(() => {});
const again = throttled(() => attempt(load), 700);
on("pushes", ({ tasks }) => tasks.includes(id) && again());
on("tasks", ({ tasks, more }) => (more || tasks.some((task) => task.task_id === id)) && again());
find("#curl").addEventListener("click", copyCurl);
for (const [name, command] of [["#do-repair", "requeue"], ["#do-cancel", "cancel"]]) {
  find(name).addEventListener("click", () => openRepair(shown, command, known.name, load));
}
find("#answer").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = event.target.elements.text;
  attempt(async () => {
    await post(`${path}/answer`, { text: field.value });
    field.value = "";
    await load();
  });
});
find("#answer textarea").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
});
setInterval(() => shown && !isOver(shown.state) && fill(find("main"), { took: duration(Date.now() - shown.created_at_ms) }), 1_000);
begin(load);
