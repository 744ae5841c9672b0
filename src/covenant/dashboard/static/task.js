// One task: what it is, its story in time, what was said, and what can be done about it.

import { get, on, post, rest, session } from "./api.js";
import { attempt, begin, refuse, tabs } from "./app.js";
import { drawFrame, drawTurn, readConversation, showParts } from "./conversation.js";
import { leaseOf, openRepair } from "./repair.js";
import { chip, clipped, duration, el, exact, fill, find, icon, isOver, number, rows, setSpan, shortId, shortName, stateOf, throttled, to, when } from "./view.js";

const RISKS = { idempotent: "said to be idempotent", operator_accepted: "accepting that it may run twice" };
const [id] = rest();
const path = `a2a/tasks/${id}`;
let shown = null;
let known = null;

async function load() {
  known ??= await session();
  find("#tab-frames").hidden = !known.frames;
  const [detail, timeline] = await Promise.all([get(`${path}/show`), get("timeline", { task_id: id })]);
  shown = detail;
  header();
  drawWaterfall(find("#fall"), timeline);
  talk();
  steps();
  await attempts();
  if (known.frames) await frames();
}

function header() {
  const { task } = shown;
  const over = isOver(shown.state);
  const lease = leaseOf(shown);
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
    holder: lease ? [shortName(lease.leased_to.display), shown.holder_lost ? el("b", {}, " (lost)") : ""] : null,
    cause: over && shown.cause && shown.cause !== "result" ? shown.cause : null,
    chain: task.parent ? [el("a", { href: `/ui/task/${task.parent}` }, `called by ${shortId(task.parent)}`), task.depth ? ` · ${task.depth} deep` : ""] : null,
    error: shown.result?.error_message ?? null,
    tree: { href: `/ui/tree/${id}` },
    repair: lease && known.may("repair") ? {} : null,
    cancel: !over && known.may("cancel") ? {} : null,
  });
  find("#answer").hidden = shown.state !== "parked" || !known.may("answer");
}

/** How the bars of the waterfall look. */
const BARS = {
  queued: { tone: "queued", sign: "queued", shape: "wait" },
  attempt: { tone: "leased", sign: "leased" },
  parked: { tone: "waits", sign: "waits", shape: "wait" },
  following: { tone: "elsewhere", sign: "elsewhere", shape: "wait" },
  child: { tone: "elsewhere", sign: "tree" },
  push: { tone: "undrained", sign: "push", shape: "thin" },
  model: { tone: "good", sign: "model", shape: "thin" },
  tool: { tone: "undrained", sign: "tool", shape: "thin" },
  chunks: { tone: "good", sign: "out", shape: "thin" },
  repair: { tone: "bad", sign: "repair", shape: "point" },
};

/** The story in time, as `timeline` has placed it: turns are bands, long waits are folded. */
function drawWaterfall(root, timeline) {
  const { begins_ms, bars, folds, ticks, truncated } = timeline;
  const times = ticks.map((tick) => setSpan(el("span", { title: exact(tick.at_ms) }, tick.at_ms === begins_ms ? "0" : `+${duration(tick.at_ms - begins_ms)}`), tick));
  const notes = folds.map(({ ms }) => `Folded: ${duration(ms)} in which nothing but waiting happened.`);
  if (truncated) notes.push("There is more than is drawn: the raw steps have it.");
  root.replaceChildren(
    el("div", { class: "fall-axis", "aria-hidden": "true" }, el("span"), el("div", {}, times), el("span")),
    ...bars.map((bar) => line(bar, timeline)),
    ...notes.map((words) => el("p", { class: "small quiet" }, words)),
  );
}

function line(bar, { bands, folds, now_ms }) {
  const { tone, sign, shape = "" } = BARS[bar.kind];
  const title = [bar.label, bar.detail, exact(bar.begins_ms)].filter(Boolean).join(" · ");
  const behind = [["band", bands], ["fold", folds]].flatMap(([name, spans]) => spans.map((span) => setSpan(el("i", { class: name }), span)));
  const drawn = setSpan(el("div", { class: `bar ${shape} ${bar.ends_ms === null ? "open" : ""}`, title }), bar);
  const name = el(bar.task_id ? "a" : "span", { class: "clip", href: bar.task_id && `/ui/task/${bar.task_id}` }, bar.label);
  return el(
    "div",
    { class: "fall-row", "data-tone": bar.bad ? "bad" : tone, role: "listitem", title },
    el("div", {}, icon(sign), bar.remote ? icon("network", "done elsewhere") : null, name),
    el("div", { class: "fall-track" }, behind, drawn),
    el("div", { class: "num" }, shape === "point" ? "" : duration((bar.ends_ms ?? now_ms) - bar.begins_ms)),
  );
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
  const ended = shown.leases.filter((lease) => lease.reason || (lease.outcome && lease.outcome !== "settled"));
  const by = await repairs(ended);
  const values = (lease) => ({ what: `Attempt ${lease.attempt}: ${lease.outcome ?? "under way"}`, why: lease.reason ?? null, who: told(by.get(lease.lease_id), lease), at: [when(lease.ended_at_ms)] });
  rows("#repairs", "lease", ended, (lease) => lease.lease_id, values, "#no-repairs");
}

function told(row, lease) {
  const holder = `held by ${shortName(lease.leased_to.display)}`;
  if (!row) return holder;
  const risk = RISKS[row.kind.duplicate_risk];
  return [`${row.kind.action} by ${shortName(row.issuer.display)}`, risk, holder].filter(Boolean).join(", ");
}

async function frames() {
  const { frames: found, left_out: gone = 0, lost = 0 } = await get(`${path}/frames`);
  const notes = [gone ? `${number(gone)} older frames are not kept.` : "", lost ? `${number(lost)} calls came faster than they could be kept.` : ""].filter(Boolean);
  find("#no-frames").textContent = found.length ? notes.join(" ") : ["No frame is kept for this task.", ...notes].join(" ");
  find("#frames").replaceChildren(...found.map((frame) => drawFrame(frame, frame.what, [frame.door])));
}

/** The request that would send this task again, for a shell; where the browser gives no clipboard, it is shown. */
async function copyCurl({ target }) {
  const said = find("span", target.closest("button"));
  let command = null;
  await attempt(async () => (command = (await get("curl", { task_id: id })).text));
  if (!command) return;
  try {
    await navigator.clipboard.writeText(command);
    said.textContent = "Copied";
  } catch {
    refuse(command);
  }
  setTimeout(() => (said.textContent = "Copy as curl"), 2_000);
}

tabs(find("#sides"));
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
