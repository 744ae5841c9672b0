"""Rows on push notifications: none lost, in order, signed."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Final
from urllib.parse import urlsplit

from covenant.prove.a2a_client import ServerUnreachable, fetch_object
from covenant.prove.ed25519 import is_valid
from covenant.prove.protocol import TERMINAL, EventSeen, ServerRefused, TaskSeen, offers, read_objects
from covenant.prove.trial import Assembly, Broken, NotChecked, NotOffered, Row, Trial, gap_or_repeat, refused_as
from covenant.prove.webhook import Notification, Webhook

TOKEN: Final = "prove-notification-token"  # noqa: S105  (the server echoes it; it grants nothing)
CHUNKS: Final = 12
FEW_CHUNKS: Final = 4
NOTIFICATIONS_BEFORE_KILL: Final = 4
SIGNATURES: Final = ("webhook-signature", "signature", "x-signature", "x-hub-signature-256", "x-a2a-signature")


async def delivered(trial: Trial) -> None:
    async with Webhook() as webhook:
        webhook.accepts = False
        changes = await _changes_of_state(trial)
        task = await _begin(trial, webhook, f"stream {trial.key()} {FEW_CHUNKS} 150")
        states = _States(task, changes)
        ended = await trial.until(task, lambda now: states.add(now).ended)
        if not ended.ended:
            raise NotChecked(f"task {task.id} is {ended.state_text} after {trial.extent.bound_s:g} s, before any kill")
        await trial.wait_until(lambda: bool(webhook.notifications), most_s=3.0)
        trial.note(
            f"task {task.id}: {ended.state}; the receiver refused {len(webhook.notifications)} notifications by 503"
        )
        await trial.kill("while the receiver was out of order")
        webhook.accepts = True
        await trial.restart()
        notified = await trial.wait_until(lambda: _was_notified_of_end(webhook, task))
        trial.note(f"after the restart {len(webhook.accepted(task.id))} notifications were accepted")
        if not notified:
            raise Broken(
                f"the receiver was out of order for a while, and was not told of the end of task {task.id} within "
                f"{trial.extent.bound_s:g} s after the restart"
            )
        _check_notifications(trial, webhook, ended, states)
        await _killed_between(trial, webhook, changes)


async def _killed_between(trial: Trial, webhook: Webhook, changes: list[str]) -> None:
    """Checks that a receiver that is always up gets each step of a task, in order, up to its end, despite the kill."""
    task = await _begin(trial, webhook, f"stream {trial.key()} {CHUNKS} 150")
    states = _States(task, changes)
    await trial.until(
        task, lambda now: states.add(now).ended or len(webhook.accepted(task.id)) >= NOTIFICATIONS_BEFORE_KILL
    )
    await trial.crash(f"after {len(webhook.accepted(task.id))} notifications of a task at work")
    ended = await trial.until(task, lambda now: states.add(now).ended)
    if not ended.ended:
        raise Broken(
            f"{trial.extent.bound_s:g} s after the restart task {task.id} is still {ended.state_text}: its "
            "receiver was told of no end"
        )
    if not await trial.wait_until(lambda: _was_notified_of_end(webhook, task)):
        raise Broken(f"task {task.id} is {ended.state!r}, and its receiver was never told of its end")
    _check_notifications(trial, webhook, ended, states)


async def _changes_of_state(trial: Trial) -> list[str]:
    """The states that a stream reports while such a task is at work; empty for a server without streams."""
    changes: list[str] = []
    try:
        async with asyncio.timeout(trial.extent.bound_s):
            async with trial.client.stream(f"stream {trial.key()} {FEW_CHUNKS} 0") as events:
                async for event in events:
                    if event.state in TERMINAL:
                        break
                    if event.kind == "status":
                        changes.append(event.state)
    except (ServerRefused, ServerUnreachable, TimeoutError) as failed:
        trial.note(f"no stream shows how the state of a task changes: {failed}")
    return changes


class _States:
    """The states of a task that its receiver must be notified of.

    They are those that GetTask showed after the sender was answered. A task that has made output was at work, so the
    `changes` that a stream reported for such a task were its own, too.
    """

    def __init__(self, answer: TaskSeen, changes: list[str]) -> None:
        self._answered = answer.state
        self._changes = changes
        self.passed: set[str] = set()

    def add(self, now: TaskSeen) -> TaskSeen:
        if now.state != self._answered:
            self.passed.add(now.state)
        if now.text:
            self.passed.update(self._changes)
        return now


def _check_notifications(trial: Trial, webhook: Webhook, ended: TaskSeen, states: _States) -> None:
    notifications = webhook.accepted(ended.id)
    trial.note(
        f"task {ended.id}: {ended.state}, told by {len(notifications)} notifications; it was {sorted(states.passed)}"
    )
    if wrong := _out_of_order(notifications):
        raise Broken(f"the notifications of task {ended.id} are out of order: {wrong}")
    if lost := states.passed - {event.state for event in notifications}:
        raise Broken(f"task {ended.id} was {' and '.join(sorted(lost))}, and no notification told so")
    assembly = Assembly()
    for event in notifications:
        assembly.add(event)
    # A server may notify of states alone. If it notifies of artifacts, they must be complete.
    if assembly.text and assembly.text != ended.text:
        raise Broken(f"the notifications of task {ended.id} tell {assembly.text!r}, and the task has {ended.text!r}")


def _was_notified_of_end(webhook: Webhook, task: TaskSeen) -> bool:
    return any(event.state in TERMINAL for event in webhook.accepted(task.id))


def _out_of_order(notifications: list[EventSeen]) -> str | None:
    assembly = Assembly()
    for number, event in enumerate(notifications):
        if assembly.ended:
            return f"notification {number + 1} of {len(notifications)} comes after the end"
        if event.kind == "task" and len(event.text) < len(assembly.text) and event.text:
            return f"notification {number + 1} has less than the one before"
        assembly.add(event)
    return gap_or_repeat(assembly.text)


async def signed(trial: Trial) -> None:
    async with Webhook() as webhook:
        task = await _begin(trial, webhook, f"complete {trial.key()}")
        if not await trial.wait_until(lambda: _was_notified_of_end(webhook, task)):
            raise NotOffered("a push configuration was taken, and no notification came")
        first = webhook.notifications[0]
        if "webhook-signature" not in first.headers:
            others = [name for name in SIGNATURES if name in first.headers]
            echoed = "; the client's own token comes back" if TOKEN in first.headers.values() else ""
            reason = f"there is {', '.join(others)}, which the kit does not know" if others else "nothing is signed"
            raise NotOffered(reason + echoed)
        keys = await _key_set(trial)
        await trial.crash("after the first notifications")
        again = await _begin(trial, webhook, f"complete {trial.key()}")
        if not await trial.wait_until(lambda: _was_notified_of_end(webhook, again)):
            raise Broken("after the restart no notification came")
        for each in webhook.notifications:
            if not _signature_holds(each, keys):
                raise Broken(
                    f"the signature of {each.headers.get('webhook-id')} does not hold under the keys of before"
                )
        trial.note(f"{len(webhook.notifications)} signatures hold under the key set that was read before kill -9")


def _signature_holds(notification: Notification, keys: dict[str, str]) -> bool:
    """Whether a signature of Standard Webhooks for Ed25519 (`v1a`) is valid under any of the keys."""
    headers = notification.headers
    text = f"{headers.get('webhook-id')}.{headers.get('webhook-timestamp')}.".encode() + notification.body
    for word in headers.get("webhook-signature", "").split():
        version, _, encoded = word.partition(",")
        try:
            signature = base64.b64decode(encoded, validate=True)
            publics = [base64.urlsafe_b64decode(key + "==") for key in keys.values()]
        except (binascii.Error, ValueError):
            continue
        if version == "v1a" and any(is_valid(public, signature, text) for public in publics):
            return True
    return False


async def _key_set(trial: Trial) -> dict[str, str]:
    """The Ed25519 keys of the server's JSON Web Key Set, by their id."""
    place = urlsplit(trial.server.card_url)
    url = f"{place.scheme}://{place.netloc}/.well-known/jwks.json"
    with refused_as(NotOffered, "notifications are signed, and no key set tells by what"):
        document = await fetch_object("the key set", url, {}, trial.extent.bound_s)
    keys = read_objects("the keys", document.get("keys"))
    found = {str(key.get("kid", "")): str(key["x"]) for key in keys if key.get("crv") == "Ed25519" and "x" in key}
    if not found:
        raise NotOffered("notifications are signed, and the key set has no Ed25519 key")
    return found


async def _begin(trial: Trial, webhook: Webhook, text: str) -> TaskSeen:
    if not offers(trial.card, "pushNotifications"):
        raise NotOffered("the card does not offer push notifications")
    with refused_as(NotOffered, "a push configuration is refused"):
        return await trial.client.begin(text, push={"url": webhook.url, "token": TOKEN})


PUSH_ROWS: Final = (
    Row(
        "push",
        "Push notifications are not lost by a restart, and stay in order",
        "a receiver that refuses until the restart, then one that is there while the server is killed",
        delivered,
    ),
    Row(
        "push-signed",
        "Push notifications are signed, by the same key after a restart",
        "signatures of Standard Webhooks (Ed25519) under the key set that was read before kill -9",
        signed,
    ),
)
