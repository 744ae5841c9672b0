// Pages with one table. `PAGES` has an entry for each.

import { get, session } from "./api.js";
import { attempt, begin, filter, filters, readPage } from "./app.js";
import { button, bytes, chip, click, duration, el, fill, find, icon, LANES, laneTile, mark, number, plural, quiet, rows, setSpan, shortId, shortName, svg, tag, to, when } from "./view.js";

const PUSHES = {
  dead: mark("Given up", "bad", "failed"),
  failing: mark("Failing", "waits", "lost"),
  live: mark("Live", "good", "good"),
};
const ORIGINS = { default: "plain", file: "leased", environment: "waits", flag: "elsewhere" };
const written = (value) => [value].flat().join(", ") || "(empty)";
const SIGNS = {
  holder_lost: "lost", parked_long: "waits", push_dead: "push", delegation_lost: "peers",
  writer_failed: "failed", archive_lag: "undrained", login_refused: "audit",
};
const AUDITED = ["type", "issuer"];
const PAGE = 50;

/** Each page: how to read it, its rows, a row's key, and values that fill a row beside its own fields. */
const PAGES = {
  attention: {
    read: async () => {
      const [found, rates] = await Promise.all([get("a2a/attention"), get("rates")]);
      numbers(found.numbers);
      spark(find("#settled"), rates.settled, rates.since_ms);
      spark(find("#broken"), rates.failed, rates.since_ms);
      return found;
    },
    kinds: ["counts", "pushes", "peers", "audit"],
    rows: (found) => found.items,
    key: (item) => [item.what, item.task_id, item.peer, item.push_id, item.title].join(" "),
    row: (item, user) => ({
      mark: { "data-tone": item.severity === "bad" ? "bad" : "waits", nodes: [icon(SIGNS[item.what] ?? "attention", item.severity === "bad" ? "broken" : "warning")] },
      title: [item.task_id ? el("a", { class: "row", href: `/ui/task/${item.task_id}` }, item.title) : el("span", {}, item.title)],
      act: item.act && user.role === "operator" ? { href: item.act.href, text: item.act.verb } : null,
    }),
  },
  audit: {
    read: async () => (found?.events.length > PAGE ? found : await readAudit()),
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
        issuer: rest.address ?? shortName(event.issuer?.display),
        detail: Object.entries(rest).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join(" · "),
      };
    },
  },
  push: {
    path: "a2a/pushes?limit=200",
    kinds: ["pushes"],
    rows: (found) => found.pushes,
    key: (push) => `${push.task_id} ${push.push_id}`,
    summary: (found) => `${plural(found.count - found.dead, "webhook")} still to be called, ${number(found.dead)} given up`,
    row: (push, user) => ({
      state: [chip(PUSHES[push.state])],
      task: { text: shortId(push.task_id), href: `/ui/task/${push.task_id}` },
      next: [when(push.dead_at_ms ?? push.next_ms)],
      why: push.failure,
      act: user.may("push") && push.state !== "live" ? [button("push", { task: push.task_id, push: push.push_id }, "Try again")] : [],
    }),
  },
  tenants: {
    path: "v1/admin/tenants",
    kinds: ["audit", "counts"],
    rows: (found) => found.tenants,
    key: (tenant) => tenant.name,
    summary: (found) => plural(found.tenants.length, "tenant"),
    row: (tenant, user) => ({
      name: { text: tenant.name, href: to("tasks", { tenant: tenant.name }) },
      state: [chip(tenant.disabled ? mark("Disabled", "bad", "canceled") : mark("Enabled", "good", "good"))],
      token: tenant.token_prefix ? `${tenant.token_prefix}…` : "–",
      use: uses(tenant),
      act: user.may("tenant") ? [button("tenant", { name: tenant.name, do: "rotate" }, "Rotate"), " ", tenant.disabled ? button("tenant", { name: tenant.name, do: "enable" }, "Enable") : button("tenant", { name: tenant.name, do: "disable" }, "Disable", "danger")] : [],
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
      origin: [chip(mark(setting.source, ORIGINS[setting.source] ?? "plain", setting.source === "default" ? "queued" : "settings"))],
    }),
  },
  nodes: {
    path: "v1/admin/nodes",
    kinds: ["nodes"],
    rows: (found) => found.nodes,
    key: (node) => `${node.node} ${node.boot}`,
    summary: ({ nodes }) => (nodes.length > 1 ? `${number(nodes.filter((node) => node.alive).length)} of ${plural(nodes.length, "daemon")} alive` : "One daemon alone"),
    row: (node, user) => ({
      name: node.node === user.node ? `${node.node} (this one)` : node.node,
      state: [chip(node.alive ? mark("Alive", "good", "good") : node.left ? mark("Left", "plain", "canceled") : mark("Lost", "bad", "lost"))],
      up: duration((node.alive ? Date.now() : node.seen_at_ms) - node.started_at_ms),
    }),
  },
};

/** The tenant's own limits and its use of any others, each with a bar. */
function uses({ use, limits }) {
  const own = { ...limits, requests: limits.rate_per_min || limits.burst };
  const shown = Object.entries(use).filter(([name, { used }]) => used || own[name]).map(([name, { used, most }]) => {
    const count = name.endsWith("bytes") ? bytes : number;
    const share = most ? Math.min(1, used / most) : 0;
    const words = `${name.replaceAll("_", " ")} ${used === null ? "?" : count(used)}${most ? ` of ${count(most)}` : ""}`;
    const made = setSpan(tag(words), { x: 0, w: share });
    made.dataset.tone = share >= 0.9 ? "bad" : share >= 0.7 ? "waits" : "leased";
    return made;
  });
  if (limits.kept_hours) shown.push(tag(`kept for ${plural(limits.kept_hours, "hour")}`));
  return shown.length ? shown : [quiet("nothing used")];
}

function numbers(counts) {
  const lanes = LANES.filter((lane) => lane.id !== "done");
  rows("#numbers", "number", lanes, (lane) => lane.id, (lane, tile) => laneTile(tile, lane, counts[lane.id]));
}

/** The last hour, or the minutes since the daemon's start. */
function spark(figure, values, since_ms) {
  const most = Math.max(...values);
  const x = (index) => (100 - ((values.length - 1 - index) / 59) * 100).toFixed(2);
  const points = values.map((value, index) => `${x(index)} ${(38 - (value / (most || 1)) * 36).toFixed(2)}`);
  const line = `M${points[0]}L${points.join("L")}`;
  const sum = values.reduce((total, value) => total + value, 0);
  find("svg", figure).replaceChildren(svg("path", { class: "area", d: `${line}L100 40L${x(0)} 40Z` }), svg("path", { d: line }));
  const since = values.length < 60 ? ["since the start, ", when(since_ms)] : "in the last hour";
  fill(figure, { sum: number(sum), since, most: `at most ${number(most)} a minute` });
}

async function readAudit(from = null) {
  const page = await readPage("events", (below) => get("audit/recent", { ...filter(AUDITED), limit: PAGE, below }), from);
  return { events: page.events.reverse(), next: page.next };
}

async function verify() {
  const note = find("#verified");
  note.className = "";
  note.textContent = "Reading the whole chain…";
  const { report } = await get("audit/verify");
  note.className = report.valid ? "done" : "refused";
  note.textContent = report.valid ? `The chain holds: ${number(report.events)} rows, root ${report.root_hash_hex.slice(0, 16)}…` : `The chain is broken: ${report.failures.join("; ")}`;
}

const page = PAGES[document.documentElement.dataset.page];
const search = find("#search");
let found = null;
let user = null;

function draw() {
  if (!found) return;
  const wanted = search?.value.toLowerCase() ?? "";
  const changed = find("#changed")?.checked;
  const shown = page.rows(found).filter((row) => (!wanted || JSON.stringify(row).toLowerCase().includes(wanted)) && (!changed || row.source !== "default"));
  if (page.summary) fill(find("main > .head"), { summary: page.summary(found) });
  rows("#rows", "row", shown, page.key, (row) => ({ ...row, ...page.row(row, user) }), "#none");
}

async function load() {
  user ??= await session();
  found = await (page.read ? page.read() : get(page.path));
  draw();
}

search?.addEventListener("input", draw);
find("#changed")?.addEventListener("change", draw);
if (page === PAGES.audit) {
  const read = async (next = null) => {
    const more = await readAudit(next);
    found = next === null ? more : { ...more, events: [...found.events, ...more.events] };
    draw();
  };
  filters(find("#filters"), () => attempt(read));
  click("#verify", () => attempt(verify));
  click("#more button", () => attempt(() => read(found.next)));
}
begin(load, page.kinds, 1_500);
