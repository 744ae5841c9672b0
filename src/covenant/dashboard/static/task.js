// One task: its facts, its timeline, its conversation, and the acts on it.

import { get, on, post, rest, session } from "./api.js";
import { attempt, begin, refuse, tabs } from "./app.js";
import { drawFrame, drawTurn, readConversation, showParts } from "./conversation.js";
import { leaseOf, openRepair } from "./repair.js";
import { asks, calleeOf, chip, click, clipped, duration, el, exact, fill, find, icon, isOver, number, quiet, rows, setSpan, shortId, shortName, stateOf, throttled, to, when } from "./view.js";

let [id] = rest();
const path = `a2a/tasks/${id}`;
let shown = null;
let user = null;
let question = null;

async function load() {
  user ??= await session();
  find("#tab-frames").hidden = !user.frames;
  const [detail, timeline] = await Promise.all([get(`${path}/show`), get("timeline", { task_id: id })]);
  shown = detail;
  id = shown.task.id; // The address may be short.
  find("main").className = "";
  drawFacts(timeline.bars.find((bar) => bar.kind === "parked" && bar.ends_ms === null));
  drawWaterfall(find("#fall"), timeline);
  drawTurns();
  drawSteps();
  rows("#repairs", "lease", timeline.repairs, (each) => each.lease_id, (each) => ({ ...each, at: [when(each.at_ms)] }), "#no-repairs");
  await log();
  if (user.frames) await frames();
}

/** `wait`: the bar of the current wait. */
function drawFacts(wait) {
  const { task } = shown;
  const over = isOver(shown.state);
  const lease = leaseOf(shown);
  document.title = `${shortId(id)} ${stateOf(shown).label} · Covenant`;
  const usage = shown.result?.metadata?.usage?.tokens;
  fill(find("main"), {
    title: clipped(task.intent_text || "(no text)", 160),
    state: [chip(stateOf(shown)), wait ? quiet(` ${wait.label}${wait.until_ms ? `, until ${exact(wait.until_ms)}` : ""}`) : null],
    id,
    agent: [task.target ? icon("network", "elsewhere") : null, el("a", { href: to("tasks", { agent: task.recipient.display }) }, calleeOf(shown))],
    sender: shortName(task.sender.display),
    tenant: task.tenant,
    origin: task.origin ?? "mailbox",
    key: task.idempotency?.key,
    attempt: `${number(shown.attempt)} in turn ${number(shown.turn)}`,
    created: [when(shown.created_at_ms)],
    took: duration((over ? shown.updated_at_ms : Date.now()) - shown.created_at_ms),
    deadline: task.deadline_ms ? [when(task.deadline_ms)] : null,
    tokens: usage ? number(usage) : null,
    holder: lease ? [shortName(lease.leased_to.display), shown.holder_lost ? el("b", {}, " (lost)") : ""] : null,
    cause: over && shown.cause && shown.cause !== "result" ? shown.cause : null,
    chain: task.parent ? [el("a", { href: `/ui/task/${task.parent}` }, `called by ${shortId(task.parent)}`), task.depth ? ` · ${task.depth} deep` : ""] : null,
    error: shown.result?.error_message,
    tree: { href: `/ui/tree/${id}` },
    repair: lease && user.may("repair") ? {} : null,
    cancel: !over && user.may("cancel") ? {} : null,
  });
  const form = find("#answer");
  form.hidden = !asks(shown) || !user.may("answer");
  question = shown.updates.findLast((step) => step.kind === "parked")?.body?.metadata?.["covenant.question"];
  const decides = question?.kind === "approval";
  form.elements.text.required = !decides;
  fill(form, { answer: decides ? null : {}, decide: decides ? {} : null });
}

/** What the agent printed and logged, and why it failed. */
async function log() {
  const { lines } = await get(`${path}/log`);
  const words = lines.map(({ ts_ms, level, text, traceback = "" }) => `${new Date(ts_ms).toISOString()} ${level} ${text}\n${traceback}`);
  fill(find("#log"), { log: clipped(words.join("") || "Nothing was logged.") });
}

/** Icons whose name differs from the kind of their bar. */
const SIGNS = { attempt: "leased", parked: "waits", following: "elsewhere", child: "tree", chunks: "out" };

/** Turns are bands; long waits are folded. Times that would overlap or repeat are left out. */
function drawWaterfall(root, timeline) {
  const { begins_ms, bars, folds, ticks, truncated } = timeline;
  const times = ticks.map((tick) => setSpan(el("span", { title: exact(tick.at_ms) }, tick.x ? `+${duration(tick.at_ms - begins_ms)}` : "0"), tick));
  const notes = folds.map(({ ms }) => `Folded: ${duration(ms)} of waiting.`);
  if (truncated) notes.push("A part of this task is not shown: it is too long.");
  root.replaceChildren(
    el("div", { class: "fall-axis", "aria-hidden": "true" }, el("span"), el("div", {}, times), el("span")),
    ...bars.map((bar) => line(bar, timeline)),
    ...notes.map((words) => el("p", { class: "small quiet" }, words)),
  );
  let edge = Infinity;
  let words = "";
  for (const time of times.reverse()) {
    const { left, right } = time.getBoundingClientRect();
    if (right + 8 > edge || time.textContent === words) time.remove();
    else [edge, words] = [left, time.textContent];
  }
}

function line(bar, { bands, folds, now_ms }) {
  const title = [bar.label, bar.detail, exact(bar.begins_ms)].filter(Boolean).join(" · ");
  const behind = [["band", bands], ["fold", folds]].flatMap(([name, spans]) => spans.map((span) => setSpan(el("i", { class: name }), span)));
  const drawn = setSpan(el("div", { class: `bar ${bar.ends_ms === null ? "open" : ""}`, title }), bar);
  const name = el(bar.task_id ? "a" : "span", { class: "clip", href: bar.task_id && `/ui/task/${bar.task_id}` }, bar.label);
  return el(
    "div",
    { class: "fall-row", "data-kind": bar.kind, "data-tone": bar.bad && "bad", role: "listitem", title },
    el("div", {}, icon(SIGNS[bar.kind] ?? bar.kind), bar.remote ? icon("network", "done elsewhere") : null, name),
    el("div", { class: "fall-track" }, behind, drawn),
    el("div", { class: "num" }, bar.kind === "repair" ? "" : duration((bar.ends_ms ?? now_ms) - bar.begins_ms)),
  );
}

function drawTurns() {
  const { turns, artifacts } = readConversation(shown);
  const log = find("#said");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  log.replaceChildren(...turns.map(drawTurn));
  if (atEnd) log.scrollTop = log.scrollHeight;
  find("#no-artifacts").hidden = artifacts.length > 0;
  find("#artifacts").replaceChildren(
    ...artifacts.map((made) => el("li", { class: "stack" }, el("h3", {}, made.name, " ", el("span", { class: "quiet small" }, when(made.at_ms))), made.description ? el("p", { class: "quiet" }, made.description) : null, ...showParts(made.parts))),
  );
}

function drawSteps() {
  rows("#steps", "step", shown.updates, (step) => step.generation, (step) => ({
    generation: step.generation,
    kind: [el("b", {}, step.kind), el("br"), el("span", { class: "quiet", title: exact(step.ts_ms) }, `+${duration(step.ts_ms - shown.created_at_ms)}`)],
    body: step.body ? clipped(JSON.stringify(step.body), 4_000) : "",
  }));
}

async function frames() {
  const { frames: found, left_out: gone = 0, lost = 0 } = await get(`${path}/frames`);
  const notes = [!found.length && "This task has no recorded frame.", gone && `${number(gone)} older frames were deleted.`, lost && `${number(lost)} calls were too fast to record.`];
  find("#no-frames").textContent = notes.filter(Boolean).join(" ");
  find("#frames").replaceChildren(...found.map((frame) => drawFrame(frame, frame.what, [frame.door])));
}

/** Copies the curl command, or shows it if the browser offers no clipboard. */
async function copyCurl({ target }) {
  const label = find("span", target.closest("button"));
  let command = null;
  await attempt(async () => (command = (await get("curl", { task_id: id })).text));
  if (!command) return;
  try {
    await navigator.clipboard.writeText(command);
    label.textContent = "Copied";
  } catch {
    refuse(command);
  }
  setTimeout(() => (label.textContent = "Copy as curl"), 2_000);
}

tabs(find("#sides"));
const again = throttled(() => attempt(load), 700);
on("pushes", ({ tasks }) => tasks.includes(id) && again());
on("tasks", ({ tasks, more }) => (more || tasks.some((task) => task.task_id === id)) && again());
click("#curl", copyCurl);
for (const [name, command] of [["#do-repair", "requeue"], ["#do-cancel", "cancel"]]) {
  click(name, () => openRepair(() => shown, command, user.name, load));
}
find("#answer").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = event.target.elements.text;
  const decision = event.submitter?.value;
  attempt(async () => {
    await post(`${path}/answer`, { text: field.value, ...(decision ? { approved: decision === "yes", question_id: question.id } : {}) });
    field.value = "";
    await load();
  });
});
find("#answer textarea").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
});
setInterval(() => shown && !isOver(shown.state) && fill(find("main"), { took: duration(Date.now() - shown.created_at_ms) }), 1_000);
begin(load);
