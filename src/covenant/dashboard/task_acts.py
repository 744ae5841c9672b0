"""Acts on tasks: repair of one or many, cancel, answer, and another try of a push notification."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from covenant.dashboard.act_pages import Act, ActContext, ActDone, ActForm
from covenant.dashboard.form_page import (
    FormPage,
    Markup,
    buttons,
    choices,
    facts,
    field,
    hidden,
    joined,
    long_field,
    table,
    tag,
)
from covenant.doors.operator_api.tasks import TaskShown
from covenant.model.errors import Conflict
from covenant.model.grant import FORCE_ERROR_ACTION, REQUEUE_ACTION
from covenant.wire.mailbox import TaskFilter

COMMANDS: Final = (
    ("requeue", "Requeue: the lease ends, and the task goes back into its queue"),
    ("force_error", "Force an error: the task ends as failed, with the message below"),
)
SHOWN_ROWS: Final = 200
RISKS: Final = (
    ("idempotent", "The work may run twice without harm: it is idempotent"),
    ("operator_accepted", "I accept that it may run twice"),
)


def task_page(task_id: str) -> str:
    return f"/ui/task/{task_id}" if task_id.replace("-", "").isalnum() else "/ui/tasks"


async def task_facts(context: ActContext) -> tuple[Markup, TaskShown]:
    """The task as it is seen now."""
    shown: TaskShown = await context.run("show_a2a_task", task_id=context.text("task"))
    live = live_lease(shown)
    rows: list[tuple[str, Any]] = [
        ("Task", shown.task.id),
        ("State", shown.state + (", its holder is lost" if shown.holder_lost else "")),
        ("Agent", shown.task.recipient.display),
        ("Sender", shown.task.sender.display),
        ("Attempt", shown.attempt),
        ("Lease", context.text("lease") or live),
        ("Intent", shown.task.intent_text[:400]),
    ]
    return facts(rows), shown


def live_lease(shown: TaskShown) -> str:
    return next((lease.lease_id for lease in reversed(shown.leases) if lease.outcome is None), "")


class RepairAct(Act):
    kind = "repair_a2a_task"

    async def form(self, context: ActContext) -> ActForm:
        seen, shown = await task_facts(context)
        command = context.text("command")
        fields = joined(
            (
                seen,
                choices("What to do", "command", COMMANDS, command),
                choices("If it is requeued", "risk", RISKS, context.text("risk"), required=False),
                field("Message of the error, if one is forced", "message", context.text("message")),
                long_field("Reason (for the audit)", "reason", context.text("reason"), required=True),
            )
        )
        lead = (
            "The lease that you see here ends. If it has none, or another lease by then, nothing happens. "
            "A requeued task is given to the next worker that asks. If the old holder still works on it, the work runs "
            "twice, and the old holder's late result is not taken."
        )
        lease = context.text("lease") or live_lease(shown)
        kept = {"task": context.text("task"), "lease": lease}
        return ActForm("Repair a task", lead, fields, "Repair", kept, task_page(shown.task.id), danger=True)

    async def act(self, context: ActContext) -> ActDone:
        lease_id, task_id = context.text("lease"), context.text("task")
        if not lease_id:
            raise Conflict(
                "not_leased", f"task {task_id} had no lease when the form showed it; look again, then repair"
            )
        if context.text("command") == "force_error":
            command = {"action": "force_error", "message": context.text("message") or context.text("reason")}
        else:
            command = {"action": context.text("command"), "duplicate_risk": context.text("risk")}
        command["lease_id"] = lease_id
        await context.run("repair_a2a_task", task_id=task_id, command=command, reason=context.text("reason"))
        return ActDone(context.next(task_page(task_id)))

    def missing_action(self, context: ActContext) -> str | None:
        return FORCE_ERROR_ACTION if context.text("command") == "force_error" else REQUEUE_ACTION


class CancelAct(Act):
    kind = "cancel_a2a_task"

    async def form(self, context: ActContext) -> ActForm:
        seen, shown = await task_facts(context)
        fields = joined((seen, long_field("Reason (for the audit)", "reason", context.text("reason"), required=True)))
        lead = (
            "The task ends as canceled, with all that was delegated for it. Whoever works on it is told to stop. "
            "What is already done stays done."
        )
        back = task_page(shown.task.id)
        return ActForm("Cancel a task", lead, fields, "Cancel the task", {"task": shown.task.id}, back, danger=True)

    async def act(self, context: ActContext) -> ActDone:
        task_id = context.text("task")
        await context.run("cancel_a2a_task", task_id=task_id, reason=context.text("reason"))
        return ActDone(context.next(task_page(task_id)))


class AnswerAct(Act):
    kind = "answer_a2a_task"

    async def form(self, context: ActContext) -> ActForm:
        seen, shown = await task_facts(context)
        asked = next((each for each in reversed(shown.updates) if each.kind == "parked"), None)
        question = facts([("It asks", _said(asked.body) if asked is not None else "")])
        fields = joined((seen, question, long_field("Answer", "text", context.text("text"), required=True)))
        lead = "The task waits for its sender. Your answer is its next message, and the task goes back into its queue."
        back = task_page(shown.task.id)
        return ActForm("Answer a task", lead, fields, "Send the answer", {"task": shown.task.id}, back)

    async def act(self, context: ActContext) -> ActDone:
        task_id = context.text("task")
        await context.run("answer_a2a_task", task_id=task_id, text=context.text("text"))
        return ActDone(context.next(task_page(task_id)))


def _said(body: Any) -> str:
    """The text of a status, in the ledger's own form."""
    parts = body.get("parts") or ({"text": body.get("text")},)
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


class PushAct(Act):
    kind = "retry_a2a_push"

    async def form(self, context: ActContext) -> ActForm:
        kept = {"task": context.text("task"), "push": context.text("push")}
        fields = facts([("Task", kept["task"]), ("Push configuration", kept["push"])])
        lead = "Its receiver is called again at once, from the step on that it has not taken."
        return ActForm("Try a push notification again", lead, fields, "Try again", kept, "/ui/push")

    async def act(self, context: ActContext) -> ActDone:
        await context.run("retry_a2a_push", task_id=context.text("task"), push_id=context.text("push"))
        return ActDone(context.next("/ui/push"))


FILTERS: Final = tuple(each.name for each in msgspec.structs.fields(TaskFilter))
BULK_COMMANDS: Final = (*COMMANDS, ("cancel", "Cancel: the tasks end as canceled"))
NUMBERS: Final = frozenset({"attempt_min", "since_ms", "until_ms", "moved_since_ms"})


class BulkAct(Act):
    """First without changing anything: which tasks, and what would become of each. Then the same for real."""

    kind = "repair_a2a_tasks"

    async def form(self, context: ActContext) -> ActForm:
        kept = {name: context.text(name) for name in FILTERS if context.text(name)}
        fields = joined(
            (
                facts(list(kept.items()) or [("Filter", "none: every task")]),
                choices("What to do", "command", BULK_COMMANDS, context.text("command")),
                choices("If they are requeued", "risk", RISKS, context.text("risk"), required=False),
                field("Message of the error, if one is forced", "message", context.text("message")),
                long_field("Reason (for the audit)", "reason", context.text("reason"), required=True),
            )
        )
        lead = "The tasks that the filter leaves are listed first, with what would become of each. Nothing changes yet."
        return ActForm("Repair many tasks", lead, fields, "Try without changing anything", kept, "/ui/tasks")

    async def act(self, context: ActContext) -> ActDone:
        real = context.text("step") == "apply"
        report = await context.run(
            "repair_a2a_tasks",
            filter={name: _filter(name, context.text(name)) for name in FILTERS if context.text(name)},
            command=context.text("command"),
            reason=context.text("reason"),
            duplicate_risk=context.text("risk") or None,
            message=context.text("message") or None,
            dry_run=not real,
        )
        rows = [(each.task_id, each.state, each.outcome, each.reason or "") for each in report.outcomes]
        shown = table(("Task", "State", "Outcome", "Why"), rows[:SHOWN_ROWS])
        if real:
            body = joined((shown, tag("p", tag("a", "Back to the tasks", href="/ui/tasks", class_="button"))))
            return ActDone(
                page=FormPage("Repair many tasks", body=body, done=f"{report.applied} of {report.matched} done")
            )
        would = sum(each.outcome == "would_apply" for each in report.outcomes)
        again = {name: value for name, value in context.given.items() if name != "step"}
        form = tag(
            "form",
            hidden({**again, "step": "apply"}),
            buttons(f"Apply to {would} tasks", back="/ui/tasks", danger=True),
            method="post",
            class_="act",
        )
        done = f"{report.matched} tasks match, and {would} of them would change. Nothing has changed yet."
        return ActDone(page=FormPage("Repair many tasks", body=joined((shown, form)), done=done))

    def missing_action(self, context: ActContext) -> str | None:
        return FORCE_ERROR_ACTION if context.text("command") == "force_error" else REQUEUE_ACTION


def _filter(name: str, given: str) -> str | int:
    return int(given) if name in NUMBERS and given.isdigit() else given
