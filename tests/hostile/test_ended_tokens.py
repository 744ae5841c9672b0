"""A token that ends while the body of its request arrives: the request is refused, and does nothing."""

import json
from typing import Final

import pytest

from tests.cli.daemons import Daemon
from tests.hostile.client import RawConnection, operator_token
from tests.hostile.doors import Client, message_v1

SENT: Final = {"message": message_v1("x"), "configuration": {"returnImmediately": True}}
REQUESTS: Final = {
    "/v1/a2a/agents/index": {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": SENT},
    "/v1/a2a/agents/index/message:send": SENT,
    "/v1/orchestrate": {"message": "x", "agent": "index"},
    "/v1/conversations": {"agent": "index", "title": ""},
    "/v1/files": {"bytes": "x"},
    "/mcp": {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "send_task", "arguments": {"agent": "index", "message": "x", "wait": False}},
    },
    "/a2a/tasks": {
        "id": "11111111-1111-4111-8111-111111111111",
        "recipient": {"display": "worker@here"},
        "intent_text": "x",
    },
}


@pytest.mark.parametrize("path", REQUESTS)
def test_a_token_that_ends_before_the_body_has_come_begins_no_work(daemon: Daemon, path: str) -> None:
    worker = daemon.json("identities", "enroll", "worker@here")["token_b58"]
    assert daemon.run("capabilities", "grant", "a2a.send.worker@here", "--to", "worker@here").code == 0
    acme = daemon.json("tenants", "add", "acme")["token"]
    mailbox = path == "/a2a/tasks"
    body = json.dumps(REQUESTS[path]).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {worker if mailbox else acme}\r\n"
    head += "Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n"
    with RawConnection(daemon.url) as slow:
        slow.send(f"{head}Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode())
        assert slow.socket.recv(64) == b"HTTP/1.1 100 Continue\r\n\r\n"  # the token was recognised
        ended = ("identities", "revoke", "worker@here") if mailbox else ("tenants", "rotate", "acme")
        assert daemon.run(*ended).code == 0
        slow.send(body)
        assert slow.read_answer().status == 401
    operator = Client(daemon, operator_token(daemon.home))
    assert operator.ask("GET", "/a2a/tasks").json["tasks"] == []
    assert daemon.json("files", "list", "--tenant", "acme")["files"] == []


def test_an_identity_that_ends_before_its_file_has_come_stores_nothing(daemon: Daemon) -> None:
    token = daemon.json("identities", "enroll", "worker@here")["token_b58"]
    head = f"PUT /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
    with RawConnection(daemon.url) as slow:
        slow.send(f"{head}Content-Length: 4\r\nExpect: 100-continue\r\n\r\n".encode())
        assert slow.socket.recv(64) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert daemon.run("identities", "revoke", "worker@here").code == 0
        slow.send(b"late")
        assert slow.read_answer().status == 401
    assert not [each for each in (daemon.home / "blobs").rglob("*") if each.is_file()]
