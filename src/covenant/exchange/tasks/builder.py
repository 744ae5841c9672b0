"""The one builder of tasks, for every door: the checks of a request, and the fields that are kept of it.

The id of a task that is sent under an idempotency key is derived from the key (`KeyedIds`): the same key always names
the same task, and the ledger's own rule (one id, one content) decides whether it is the same request.
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from covenant.exchange.access.tenants import Caller
from covenant.exchange.catalogue import Catalogue
from covenant.ledger.contract.tasks import TaskLedger
from covenant.ledger.machine.priorities import PRIORITY_MAX
from covenant.model.a2a_requests import Message, SendMessage
from covenant.model.agent_definition import AgentDefinition, CatalogueAgent
from covenant.model.content import Audio, Content, File, Image, Json, Resource, ResourceLink, Text
from covenant.model.errors import Invalid, InvalidParams, TooLarge
from covenant.model.ids import AgentId, TaskId, uuid_of
from covenant.model.kinds import KINDS
from covenant.model.sanitizer import file_name_of, is_file_name, name_of, unreserved_parts, without_reserved
from covenant.model.task import DuplicateSafety, Hop, Idempotency, Target, Task
from covenant.model.task_event import ArtifactUpdate, MessageUpdate, Update
from covenant.model.tracing import trace_of
from covenant.wire.call_headers import MEMBERS
from covenant.wire.json_input import A2A_NESTING_MAX, deeper_than

KEY_LENGTH_MAX: Final = 256
ID_LENGTH_MAX: Final = 256
PARTS_MAX: Final = 1_000
IDEMPOTENCY: Final = "covenant.idempotency"
"""Key in the request's metadata: the idempotency key, and perhaps that running the work twice does no harm."""

NOT_BEFORE: Final = "covenant.not_before_ms"
"""Key in the request's metadata: the moment before which the task may not begin, in epoch milliseconds."""

PRIORITY: Final = "covenant.priority"
"""Key in the request's metadata: the task's priority among those of the same agent, from 0 to 9."""
EXACT_MAX: Final = 2**53
"""Up to here a double holds every whole number exactly."""

_NO_NAMES: Final[tuple[str, ...]] = ()
_PLAIN: Final = "text/plain"
_JSON: Final = "application/json"
_BYTES: Final = "application/octet-stream"
UNGUESSABLE_LENGTH_MIN: Final = 32
"""The least length of a name that a caller without a token chooses: others could guess a shorter one."""


def read_idempotency(request: SendMessage, header: str | None) -> Idempotency | None:
    """The idempotency key of a request: its header's, or its metadata's. Both must agree.

    A key alone says only that a repeat is the same request, and not that the work may run twice.
    """
    found = (request.metadata or {}).get(IDEMPOTENCY) or (request.message.metadata or {}).get(IDEMPOTENCY)
    if found is None:
        return None if header is None else Idempotency(DuplicateSafety.UNSAFE, _checked_key(header))
    try:
        whole = {"duplicate_safety": DuplicateSafety.UNSAFE, **found} if isinstance(found, dict) else found
        given = msgspec.convert(whole, Idempotency)
    except msgspec.ValidationError as error:
        raise Invalid("invalid_idempotency", f"metadata {IDEMPOTENCY}: {error}") from None
    if header is not None and header != given.key:
        raise Invalid(
            "invalid_idempotency",
            f"the header Idempotency-Key and metadata {IDEMPOTENCY} name different keys; give one of them",
        )
    _checked_key(given.key)
    return given


def read_not_before(metadata: dict[str, Any]) -> int | None:
    given = metadata.get(NOT_BEFORE)
    moment_ms = _whole_number(given)
    if given is None or (moment_ms is not None and moment_ms >= 0):
        return moment_ms
    raise Invalid("invalid_task", f"metadata {NOT_BEFORE} must be a moment, in epoch milliseconds")


def read_priority(metadata: dict[str, Any]) -> int:
    priority = _whole_number(metadata.get(PRIORITY, 0))
    if priority is not None and 0 <= priority <= PRIORITY_MAX:
        return priority
    raise Invalid("invalid_task", f"metadata {PRIORITY} must be a whole number from 0 to {PRIORITY_MAX}")


def _whole_number(given: object) -> int | None:
    """The number as an integer; None if it is not whole. Clients that use protobuf write each number as a double."""
    if isinstance(given, float) and given.is_integer() and abs(given) <= EXACT_MAX:
        return int(given)
    return given if type(given) is int else None


def _checked_key(key: str) -> str:
    if not key.strip() or len(key) > KEY_LENGTH_MAX:
        raise Invalid("invalid_idempotency", f"an idempotency key must have 1 to {KEY_LENGTH_MAX} characters")
    return key


def build_task(
    task_id: TaskId,
    *,
    sender: AgentId,
    recipient: AgentId,
    parts: tuple[Content, ...],
    tenant: str,
    origin: str,
    definition: AgentDefinition | None = None,
    timeout_ms: int | None = None,
    hop: Hop | None = None,
    context_id: str | None = None,
    intent_text: str | None = None,
    parent: TaskId | None = None,
    key: Idempotency | None = None,
    message: Message | None = None,
    metadata: dict[str, Any] | None = None,
    output_modes: tuple[str, ...] = (),
    request_metadata: dict[str, Any] | None = None,
    deadline_ms: int | None = None,
    target: Target | None = None,
    not_before_ms: int | None = None,
    priority: int = 0,
) -> Task:
    """The task of a request of any door but the mailbox, whose senders send whole tasks (`wire/mailbox.SendTask`).

    A single plain text is the task's text, and no part. An unnamed context is named after its first task. A turn takes
    no longer than the agent's definition or kind allows, nor than `timeout_ms`. `hop` has depth and deadline."""
    first = parts[0] if len(parts) == 1 else None
    plain = type(first) is Text and first.metadata is None and first.mimeType is None and first.filename is None
    if intent_text is None:
        intent_text = first.text if type(first) is Text else text_of(parts)
    if definition is not None and (own_ms := definition.timeout_ms or KINDS[definition.kind].timeout_ms) is not None:
        timeout_ms = own_ms if timeout_ms is None else min(own_ms, timeout_ms)
    traceparent = tracestate = message_id = None
    depth, chain, extensions, references = 0, _NO_NAMES, _NO_NAMES, _NO_NAMES
    if hop is not None:
        depth, chain, deadline_ms = hop.depth, hop.chain, hop.deadline_ms if deadline_ms is None else deadline_ms
        if (trace := trace_of(hop)) is not None:
            traceparent, tracestate = trace.traceparent, trace.tracestate
    if message is not None:
        message_id, metadata = message.message_id, message.metadata
        extensions, references = message.extensions, message.reference_task_ids
    return Task(
        id=task_id,
        sender=sender,
        recipient=recipient,
        intent_text=intent_text,
        parts=() if plain else parts,
        parent=parent,
        context_id=context_id or task_id,
        timeout_ms=timeout_ms,
        deadline_ms=deadline_ms,
        idempotency=key,
        tenant=tenant,
        origin=origin,
        depth=depth,
        chain=chain,
        message_id=message_id,
        metadata=metadata,
        extensions=extensions,
        reference_task_ids=references,
        output_modes=output_modes,
        request_metadata=request_metadata,
        traceparent=traceparent,
        tracestate=tracestate,
        target=target,
        not_before_ms=not_before_ms,
        priority=priority,
    )


def without_transport(task: Task) -> Task:
    """The task without its trace, which differs each time, and its key, which is in its id: for the digest."""
    metadata, idempotency = task.metadata, task.idempotency
    if metadata is not None and not MEMBERS.isdisjoint(metadata):
        metadata = {name: value for name, value in metadata.items() if name not in MEMBERS} or None
    if idempotency is not None and idempotency.duplicate_safety is DuplicateSafety.UNSAFE:
        idempotency = None
    return msgspec.structs.replace(task, metadata=metadata, idempotency=idempotency, traceparent=None, tracestate=None)


def without_reserved_keys(task: Task) -> Task:
    """The task without metadata under reserved keys: its door has read those already."""
    parts, metadata, about = task.parts, task.metadata, task.request_metadata
    return msgspec.structs.replace(
        task,
        parts=unreserved_parts(parts),
        metadata=without_reserved(metadata),
        request_metadata=without_reserved(about),
    )


def within_deadline(task: Task, left_ms: int | None) -> Task:
    """The task with a timeout that is no longer than the time left until the deadline.

    A deadline ends a waiting task; only a timeout ends a running one. The digest does not cover this.
    """
    if left_ms is None:
        return task
    left_ms = max(1, left_ms)
    return msgspec.structs.replace(task, timeout_ms=min(task.timeout_ms or left_ms, left_ms))


def next_message(message: Message) -> MessageUpdate:
    """A client's message to a task, without metadata under reserved keys."""
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
    """Refuses a message that is malformed, or that this agent does not take."""
    if message.role != "user":
        raise InvalidParams("message.role", "a client's message must have the role of the user")
    if not message.parts or len(message.parts) > PARTS_MAX:
        raise InvalidParams("message.parts", f"1 to {PARTS_MAX} parts")
    context_id = message.context_id
    if context_id is not None and not 0 < len(context_id) <= ID_LENGTH_MAX:
        raise InvalidParams("message.contextId", f"1 to {ID_LENGTH_MAX} characters")
    if not 0 < len(message.message_id) <= ID_LENGTH_MAX:
        raise InvalidParams("message.messageId", f"1 to {ID_LENGTH_MAX} characters")
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
        case ResourceLink() | File():
            return part.mimeType or _BYTES


def _covers(mode: str, media_type: str) -> bool:
    """`text/*` covers every kind of text; parameters such as a charset do not matter."""
    mode, media_type = mode.partition(";")[0].strip().lower(), media_type.partition(";")[0].strip().lower()
    return mode in ("*", "*/*", media_type) or (mode.endswith("/*") and media_type.startswith(mode[:-1]))


def check_size(size: int, limit: int) -> None:
    if size > limit:
        raise TooLarge("task_too_large", f"the message has {size} bytes; the limit is {limit}")


class KeyedIds:
    """Ids of tasks that are sent under an idempotency key: the same key of the same caller names the same task.

    An id is derived from the key with a secret of the daemon, so nobody can compute the id of another caller's key,
    find out whether it was used, or use it up. The secret is derived from the daemon's identity key, so it is the same
    after every restart. Earlier ids were plain hashes; a task under one is still found by its key.
    """

    def __init__(self, ledger: TaskLedger, catalogue: Catalogue) -> None:
        self._ledger = ledger
        self._catalogue = catalogue

    async def find(self, caller: Caller, place: str, key: str, *, sender: AgentId, recipient: AgentId) -> TaskId:
        """The id of the task under this key. `place` is an agent or a part of a door: each has its own keys."""
        check_key(caller, key)
        unkeyed = unkeyed_id(caller, place, key)
        if self._ledger.may_know(unkeyed):
            parties = await self._ledger.parties(unkeyed)
            if parties is not None and (parties.sender, parties.recipient) == (sender, recipient):
                return unkeyed
        return TaskId(self._catalogue.secret_id(_scope(caller, place, key)))


def unkeyed_id(caller: Caller, place: str, key: str) -> TaskId:
    """The id as earlier versions derived it, by a plain hash. Used within one task, and to find old tasks."""
    return TaskId(uuid_of(hashlib.sha256(_scope(caller, place, key).encode()).digest()))


def check_key(caller: Caller, key: str) -> None:
    """Refuses a short key without a token: such callers cannot be told apart, so their keys must not collide."""
    if caller.anonymous and len(key) < UNGUESSABLE_LENGTH_MIN:
        raise Invalid(
            "guessable_key",
            f"without a token, an idempotency key has at least {UNGUESSABLE_LENGTH_MIN} characters; use a random UUID",
        )


def _scope(caller: Caller, place: str, key: str) -> str:
    tenant = caller.tenant
    keys_of = f"{tenant.name}\0{tenant.keyed_since_ms}" if tenant.keyed_since_ms else tenant.name
    return f"{keys_of}\0{caller.name}\0{place}\0{key}"


def check_blocks(blocks: Sequence[Content], where: str) -> None:
    """Checks that bytes are base64, that data is not nested too deep for clients, and that file names have no paths."""
    check_depth(blocks, where)
    for place, block in enumerate(blocks):
        check_name(name_of(block), f"{where}[{place}]")
        if isinstance(block, Image | Audio):
            data = block.data
        elif isinstance(block, Resource) and block.resource.blob is not None:
            data = block.resource.blob
        elif isinstance(block, File):
            raise Invalid("invalid_content", f"{where}[{place}]: upload the file, and link to its URL")
        else:
            continue
        try:
            binascii.a2b_base64(data, strict_mode=True)
        except ValueError:
            raise Invalid("invalid_content", f"{where}[{place}]: its bytes are not base64") from None


def check_name(name: str | None, where: str) -> None:
    if name and not is_file_name(name):
        raise Invalid("invalid_content", f"{where}: name the file {file_name_of(name)!r}, without a path")


def check_depth(value: Any, where: str) -> None:
    if deeper_than(value, A2A_NESTING_MAX):
        raise Invalid("invalid_content", f"{where}: nested more than {A2A_NESTING_MAX} levels deep")


def check_update(update: Update) -> None:
    """Refuses an update that no door could show: an artifact without an id, or an empty artifact or message."""
    check_blocks(update.parts, "update.parts")
    if update.metadata is not None:
        check_depth(update.metadata, "update.metadata")
    if isinstance(update, ArtifactUpdate) and not 0 < len(update.artifact_id) <= ID_LENGTH_MAX:
        raise Invalid("invalid_update", f"update.artifact_id must have 1 to {ID_LENGTH_MAX} characters")
    if isinstance(update, ArtifactUpdate):
        check_name(update.name, "update.name")
    if isinstance(update, ArtifactUpdate | MessageUpdate) and not update.parts:
        raise Invalid("invalid_update", "update.parts must have a block; an empty text is one")
    if isinstance(update, MessageUpdate) and update.role != "agent":
        raise Invalid("invalid_update", 'update.role must be "agent"')
