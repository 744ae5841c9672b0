// The audit: who was let in, who was not, and what was done. The rows are chained; the chain can be checked here.

import { get } from "./api.js";
import { attempt, begin } from "./app.js";
import { copy, fill, find, icon, list } from "./dom.js";
import { number, shortName, when } from "./format.js";

const PAGE = 50;
const EMPTY_MAX = 20;
const SPANS_MS = { "1h": 3_600_000, "1d": 86_400_000, "7d": 604_800_000 };

let rows = [];
let next = null;

const address = () => new URLSearchParams(location.search);

function filter() {
  const asked = address();
  const span = SPANS_MS[asked.get("since")];
  return { type: asked.get("type"), issuer: asked.get("issuer"), since_ms: span ? Date.now() - span : null };
}

async function load() {
  rows = await page();
  draw();
}

async function loadMore() {
  rows = [...rows, ...(await page(next))];
  draw();
}

/** The next rows below a place, the newest first. One answer looks at a bounded number of rows: an empty one may have more behind it. */
async function page(below = null) {
  for (let tries = 0; ; tries++) {
    const found = await get("audit/recent", { ...filter(), limit: PAGE, below });
    next = below = found.next;
    if (found.events.length || below === null || tries === EMPTY_MAX) return found.events.reverse();
  }
}

function draw() {
  find("#none").hidden = rows.length > 0;
  find("#more").hidden = next === null;
  const given = Object.entries(filter()).filter(([, value]) => value);
  find("#export").href = `/ui/api/audit/export?${new URLSearchParams(given)}`;
  list(find("#rows"), rows, (event) => event.id, () => copy("event"), (row, event) => {
    const { type, ...rest } = event.kind;
    const refused = rest.passed === false || /refused|rejected|failed|exhausted|revoked/.test(type);
    fill(row, {
      at: [when(event.timestamp_ms)],
      sign: { "data-tone": refused ? "bad" : "good", nodes: [icon(refused ? "failed" : "good", refused ? "refused or ended" : "done")] },
      type: type.replaceAll("_", " "),
      issuer: shortName(event.issuer?.display),
      detail: Object.entries(rest).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join(" · "),
    });
  });
}

async function verify() {
  const told = find("#verified");
  told.className = "";
  told.textContent = "Reading the whole chain…";
  const { report } = await get("audit/verify");
  told.className = report.valid ? "done" : "refused";
  told.textContent = report.valid ? `The chain holds: ${number(report.events)} rows, root ${report.root_hash_hex.slice(0, 16)}…` : `The chain is broken: ${report.failures.map((each) => (typeof each === "string" ? each : JSON.stringify(each))).join("; ")}`;
}

find("#filters").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = [...new FormData(event.target)].filter(([, value]) => value);
  history.pushState(null, "", given.length ? `?${new URLSearchParams(given)}` : location.pathname);
  attempt(load);
});
find("#filters").addEventListener("change", (event) => event.target.form.requestSubmit());
find("#verify").addEventListener("click", () => attempt(verify));
find("#more button").addEventListener("click", () => attempt(loadMore));
for (const field of find("#filters").elements) if (field.name) field.value = address().get(field.name) ?? "";
begin(() => (rows.length > PAGE ? null : load()), ["audit"], 1_500);
