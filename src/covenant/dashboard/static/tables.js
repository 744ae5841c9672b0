// Pages that are one table: push, tenants, settings and nodes.

import { get, session } from "./api.js";
import { begin } from "./app.js";
import { copy, el, fill, find, list } from "./dom.js";
import { bytes, chip, duration, number, plural, shortId, shortName, when } from "./format.js";

const PUSHES = {
  dead: { label: "Given up", tone: "bad", sign: "failed" },
  failing: { label: "Failing", tone: "waits", sign: "lost" },
  live: { label: "Live", tone: "good", sign: "good" },
};
const ORIGINS = { default: "plain", file: "leased", environment: "waits", flag: "elsewhere" };
const written = (value) => (Array.isArray(value) ? value.join(", ") : String(value)) || "(empty)";
const act = (verb, given, label, kind = "button") => el("a", { class: kind, href: `/ui/act/${verb}?${new URLSearchParams({ ...given, next: location.pathname })}` }, label);

/** Each page: what is asked, its rows, what names a row, and what fills it. */
const PAGES = {
  push: {
    path: "a2a/pushes?limit=200",
    kinds: ["pushes"],
    rows: (found) => found.pushes,
    key: (push) => `${push.task_id} ${push.push_id}`,
    summary: (found) => `${plural(found.count, "webhook")} with something still to come, ${number(found.dead)} given up`,
    row: (push, known) => ({
      state: [chip(PUSHES[push.state])],
      task: { text: shortId(push.task_id), href: `/ui/task/${push.task_id}` },
      agent: shortName(push.agent),
      host: push.host,
      attempts: number(push.attempts),
      next: push.dead_at_ms ? [when(push.dead_at_ms)] : [when(push.next_ms)],
      why: push.failure ?? null,
      act: known.may("push") && push.state !== "live" ? [act("push", { task: push.task_id, push: push.push_id }, "Try again")] : [],
    }),
  },
  tenants: {
    path: "v1/admin/tenants",
    kinds: ["audit"],
    rows: (found) => found.tenants,
    key: (tenant) => tenant.name,
    summary: (found) => plural(found.tenants.length, "tenant"),
    row: (tenant, known) => ({
      name: { text: tenant.name, href: `/ui/tasks?${new URLSearchParams({ tenant: tenant.name })}` },
      state: [chip(tenant.disabled ? { label: "Disabled", tone: "bad", sign: "canceled" } : { label: "Enabled", tone: "good", sign: "good" })],
      token: tenant.token_prefix ? `${tenant.token_prefix}…` : "–",
      agents: number(tenant.agents),
      limits: limits(tenant.limits),
      created: [when(tenant.created_at_ms)],
      act: known.may("tenant") ? [act("tenant", { name: tenant.name, do: "rotate" }, "Rotate"), " ", act("tenant", { name: tenant.name, do: tenant.disabled ? "enable" : "disable" }, tenant.disabled ? "Enable" : "Disable", tenant.disabled ? "button" : "button danger")] : [],
    }),
  },
  settings: {
    path: "v1/admin/settings",
    kinds: [],
    rows: (found) => found.settings,
    key: (setting) => setting.name,
    summary: (found) => `${number(found.settings.filter((setting) => setting.source !== "default").length)} of ${plural(found.settings.length, "setting")} are not the default`,
    row: (setting) => ({
      name: setting.name,
      meaning: setting.meaning,
      value: written(setting.value),
      default: setting.source === "default" ? null : `default: ${written(setting.default)}`,
      origin: [chip({ label: setting.source, tone: ORIGINS[setting.source] ?? "plain", sign: setting.source === "default" ? "queued" : "settings" })],
    }),
  },
  nodes: {
    path: "v1/admin/nodes",
    kinds: ["counts"],
    rows: (found) => found.nodes.map((node) => ({ ...node, self: node.node === known.node })),
    key: (node) => `${node.node} ${node.boot}`,
    summary: (found) => (found.nodes.length > 1 ? `${plural(found.nodes.length, "daemon")} on one ledger` : "One daemon, on a ledger of its own"),
    row: (node) => ({
      name: node.self ? `${node.node} (this one)` : node.node,
      state: [chip(node.alive ? { label: "Alive", tone: "good", sign: "good" } : { label: "Gone", tone: "bad", sign: "lost" })],
      boot: node.boot,
      leases: number(node.leases),
      up: duration(Date.now() - node.started_at_ms),
      seen: [when(node.seen_at_ms)],
    }),
  },
};

function limits(of) {
  const set = Object.entries(of).filter(([, value]) => value);
  if (!set.length) return [el("span", { class: "quiet" }, "the daemon's own")];
  return set.map(([name, value]) => el("span", { class: "tag" }, `${name.replaceAll("_", " ")} ${name.endsWith("bytes") ? bytes(value) : number(value)}`));
}

const page = PAGES[document.documentElement.dataset.page];
const search = find("#search");
let found = null;
let known = null;

function draw() {
  if (!found) return;
  const wanted = search?.value.toLowerCase() ?? "";
  const changed = find("#changed")?.checked;
  const rows = page.rows(found).filter((row) => (!wanted || JSON.stringify(row).toLowerCase().includes(wanted)) && (!changed || row.origin !== "default"));
  fill(find("main > .head"), { summary: page.summary(found) });
  find("#none").hidden = rows.length > 0;
  list(find("#rows"), rows, page.key, () => copy("row"), (made, row) => fill(made, page.row(row, known)));
}

search?.addEventListener("input", draw);
find("#changed")?.addEventListener("change", draw);
begin(async () => {
  known ??= await session();
  found = await get(page.path);
  draw();
}, page.kinds, 1_500);
