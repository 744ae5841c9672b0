// Talks to any A2A agent: the messages on one side, every frame on the other, with what breaks the specification.

import { allAgents, post, Refused, session } from "./api.js";
import { address, attempt, begin } from "./app.js";
import { drawFrame, drawTurn } from "./conversation.js";
import { bytesOf, click, duration, el, find, icon, plural } from "./view.js";

const form = find("#ask");
const turns = [];
const frames = [];
const findings = [];
/** Fields of the next message: the interface, the context and, until it ends, the task. */
let follow = {};
let task = null;

function readHeader(line) {
  const [, name, value] = line.match(/^([^:]+):(.*)$/) ?? [];
  if (!name) throw new Refused(400, "bad_headers", `A header is "Name: value"; this line has no colon: ${line}`);
  return [name.trim(), value.trim()];
}

function readParts(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Refused(400, "bad_parts", `The parts must be a JSON list: ${error.message}`);
  }
}

function request(method) {
  const { target, url, text, parts, headers, dialect, binding, stream, key } = form.elements;
  const [tenant, agent] = target.value.split("/");
  return {
    ...(target.value ? { tenant, agent } : { url: url.value }),
    method, dialect: dialect.value, binding: binding.value, stream: stream.checked,
    ...(method === "send" ? (parts.value.trim() ? { parts: readParts(parts.value) } : { text: text.value }) : {}),
    ...(headers.value.trim() ? { headers: Object.fromEntries(headers.value.trim().split(/\s*\n/).map(readHeader)) } : {}),
    ...(key.value ? { key: key.value } : {}),
    ...(method === "card" ? {} : follow),
    ...(["get", "cancel"].includes(method) ? { task_id: task } : {}),
  };
}

async function ask(method) {
  const busy = find("#busy");
  busy.textContent = "Asking…";
  try {
    const found = await post("a2a/inspect", request(method));
    const broken = found.findings.length ? plural(found.findings.length, "finding") : "nothing breaks the specification";
    busy.textContent = found.ok ? `Answered in ${duration(found.took_ms)}; ${broken}.` : `Failed in ${duration(found.took_ms)}: ${found.error}`;
    addAnswer(found);
    if (found.card) drawCard(found);
  } finally {
    if (busy.textContent === "Asking…") busy.textContent = "";
  }
}

function addAnswer(found) {
  findings.push(...found.findings.map((finding) => ({ ...finding, frame: finding.frame === null ? null : finding.frame + frames.length })));
  frames.push(...found.frames);
  turns.push(...found.conversation);
  const last = found.conversation.findLast((each) => each.task_id);
  if (last) {
    task = last.task_id;
    const goesOn = /required|working|submitted/i.test(last.state);
    follow = { interface: found.interface, context_id: last.context_id, ...(goesOn ? { task_id: task } : {}) };
  }
  draw();
}

function drawCard({ card, signature }) {
  find("#card").replaceChildren(
    ...(signature ? [el("p", { class: "small" }, `Signature: ${signature.state}. ${signature.detail}`)] : []),
    bytesOf(JSON.stringify(card, null, 2)),
  );
  find("#card-of").hidden = false;
}

function draw() {
  for (const button of ["#get", "#cancel"]) find(button).hidden = !task;
  for (const part of ["#empty", "#no-frames"]) find(part).hidden = frames.length > 0;
  find("#said").replaceChildren(...turns.map((each) => drawTurn({ who: each.role === "user" ? "user" : "agent", name: each.role, note: each.state, parts: [{ type: "text", text: each.text }], asks: /required/i.test(each.state), broke: /failed|rejected/i.test(each.state) })));
  find("#findings").replaceChildren(...findings.map((finding) => el("li", { class: "finding" }, icon("failed", "breaks the specification"), el("span", {}, `${finding.rule}: ${finding.text}`, finding.frame === null ? "" : ` (frame ${finding.frame + 1})`))));
  find("#frames").replaceChildren(...frames.map((each, index) => drawFrame(each, `${index + 1}. ${each.what}`, [each.status])));
}

function showTarget() {
  const elsewhere = !form.elements.target.value;
  find("#by-url").hidden = !elsewhere;
  form.elements.url.required = elsewhere;
}

async function load() {
  if (!(await session()).may("inspect")) return form.replaceChildren("Only the operator may call agents from this page.");
  const agents = await allAgents();
  if (form.elements.target.options.length > 1) return;
  const query = address();
  for (const { tenant, id, name } of agents) {
    const selected = query.get("agent") === id && query.get("tenant") === tenant;
    form.elements.target.append(el("option", { value: `${tenant}/${id}`, selected }, `${name || id} (${tenant})`));
  }
  showTarget();
}

function reset() {
  turns.length = frames.length = findings.length = 0;
  follow = {};
  task = null;
  find("#card-of").hidden = true;
  draw();
}

form.elements.target.addEventListener("change", () => {
  showTarget();
  reset();
});
// Another agent, dialect or binding has another interface.
for (const name of ["url", "dialect", "binding"]) form.elements[name].addEventListener("change", () => (follow = {}));
form.addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(() => ask(event.submitter?.value ?? "send"));
});
click("#anew", reset);
// Set before the first read, so that an address typed meanwhile stays.
form.elements.url.value ||= address().get("url") ?? "";
begin(load);
