// Repair many tasks: first a dry run that says what would become of each, then the same with effect.

import { post, Refused } from "./api.js";
import { copy, fill, find, list } from "./dom.js";
import { plural, shortId } from "./format.js";
import { chip } from "./states.js";
import { offerGrant } from "./repair.js";

const WILL = {
  requeue: "Each leased task goes back to its queue, and its holder's result will not count once somebody else holds it. Tasks in another state are left as they are.",
  force_error: "Each leased task ends with an error, which its sender is told. Tasks in another state are left as they are.",
  cancel: "Each task that has not ended is canceled, with all that it delegated.",
};
const OUTCOMES = {
  would_apply: { label: "would apply", tone: "leased", sign: "repair" },
  applied: { label: "applied", tone: "good", sign: "good" },
  refused: { label: "left as it is", tone: "waits", sign: "canceled" },
};
const AT_ONCE = 200;

const dialog = find("#bulk-dialog");
const form = dialog?.querySelector("form");
let work = null;

/** `chosen`: `{command, ids}` or `{command, filter}`; `after` is run when something was applied. */
export function openBulk(chosen, after) {
  work = { ...chosen, after };
  form.reset();
  form.elements.command.value = chosen.command;
  find("#bulk-title").textContent = chosen.ids ? `Repair ${plural(chosen.ids.length, "task")}` : "Repair all that match";
  find("#bulk-outcomes").hidden = true;
  tell("");
  changed();
  dialog.showModal();
}

function changed() {
  const command = form.elements.command.value;
  find("#bulk-will").textContent = WILL[command];
  find("#bulk-message").hidden = command !== "force_error";
  find("#bulk-risk").hidden = command !== "requeue";
  for (const field of form.elements.risk) field.required = command === "requeue";
  form.elements.message.required = command === "force_error";
  find("#bulk-apply").disabled = true;
}

function tell(text, kind = "") {
  const told = find("#bulk-told");
  told.className = kind;
  told.textContent = text;
}

function request(dry_run) {
  const { command, reason, risk, message } = form.elements;
  const asked = { command: command.value, reason: reason.value, dry_run };
  if (command.value === "requeue") asked.duplicate_risk = risk.value;
  if (command.value === "force_error") asked.message = message.value;
  return asked;
}

async function run(dry_run) {
  const filters = work.ids ? work.ids.map((id) => ({ id })) : [work.filter];
  const outcomes = [];
  let matched = 0;
  let more = false;
  tell("…");
  for (const filter of filters) {
    const found = await post("a2a/repair/bulk", { ...request(dry_run), filter, limit: work.ids ? 1 : AT_ONCE });
    outcomes.push(...found.outcomes);
    matched += found.matched;
    more ||= found.more;
  }
  show(outcomes);
  const hit = outcomes.filter((each) => each.outcome !== "refused").length;
  tell(dry_run ? `${plural(matched, "task")} match${more ? `, and more: ${matched} are done at once` : ""}; ${hit} would be changed.` : `${hit} of ${plural(matched, "task")} changed.`, dry_run ? "" : "done");
  find("#bulk-apply").disabled = !dry_run || hit === 0;
  if (!dry_run) await work.after();
}

function show(outcomes) {
  find("#bulk-outcomes").hidden = outcomes.length === 0;
  list(find("#bulk-outcomes tbody"), outcomes, (each) => each.task_id, () => copy("outcome"), (row, each) => {
    fill(row, { id: shortId(each.task_id), outcome: [chip(OUTCOMES[each.outcome])], reason: each.reason ?? each.code ?? each.state ?? "" });
  });
}

form?.addEventListener("change", changed);
form?.addEventListener("submit", async (event) => {
  const step = event.submitter?.value;
  if (step === "close") return;
  event.preventDefault();
  try {
    await run(step !== "apply");
  } catch (error) {
    tell(error.message, "refused");
    if (error instanceof Refused) offerGrant(error, form.elements.command.value, find("#bulk-told"));
  }
});
