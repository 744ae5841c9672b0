"""Stored files: `/v1/files`, files in and out over HTTP, in pieces; and the operator's operation on them.

A caller is an identity or a tenant, by its token. An upload is read as fast as it can be stored: neither direction
holds more than a piece of a file. A download needs a token that may see the task, or a signed URL
(`exchange/file_links`). Bytes are always sent as `application/octet-stream`, as an attachment, so a browser never shows
them as a page of ours.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Annotated, Final, NamedTuple

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope

from covenant.doors.http.bearer_auth import TenantAuth, credential_of, principal_of
from covenant.doors.http.endpoint import Endpoint, MethodRouter
from covenant.doors.http.host_names import BaseUrl
from covenant.doors.http.openapi import DescribedRoute
from covenant.doors.http.responses import PROBLEM, names_etag, reply, send_answer
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME, Header, HttpExchange
from covenant.doors.http.server.http_refusals import timed_out
from covenant.doors.metrics import Meter
from covenant.doors.operator_api.operation import (
    AnyApiOperation,
    ApiAnswer,
    ApiOperation,
    Services,
    fill,
    page_limit,
)
from covenant.doors.waits import CallerGoneError
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.exchange.access.tenants import unauthenticated
from covenant.exchange.file_links import FILES, UPLOAD, LinkedFile
from covenant.exchange.stored_files import StoredFiles
from covenant.ledger.contract.blobs import CHUNK_BYTES, is_sha256, no_blob, space_of
from covenant.model.errors import Invalid, Unavailable
from covenant.model.ids import parse_task_id
from covenant.model.tenants import DEFAULT
from covenant.wire.json_input import decode_query
from covenant.wire.mailbox import Request

LIMIT: Final = 50
PAGE_MAX: Final = 200
_PREFIX: Final = re.compile(r"[0-9a-f]{0,64}")
FILE: Final = FILES + "/{space}/{owner}/{sha256}"
SHA256_HEADER: Final = b"x-content-sha256"
_RANGE: Final = re.compile(rb"bytes=(?:([0-9]{1,18})-([0-9]{0,18})|-([0-9]{1,18}))")
_encode = msgspec.json.Encoder().encode


class FileShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    sha256: str
    size: int
    stored_at_ms: int
    references: int
    """How many tasks refer to the file."""
    tasks: tuple[str, ...]
    """The first of these tasks."""
    url: str | None
    """A signed URL. None in a list of `/v1/files` if no task refers to the file."""


class UploadedFile(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`url` names the file in a part of a message, or in a result, until `expires_at_ms`."""

    sha256: str
    size: int
    url: str
    expires_at_ms: int


class FilesShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    files: tuple[FileShown, ...]
    count: int
    bytes: int
    """The total of all files, not of this page."""
    next: str | None
    """The value for `after`, if there may be more."""


class StoredFileList(ApiAnswer, FilesShown, frozen=True, kw_only=True, tag="file_list"):
    """`upload_url`: where this machine uploads a file, by HTTP and with the caller's token."""

    upload_url: str


class FilesQuery(msgspec.Struct, frozen=True, gc=False):
    after: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = LIMIT


DESCRIBED: Final = (
    DescribedRoute(
        "POST",
        FILES,
        "upload_file",
        "Store the bytes of the body as a file; X-Content-SHA256 is compared, if it is given.",
        UploadedFile,
        status=201,
    ),
    DescribedRoute("GET", FILES, "list_files", "The files of the caller, by hash.", FilesShown, query=FilesQuery),
    DescribedRoute(
        "GET",
        FILE,
        "download_file",
        "The bytes of a file of a task, by a signed URL or a token; with Range, some of them.",
        UploadedFile,
        token=False,
        media_type="application/octet-stream",
    ),
)


class FileAccess(NamedTuple):
    """Access checks that the endpoints below share."""

    files: StoredFiles
    auth: TenantAuth
    identity_auth: IdentityAuth
    base_url: BaseUrl

    async def account(self, scope: Scope) -> str:
        """The account whose files the caller stores and lists: its tenant's, or else its own."""
        credential = credential_of(scope)
        return self._tenant(credential) or self.account_of(credential) or (await self.auth.enter(scope)).tenant.name

    def account_of(self, credential: bytes | None) -> str | None:
        """The account of this credential, if it is valid now."""
        caller = self.auth.recognised(credential) if credential is not None else None
        if caller is not None:
            return caller.tenant.name
        principal = principal_of(self.identity_auth, credential)
        return f"@{principal.agent.pubkey}" if principal is not None else None

    async def check(self, scope: Scope, space: str, owner: str) -> None:
        """Refuses a caller that may not read this file, as if the file did not exist."""
        credential = credential_of(scope)
        tenant, principal = self._tenant(credential), principal_of(self.identity_auth, credential)
        if tenant is None and principal is None:
            tenant = (await self.auth.enter(scope)).tenant.name
        if tenant is not None and space_of(tenant) == space:
            return
        if principal is None or owner == UPLOAD:
            raise no_blob("")
        if await self.files.space_for(parse_task_id(owner), principal.viewer) != space:
            raise no_blob("")

    def _tenant(self, credential: bytes | None) -> str | None:
        """The tenant of this credential, with one request of its rate spent."""
        caller = self.auth.recognised(credential) if credential is not None else None
        if caller is None:
            return None
        self.auth.limiter.admit(caller)
        return caller.tenant.name


class UploadEndpoint(Endpoint):
    def __init__(self, access: FileAccess, meter: Meter) -> None:
        super().__init__("upload_file", PROBLEM, meter)
        self._access = access

    async def _answer(self, scope: Scope, exchange: HttpExchange) -> None:
        account = await self._access.account(scope)
        claimed: bytes | None = scope[HEADERS_BY_NAME].get(SHA256_HEADER)
        sha256 = claimed.decode("latin-1").strip().lower() if claimed is not None else None
        if sha256 is not None and not is_sha256(sha256):
            raise Invalid("invalid_hash", "X-Content-SHA256 must have 64 hexadecimal digits")
        files = self._access.files
        upload_s = files.settings.upload_ms_max / 1000
        exchange.extend_body(upload_s)
        try:
            async with asyncio.timeout(upload_s):
                blob = await files.upload(self._body(scope, exchange.receive, account), account, sha256=sha256)
        except TimeoutError:
            raise timed_out(f"the upload, within {upload_s:g} s (blobs.upload_ms_max),") from None
        linked = LinkedFile(space_of(account), UPLOAD, blob.sha256, blob.size, files.links.expires_ms)
        answer = UploadedFile(
            sha256=blob.sha256,
            size=blob.size,
            url=files.links.make(self._access.base_url.of(scope), linked),
            expires_at_ms=linked.expires_ms,
        )
        reply(exchange, 201, _encode(answer))

    async def _body(self, scope: Scope, receive: Receive, account: str) -> AsyncIterator[bytes]:
        """The body, in pieces large enough for a write. If the token has ended meanwhile, the upload is refused."""
        gathered, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise CallerGoneError
            data: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            if not more and self._access.account_of(credential_of(scope)) != account:
                raise unauthenticated()
            gathered.append(data)
            size += len(data)
            if size >= CHUNK_BYTES or not more:
                yield b"".join(gathered)
                gathered, size = [], 0


class ListEndpoint(Endpoint):
    def __init__(self, access: FileAccess, meter: Meter) -> None:
        super().__init__("list_files", PROBLEM, meter)
        self._access = access

    async def _answer(self, scope: Scope, exchange: HttpExchange) -> None:
        query = decode_query(FilesQuery, scope["query_string"])
        account, files = await self._access.account(scope), self._access.files
        found, usage = await files.listing(account, query.after, query.limit), await files.usage(account)
        base, space, expires_ms = self._access.base_url.of(scope), space_of(account), files.links.expires_ms
        shown = []
        for each in found:
            linked = LinkedFile(space, each.tasks[0] if each.tasks else "", each.sha256, each.size, expires_ms)
            url = files.links.make(base, linked) if each.tasks else None
            shown.append(fill(FileShown, each, url=url))
        after = shown[-1].sha256 if len(shown) == query.limit else None
        answer = FilesShown(files=tuple(shown), count=usage.files, bytes=usage.bytes, next=after)
        reply(exchange, 200, _encode(answer))


class DownloadEndpoint(Endpoint):
    _streams = True

    def __init__(self, access: FileAccess, meter: Meter) -> None:
        super().__init__("download_file", PROBLEM, meter)
        self._access = access

    async def _answer(self, scope: Scope, exchange: HttpExchange) -> None:
        space, owner, sha256 = (scope["path_params"][name] for name in ("space", "owner", "sha256"))
        files, headers = self._access.files, scope[HEADERS_BY_NAME]
        linked = files.links.match(scope["path"], scope["query_string"].decode("latin-1"))
        if linked is None:
            await self._access.check(scope, space, owner)
        size = await files.size(space, sha256, owner)
        if linked is not None and size != linked.size:
            raise no_blob(sha256)
        etag = f'"{sha256}"'.encode()
        # The bytes of a hash never change.
        if names_etag(headers.get(b"if-none-match", b""), etag):
            await send_answer(exchange, 304, _head(etag))
            return
        start, stop, status = 0, size, 200
        if (requested := headers.get(b"range")) is not None and headers.get(b"if-range", etag) == etag:
            start, stop, status = _parse_range(requested, size)
        if status == 416:
            await send_answer(exchange, 416, [*_head(etag, 0), (b"content-range", f"bytes */{size}".encode())])
            return
        head = _head(etag, stop - start)
        if status == 206:
            head.append((b"content-range", f"bytes {start}-{stop - 1}/{size}".encode()))
        if scope["method"] == "HEAD" or start == stop:
            await send_answer(exchange, status, head)
            return
        whole = stop - start == size
        pieces = files.read_whole(space, sha256, size) if whole else files.read(space, sha256, start, stop)
        begin = {"type": "http.response.start", "status": status, "headers": head}
        await _stream(exchange, pieces, stop - start, begin)


async def _stream(exchange: HttpExchange, pieces: AsyncIterator[bytes], remaining: int, start: Message) -> None:
    begun = False
    async for piece in pieces:
        if not begun:  # after the first read, so that missing or damaged bytes can still be refused
            await exchange(start)
            begun = True
        if exchange.disconnected:
            raise CallerGoneError
        remaining -= len(piece)
        await exchange({"type": "http.response.body", "body": piece, "more_body": remaining > 0})


def _head(etag: bytes, length: int | None = None) -> list[Header]:
    return [
        (b"content-type", b"application/octet-stream"),
        *([(b"content-length", str(length).encode())] if length is not None else []),
        (b"content-disposition", b"attachment"),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"private, no-store"),
        (b"accept-ranges", b"bytes"),
        (b"etag", etag),
    ]


def _parse_range(header: bytes, size: int) -> tuple[int, int, int]:
    """The first byte, the end, and the status. Anything but one range of bytes is answered with the whole file."""
    found = _RANGE.fullmatch(header.strip())
    if found is None:
        return 0, size, 200
    first, last, suffix = found.groups()
    if suffix is not None:
        start, stop = max(0, size - int(suffix)), size
    else:
        start, stop = int(first), min(size, int(last) + 1) if last else size
    return (start, stop, 206) if start < stop else (0, 0, 416)


def file_routes(access: FileAccess, meter: Meter) -> list[BaseRoute]:
    upload, download = UploadEndpoint(access, meter), DownloadEndpoint(access, meter)
    collection = MethodRouter({"POST": upload, "PUT": upload, "GET": ListEndpoint(access, meter)}, PROBLEM)
    one_file = MethodRouter({"GET": download, "HEAD": download}, PROBLEM)
    return [Route(FILES, collection, name=FILES), Route(FILE, one_file, name=FILE)]


class ListStoredFilesRequest(Request, frozen=True, kw_only=True):
    """`tenant`: whose files, for the operator alone; without it, the caller's own. `sha256`: how their hashes begin."""

    tenant: str | None = None
    sha256: str = ""
    after: str = ""
    limit: int | None = None


async def list_stored_files(services: Services, caller: Principal, request: ListStoredFilesRequest) -> StoredFileList:
    files, begins = services.files, request.sha256.lower()
    if files is None:
        raise Unavailable("no_files", "this daemon has no blob store: bytes stay in the ledger")
    if not (_PREFIX.fullmatch(begins) and _PREFIX.fullmatch(request.after)):
        raise Invalid("invalid_hash", "a SHA-256 begins with at most 64 digits out of 0-9 and a-f")
    limit = page_limit(request.limit, LIMIT, PAGE_MAX)
    account = await _account(services, caller, request.tenant)
    # A prefix sorts before every hash that begins with it, but a whole hash does not sort before itself.
    found = await files.listing(account, max(request.after, begins[:-1] if len(begins) == 64 else begins), limit)
    space, expires_ms = space_of(account), files.links.expires_ms
    shown = []
    for each in found:
        if each.sha256.startswith(begins):
            linked = LinkedFile(space, UPLOAD, each.sha256, each.size, expires_ms)
            shown.append(fill(FileShown, each, url=files.links.make(services.http_url, linked)))
    usage = await files.usage(account)
    return StoredFileList(
        files=tuple(shown),
        count=usage.files,
        bytes=usage.bytes,
        next=shown[-1].sha256 if len(shown) == limit else None,
        upload_url=services.http_url + FILES,
    )


async def _account(services: Services, caller: Principal, tenant: str | None) -> str:
    if tenant is None and not caller.operator:
        return f"@{caller.agent.pubkey}"
    return (await services.tenancy.acting(caller, tenant or DEFAULT)).tenant.name


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("GET", "/v1/admin/files", list_stored_files, "The files of a tenant, or of the caller, by hash"),
)
