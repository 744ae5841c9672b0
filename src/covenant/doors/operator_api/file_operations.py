"""The operator's view of stored files, and where their bytes are had: over HTTP, by a signed URL."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from covenant.doors.operator_api.operation import (
    AnyApiOperation,
    ApiAnswer,
    ApiOperation,
    Services,
    fill,
    page_limit,
)
from covenant.exchange.access.principals import Principal
from covenant.exchange.file_links import FILES, UPLOAD, LinkedFile
from covenant.ledger.contract.blobs import space_of
from covenant.model.errors import Invalid, Unavailable
from covenant.model.tenants import DEFAULT
from covenant.wire.mailbox import Request

LIMIT: Final = 50
PAGE_MAX: Final = 200
_PREFIX: Final = re.compile(r"[0-9a-f]{0,64}")


class FileShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    sha256: str
    size: int
    stored_at_ms: int
    references: int
    """How many tasks refer to it."""
    tasks: tuple[str, ...]
    """The first of them."""
    url: str | None
    """Signed. None in a list of `/v1/files`: no task refers to it."""


class ListStoredFilesRequest(Request, frozen=True, kw_only=True):
    """`tenant`: whose files, for the operator alone; without it, the caller's own. `sha256`: how their hashes begin."""

    tenant: str | None = None
    sha256: str = ""
    after: str = ""
    limit: int | None = None


class StoredFileList(ApiAnswer, frozen=True, kw_only=True, tag="file_list"):
    """`count` and `bytes` are of all files, on whichever page; `next` is for `after`, if there may be more.

    `upload_url`: where this machine uploads a file, by HTTP and with the caller's token.
    """

    files: tuple[FileShown, ...]
    count: int
    bytes: int
    next: str | None
    upload_url: str


async def list_stored_files(services: Services, caller: Principal, request: ListStoredFilesRequest) -> StoredFileList:
    files, begins = services.files, request.sha256.lower()
    if files is None:
        raise Unavailable("no_files", "this daemon has no blob store: bytes stay in the ledger")
    if not (_PREFIX.fullmatch(begins) and _PREFIX.fullmatch(request.after)):
        raise Invalid("invalid_hash", "a SHA-256 begins with at most 64 digits out of 0-9 and a-f")
    limit = page_limit(request.limit, LIMIT, PAGE_MAX)
    account = await _account(services, caller, request.tenant)
    # A beginning sorts before every hash that has it; a whole hash does not sort before itself.
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
