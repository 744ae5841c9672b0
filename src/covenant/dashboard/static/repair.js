// The repair of one task: what was seen goes along as a guard, and what will happen is said in words.

import { post, Refused } from "./api.js";
import { el, fill, find } from "./dom.js";
import { shortId, shortName, when } from "./format.js";

const WILL = {
  requeue: (task) => `${shortName(task.task.recipient.display)} is offered the task again, as attempt ${task.attempt + 1}. If the holder that has it now answers after that, its answer is refused.`,
  force_error: () => "The task ends with an error, which its sender is told. The holder that has it now cannot answer any more.",
  cancel: () => "The task ends as canceled, with all that it delegated. Its holder is told to stop.",
};
const NEEDS = { requeue: "a2a.repair.requeue", force_error: "a2a.repair.force_error" };

const dialog = find("#repair");
const form = dialog?.querySelector("form");
let seen = null;
let after = () => {};

/** `task` as it was shown: the repair is refused if its lease is another one by then. */
export function openRepair(task, command, who, then) {
  seen = task;
  after = then;
  form.reset();
  form.elements.command.value = command;
  const lease = leaseOf(task);
  fill(dialog, {
    id: shortId(task.task.id),
    agent: shortName(task.task.recipient.display),
    state: task.holder_lost ? "leased; its holder is lost" : task.state,
    holder: lease ? [shortName(lease.leased_to.display), ", since ", when(lease.leased_at_ms)] : null,
    lease: lease ? shortId(lease.lease_id) : null,
    who,
  });
  tell("");
  changed();
  dialog.showModal();
}

export const leaseOf = (task) => (task.state === "in_flight" ? (task.leases.findLast((lease) => !lease.ended_at_ms) ?? null) : null);

function changed() {
  const command = form.elements.command.value;
  find("#repair-will").textContent = WILL[command](seen);
  find("#repair-risk").hidden = command !== "requeue";
  find("#repair-message").hidden = command !== "force_error";
  for (const field of form.elements.risk) field.required = command === "requeue";
  form.elements.message.required = command === "force_error";
  for (const option of form.elements.command.options) option.disabled = option.value !== "cancel" && !leaseOf(seen);
}

function tell(text, kind = "") {
  const told = find("#repair-told");
  told.className = kind;
  told.replaceChildren(text);
}

async function repair() {
  const { command, reason, risk, message } = form.elements;
  const task_id = seen.task.id;
  if (command.value === "cancel") return post(`a2a/tasks/${task_id}/cancel`, { reason: reason.value });
  const lease_id = leaseOf(seen)?.lease_id ?? null;
  const asked = command.value === "requeue" ? { action: "requeue", duplicate_risk: risk.value, lease_id } : { action: "force_error", message: message.value, lease_id };
  return post("a2a/repair", { task_id, command: asked, reason: reason.value });
}

/** A refusal for want of a grant comes with the way to give it. */
export function offerGrant(refusal, command, told) {
  if (refusal.code !== "capability_missing" || !NEEDS[command]) return;
  const grant = async () => {
    try {
      await post("capabilities/grant", { action: NEEDS[command] });
      told.className = "done";
      told.textContent = `Granted ${NEEDS[command]}. Try again now.`;
    } catch (error) {
      told.textContent = error.message;
    }
  };
  told.append(" ", el("button", { type: "button", onclick: grant }, `Grant ${NEEDS[command]}`));
}

form?.addEventListener("change", changed);
form?.addEventListener("submit", async (event) => {
  if (event.submitter?.value === "close") return;
  event.preventDefault();
  try {
    await repair();
    dialog.close();
    await after();
  } catch (error) {
    tell(error.message, "refused");
    if (error instanceof Refused) offerGrant(error, form.elements.command.value, find("#repair-told"));
  }
});
