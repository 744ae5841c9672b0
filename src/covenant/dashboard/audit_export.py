"""The audit as a download: one JSON object a line, each the exact text of its row, newest first."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.types import Scope

from covenant.dashboard.session_operations import SESSION, role_forbidden
from covenant.dashboard.sessions import Role, Sessions, UiSession
from covenant.doors.http.endpoint import Endpoint
from covenant.doors.http.responses import MAILBOX, NO_STORE
from covenant.doors.http.server.http_exchange import HttpExchange
from covenant.doors.operator_api.operation import ApiContext
from covenant.doors.waits import while_connected
from covenant.exchange.audit_search import LIMIT_MAX, AuditFilter, find_audit
from covenant.ledger.contract.identities import LAST
from covenant.model.errors import OverLimit
from covenant.wire.json_input import decode_query

ROWS_MAX: Final = 1_000_000
AT_ONCE_MAX: Final = 2
_HEADERS: Final = [
    (b"content-type", b"application/x-ndjson"),
    (b"content-disposition", b'attachment; filename="audit.jsonl"'),
    NO_STORE,
]


class AuditExport(Endpoint):
    """Open to the operator and to viewers. A page of rows is read after the browser has taken the last one."""

    _streams = True

    def __init__(self, api: ApiContext, sessions: Sessions) -> None:
        super().__init__("ui_audit_export", MAILBOX, api.meter)
        self._ledger = api.services.ledger
        self._sessions = sessions
        self._running = 0

    async def _answer(self, scope: Scope, exchange: HttpExchange) -> None:
        session: UiSession = scope[SESSION]
        if session.role is Role.TENANT:
            raise role_forbidden(session.role, "audit export")
        filters = decode_query(AuditFilter, scope["query_string"])
        if self._running >= AT_ONCE_MAX:
            raise OverLimit("too_many_exports", "too many exports run already; try later", retry_after_ms=5_000)
        self._running += 1
        try:
            with while_connected(exchange):
                await self._write(session, filters, exchange)
        finally:
            self._running -= 1

    async def _write(self, session: UiSession, filters: AuditFilter, exchange: HttpExchange) -> None:
        sees_all = msgspec.structs.replace(session.principal, operator=True)
        below, written, begun = LAST, 0, False
        while True:
            page = await find_audit(self._ledger, sees_all, filters, LIMIT_MAX, below)
            self._sessions.check(session)
            lines = b"".join(record.row.encode() + b"\n" for record in reversed(page.records))
            written += len(page.records)
            over = page.next is None or written >= ROWS_MAX
            if not begun:
                begun = True
                await exchange({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await exchange({"type": "http.response.body", "body": lines, "more_body": not over})
            if page.next is None or over:
                return
            below = page.next
