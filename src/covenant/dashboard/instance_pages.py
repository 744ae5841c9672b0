"""What the pages show of the daemon itself: its settings with their origins, and the daemons on one ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from covenant.dashboard.session_operations import SESSION, role_forbidden
from covenant.dashboard.sessions import Role, UiSession
from covenant.doors.http.endpoint import Endpoint
from covenant.doors.http.responses import MAILBOX, reply
from covenant.doors.operator_api.operation import ApiContext, encode


class SettingShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`value` and `default` as they stand in a file. `origin`: default, file, environment or flag."""

    name: str
    value: str
    default: str
    origin: str
    meaning: str
    secret: bool = False


class ValueEndpoint(Endpoint):
    """Whatever `find` gives, as it is at that moment. For the operator and for viewers."""

    def __init__(self, name: str, api: ApiContext, find: Callable[[], dict[str, Any]]) -> None:
        super().__init__(f"ui_{name}", MAILBOX, api.meter)
        self._name = name
        self._find = find

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  (of every endpoint)
        session: UiSession = scope[SESSION]
        if session.role is Role.TENANT:
            raise role_forbidden(session.role, self._name)
        await reply(send, 200, encode({"kind": self._name, **self._find()}))


def settings_endpoint(api: ApiContext, settings: Sequence[SettingShown]) -> ValueEndpoint:
    return ValueEndpoint("settings", api, lambda: {"settings": settings})
