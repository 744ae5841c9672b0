"""Clients of every daemon: A2A calls and streams, senders and workers of the mailbox, and an operator who revokes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any, Final
from uuid import uuid4

import httpx2

from tests.cluster.deployment import NODES, Deployment
from tests.cluster.history import ACKNOWLEDGED, REFUSED, History, Operation

CALL_S: Final = 10.0
PAUSE_S: Final = 0.02
HARD_S: Final = 0.2
"""After something went wrong."""
AGENT: Final = "/v1/a2a/agents/worker"
SENDER: Final = "mailbox-sender@cluster"
WORKER: Final = "mailbox-worker@cluster"
ENDED: Final = frozenset({"TASK_STATE_COMPLETED", "TASK_STATE_FAILED", "TASK_STATE_CANCELED"})


class Clients:
    def __init__(self, deployment: Deployment, history: History, seed: int) -> None:
        self.deployment = deployment
        self.history = history
        self.chance = random.Random(seed)
        self.stopped = False
        self.token = deployment.token
        self.worker_token = self.sender_token = ""
        self.enrolled = asyncio.Event()

    async def run(self, others: Sequence[Any] = ()) -> None:
        """Until `stopped`, and what was begun is ended. `others`: what else is repeated."""
        async with httpx2.AsyncClient(timeout=CALL_S) as http, asyncio.TaskGroup() as group:
            self.worker_token = await self.enroll(http, WORKER, f"a2a.respond.{SENDER}", f"a2a.recv.{WORKER}")
            self.sender_token = await self.enroll(http, SENDER, f"a2a.send.{WORKER}")
            self.enrolled.set()
            for _ in range(3):
                group.create_task(self.repeat(http, self.call))
                group.create_task(self.repeat(http, self.send))
                group.create_task(self.repeat(http, self.work))
            group.create_task(self.repeat(http, self.stream))
            group.create_task(self.repeat(http, self.drain))
            group.create_task(self.repeat(http, self.revoke))
            for once in others:
                group.create_task(self.repeat(http, once))

    async def repeat(self, http: httpx2.AsyncClient, once: Any) -> None:
        while not self.stopped:
            fine = await once(http)
            await asyncio.sleep(PAUSE_S if fine else HARD_S)

    def node(self) -> str:
        return self.chance.choice(NODES)

    async def enroll(self, http: httpx2.AsyncClient, display: str, *actions: str) -> str:
        """Its token."""
        answer = await http.post(
            f"{self.deployment.daemons[NODES[0]].url}/identities/enroll",
            json={"display": display, "actions": actions},
            headers={"authorization": f"Bearer {self.token}"},
        )
        answer.raise_for_status()
        token: str = answer.json()["token_b58"]
        return token

    async def ask(
        self,
        http: httpx2.AsyncClient,
        operation: Operation,
        method: str,
        path: str,
        *,
        token: str | None = None,
        body: dict[str, Any] | None = None,
    ) -> bool:
        """Whether it was acknowledged."""
        headers = {"authorization": f"Bearer {token or self.token}", "a2a-version": "1.0"}
        try:
            url = self.deployment.daemons[operation.node].url
            answer = await http.request(method, f"{url}{path}", json=body, headers=headers)
            said = answer.json()
        except (httpx2.HTTPError, json.JSONDecodeError):
            return False
        operation.answer = said if isinstance(said, dict) else {"said": said}
        if answer.status_code == 500:
            self.history.violated("no internal error", f"{path}: {said}")
        elif answer.status_code < 300:
            # An error of JSON-RPC is an answer, too.
            operation.outcome = REFUSED if "error" in operation.answer else ACKNOWLEDGED
        elif "outcome_unknown" not in answer.text:
            operation.outcome = REFUSED
        return operation.outcome == ACKNOWLEDGED

    # A2A

    async def call(self, http: httpx2.AsyncClient) -> bool:
        """Send a message and wait for the answer; then read the task at another node."""
        with self.history.operation("SendMessage", self.node(), str(uuid4())) as operation:
            body = _rpc("SendMessage", message=message(operation.about))
            if not await self.ask(http, operation, "POST", AGENT, body=body):
                return operation.outcome == REFUSED
        task = operation.answer["result"]["task"]
        said = json.dumps(task.get("artifacts", []))
        if task["status"]["state"] == "TASK_STATE_COMPLETED" and f"did {operation.about}" not in said:
            self.history.violated("the answer is to what was asked", f"{operation.about}: {said}")
        await self._read(http, task)
        return True

    async def _read(self, http: httpx2.AsyncClient, task: dict[str, Any]) -> None:
        with self.history.operation("GetTask", self.node(), task["id"]) as operation:
            if await self.ask(http, operation, "POST", AGENT, body=_rpc("GetTask", id=task["id"])):
                seen = operation.answer["result"]["status"]["state"]
                if task["status"]["state"] in ENDED and seen != task["status"]["state"]:
                    self.history.violated(
                        "what ended has ended everywhere", f"{task['id']} is {seen} at {operation.node}"
                    )
            elif operation.outcome == REFUSED and operation.answer.get("error", {}).get("code") == -32001:
                self.history.violated("what was acknowledged is there", f"{task['id']} at {operation.node}")

    async def stream(self, http: httpx2.AsyncClient) -> bool:
        with self.history.operation("SendStreamingMessage", self.node(), str(uuid4())) as operation:
            headers = {"authorization": f"Bearer {self.token}", "a2a-version": "1.0"}
            body = _rpc("SendStreamingMessage", message=message(operation.about))
            frames: list[dict[str, Any]]
            try:
                url = self.deployment.daemons[operation.node].url
                async with http.stream("POST", f"{url}{AGENT}", json=body, headers=headers) as answer:
                    lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
                    frames = [json.loads(line[6:]).get("result", {}) for line in lines]
            except httpx2.HTTPError:
                return False
            states = [frame["statusUpdate"]["status"]["state"] for frame in frames if "statusUpdate" in frame]
            ends = [state for state in states if state in ENDED]
            if len(ends) > 1 or (ends and states[-1] != ends[0]):
                self.history.violated("one end, and nothing after it", f"{operation.about}: {states}")
            if ends:
                operation.outcome = ACKNOWLEDGED
                tasks = [frame["task"]["id"] for frame in frames if "task" in frame]
                operation.answer = {"result": {"task": {"id": tasks[0]}}} if tasks else {}
        return True

    # Mailbox

    async def send(self, http: httpx2.AsyncClient) -> bool:
        """Under one id, at one node after the other, until it is acknowledged."""
        task_id = str(uuid4())
        body = {"id": task_id, "recipient": {"display": WORKER}, "intent_text": f"work {task_id}"}
        for _ in range(5):
            with self.history.operation("send", self.node(), task_id) as operation:
                if await self.ask(http, operation, "POST", "/a2a/tasks", token=self.sender_token, body=body):
                    return True
            await asyncio.sleep(HARD_S)
        return False

    async def work(self, http: httpx2.AsyncClient) -> bool:
        request = str(uuid4())
        taken = await self._under_one_id(
            http, "take", f"/a2a/tasks/next?request_id={request}", request, self.worker_token
        )
        if taken is None or not taken.get("task"):
            return taken is not None
        task, lease = taken["task"], taken["lease"]
        result = {
            "task_id": task["id"],
            "status": "ok",
            "content": [{"type": "text", "text": f"{task['intent_text']} by {lease['lease_id']}"}],
            "lease_id": lease["lease_id"],
        }
        for _ in range(5):
            with self.history.operation("settle", self.node(), task["id"]) as operation:
                if await self.ask(http, operation, "POST", "/a2a/results", token=self.worker_token, body=result):
                    return True
            await asyncio.sleep(HARD_S)
        return False

    async def drain(self, http: httpx2.AsyncClient) -> bool:
        request = str(uuid4())
        path = f"/a2a/results/next?max=10&request_id={request}"
        return await self._under_one_id(http, "drain", path, request, self.sender_token) is not None

    async def _under_one_id(
        self, http: httpx2.AsyncClient, kind: str, path: str, request: str, token: str | None = None
    ) -> dict[str, Any] | None:
        """What a request was given; asked again at another node, it is given the same."""
        given: dict[str, Any] | None = None
        for _ in range(5):
            with self.history.operation(kind, self.node(), request) as operation:
                if await self.ask(http, operation, "GET", path, token=token):
                    if given is not None and not _same(given, operation.answer):
                        self.history.violated("equal requests, equal answers", f"{kind} {request}")
                    repeat = given is None and self.chance.random() < 0.2
                    given = operation.answer
                    if not repeat or not (given.get("task") or given.get("results")):
                        return given
            await asyncio.sleep(HARD_S)
        return given

    # The operator

    async def revoke(self, http: httpx2.AsyncClient) -> bool:
        """Enroll somebody, revoke it at one node, and try to come in at all of them."""
        name = f"guest-{uuid4().hex[:12]}@cluster"
        with self.history.operation("enroll", self.node(), name) as operation:
            body: dict[str, Any] = {"display": name, "actions": []}
            if not await self.ask(http, operation, "POST", "/identities/enroll", body=body):
                return False
        token = operation.answer["token_b58"]
        with self.history.operation("revoke", self.node(), name) as operation:
            if not await self.ask(http, operation, "POST", "/identities/revoke", body={"identity": name}):
                return False
        for node in NODES:
            with self.history.operation("come in", node, name) as operation:
                if await self.ask(http, operation, "GET", "/a2a/tasks/next", token=token):
                    self.history.violated("nobody is let in after a revocation", f"{name} at {node}")
        await asyncio.sleep(HARD_S)
        return True


def _rpc(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def message(text: str) -> dict[str, Any]:
    return {"messageId": str(uuid4()), "role": "ROLE_USER", "parts": [{"text": text}]}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """A task that was settled meanwhile is not given again."""
    return all(not other.get(name) or one.get(name) == other[name] for name in ("task", "lease", "results"))
