"""Clients of the doors besides JSON-RPC: REST, gRPC, the simple door, and a webhook that is told of each step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import uuid4

import grpc  # type: ignore[import-untyped]
import httpx2
from a2a.types import a2a_pb2 as pb
from a2a.types.a2a_pb2_grpc import A2AServiceStub

from tests.cluster.clients import AGENT, CALL_S, ENDED, Clients, message
from tests.cluster.history import ACKNOWLEDGED, REFUSED
from tests.outbound.http_servers import Request, Served, http_server, reply

UNKNOWN_TO_GRPC: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class OtherDoors:
    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self.told: dict[str, list[tuple[str, str]]] = {}
        """By task: the id and the state of each word that its webhook was told, in the order of arrival."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[list[Callable[[httpx2.AsyncClient], Awaitable[bool]]]]:
        """Each of them once; repeated by who has opened this."""
        async with http_server(self._hear) as hook:

            async def push(http: httpx2.AsyncClient) -> bool:
                return await self.push(http, hook)

            yield [self.rest, self.simple, self.grpc, push]

    async def rest(self, http: httpx2.AsyncClient) -> bool:
        clients = self._clients
        with clients.history.operation("REST send", clients.node(), str(uuid4())) as operation:
            body = {"message": message(operation.about)}
            if not await clients.ask(http, operation, "POST", f"{AGENT}/message:send", body=body):
                return operation.outcome == REFUSED
        task_id = operation.answer["task"]["id"]
        with clients.history.operation("REST get", clients.node(), task_id) as operation:
            if not await clients.ask(http, operation, "GET", f"{AGENT}/tasks/{task_id}") and "NOT_FOUND" in json.dumps(
                operation.answer
            ):
                clients.history.violated("what was acknowledged is there", f"{task_id} at {operation.node}, by REST")
        return True

    async def simple(self, http: httpx2.AsyncClient) -> bool:
        clients = self._clients
        with clients.history.operation("simple send", clients.node(), str(uuid4())) as operation:
            body = {"message": operation.about}
            return await clients.ask(http, operation, "POST", "/a2a/tasks/send", body=body)

    async def grpc(self, _: httpx2.AsyncClient) -> bool:
        clients = self._clients
        with clients.history.operation("gRPC send", clients.node(), str(uuid4())) as operation:
            address = f"127.0.0.1:{clients.deployment.grpc_ports[operation.node]}"
            said = pb.Message(message_id=str(uuid4()), role=pb.ROLE_USER, parts=[pb.Part(text=operation.about)])
            request = pb.SendMessageRequest(tenant="worker", message=said)
            metadata = [("authorization", f"Bearer {clients.token}"), ("a2a-version", "1.0")]
            try:
                async with grpc.aio.insecure_channel(address) as channel:
                    stub = A2AServiceStub(channel)  # type: ignore[no-untyped-call]
                    answer = await stub.SendMessage(request, metadata=metadata, timeout=CALL_S)
            except grpc.aio.AioRpcError as error:
                operation.answer = {"error": f"{error.code()} {error.details()}"}
                if error.code() is grpc.StatusCode.INTERNAL:
                    clients.history.violated("no internal error", str(operation.answer))
                elif error.code() not in UNKNOWN_TO_GRPC:
                    operation.outcome = REFUSED
                return False
            operation.outcome = ACKNOWLEDGED
            operation.answer = {"task": {"id": answer.task.id}}
        return True

    async def push(self, http: httpx2.AsyncClient, hook: Served) -> bool:
        """A task whose steps a webhook is told of."""
        clients = self._clients
        with clients.history.operation("push", clients.node(), str(uuid4())) as operation:
            configuration = {"taskPushNotificationConfig": {"url": f"http://{hook.host}:{hook.port}/hook", "id": "p"}}
            body = {"message": message(operation.about), "configuration": configuration}
            return await clients.ask(http, operation, "POST", f"{AGENT}/message:send", body=body)

    async def _hear(self, request: Request, writer: asyncio.StreamWriter) -> None:
        told: dict[str, Any] = json.loads(request.body)
        what = told.get("task") or told.get("statusUpdate") or told.get("artifactUpdate") or told
        task_id = what.get("taskId") or what.get("id") or ""
        state = (what.get("status") or {}).get("state", "")
        self.told.setdefault(task_id, []).append((request.headers.get("webhook-id", ""), state))
        writer.write(reply(200))
        await writer.drain()

    async def all_told(self) -> None:
        """Every task whose webhook was acknowledged has told it of its end, and of nothing after it but once more."""
        history = self._clients.history
        for operation in history.of("push"):
            task_id = operation.answer["task"]["id"]
            if operation.answer["task"]["status"]["state"] not in ENDED:
                continue
            for _ in range(300):
                if any(state in ENDED for _, state in self.told.get(task_id, ())):
                    break
                await asyncio.sleep(0.1)
            else:
                history.violated("a webhook is told of the end", f"{task_id}: {self.told.get(task_id)}")
                continue
            ids = list(dict.fromkeys(webhook_id for webhook_id, _ in self.told[task_id]))
            last = {webhook_id for webhook_id, state in self.told[task_id] if state in ENDED}
            if last != {ids[-1]}:
                history.violated("a webhook is told in order", f"{task_id}: {self.told[task_id]}")
