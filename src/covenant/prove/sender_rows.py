"""Rows on senders: repeats, many at once over many kills, pages of a list, other versions of the protocol."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, Final

from covenant.prove.a2a_client import Client, ServerUnreachable
from covenant.prove.protocol import Interface, ServerRefused, TaskSeen, Unreadable, Version, read_interfaces
from covenant.prove.trial import Broken, NotChecked, NotOffered, Row, Trial, refused_as

AT_ONCE: Final = 8
LISTED: Final = 23
PAGE: Final = 5
PAGES_MAX: Final = 50


async def duplicate(trial: Trial) -> None:
    header = trial.extent.idempotency_header
    mechanism = f"the header {header}" if header else "the messageId"
    key, mark = trial.key(), str(uuid.uuid4())
    first = await _send_marked(trial, f"complete {key}", mark)
    second = await _send_marked(trial, f"complete {key}", mark)
    await trial.quiet()
    trial.note(f"the same send twice under {mechanism}: tasks {first}, {second}; executions: {trial.runs(key)}")
    if first != second or trial.runs(key) != 1:
        message = f"a repeated send under {mechanism} is another task ({first}, {second})"
        if header:
            raise Broken(message)
        raise NotOffered(message)
    key, mark = trial.key(), str(uuid.uuid4())
    found = await asyncio.gather(*(_send_marked(trial, f"complete {key}", mark) for _ in range(AT_ONCE)))
    await trial.quiet()
    trial.note(f"{AT_ONCE} at once: {len(set(found))} tasks, executions: {trial.runs(key)}")
    if len(set(found) - {""}) != 1 or trial.runs(key) != 1:
        raise Broken(f"{AT_ONCE} equal sends at once became {len(set(found))} tasks and {trial.runs(key)} executions")
    key, mark = trial.key(), str(uuid.uuid4())
    first = await _send_marked(trial, f"complete {key}", mark)
    await trial.quiet()
    await trial.crash("after the first answer")
    second = await _send_marked(trial, f"complete {key}", mark)
    await trial.quiet()
    trial.note(f"repeated after kill -9: tasks {first}, {second}; executions: {trial.runs(key)}")
    if first != second or trial.runs(key) != 1:
        raise Broken(f"repeated after kill -9 the send is task {second}, not {first}; executions: {trial.runs(key)}")


async def _send_marked(trial: Trial, text: str, mark: str) -> str:
    """Sends and returns the task's id; empty if a repeat was refused."""
    header = trial.extent.idempotency_header
    headers = {header: mark} if header else {}
    try:
        answer = await trial.client.send(text, waits=True, message_id=mark, headers=headers)
    except ServerRefused as refused:
        trial.note(f"the repeat was refused: {refused}")
        return ""
    return answer.task.id if answer.task is not None else "a bare message"


async def many_sends(trial: Trial) -> None:
    extent = trial.extent
    load = _Load(trial)
    senders = [asyncio.create_task(load.send_all()) for _ in range(extent.senders)]
    try:
        for number in range(1, extent.kills + 1):
            await load.wait_for_acknowledged(number * extent.sends // (extent.kills + 1))
            load.pause()
            await trial.kill(f"number {number}, {len(load.acknowledged)} sends were acknowledged")
            await trial.restart()
            load.resume()
        await asyncio.gather(*senders)
    finally:
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
    missing = [task_id for task_id in load.acknowledged if not await _is_found(trial, task_id)]
    found = len(load.acknowledged) - len(missing)
    runs = trial.server.runs()
    twice = sum(1 for key in load.acknowledged.values() if runs[key] > 1)
    never = sum(1 for key in load.acknowledged.values() if not runs[key])
    trial.note(
        f"{len(load.acknowledged)} acknowledged, {found} found; {load.unanswered} sends without an answer, "
        f"{load.refused} refused; of the acknowledged {never} were never executed and {twice} more than once"
    )
    if missing:
        raise Broken(
            f"{len(load.acknowledged)} sends were acknowledged, and {found} tasks are found: {missing[0]} is not"
        )


async def _is_found(trial: Trial, task_id: str) -> bool:
    try:
        await trial.client.get(task_id)
    except ServerRefused:
        return False
    return True


class _Load:
    """Many senders. A send without an answer counts as not acknowledged, and its sender sends something new."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._server_up = asyncio.Event()
        self._server_up.set()
        self._changed = asyncio.Condition()
        self._left = trial.extent.sends
        self.acknowledged: dict[str, str] = {}
        self.unanswered = 0
        self.refused = 0
        self._refusal = ""
        self._unreadable: Unreadable | None = None

    def pause(self) -> None:
        self._server_up.clear()

    def resume(self) -> None:
        self._server_up.set()

    async def wait_for_acknowledged(self, number: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.acknowledged) >= number or self._has_failed())
        if self._unreadable is not None:
            raise self._unreadable
        if self._has_failed():
            raise NotChecked(f"{self.refused} sends were refused, the last by {self._refusal}")

    def _has_failed(self) -> bool:
        return self._unreadable is not None or self.refused > self._trial.extent.sends

    async def send_all(self) -> None:
        while self._left > 0:
            await self._server_up.wait()
            self._left -= 1
            key = self._trial.key()
            try:
                task = await self._trial.client.begin(f"complete {key}")
            except ServerUnreachable:
                self.unanswered += 1
                self._left += 1
                continue
            except Unreadable as odd:
                async with self._changed:
                    self._unreadable = odd
                    self._changed.notify_all()
                raise
            except ServerRefused as refused:
                async with self._changed:
                    self.refused += 1
                    self._refusal = str(refused)
                    self._changed.notify_all()
                self._left += 0 if self._has_failed() else 1
                continue
            async with self._changed:
                self.acknowledged[task.id] = key
                self._changed.notify_all()


async def list_pages(trial: Trial) -> None:
    made = {(await trial.client.begin(f"complete {trial.key()}", waits=True)).id for _ in range(LISTED)}
    listed: list[TaskSeen] = []
    with refused_as(NotOffered, "tasks cannot be listed"):
        page, token = await trial.client.list_page(PAGE)
    listed += page
    trial.note(f"{LISTED} tasks; the first page has {len(page)}")
    if not token:
        raise NotOffered(f"a page of {PAGE} was asked for, and all {len(page)} came at once")
    await trial.crash("between two pages")
    for _ in range(PAGES_MAX):
        if not token:
            break
        with refused_as(Broken, "the token of the next page is refused after kill -9"):
            page, token = await trial.client.list_page(PAGE, token)
        listed += page
    ids = [task.id for task in listed]
    missing, repeated = made - set(ids), len(ids) - len(set(ids))
    trial.note(f"{len(ids)} listed over the restart; missing {len(missing)}, repeated {repeated}")
    if missing or repeated:
        raise Broken(f"over a restart the pages miss {len(missing)} of {LISTED} tasks, and repeat {repeated}")


async def version_skew(trial: Trial) -> None:
    other = _other_interface(trial.card, trial.client.interface)
    mine = await trial.until(await trial.client.begin(f"complete {trial.key()}", waits=True), lambda now: now.ended)
    async with trial.client.with_interface(other) as stranger:
        with refused_as(NotOffered, f"a client of A2A {other.version} is refused"):
            theirs = await stranger.begin(f"complete {trial.key()}", waits=True)
        await trial.quiet()
        theirs = await stranger.get(theirs.id)
        trial.note(f"{trial.client.interface}: task {mine.id}; {other}: task {theirs.id}")
        await trial.crash("after both had an answer")
        await stranger.reset()
        for caller, task in ((trial.client, theirs), (stranger, mine)):
            await _read_across(caller, task)
            trial.note(f"{caller.interface} reads task {task.id} of the other")


async def _read_across(caller: Client, task: TaskSeen) -> None:
    with refused_as(Broken, f"{caller.interface} does not find task {task.id} after kill -9"):
        seen = await caller.get(task.id)
    if (seen.state, seen.text) != (task.state, task.text):
        raise Broken(f"{caller.interface} reads {seen.state!r} {seen.text!r}; it was {task.state!r} {task.text!r}")


def _other_interface(card: dict[str, Any], mine: Interface) -> Interface:
    """The interface in the other version, as the card offers it; else at the same address, as many servers have it."""
    version: Version = "0.3" if mine.version == "1.0" else "1.0"
    offered = [each for each in read_interfaces(card) if each.version == version]
    same = [each for each in offered if each.binding == mine.binding]
    return (same or offered or [Interface(mine.url, version, mine.binding)])[0]


SENDER_ROWS: Final = (
    Row(
        "duplicate",
        "A repeated send runs once, at once and over kill -9 too",
        f"the same send twice, {AT_ONCE} times at once, and again after kill -9, by the server's own mechanism",
        duplicate,
    ),
    Row(
        "list-pages",
        "Pages of ListTasks stay consistent over a restart",
        f"{LISTED} tasks in pages of {PAGE}; kill -9 between two pages",
        list_pages,
    ),
    Row(
        "version-skew",
        "Clients of A2A 1.0 and 0.3 find each other's tasks",
        "one send in each version, kill -9, and each reads the other's task",
        version_skew,
    ),
    Row(
        "many-sends",
        "Under load and many kills: acknowledged = found",
        "many sends by many clients at once, kills in between; then GetTask for each that was acknowledged",
        many_sends,
    ),
)
