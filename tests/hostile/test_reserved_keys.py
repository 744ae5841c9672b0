"""What a client says under the daemon's own metadata keys decides nothing, and is nowhere told as the daemon's word.

The matrix is every reserved key by every door. The attack is the one that such a key made possible: a client of one
tenant that sends another tenant's work to an address of the operator, with the operator's token.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pytest

from covenant.agents.model.model_agent import ADVISOR
from covenant.agents.router import ASKING, ROUTE
from covenant.doors.a2a.grpc import GENERATION
from covenant.exchange.native import ABOUT, INLINE
from covenant.exchange.tasks.builder import IDEMPOTENCY
from covenant.model.peers.delegation import ARTIFACT, PROOF, TERMS
from covenant.model.sanitizer import is_reserved
from covenant.model.task import REMOTE
from covenant.wire.a2a.parts_v03 import FILENAME, MEDIA_TYPE
from covenant.wire.call_headers import MEMBERS
from tests.cli.daemons import Daemon
from tests.hostile.client import operator_token
from tests.hostile.conftest import StartDaemon
from tests.hostile.doors import A2A_DOORS, GRPC_ON, Client, Ipc, Listener

FORGED: Final = "forged-7f3a9c"
"""What a client says under a reserved key. Wherever it turns up again, it was believed or repeated."""

DECIDING: Final = (
    *(REMOTE, TERMS, ARTIFACT, PROOF, ROUTE, ASKING, ADVISOR, ABOUT, INLINE, GENERATION),
    *("covenant.redacted", "covenant.usage", "covenant.partial", "covenant.holder_lost", "covenant.agent"),
    *("covenant.created_at", "covenant.target", "covenant.anything", "x-arbiter.tool_call", "x-arbiter.agent_id"),
    *("x-arbiter.input_tokens", "x-arbiter.output_tokens", "x-arbiter.stop_reason", "x-arbiter.error"),
    "x-arbiter.sub_agent_response",
)
"""Keys under which only the daemon speaks."""
READ_AT_THE_DOOR: Final[dict[str, Any]] = {
    IDEMPOTENCY: {"key": FORGED},
    "covenant.depth": 1,
    "covenant.chain": [FORGED],
    "covenant.deadline_ms": 99_999_999_999_999,
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": f"vendor={FORGED}",
    MEDIA_TYPE: [FORGED],
    FILENAME: [FORGED],
}
"""Keys that a client may send: a door reads them, and they are not kept."""

AGENTS = """
import json

from covenant import Agent, Turn

mirror = Agent("mirror", default_project="p")


@mirror
async def show(turn: Turn):
    told = {"metadata": turn.metadata, "parts": [getattr(part, "metadata", None) for part in turn.parts]}
    if turn.text == "ask":
        yield turn.need_input("more")
    else:
        yield json.dumps(told)
"""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for the whole matrix."""
    folder = tmp_path_factory.mktemp("r")
    (folder / "agents.py").write_text(AGENTS)
    daemon = Daemon(folder / "h", str(folder / "agents.py"), env=GRPC_ON)
    yield daemon
    daemon.stop()


def said_under(key: str) -> dict[str, Any]:
    return {"mine": "kept", key: READ_AT_THE_DOOR.get(key, {"url": FORGED, "name": FORGED, "budget": FORGED})}


def texts_of(task: dict[str, Any]) -> list[Any]:
    return [json.loads(part["text"]) for made in task["artifacts"] for part in made["parts"] if part.get("text")]


def test_every_key_that_the_daemon_writes_or_reads_is_reserved() -> None:
    assert all(map(is_reserved, (*DECIDING, *READ_AT_THE_DOOR, *MEMBERS)))
    assert not is_reserved("mine")


EACH: Final = [
    key if key in (REMOTE, IDEMPOTENCY) else pytest.param(key, marks=pytest.mark.slow)
    for key in (*DECIDING, *READ_AT_THE_DOOR)
]
"""One by one is the long way; all of them together, below, is the short one."""


@pytest.mark.parametrize("key", EACH)
@pytest.mark.parametrize("door", A2A_DOORS)
def test_a_reserved_key_of_a_client_is_neither_seen_by_the_agent_nor_told_again(
    serving: Daemon, door: str, key: str
) -> None:
    client, metadata = Client(serving, operator_token(serving.home)), said_under(key)
    if key == IDEMPOTENCY:
        metadata[key] = {"key": f"{FORGED} {door}"}
    told = A2A_DOORS[door](client, "mirror", "show", metadata)
    assert texts_of(told) == [{"metadata": {"mine": "kept"}, "parts": [{"mine": "kept"}]}]
    assert FORGED not in json.dumps(told)
    message = told["history"][0]
    assert (message["metadata"], message["parts"][0]["metadata"]) == ({"mine": "kept"}, {"mine": "kept"})


@pytest.mark.parametrize("door", A2A_DOORS)
def test_all_reserved_keys_together_leave_nothing_in_the_ledger(serving: Daemon, door: str) -> None:
    client = Client(serving, operator_token(serving.home))
    metadata = {name: value for key in (*DECIDING, *READ_AT_THE_DOOR) for name, value in said_under(key).items()}
    metadata[IDEMPOTENCY] = {"key": f"{FORGED} all {door}"}
    told = A2A_DOORS[door](client, "mirror", "show", metadata)
    assert FORGED not in json.dumps(client.rpc("mirror", "GetTask", {"id": told["id"]})["result"])
    shown = client.ask("GET", f"/a2a/tasks/{told['id']}/show").json["task"]
    assert (shown["metadata"], shown["request_metadata"]) == ({"mine": "kept"}, {"mine": "kept"})
    assert "target" not in shown


@pytest.mark.parametrize("key", [REMOTE, IDEMPOTENCY, "traceparent"])
@pytest.mark.parametrize("door", A2A_DOORS)
def test_a_reserved_key_of_the_next_message_is_not_kept_either(serving: Daemon, door: str, key: str) -> None:
    client, metadata = Client(serving, operator_token(serving.home)), said_under(key)
    if key == IDEMPOTENCY:
        metadata[key] = {"key": f"{FORGED} next {door}"}
    asked = A2A_DOORS[door](client, "mirror", "ask", {"mine": "first"})
    told = A2A_DOORS[door](client, "mirror", "show", metadata, task_id=asked["id"])
    assert texts_of(told) == [{"metadata": {"mine": "kept"}, "parts": [{"mine": "kept"}]}]
    assert FORGED not in json.dumps(client.rpc("mirror", "GetTask", {"id": asked["id"]})["result"])


def test_doors_without_metadata_take_none(serving: Daemon) -> None:
    """The native door and MCP refuse a member that they do not know; the simple one has no place for it."""
    client = Client(serving, operator_token(serving.home))
    for forged in ({"metadata": said_under(REMOTE)}, {REMOTE: {"name": FORGED}}, {"target": {"name": FORGED}}):
        refused = client.ask("POST", "/v1/orchestrate", {"message": "show", "agent": "mirror", **forged})
        assert refused.status == 400, refused
    part = {"type": "text", "text": "show", "metadata": said_under(REMOTE)}
    assert client.ask("POST", "/v1/orchestrate", {"message": [part], "agent": "mirror"}).status == 400
    target = {"name": FORGED}
    sent = client.ask(
        "POST", "/a2a/tasks/send", {"message": "show", "metadata": {REMOTE: target}, "target": target, REMOTE: target}
    )
    assert sent.status in (200, 201, 202), sent
    shown = client.ask("GET", f"/a2a/tasks/{sent.json['id']}/show")
    assert FORGED not in shown.body.decode()
    assert "target" not in shown.json["task"]
    arguments = {"agent": "mirror", "message": "show", "metadata": {REMOTE: {"name": FORGED}}}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "send_task", "arguments": arguments}}
    answer = client.ask("POST", "/mcp", call, Accept="application/json, text/event-stream")
    assert answer.status == 200, answer
    assert "unknown key /metadata" in answer.body.decode()


@pytest.mark.parametrize("door", ["http", "ipc"])
def test_the_mailbox_keeps_no_reserved_key_of_a_task_an_update_or_a_result(serving: Daemon, door: str) -> None:
    operator = Client(serving, operator_token(serving.home))
    name = f"worker-{door}@here"
    worker = serving.json("identities", "enroll", name)
    block = {"type": "text", "text": "go", "metadata": said_under(REMOTE)}
    serving.json("capabilities", "grant", f"a2a.send.{name}")
    sent = {"id": str(uuid4()), "recipient": {"display": name}, "intent_text": "go", "parts": [block]}
    forged = {"target": {"name": FORGED}, "request_metadata": {REMOTE: {"name": FORGED}}, "metadata": {REMOTE: FORGED}}
    status = {"type": "status", "text": "on it", "metadata": said_under(PROOF), "parts": [block]}
    working = Client(serving, worker["token_b58"])
    with (
        closing(Ipc(serving.home, operator_token(serving.home))) as ipc,
        closing(Ipc(serving.home, worker["token_b58"])) as ipc_working,
    ):
        if door == "ipc":
            assert ipc.ask("send_a2a_task", task=sent | forged)["kind"] == "a2a_task_queued"
            taken = ipc_working.ask("try_recv_a2a_task")
        else:
            assert operator.ask("POST", "/a2a/tasks", sent | forged).status == 200
            taken = working.ask("GET", "/a2a/tasks/next").json
        assert taken["task"]["parts"][0]["metadata"] == {"mine": "kept"}
        assert not {"target", "metadata", "request_metadata"} & taken["task"].keys()
        lease = {"task_id": sent["id"], "lease_id": taken["lease"]["lease_id"]}
        if door == "ipc":
            assert ipc_working.ask("update_a2a_task", **lease, update=status)["kind"] == "a2a_task_updated"
        else:
            at = f"/a2a/tasks/{sent['id']}/updates"
            assert working.ask("POST", at, {**lease, "update": status}).status == 200
    shown = operator.ask("GET", f"/a2a/tasks/{sent['id']}/show").json
    assert FORGED not in json.dumps(shown)
    assert [each["body"]["metadata"] for each in shown["updates"] if each["kind"] == "status"] == [{"mine": "kept"}]


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


def test_no_client_of_another_tenant_reaches_an_entry_of_the_operators_registry(
    start_daemon: StartDaemon, short_path: Path, listener: Listener
) -> None:
    """Nor anybody without a token, at a published agent: by metadata, or by an agent of the entry's name."""
    home = short_path / "home"
    home.mkdir(mode=0o700)
    entry = {"url": listener.url, "auth": {"type": "bearer", "token": "operators-secret"}}
    (home / "a2a_agents.json").write_text(json.dumps({"agents": {"vault": entry}}))
    daemon = start_daemon(env=GRPC_ON | {"COVENANT_A2A_PUBLISH": "away", "COVENANT_A2A_PUBLISH_ANONYMOUS": "loopback"})
    listener.connections()  # its card is looked for at the start, for the first tenant
    acme = Client(daemon, daemon.json("tenants", "add", "acme")["token"])
    nowhere = {"id": "away", "kind": "remote", "url": "http://127.0.0.1:9/"}
    for tenant, definition in (
        ("default", nowhere),
        ("acme", nowhere),
        ("acme", {"id": "vault", "kind": "remote"}),
    ):
        file = short_path / f"{definition['id']}.json"
        file.write_text(json.dumps(definition))
        daemon.json("agents", "add", "--tenant", tenant, "--file", str(file))
    before = listener.connections()
    targets = ({"name": "vault"}, {"url": listener.url}, {"name": "vault", "url": listener.url}, {"name": "x"})
    told = [
        door(client, "away", "hello", {REMOTE: target})
        for door in A2A_DOORS.values()
        for target in targets
        for client in (acme, Client(daemon, None))
    ]
    told += [door(acme, "vault", "hello", {}) for door in A2A_DOORS.values()]
    words = json.dumps(told)
    assert all(task["status"]["state"] in ("TASK_STATE_FAILED", "failed") for task in told), told
    assert str(home) not in words
    assert "operators-secret" not in words
    assert "it has vault" not in words
    assert listener.connections() == 0, f"{before} before the attack"
