"""Rows on tasks and their work: found again, true states, executed once, queued work not lost, states that stay."""

from __future__ import annotations

import asyncio
from typing import Final

from covenant.prove.protocol import TERMINAL, WAITING, ServerRefused, TaskSeen
from covenant.prove.trial import Broken, NotOffered, Row, Trial, refused_as

RUN_MS: Final = 3_000
STOPPED_MS: Final = 2_000
QUEUED: Final = 12


async def acknowledged(trial: Trial) -> None:
    tasks = [await trial.client.begin(f"complete {trial.key()}", waits=True)]
    tasks += [await trial.client.begin(f"complete {trial.key()}") for _ in range(4)]
    await trial.crash(f"right after the answer to send {len(tasks)}")
    for task in tasks:
        found = await trial.find(task)
        trial.note(f"task {task.id}: found, {found.state}")


async def interrupted(trial: Trial) -> None:
    key, task = await trial.begin_run(RUN_MS)
    await trial.crash("while the agent was at work")
    seen = await trial.until(task, lambda now: now.state in TERMINAL | WAITING)
    runs = trial.runs(key)
    trial.note(f"task {task.id}: {seen.state}, {runs} executions were begun")
    if seen.state not in TERMINAL | WAITING:
        raise Broken(
            f"{trial.extent.bound_s:g} s after the restart the task is still {seen.state_text}; executions: {runs}"
        )
    if seen.state == "completed" and not seen.says(f"{key} done"):
        raise Broken(f"the task is said to be completed, and what it should have made is not there: {seen.text!r}")


async def executed_once(trial: Trial) -> None:
    key, task = await trial.begin_run(RUN_MS)
    await trial.crash("while the agent was at work")
    try:
        seen = await trial.until(task, lambda now: now.ended)
        trial.note(f"task {task.id}: {seen.state}")
    except Broken as lost:
        trial.note(f"{lost}; so nobody can execute it again")
    await trial.crash("again, in case a second start repeats it")
    await asyncio.sleep(min(3.0, trial.extent.bound_s / 4))
    runs = trial.runs(key)
    trial.note(f"the work was begun {runs} times over 3 starts")
    if runs > 1 and trial.extent.at_least_once:
        raise NotOffered(f"begun {runs} times: the agent's work is declared as safe to repeat")
    if runs > 1:
        raise Broken(f"the interrupted work was begun {runs} times, and nobody had asked for a repetition")


async def queued(trial: Trial) -> None:
    keys = {trial.key(): None for _ in range(QUEUED)}
    tasks: dict[str, TaskSeen] = {}
    for key in keys:
        tasks[key] = await trial.client.begin(f"run {key} 2000")
        if tasks[key].ended:
            raise NotOffered("a send is answered when its work is done, so nothing that was acknowledged ever waits")
    await trial.quiet()
    await trial.kill(f"after the answer to send {QUEUED}, when no more work began")
    begun = trial.server.runs()
    waiting = [key for key in keys if not begun[key]]
    trial.note(f"{QUEUED} acknowledged, {QUEUED - len(waiting)} begun, {len(waiting)} waiting when it was killed")
    if not waiting:
        raise NotOffered("all acknowledged tasks had begun: the server begins everything at once and has no queue")
    await trial.restart()
    for key in waiting:
        if not await trial.until_run(key):
            break  # the others had as long to begin
    after = trial.server.runs()
    lost = [key for key in waiting if not after[key]]
    again = [key for key in waiting if after[key] > 1]
    trial.note(f"of those that waited {len(waiting) - len(lost)} were executed, {len(again)} of them more than once")
    if lost:
        raise Broken(
            f"{len(lost)} acknowledged tasks that had not begun were never executed, such as {tasks[lost[0]].id}"
        )
    if again:
        raise Broken(f"{len(again)} tasks that had waited were executed more than once")


async def input_required(trial: Trial) -> None:
    key, answer = trial.key(), trial.key()
    task = await trial.client.begin(f"ask {key}", waits=True)
    task = await trial.until(task, lambda now: now.state in TERMINAL | WAITING)
    if task.state != "input-required":
        raise NotOffered(f"asked for input, the task is {task.state!r}")
    await trial.crash("while the task waited for its sender")
    found = await trial.find(task)
    trial.note(f"task {task.id}: {found.state}")
    if found.state != "input-required":
        raise Broken(f"the task waited for input, and is {found.state!r} after kill -9")
    with refused_as(Broken, "the task says input-required, and refuses its sender's answer"):
        reply = await trial.client.begin(f"complete {answer}", task=task, waits=True)
    seen = await trial.until(task, lambda now: now.ended)
    trial.note(f"task {task.id}: {seen.state} after the answer; {seen.text!r}")
    if seen.state != "completed" or not (seen.says(f"{answer} done") or reply.says(f"{answer} done")):
        raise Broken(f"answered after the restart, the task is {seen.state!r} with {seen.text!r}")


async def canceled(trial: Trial) -> None:
    key, task = await trial.begin_run(2 * RUN_MS)
    with refused_as(NotOffered, "a task at work cannot be canceled"):
        await trial.client.cancel(task.id)
    before = await trial.until(task, lambda now: now.ended)
    if before.state != "canceled":
        raise NotOffered(f"the cancel was accepted, and the task is {before.state!r}")
    await trial.crash("right after the task was canceled")
    found = await trial.find(task)
    if found.state != "canceled":
        raise Broken(f"the task was canceled, and is {found.state!r} after kill -9")
    await asyncio.sleep(2 * RUN_MS / 1000)
    later, runs = await trial.find(task), trial.runs(key)
    trial.note(
        f"task {task.id}: {found.state} after the restart, {later.state} {2 * RUN_MS} ms later; executions: {runs}"
    )
    if later.state != "canceled":
        raise Broken(f"the task was canceled, and became {later.state!r} after kill -9")
    if runs > 1:
        raise Broken(f"the task was canceled, and was executed {runs} times")


async def terminal(trial: Trial) -> None:
    ended = [
        await trial.client.begin(f"complete {trial.key()}", waits=True),
        await trial.client.begin(f"fail {trial.key()}", waits=True),
    ]
    ended = [await trial.until(task, lambda now: now.ended) for task in ended]
    for number in range(2):
        for task in ended:
            await _send_and_cancel(trial, task)
        await trial.quiet()
        for task in ended:
            seen = await trial.find(task)
            if (seen.state, seen.text) != (task.state, task.text):
                raise Broken(
                    f"task {task.id} was {task.state!r} with {task.text!r}, and is {seen.state!r} with {seen.text!r}"
                )
            if seen.stamp != task.stamp:
                trial.note(f"task {task.id}: the time of its state was {task.stamp}, and is {seen.stamp}")
        if number == 0:
            await trial.crash("after the tasks had ended")


async def _send_and_cancel(trial: Trial, task: TaskSeen) -> None:
    """Sends a message and a cancel to an ended task, and notes the answers. The row checks the task alone."""
    notes = []
    try:
        answer = await trial.client.send(f"complete {trial.key()}", task=task, waits=True)
        other = answer.task is not None and answer.task.id != task.id
        notes.append("a message began another task" if other else "a message was taken")
    except ServerRefused as refused:
        notes.append(f"a message was refused ({refused.code})")
    try:
        await trial.client.cancel(task.id)
        notes.append("a cancel was taken")
    except ServerRefused as refused:
        notes.append(f"a cancel was refused ({refused.code})")
    trial.note(f"task {task.id} ({task.state}): {', '.join(notes)}")


async def graceful_stop(trial: Trial) -> None:
    _, first = await trial.begin_run(STOPPED_MS)
    tasks = [first]
    if not trial.answers_late:
        more = (trial.client.begin(f"run {trial.key()} {STOPPED_MS}") for _ in range(5))
        tasks += await asyncio.gather(*more)
    ended = sum([(await trial.find(task)).ended for task in tasks])
    await trial.stop(f"while {len(tasks) - ended} of {len(tasks)} tasks were at work or waited for it")
    await trial.restart()
    wrong = []
    for task in tasks:
        try:
            seen = await trial.until(task, lambda now: now.ended)
        except Broken:
            wrong.append(f"{task.id} is not found")
            continue
        if seen.state != "completed":
            wrong.append(f"{task.id} is {seen.state!r}")
    begun = sum(trial.server.runs().values())
    trial.note(f"{len(tasks) - len(wrong)} of {len(tasks)} completed; executions: {begun}")
    if wrong:
        raise Broken(
            f"after SIGTERM and a restart {len(wrong)} of {len(tasks)} tasks did not complete: {'; '.join(wrong)}"
        )


TASK_ROWS: Final = (
    Row(
        "acknowledged",
        "An acknowledged task is found after kill -9",
        "five sends, kill -9 right after the last answer, restart, GetTask for each",
        acknowledged,
    ),
    Row(
        "interrupted",
        "Interrupted work reaches a state that tells the truth",
        "kill -9 while the agent is at work, restart, GetTask until the task has ended or waits for its sender",
        interrupted,
    ),
    Row(
        "executed-once",
        "Interrupted work is not silently executed a second time",
        "kill -9 while the agent is at work, two restarts, and the lines that its executions wrote",
        executed_once,
    ),
    Row(
        "queued",
        "Queued work is executed after kill -9",
        f"{QUEUED} sends of 2 s of work, kill -9; what had not begun must be executed once after the restart",
        queued,
    ),
    Row(
        "input-required",
        "A task that waits for input survives, and goes on",
        "a task that asks, kill -9, restart, GetTask, and the answer in the same task",
        input_required,
    ),
    Row(
        "canceled",
        "A cancel survives, and a canceled task stays canceled",
        "cancel of a task at work, kill -9 right after, restart, GetTask at once and later",
        canceled,
    ),
    Row(
        "terminal",
        "A terminal state never changes",
        "a completed and a failed task, a message and a cancel to each, kill -9, and the same again",
        terminal,
    ),
    Row(
        "graceful-stop",
        "A graceful stop loses and fails nothing",
        "six tasks of 2 s, SIGTERM while they are at work or wait for it, restart; all have to complete",
        graceful_stop,
    ),
)
