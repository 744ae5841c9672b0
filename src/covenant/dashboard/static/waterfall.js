// A task's story in time, read from its leases, its steps, its calls and its pushes: a bar for each; turns as bands; long waits folded.

import { calleeOf, duration, el, exact, icon, plural, shortId, shortName } from "./view.js";

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
function timeScale(bars, begins_ms, ends_ms) {
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
  const tone = bar.outcome && ["failed", "error", "lost", "timed_out", "given up"].includes(bar.outcome) ? "bad" : kind.tone;
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

const TOOL = "x-arbiter.tool_call";
const TOOK = "x-arbiter.took_ms";
const PAUSE_MS = 2_000;
const BARS_MAX = 400;

/** `shown`: the answer of `show`; `calls`: its children, found by their parent; `elsewhere`: nodes of its tree; `pushes`: what is still to be told to webhooks. */
export function readTimeline(shown, calls, elsewhere, pushes, now_ms = Date.now()) {
  const over = shown.updates.find((step) => step.kind === "settled");
  const ends_ms = over?.ts_ms ?? null;
  const attempts = shown.leases.flatMap((lease) => attempt(lease, shown.holder_lost));
  const bars = [...waits(shown, ends_ms), ...attempts, ...models(shown, ends_ms), ...output(shown.updates), ...calls.map((each) => call(each, elsewhere.find((node) => node.task_id === each.task_id && node.remote))), ...pushes.map(push)];
  bars.sort((a, b) => a.begins_ms - b.begins_ms);
  const last = bars.reduce((most, each) => Math.max(most, each.ends_ms ?? now_ms), ends_ms ?? now_ms);
  const truncated = shown.truncated || bars.length > BARS_MAX;
  return { begins_ms: shown.created_at_ms, ends_ms: last, now_ms, bars: bars.slice(0, BARS_MAX), turns: turns(shown, ends_ms ?? last), truncated };
}

const bar = (kind, begins_ms, ends_ms, more = {}) => ({ kind, begins_ms, ends_ms, ...more });

function attempt(lease, lost) {
  const outcome = lease.outcome ?? (lost ? "lost" : null);
  const made = bar("attempt", lease.leased_at_ms, lease.ended_at_ms ?? null, { label: `Attempt ${lease.attempt}`, outcome, detail: lease.reason });
  const mended = lease.reason && /requeue|forced|repair/.test(lease.outcome ?? "");
  return mended ? [made, bar("repair", lease.ended_at_ms, lease.ended_at_ms, { label: lease.outcome.replaceAll("_", " "), detail: lease.reason })] : [made];
}

/** Between its beginning, its leases and its end, a task waits: for its sender if it was parked, else for a holder. */
function* waits({ created_at_ms, leases, updates, state }, ends_ms) {
  let from = created_at_ms;
  for (const lease of [...leases, null]) {
    const to = lease ? lease.leased_at_ms : ends_ms;
    const parked = updates.find((step) => step.kind === "parked" && step.ts_ms >= from && (to === null || step.ts_ms <= to));
    const answered = parked && updates.find((step) => step.kind === "continued" && step.ts_ms >= parked.ts_ms);
    if (parked) yield bar("parked", parked.ts_ms, answered?.ts_ms ?? to);
    const queued = parked ? answered?.ts_ms : from;
    const waited = lease ? to > queued : ["queued", "following"].includes(state);
    if (queued !== undefined && waited) yield bar(state === "following" ? "following" : "queued", queued, to);
    from = lease?.ended_at_ms ?? to;
    if (from === null) return;
  }
}

/** The use of a tool that a step tells of, or null. It is told when it has ended. */
function tool(step) {
  const part = step.body?.parts?.find((each) => each.metadata?.[TOOL]);
  if (!part) return null;
  const begins_ms = step.ts_ms - (part.metadata[TOOK] ?? 0);
  return bar("tool", begins_ms, step.ts_ms, { label: part.value?.tool ?? "tool", outcome: part.value?.ok === false ? "failed" : null });
}

/** A model was asked from an attempt's beginning on, or from the end of a tool's use, until it used a tool or had answered. */
function* models({ leases, updates, result }, ends_ms) {
  const requests = result?.metadata?.usage?.requests;
  if (!requests) return;
  const uses = updates.map(tool).filter(Boolean);
  for (const lease of leases) {
    let from = lease.leased_at_ms;
    const to = lease.ended_at_ms ?? ends_ms;
    for (const use of uses.filter((each) => each.ends_ms >= from && (to === null || each.ends_ms <= to))) {
      if (use.begins_ms > from) yield bar("model", from, use.begins_ms);
      from = Math.max(from, use.ends_ms);
    }
    if (to === null || to > from) yield bar("model", from, to, { detail: `${plural(requests, "request")} in all` });
  }
}

/** Pieces of text that came one after another are one bar, and tool calls one each. */
function output(updates) {
  const bars = [];
  let run = null;
  for (const step of updates) {
    const use = tool(step);
    if (use) bars.push(use);
    else if (step.kind === "artifact") {
      if (!run || step.ts_ms - run.ends_ms > PAUSE_MS) bars.push((run = bar("chunks", step.ts_ms, step.ts_ms, { count: 0 })));
      run.ends_ms = step.ts_ms;
      run.count++;
    } else run = null;
  }
  return bars;
}

function call(task, node) {
  const over = ["done", "result_pending"].includes(task.state);
  const label = node ? [calleeOf(node), node.provider ? shortId(node.provider) : node.url && new URL(node.url).host].filter(Boolean).join(" · ") : shortName(task.agent);
  return bar("child", task.created_at_ms, over ? task.updated_at_ms : null, { label, task_id: task.task_id, remote: task.remote, outcome: task.outcome, detail: task.intent });
}

const PUSHED = { dead: "given up", failing: "failing", live: null };

function push(each) {
  const told = `${plural(each.delivered, "step")} told, ${plural(each.attempts, "failed attempt")}`;
  return bar("push", each.made_at_ms, each.dead_at_ms ?? null, { label: `Push to ${each.host}`, outcome: PUSHED[each.state], detail: [told, each.failure].filter(Boolean).join("; ") });
}

function turns({ created_at_ms, updates }, ends_ms) {
  const begun = [created_at_ms, ...updates.filter((step) => step.kind === "continued").map((step) => step.ts_ms)];
  return begun.map((begins_ms, index) => ({ turn: index + 1, begins_ms, ends_ms: begun[index + 1] ?? ends_ms }));
}
