// A task and all tasks delegated for it: an indented table with time bars. Branches that have ended are folded.

import { get, on, Refused, rest } from "./api.js";
import { attempt, begin } from "./app.js";
import { linkOut } from "./conversation.js";
import { calleeOf, chip, click, duration, el, exact, fill, find, icon, isOver, number, plural, rows, setSpan, shortId, stateOf, throttled } from "./view.js";

const [id] = rest();
const opened = new Map();
/** The children of branches that have ended: they do not change any more. */
const cached = new Map();
let root = null;
let whole = false;

/** Peers' names, by id. */
const names = {};

async function read(task) {
  const { tree, peers } = await get(`a2a/tasks/${task}/tree`, { fold: !whole });
  Object.assign(names, peers);
  return tree;
}

async function load() {
  const tree = await read(id);
  if (!tree.task && !tree.children.length) throw new Refused(404, "unknown", "There is no such task.");
  await unfold(tree, tree.truncated);
  root = tree;
  find("main").className = "";
  draw();
}

/** Reads the branches that the answer left out and that a person has opened. */
async function unfold(node, cut) {
  if (opened.get(node.task_id) && !node.children.length && (node.folded || cut)) {
    node.children = cached.get(node.task_id) ?? (await read(node.task_id)).children;
    if (node.folded) cached.set(node.task_id, node.children);
  }
  for (const child of node.children) await unfold(child, cut);
}

function isOpen(node) {
  return opened.get(node.task_id) ?? (whole || node === root || alive(node));
}

const alive = (node) => !isOver(node.state) || node.children.some(alive);

function* visible(node, depth = 0) {
  yield { node, depth };
  if (isOpen(node)) for (const child of node.children) yield* visible(child, depth + 1);
}

const ended = (node) => (isOver(node.state) ? node.updated_at_ms : Date.now());
const all = (node) => [node, ...node.children.flatMap(all)];

function draw() {
  const nodes = all(root);
  const begins = Math.min(...nodes.map((node) => node.created_at_ms ?? Infinity));
  const ends = Math.max(begins + 1, ...nodes.map(ended));
  const share = (at) => (at - begins) / (ends - begins);
  const folded = nodes.reduce((sum, node) => sum + (node.children.length ? 0 : (node.folded ?? 0)), 0);
  document.title = `Tree of ${shortId(id)} · Covenant`;
  fill(find("main"), {
    id: shortId(id),
    task: { href: `/ui/task/${id}` },
    summary: `${plural(nodes.length + folded, "task")}, ${folded ? `${number(folded)} of them folded, ` : ""}${duration(ends - begins)}, ${number(root.usage_total?.tokens ?? 0)} tokens`,
    cut: root.truncated ? "The tree is too large to show at once. Open a branch to read the rest of it." : null,
  });
  rows("#rows", "node", [...visible(root)], ({ node }) => node.task_id, ({ node, depth }, row) => {
    const open = isOpen(node);
    const at = node.created_at_ms ?? begins;
    const took = duration(ended(node) - at);
    row.setAttribute("aria-level", depth + 1);
    find(".node", row).style.setProperty("--depth", depth);
    const from = share(at);
    const state = stateOf(node);
    const bar = el("div", { class: isOver(node.state) ? "bar" : "bar open", "data-tone": state.tone, title: `${exact(at)}, ${took}` });
    return {
      twist: node.children.length || node.folded || root.truncated ? { disabled: false, "aria-expanded": String(open), "aria-label": `${open ? "Close" : "Open"} ${shortId(node.task_id)}`, value: node.task_id } : { disabled: true },
      name: { href: `/ui/task/${node.task_id}`, text: calleeOf(node), title: node.task?.intent_text ?? "" },
      words: node.task?.intent_text ?? "",
      net: node.remote ? network(node) : null,
      state: [chip(state)],
      attempt: node.attempt || "–",
      took,
      own: number(node.usage?.tokens),
      total: number(node.usage_total?.tokens),
      when: [setSpan(bar, { x: from, w: Math.max(share(ended(node)) - from, 0.004) })],
    };
  });
}

function network(node) {
  const by = node.provider ? el("a", { href: `/ui/peers/${encodeURIComponent(node.provider)}`, title: node.provider }, names[node.provider] ?? shortId(node.provider)) : null;
  return [icon("network", "done elsewhere"), by, node.url ? linkOut(node.url) : by ? null : el("span", {}, "elsewhere")];
}

async function toggle(button) {
  opened.set(button.value, button.getAttribute("aria-expanded") !== "true");
  await unfold(root, root.truncated);
  draw();
}

click("#rows", ({ target }) => {
  const button = target.closest("button.twist");
  if (button) attempt(() => toggle(button));
});
click("#open-all", () => {
  opened.clear();
  whole = true;
  attempt(load);
});
const again = throttled(() => attempt(load), 1_000);
on("tasks", ({ tasks, more }) => {
  // While the tree goes on, any new task may belong to it.
  if (more || !root || alive(root) || all(root).some((node) => tasks.some(({ task_id }) => task_id === node.task_id))) again();
});
on("peers", again);
begin(load);
