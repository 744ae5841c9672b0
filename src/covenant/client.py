"""A client of a daemon's mailbox over HTTP.

    async with Client("http://127.0.0.1:8421", token) as client:
        await client.send(Task(...))
        result = await client.result(task_id, wait_ms=30_000)

A call that failed in transit can be repeated: the daemon recognises tasks by their id, receives and drains by a request
id, results by their lease, and updates by their number. A refusal is raised with its machine code.

A receive or drain that is cancelled, or fails in transit, is withdrawn: tasks and results that the daemon gave it go
back. One with your own `request_id` is not withdrawn: repeat it under the same id, or call `withdraw`.
"""

from __future__ import annotations

import asyncio
import mimetypes
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack
from urllib.parse import urlsplit

import msgspec

from covenant.exchange.argument_checks import checks_arguments, checks_methods
from covenant.exchange.file_source import FileSource, pieces_of
from covenant.exchange.task_search import find_request
from covenant.ledger.contract.task_query import FoundPage
from covenant.ledger.contract.tasks import TaskDetail, TreeNode
from covenant.model.content import Content, File, ResourceLink
from covenant.model.errors import REFUSALS, OverLimit, Refusal, Unavailable
from covenant.model.ids import LeaseId, TaskId
from covenant.model.rate_limits import Backoff
from covenant.model.task import Result, Task
from covenant.model.task_event import MessageUpdate, Update
from covenant.wire.a2a.parts_v1 import unlinked
from covenant.wire.mailbox import FindFilters

if TYPE_CHECKING:
    import httpx2

A = TypeVar("A")

CALL_S: Final = 30.0
UPLOAD_S: Final = 3_600.0
WITHDRAW_S: Final = 5.0
"""The time limit for a cancelled call to give back its tasks or results."""
RETRY_PAUSES: Final = Backoff(0.2, 5.0)
RETRY_S_MAX: Final = 24 * 3_600.0
"""How long a call that fails in transit is repeated."""
LASTING_LIMITS: Final = frozenset({"files_full"})
"""Refusals that waiting does not change: somebody must remove files."""

_BY_STATUS: Final = {kind.status: kind for kind in REFUSALS}


class _Error(msgspec.Struct, frozen=True):
    code: str = "unknown"
    message: str = ""
    error: str = ""
    """The message, in the other error format of the operator's API."""
    retry_after_ms: int | None = None


class TakenLease(msgspec.Struct, frozen=True):
    lease_id: LeaseId
    attempt: int


class Taken(msgspec.Struct, frozen=True):
    """A task under your lease. `messages`: the new messages of a later turn; the first turn has the task's own text."""

    task: Task
    lease: TakenLease
    turn: int = 1
    messages: tuple[MessageUpdate, ...] = ()


class _Tasks(msgspec.Struct, frozen=True):
    tasks: tuple[Taken, ...]


class _Results(msgspec.Struct, frozen=True):
    results: tuple[Result, ...]


class _Uploaded(msgspec.Struct, frozen=True):
    url: str
    size: int


class _Tree(msgspec.Struct, frozen=True):
    tree: TreeNode


class Sent(msgspec.Struct, frozen=True):
    task_id: TaskId
    duplicate: bool = False
    replayed: bool = False
    following: TaskId | None = None


class Posted(msgspec.Struct, frozen=True):
    """`goes_on`: messages arrived meanwhile, and the task is queued for its next turn."""

    task_id: TaskId
    duplicate: bool = False
    goes_on: bool = False


@checks_methods
class Client:
    """The mailbox as the holder of the token sees it."""

    @checks_arguments
    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        self._http: httpx2.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        import httpx2  # noqa: PLC0415  (heavy, and not needed to import this module)

        # No proxy from the environment: only the daemon may see the token.
        self._http = httpx2.AsyncClient(base_url=self._url, headers=self._headers, trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def send(self, task: Task) -> Sent:
        return await self._post("/a2a/tasks", task, Sent)

    async def send_to(
        self, agent: str, text: str, *, task_id: TaskId, parent: TaskId | None = None, parts: tuple[Content, ...] = ()
    ) -> Sent:
        """Sends a task to an identity or an agent by name (`name@host`), as a child of a task that you work on."""
        body = {"id": task_id, "recipient": {"display": agent}, "intent_text": text, "parent": parent, "parts": parts}
        return await self._post("/a2a/tasks", body, Sent)

    async def take(self, count: int = 1, *, wait_ms: int = 0, request_id: str | None = None) -> tuple[Taken, ...]:
        """Leases the next tasks that are addressed to you."""
        query = {"max": count, "wait_ms": wait_ms}
        return (await self._receive("/a2a/tasks/next", query, _Tasks, request_id)).tasks

    async def withdraw(self, request_id: str) -> None:
        """Withdraws a receive or drain of yours: its tasks or results go back, and it gets none later."""
        await self._post("/a2a/withdraw", {"request_id": request_id}, None)

    async def renew(self, task_id: TaskId, lease_id: LeaseId) -> None:
        await self._post(f"/a2a/tasks/{task_id}/renew", {"lease_id": lease_id}, None)

    async def release(self, task_id: TaskId, lease_id: LeaseId, reason: str) -> None:
        await self._post(f"/a2a/tasks/{task_id}/release", {"lease_id": lease_id, "reason": reason}, None)

    async def update(self, task_id: TaskId, lease_id: LeaseId, update: Update, update_no: int) -> None:
        body = {"lease_id": lease_id, "update": update, "update_no": update_no}
        await self._post(f"/a2a/tasks/{task_id}/updates", body, None)

    async def settle(
        self,
        result: Result,
        lease_id: LeaseId,
        *,
        rejected: bool = False,
        usage: Mapping[str, float] | None = None,
    ) -> Posted:
        """`rejected`: the task ends as rejected, and the result's error says why. `usage`: amounts such as tokens."""
        body = {**msgspec.to_builtins(result), "lease_id": lease_id, "rejected": rejected, "usage": usage or None}
        return await self._post("/a2a/results", body, Posted)

    async def upload_file(self, name: str, source: FileSource, *, media_type: str | None = None) -> ResourceLink:
        """Stores a file of any size, from its bytes, its path or its pieces. Put the link into a task's or result's
        part.

        Use the link before it expires (`blobs.link_ms`). A task or result that was accepted with it keeps the file.
        """
        headers = {"content-type": "application/octet-stream"}
        answer = await self._opened().post("/v1/files", content=pieces_of(source), headers=headers, timeout=UPLOAD_S)
        if answer.status_code != 201:
            raise refusal_of(answer.status_code, answer.content)
        stored = msgspec.json.decode(answer.content, type=_Uploaded)
        kind = media_type or mimetypes.guess_type(name)[0] or "application/octet-stream"
        return ResourceLink(stored.url, name, kind, size=stored.size)

    async def download_file(self, file: File | ResourceLink) -> AsyncIterator[bytes]:
        """Yields the bytes of a file of a task that you may see, in pieces."""
        path = urlsplit(unlinked(file) if isinstance(file, File) else file.uri)
        request = self._opened().stream("GET", f"{path.path}?{path.query}", timeout=CALL_S)
        async with request as answer:
            if answer.status_code != 200:
                raise refusal_of(answer.status_code, await answer.aread())
            async for piece in answer.aiter_bytes():
                yield piece

    async def cancel(self, task_id: TaskId, reason: str) -> None:
        await self._post(f"/a2a/tasks/{task_id}/cancel", {"reason": reason}, None)

    async def find(self, **filters: Unpack[FindFilters]) -> FoundPage:
        """A page of live and finished tasks that you sent or that are addressed to you; the operator sees all tasks."""
        request = msgspec.structs.asdict(find_request(filters))
        filled = {name: value for name, value in request.items() if value is not None}
        query = {name: str(value).lower() if isinstance(value, bool) else value for name, value in filled.items()}
        return self._read(await self._opened().get("/a2a/tasks", params=query, timeout=CALL_S), FoundPage)

    async def show(self, task_id: TaskId) -> TaskDetail:
        """A task with its leases, updates and result."""
        return self._read(await self._opened().get(f"/a2a/tasks/{task_id}/show", timeout=CALL_S), TaskDetail)

    async def tree(self, root: TaskId) -> TreeNode:
        """A task with its children, their children, and so on."""
        return self._read(await self._opened().get(f"/a2a/tasks/{root}/tree", timeout=CALL_S), _Tree).tree

    async def results(self, count: int = 1, *, wait_ms: int = 0, request_id: str | None = None) -> tuple[Result, ...]:
        """Drains the next results of tasks that you sent."""
        query = {"max": count, "wait_ms": wait_ms}
        return (await self._receive("/a2a/results/next", query, _Results, request_id)).results

    async def result(self, task_id: TaskId, *, wait_ms: int = 0, request_id: str | None = None) -> Result | None:
        """Drains the result of one task; None if it does not come in time."""
        query = {"task_id": task_id, "wait_ms": wait_ms}
        found = (await self._receive("/a2a/results/next", query, _Results, request_id)).results
        return found[0] if found else None

    async def _receive(self, path: str, query: Mapping[str, Any], answer: type[A], request_id: str | None) -> A:
        """Receives under a request id, by which the daemon knows what a call whose answer was lost has got."""
        import httpx2  # noqa: PLC0415  (as above)

        params = {**query, "request_id": request_id or str(uuid.uuid4())}
        timeout_s = CALL_S + query["wait_ms"] / 1000
        try:
            return self._read(await self._opened().get(path, params=params, timeout=timeout_s), answer)
        except (asyncio.CancelledError, httpx2.TransportError):
            if request_id is None:
                await finish_despite_cancel(self.abandon(params["request_id"]))
            raise

    async def abandon(self, request_id: str) -> None:
        """Withdraws a request within a few seconds; gives up silently if the daemon cannot be reached."""
        import httpx2  # noqa: PLC0415  (as above)

        # An unreachable daemon keeps the lease, and an operator sees it.
        with suppress(httpx2.TransportError, Refusal, TimeoutError):
            async with asyncio.timeout(WITHDRAW_S):
                await retry(lambda: self.withdraw(request_id))

    async def _post(self, path: str, body: Any, answer: type[A] | None) -> A:
        response = await self._opened().post(path, content=msgspec.json.encode(body), timeout=CALL_S)
        return self._read(response, answer)

    def _opened(self) -> httpx2.AsyncClient:
        if self._http is None:
            raise RuntimeError("use the client as a context: async with Client(…) as client")
        return self._http

    def _read(self, response: httpx2.Response, answer: type[A] | None) -> A:
        if response.status_code != 200:
            raise refusal_of(response.status_code, response.content)
        read: Any = msgspec.json.decode(response.content, type=answer or Any)
        return read  # type: ignore[no-any-return]


def refusal_of(status: int, body: bytes) -> Refusal:
    try:
        error = msgspec.json.decode(body, type=_Error)
    except msgspec.DecodeError:
        error = _Error(message=f"HTTP {status}")
    kind = _BY_STATUS.get(status, Unavailable)
    return kind(error.code, error.message or error.error, retry_after_ms=error.retry_after_ms)


async def finish_despite_cancel(work: Coroutine[Any, Any, None]) -> None:
    """Runs bounded work to its end despite cancellation. Leases depend on this work."""
    task = asyncio.create_task(work)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


async def retry(call: Callable[[], Awaitable[A]]) -> A:
    """Repeats a call that failed in transit or was refused for the moment. The call must be safe to repeat."""
    import httpx2  # noqa: PLC0415  (as above)

    loop, failures = asyncio.get_running_loop(), 0
    give_up_s = loop.time() + RETRY_S_MAX
    while True:
        try:
            return await call()
        except (httpx2.TransportError, OverLimit, Unavailable) as failure:
            if loop.time() > give_up_s or (isinstance(failure, Refusal) and failure.code in LASTING_LIMITS):
                raise
            failures += 1
            wait_ms = failure.retry_after_ms if isinstance(failure, Refusal) else None
            await asyncio.sleep(wait_ms / 1000 if wait_ms is not None else RETRY_PAUSES.pause(failures))
