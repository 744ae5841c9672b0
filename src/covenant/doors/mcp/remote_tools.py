"""Tools for remote agents: read a card, invoke an agent.

An invocation is a task of this exchange. It outlives its caller, and can be found, watched and canceled like any other.
The trust level of an agent follows from what is known about it:

- `untrusted`: nothing; no card could be read
- `low`: the agent has a card at the given address
- `medium`: the card is also signed, by a key from the same origin
- `high`: the operator has named this address in `a2a_agents.json`
- `verified`: the address is named, and the card is signed

A look-up that fails never raises the trust level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import msgspec

from covenant.doors.mcp.render import ToolAnswer, shortened
from covenant.doors.mcp.tool_arguments import TRUST_LEVELS, InvokeRemoteAgentArguments, Trust
from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.access.tenants import Caller
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.task_lookup import TaskLookup
from covenant.exchange.tasks.builder import build_task
from covenant.exchange.tasks.reader import TaskStream
from covenant.model.agent_card import RemoteCard
from covenant.model.content import Text
from covenant.model.errors import CovenantError, Forbidden, Invalid, NotFound, Refusal
from covenant.model.ids import TaskId
from covenant.model.task import URL_RECIPIENT, DuplicateSafety, Idempotency, Target
from covenant.model.task_view import TaskState, TaskView
from covenant.outbound.call_errors import NoCard, RemoteRefused
from covenant.outbound.remote.remote_registry import RemoteRegistry

ORIGIN: Final = "mcp"
NOT_FOUND: Final = "No A2A Agent Card found"
_CARD_FIELDS: Final = ("name", "version", "description", "url", "streaming", "skills")


class CardOf(Protocol):
    async def __call__(self, url_or_name: str, *, verify: bool) -> RemoteCard:
        """The card of the agent at a URL, or of that name in the registry. `verify`: only if its signature holds."""


class RemoteTools:
    def __init__(
        self,
        exchange: A2AExchange,
        lookup: TaskLookup,
        catalogue: Catalogue,
        *,
        card_of: CardOf,
        registry: RemoteRegistry,
        new_id: Callable[[], str],
    ) -> None:
        self._exchange = exchange
        self._lookup = lookup
        self._catalogue = catalogue
        self._card_of = card_of
        self._registry = registry
        self._new_id = new_id

    async def discover(self, caller: Caller, url: str) -> ToolAnswer:
        self._check_address(caller, url)
        try:
            card = await self._card_of(url, verify=False)
        except NoCard:
            return ToolAnswer(f"{NOT_FOUND} at {url}", {"found": False, "url": url})
        except CovenantError as error:
            raise _refusal_of(error) from error
        return render_card(card)

    async def invoke(self, caller: Caller, arguments: InvokeRemoteAgentArguments) -> TaskStream:
        """Starts the task that calls the agent, and follows it. Refused if the agent's trust is below `min_trust`."""
        url = arguments.agent_url
        self._check_address(caller, url)
        card = await self._trusted(caller, url, arguments.min_trust)
        text = arguments.message
        if arguments.skill is not None:
            _check_skill(card, arguments.skill)
            text = f"Use your skill {arguments.skill}.\n\n{text}"
        tenant, key = caller.tenant.name, arguments.idempotency_key
        sender, recipient = self._catalogue.client(tenant), self._catalogue.identity(tenant, URL_RECIPIENT)
        task_id = TaskId(self._new_id())
        if key is not None:
            task_id = await self._exchange.ids.find(caller, URL_RECIPIENT, key, sender=sender, recipient=recipient)
        task = build_task(
            task_id,
            sender=sender,
            recipient=recipient,
            parts=(Text(text),),
            timeout_ms=max(1, int(arguments.timeout_minutes * 60_000)),
            tenant=tenant,
            origin=ORIGIN,
            target=Target(url=url) if "://" in url else Target(name=url),
            key=Idempotency(DuplicateSafety.UNSAFE, key) if key is not None else None,
        )
        await self._exchange.writer.submit(task, bytes_max=self._exchange.settings.message_bytes_max)
        return await self._lookup.follow(caller, task_id)

    def _check_address(self, caller: Caller, url: str) -> None:
        """Checks a URL or a name. A name must be in `a2a_agents.json`, for the caller's tenant."""
        if url.startswith(("http://", "https://")):
            return
        if "://" in url:
            raise _no_address()
        if caller.operator:
            self._registry.entry(url)
            return
        try:
            self._registry.entry_of(caller.tenant.name, url)
        except NotFound:
            raise _no_address() from None

    async def _trusted(self, caller: Caller, url: str, required: Trust) -> RemoteCard | None:
        """The agent's card; None if no trust is required, so that no card is read."""
        if required == "untrusted":
            return None
        registered = self._is_registered(caller.tenant.name, url)
        card, card_error = None, ""
        try:
            card = await self._card_of(url, verify=False)
        except CovenantError as error:
            card_error = f"; its card could not be read: {error}"
        signed = card is not None and _rank(required) > _rank("low") and await self._signed(url)
        level = trust_of(card=card is not None, signed=signed, registered=registered)
        if _rank(level) < _rank(required):
            raise Forbidden(
                "trust_too_low", f"{url} is {level}, but {required} is required{card_error}; nothing was sent"
            )
        return card

    async def _signed(self, url: str) -> bool:
        try:
            return (await self._card_of(url, verify=True)).signed_by is not None
        except CovenantError:
            return False

    def _is_registered(self, tenant: str, url: str) -> bool:
        if "://" not in url:
            return True
        return any(_same_url(self._registry.entry(name).url, url) for name in self._registry.names_of(tenant))


def trust_of(*, card: bool, signed: bool, registered: bool) -> Trust:
    if not card:
        return "untrusted"
    if registered:
        return "verified" if signed else "high"
    return "medium" if signed else "low"


def _no_address() -> Invalid:
    return Invalid("invalid_arguments", "an agent's address must be an http or https URL")


def _rank(level: Trust) -> int:
    return TRUST_LEVELS.index(level)


def _same_url(url: str, other_url: str) -> bool:
    return url.rstrip("/") == other_url.rstrip("/")


def _check_skill(card: RemoteCard | None, skill: str) -> None:
    if card is not None and skill not in {word for each in card.skills for word in (each.id, each.name)}:
        known = ", ".join(each.id for each in card.skills) or "none"
        raise NotFound("unknown_skill", f"{card.name} has no skill {skill!r}; it has {known}")


def _refusal_of(error: CovenantError) -> Refusal:
    if isinstance(error, Refusal):
        return error
    code = error.code if isinstance(error, RemoteRefused) else getattr(error, "code", "call_failed")
    return Invalid(str(code), str(error))


def render_answer(view: TaskView, answer: ToolAnswer) -> ToolAnswer:
    """The remote agent's answer, or the task's state if it has not completed."""
    if view.state is not TaskState.COMPLETED:
        return answer
    text = answer.data["text"] or "(no text)"
    return answer._replace(text=f"Remote Agent Response (task {view.task.id}):\n{shortened(text)}")


def render_card(card: RemoteCard) -> ToolAnswer:
    data = {name: msgspec.to_builtins(getattr(card, name)) for name in _CARD_FIELDS}
    data |= {"found": True, "interfaces": msgspec.to_builtins(card.interfaces)}
    return ToolAnswer(shortened("\n".join(_card_lines(card))), data)


def _card_lines(card: RemoteCard) -> Iterator[str]:
    fields = card.fields
    capabilities = _object(fields.get("capabilities"))
    provider = _object(fields.get("provider"))
    yield f"Agent: {card.name} v{card.version}"
    if card.description:
        yield f"Description: {card.description}"
    yield f"URL: {card.interfaces[0].url if card.interfaces else card.url}"
    if provider.get("organization"):
        yield f"Provider: {provider['organization']}" + (f" ({provider['url']})" if provider.get("url") else "")
    if fields.get("documentationUrl"):
        yield f"Documentation: {fields['documentationUrl']}"
    yield f"Streaming: {_yes_or_no(card.streaming)}"
    yield f"Push notifications: {_yes_or_no(capabilities.get('pushNotifications'))}"
    schemes = sorted({each.scheme for each in card.credentials})
    yield f"Authentication: {', '.join(schemes) or 'none'}"
    for name, label in (("defaultInputModes", "Input modes"), ("defaultOutputModes", "Output modes")):
        modes = fields.get(name)
        if isinstance(modes, list) and modes:
            yield f"{label}: {', '.join(map(str, modes))}"
    if card.skills:
        yield "Skills:"
    for skill in card.skills:
        tags = f" [{', '.join(skill.tags)}]" if skill.tags else ""
        yield f"- {skill.name}: {skill.description}{tags}"
    if card.interfaces:
        yield f"Protocols: {', '.join(dict.fromkeys(f'{each.binding} {each.version}' for each in card.interfaces))}"


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _yes_or_no(value: Any) -> str:
    return "unknown" if value is None else "yes" if value else "no"
