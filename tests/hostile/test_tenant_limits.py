"""A tenant's limits hold at every door: connections, streams, live tasks, queued bytes, and work at once."""

import http.client
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from tests.cli.daemons import Daemon
from tests.hostile.client import Answer, request
from tests.hostile.tenant import AGENT, DEFAULT, Tenant, lease, message
from tests.waits import BOUND_S, until

HERE = f"/v1/a2a/agents/{AGENT}"


@contextmanager
def left_open(tenant: Tenant, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse | None]:
    """A request that is not answered to its end: the response if it has begun, as a stream's does."""
    parts = urlsplit(tenant.daemon.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=BOUND_S)
    headers = {"Authorization": f"Bearer {tenant.token}", "Content-Type": "application/json"}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        yield connection.getresponse() if _streams(path, body) else None
    finally:
        connection.close()


def _streams(path: str, body: Any) -> bool:
    return path.endswith(("/events", ":subscribe")) or "Subscribe" in str((body or {}).get("method"))


def rpc(method: str, params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def refused(answer: Answer, code: str) -> None:
    """429, in the words of its door, with when to come back."""
    assert answer.status == 429, (answer.status, answer.body[:300])
    assert answer.headers.get("retry-after") or answer.headers.get("Retry-After")
    told = answer.json
    if isinstance(told.get("error"), dict):
        details = told["error"]["data" if "jsonrpc" in told else "details"]
        assert code in [each.get("metadata", {}).get("code") for each in details], told
    elif told["code"] != "RATE_LIMITED":  # the simple door has one code for each status
        assert (told["code"], told.get("reason")) == (code, code), told


Ask = Callable[[Tenant, str], Answer]
"""Something that a tenant asks, about a task of its own."""


def ask(method: str, path: str, body: Callable[[str], Any] = lambda _: None) -> Ask:
    def asked(tenant: Tenant, task_id: str) -> Answer:
        said, place = body(task_id), path.format(task_id)
        return request(tenant.daemon.url, method, place, token=tenant.token, body=said)

    return asked


SENDS = {
    "jsonrpc": ask("POST", HERE, lambda _: rpc("SendMessage", message("x", 1))),
    "jsonrpc stream": ask("POST", HERE, lambda _: rpc("SendStreamingMessage", message("x", 1))),
    "rest": ask("POST", f"{HERE}/message:send", lambda _: message("x", 1)),
    "native": ask("POST", "/v1/orchestrate", lambda _: {"message": "x", "agent": AGENT}),
    "simple": ask("POST", "/a2a/tasks/send", lambda _: {"message": "x"}),
}
STREAMS = {
    "jsonrpc 1.0": ask("POST", HERE, lambda task_id: rpc("SubscribeToTask", {"id": task_id})),
    "jsonrpc 0.3": ask("POST", HERE, lambda task_id: rpc("tasks/resubscribe", {"id": task_id})),
    "jsonrpc send": SENDS["jsonrpc stream"],
    "rest": ask("GET", f"{HERE}/tasks/{{}}:subscribe"),
    "rest send": ask("POST", f"{HERE}/message:stream", lambda _: message("x", 1)),
    "native events": ask("GET", "/v1/requests/{}/events"),
    "native run": SENDS["native"],
}
READS = {
    "jsonrpc": ask("POST", HERE, lambda task_id: rpc("GetTask", {"id": task_id})),
    "rest": ask("GET", f"{HERE}/tasks/{{}}"),
    "native": ask("GET", "/v1/requests/{}"),
    "simple": ask("GET", "/a2a/tasks/{}"),
    "mcp": ask("POST", "/mcp", lambda _: rpc("tools/list", {})),
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    started = Daemon(tmp_path_factory.mktemp("d") / "home")
    yield started
    started.stop()


def new_tenant(daemon: Daemon, *limits: str) -> Tenant:
    tenant = Tenant(daemon, f"t{uuid4().hex[:8]}", *limits)
    definition = {"id": AGENT, "kind": "worker", "default_project": "p"}
    added = request(daemon.url, "POST", "/v1/agents", token=tenant.token, body={"agent_def": definition})
    assert added.status == 201, added.body
    return tenant


def tasks_of(tenant: Tenant) -> int:
    count: int = request(tenant.daemon.url, "GET", "/v1/requests", token=tenant.token).json["count"]
    return count


def test_streams_are_bounded_at_every_door_and_what_is_refused_leaves_nothing(daemon: Daemon) -> None:
    tenant = new_tenant(daemon, "--streams", "2")
    task_id = tenant.sent("x")
    subscribe = rpc("SubscribeToTask", {"id": task_id})
    with (
        left_open(tenant, "POST", HERE, subscribe),
        left_open(tenant, "GET", f"/v1/requests/{task_id}/events"),
    ):
        for name, again in STREAMS.items():
            answer = again(tenant, task_id)
            assert answer.status == 429, name
            refused(answer, "stream_limit")
        assert tasks_of(tenant) == 1
    until(lambda: _opens(tenant, subscribe))


def _opens(tenant: Tenant, subscribe: Any) -> bool:
    """Whether one more stream can be opened: that the others are closed is noticed a moment later."""
    with left_open(tenant, "POST", HERE, subscribe) as response:
        assert response is not None
        return response.status == 200


def test_connections_are_bounded_at_every_door_long_waits_among_them(daemon: Daemon) -> None:
    tenant = new_tenant(daemon, "--connections", "1")
    task_id = tenant.sent("x")
    waiting = message("waits for its answer", 2)
    waiting["configuration"]["returnImmediately"] = False
    with left_open(tenant, "POST", HERE, rpc("SendMessage", waiting)):
        until(lambda: READS["jsonrpc"](tenant, task_id).status == 429)
        for again in (*READS.values(), *SENDS.values()):
            refused(again(tenant, task_id), "concurrent_request_limit")
    until(lambda: READS["jsonrpc"](tenant, task_id).status == 200)
    assert tasks_of(tenant) == 2


@pytest.mark.parametrize(
    ("limits", "code"),
    [(("--live-tasks", "1"), "live_task_limit"), (("--queued-bytes", "10"), "queued_bytes_limit")],
)
def test_live_tasks_and_queued_bytes_are_bounded_at_every_door(
    daemon: Daemon, limits: tuple[str, ...], code: str
) -> None:
    tenant = new_tenant(daemon, *limits)
    task_id = tenant.sent("0123456789")
    for again in SENDS.values():
        refused(again(tenant, task_id), code)
    told = request(
        daemon.url,
        "POST",
        "/mcp",
        token=tenant.token,
        body=rpc("tools/call", {"name": "send_task", "arguments": {"agent": AGENT, "message": "x"}}),
        headers={"Accept": "application/json, text/event-stream"},
    )
    assert code in told.body.decode(), told.body
    assert tasks_of(tenant) == 1
    _refuses_what_its_worker_sends_for_it(tenant, code)
    assert tasks_of(tenant) == 1


def _refuses_what_its_worker_sends_for_it(tenant: Tenant, code: str) -> None:
    """What a tenant's agent sends by the mailbox, while it works on a task, counts as the tenant's."""
    other = f"other@{tenant.name}"
    enrolled = [
        tenant.daemon.json("identities", "enroll", who, "--grant", f"a2a.send.{other}")
        for who in (f"{AGENT}@{tenant.name}", other)
    ]
    me, them = ({"display": each["display"], "pubkey": each["pubkey_b58"]} for each in enrolled)
    token = enrolled[0]["token_b58"]
    (leased,) = lease(tenant.daemon, token)
    child = {
        "id": str(uuid4()),
        "sender": me,
        "recipient": them,
        "intent_text": "x",
        "parent": leased["task"]["id"],
    }
    answer = request(tenant.daemon.url, "POST", "/a2a/tasks", token=token, body=child)
    assert (answer.status, answer.json["code"]) == (429, code), answer.body


def test_64_programs_do_not_run_at_once_under_a_concurrency_of_1(daemon: Daemon, tmp_path: Path) -> None:
    daemon.json("tenants", "limit", DEFAULT, "--concurrency", "1")
    log = tmp_path / "log"
    code = f"open({str(log)!r}, 'a').write('+'); import time; time.sleep(0.02); open({str(log)!r}, 'a').write('-')"
    program = f"{shlex.quote(sys.executable)} -S -c {shlex.quote(code)}"
    daemon.json("agents", "add", "program", "--kind", "process", "--command", program)
    tenant = Tenant(daemon, DEFAULT)
    sent = [tenant.sent(f"{n}", agent="program") for n in range(16)]
    until(lambda: log.exists() and len(log.read_text()) == 2 * len(sent))
    assert log.read_text() == "+-" * len(sent)
