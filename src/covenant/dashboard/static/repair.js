// Repair of one task, and of many. What will happen is said in words. Of one task, the lease as it was seen goes along as
// a guard; of many, a dry run says first what would become of each.

import { post, Refused } from "./api.js";
import { chip, el, fill, find, plural, rows, shortId, shortName, when } from "./view.js";

const ONE = {
  requeue: (task) => `${shortName(task.task.recipient.display)} is offered the task again, as attempt ${task.attempt + 1}. If the holder that has it now answers after that, its answer is refused.`,
  force_error: () => "The task ends with an error, which its sender is told. The holder that has it now cannot answer any more.",
  cancel: () => "The task ends as canceled, with all that it delegated. Its holder is told to stop.",
};
const MANY = {
  requeue: () => "Each leased task goes back to its queue, and its holder's result will not count once somebody else holds it. Tasks in another state are left as they are.",
  force_error: () => "Each leased task ends with an error, which its sender is told. Tasks in another state are left as they are.",
  cancel: () => "Each task that has not ended is canceled, with all that it delegated.",
};
const NEEDS = { requeue: "a2a.repair.requeue", force_error: "a2a.repair.force_error" };
const OUTCOMES = {
  would_apply: { label: "would apply", tone: "leased", sign: "repair" },
  applied: { label: "applied", tone: "good", sign: "good" },
  refused: { label: "left as it is", tone: "waits", sign: "canceled" },
};
const AT_ONCE = 200;

const dialog = find("#repair, #bulk-dialog");
const form = dialog?.querySelector("form");
/** What the dialog is about: `words` for each command, on one `task` or many, `run(step)`, `changed(command)`. */
let work = null;

function open(about, command) {
  work = about;
  form.reset();
  form.elements.command.value = command;
  tell("");
  changed();
  dialog.showModal();
}

function changed() {
  const command = form.elements.command.value;
  const part = (name) => find(`[data-part="${name}"]`, dialog);
  part("will").textContent = work.words[command](work.task);
  part("risk").hidden = command !== "requeue";
  part("message").hidden = command !== "force_error";
  for (const field of form.elements.risk) field.required = command === "requeue";
  form.elements.message.required = command === "force_error";
  work.changed();
}

function tell(text, kind = "") {
  const told = find('[data-part="told"]', dialog);
  told.className = kind;
  told.replaceChildren(text);
  return told;
}

/** A refusal for want of a grant comes with the way to give it. */
function offerGrant(command, told) {
  const grant = async () => {
    try {
      await post("capabilities/grant", { action: NEEDS[command] });
      tell(`Granted ${NEEDS[command]}. Try again now.`, "done");
    } catch (error) {
      tell(error.message, "refused");
    }
  };
  told.append(" ", el("button", { type: "button", onclick: grant }, `Grant ${NEEDS[command]}`));
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
    const told = tell(error.message, "refused");
    if (error instanceof Refused && error.code === "capability_missing" && NEEDS[command]) offerGrant(command, told);
  }
});

export const leaseOf = (task) => (task.state === "in_flight" ? (task.leases.findLast((lease) => !lease.ended_at_ms) ?? null) : null);

/** `task` as it was shown: the repair is refused if its lease is another one by then. */
export function openRepair(task, command, who, after) {
  const lease = leaseOf(task);
  fill(dialog, {
    id: shortId(task.task.id),
    agent: shortName(task.task.recipient.display),
    state: task.holder_lost ? "leased; its holder is lost" : task.state,
    holder: lease ? [shortName(lease.leased_to.display), ", since ", when(lease.leased_at_ms)] : null,
    lease: lease ? shortId(lease.lease_id) : null,
    who,
  });
  const noLease = () => {
    for (const option of form.elements.command.options) option.disabled = option.value !== "cancel" && !lease;
  };
  const run = async () => {
    await repair(task.task.id, lease?.lease_id ?? null);
    dialog.close();
    await after();
  };
  open({ words: ONE, task, run, changed: noLease }, command);
}

function repair(task_id, lease_id) {
  const [action, reason] = [form.elements.command.value, form.elements.reason.value];
  if (action === "cancel") return post(`a2a/tasks/${task_id}/cancel`, { reason });
  return post("a2a/repair", { task_id, command: { action, lease_id, ...needed(action) }, reason });
}

/** What a command asks for beside its reason. */
function needed(command) {
  const { risk, message } = form.elements;
  return { requeue: { duplicate_risk: risk.value }, force_error: { message: message.value } }[command];
}

/** `chosen`: `{command, ids}` or `{command, filter}`; `after` is run when something was applied. */
export function openBulk(chosen, after) {
  const apply = find("#bulk-apply");
  find("#bulk-title").textContent = chosen.ids ? `Repair ${plural(chosen.ids.length, "task")}` : "Repair all that match";
  find("#bulk-outcomes").hidden = true;
  const run = async (step) => {
    const real = step === "apply";
    tell("…");
    const { outcomes, matched, more } = await repairMany(chosen, !real);
    showOutcomes(outcomes);
    const hit = outcomes.filter((each) => each.outcome !== "refused").length;
    const all = more ? `, and more: ${matched} are done at once` : "";
    tell(real ? `${hit} of ${plural(matched, "task")} changed.` : `${plural(matched, "task")} match${all}; ${hit} would be changed.`, real ? "done" : "");
    apply.disabled = real || hit === 0;
    if (real) await after();
  };
  open({ words: MANY, run, changed: () => (apply.disabled = true) }, chosen.command);
}

async function repairMany({ ids, filter }, dry_run) {
  const [command, reason] = [form.elements.command.value, form.elements.reason.value];
  const asked = { command, reason, dry_run, limit: ids ? 1 : AT_ONCE, ...needed(command) };
  const done = { outcomes: [], matched: 0, more: false };
  for (const each of ids ? ids.map((id) => ({ id })) : [filter]) {
    const found = await post("a2a/repair/bulk", { ...asked, filter: each });
    done.outcomes.push(...found.outcomes);
    done.matched += found.matched;
    done.more ||= found.more;
  }
  return done;
}

function showOutcomes(outcomes) {
  find("#bulk-outcomes").hidden = outcomes.length === 0;
  const values = (each) => ({ id: shortId(each.task_id), outcome: [chip(OUTCOMES[each.outcome])], reason: each.reason ?? each.code ?? each.state ?? "" });
  rows("#bulk-outcomes tbody", "outcome", outcomes, (each) => each.task_id, values);
}
