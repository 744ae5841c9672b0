"""A small A2A server that keeps every promise of the kit, and breaks the one that it is told to: PORT HOME [FLAW].

All it knows is a file of events, appended before anybody hears of them and read at the start.
"""

import asyncio
import base64
import json
import os
import signal
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

PORT, HOME, FLAW = int(sys.argv[1]), Path(sys.argv[2]), (sys.argv[3] if len(sys.argv) > 3 else "")
CONCURRENCY = 100 if FLAW == "lacks-queue" else 4
ENDED = ("completed", "failed", "canceled")
URL = f"http://127.0.0.1:{PORT}"


class Task:
    def __init__(self, task_id: str) -> None:
        self.id = task_id
        self.events: list[dict[str, Any]] = []
        self.state = ""
        self.chunks: list[str] = []
        self.text = ""
        self.version = "1.0"
        self.push: dict[str, str] | None = None
        self.pushed = 0
        self.changed = asyncio.Event()

    def apply(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.state = event.get("state", self.state)
        self.text = event.get("text", self.text)
        self.version = event.get("version", self.version)
        self.push = event.get("push", self.push)
        if "chunk" in event:
            self.chunks.append(event["chunk"])
        self.changed.set()
        self.changed = asyncio.Event()


class Server:
    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.marks: dict[str, str] = {}
        self.free = asyncio.Semaphore(CONCURRENCY)
        self.at_work: dict[str, asyncio.Task[None]] = {}
        self.others: set[asyncio.Task[None]] = set()
        self.stopping = False
        self.late: list[str] = []
        self.lock = asyncio.Lock()
        self.journal = HOME / "events.jsonl"
        self.key = self._key()

    def _key(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

        file = HOME / "key"
        if not file.exists() or FLAW == "forgets-its-key":
            file.write_bytes(Ed25519PrivateKey.generate().private_bytes_raw())
        return Ed25519PrivateKey.from_private_bytes(file.read_bytes())

    # --- what is kept

    def record(self, task: Task, **event: Any) -> None:
        line = json.dumps({"id": task.id, **event}) + "\n"
        if FLAW == "writes-late":
            self.late.append(line)
        else:
            self._write(line)
        task.apply(event)

    def _write(self, lines: str) -> None:
        with self.journal.open("a", encoding="utf-8") as journal:
            journal.write(lines)

    async def write_late(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._write("".join(self.late))
            self.late.clear()

    def load(self) -> None:
        lines = self.journal.read_text(encoding="utf-8").splitlines() if self.journal.exists() else []
        for line in lines:
            event = json.loads(line)
            task = self.tasks.setdefault(event["id"], Task(event["id"]))
            if "pushed" in event:
                task.pushed = event["pushed"]
            elif not (FLAW == "loses-chunks" and event.get("chunk", "").startswith("2 ")):
                task.apply(event)
            if event.get("mark"):
                self.marks[event["mark"]] = task.id
        for task in self.tasks.values():
            self.recover(task)

    def recover(self, task: Task) -> None:
        if task.state == "working" and FLAW != "works-for-ever":
            if FLAW == "runs-again":
                task.chunks.clear()
                self.begin(task)
            else:
                self.record(task, state="failed")
        elif task.state == "submitted" and FLAW != "forgets-its-queue":
            self.begin(task)
        elif task.state == "input-required" and FLAW == "forgets-questions":
            self.record(task, state="failed")
        elif task.state == "canceled" and FLAW == "revives-canceled":
            self.record(task, state="working")
            self.begin(task)
        if FLAW == "pushes-the-end-alone":
            task.pushed = max(task.pushed, len(task.events) - 1)
        if task.push and FLAW != "forgets-pushes":
            self.spawn(self.deliver(task))

    # --- what is done

    def spawn(self, work: Any) -> None:
        running = asyncio.create_task(work)
        self.others.add(running)
        running.add_done_callback(self.others.discard)

    def begin(self, task: Task) -> None:
        running = self.at_work[task.id] = asyncio.create_task(self.work(task))
        running.add_done_callback(lambda _: self.at_work.pop(task.id, None))

    async def work(self, task: Task) -> None:
        async with self.free:
            if self.stopping:
                return
            if task.state != "working":
                self.record(task, state="working")
            verb, key, *rest = task.text.split()
            numbers = [int(word) for word in rest]
            with Path(os.environ["PROVE_RUNS"]).open("a", encoding="utf-8") as runs:
                runs.write(f"{key}\n")
            if verb == "stream":
                count, pause_ms, size = (*numbers, 0)[:3]
                for number in range(count):
                    self.record(task, chunk=f"{number} ".ljust(size))
                    await asyncio.sleep(pause_ms / 1000)
            elif verb == "ask" and FLAW != "lacks-questions":
                self.record(task, state="input-required")
                return
            elif verb == "fail":
                self.record(task, state="failed")
                return
            elif verb == "run":
                await asyncio.sleep(numbers[0] / 1000)
            if verb != "stream":
                self.record(task, chunk=f"{key} done")
            self.record(task, state="completed")

    async def deliver(self, task: Task) -> None:
        assert task.push is not None
        while True:
            if task.pushed < len(task.events):
                seen = await self.post(task, task.pushed)
                if seen:
                    task.pushed += 1
                    self._write(json.dumps({"id": task.id, "pushed": task.pushed}) + "\n")
                else:
                    await asyncio.sleep(0.2)
            elif task.state in ENDED:
                return
            else:
                await task.changed.wait()

    async def post(self, task: Task, number: int) -> bool:
        assert task.push is not None
        host, port = task.push["url"].split("/")[2].split(":")
        if FLAW in {"loses-first-pushes", "loses-what-it-answered"} and number < 2:
            return True
        body = b"hello" if FLAW == "push-as-text" else json.dumps(shown_event(task, number)).encode()
        name, stamp = f"{task.id}-{number}", str(int(time.time()))
        signature = base64.b64encode(self.key.sign(f"{name}.{stamp}.".encode() + body)).decode()
        head = (
            f"POST /hook HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\nwebhook-id: {name}\r\n"
            f"webhook-timestamp: {stamp}\r\nwebhook-signature: v1a,{signature}\r\nconnection: close\r\n\r\n"
        )
        if FLAW == "lacks-signatures":
            head = head.replace("webhook-signature", "x-nothing")
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + body)
            status = (await reader.readline()).split()
            writer.close()
            return status[1:2] == [b"204"]
        return False

    # --- what is asked

    async def send(self, params: dict[str, Any], version: str, mark: str) -> Task:
        message, configuration = params["message"], params.get("configuration", {})
        text = message["parts"][0]["text"]
        if FLAW == "lacks-repeats":
            mark = str(uuid.uuid4())
        if mark in self.marks:
            return await self.settled(self.tasks[self.marks[mark]])
        if FLAW == "repeats-at-once":
            await asyncio.sleep(0.2)
        known = self.tasks.get(message.get("taskId", ""))
        if message.get("taskId") and (known is None or (known.state != "input-required" and FLAW != "reopens-ended")):
            raise Refusal(-32004, "the task takes no message")
        task = known or Task(str(uuid.uuid4()))
        self.tasks[task.id] = task
        self.marks[mark] = task.id
        push = configuration.get("taskPushNotificationConfig")
        self.record(task, state="submitted", text=text, mark=mark, version=version, **({"push": push} if push else {}))
        self.begin(task)
        if push:
            self.spawn(self.deliver(task))
        waits = configuration.get("blocking", not configuration.get("returnImmediately", False))
        return await self.settled(task) if waits else task

    async def settled(self, task: Task) -> Task:
        while task.state not in (*ENDED, "input-required"):
            await task.changed.wait()
        return task

    def find(self, params: dict[str, Any], version: str) -> Task:
        task = self.tasks.get(params["id"])
        if task is None or (FLAW == "splits-versions" and task.version != version):
            raise Refusal(-32001, "Task not found")
        return task

    def cancel(self, task: Task) -> Task:
        if task.state in ENDED or FLAW == "lacks-cancel":
            raise Refusal(-32002, "the task has ended")
        self.record(task, state="canceled")
        if task.id in self.at_work:
            self.at_work[task.id].cancel()
        return task

    def page(self, params: dict[str, Any]) -> dict[str, Any]:
        ids = list(self.tasks)
        if FLAW == "turns-pages-around" and RESTARTED:
            ids.reverse()
        begin = int(params.get("pageToken") or 0)
        end = begin + params["pageSize"]
        shown = [show_task(self.tasks[each], "1.0") for each in ids[begin:end]]
        return {"tasks": shown, "nextPageToken": str(end) if end < len(ids) else ""}

    async def stream(
        self, task: Task, after: int | None, version: str, number: Any, writer: asyncio.StreamWriter
    ) -> None:
        """`after`: the last event that the reader has seen. Without it the stream begins with the task as it is."""
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        if RESTARTED and FLAW == "streams-nothing-again":
            return
        if RESTARTED and FLAW == "repeats-and-cuts":
            first = next(index for index, event in enumerate(task.events) if event.get("chunk", "").startswith("1 "))
            await self.write_event(writer, number, first + 1, shown_event(task, first))
            return
        if after is None:
            after = len(task.events)
            await self.write_event(writer, number, after, {"task": show_task(task, version)})
        while True:
            while after < len(task.events):
                after += 1
                await self.write_event(writer, number, after, shown_event(task, after - 1))
            if task.state in ENDED:
                return
            await task.changed.wait()

    async def write_event(
        self, writer: asyncio.StreamWriter, number: Any, event_id: int, result: dict[str, Any]
    ) -> None:
        data = json.dumps({"jsonrpc": "2.0", "id": number, "result": result})
        writer.write(f"id: {event_id}\ndata: {data}\n\n".encode())
        if FLAW == "waits-for-readers":
            async with self.lock:
                await writer.drain()
        else:
            await writer.drain()


class Refusal(Exception):
    def __init__(self, code: int, said: str) -> None:
        super().__init__(said)
        self.code = code


def show_state(state: str, version: str) -> str:
    return state if version == "0.3" else "TASK_STATE_" + state.upper().replace("-", "_")


def show_task(task: Task, version: str) -> dict[str, Any]:
    part = {"text": "".join(task.chunks)} | ({"kind": "text"} if version == "0.3" else {})
    shown: dict[str, Any] = {"id": task.id, "contextId": task.id, "status": {"state": show_state(task.state, version)}}
    if FLAW == "status-as-text":
        shown["status"] = task.state
    if task.chunks:
        shown["artifacts"] = ["x"] if FLAW == "artifact-as-text" else [{"artifactId": "text", "parts": [part]}]
    return shown | ({"kind": "task"} if version == "0.3" else {})


def shown_event(task: Task, index: int) -> dict[str, Any]:
    event = task.events[index]
    if "chunk" in event:
        first = not any("chunk" in each for each in task.events[:index])
        artifact = {"artifactId": "text", "parts": [{"text": event["chunk"]}]}
        return {
            "artifactUpdate": {
                "taskId": task.id,
                "contextId": task.id,
                "artifact": artifact,
                "append": not first or AGAIN,
            }
        }
    status = {"state": show_state(event["state"], "1.0")}
    return {"statusUpdate": {"taskId": task.id, "contextId": task.id, "status": status}}


CARD = {
    "name": "tiny",
    "version": "1",
    "capabilities": {"streaming": True, "pushNotifications": True},
    "supportedInterfaces": [
        {"url": URL, "protocolBinding": "JSONRPC", "protocolVersion": version} for version in ("1.0", "0.3")
    ],
}
LACKING = {"lacks-stream": {"SendStreamingMessage", "SubscribeToTask"}, "lacks-old-version": {"message/send"}}.get(
    FLAW, set()
)
if FLAW == "lacks-push":
    CARD["capabilities"] = {"streaming": True}
REFUSALS = {"refuses-streams-again": -32603, "has-no-stream-of-the-ended": -32004}
AGAIN = FLAW == "repeats-events"
RESTARTED = (HOME / "events.jsonl").exists()


async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, asyncio.IncompleteReadError):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if head[0].startswith("GET"):
            public = base64.urlsafe_b64encode(server.key.public_key().public_bytes_raw()).decode().rstrip("=")
            jwks = {"keys": [{"kid": "1", "kty": "OKP", "crv": "Ed25519", "x": public}]}
            asked = "keys" if "jwks" in head[0] else "card"
            write_body(
                writer,
                b"<html>" if f"{asked}-as-html" == FLAW else json.dumps(jwks if asked == "keys" else CARD).encode(),
            )
        else:
            await call(server, json.loads(body), headers, writer)
    writer.close()


async def call(server: Server, request: dict[str, Any], headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
    method, params, number = request["method"], request["params"], request["id"]
    version = "0.3" if "/" in method else "1.0"
    if FLAW == "waits-for-readers":
        async with server.lock:
            pass
    try:
        if method in LACKING:
            raise Refusal(-32601, "no such method")
        if method in {"SendMessage", "message/send", "SendStreamingMessage"}:
            streams = method == "SendStreamingMessage"
            if streams:
                params["configuration"] = {**params.get("configuration", {}), "returnImmediately": True}
            task = await server.send(params, version, headers.get("idempotency-key") or params["message"]["messageId"])
            if streams:
                return await server.stream(task, None, version, number, writer)
            while FLAW == "loses-what-it-answered" and task.state == "submitted":
                await task.changed.wait()
            shown = show_task(task, version)
            result = {"task": shown} if version == "1.0" else shown
        elif method == "SubscribeToTask":
            task = server.find(params, version)
            if RESTARTED and FLAW in REFUSALS:
                raise Refusal(REFUSALS[FLAW], "no stream")
            last = headers.get("last-event-id")
            after = 0 if FLAW == "repeats-events" else None if last is None else int(last)
            return await server.stream(task, after, version, number, writer)
        elif method == "ListTasks" and FLAW != "lacks-list":
            result = server.page(params)
        elif method == "CancelTask":
            result = show_task(server.cancel(server.find(params, version)), version)
        elif method in {"GetTask", "tasks/get"}:
            result = show_task(server.find(params, version), version)
        else:
            raise Refusal(-32601, "no such method")
    except Refusal as refusal:
        error = {"code": "NOT_FOUND" if FLAW == "code-as-text" else refusal.code, "message": str(refusal)}
        return write_json(writer, {"jsonrpc": "2.0", "id": number, "error": error})
    return write_json(writer, {"jsonrpc": "2.0", "id": number, "result": result})


def write_json(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    write_body(writer, json.dumps(value).encode())


def write_body(writer: asyncio.StreamWriter, body: bytes) -> None:
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)


async def main() -> None:
    if FLAW == "starts-once" and RESTARTED:
        sys.exit("once is enough")
    server = Server()
    server.load()
    if FLAW == "writes-late":
        server.spawn(server.write_late())
    stopped = asyncio.Event()
    if FLAW != "stops-at-once":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    listening = await asyncio.start_server(lambda r, w: answer(server, r, w), "127.0.0.1", PORT)
    await stopped.wait()
    server.stopping = True
    listening.close()
    await asyncio.gather(*server.at_work.values())


asyncio.run(main())
