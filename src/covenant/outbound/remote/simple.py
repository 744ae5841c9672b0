"""A client of the simple door: a card, a text, and its result.

    card = await fetch_agent_card("https://agent.example")
    result = await invoke_remote_agent("https://agent.example", "Summarise this", token=token)

A card is at `/.well-known/agent-card.json` and kept for five minutes. A text is posted to `/a2a/tasks/send`, once, and
its task asked for every three seconds until it has ended or the time is over. A refusal of the address guard is raised;
everything else that goes wrong with an invocation is in its result.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import quote

import msgspec

from covenant.model.agent_card import RemoteCard
from covenant.model.errors import CovenantError, Invalid
from covenant.model.task import CHAIN_MAX, Hop
from covenant.outbound.address_guard import AddressGuard, SystemResolver
from covenant.outbound.call_errors import CallFailed, retry_after
from covenant.outbound.http_fetcher import Fetched, Fetcher
from covenant.outbound.outbound_settings import OutboundSettings
from covenant.outbound.remote.card_lookup import CardCache
from covenant.outbound.remote.remote_registry import Credentials
from covenant.wire.a2a.card_codec import BadCard, read_card
from covenant.wire.call_headers import call_context_headers
from covenant.wire.jsonrpc import one_line

CARD_PATH: Final = "/.well-known/agent-card.json"
CARD_MS: Final = 10_000
SUBMIT_MS: Final = 30_000
POLL_MS: Final = 10_000
POLL_INTERVAL_MS: Final = 3_000
TIMEOUT_MS: Final = 300_000
REMOTE_TIMEOUT_MS: Final = (1_000, 600_000)
"""The timeout that the other side uses."""
TASK_FAILED: Final = "Task failed"


class ValidationError(Invalid):
    """A card without a name or a version. `field` is what is missing or wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__("VALIDATION_ERROR", message)
        self.field = field


class ExternalServiceError(CovenantError):
    """The other side did not answer as it should. `status` is its HTTP status, if it answered."""

    code = "EXTERNAL_SERVICE_ERROR"

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class RemoteInvocationResult(msgspec.Struct, frozen=True, kw_only=True):
    success: bool
    task_id: str | None = None
    response_text: str | None = None
    error: str | None = None


class _Part(msgspec.Struct, frozen=True):
    text: Any = None


class _Message(msgspec.Struct, frozen=True):
    role: Any = None
    parts: list[_Part] = []


class _Task(msgspec.Struct, frozen=True):
    id: str
    state: str = "submitted"
    messages: list[_Message] = []


_task: Final = msgspec.json.Decoder(_Task).decode
_cards: Final = CardCache()


async def fetch_agent_card(
    base_url: str,
    *,
    token: str | None = None,
    allow_private: Sequence[str] = (),
    fetcher: Fetcher | None = None,
    cache: CardCache = _cards,
) -> RemoteCard:
    """The card of the agent at this address, from the last five minutes.

    Raises ValidationError for a card without name or version, ExternalServiceError if there is none to be had, and
    AddressRefused. `allow_private`: what may be called although it is not public, as in the setting `outbound.allow`.
    """
    base = base_url.rstrip("/")
    # Callers may see and call different things, so the cache key has the token and what is allowed.
    caller = hashlib.sha256("\0".join((token or "", *allow_private)).encode()).hexdigest()

    async def fetch() -> RemoteCard:
        async with _opened(fetcher, allow_private) as opened:
            return await _fetch_card(opened, base, token)

    return await cache.get(f"{base} {caller} {id(fetcher) if fetcher is not None else ''}", fetch)


async def discover_agent(base_url: str, **options: Any) -> RemoteCard | None:
    """The card, or None if it cannot be fetched for any reason. Takes the arguments of `fetch_agent_card`."""
    try:
        return await fetch_agent_card(base_url, **options)
    except CovenantError:
        return None


def clear_agent_card_cache() -> None:
    _cards.clear()


async def invoke_remote_agent(
    base_url: str,
    message: str,
    *,
    skill: str | None = None,
    timeout_ms: int = TIMEOUT_MS,
    token: str | None = None,
    depth: int = 0,
    chain: Sequence[str] = (),
    source_agent: str | None = None,
    poll_interval_ms: int = POLL_INTERVAL_MS,
    allow_private: Sequence[str] = (),
    fetcher: Fetcher | None = None,
) -> RemoteInvocationResult:
    """Sends a text to the agent at this address, and waits for the result.

    `depth` is the caller's own, 0 for the first caller; the other side gets one more. `chain` has the keys of the
    callers up to now, the present caller's last: an agent in the chain is not called again. A working agent passes
    `depth=turn.task.depth, chain=(*turn.task.chain, turn.task.recipient.pubkey)`.
    """
    base = base_url.rstrip("/")
    low, high = REMOTE_TIMEOUT_MS
    params = {"message": message, "skill": skill, "timeoutMs": min(max(timeout_ms, low), high), "depth": depth + 1}
    body: dict[str, Any] = {"params": {name: value for name, value in params.items() if value is not None}}
    if source_agent is not None:
        body["sourceAgent"] = source_agent
    names = chain or ((source_agent,) if source_agent is not None else ())
    hop = Hop(depth=depth + 1, chain=tuple(names)[-CHAIN_MAX:])
    headers = {"content-type": "application/json", "accept": "application/json", **call_context_headers(hop)}
    headers |= Credentials(base, token=token).headers(base)
    task_id: str | None = None
    async with _opened(fetcher, allow_private) as opened:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                task = await _submit(opened, base, headers, body)
                if isinstance(task, RemoteInvocationResult):
                    return task
                task_id = task.id
                return await _follow(opened, base, headers, task, poll_interval_ms / 1000)
        except TimeoutError:
            return RemoteInvocationResult(success=False, task_id=task_id, error=f"Timed out after {timeout_ms}ms")


async def _fetch_card(fetcher: Fetcher, base: str, token: str | None) -> RemoteCard:
    url = f"{base}{CARD_PATH}"
    headers = {"accept": "application/json", **Credentials(base, token=token).headers(url)}
    try:
        answer = await fetcher.fetch("GET", url, headers=headers, total_ms=CARD_MS)
    except CallFailed as error:
        raise ExternalServiceError(f"the agent card at {url} could not be fetched: {error.message}") from error
    if not 200 <= answer.status < 300:
        raise ExternalServiceError(
            f"the agent card at {url} could not be fetched: HTTP {answer.status}", status=answer.status
        )
    try:
        return read_card(answer.body, answer.url)
    except BadCard as error:
        raise ValidationError(error.field, f"the agent card at {url} cannot be used: {error.message}") from error


async def _submit(
    fetcher: Fetcher, base: str, headers: Mapping[str, str], body: Mapping[str, Any]
) -> _Task | RemoteInvocationResult:
    content = msgspec.json.encode(body)
    try:
        answer = await fetcher.fetch(
            "POST", f"{base}/a2a/tasks/send", headers=headers, content=content, total_ms=SUBMIT_MS
        )
    except CallFailed as error:
        return RemoteInvocationResult(success=False, error=f"Submit failed: {error.message}")
    if not 200 <= answer.status < 300:
        return RemoteInvocationResult(success=False, error=f"Submit failed: {_status_line(answer)}")
    try:
        return _task(answer.body)
    except (msgspec.DecodeError, RecursionError):
        return RemoteInvocationResult(success=False, error="Submit failed: the answer is no task")


async def _follow(
    fetcher: Fetcher, base: str, headers: Mapping[str, str], task: _Task, poll_s: float
) -> RemoteInvocationResult:
    while task.state not in ("completed", "failed"):
        await asyncio.sleep(poll_s)
        url = f"{base}/a2a/tasks/{quote(task.id, safe='')}"
        try:
            answer = await fetcher.fetch("GET", url, headers=headers, total_ms=POLL_MS)
        except CallFailed:
            continue
        if answer.status in (401, 403, 404, 410):
            # The answer will be the same at every later poll.
            return RemoteInvocationResult(success=False, task_id=task.id, error=f"Poll failed: {_status_line(answer)}")
        if not 200 <= answer.status < 300:
            await asyncio.sleep(max(0.0, (retry_after(answer.headers) or 0.0) - poll_s))
            continue
        try:
            task = msgspec.structs.replace(_task(answer.body), id=task.id)
        except (msgspec.DecodeError, RecursionError):
            continue
    text = last_agent_text(task.messages)
    if task.state == "completed":
        return RemoteInvocationResult(success=True, task_id=task.id, response_text=text)
    return RemoteInvocationResult(success=False, task_id=task.id, response_text=text, error=text or TASK_FAILED)


def last_agent_text(messages: Sequence[_Message]) -> str | None:
    """The agent's last text; None if there is none."""
    for message in reversed(messages):
        if message.role == "agent":
            return "".join(part.text for part in message.parts if isinstance(part.text, str)) or None
    return None


def _status_line(answer: Fetched) -> str:
    body = one_line(answer.body[:2_000].decode("utf-8", errors="replace"))
    return f"HTTP {answer.status} — {body}" if body else f"HTTP {answer.status}"


@asynccontextmanager
async def _opened(fetcher: Fetcher | None, allow: Sequence[str]) -> AsyncIterator[Fetcher]:
    if fetcher is not None:
        yield fetcher
        return
    resolver = SystemResolver()
    opened = Fetcher(AddressGuard(allow, resolver=resolver), OutboundSettings())
    try:
        yield opened
    finally:
        await opened.close()
        resolver.close()
