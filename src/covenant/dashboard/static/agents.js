// The catalogue of agents, and one agent: its card, the card's signature, and its tasks.

import { allAgents, get, rest, session } from "./api.js";
import { attempt, begin, navigate } from "./app.js";
import { linkOut } from "./conversation.js";
import { chip, clipped, el, fill, find, icon, mark, number, plural, pretty, rows, shortId, stateOf, tag, to, when } from "./view.js";

const SIGNATURES = {
  valid: mark("Signature holds", "good", "good"),
  invalid: mark("Signature broken", "bad", "failed"),
  none: mark("Not signed", "plain", "canceled"),
  unknown: mark("Key unknown", "waits", "attention"),
};

const NONE = { queued: 0, in_flight: 0, parked: 0, failed: 0, done: 0 };

const key = ({ tenant, id }) => [tenant, id].map(encodeURIComponent).join("/");

async function load() {
  const [tenant, id] = rest();
  const agents = await readAgents();
  rows("#rows", "agent", agents, key, (agent) => ({
    ...agent,
    name: { text: agent.name || agent.id, href: `/ui/agents/${key(agent)}`, "aria-current": agent.tenant === tenant && agent.id === id ? "true" : null },
    where: agent.url ? [linkOut(agent.url)] : agent.remote ? [icon("network", "elsewhere")] : null,
    source: `${agent.kind} · ${agent.source}`,
    leased: [number(agent.in_flight), agent.concurrency ? el("span", { class: "sub" }, `${number(agent.concurrency)} at once`) : null],
    failed: { text: number(agent.failed), "data-tone": agent.failed ? "bad" : null },
  }), "#none");
  find("#one").hidden = !id;
  if (id) await showAgent(tenant, id, agents.find((agent) => agent.tenant === tenant && agent.id === id));
}

async function readAgents() {
  const [agents, { by_agent: counted }] = await Promise.all([allAgents(), get("a2a/tasks/counts")]);
  return agents.map((agent) => {
    const found = counted.find((each) => each.agent === `${agent.id}@${agent.tenant}`) ?? NONE;
    const { url, concurrency } = agent.agent_def;
    return { ...found, ...agent, url, concurrency, remote: ["remote", "peer"].includes(agent.kind) };
  });
}

const cards = {};

/** A card is read once, not with each change of the counts. */
function cardOf(path) {
  return (cards[path] ??= get(`agents/${path}/card`).catch((error) => ({ card: null, raw: error.message, signature: { state: "unknown", detail: "The card cannot be read." } })));
}

async function showAgent(tenant, id, agent) {
  const display = `${id}@${tenant}`;
  const [{ tasks }, found, user] = await Promise.all([
    get("a2a/tasks", { agent: display, limit: 10 }),
    cardOf(key({ tenant, id })),
    session(),
  ]);
  const { card, signature } = found;
  fill(find("#one"), {
    title: card?.name ?? id,
    about: card?.description ?? "",
    signature: [chip(SIGNATURES[signature.state] ?? SIGNATURES.unknown), el("p", { class: "quiet small" }, signature.detail)],
    version: card?.version ?? "–",
    provider: card?.provider?.organization ?? "–",
    able: Object.entries(card?.capabilities ?? {}).filter(([, on]) => on === true).map(([name]) => tag(name)),
    modes: [...new Set([...(card?.defaultInputModes ?? []), ...(card?.defaultOutputModes ?? [])])].join(", ") || "–",
    urls: card ? interfaces(card) : null,
    skills: (card?.skills ?? []).map((skill) => el("div", {}, el("b", {}, skill.name ?? skill.id), el("p", { class: "quiet small" }, skill.description ?? ""), el("div", { class: "skills" }, (skill.tags ?? []).map((word) => tag(word))))),
    raw: clipped(pretty(found.raw)),
    inspect: user.may("inspect") ? { href: to("inspector", agent?.url ? { url: agent.url } : { tenant, agent: id }) } : null,
    every: { href: to("tasks", { agent: display }) },
    made: agent ? `${agent.kind}, from ${agent.source}` : "–",
    most: agent?.concurrency ? plural(agent.concurrency, "task at once", "tasks at once") : "no limit of its own",
    failed: { text: plural(agent?.failed ?? 0, "task"), href: to("tasks", { agent: display, outcome: "failed" }) },
    busy: agent ? `${plural(agent.queued, "task")} in the queue, ${number(agent.in_flight)} leased` : "",
  });
  rows("#recent", "recent-task", tasks, (task) => task.task_id, (task) => ({ state: [chip(stateOf(task))], words: { text: task.intent || shortId(task.task_id), href: `/ui/task/${task.task_id}` }, at: [when(task.updated_at_ms)] }), "#no-recent");
}

function interfaces(card) {
  const known = card.supportedInterfaces ?? [{ url: card.url, protocolBinding: card.preferredTransport }];
  return known.filter((each) => each.url).map((each) => el("div", { class: "small" }, tag([each.protocolBinding ?? each.transport, each.protocolVersion].filter(Boolean).join(" ")), " ", el("span", { class: "mono" }, each.url)));
}

const look = () => find("#one").scrollIntoView({ block: "nearest" });
navigate(find("#rows"), "a.row");
addEventListener("popstate", () => attempt(load).then(look));
session().then((user) => (find("#any").hidden = !user.may("inspect")));
begin(load, ["counts"], 3_000).then(look);
