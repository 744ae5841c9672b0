"""From what a client says to the task it begins, or the message that continues one: what is checked and what is kept.

A task that is sent under an idempotency key gets its id from the key (`keyed_ids`): so the same key names the same task
for ever, and the ledger's own rule (one id, one content) says whether it is the same request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import msgspec

from covenant.exchange.access.tenants import Caller
from covenant.exchange.catalogue import Catalogue
from covenant.ledger.contract.ledger import Ledger
from covenant.model.a2a_requests import Message, SendMessage
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.call_context import Hop
from covenant.model.content import Audio, Content, Image, Json, Resource, ResourceLink, Text, is_plain
from covenant.model.errors import Invalid, InvalidParams, TooLarge
from covenant.model.ids import AgentId, TaskId, uuid_of
from covenant.model.sanitizer import unreserved_parts, without_reserved
from covenant.model.task import DuplicateSafety, Idempotency, Task
from covenant.model.task_event import MessageUpdate
from covenant.wire.call_headers import MEMBERS

ORIGIN: Final = "a2a"
KEY_LENGTH_MAX: Final = 256
ID_LENGTH_MAX: Final = 256
PARTS_MAX: Final = 1_000
IDEMPOTENCY: Final = "covenant.idempotency"
"""In the request's metadata: the key, and perhaps that running the work twice does no harm."""

_PLAIN: Final = "text/plain"
_JSON: Final = "application/json"
_BYTES: Final = "application/octet-stream"


class IdempotencyKey(msgspec.Struct, frozen=True, gc=False):
    """`idempotent`: the work may run twice. A key alone says only that the request is the same."""

    key: str
    idempotent: bool = False


class _InMetadata(msgspec.Struct, frozen=True, gc=False):
    key: str
    duplicate_safety: DuplicateSafety = DuplicateSafety.UNSAFE


def read_idempotency(ask: SendMessage, header: str | None) -> IdempotencyKey | None:
    """The idempotency key of a request: its header's, or its metadata's. Both must agree."""
    said = (ask.metadata or {}).get(IDEMPOTENCY) or (ask.message.metadata or {}).get(IDEMPOTENCY)
    if said is None:
        return None if header is None else IdempotencyKey(_key(header))
    try:
        given = msgspec.convert(said, _InMetadata)
    except msgspec.ValidationError as error:
        raise Invalid("invalid_idempotency", f"metadata {IDEMPOTENCY}: {error}") from None
    if header is not None and header != given.key:
        raise Invalid("invalid_idempotency", f"the header Idempotency-Key and metadata {IDEMPOTENCY} name two keys")
    return IdempotencyKey(_key(given.key), given.duplicate_safety is DuplicateSafety.IDEMPOTENT)


def _key(key: str) -> str:
    if not key.strip() or len(key) > KEY_LENGTH_MAX:
        raise Invalid("invalid_idempotency", f"an idempotency key has 1 to {KEY_LENGTH_MAX} characters")
    return key


def first_task(
    ask: SendMessage,
    agent: CatalogueAgent,
    task_id: TaskId,
    *,
    sender: AgentId,
    recipient: AgentId,
    said: IdempotencyKey | None,
) -> Task:
    message, definition, parts = ask.message, agent.definition, ask.message.parts
    plain = parts[0] if len(parts) == 1 and is_plain(parts[0]) else None
    safety = DuplicateSafety.IDEMPOTENT
    return Task(
        id=task_id,
        sender=sender,
        recipient=recipient,
        intent_text=text_of(parts) if plain is None else plain.text,
        parts=parts if plain is None else (),
        # A context that the client did not name is named after the task that began it.
        context_id=message.context_id or task_id,
        timeout_ms=definition.turn_timeout_ms,
        idempotency=Idempotency(safety, said.key) if said is not None and said.idempotent else None,
        tenant=agent.tenant,
        origin=ORIGIN,
        message_id=message.message_id,
        metadata=message.metadata,
        extensions=message.extensions,
        reference_task_ids=message.reference_task_ids,
        output_modes=ask.output_modes,
        request_metadata=ask.metadata,
    )


def within_chain(task: Task, hop: Hop) -> Task:
    """What begins as part of a chain of calls is as deep in it as its caller says, and ends when it says."""
    return msgspec.structs.replace(task, depth=hop.depth, chain=hop.chain, deadline_ms=hop.deadline_ms)


def without_way(task: Task) -> Task:
    """The task as it was asked for, whichever way it came: a trace is another one each time that it is said."""
    if task.metadata is None or MEMBERS.isdisjoint(task.metadata):
        return task
    kept = {name: value for name, value in task.metadata.items() if name not in MEMBERS}
    return msgspec.structs.replace(task, metadata=kept or None)


def without_reserved_keys(task: Task) -> Task:
    """The task without what a client said under the daemon's own keys: what they mean was read already."""
    if task.metadata is None and task.request_metadata is None and not task.parts:
        return task
    parts, metadata, about = task.parts, task.metadata, task.request_metadata
    return msgspec.structs.replace(
        task,
        parts=unreserved_parts(parts),
        metadata=without_reserved(metadata),
        request_metadata=without_reserved(about),
    )


def within_deadline(task: Task, left_ms: int | None) -> Task:
    """A deadline ends what waits. What is at work is ended by a timeout, so that is no longer than what is left.

    Not part of the request: said again later, it is still the same.
    """
    if left_ms is None:
        return task
    left_ms = max(1, left_ms)
    return msgspec.structs.replace(task, timeout_ms=min(task.timeout_ms or left_ms, left_ms))


def next_message(message: Message) -> MessageUpdate:
    """Without what the client said under the daemon's own keys."""
    return MessageUpdate(
        role="user",
        parts=unreserved_parts(message.parts),
        message_id=message.message_id,
        metadata=without_reserved(message.metadata),
        extensions=message.extensions,
        reference_task_ids=message.reference_task_ids,
    )


def text_of(parts: Iterable[Content]) -> str:
    return "\n".join(part.text for part in parts if isinstance(part, Text))


def check_message(message: Message, agent: CatalogueAgent, extensions: Iterable[str]) -> None:
    """What the client says, against what the agent takes."""
    if message.role != "user":
        raise InvalidParams("message.role", "a client speaks as the user")
    if not message.parts or len(message.parts) > PARTS_MAX:
        raise InvalidParams("message.parts", f"1 to {PARTS_MAX} parts")
    _check_id("contextId", message.context_id)
    _check_id("messageId", message.message_id)
    definition = agent.definition
    if definition.extensions and (missing := set(definition.extensions).difference(extensions, message.extensions)):
        names = ", ".join(sorted(missing))
        raise Invalid("extension_required", f"this agent needs the extension {names}; declare it in A2A-Extensions")
    if definition.input_modes:
        for part in message.parts:
            media_type = media_type_of(part)
            if not any(_covers(mode, media_type) for mode in definition.input_modes):
                takes = ", ".join(definition.input_modes)
                raise Invalid("content_type_not_supported", f"this agent takes {takes}, not {media_type}")


def _check_id(name: str, given: str | None) -> None:
    if given is not None and not 0 < len(given) <= ID_LENGTH_MAX:
        raise InvalidParams(f"message.{name}", f"1 to {ID_LENGTH_MAX} characters")


def media_type_of(part: Content) -> str:
    match part:
        case Text():
            return part.mimeType or _PLAIN
        case Json():
            return part.mimeType or _JSON
        case Resource():
            return part.resource.mimeType or _BYTES
        case Image() | Audio():
            return part.mimeType
        case ResourceLink():
            return part.mimeType or _BYTES


def _covers(mode: str, media_type: str) -> bool:
    """`text/*` covers every kind of text; parameters such as a charset do not matter."""
    mode, media_type = mode.partition(";")[0].strip().lower(), media_type.partition(";")[0].strip().lower()
    return mode in ("*", "*/*", media_type) or (mode.endswith("/*") and media_type.startswith(mode[:-1]))


def check_size(size: int, limit: int) -> None:
    if size > limit:
        raise TooLarge("task_too_large", f"the message has {size} bytes, {limit} are allowed")


UNGUESSABLE_LENGTH_MIN: Final = 32
"""A shorter name that somebody without a token chooses could be chosen by others too. A UUID has 36 characters."""


class KeyedIds:
    def __init__(self, ledger: Ledger, catalogue: Catalogue) -> None:
        self._ledger = ledger
        self._catalogue = catalogue

    async def find(self, caller: Caller, place: str, key: str, *, sender: AgentId, recipient: AgentId) -> TaskId:
        """The task that this caller means by this key, at this place: an agent, or a part of a door."""
        check_key(caller, key)
        unkeyed = unkeyed_id(caller, place, key)
        if self._ledger.may_know(unkeyed):
            whose = await self._ledger.parties(unkeyed)
            if whose is not None and (whose.sender, whose.recipient) == (sender, recipient):
                return unkeyed
        return TaskId(self._catalogue.secret_id(_scope(caller, place, key)))


def unkeyed_id(caller: Caller, place: str, key: str) -> TaskId:
    """As ids were made once. Good for what stays within one task, and for finding old tasks."""
    return TaskId(uuid_of(hashlib.sha256(_scope(caller, place, key).encode()).digest()))


def check_key(caller: Caller, key: str) -> None:
    """Callers without a token are told apart by nothing: two of them must not come upon the same key."""
    if caller.anonymous and len(key) < UNGUESSABLE_LENGTH_MIN:
        raise Invalid(
            "guessable_key",
            f"without a token, an idempotency key has at least {UNGUESSABLE_LENGTH_MIN} characters; use a random UUID",
        )


def _scope(caller: Caller, place: str, key: str) -> str:
    return f"{caller.tenant.name}\0{caller.name}\0{place}\0{key}"
