// Pages that are one table, each a row in `PAGES`: attention, push, tenants, audit, settings and nodes.

import { get, session } from "./api.js";
import { attempt, begin, filter, filters, readPage } from "./app.js";
import { act, bytes, chip, duration, el, fill, find, icon, LANES, laneTile, number, plural, quiet, rows, shortId, shortName, svg, tag, to, when } from "./view.js";

const PUSHES = {
  dead: { label: "Given up", tone: "bad", sign: "failed" },
  failing: { label: "Failing", tone: "waits", sign: "lost" },
  live: { label: "Live", tone: "good", sign: "good" },
};
const ORIGINS = { default: "plain", file: "leased", environment: "waits", flag: "elsewhere" };
const written = (value) => (Array.isArray(value) ? value.join(", ") : String(value)) || "(empty)";
const button = (verb, given, label, kind = "") => el("a", { class: `button ${kind}`, href: act(verb, given) }, label);
const SIGNS = {
  holder_lost: "lost", parked_long: "waits", push_dead: "push", delegation_lost: "peers",
  writer_failed: "failed", archive_lag: "undrained", login_refused: "audit",
};
const AUDITED = ["type", "issuer"];
const PAGE = 50;

/** Each page: what is asked, its rows, what names a row, and what fills it beside its own fields. */
const PAGES = {
  attention: {
    read: async () => {
      const [found, rates] = await Promise.all([get("a2a/attention"), get("rates")]);
      numbers(found.numbers);
      spark(find("#settled"), rates.settled);
      spark(find("#broken"), rates.failed);
      return found;
    },
    kinds: ["counts", "pushes", "peers", "audit"],
    rows: (found) => found.items,
    key: (item) => [item.what, item.task_id, item.peer, item.push_id, item.title].join(" "),
    row: (item, known) => ({
      mark: { "data-tone": item.severity === "bad" ? "bad" : "waits", nodes: [icon(SIGNS[item.what] ?? "attention", item.severity === "bad" ? "broken" : "warning")] },
      title: [item.task_id ? el("a", { class: "row", href: `/ui/task/${item.task_id}` }, item.title) : el("span", {}, item.title)],
      act: item.act && known.role === "operator" ? { href: item.act.href, text: item.act.verb } : null,
    }),
  },
  audit: {
    read: async () => (found?.events.length > PAGE ? found : await audited()),
    kinds: ["audit"],
    rows: (found) => {
      find("#more").hidden = found.next === null;
      find("#export").href = `/ui/api/audit/export?${new URLSearchParams(filter(AUDITED))}`;
      return found.events;
    },
    key: (event) => event.id,
    row: (event) => {
      const { type, ...rest } = event.kind;
      const refused = rest.passed === false || /refused|rejected|failed|exhausted|revoked/.test(type);
      return {
        sign: { "data-tone": refused ? "bad" : "good", nodes: [icon(refused ? "failed" : "good", refused ? "refused or ended" : "done")] },
        type: type.replaceAll("_", " "),
        issuer: shortName(event.issuer?.display),
        detail: Object.entries(rest).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join(" · "),
      };
    },
  },
  push: {
    path: "a2a/pushes?limit=200",
    kinds: ["pushes"],
    rows: (found) => found.pushes,
    key: (push) => `${push.task_id} ${push.push_id}`,
    summary: (found) => `${plural(found.count, "webhook")} with something still to come, ${number(found.dead)} given up`,
    row: (push, known) => ({
      state: [chip(PUSHES[push.state])],
      task: { text: shortId(push.task_id), href: `/ui/task/${push.task_id}` },
      next: [when(push.dead_at_ms ?? push.next_ms)],
      why: push.failure ?? null,
      act: known.may("push") && push.state !== "live" ? [button("push", { task: push.task_id, push: push.push_id }, "Try again")] : [],
    }),
  },
  tenants: {
    path: "v1/admin/tenants",
    kinds: ["audit"],
    rows: (found) => found.tenants,
    key: (tenant) => tenant.name,
    summary: (found) => plural(found.tenants.length, "tenant"),
    row: (tenant, known) => ({
      name: { text: tenant.name, href: to("tasks", { tenant: tenant.name }) },
      state: [chip(tenant.disabled ? { label: "Disabled", tone: "bad", sign: "canceled" } : { label: "Enabled", tone: "good", sign: "good" })],
      token: tenant.token_prefix ? `${tenant.token_prefix}…` : "–",
      limits: limits(tenant.limits),
      act: known.may("tenant") ? [button("tenant", { name: tenant.name, do: "rotate" }, "Rotate"), " ", tenant.disabled ? button("tenant", { name: tenant.name, do: "enable" }, "Enable") : button("tenant", { name: tenant.name, do: "disable" }, "Disable", "danger")] : [],
    }),
  },
  settings: {
    path: "v1/admin/settings",
    kinds: [],
    rows: (found) => found.settings,
    key: (setting) => setting.name,
    summary: (found) => `${number(found.settings.filter((setting) => setting.source !== "default").length)} of ${plural(found.settings.length, "setting")} are not the default`,
    row: (setting) => ({
      value: written(setting.value),
      default: setting.source === "default" ? null : `default: ${written(setting.default)}`,
      origin: [chip({ label: setting.source, tone: ORIGINS[setting.source] ?? "plain", sign: setting.source === "default" ? "queued" : "settings" })],
    }),
  },
  nodes: {
    path: "v1/admin/nodes",
    kinds: ["counts"],
    rows: (found) => found.nodes,
    key: (node) => `${node.node} ${node.boot}`,
    summary: (found) => (found.nodes.length > 1 ? `${plural(found.nodes.length, "daemon")} on one ledger` : "One daemon, on a ledger of its own"),
    row: (node, known) => ({
      name: node.node === known.node ? `${node.node} (this one)` : node.node,
      state: [chip(node.alive ? { label: "Alive", tone: "good", sign: "good" } : { label: "Gone", tone: "bad", sign: "lost" })],
      up: duration(Date.now() - node.started_at_ms),
    }),
  },
};

function limits(of) {
  const set = Object.entries(of).filter(([, value]) => value);
  if (!set.length) return [quiet("the daemon's own")];
  return set.map(([name, value]) => tag(`${name.replaceAll("_", " ")} ${name.endsWith("bytes") ? bytes(value) : number(value)}`));
}

function numbers(counts) {
  const lanes = LANES.filter((lane) => lane.id !== "done");
  rows("#numbers", "number", lanes, (lane) => lane.id, (lane, tile) => laneTile(tile, lane, counts[lane.id]));
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

/** Rows of the audit below a place, the newest first. */
async function audited(from = null) {
  const page = await readPage("events", (below) => get("audit/recent", { ...filter(AUDITED), limit: PAGE, below }), from);
  return { events: page.events.reverse(), next: page.next };
}

async function verify() {
  const told = find("#verified");
  told.className = "";
  told.textContent = "Reading the whole chain…";
  const { report } = await get("audit/verify");
  told.className = report.valid ? "done" : "refused";
  told.textContent = report.valid ? `The chain holds: ${number(report.events)} rows, root ${report.root_hash_hex.slice(0, 16)}…` : `The chain is broken: ${report.failures.join("; ")}`;
}

const page = PAGES[document.documentElement.dataset.page];
const search = find("#search");
let found = null;
let known = null;

function draw() {
  if (!found) return;
  const wanted = search?.value.toLowerCase() ?? "";
  const changed = find("#changed")?.checked;
  const shown = page.rows(found).filter((row) => (!wanted || JSON.stringify(row).toLowerCase().includes(wanted)) && (!changed || row.source !== "default"));
  if (page.summary) fill(find("main > .head"), { summary: page.summary(found) });
  rows("#rows", "row", shown, page.key, (row) => ({ ...row, ...page.row(row, known) }), "#none");
}

async function load() {
  known ??= await session();
  found = await (page.read ? page.read() : get(page.path));
  draw();
}

search?.addEventListener("input", draw);
find("#changed")?.addEventListener("change", draw);
if (page === PAGES.audit) {
  const read = async (next = null) => {
    const more = await audited(next);
    found = next === null ? more : { ...more, events: [...found.events, ...more.events] };
    draw();
  };
  filters(find("#filters"), () => attempt(read));
  find("#verify").addEventListener("click", () => attempt(verify));
  find("#more button").addEventListener("click", () => attempt(() => read(found.next)));
}
begin(load, page.kinds, 1_500);
