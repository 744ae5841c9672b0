"""Forms for tasks: repair of one or many, cancel, answer, and retry of a push notification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from covenant.dashboard.act_pages import Act, ActContext, ActDone, ActForm
from covenant.dashboard.form_page import (
    EMPTY,
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
from covenant.doors.operator_api.tasks import Found, RepairedTasks, TaskShown
from covenant.ledger.machine.states import LIVE_NAMES
from covenant.model.errors import Conflict, Invalid
from covenant.model.grant import FORCE_ERROR_ACTION, REQUEUE_ACTION
from covenant.model.question import QUESTION, asks_approval
from covenant.model.task_event import WAITS_FOR_SENDER
from covenant.wire.mailbox import TaskFilter

COMMANDS: Final = (
    ("requeue", "Requeue: the lease ends, and the task goes back into its queue"),
    ("force_error", "Force an error: the task ends as failed, with the message below"),
)
BULK_TASKS_MAX: Final = 200
"""The most tasks of one bulk repair: the page has a row for each."""
STATES: Final = {"queued": "queued", "in_flight": "leased", "following": "elsewhere"}
"""Labels of the states of live tasks. An ended task has A2A's state as its label."""
DECISIONS: Final = (("yes", "Approve"), ("no", "Deny: the answer below is the reason"))
RISKS: Final = (
    ("idempotent", "The work may run twice without harm: it is idempotent"),
    ("operator_accepted", "I accept that it may run twice"),
)
TASK: Final = field("Task", "task", required=True, placeholder="its id, or how it begins")
FILTERS: Final = tuple(each.name for each in msgspec.structs.fields(TaskFilter))
BULK_COMMANDS: Final = (*COMMANDS, ("cancel", "Cancel: the tasks end as canceled"))
NUMBER_DIGITS_MAX: Final = 15
NUMBER_FILTERS: Final = frozenset({"attempt_min", "since_ms", "until_ms", "moved_since_ms"})


def task_page(task_id: str) -> str:
    return f"/ui/task/{task_id}" if task_id.replace("-", "").isalnum() else "/ui/tasks"


async def task_facts(context: ActContext) -> tuple[Markup, TaskShown]:
    """The task as it is now, as facts for a page and as the operation's answer."""
    shown: TaskShown = await context.run("show_a2a_task", task_id=context.text("task"))
    live = live_lease(shown)
    rows: list[tuple[str, Any]] = [
        ("Task", shown.task.id),
        ("State", _state(shown)),
        ("Agent", shown.task.recipient.display),
        ("Sender", shown.task.sender.display),
        ("Attempt", shown.attempt),
        ("Lease", context.text("lease") or live),
        ("Intent", shown.task.intent_text[:400]),
    ]
    return facts(rows), shown


def _state(shown: TaskShown) -> str:
    """The state with the label of the other pages."""
    if shown.holder_lost:
        return "leased; its holder is lost"
    if shown.state == "parked":
        return "waiting" if shown.a2a_state in WAITS_FOR_SENDER else "suspended"
    return STATES.get(shown.state, shown.a2a_state)


def live_lease(shown: TaskShown) -> str:
    return next((lease.lease_id for lease in reversed(shown.leases) if lease.outcome is None), "")


class RepairAct(Act):
    title = "Repair a task"
    kind = "repair_a2a_task"
    asks = TASK

    async def form(self, context: ActContext) -> ActForm:
        if isinstance(context.refused, Conflict):
            # The lease that the form showed is gone. The form now shows the current lease, which guards the next try.
            context = context._replace(values={**context.values, "lease": ""})
        fact_list, shown = await task_facts(context)
        command = context.text("command")
        fields = joined(
            (
                fact_list,
                choices("What to do", "command", COMMANDS, command),
                choices("If it is requeued", "risk", RISKS, context.text("risk"), required=False),
                field("Message of the error, if one is forced", "message", context.text("message")),
                long_field("Reason (for the audit)", "reason", context.text("reason"), required=True),
            )
        )
        lead = (
            "The lease shown here ends. If the task has no lease by then, or another one, nothing changes. "
            "A requeued task goes to the next worker that asks. If the old holder still works on it, the work runs "
            "twice, and the old holder's late result is refused."
        )
        lease = context.text("lease") or live_lease(shown)
        kept = {"task": shown.task.id, "lease": lease}
        return ActForm(lead, fields, "Repair", kept, task_page(shown.task.id), danger=True)

    async def act(self, context: ActContext) -> ActDone:
        lease_id, task_id = context.text("lease"), context.text("task")
        if not lease_id:
            raise Conflict("not_leased", f"task {task_id} had no lease when the form was shown; open the form again")
        check_chosen(context, COMMANDS)
        if context.text("command") == "force_error":
            command = {"action": "force_error", "message": context.text("message") or context.text("reason")}
        else:
            command = {"action": context.text("command"), "duplicate_risk": context.text("risk")}
        command["lease_id"] = lease_id
        reason = context.text("reason")
        outcome = (await context.run("repair_a2a_task", task_id=task_id, command=command, reason=reason)).outcome
        message = f"Task {outcome.task_id} is repaired: it is {outcome.state} now."
        return ActDone(context.next(task_page(outcome.task_id)), message)

    def missing_action(self, context: ActContext) -> str | None:
        return FORCE_ERROR_ACTION if context.text("command") == "force_error" else REQUEUE_ACTION


def check_chosen(context: ActContext, commands: Sequence[tuple[str, str]]) -> None:
    """Refuses a form with a missing choice, named by its label."""
    command, risk = context.text("command"), context.text("risk")
    if command not in dict(commands):
        raise Invalid("invalid_form", f"choose what to do: {', '.join(dict(commands))}")
    if command == "requeue" and risk not in dict(RISKS):
        raise Invalid("invalid_form", "choose: it may run twice without harm, or you accept that it may run twice")


class CancelAct(Act):
    title = "Cancel a task"
    kind = "cancel_a2a_task"
    asks = TASK

    async def form(self, context: ActContext) -> ActForm:
        fact_list, shown = await task_facts(context)
        reason = long_field("Reason (for the audit)", "reason", context.text("reason"), required=True, autofocus=True)
        fields = joined((fact_list, reason))
        lead = (
            f"The task has ended already: it is {shown.a2a_state}. A cancel changes nothing any more."
            if shown.state not in LIVE_NAMES
            else "The task ends as canceled, with all tasks that it delegated. The holder is told to stop. "
            "Work that is already done stays done."
        )
        back = task_page(shown.task.id)
        return ActForm(lead, fields, "Cancel the task", {"task": shown.task.id}, back, danger=True)

    async def act(self, context: ActContext) -> ActDone:
        ended = await context.run("cancel_a2a_task", task_id=context.text("task"), reason=context.text("reason"))
        how = "is canceled" if ended.canceled else f"had ended before: it is {ended.ending}"
        return ActDone(context.next(task_page(ended.task_id)), f"Task {ended.task_id} {how}.")


class AnswerAct(Act):
    title = "Answer a task"
    asks = TASK
    kind = "answer_a2a_task"

    async def form(self, context: ActContext) -> ActForm:
        fact_list, shown = await task_facts(context)
        waits = shown.a2a_state in WAITS_FOR_SENDER
        parked = next((each for each in reversed(shown.updates) if waits and each.kind == "parked"), None)
        body: dict[str, Any] = (parked.body if parked is not None else None) or {}
        question, decides = facts([("It asks", _question_text(body))]), asks_approval(body.get("metadata"))
        answer = long_field("Answer", "text", context.text("text"), required=not decides, autofocus=not decides)
        decision = choices("Your decision", "decision", DECISIONS, context.text("decision")) if decides else EMPTY
        fields = joined((fact_list, question, decision, answer))
        lead = (
            f"The task does not wait for its sender: it is {shown.a2a_state}. An answer is refused until it waits."
            if not waits
            else "The task waits for an approval. It goes on with your decision, which the audit records."
            if decides
            else "The task waits for its sender. Your answer is its next message. The task goes back into its queue."
        )
        # The decision is valid for the question that was shown, and for no later one.
        kept = {"task": shown.task.id, "question": str(body["metadata"][QUESTION].get("id", "")) if decides else ""}
        return ActForm(lead, fields, "Send the answer", kept, task_page(shown.task.id))

    async def act(self, context: ActContext) -> ActDone:
        approved = {"yes": True, "no": False}.get(context.text("decision"))
        answered = await context.run(
            "answer_a2a_task",
            task_id=context.text("task"),
            text=context.text("text"),
            approved=approved,
            question_id=context.text("question") or None,
        )
        message = f"Task {answered.task_id} has your answer, and is queued again."
        return ActDone(context.next(task_page(answered.task_id)), message)


def _question_text(body: Any) -> str:
    """The text of a status update, in the ledger's own form."""
    parts = body.get("parts") or ({"text": body.get("text")},)
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


class PushAct(Act):
    title = "Try a push notification again"
    asks = joined((TASK, field("Push configuration", "push", required=True)))
    kind = "retry_a2a_push"

    async def form(self, context: ActContext) -> ActForm:
        kept = {"task": context.text("task"), "push": context.text("push")}
        fields = facts([("Task", kept["task"]), ("Push configuration", kept["push"])])
        lead = "The receiver is called again at once, beginning with the first step that it has not accepted."
        return ActForm(lead, fields, "Try again", kept, "/ui/push")

    async def act(self, context: ActContext) -> ActDone:
        await context.run("retry_a2a_push", task_id=context.text("task"), push_id=context.text("push"))
        return ActDone(context.next("/ui/push"), "The receiver of the push notification is called again.")


class BulkAct(Act):
    """Runs twice: first a dry run that lists the tasks and the outcome of each, then the same with effect."""

    title = "Repair many tasks"
    asks = joined(field(name.capitalize(), name, placeholder="any") for name in ("state", "agent", "tenant", "text"))
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
        lead = "The tasks that match the filter are listed first, with what would become of each. Nothing changes yet."
        return ActForm(lead, fields, "Try without changing anything", kept, "/ui/tasks")

    async def act(self, context: ActContext) -> ActDone:
        check_chosen(context, BULK_COMMANDS)
        chosen = {name: _filter_value(name, context.text(name)) for name in FILTERS if context.text(name)}
        applies = context.text("step") == "apply"
        report: RepairedTasks = await context.run(
            "repair_a2a_tasks",
            filter=chosen,
            command=context.text("command"),
            reason=context.text("reason"),
            duplicate_risk=context.text("risk") or None,
            message=context.text("message") or None,
            dry_run=not applies,
            limit=BULK_TASKS_MAX,
        )
        rows = [(each.task_id, each.state, each.outcome, each.reason or "") for each in report.outcomes]
        shown = table(("Task", "State", "Outcome", "Why"), rows) if rows else EMPTY
        would_change = sum(each.outcome == "would_apply" for each in report.outcomes)
        button = f"Apply to {_tasks(would_change)}" if would_change else ""
        if applies:
            done = f"{report.applied} of {report.matched} done."
            if report.more:
                done, button = f"{done} More tasks match: {BULK_TASKS_MAX} are done at once.", "Try the remaining tasks"
        else:
            found: Found | None = (
                await context.run("find_a2a_tasks", **chosen, count=True, limit=1) if report.more else None
            )
            done = f"{_matched(report, found)}, and {would_change} would change. Nothing has changed yet."
        form = _next_step(context, button, step="" if applies else "apply")
        return ActDone(page=FormPage(self.title, body=joined((shown, form)), done=done))

    def missing_action(self, context: ActContext) -> str | None:
        return FORCE_ERROR_ACTION if context.text("command") == "force_error" else REQUEUE_ACTION


def _next_step(context: ActContext, button: str, *, step: str) -> Markup:
    """The form for the next step; without a button, a link back to the tasks."""
    if not button:
        return tag("p", tag("a", "Back to the tasks", href="/ui/tasks", class_="button"))
    again = hidden({**context.values, "step": step})
    return tag("form", again, buttons(button, back="/ui/tasks", danger=bool(step)), method="post", class_="act")


def _matched(report: RepairedTasks, found: Found | None) -> str:
    if found is None:
        return f"{_tasks(report.matched)} match" if report.matched != 1 else "1 task matches"
    least = "At least " if found.at_least else ""
    return f"{least}{found.total} tasks match. The first {report.matched} are listed and done at once"


def _tasks(count: int) -> str:
    return f"{count} task{'' if count == 1 else 's'}"


def _filter_value(name: str, text: str) -> str | int:
    if name not in NUMBER_FILTERS:
        return text
    if not text.isdecimal() or len(text) > NUMBER_DIGITS_MAX:
        raise Invalid("invalid_filter", f"{name.replace('_', ' ')} must be a whole number, and not {text[:40]!r}")
    return int(text)
