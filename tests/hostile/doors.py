"""The doors of a real daemon, as a client writes to them, with metadata wherever a door has room for it."""

import json
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import uuid4

import grpc  # type: ignore[import-untyped]
from a2a.types import a2a_pb2 as pb
from a2a.types.a2a_pb2_grpc import A2AServiceStub
from google.protobuf.json_format import MessageToDict, ParseDict

from tests.cli.daemons import Daemon
from tests.hostile.client import Answer, request
from tests.waits import BOUND_S

Metadata = Mapping[str, Any]

GRPC_ON: Final = {"COVENANT_GRPC_ENABLED": "1", "COVENANT_GRPC_PORT": "0"}


@dataclass(frozen=True)
class Client:
    """Somebody who calls a daemon. `token` None: without a token."""

    daemon: Daemon
    token: str | None

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        said = {name.replace("_", "-"): value for name, value in headers.items()}
        return request(self.daemon.url, method, path, token=self.token, body=body, headers=said)

    def rpc(self, agent: str, method: str, params: Any, **headers: str) -> dict[str, Any]:
        """The JSON-RPC answer, whole."""
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        found = self.ask("POST", f"/v1/a2a/agents/{agent}", body, **headers).json
        assert isinstance(found, dict)
        return found

    def grpc(self, method: str, message: Any) -> Any:
        """The answer; raises grpc.RpcError for a refusal."""
        said = [("authorization", f"Bearer {self.token}")] if self.token is not None else []
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port(self.daemon)}") as channel:
            stub = A2AServiceStub(channel)  # type: ignore[no-untyped-call]
            return getattr(stub, method)(message, metadata=said, timeout=BOUND_S)


def grpc_port(daemon: Daemon) -> int:
    """As the daemon logged it."""
    line = next(line for line in daemon.log.splitlines() if "grpc.listening" in line)
    return int(line.rpartition("port=")[2].split()[0])


def message_v1(text: str, metadata: Metadata | None = None, **more: Any) -> dict[str, Any]:
    part: dict[str, Any] = {"text": text}
    message = {"messageId": str(uuid4()), "role": "ROLE_USER", "parts": [part], **more}
    if metadata is not None:
        part["metadata"] = message["metadata"] = dict(metadata)
    return message


def message_v03(text: str, metadata: Metadata | None = None, **more: Any) -> dict[str, Any]:
    part: dict[str, Any] = {"kind": "text", "text": text}
    message = {"kind": "message", "messageId": str(uuid4()), "role": "user", "parts": [part], **more}
    if metadata is not None:
        part["metadata"] = message["metadata"] = dict(metadata)
    return message


def _params(message: dict[str, Any], metadata: Metadata) -> dict[str, Any]:
    return {"message": message, "metadata": dict(metadata)}


def _task(answer: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in answer, answer
    found = answer.get("result", answer)
    task = found.get("task", found)
    assert isinstance(task, dict), answer
    return task


def send_rpc_v1(client: Client, agent: str, text: str, metadata: Metadata, task_id: str = "") -> dict[str, Any]:
    message = message_v1(text, metadata, **({"taskId": task_id} if task_id else {}))
    return _task(client.rpc(agent, "SendMessage", _params(message, metadata)))


def send_rpc_v03(client: Client, agent: str, text: str, metadata: Metadata, task_id: str = "") -> dict[str, Any]:
    message = message_v03(text, metadata, **({"taskId": task_id} if task_id else {}))
    return _task(client.rpc(agent, "message/send", _params(message, metadata)))


def send_rest(client: Client, agent: str, text: str, metadata: Metadata, task_id: str = "") -> dict[str, Any]:
    message = message_v1(text, metadata, **({"taskId": task_id} if task_id else {}))
    answer = client.ask("POST", f"/v1/a2a/agents/{agent}/message:send", _params(message, metadata))
    assert answer.status == 200, answer
    return _task(answer.json)


def send_grpc(client: Client, agent: str, text: str, metadata: Metadata, task_id: str = "") -> dict[str, Any]:
    message = message_v1(text, metadata, **({"taskId": task_id} if task_id else {}))
    asked = ParseDict({"tenant": agent, **_params(message, metadata)}, pb.SendMessageRequest())
    return _task(MessageToDict(client.grpc("SendMessage", asked)))


A2A_DOORS: Final[Mapping[str, Callable[..., dict[str, Any]]]] = {
    "rpc 1.0": send_rpc_v1,
    "rpc 0.3": send_rpc_v03,
    "rest": send_rest,
    "grpc": send_grpc,
}


class Ipc:
    """One connection to a daemon's socket."""

    def __init__(self, home: Path, token: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(BOUND_S)
        self._socket.connect(str(home / "sock"))
        assert self.ask("authenticate", token_b58=token)["kind"] == "authenticated"

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        data = json.dumps({"kind": kind, **fields}).encode()
        self._socket.sendall(struct.pack(">I", len(data)) + data)
        (size,) = struct.unpack(">I", self._read(4))
        found = json.loads(self._read(size))
        assert isinstance(found, dict)
        return found

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            more = self._socket.recv(count - len(found))
            assert more, "the daemon closed the socket"
            found += more
        return found

    def close(self) -> None:
        self._socket.close()


class Listener:
    """A port on loopback that must never be called; it counts who connects."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=16)
        self._socket.setblocking(False)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"

    def connections(self) -> int:
        """How many have connected since the last look."""
        count = 0
        while True:
            try:
                connected, _ = self._socket.accept()
            except BlockingIOError:
                return count
            connected.close()
            count += 1

    def close(self) -> None:
        self._socket.close()


def host_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port}"
