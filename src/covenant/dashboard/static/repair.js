// Repairs one task, under the lease that was shown, or many tasks, after a dry run.

import { post, Refused } from "./api.js";
import { chip, el, fill, find, findAll, mark, plural, rows, shortId, shortName, stateOf, when } from "./view.js";

const NEEDS = { requeue: "a2a.repair.requeue", force_error: "a2a.repair.force_error" };
const OUTCOMES = {
  would_apply: mark("would apply", "leased", "repair"),
  applied: mark("applied", "good", "good"),
  refused: mark("left as it is", "waits", "canceled"),
};
const AT_ONCE = 200;

const dialog = find("#repair, #bulk-dialog");
const form = dialog?.querySelector("form");
/** The dialog's purpose: `run(step)` is called when it is sent, `changed()` when a choice changes. */
let work = null;

function open(purpose, command) {
  work = purpose;
  form.reset();
  form.elements.command.value = command;
  notify("");
  changed();
  dialog.showModal();
}

function changed() {
  const command = form.elements.command.value;
  for (const part of findAll("[data-command]", dialog)) part.hidden = part.dataset.command !== command;
  for (const field of form.elements.risk) field.required = command === "requeue";
  form.elements.message.required = command === "force_error";
  work.changed();
}

function notify(text, kind = "") {
  const note = find(".told", dialog);
  note.className = `told ${kind}`;
  note.replaceChildren(text);
  return note;
}

/** Adds a button that gives the missing grant. */
function offerGrant(command, note) {
  const grant = async () => {
    try {
      await post("capabilities/grant", { action: NEEDS[command] });
      notify(`Granted ${NEEDS[command]}. Try again now.`, "done");
    } catch (error) {
      notify(error.message, "refused");
    }
  };
  note.append(" ", el("button", { type: "button", onclick: grant }, `Grant ${NEEDS[command]}`));
}

form?.addEventListener("change", changed);
form?.addEventListener("submit", async (event) => {
  const step = event.submitter?.value;
  if (step === "close") return;
  event.preventDefault();
  const command = form.elements.command.value;
  try {
    await work.run(step);
  } catch (error) {
    const note = notify(error.message, "refused");
    if (error instanceof Refused && error.code === "capability_missing" && NEEDS[command]) offerGrant(command, note);
  }
});

export const leaseOf = (task) => (task.state === "in_flight" ? (task.leases.findLast((lease) => !lease.ended_at_ms) ?? null) : null);

/** `read()` returns the shown task, `load()` reads it again. If the lease has changed, the new one is shown. */
export function openRepair(read, command, who, load) {
  let lease = null;
  const see = () => {
    const task = read();
    lease = leaseOf(task);
    fill(dialog, {
      id: shortId(task.task.id),
      agent: shortName(task.task.recipient.display),
      state: stateOf(task).label,
      holder: lease ? [shortName(lease.leased_to.display), ", since ", when(lease.leased_at_ms)] : null,
      lease: lease ? shortId(lease.lease_id) : null,
      next: task.attempt + 1,
      who,
    });
    for (const option of form.elements.command.options) option.disabled = option.value !== "cancel" && !lease;
  };
  const run = async () => {
    try {
      await repair(read().task.id, lease?.lease_id ?? null);
      dialog.close();
    } finally {
      await load();
      see();
    }
  };
  see();
  open({ run, changed: () => {} }, command);
}

function repair(task_id, lease_id) {
  const [action, reason] = [form.elements.command.value, form.elements.reason.value];
  if (action === "cancel") return post(`a2a/tasks/${task_id}/cancel`, { reason });
  return post("a2a/repair", { task_id, command: { action, lease_id, ...needed(action) }, reason });
}

function needed(command) {
  const { risk, message } = form.elements;
  return { requeue: { duplicate_risk: risk.value }, force_error: { message: message.value } }[command];
}

/** `chosen` is `{command, ids}` or `{command, filter}`; `after` is called when something was applied. */
export function openBulk(chosen, after) {
  const apply = find("#bulk-apply");
  find("#bulk-title").textContent = chosen.ids ? `Repair ${plural(chosen.ids.length, "task")}` : "Repair all that match";
  find("#bulk-outcomes").hidden = true;
  const run = async (step) => {
    const real = step === "apply";
    notify("…");
    const done = { outcomes: [], matched: 0, more: false };
    try {
      await repairMany(chosen, !real, done);
    } finally {
      showOutcomes(done.outcomes);
      if (real) after();
    }
    const { outcomes, matched, more } = done;
    const hit = outcomes.filter((each) => each.outcome !== "refused").length;
    const all = more ? ` and are done at once; more match` : "";
    notify(real ? `${hit} of ${plural(matched, "task")} changed.` : `${plural(matched, "task")} match${all}; ${hit} would be changed.`, real ? "done" : "");
    apply.disabled = real || hit === 0;
  };
  open({ run, changed: () => (apply.disabled = true) }, chosen.command);
}

/** Repairs one request at a time. After a refusal, `done` has the outcomes so far. */
async function repairMany({ ids, filter }, dry_run, done) {
  const [command, reason] = [form.elements.command.value, form.elements.reason.value];
  const request = { command, reason, dry_run, limit: ids ? 1 : AT_ONCE, ...needed(command) };
  for (const each of ids ? ids.map((id) => ({ id })) : [filter]) {
    const found = await post("a2a/repair/bulk", { ...request, filter: each });
    done.outcomes.push(...found.outcomes);
    done.matched += found.matched;
    done.more ||= found.more;
  }
}

function showOutcomes(outcomes) {
  find("#bulk-outcomes").hidden = outcomes.length === 0;
  const values = (each) => ({ id: shortId(each.task_id), outcome: [chip(OUTCOMES[each.outcome])], reason: each.reason ?? each.code ?? "" });
  rows("#bulk-outcomes tbody", "outcome", outcomes, (each) => each.task_id, values);
}
