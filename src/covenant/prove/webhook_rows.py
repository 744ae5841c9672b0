"""Rows on push notifications: none lost, in order, signed."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import httpx2

from covenant.prove.ed25519 import holds
from covenant.prove.protocol import TERMINAL, EventSeen, ServerRefused, TaskSeen
from covenant.prove.trial import LOOK_S, Assembly, Broken, NotOffered, Row, Trial, gap_or_repeat
from covenant.prove.webhook import Notification, Webhook, read_key_set

TOKEN: Final = "prove-notification-token"  # noqa: S105  (a word that comes back; it opens nothing)
CHUNKS: Final = 12
SIGNATURES: Final = ("webhook-signature", "signature", "x-signature", "x-hub-signature-256", "x-a2a-signature")


async def delivered(trial: Trial) -> None:
    async with Webhook() as webhook:
        webhook.accepts = False
        task = await _begin(trial, webhook, f"complete {trial.key()}")
        task = await trial.until(task, lambda now: now.ended)
        await _heard(trial, lambda: bool(webhook.heard), most_s=3.0)
        trial.note(f"task {task.id}: {task.state}; the receiver refused {len(webhook.heard)} notifications by 503")
        await trial.kill("while the receiver was out of order")
        webhook.accepts = True
        await trial.restart()
        told = await _heard(trial, lambda: _end_was_told(webhook, task))
        trial.note(f"after the restart {len(webhook.accepted(task.id))} notifications were accepted")
        if not told:
            raise Broken(
                f"the receiver was out of order for a while, and was not told of the end of task {task.id} within "
                f"{trial.extent.bound_s:g} s after the restart"
            )
        await _killed_between(trial, webhook)


async def _killed_between(trial: Trial, webhook: Webhook) -> None:
    """A receiver that is there all the time hears each step of a task over the kill, in order, up to its end."""
    task = await _begin(trial, webhook, f"stream {trial.key()} {CHUNKS} 150")
    await _heard(trial, lambda: len(webhook.accepted(task.id)) >= 4)
    await trial.crash(f"after {len(webhook.accepted(task.id))} notifications of a task at work")
    ended = await trial.until(task, lambda now: now.ended)
    if not ended.ended:
        trial.note(f"task {task.id} is still {ended.state}: it has no end that could be told")
        return
    if not await _heard(trial, lambda: _end_was_told(webhook, task)):
        raise Broken(f"task {task.id} is {ended.state!r}, and its receiver was never told of its end")
    told = webhook.accepted(task.id)
    trial.note(f"task {task.id}: {ended.state}, told by {len(told)} notifications")
    if wrong := _out_of_order(told):
        raise Broken(f"the notifications of task {task.id} are out of order: {wrong}")


def _end_was_told(webhook: Webhook, task: TaskSeen) -> bool:
    return any(event.state in TERMINAL for event in webhook.accepted(task.id))


def _out_of_order(told: list[EventSeen]) -> str | None:
    assembly = Assembly()
    for number, event in enumerate(told):
        if assembly.ended:
            return f"notification {number + 1} of {len(told)} comes after the end"
        if event.kind == "task" and len(event.text) < len(assembly.text) and event.text:
            return f"notification {number + 1} has less than the one before"
        assembly.add(event)
    return gap_or_repeat(assembly.text)


async def signed(trial: Trial) -> None:
    async with Webhook() as webhook:
        task = await _begin(trial, webhook, f"complete {trial.key()}")
        if not await _heard(trial, lambda: _end_was_told(webhook, task)):
            raise NotOffered("a push configuration was taken, and no notification came")
        first = webhook.heard[0]
        if "webhook-signature" not in first.headers:
            others = [name for name in SIGNATURES if name in first.headers]
            echoed = "; the client's own token comes back" if TOKEN in first.headers.values() else ""
            said = f"there is {', '.join(others)}, which the kit does not know" if others else "nothing is signed"
            raise NotOffered(said + echoed)
        keys = await _key_set(trial)
        await trial.crash("after the first notifications")
        again = await _begin(trial, webhook, f"complete {trial.key()}")
        if not await _heard(trial, lambda: _end_was_told(webhook, again)):
            raise Broken("after the restart no notification came")
        for each in webhook.heard:
            if not _signature_holds(each, keys):
                raise Broken(
                    f"the signature of {each.headers.get('webhook-id')} does not hold under the keys of before"
                )
        trial.note(f"{len(webhook.heard)} signatures hold under the key set that was read before kill -9")


def _signature_holds(notification: Notification, keys: dict[str, str]) -> bool:
    """As Standard Webhooks have it for Ed25519 (`v1a`), under any of the keys."""
    headers = notification.headers
    text = f"{headers.get('webhook-id')}.{headers.get('webhook-timestamp')}.".encode() + notification.body
    for word in headers["webhook-signature"].split():
        version, _, encoded = word.partition(",")
        try:
            signature = base64.b64decode(encoded, validate=True)
            publics = [base64.urlsafe_b64decode(key + "==") for key in keys.values()]
        except (binascii.Error, ValueError):
            continue
        if version == "v1a" and any(holds(public, signature, text) for public in publics):
            return True
    return False


async def _key_set(trial: Trial) -> dict[str, str]:
    place = urlsplit(trial.server.card_url)
    async with httpx2.AsyncClient(timeout=trial.extent.bound_s, trust_env=False) as http:
        answer = await http.get(f"{place.scheme}://{place.netloc}/.well-known/jwks.json")
    keys = read_key_set(answer.content) if answer.status_code == 200 else {}
    if not keys:
        raise NotOffered(f"notifications are signed, and no key set tells by what: {answer.status_code}")
    return keys


async def _begin(trial: Trial, webhook: Webhook, text: str) -> TaskSeen:
    if not (trial.card.get("capabilities") or {}).get("pushNotifications"):
        raise NotOffered("the card does not offer push notifications")
    try:
        return await trial.client.begin(text, push={"url": webhook.url, "token": TOKEN})
    except ServerRefused as refused:
        raise NotOffered(f"a push configuration is refused: {refused}") from None


async def _heard(trial: Trial, met: Callable[[], bool], most_s: float | None = None) -> bool:
    end_s = time.monotonic() + (most_s or trial.extent.bound_s)
    while not met():
        if time.monotonic() >= end_s:
            return False
        await asyncio.sleep(LOOK_S)
    return True


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
