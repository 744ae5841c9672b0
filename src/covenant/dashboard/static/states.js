// The states of a task, once: words, colour and shape.

import { el, icon } from "./dom.js";

/** Where tasks stand, in the order of their way. `query` asks for exactly those. */
export const LANES = [
  { id: "queued", label: "Queued", hint: "waits for a holder", tone: "queued", sign: "queued", query: { state: "queued" } },
  { id: "in_flight", label: "Leased", hint: "one holder works on it", tone: "leased", sign: "leased", query: { state: "in_flight" } },
  { id: "parked", label: "Waiting", hint: "waits for its sender", tone: "waits", sign: "waits", query: { state: "parked" } },
  { id: "following", label: "Elsewhere", hint: "the same work is under way in another task", tone: "elsewhere", sign: "elsewhere", query: { state: "following" } },
  { id: "result_pending", label: "Undrained", hint: "ended; its sender has not taken the result", tone: "undrained", sign: "undrained", query: { state: "result_pending" } },
  { id: "failed", label: "Failed", hint: "ended with an error", tone: "bad", sign: "failed", query: { state: "done", outcome: "failed" } },
  { id: "done", label: "Done", hint: "ended", tone: "good", sign: "good", query: { state: "done", outcome: "completed,canceled,rejected" } },
];

const OTHERS = {
  lost: { label: "Holder lost", hint: "leased, and its holder is gone", tone: "bad", sign: "lost" },
  canceled: { label: "Canceled", hint: "ended before its result", tone: "plain", sign: "canceled" },
  rejected: { label: "Rejected", hint: "its agent would not do it", tone: "bad", sign: "canceled" },
  completed: { label: "Completed", hint: "ended with a result", tone: "good", sign: "good" },
};
const BY_ID = { ...Object.fromEntries(LANES.map((lane) => [lane.id, lane])), ...OTHERS };

/** Of a task of any answer: found, shown, or a node of a tree. */
export function stateOf(task) {
  if (task.holder_lost) return BY_ID.lost;
  const outcome = task.outcome ?? (["resolved", "done"].includes(task.state) ? task.a2a_state : null);
  if (outcome in BY_ID && task.state !== "result_pending") return BY_ID[outcome];
  return BY_ID[task.state === "resolved" ? "done" : task.state] ?? { label: task.state ?? "unknown", hint: "", tone: "plain", sign: "all" };
}

export const isOver = (state) => ["resolved", "done", "result_pending"].includes(state);

export function chip({ label, hint, tone, sign }) {
  return el("span", { class: "state", "data-tone": tone, title: hint || null }, icon(sign), label);
}
