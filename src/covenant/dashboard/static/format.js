// Times, sizes and numbers as people read them.

import { el, findAll } from "./dom.js";

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
