"""Push configurations: for a tenant's caller at one agent; and the outbox of all of them, for the operator.

A configuration belongs to its task and is scoped to the tenant and the agent with it. When it is made, only its text is
checked. Its address is checked when it is called: a check here would tell strangers which internal names exist.

Its token and credentials are shown to callers that may read the task, and to nobody else, the operator included.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from covenant.exchange.a2a_service import A2ARequest
from covenant.exchange.access.principals import Principal, require_operator
from covenant.exchange.tasks.reader import parse_known_id
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import TaskScope
from covenant.ledger.machine.commands import DropPush, PutPush, RetryPush
from covenant.ledger.machine.decisions.context import unknown_task
from covenant.ledger.machine.decisions.push import unknown_push
from covenant.model.a2a_requests import CreatePush, DeletePush, GetPush, ListPush, PushConfig, PushPage
from covenant.model.errors import InvalidParams
from covenant.model.ids import TaskId
from covenant.model.push import Push

TOKEN_LENGTH_MAX: Final = 4_096
CREDENTIALS_LENGTH_MAX: Final = 16_384

CheckUrl = Callable[[str], object]
"""Raises ValueError with what is wrong with the text of a URL."""

# Ids appear in paths and in headers, secrets in headers.
_ID: Final = re.compile(r"[A-Za-z0-9._~:@=+,-]{1,256}")
_SCHEME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")


def check_config(config: PushConfig, check_url: CheckUrl) -> None:
    try:
        check_url(config.url)
    except ValueError as error:
        raise _invalid("url", str(error)) from None
    if config.id is not None and not _ID.fullmatch(config.id):
        raise _invalid("id", "1 to 256 letters, digits and -._~:@=+,")
    token = config.token
    if token is not None and (len(token) > TOKEN_LENGTH_MAX or not _VALUE.fullmatch(token)):
        raise _invalid("token", f"1 to {TOKEN_LENGTH_MAX} characters that a header can have")
    known = config.authentication
    if known is None:
        return
    if not _SCHEME.fullmatch(known.scheme):
        raise _invalid("authentication.scheme", "the name of a scheme of HTTP authentication, such as Bearer")
    if known.credentials is not None:
        raw = known.scheme.lower() == "basic" and ":" in known.credentials  # sent in base64
        if len(known.credentials) > CREDENTIALS_LENGTH_MAX or not (raw or _VALUE.fullmatch(known.credentials)):
            words = f"1 to {CREDENTIALS_LENGTH_MAX} characters that a header can have"
            raise _invalid("authentication.credentials", words)


def _invalid(field: str, description: str) -> InvalidParams:
    return InvalidParams(f"pushNotificationConfig.{field}", description)


class PushConfigs:
    """`scope` returns the tasks that a caller may see. `check` refuses an invalid configuration."""

    def __init__(
        self,
        ledger: Ledger,
        scope: Callable[[A2ARequest], TaskScope],
        check: Callable[[PushConfig], None],
    ) -> None:
        self._ledger = ledger
        self._scope = scope
        self._check = check

    async def run(self, call: A2ARequest, request: Any) -> PushConfig | PushPage | None:
        """Creates, gets, lists or deletes, by the kind of the request."""
        task_id, scope = parse_known_id(request.task_id), self._scope(call)
        recipient, viewer = scope.recipient, scope.sender
        match request:
            case CreatePush():
                self._check(request.config)
                put = PutPush(task_id=task_id, viewer=viewer, recipient=recipient, config=request.config)
                return (await self._ledger.commit(put)).config
            case DeletePush():
                drop = DropPush(task_id=task_id, viewer=viewer, recipient=recipient, id=request.id)
                await self._ledger.commit(drop)
                return None
            case GetPush():
                found = await self._of_task(task_id, scope)
                if request.id is not None:
                    found = [push for push in found if push.id == request.id]
                if not found:
                    raise unknown_push(request.id or "")
                return found[0].config
            case ListPush():
                return _page(await self._of_task(task_id, scope), request)
            case _:
                raise AssertionError(f"not a request about push: {type(request)}")

    async def _of_task(self, task_id: TaskId, scope: TaskScope) -> Sequence[Push]:
        """The task's configurations. Refuses a task that does not exist or is not the caller's."""
        parties = await self._ledger.parties(task_id)
        if (
            parties is None
            or parties.recipient.pubkey != scope.recipient
            or scope.sender not in (None, parties.sender.pubkey)
        ):
            raise unknown_task(task_id)
        return await self._ledger.pushes(task_id)


def _page(found: Sequence[Push], request: ListPush) -> PushPage:
    """The page after the one that ended with the token; from the beginning if that configuration is gone."""
    ids = [push.id for push in found]
    first = ids.index(request.page_token) + 1 if request.page_token in ids else 0
    page = found[first : first + max(1, request.page_size)]
    more = first + len(page) < len(found)
    return PushPage(configs=tuple(push.config for push in page), next_page_token=page[-1].id if more else "")


async def outbox(
    ledger: Ledger, principal: Principal, *, dead: bool = False, task_id: TaskId | None = None
) -> Sequence[Push]:
    """All configurations: first those given up, longest ago first; then failing ones; then the others, oldest first."""
    await require_operator(ledger, principal, "listing push configurations")
    known = await ledger.outbox() if task_id is None else await ledger.pushes(task_id)
    found = [push for push in known if push.dead_at_ms is not None or not dead]
    return sorted(found, key=_urgency)


def _urgency(push: Push) -> tuple[int, int]:
    if push.dead_at_ms is not None:
        return 0, push.dead_at_ms
    return (1, -push.attempts) if push.attempts else (2, push.made_at_ms)


async def retry(ledger: Ledger, principal: Principal, task_id: TaskId, push_id: str) -> Push:
    await require_operator(ledger, principal, "retrying a push configuration")
    return await ledger.commit(RetryPush(task_id=task_id, by=principal.agent, id=push_id))
