// The tasks: lanes with their counts, filters that are the address, and what can be done to many at once.

import { get, on, session } from "./api.js";
import { address, attempt, begin, filter, filters, readPage, stayHere } from "./app.js";
import { openBulk } from "./repair.js";
import { chip, el, find, findAll, icon, LANES, laneTile, number, plural, rows, shortId, shortName, stateOf, to } from "./view.js";

const NAMES = ["state", "outcome", "text", "agent", "sender", "tenant", "kind", "origin", "parent", "context", "key", "id", "attempt_min", "cause", "order"];
const PAGE = 30;

let shown = [];
let next = null;
let selectable = false;
const selected = new Set();

/** What the address asks for, without an order, and with numbers as numbers. */
function bulkFilter() {
  const { order, attempt_min, ...asked } = filter(NAMES);
  return attempt_min ? { ...asked, attempt_min: Number(attempt_min) } : asked;
}

function arrive() {
  shown = [];
  again();
}

const page = (from = null) => readPage("tasks", (after) => get("a2a/tasks", { ...filter(NAMES), limit: PAGE, after }), from);

async function load() {
  const found = await page();
  const fresh = new Set(found.tasks.map((task) => task.task_id));
  const onward = next !== null && shown.length > PAGE;
  shown = onward ? [...found.tasks, ...shown.slice(PAGE).filter((task) => !fresh.has(task.task_id))] : found.tasks;
  if (!onward) next = found.next;
  draw();
}

async function loadMore() {
  const found = await page(next);
  const known = new Set(shown.map((task) => task.task_id));
  shown = [...shown, ...found.tasks.filter((task) => !known.has(task.task_id))];
  next = found.next;
  draw();
}

function draw() {
  find("#table").hidden = shown.length === 0;
  find("#more").hidden = !next;
  find("#shown").textContent = shown.length ? `${plural(shown.length, "task")} shown` : "";
  rows("#rows", "task", shown, (task) => task.task_id, row, "#none");
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
    agent: [task.remote ? icon("network", "done elsewhere") : null, " ", shortName(task.agent)],
    tenant: task.tenant && task.tenant !== "default" ? task.tenant : null,
    attempt: task.attempt || "–",
  };
}

const counts = {};

/** The feed counts only what has not ended. */
function lanes(found) {
  Object.assign(counts, found);
  const asked = address();
  const whole = { id: "all", label: "All", tone: "plain", sign: "all", query: {}, hint: "whatever their state" };
  rows("#lanes", "lane", [whole, ...LANES], (lane) => lane.id, (lane, tile) => {
    const { state, outcome, ...others } = Object.fromEntries(asked);
    const here = lane.id === "all" ? !asked.get("state") && !asked.get("outcome") : Object.entries(lane.query).every(([name, value]) => asked.get(name) === value);
    const count = lane.id === "all" ? LANES.reduce((sum, { id }) => sum + (counts[id] ?? 0), 0) : counts[lane.id];
    here ? tile.setAttribute("aria-current", "true") : tile.removeAttribute("aria-current");
    return laneTile(tile, lane, count, others);
  });
}

/** Those with most open work first, as they are counted. */
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
  lanes(found.lanes);
  agents(found.by_agent);
}

function bulkBar() {
  find("#bulk").hidden = selected.size === 0;
  find("#picked").textContent = `${plural(selected.size, "task")} selected`;
  const all = find("#pick-all");
  all.checked = shown.length > 0 && selected.size === shown.length;
  all.indeterminate = selected.size > 0 && !all.checked;
}

function listen() {
  const go = filters(find("#filters"), arrive);
  find("#clear").addEventListener("click", () => go(Object.fromEntries([...address().keys()].map((name) => [name, ""]))));
  for (const part of ["#lanes", "#agents"]) stayHere(find(part), "a", arrive);
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
  find("#more button").addEventListener("click", () => attempt(loadMore));
  find("#bulk").addEventListener("click", ({ target }) => {
    const command = target.closest("button")?.value;
    if (command === "none") {
      selected.clear();
      draw();
    } else if (command) openBulk({ command, ids: [...selected] }, again);
  });
  find("#all-match").addEventListener("click", () => openBulk({ command: "requeue", filter: bulkFilter() }, again));
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
session().then((known) => {
  selectable = known.may("repair");
  for (const part of ["#pick-all", "#all-match"]) find(part).hidden = !selectable;
  draw();
});
begin(loadAll, ["tasks"], 1_500);
