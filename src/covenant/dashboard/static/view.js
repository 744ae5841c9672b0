// Elements without markup; times, sizes and states in words. Foreign text is never markup.

export const find = (selector, root = document) => root.querySelector(selector);
export const click = (selector, run) => find(selector).addEventListener("click", run);
export const findAll = (selector, root = document) => [...root.querySelectorAll(selector)];

/** An element. `props`: properties, attributes, and `on…` listeners. A child that is null is left out. */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else put(made, name, value);
  }
  made.append(...children.flat().filter((child) => child != null).map(written));
  return made;
}

function put(element, name, value) {
  if (name in element) element[name] = written(value);
  else element.setAttribute(name, value === true ? "" : written(value));
}

/** Spells out characters that change the direction of writing: with them one text looks like another. */
const written = (value) => (typeof value === "string" ? value.replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (turn) => `⟨U+${turn.codePointAt().toString(16).padStart(4, "0")}⟩`) : value);

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** An icon of the sprite. With a `label` it is read aloud, without one it is decoration. */
export function icon(name, label = "") {
  const use = svg("use", { href: `/ui/static/icons.svg#${name}` });
  return svg("svg", label ? { class: "icon", role: "img", "aria-label": label } : { class: "icon", "aria-hidden": "true" }, use);
}

/** Fills the slots (`data-slot="name"`) of an element, converted by `data-as`. A value is a text, a list of nodes,
 * or properties (`text` and `nodes` among them); null hides the slot. */
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
    const words = written(String(value));
    if (slot.textContent !== words) slot.textContent = words;
    return;
  }
  for (const [name, property] of Object.entries(value)) {
    if (name === "text") set(slot, property);
    else if (name === "nodes") keep(slot, property);
    else if (property === null) slot.removeAttribute(name);
    else put(slot, name, property);
  }
}

const keep = (slot, nodes) => slot.replaceChildren(...nodes.filter((node) => node != null).map(written));

/** One row of a `<template>` for each item, filled by `values(item, row)`. A row that exists stays the same element,
 * so focus and selection survive. `empty` is shown if there are no items. */
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

export function setSpan(element, { x, w = 0 }) {
  element.style.setProperty("--x", `${(x * 100).toFixed(3)}%`);
  element.style.setProperty("--w", `${(w * 100).toFixed(3)}%`);
  return element;
}

/** The address of a page with a query: `to("tasks", { agent })`. */
export const to = (page, query) => `/ui/${page}?${new URLSearchParams(query)}`;
export const act = (verb, query) => to(`act/${verb}`, { ...query, next: location.pathname });
export const button = (verb, query, label, kind = "") => el("a", { class: `button ${kind}`, href: act(verb, query) }, label);
export const tag = (words, title = null) => el("span", { class: "tag", title }, words);
export const quiet = (...words) => el("span", { class: "quiet" }, ...words);
export const bytesOf = (words) => el("pre", { class: "bytes", tabIndex: 0 }, clipped(words));

/** A download of an agent's bytes: the browser never opens them as a page. */
export function download(name, type, bytes) {
  const onclick = ({ currentTarget: link }) => {
    link.href = URL.createObjectURL(new Blob([bytes()], { type: "application/octet-stream" }));
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  };
  return el("a", { class: "button", href: "#", download: name, title: `${name} (${type || "unknown type"})`, onclick }, icon("download"), name);
}

/** A function that runs `run()` soon, at most once in `pause_ms`, and not while the page is hidden. */
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

/** Coarse, to be read at a glance; the title has the exact time. */
function relative(at_ms) {
  const past = Date.now() - at_ms;
  const ms = Math.abs(past);
  if (ms < 5_000) return "now";
  const [unit, size] = UNITS.find(([, least]) => ms >= least);
  const words = `${Math.floor(ms / size)} ${unit}`;
  return past > 0 ? `${words} ago` : `in ${words}`;
}

export const exact = (at_ms) => exactly.format(at_ms);

/** A moment relative to now, kept up to date. */
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

const AS = { number, name: shortName, id: shortId, when: (value) => [when(value)] };

export function bytes(count) {
  if (count < 1_024) return `${count} B`;
  return count < 1_048_576 ? `${number(count / 1_024)} KB` : `${number(count / 1_048_576)} MB`;
}

export const plural = (count, word, words = `${word}s`) => `${number(count)} ${count === 1 ? word : words}`;

/** Cuts a long text and says how much is left out. */
export function clipped(text, most = 100_000) {
  return text.length <= most ? text : `${text.slice(0, most)}\n… ${bytes(text.length - most)} more not shown`;
}

/** Indents JSON; returns any other text unchanged. */
export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export const mark = (label, tone, sign, hint = "") => ({ label, tone, sign, hint });

/** The states in a task's order. `query` selects exactly these tasks. */
export const LANES = Object.entries({
  queued: mark("Queued", "queued", "queued", "waits for a holder"),
  in_flight: mark("Leased", "leased", "leased", "one holder works on it"),
  parked: mark("Waiting", "waits", "waits", "waits for its sender, a signal or a moment"),
  following: mark("Elsewhere", "elsewhere", "elsewhere", "the same work is under way in another task"),
  result_pending: mark("Undrained", "undrained", "undrained", "ended; its sender has not fetched the result"),
  failed: { ...mark("Failed", "bad", "failed", "ended with an error"), query: { state: "done", outcome: "failed" } },
  done: { ...mark("Done", "good", "good", "ended"), query: { state: "done", outcome: "completed,canceled,rejected" } },
}).map(([id, lane]) => ({ id, query: { state: id }, ...lane }));

const OTHERS = {
  asks: mark("Waiting", "waits", "waits", "waits for its sender"),
  suspended: mark("Suspended", "plain", "waits", "sleeps, or waits for a signal"),
  lost: mark("Holder lost", "bad", "lost", "leased, and its holder is gone"),
  canceled: mark("Canceled", "plain", "canceled", "ended before its result"),
  rejected: mark("Rejected", "bad", "canceled", "its agent would not do it"),
  completed: mark("Completed", "good", "good", "ended with a result"),
};
const BY_ID = { ...Object.fromEntries(LANES.map((lane) => [lane.id, lane])), ...OTHERS };

/** Whether the task waits for a message of its sender. */
export const asks = (task) => task.state === "parked" && /required$/.test(task.a2a_state);

/** Of a task that was found or shown, or is a node of a tree. */
export function stateOf(task) {
  if (task.holder_lost) return BY_ID.lost;
  if (task.state === "parked") return asks(task) ? BY_ID.asks : BY_ID.suspended;
  const outcome = task.outcome ?? (["resolved", "done"].includes(task.state) ? task.a2a_state : null);
  if (outcome in BY_ID && task.state !== "result_pending") return BY_ID[outcome];
  return BY_ID[task.state === "resolved" ? "done" : task.state] ?? mark(task.state ?? "unknown", "plain", "all");
}

/** The called name of remote work: all remote work has one recipient here. */
export function calleeOf({ task, task_id, profile }) {
  if (!task) return profile ?? shortId(task_id);
  const { target, recipient } = task;
  return target?.profile ?? target?.name ?? (target?.url ? new URL(target.url).host : shortName(recipient.display));
}

/** Fills a lane's tile, which links to the lane's tasks that also match `others`. */
export function laneTile(tile, { label, hint, tone, sign, query }, count, others = {}) {
  tile.href = to("tasks", { ...others, ...query });
  tile.dataset.tone = tone;
  tile.title = hint;
  return { label: [icon(sign), label], count: number(count) };
}

export const isOver = (state) => ["resolved", "done", "result_pending"].includes(state);

export function chip({ label, hint, tone, sign }) {
  return el("span", { class: "state", "data-tone": tone, title: hint || null }, icon(sign), label);
}
