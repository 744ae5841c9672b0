"""One delivery to a webhook: a POST of one step of a task, authenticated as its owner asked, and signed.

The address is judged here, when it is called, and not when it was registered: by then the name may lead elsewhere, and
a refusal at registration would tell strangers about the inside network. docs/formats/push.md has the headers.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

from covenant.model.errors import Invalid
from covenant.model.push import FAILURE_LENGTH_MAX, Push
from covenant.model.task_event import Step
from covenant.model.task import Task
from covenant.outbound.failures import AddressRefused, CallFailed
from covenant.outbound.fetching import Fetched, Fetcher
from covenant.seal.webhooks import WebhookSigner
from covenant.wire.a2a import v1 as a2a_v1

MEDIA_TYPE: Final = "application/a2a+json"
GONE: Final = 410


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """`gone`: the receiver says that it will never take one again. `retry_after_ms`: it says when it may."""

    reason: str
    gone: bool = False
    retry_after_ms: int = 0


class Webhooks:
    def __init__(self, fetcher: Fetcher, signer: WebhookSigner, now_ms: Callable[[], int]) -> None:
        self._fetcher = fetcher
        self._signer = signer
        self._now_ms = now_ms

    async def deliver(self, push: Push, task: Task, step: Step, *, attempt: int) -> Failed | None:
        """None when the receiver has taken it."""
        body = a2a_v1.encode_step(task, step)
        headers = self._headers(push, step, attempt, body)
        try:
            answer = await self._fetcher.fetch("POST", push.config.url, headers=headers, content=body)
        except AddressRefused as refused:
            return _failed(refused.detail)
        except CallFailed as failed:
            return _failed(failed.detail)
        except Invalid as wrong:
            return _failed(wrong.message)
        if 200 <= answer.status < 300:
            return None
        return Failed(
            reason=f"HTTP {answer.status}",
            gone=answer.status == GONE,
            retry_after_ms=_retry_after_ms(answer, self._now_ms()),
        )

    def _headers(self, push: Push, step: Step, attempt: int, body: bytes) -> Mapping[str, str]:
        delivery_id, timestamp_s = f"{push.key}-{step.generation}", self._now_ms() // 1000
        headers = {
            "content-type": MEDIA_TYPE,
            "a2a-version": "1.0",
            "webhook-id": delivery_id,
            "webhook-timestamp": str(timestamp_s),
            "webhook-signature": self._signer.sign(delivery_id, timestamp_s, body),
            "covenant-key-id": self._signer.key_id,
            "covenant-task-id": push.task_id,
            "covenant-generation": str(step.generation),
            "covenant-push-id": push.id,
            "covenant-attempt": str(attempt),
        }
        return headers | secrets_of(push)


def secrets_of(push: Push) -> dict[str, str]:
    """The headers by which the receiver knows that it is us, as the owner gave them."""
    config, headers = push.config, {}
    if config.token is not None:
        headers["x-a2a-notification-token"] = config.token
    known = config.authentication
    if known is not None and known.credentials is not None:
        credentials = known.credentials
        if known.scheme.lower() == "basic" and ":" in credentials:
            # Base64 has no colon: this is a name and a password, as they are.
            credentials = base64.b64encode(credentials.encode()).decode()
        headers["authorization"] = f"{known.scheme} {credentials}"
    return headers


def _failed(reason: str) -> Failed:
    return Failed(reason=reason[:FAILURE_LENGTH_MAX])


def _retry_after_ms(answer: Fetched, now_ms: int) -> int:
    """Seconds, or a date. What is neither is not there."""
    said = answer.headers.get("retry-after", "").strip()
    if said.isdecimal() and said.isascii():
        return int(said[:9]) * 1000
    try:
        return max(0, int(parsedate_to_datetime(said).timestamp() * 1000) - now_ms)
    except (ValueError, OverflowError):
        return 0
