// The catalogue, and one agent: its card, whether its signature holds, and what it does.

import { everyAgent, get, rest, session } from "./api.js";
import { attempt, begin, stayHere } from "./app.js";
import { linkOut } from "./conversation.js";
import { chip, clipped, el, fill, find, icon, number, plural, pretty, rows, shortId, stateOf, tag, to, when } from "./view.js";

const SIGNATURES = {
  valid: { label: "Signature holds", tone: "good", sign: "good" },
  invalid: { label: "Signature broken", tone: "bad", sign: "failed" },
  none: { label: "Not signed", tone: "plain", sign: "canceled" },
  unknown: { label: "Key unknown", tone: "waits", sign: "attention" },
};

async function load() {
  const [tenant, id] = rest();
  const agents = await readAgents();
  const key = (agent) => [agent.tenant, agent.id].map(encodeURIComponent).join("/");
  rows("#rows", "agent", agents, key, (agent) => ({
    ...agent,
    name: { text: agent.name || agent.id, href: `/ui/agents/${key(agent)}`, "aria-current": agent.tenant === tenant && agent.id === id ? "true" : null },
    where: agent.url ? [linkOut(agent.url)] : agent.remote ? [icon("network", "elsewhere")] : null,
    source: `${agent.kind} · ${agent.source}`,
    leased: [number(agent.in_flight), agent.concurrency ? el("span", { class: "sub" }, `${number(agent.concurrency)} at once`) : null],
    failed: { text: number(agent.failed), "data-tone": agent.failed ? "bad" : null },
  }), "#none");
  find("#one").hidden = !id;
  if (id) await one(tenant, id, agents.find((agent) => agent.tenant === tenant && agent.id === id));
}

/** The agents of every tenant, with how many tasks each has. */
async function readAgents() {
  const [agents, { by_agent: counted }] = await Promise.all([everyAgent(), get("a2a/tasks/counts")]);
  return agents.map((agent) => {
    const { queued = 0, in_flight = 0, failed = 0, done = 0 } = counted.find((each) => each.agent === `${agent.id}@${agent.tenant}`) ?? {};
    const { url, concurrency } = agent.agent_def;
    return { ...agent, queued, in_flight, failed, done, url, concurrency, remote: ["remote", "peer"].includes(agent.kind) };
  });
}

let shown = { key: null };

/** It is read once for each agent that is looked at, and not whenever a count changes. */
async function cardOf(tenant, id) {
  const key = `${tenant}/${id}`;
  if (shown.key !== key) {
    const read = get(`agents/${encodeURIComponent(tenant)}/${encodeURIComponent(id)}/card`);
    shown = { key, found: await read.catch((error) => ({ card: null, raw: error.message, signature: { state: "unknown", detail: "The card cannot be read." } })) };
  }
  return shown.found;
}

async function one(tenant, id, agent) {
  const display = `${id}@${tenant}`;
  const [{ tasks }, found, known] = await Promise.all([
    get("a2a/tasks", { agent: display, limit: 10 }),
    cardOf(tenant, id),
    session(),
  ]);
  const { card, signature } = found;
  fill(find("#one"), {
    title: card?.name ?? id,
    about: card?.description ?? "",
    signature: [chip(SIGNATURES[signature.state] ?? SIGNATURES.unknown), el("p", { class: "quiet small" }, signature.detail)],
    version: card?.version ?? "–",
    provider: card?.provider?.organization ?? "–",
    able: card ? Object.entries(card.capabilities ?? {}).filter(([, on]) => on === true).map(([name]) => tag(name)) : null,
    modes: card ? [...new Set([...(card.defaultInputModes ?? []), ...(card.defaultOutputModes ?? [])])].join(", ") || "–" : "–",
    urls: card ? interfaces(card) : null,
    skills: (card?.skills ?? []).map((skill) => el("div", {}, el("b", {}, skill.name ?? skill.id), el("p", { class: "quiet small" }, skill.description ?? ""), el("div", { class: "skills" }, (skill.tags ?? []).map((word) => tag(word))))),
    raw: clipped(pretty(found.raw)),
    inspect: known.may("inspect") ? { href: to("inspector", agent?.url ? { url: agent.url } : { tenant, agent: id }) } : null,
    every: { href: to("tasks", { agent: display }) },
    made: agent ? `${agent.kind}, from ${agent.source}` : "–",
    most: agent?.concurrency ? plural(agent.concurrency, "task at once", "tasks at once") : "as its kind has it",
    failed: { text: plural(agent?.failed ?? 0, "task"), href: to("tasks", { agent: display, outcome: "failed" }) },
    busy: agent ? `${plural(agent.queued, "task")} in the queue, ${number(agent.in_flight)} leased` : "",
  });
  rows("#recent", "recent-task", tasks, (task) => task.task_id, (task) => ({ state: [chip(stateOf(task))], words: { text: task.intent || shortId(task.task_id), href: `/ui/task/${task.task_id}` }, at: [when(task.updated_at_ms)] }));
}

function interfaces(card) {
  const known = card.supportedInterfaces ?? [{ url: card.url, protocolBinding: card.preferredTransport }];
  return known.filter((each) => each.url).map((each) => el("div", { class: "small" }, tag([each.protocolBinding ?? each.transport, each.protocolVersion].filter(Boolean).join(" ")), " ", el("span", { class: "mono" }, each.url)));
}

stayHere(find("#rows"), "a.row", () => attempt(load).then(() => find("#one").scrollIntoView({ block: "nearest" })));
addEventListener("popstate", () => attempt(load));
begin(load, ["counts"], 3_000);
