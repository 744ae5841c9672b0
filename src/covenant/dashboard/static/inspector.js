// Talk to any A2A agent: what was said on one side, every frame on the other, with what breaks the specification marked.

import { get, post, session } from "./api.js";
import { attempt, begin } from "./app.js";
import { drawTurn } from "./conversation.js";
import { el, find, icon } from "./dom.js";
import { clipped, duration, plural, pretty } from "./format.js";

const form = find("#ask");
const said = [];
const frames = [];
let follow = {};

const lines = (text) => Object.fromEntries(text.split("\n").filter((line) => line.includes(":")).map((line) => [line.slice(0, line.indexOf(":")).trim(), line.slice(line.indexOf(":") + 1).trim()]));

function request(method) {
  const { target, url, text, parts, headers, dialect, binding, stream, key } = form.elements;
  const [tenant, agent] = target.value.split("/");
  return {
    ...(target.value ? { tenant, agent } : { url: url.value }),
    method, dialect: dialect.value, binding: binding.value, stream: stream.checked,
    ...(method === "send" ? (parts.value.trim() ? { parts: JSON.parse(parts.value) } : { text: text.value }) : {}),
    ...(headers.value.trim() ? { headers: lines(headers.value) } : {}),
    ...(key.value ? { key: key.value } : {}),
    ...(method === "card" ? {} : follow),
  };
}

async function ask(method) {
  const busy = find("#busy");
  busy.textContent = "Asking…";
  const asked = request(method);
  try {
    const found = await post("a2a/inspect", asked);
    busy.textContent = `${found.ok ? "Answered" : "Failed"} in ${duration(found.took_ms)}; ${found.findings.length ? plural(found.findings.length, "finding") : "nothing breaks the specification"}.`;
    const first = frames.length;
    frames.push(...found.frames);
    said.push(...found.conversation);
    const last = found.conversation.findLast((each) => each.task_id);
    follow = last && /required|working|submitted/i.test(last.state ?? "") ? { task_id: last.task_id } : {};
    draw(found.findings.map((finding) => ({ ...finding, frame: finding.frame === null ? null : finding.frame + first })));
    if (found.card) find("#card").replaceChildren(el("pre", { class: "bytes", tabIndex: 0 }, clipped(JSON.stringify(found.card, null, 2))));
    find("#card-of").hidden = !found.card;
  } catch (error) {
    busy.textContent = "";
    throw error;
  }
}

function draw(findings) {
  for (const part of ["#empty", "#no-frames"]) find(part).hidden = frames.length > 0;
  find("#said").replaceChildren(...said.map((each) => drawTurn({ who: each.role === "user" ? "user" : "agent", name: each.role, note: each.state, parts: [{ type: "text", text: each.text }], asks: /required/i.test(each.state ?? ""), broke: /failed|rejected/i.test(each.state ?? "") })));
  find("#findings").replaceChildren(...findings.map((finding) => el("li", { class: "finding" }, icon("failed", "breaks the specification"), el("span", {}, `${finding.rule}: ${finding.text}`, finding.frame === null ? "" : ` (frame ${finding.frame + 1})`))));
  find("#frames").replaceChildren(...frames.map(frame));
}

function frame(each, index) {
  const headers = Object.entries(each.headers ?? {}).map(([name, value]) => `${name}: ${value}`).join("\n");
  return el(
    "li",
    { class: "frame", "data-direction": each.direction },
    el("header", {}, icon(each.direction, each.direction === "out" ? "sent" : "received"), el("b", {}, `${index + 1}. ${each.what}`), each.status ? el("span", { class: "tag" }, String(each.status)) : null),
    (each.findings ?? []).map((text) => el("p", { class: "finding" }, icon("failed", "breaks the specification"), text)),
    headers ? el("details", {}, el("summary", { class: "small" }, "Headers"), el("pre", { class: "bytes", tabIndex: 0 }, headers)) : null,
    each.text ? el("pre", { class: "bytes", tabIndex: 0 }, clipped(pretty(each.text))) : null,
  );
}

function changed() {
  const elsewhere = !form.elements.target.value;
  find("#by-url").hidden = !elsewhere;
  form.elements.url.required = elsewhere;
}

async function load() {
  if (form.elements.target.options.length > 1) return;
  await session();
  const { tenants } = await get("v1/admin/tenants");
  const lists = await Promise.all(tenants.map(({ name }) => get(`v1/admin/tenants/${encodeURIComponent(name)}/agents`)));
  const asked = new URLSearchParams(location.search);
  for (const { tenant, agents } of lists) {
    for (const agent of agents) {
      const selected = asked.get("agent") === agent.id && asked.get("tenant") === tenant;
      form.elements.target.append(el("option", { value: `${tenant}/${agent.id}`, selected }, `${agent.name || agent.id} (${tenant})`));
    }
  }
  form.elements.url.value = asked.get("url") ?? "";
  changed();
}

form.elements.target.addEventListener("change", changed);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(() => ask(event.submitter?.value ?? "send"));
});
find("#anew").addEventListener("click", () => {
  said.length = frames.length = 0;
  follow = {};
  draw([]);
});
begin(load);
