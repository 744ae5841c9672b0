// The tasks: lanes with counts, filters bound to the address, and acts on many tasks.

import { get, on, session } from "./api.js";
import { address, attempt, begin, filter, filters, readPage, navigate } from "./app.js";
import { openBulk } from "./repair.js";
import { chip, click, el, fill, find, findAll, icon, LANES, laneTile, number, plural, rows, shortId, shortName, stateOf, to } from "./view.js";

const NAMES = ["state", "outcome", "text", "agent", "sender", "tenant", "task_kind", "origin", "parent", "context", "key", "id", "attempt_min", "cause", "order"];
const PAGE = 30;
const READ_MAX = 200;

let shown = [];
let wanted = PAGE;
let next = null;
let reads = 0;
let selectable = false;
const selected = new Set();

/** The address's filters without the order; numbers as numbers. */
function bulkFilter() {
  const { order, attempt_min, ...query } = filter(NAMES);
  return attempt_min ? { ...query, attempt_min: Number(attempt_min) } : query;
}

function showFirst() {
  wanted = PAGE;
  again();
}

/** Reads all rows again. A read that a later read has overtaken draws nothing. */
async function load() {
  const read = ++reads;
  const found = new Map();
  let from = null;
  for (let tried = 0; tried < wanted && found.size < wanted; tried += PAGE) {
    const limit = Math.min(wanted - found.size, READ_MAX);
    const page = await readPage("tasks", (after) => get("a2a/tasks", { ...filter(NAMES), limit, after }), from);
    if (read !== reads) return;
    for (const task of page.tasks) found.set(task.task_id, task);
    from = page.next;
    if (!from) break;
  }
  shown = [...found.values()];
  next = from;
  draw();
}

function draw() {
  for (const id of selected) if (!shown.some((task) => task.task_id === id)) selected.delete(id);
  find("#table").hidden = shown.length === 0;
  find("#more").hidden = !next;
  find("#shown").textContent = shown.length ? `${plural(shown.length, "task")} shown` : "";
  rows("#rows", "task", shown, (task) => task.task_id, row, "#none");
  find("#all-match").hidden = !selectable || !Object.keys(bulkFilter()).length;
  fill(find("#none"), address().size ? { some: {}, yet: null } : { some: null, yet: {} });
  bulkBar();
}

function row(task, made) {
  const state = stateOf(task);
  if (made.dataset.was && made.dataset.was !== state.label) {
    made.dataset.fresh = "yes";
    made.addEventListener("animationend", () => delete made.dataset.fresh, { once: true });
  }
  made.dataset.was = state.label;
  const words = task.intent || "(no text)";
  return {
    ...task,
    pick: { hidden: !selectable, checked: selected.has(task.task_id), value: task.task_id, "aria-label": `Select ${shortId(task.task_id)}` },
    state: [chip(state)],
    intent: { text: words, href: `/ui/task/${task.task_id}`, title: words },
    detail: [el("span", { class: "mono" }, shortId(task.task_id)), task.error_message ? ` · ${task.error_message}` : ""],
    agent: { title: task.agent, nodes: [task.remote ? icon("network", "done elsewhere") : null, " ", shortName(task.agent)] },
    attempt: task.attempt || "–",
  };
}

const counts = {};
let byAgent = [];
let home = "default";

/** Tasks of a lane, of the chosen agent and tenant. With other filters the number is not known. */
function countOf(lane) {
  const { state, outcome, order, agent, tenant, ...others } = Object.fromEntries(address());
  if (Object.keys(others).length) return null;
  if (!agent && !tenant) return counts[lane] ?? 0;
  const names = [agent, `${agent}@${tenant ?? home}`];
  const mine = (each) => (!agent || names.includes(each.agent)) && (!tenant || each.tenant === tenant);
  return byAgent.filter(mine).reduce((sum, each) => sum + each[lane], 0);
}

/** The feed counts live tasks alone. */
function lanes(found) {
  Object.assign(counts, found);
  const { state, outcome, ...others } = Object.fromEntries(address());
  const whole = { id: "all", label: "All", tone: "plain", sign: "all", query: {}, hint: "whatever their state" };
  rows("#lanes", "lane", [whole, ...LANES], (lane) => lane.id, (lane, tile) => {
    const here = lane.id === "all" ? !state && !outcome : Object.entries(lane.query).every(([name, value]) => address().get(name) === value);
    const ids = lane.id === "all" ? LANES.map(({ id }) => id) : [lane.id];
    const count = ids.map(countOf).reduce((sum, each) => (each === null ? null : sum + each), 0);
    here ? tile.setAttribute("aria-current", "true") : tile.removeAttribute("aria-current");
    return laneTile(tile, lane, count, others);
  });
}

function agents(entries) {
  find("#by").hidden = entries.length === 0;
  rows("#agents", "agent", entries.slice(0, 30), (entry) => `${entry.tenant} ${entry.agent}`, (entry) => ({
    link: { href: to("tasks", { agent: entry.agent }), "aria-current": address().get("agent") === entry.agent ? "true" : null },
    name: shortName(entry.agent),
    sum: number(LANES.reduce((sum, lane) => sum + entry[lane.id], 0)),
    mix: LANES.filter((lane) => entry[lane.id]).map((lane) => {
      const part = el("i", { "data-tone": lane.tone, title: `${lane.label}: ${number(entry[lane.id])}` });
      part.style.setProperty("--n", Math.sqrt(entry[lane.id]));
      return part;
    }),
  }));
}

async function count() {
  const found = await get("a2a/tasks/counts");
  byAgent = found.by_agent;
  lanes(found.lanes);
  agents(byAgent);
}

function bulkBar() {
  find("#bulk").hidden = selected.size === 0;
  find("#picked").textContent = `${plural(selected.size, "task")} selected`;
  const all = find("#pick-all");
  all.checked = shown.length > 0 && selected.size === shown.length;
  all.indeterminate = selected.size > 0 && !all.checked;
}

function listen() {
  const go = filters(find("#filters"), showFirst);
  click("#clear", () => go(Object.fromEntries([...address().keys()].map((name) => [name, ""]))));
  for (const part of ["#lanes", "#agents"]) navigate(find(part), "a");
  find("#rows").addEventListener("change", ({ target }) => {
    target.checked ? selected.add(target.value) : selected.delete(target.value);
    bulkBar();
  });
  find("#pick-all").addEventListener("change", ({ target }) => {
    selected.clear();
    if (target.checked) for (const task of shown) selected.add(task.task_id);
    for (const box of findAll('#rows input[type="checkbox"]')) box.checked = target.checked;
    bulkBar();
  });
  click("#more button", () => {
    wanted += PAGE;
    attempt(load);
  });
  click("#bulk", ({ target }) => {
    const command = target.closest("button")?.value;
    if (command === "none") {
      selected.clear();
      draw();
    } else if (command) openBulk({ command, ids: [...selected] }, again);
  });
  click("#all-match", () => openBulk({ command: "requeue", filter: bulkFilter() }, again));
}

async function loadAll() {
  await load();
  await count();
}

function again() {
  selected.clear();
  return attempt(loadAll);
}

on("counts", (found) => lanes(found.lanes));
listen();
session().then((user) => {
  selectable = user.may("repair");
  home = user.tenant ?? home;
  find("#pick-all").hidden = !selectable;
  draw();
});
begin(loadAll, ["tasks"], 1_500);
