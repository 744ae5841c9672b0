// A task's story in time: a bar for each wait, attempt, call and push; turns as bands; long waits folded.

import { el, icon } from "./dom.js";
import { duration, exact, plural } from "./format.js";

const KINDS = {
  queued: { label: "In the queue", tone: "queued", sign: "queued", waits: true },
  attempt: { label: "Attempt", tone: "leased", sign: "leased" },
  parked: { label: "Waits for its sender", tone: "waits", sign: "waits", waits: true },
  following: { label: "Follows another task", tone: "elsewhere", sign: "elsewhere", waits: true },
  child: { label: "Call", tone: "elsewhere", sign: "tree" },
  push: { label: "Push", tone: "undrained", sign: "push", thin: true },
  model: { label: "Model", tone: "good", sign: "model", thin: true },
  tool: { label: "Tool", tone: "undrained", sign: "tool", thin: true },
  chunks: { label: "Output", tone: "good", sign: "out", thin: true },
  repair: { label: "Repair", tone: "bad", sign: "repair", point: true },
};
const FOLD_SHARE = 0.35;
const FOLD_WIDTH = 0.06;
const TICKS = 5;

/** From a moment to its place, 0 to 1. Stretches in which nothing but waiting happens are folded when they would fill the page. */
export function timeScale(bars, begins_ms, ends_ms) {
  const marks = new Set([begins_ms, ends_ms]);
  for (const bar of bars) for (const at of [bar.begins_ms, bar.ends_ms ?? ends_ms]) marks.add(Math.min(Math.max(at, begins_ms), ends_ms));
  const sorted = [...marks].sort((a, b) => a - b);
  const busy = bars.filter((bar) => !KINDS[bar.kind]?.waits);
  const parts = sorted.slice(1).map((to, index) => {
    const from = sorted[index];
    return { from, to, idle: !busy.some((bar) => bar.begins_ms < to && (bar.ends_ms ?? ends_ms) > from) };
  });
  const all = ends_ms - begins_ms || 1;
  const work = parts.reduce((sum, part) => sum + (part.idle ? 0 : part.to - part.from), 0);
  for (const part of parts) part.folded = part.idle && work > 0 && (part.to - part.from) / all > FOLD_SHARE;
  const folds = parts.filter((part) => part.folded).length;
  const open = parts.reduce((sum, part) => sum + (part.folded ? 0 : part.to - part.from), 0) || 1;
  let x = 0;
  for (const part of parts) {
    part.x = x;
    part.w = part.folded ? FOLD_WIDTH : ((part.to - part.from) / open) * (1 - folds * FOLD_WIDTH);
    x += part.w;
  }
  const place = (at) => {
    const part = parts.find((each) => at <= each.to) ?? parts.at(-1);
    if (!part) return 0;
    const share = (at - part.from) / (part.to - part.from || 1);
    return part.x + part.w * Math.min(Math.max(share, 0), 1);
  };
  return { place, folds: parts.filter((part) => part.folded) };
}

export function setSpan(element, x, w) {
  element.style.setProperty("--x", `${(x * 100).toFixed(3)}%`);
  element.style.setProperty("--w", `${(w * 100).toFixed(3)}%`);
  return element;
}

/** Draw what `readTimeline` gives into `root`. */
export function drawWaterfall(root, timeline) {
  const begins = timeline.begins_ms;
  const ends = Math.max(timeline.ends_ms ?? timeline.now_ms, begins + 1);
  const scale = timeScale(timeline.bars, begins, ends);
  root.replaceChildren(axis(scale, begins, ends), ...timeline.bars.map((bar) => line(bar, timeline, scale, ends)));
  for (const fold of scale.folds) {
    root.append(el("p", { class: "small quiet" }, `Folded: ${duration(fold.to - fold.from)} in which nothing but waiting happened.`));
  }
  if (timeline.truncated) root.append(el("p", { class: "small quiet" }, "There is more than is drawn: the raw steps have it."));
}

function axis(scale, begins, ends) {
  const line = el("div");
  const open = ends - begins;
  const times = [];
  for (let tick = 0; tick <= TICKS; tick++) times.push(begins + (open * tick) / TICKS);
  let last = -1;
  for (const at of scale.folds.length ? [begins, ...scale.folds.flatMap((fold) => [fold.from, fold.to]), ends] : times) {
    const x = scale.place(at);
    if (at !== begins && (x - last < 0.14 || (at !== ends && 1 - x < 0.16))) continue;
    last = x;
    line.append(setSpan(el("span", { title: exact(at) }, at === begins ? "0" : `+${duration(at - begins)}`), x, 0));
  }
  return el("div", { class: "fall-axis", "aria-hidden": "true" }, el("span"), line, el("span"));
}

function line(bar, timeline, scale, ends) {
  const kind = KINDS[bar.kind] ?? { label: bar.kind, tone: "plain", sign: "all" };
  const tone = bar.outcome && ["failed", "error", "lost", "timed_out", "dead"].includes(bar.outcome) ? "bad" : kind.tone;
  const to = bar.ends_ms ?? ends;
  const x = scale.place(bar.begins_ms);
  const took = kind.point ? "" : duration((bar.ends_ms ?? timeline.now_ms) - bar.begins_ms);
  const words = bar.label || kind.label;
  const name = bar.task_id ? el("a", { class: "clip", href: `/ui/task/${bar.task_id}` }, words) : el("span", { class: "clip" }, words);
  const classes = ["bar", kind.thin && "thin", kind.waits && "wait", kind.point && "point", bar.ends_ms === null && !kind.point && "open"];
  const title = [words, bar.outcome, bar.detail, bar.count ? plural(bar.count, "piece") : null, exact(bar.begins_ms)].filter(Boolean).join(" · ");
  const drawn = el("div", { class: classes.filter(Boolean).join(" "), title });
  const track = el("div", { class: "fall-track" });
  for (const turn of timeline.turns) {
    const from = scale.place(turn.begins_ms);
    track.append(setSpan(el("i", { class: "band" }), from, scale.place(turn.ends_ms ?? ends) - from));
  }
  for (const fold of scale.folds) track.append(setSpan(el("i", { class: "fold" }), scale.place(fold.from), scale.place(fold.to) - scale.place(fold.from)));
  track.append(setSpan(drawn, x, kind.point ? 0 : scale.place(to) - x));
  const signs = [icon(kind.sign), bar.remote ? icon("network", "done elsewhere") : null];
  return el("div", { class: "fall-row", "data-tone": tone, role: "listitem", title }, el("div", {}, signs, name), track, el("div", { class: "num" }, took));
}
