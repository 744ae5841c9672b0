"""Downloads a task's file: checks that the session may see the task, then redirects to the file's signed URL."""

from __future__ import annotations

import msgspec
from starlette.types import Scope

from covenant.dashboard.page_endpoint import redirect
from covenant.dashboard.session_operations import SESSION
from covenant.dashboard.sessions import Role, UiSession
from covenant.doors.http.endpoint import Endpoint
from covenant.doors.http.responses import MAILBOX
from covenant.doors.http.server.http_exchange import HttpExchange
from covenant.doors.operator_api.operation import ApiContext
from covenant.exchange.file_links import LinkedFile
from covenant.ledger.contract.blobs import no_blob, space_of
from covenant.model.ids import parse_task_id
from covenant.wire.json_input import decode_query


class _DownloadRequest(msgspec.Struct, frozen=True, gc=False):
    task_id: str
    sha256: str


class FileDownload(Endpoint):
    """A tenant's session sees the tenant's own files; the operator and viewers see all files."""

    def __init__(self, api: ApiContext) -> None:
        super().__init__("ui_file", MAILBOX, api.meter)
        self._stored = api.services.files

    async def _answer(self, scope: Scope, exchange: HttpExchange) -> None:
        session: UiSession = scope[SESSION]
        request = decode_query(_DownloadRequest, scope["query_string"])
        task_id, stored = parse_task_id(request.task_id), self._stored
        if stored is None:
            raise no_blob(request.sha256)
        space = await stored.space_for(task_id, None)
        if session.role is Role.TENANT and space != space_of(session.tenant or ""):
            raise no_blob(request.sha256)
        size = await stored.size(space, request.sha256, task_id)
        linked = LinkedFile(space, task_id, request.sha256, size, stored.links.expires_ms)
        await redirect(exchange, stored.links.make("", linked))
