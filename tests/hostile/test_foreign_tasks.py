"""A task of another tenant is unknown by every door, and costs no more than none at all. No key finds it."""

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Final
from uuid import uuid4

import pytest

from tests.cli.daemons import Daemon
from tests.hostile.client import Answer, operator_token
from tests.hostile.conftest import StartDaemon
from tests.hostile.doors import Client, message_v1

AGENTS: Final = """
from covenant import Agent, Turn

flood = Agent("flood")
echo = Agent("echo")


@flood
async def pour(turn: Turn):
    for number in range(900):
        yield turn.data({"n": number, "text": "x" * 2_000})


@echo
async def say(turn: Turn):
    yield turn.text
"""
LOOKS: Final = 5
PLACE: Final = re.compile(r"[cm]?[0-9a-f]+-[0-9a-f]+")
"""A place in the ledger: a moment, and a number that grows with every record of everybody."""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("f")
    (folder / "agents.py").write_text(AGENTS)
    daemon = Daemon(folder / "h", str(folder / "agents.py"))
    yield daemon
    daemon.stop()


def worked_s(daemon: Daemon) -> float:
    """How long the daemon's threads have run on a processor: what others do on the machine is not in it."""
    return time.clock_gettime((~daemon.process.pid << 3) | 2)  # the clock that clock_getcpuclockid(3) names


def cheapest(daemon: Daemon, look: Callable[[], Answer], enough_s: float = 0.0) -> tuple[float, Answer]:
    """The least work of a few tries, or of many if none is cheap enough: the daemon also does what nobody asks for."""
    answer, least_s = look(), float("inf")
    for tries in range(20 * LOOKS):
        before_s = worked_s(daemon)
        answer = look()
        least_s = min(least_s, worked_s(daemon) - before_s)
        if tries >= LOOKS and (not enough_s or least_s < enough_s):
            break
    return least_s, answer


def test_a_huge_task_of_another_tenant_costs_a_stranger_as_little_as_no_task_at_all(serving: Daemon) -> None:
    """For its owner all its steps are read and folded; for a stranger, by any door, none of them."""
    owner = Client(serving, operator_token(serving.home))
    stranger = Client(serving, serving.json("tenants", "add", "acme")["token"])
    worker = Client(serving, serving.json("identities", "enroll", "worker@here")["token_b58"])
    begun = owner.rpc("flood", "SendMessage", {"message": message_v1("go")})["result"]["task"]
    assert begun["status"]["state"] == "TASK_STATE_COMPLETED"

    def rpc(method: str, task_id: str) -> Callable[[], Answer]:
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"id": task_id, "taskId": task_id}}
        return lambda: stranger.ask("POST", "/v1/a2a/agents/index", call)

    def looks(task_id: str) -> dict[str, Callable[[], Answer]]:
        return {
            "GetTask": rpc("GetTask", task_id),
            "SubscribeToTask": rpc("SubscribeToTask", task_id),
            "CancelTask": rpc("CancelTask", task_id),
            "tasks/get": rpc("tasks/get", task_id),
            "rest": lambda: stranger.ask("GET", f"/v1/a2a/agents/index/tasks/{task_id}"),
            "native": lambda: stranger.ask("GET", f"/v1/requests/{task_id}"),
            "native events": lambda: stranger.ask("GET", f"/v1/requests/{task_id}/events"),
            "native cancel": lambda: stranger.ask("POST", f"/v1/requests/{task_id}/cancel"),
            "simple": lambda: stranger.ask("GET", f"/a2a/tasks/{task_id}"),
            "mailbox show": lambda: worker.ask("GET", f"/a2a/tasks/{task_id}/show"),
            "mailbox cancel": lambda: worker.ask("POST", f"/a2a/tasks/{task_id}/cancel", {"reason": "mine"}),
            "mailbox result": lambda: worker.ask("POST", "/a2a/results", {"task_id": task_id, "status": "ok"}),
        }

    reading_s, read = cheapest(serving, lambda: owner.ask("GET", f"/v1/a2a/agents/flood/tasks/{begun['id']}"))
    assert len(read.body) > 1_000_000
    nobodys = looks(str(uuid4()))
    for name, look in looks(begun["id"]).items():
        unknown_s, unknown = cheapest(serving, nobodys[name])
        enough_s = max(reading_s / 4, 2 * unknown_s)  # some of them write
        worked, answer = cheapest(serving, look, enough_s)
        assert (answer.status, len(answer.body)) == (unknown.status, len(unknown.body)), name
        assert worked < enough_s, f"{name}: {worked * 1000:.1f} ms, and for its owner {reading_s * 1000:.1f} ms"


def unkeyed(tenant: str, agent: str, key: str) -> str:
    """The id that a key would have without the daemon's secret."""
    h = hashlib.sha256(f"{tenant}\0client@{tenant}\0{agent}\0{key}".encode()).hexdigest()
    return f"{h[:8]}-{h[8:12]}-8{h[13:16]}-{'89ab'[int(h[16], 16) & 3]}{h[17:20]}-{h[20:32]}"


def test_no_other_caller_can_tell_or_use_up_the_id_of_a_key(start_daemon: StartDaemon) -> None:
    """A mailbox identity names its tasks itself. The ids that it can compute are nobody's."""
    daemon = start_daemon()
    acme = Client(daemon, daemon.json("tenants", "add", "acme")["token"])
    operator = Client(daemon, operator_token(daemon.home))
    daemon.json("capabilities", "grant", "a2a.send.sink@here")
    daemon.json("identities", "enroll", "sink@here")

    def used(key: str) -> str:
        answer = acme.rpc("index", "SendMessage", {"message": message_v1("hello", messageId="m")}, Idempotency_Key=key)
        task_id = answer["result"]["task"]["id"]
        assert isinstance(task_id, str)
        return task_id

    def squatted(task_id: str) -> Answer:
        return operator.ask(
            "POST", "/a2a/tasks", {"id": task_id, "recipient": {"display": "sink@here"}, "intent_text": "mine"}
        )

    known = used("order-1")
    assert known != unkeyed("acme", "index", "order-1")
    assert squatted(unkeyed("acme", "index", "order-1")).status == 200, "a key that was used is not told apart"
    assert squatted(unkeyed("acme", "index", "order-2")).status == 200
    fresh = used("order-2")
    assert fresh not in (known, unkeyed("acme", "index", "order-2")), "a key is not used up by others"
    assert used("order-1") == known
    daemon.stop()
    again = start_daemon()
    acme = Client(again, acme.token)
    assert used("order-1") == known, "the same after a restart"
    assert used("order-2") == fresh


def test_a_cursor_counts_no_tasks_of_others_and_is_good_for_one_tenant_alone(serving: Daemon) -> None:
    owner, other = (Client(serving, serving.json("tenants", "add", name)["token"]) for name in ("counts", "others"))
    for name in ("counts", "others"):
        serving.json("agents", "add", "later", "--tenant", name)
    sent = {"configuration": {"returnImmediately": True}}
    ids = [
        owner.rpc("later", "SendMessage", {"message": message_v1("x"), **sent})["result"]["task"]["id"]
        for _ in range(3)
    ]

    def listed(who: Client, token: str = "") -> dict[str, Any]:
        return who.rpc("later", "ListTasks", {"pageSize": 2, "pageToken": token})

    def found(who: Client, after: str = "") -> Answer:
        return who.ask("GET", f"/a2a/tasks?limit=2&after={after}")

    first, page = listed(owner)["result"], found(owner).json
    assert not PLACE.fullmatch(first["nextPageToken"])
    assert not PLACE.fullmatch(page["next"])
    assert [each["id"] for each in listed(owner, first["nextPageToken"])["result"]["tasks"]] == ids[:1]
    rest = found(owner, page["next"]).json
    assert ([each["task_id"] for each in rest["tasks"]], rest["next"]) == (ids[:1], None)
    assert listed(other, first["nextPageToken"])["error"]["code"] == -32602
    refused = found(other, page["next"])
    assert (refused.status, refused.json["code"]) == (400, "invalid_cursor")
    for made in ("c0-0", "00", "zz", f"{page['next']}00"):
        assert found(owner, made).status == 400
