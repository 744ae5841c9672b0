// What needs a person, and how much there is of everything.

import { get, session } from "./api.js";
import { begin } from "./app.js";
import { copy, el, fill, find, icon, list, svg } from "./dom.js";
import { LANES, number, when } from "./format.js";

const SIGNS = {
  holder_lost: "lost", parked_long: "waits", push_dead: "push", delegation_lost: "peers",
  writer_failed: "failed", archive_lag: "undrained", login_refused: "audit",
};
const SHOWN = ["queued", "in_flight", "parked", "following", "result_pending", "failed"];

begin(async () => {
  const [found, rates, known] = await Promise.all([get("a2a/attention"), get("rates"), session()]);
  numbers(found.numbers);
  spark(find("#settled"), rates.settled);
  spark(find("#broken"), rates.failed);
  needs(found.items, known.role === "operator");
}, ["counts", "pushes", "peers", "audit"], 1_000);

function numbers(counts) {
  const lanes = LANES.filter((lane) => SHOWN.includes(lane.id));
  list(find("#numbers"), lanes, (lane) => lane.id, () => copy("number"), (tile, lane) => {
    tile.href = `/ui/tasks?${new URLSearchParams(lane.query)}`;
    tile.dataset.tone = lane.tone;
    tile.title = lane.hint;
    fill(tile, { count: number(counts[lane.id] ?? 0), label: [icon(lane.sign), lane.label] });
  });
}

function spark(figure, values) {
  const most = Math.max(1, ...values);
  const x = (index) => ((index / (values.length - 1)) * 100).toFixed(2);
  const y = (value) => (38 - (value / most) * 36).toFixed(2);
  const line = values.map((value, index) => `${index ? "L" : "M"}${x(index)} ${y(value)}`).join("");
  const sum = values.reduce((total, value) => total + value, 0);
  find("svg", figure).replaceChildren(svg("path", { class: "area", d: `${line}L100 40L0 40Z` }), svg("path", { d: line }));
  fill(figure, { sum: number(sum), most: `at most ${number(most === 1 && sum === 0 ? 0 : most)} a minute` });
}

function needs(items, acts) {
  find("#calm").hidden = items.length > 0;
  find("#needs").hidden = items.length === 0;
  const key = (item) => [item.what, item.task_id, item.peer, item.push_id, item.title].join(" ");
  list(find("#needs"), items, key, () => copy("need"), (row, item) => {
    const link = item.task_id ? el("a", { class: "row", href: `/ui/task/${item.task_id}` }, item.title) : item.title;
    fill(row, {
      mark: { "data-tone": item.severity === "bad" ? "bad" : "waits", nodes: [icon(SIGNS[item.what] ?? "attention", item.severity === "bad" ? "broken" : "warning")] },
      title: [typeof link === "string" ? el("span", {}, link) : link],
      detail: item.detail,
      since: [when(item.since_ms)],
      act: item.act && acts ? { href: item.act.href, text: item.act.verb } : null,
    });
  });
}
