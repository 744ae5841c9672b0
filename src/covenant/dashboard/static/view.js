// What pages are made of: elements without markup, and times, sizes, numbers and states as people read them. What comes from
// elsewhere is only ever set as text.

export const find = (selector, root = document) => root.querySelector(selector);
export const findAll = (selector, root = document) => [...root.querySelectorAll(selector)];

/** An element. `props`: properties, `class`, `data-…`, `aria-…`, and `on…` listeners; a child that is null is left out. */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && !name.includes("-")) made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child != null));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A sign of the sprite. With a `label` it is read aloud, without one it is decoration. */
export function icon(name, label = "") {
  const use = svg("use", { href: `/ui/static/icons.svg#${name}` });
  return svg("svg", label ? { class: "icon", role: "img", "aria-label": label } : { class: "icon", "aria-hidden": "true" }, use);
}

/** How a slot writes its value, by its `data-as`. */
const AS = { number: (value) => number(value), name: (value) => shortName(value), id: (value) => shortId(value), when: (value) => [when(value)] };

/**
 * Put values into the slots (`data-slot="name"`) of an element, as its `data-as` has it. A text or number becomes text, a list of nodes the
 * slot's children; null hides the slot; an object sets properties, `text` and `nodes` among them.
 */
export function fill(root, values) {
  const slots = findAll("[data-slot]", root);
  if (root.dataset?.slot) slots.push(root);
  for (const slot of slots) {
    const { slot: name, as } = slot.dataset;
    if (name in values) set(slot, as ? AS[as](values[name]) : values[name]);
  }
  return root;
}

function set(slot, value) {
  slot.hidden = value == null;
  if (slot.hidden) return;
  if (Array.isArray(value)) return keep(slot, value);
  if (typeof value !== "object") {
    if (slot.textContent !== String(value)) slot.textContent = value;
    return;
  }
  for (const [name, given] of Object.entries(value)) {
    if (name === "text") set(slot, given);
    else if (name === "nodes") keep(slot, given);
    else if (name in slot && !name.includes("-")) slot[name] = given;
    else if (given === null) slot.removeAttribute(name);
    else slot.setAttribute(name, given);
  }
}

const keep = (slot, nodes) => slot.replaceChildren(...nodes.filter((node) => node != null));

/**
 * Have the children of an element be rows of a `<template>`, one an item, in order: `values(item, row)` fills a row. A row
 * that is there already stays the same element: focus, selection and scroll position survive. `empty` is shown if there are none.
 */
export function rows(selector, template, items, key, values, empty = null) {
  if (empty) find(empty).hidden = items.length > 0;
  const parent = find(selector);
  const known = new Map([...parent.children].map((row) => [row.dataset.key, row]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const id = String(key(item));
    const row = known.get(id) ?? document.getElementById(template).content.firstElementChild.cloneNode(true);
    known.delete(id);
    row.dataset.key = id;
    fill(row, values(item, row));
    if (row === at) at = at.nextElementSibling;
    else parent.insertBefore(row, at);
  }
  for (const gone of known.values()) gone.remove();
}

/** The place of a bar: where it begins and how wide it is, of 1. */
export function setSpan(element, { x, w = 0 }) {
  element.style.setProperty("--x", `${(x * 100).toFixed(3)}%`);
  element.style.setProperty("--w", `${(w * 100).toFixed(3)}%`);
  return element;
}

/** The address of a page, asked for this: `to("tasks", { agent })`. */
export const to = (page, query) => `/ui/${page}?${new URLSearchParams(query)}`;
/** The form of an act; it leads back here. */
export const act = (verb, query) => to(`act/${verb}`, { ...query, next: location.pathname });
export const tag = (words, title = null) => el("span", { class: "tag", title }, words);
export const quiet = (...words) => el("span", { class: "quiet" }, ...words);
export const bytesOf = (words) => el("pre", { class: "bytes", tabIndex: 0 }, clipped(words));

/** A download of what an agent sent: it is never opened in a page of ours. */
export function download(name, type, bytes) {
  const onclick = ({ currentTarget: link }) => {
    link.href = URL.createObjectURL(new Blob([bytes()], { type: "application/octet-stream" }));
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  };
  return el("a", { class: "button", href: "#", download: name, title: `${name} (${type || "unknown type"})`, onclick }, icon("download"), name);
}

/** Run it soon, and at most once in `pause_ms`, however often it is asked for; not while nobody looks. */
export function throttled(run, pause_ms) {
  let wanted = false;
  let resting = false;
  const go = async () => {
    if (resting || !wanted || document.hidden) return;
    wanted = false;
    resting = true;
    try {
      await run();
    } finally {
      setTimeout(() => {
        resting = false;
        go();
      }, pause_ms);
    }
  };
  document.addEventListener("visibilitychange", go);
  return () => {
    wanted = true;
    go();
  };
}

const UNITS = [["d", 86_400_000], ["h", 3_600_000], ["min", 60_000], ["s", 1_000]];
const grouped = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });
const exactly = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });

export const number = (value) => (value == null ? "–" : grouped.format(value));

/** `1.2 s`, `3 min 20 s`, `2 d 4 h`. */
export function duration(ms) {
  if (ms == null) return "–";
  if (ms < 1_000) return `${Math.max(0, Math.round(ms))} ms`;
  if (ms < 10_000) return `${(ms / 1_000).toFixed(1)} s`;
  const at = UNITS.findIndex(([, size]) => ms >= size);
  const [unit, size] = UNITS[at];
  const whole = Math.floor(ms / size);
  if (at === UNITS.length - 1) return `${whole} ${unit}`;
  const [smaller, part] = UNITS[at + 1];
  const rest = Math.floor((ms % size) / part);
  return rest && whole < 10 ? `${whole} ${unit} ${rest} ${smaller}` : `${whole} ${unit}`;
}

/** Coarse on purpose: it is read at a glance; its title is exact. */
function relative(at_ms) {
  const past = Date.now() - at_ms;
  const ms = Math.abs(past);
  if (ms < 5_000) return "now";
  const [unit, size] = UNITS.find(([, least]) => ms >= least);
  const words = `${Math.floor(ms / size)} ${unit}`;
  return past > 0 ? `${words} ago` : `in ${words}`;
}

export const exact = (at_ms) => exactly.format(at_ms);

/** A moment, told relative to now; it keeps itself up to date. */
export function when(at_ms) {
  if (!at_ms) return quiet("–");
  return el("time", { dateTime: new Date(at_ms).toISOString(), title: exact(at_ms), "data-at": at_ms }, relative(at_ms));
}

setInterval(() => {
  if (document.hidden) return;
  for (const time of findAll("time[data-at]")) {
    const words = relative(Number(time.dataset.at));
    if (time.textContent !== words) time.textContent = words;
  }
}, 5_000);

export const shortId = (id) => (id ? id.slice(0, 8) : "–");

export const shortName = (display) => (display ?? "–").replace(/@default$/, "");

export function bytes(count) {
  if (count < 1_024) return `${count} B`;
  return count < 1_048_576 ? `${number(count / 1_024)} KB` : `${number(count / 1_048_576)} MB`;
}

export const plural = (count, word, words = `${word}s`) => `${number(count)} ${count === 1 ? word : words}`;

/** Text of any length, cut where a page would become slow; the cut is told. */
export function clipped(text, most = 100_000) {
  return text.length <= most ? text : `${text.slice(0, most)}\n… ${bytes(text.length - most)} more are not shown`;
}

/** JSON with its lines, and whatever else as it is. */
export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Where tasks stand, in the order of their way. `query` asks for exactly those: its state is its id, if nothing else is said. */
export const LANES = [
  { id: "queued", label: "Queued", hint: "waits for a holder", tone: "queued", sign: "queued" },
  { id: "in_flight", label: "Leased", hint: "one holder works on it", tone: "leased", sign: "leased" },
  { id: "parked", label: "Waiting", hint: "waits for its sender", tone: "waits", sign: "waits" },
  { id: "following", label: "Elsewhere", hint: "the same work is under way in another task", tone: "elsewhere", sign: "elsewhere" },
  { id: "result_pending", label: "Undrained", hint: "ended; its sender has not taken the result", tone: "undrained", sign: "undrained" },
  { id: "failed", label: "Failed", hint: "ended with an error", tone: "bad", sign: "failed", query: { state: "done", outcome: "failed" } },
  { id: "done", label: "Done", hint: "ended", tone: "good", sign: "good", query: { state: "done", outcome: "completed,canceled,rejected" } },
].map((lane) => ({ query: { state: lane.id }, ...lane }));

const OTHERS = {
  lost: { label: "Holder lost", hint: "leased, and its holder is gone", tone: "bad", sign: "lost" },
  canceled: { label: "Canceled", hint: "ended before its result", tone: "plain", sign: "canceled" },
  rejected: { label: "Rejected", hint: "its agent would not do it", tone: "bad", sign: "canceled" },
  completed: { label: "Completed", hint: "ended with a result", tone: "good", sign: "good" },
};
const BY_ID = { ...Object.fromEntries(LANES.map((lane) => [lane.id, lane])), ...OTHERS };

/** Of a task of any answer: found, shown, or a node of a tree. */
export function stateOf(task) {
  if (task.holder_lost) return BY_ID.lost;
  const outcome = task.outcome ?? (["resolved", "done"].includes(task.state) ? task.a2a_state : null);
  if (outcome in BY_ID && task.state !== "result_pending") return BY_ID[outcome];
  return BY_ID[task.state === "resolved" ? "done" : task.state] ?? { label: task.state ?? "unknown", hint: "", tone: "plain", sign: "all" };
}

/** Work that is done elsewhere is all for one recipient here: what it was called by tells more. `node`: of a tree. */
export function calleeOf({ task, task_id }) {
  if (!task) return shortId(task_id);
  const { target, recipient } = task;
  return target?.name ?? target?.profile ?? (target?.url ? new URL(target.url).host : shortName(recipient.display));
}

/** What fills the tile of a lane: it leads to its tasks, of those that `others` ask for. */
export function laneTile(tile, { label, hint, tone, sign, query }, count, others = {}) {
  tile.href = to("tasks", { ...others, ...query });
  tile.dataset.tone = tone;
  tile.title = hint;
  return { label: [icon(sign), label], count: number(count ?? 0) };
}

export const isOver = (state) => ["resolved", "done", "result_pending"].includes(state);

export function chip({ label, hint, tone, sign }) {
  return el("span", { class: "state", "data-tone": tone, title: hint || null }, icon(sign), label);
}
