// A task and all that was delegated for it: an indented table with time bars. Branches that have ended are folded.

import { get, on, rest } from "./api.js";
import { attempt, begin } from "./app.js";
import { linkOut } from "./conversation.js";
import { calleeOf, chip, duration, el, exact, fill, find, icon, isOver, number, rows, setSpan, shortId, stateOf, throttled } from "./view.js";

const [id] = rest();
const opened = new Map();
let root = null;

async function load() {
  root = (await get(`a2a/tasks/${id}/tree`)).tree;
  draw();
}

/** What a person opened or closed stays so; else a branch is open while something in it goes on, and the root always. */
function isOpen(node) {
  return opened.get(node.task_id) ?? (node === root || alive(node));
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
  const remote = nodes.filter((node) => node.remote).length;
  document.title = `Tree of ${shortId(id)} · Covenant`;
  fill(find("main"), {
    id: shortId(id),
    task: { href: `/ui/task/${id}` },
    summary: `${number(nodes.length)} tasks, ${remote ? `${number(remote)} of them elsewhere, ` : ""}${duration(ends - begins)}, ${number(root.usage_total?.tokens ?? 0)} tokens`,
    cut: root.truncated ? "The tree is larger than one answer: open a branch to read the rest of it." : null,
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
      twist: node.children.length || root.truncated ? { disabled: false, "aria-expanded": String(open), "aria-label": `${open ? "Close" : "Open"} ${shortId(node.task_id)}`, value: node.task_id } : { disabled: true },
      name: { href: `/ui/task/${node.task_id}`, text: calleeOf(node), title: node.task?.intent_text ?? "" },
      words: node.task?.intent_text ?? "",
      net: node.remote ? network(node) : null,
      state: [chip(state)],
      attempt: node.attempt || "–",
      took,
      own: node.usage ? number(node.usage.tokens ?? 0) : "–",
      total: node.usage_total ? number(node.usage_total.tokens ?? 0) : "–",
      when: [setSpan(bar, { x: from, w: Math.max(share(ended(node)) - from, 0.004) })],
    };
  });
}

/** Done elsewhere: by whom, and where. */
function network(node) {
  const by = node.provider ? el("a", { href: `/ui/peers/${encodeURIComponent(node.provider)}`, title: node.provider }, `${shortId(node.provider)}${node.profile ? ` / ${node.profile}` : ""}`) : null;
  return [icon("network", "done elsewhere"), by, node.url ? linkOut(node.url) : null, !by && !node.url ? el("span", {}, "elsewhere") : null];
}

async function turn(button) {
  const open = button.getAttribute("aria-expanded") !== "true";
  opened.set(button.value, open);
  const node = all(root).find((each) => each.task_id === button.value);
  if (open && root.truncated && !node.children.length) node.children = (await get(`a2a/tasks/${node.task_id}/tree`)).tree.children;
  draw();
}

find("#rows").addEventListener("click", ({ target }) => {
  const button = target.closest("button.twist");
  if (button) attempt(() => turn(button));
});
find("#open-all").addEventListener("click", () => {
  for (const node of all(root)) opened.set(node.task_id, true);
  draw();
});
const again = throttled(() => attempt(load), 1_000);
on("tasks", ({ tasks, more }) => {
  const mine = new Set(root ? all(root).map((node) => node.task_id) : []);
  if (more || tasks.some((task) => mine.has(task.task_id) || task.change === "sent")) again();
});
on("peers", again);
begin(load);
