// A task's story in time: a bar for each wait, attempt, call, push, and use of a model or a tool; turns as bands; long waits folded.

import { duration, el, exact, icon, setSpan } from "./view.js";

const KINDS = {
  queued: { tone: "queued", sign: "queued", shape: "wait" },
  attempt: { tone: "leased", sign: "leased" },
  parked: { tone: "waits", sign: "waits", shape: "wait" },
  following: { tone: "elsewhere", sign: "elsewhere", shape: "wait" },
  child: { tone: "elsewhere", sign: "tree" },
  push: { tone: "undrained", sign: "push", shape: "thin" },
  model: { tone: "good", sign: "model", shape: "thin" },
  tool: { tone: "undrained", sign: "tool", shape: "thin" },
  chunks: { tone: "good", sign: "out", shape: "thin" },
  repair: { tone: "bad", sign: "repair", shape: "point" },
};

/** Draw the answer of `timeline` into `root`. */
export function drawWaterfall(root, timeline) {
  const { begins_ms, bars, folds, ticks, truncated } = timeline;
  const times = ticks.map((tick) => setSpan(el("span", { title: exact(tick.at_ms) }, tick.at_ms === begins_ms ? "0" : `+${duration(tick.at_ms - begins_ms)}`), tick));
  const notes = folds.map(({ ms }) => `Folded: ${duration(ms)} in which nothing but waiting happened.`);
  if (truncated) notes.push("There is more than is drawn: the raw steps have it.");
  root.replaceChildren(
    el("div", { class: "fall-axis", "aria-hidden": "true" }, el("span"), el("div", {}, times), el("span")),
    ...bars.map((bar) => line(bar, timeline)),
    ...notes.map((words) => el("p", { class: "small quiet" }, words)),
  );
}

function line(bar, { bands, folds, now_ms }) {
  const { tone, sign, shape = "" } = KINDS[bar.kind];
  const title = [bar.label, bar.detail, exact(bar.begins_ms)].filter(Boolean).join(" · ");
  const behind = [["band", bands], ["fold", folds]].flatMap(([name, spans]) => spans.map((span) => setSpan(el("i", { class: name }), span)));
  const drawn = setSpan(el("div", { class: `bar ${shape} ${bar.ends_ms === null ? "open" : ""}`, title }), bar);
  const name = el(bar.task_id ? "a" : "span", { class: "clip", href: bar.task_id && `/ui/task/${bar.task_id}` }, bar.label);
  return el(
    "div",
    { class: "fall-row", "data-tone": bar.bad ? "bad" : tone, role: "listitem", title },
    el("div", {}, icon(sign), bar.remote ? icon("network", "done elsewhere") : null, name),
    el("div", { class: "fall-track" }, behind, drawn),
    el("div", { class: "num" }, shape === "point" ? "" : duration((bar.ends_ms ?? now_ms) - bar.begins_ms)),
  );
}
