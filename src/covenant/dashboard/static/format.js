// Times, sizes, numbers and states as people read them.

import { el, findAll, icon } from "./dom.js";

const UNITS = [["d", 86_400_000], ["h", 3_600_000], ["min", 60_000], ["s", 1_000]];
const grouped = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });
const exactly = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long", fractionalSecondDigits: undefined });

export const number = (value) => (value === null || value === undefined ? "–" : grouped.format(value));

/** `1.2 s`, `3 min 20 s`, `2 d 4 h`. */
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
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

/** Coarse on purpose: it is read at a glance, and the exact moment is its title. */
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
  if (!at_ms) return el("span", { class: "quiet" }, "–");
  const date = new Date(at_ms);
  return el("time", { dateTime: date.toISOString(), title: exact(at_ms), "data-at": at_ms }, relative(at_ms));
}

setInterval(() => {
  if (document.hidden) return;
  for (const time of findAll("time[data-at]")) {
    const words = relative(Number(time.dataset.at));
    if (time.textContent !== words) time.textContent = words;
  }
}, 5_000);

export const shortId = (id) => (id ? id.slice(0, 8) : "–");

/** The name before the `@`, which is what differs. */
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

/** Where tasks stand, in the order of their way. `query` asks for exactly those. */
export const LANES = [
  { id: "queued", label: "Queued", hint: "waits for a holder", tone: "queued", sign: "queued", query: { state: "queued" } },
  { id: "in_flight", label: "Leased", hint: "one holder works on it", tone: "leased", sign: "leased", query: { state: "in_flight" } },
  { id: "parked", label: "Waiting", hint: "waits for its sender", tone: "waits", sign: "waits", query: { state: "parked" } },
  { id: "following", label: "Elsewhere", hint: "the same work is under way in another task", tone: "elsewhere", sign: "elsewhere", query: { state: "following" } },
  { id: "result_pending", label: "Undrained", hint: "ended; its sender has not taken the result", tone: "undrained", sign: "undrained", query: { state: "result_pending" } },
  { id: "failed", label: "Failed", hint: "ended with an error", tone: "bad", sign: "failed", query: { state: "done", outcome: "failed" } },
  { id: "done", label: "Done", hint: "ended", tone: "good", sign: "good", query: { state: "done", outcome: "completed,canceled,rejected" } },
];

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

export const isOver = (state) => ["resolved", "done", "result_pending"].includes(state);

export function chip({ label, hint, tone, sign }) {
  return el("span", { class: "state", "data-tone": tone, title: hint || null }, icon(sign), label);
}
