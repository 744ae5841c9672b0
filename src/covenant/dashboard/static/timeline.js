// The bars of a task's story, read from what the ledger keeps of it: its leases, its steps and its calls.

const TOOL = "x-arbiter.tool_call";
const PAUSE_MS = 2_000;

/** `shown`: the answer of `show`; `calls`: its children, found by their parent. Bars are in the order of their beginning. */
export function readTimeline(shown, calls, now_ms = Date.now()) {
  const over = shown.updates.find((step) => step.kind === "settled");
  const ends_ms = over?.ts_ms ?? null;
  const bars = [...waits(shown, ends_ms), ...shown.leases.flatMap((lease) => attempt(lease, shown.holder_lost)), ...output(shown.updates), ...calls.map(call)];
  bars.sort((a, b) => a.begins_ms - b.begins_ms);
  return { begins_ms: shown.created_at_ms, ends_ms, now_ms, bars, turns: turns(shown, ends_ms), truncated: shown.truncated ?? false };
}

const bar = (kind, begins_ms, ends_ms, more = {}) => ({ kind, begins_ms, ends_ms, ...more });

function attempt(lease, lost) {
  const outcome = lease.outcome ?? (lost ? "lost" : null);
  const made = bar("attempt", lease.leased_at_ms, lease.ended_at_ms ?? null, { label: `Attempt ${lease.attempt}`, outcome, detail: lease.reason });
  const mended = lease.reason && /requeue|forced|repair/.test(lease.outcome ?? "");
  return mended ? [made, bar("repair", lease.ended_at_ms, lease.ended_at_ms, { label: lease.outcome.replaceAll("_", " "), detail: lease.reason })] : [made];
}

/** Between its beginning, its leases and its end, a task waits: for its sender if it was parked, else for a holder. */
function* waits({ created_at_ms, leases, updates, state }, ends_ms) {
  let from = created_at_ms;
  for (const lease of [...leases, null]) {
    const to = lease ? lease.leased_at_ms : ends_ms;
    const parked = updates.find((step) => step.kind === "parked" && step.ts_ms >= from && (to === null || step.ts_ms <= to));
    const answered = parked && updates.find((step) => step.kind === "continued" && step.ts_ms >= parked.ts_ms);
    if (parked) yield bar("parked", parked.ts_ms, answered?.ts_ms ?? to);
    const queued = parked ? answered?.ts_ms : from;
    const waited = lease ? to > queued : ["queued", "following"].includes(state);
    if (queued !== undefined && waited) yield bar(state === "following" ? "following" : "queued", queued, to);
    from = lease?.ended_at_ms ?? to;
    if (from === null) return;
  }
}

/** Pieces of text that came one after another are one bar, and tool calls one each. */
function output(updates) {
  const bars = [];
  let run = null;
  for (const step of updates) {
    const tool = step.body?.parts?.find((part) => part.metadata?.[TOOL]);
    if (tool) bars.push(bar("tool", step.ts_ms, step.ts_ms, { label: tool.value?.tool ?? "tool", outcome: tool.value?.ok === false ? "failed" : null }));
    else if (step.kind === "artifact") {
      if (!run || step.ts_ms - run.ends_ms > PAUSE_MS) bars.push((run = bar("chunks", step.ts_ms, step.ts_ms, { count: 0 })));
      run.ends_ms = step.ts_ms;
      run.count++;
    } else run = null;
  }
  return bars;
}

function call(task) {
  const over = ["done", "result_pending"].includes(task.state);
  return bar("child", task.created_at_ms, over ? task.updated_at_ms : null, { label: task.agent.replace(/@default$/, ""), task_id: task.task_id, remote: task.remote, outcome: task.outcome, detail: task.intent });
}

function turns({ created_at_ms, updates }, ends_ms) {
  const begun = [created_at_ms, ...updates.filter((step) => step.kind === "continued").map((step) => step.ts_ms)];
  return begun.map((begins_ms, index) => ({ turn: index + 1, begins_ms, ends_ms: begun[index + 1] ?? ends_ms }));
}
