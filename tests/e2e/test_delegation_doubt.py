"""Calls whose answer never came: who does not know whether it was heard asks again under the same key."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.linked_daemons import LinkedDaemon, LinkedDaemons, open_linked_daemons, states, told
from tests.e2e.silence import Silence
from tests.waits import BOUND_S


def through(port: int, caller: LinkedDaemon, callee: LinkedDaemon, agent: str = "held", **declared: Any) -> None:
    """The caller's catalogue has `far`, an agent of the callee, at this port."""
    (caller.home / "agents").mkdir(exist_ok=True)
    (caller.home / "agents" / "far.json").write_text(json.dumps({"kind": "remote", **declared}))
    entry = {
        "url": f"http://127.0.0.1:{port}/v1/a2a/agents/{agent}",
        "auth": {"type": "bearer", "token": callee.token},
    }
    (caller.home / "a2a_agents.json").write_text(json.dumps({"agents": {"far": entry}}))


def unheard(daemons: LinkedDaemons, line: Silence, a: LinkedDaemon) -> tuple[str, dict[str, Any]]:
    """A call that reached its callee, whose answer did not come back, and whose caller was killed then."""
    line.silent = True
    task: str = a.send("once", "far", wait=False)["id"]
    assert line.swallowed.wait(BOUND_S)
    daemons.begun("b held the work")
    (child,) = a.tree(task)["children"]
    a.kill()
    line.hang_up()
    line.silent = False
    assert child["remote_task_id"] is None
    return task, child


@pytest.mark.parametrize("how", ["by itself", "by the gate", "by the operator"])
def test_a_call_that_is_made_again_is_the_same_call_to_the_callee(short_path: Path, how: str) -> None:
    with open_linked_daemons(short_path) as daemons:
        a, b = daemons.start("a"), daemons.start("b")
        assert b.port is not None
        with Silence(b.port) as line:
            declared: dict[str, dict[str, Any]] = {
                "by itself": {"idempotent": True, "on_lost": "requeue"},
                "by the gate": {"idempotent": True},
                "by the operator": {},
            }
            through(line.port, a, b, **declared[how])
            a.kill()
            a.again()
            task, child = unheard(daemons, line, a)
            a.again()
            if how == "by the gate":
                a.daemon.json("capabilities", "grant", "a2a.repair.requeue")
                words = ("a2a", "retry-stale", "--enable", "--min-lease-age-ms", "0", "--max-requeues", "10")
                report = a.daemon.json(*words)["report"]
                assert [each["task_id"] for each in report["requeued"]] == [child["task_id"]]
                assert report["requeued"][0]["idempotency_key"] == child["task_id"]
            elif how == "by the operator":
                a.requeue(child["task_id"])
            a.requeue(task)
            daemons.open()
            assert told(a.ended("once", task)) == "attempt 2: completed begun ended"
            (there,) = b.tasks("held")
            tree = a.tree(task)
            assert (states(tree), tree["children"][0]["remote_task_id"]) == (["completed"] * 2, there["id"])
            assert daemons.runs() == ["b held the work"]


def test_a_caller_that_is_stopped_leaves_its_call_at_work_and_finds_it_again(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a, b = daemons.start("a", "--daemon-grace-ms", "200"), daemons.start("b")
        a.knows(held_b=(b, "held"))
        task = a.send("once", "held_b", wait=False)["id"]
        daemons.begun("b held the work")
        (child,) = a.tree_when(task, lambda tree: bool(tree["children"][0].get("remote_task_id")))["children"]
        assert a.daemon.stop() == 0
        (there,) = b.tasks("held")
        assert there["status"]["state"] == "TASK_STATE_WORKING"
        a.again()
        assert a.tree(task)["holder_lost"] is True
        a.requeue(child["task_id"])
        a.requeue(task)
        daemons.open()
        assert told(a.ended("once", task)) == "attempt 2: completed begun ended"
        assert daemons.runs() == ["b held the work"]


def test_a_remote_agent_hears_the_words_and_nothing_of_the_house(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a, b = daemons.start("a"), daemons.start("b")
        a.knows(echo_b=(b, "echo"))
        metadata = {"secret": "canary-metadata"}
        message: dict[str, Any] = {"metadata": metadata, "contextId": "canary-context"}
        assert told(a.send("relay", "echo_b canary-words", **message)).endswith("echo canary-words")
        (there,) = b.tasks("echo")
        seen = b.show(there["id"])
        assert not seen["task"].get("metadata"), "what the other daemon said under reserved keys is read, and not kept"
        whole = json.dumps(seen)
        hidden = ("canary-metadata", "canary-context", "relay", a.token, b.token, str(a.port))
        assert [each for each in hidden if each in whole] == []
        assert "canary-words" in whole


def test_what_was_canceled_while_its_daemon_was_dead_is_canceled_elsewhere_after_the_start(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a, b = daemons.start("a"), daemons.start("b")
        a.knows(slow_b=(b, "slow"))
        task = a.send("once", "slow_b", wait=False)["id"]
        daemons.begun("b slow the work")
        a.tree_when(task, lambda tree: bool(tree["children"][0].get("remote_task_id")))
        a.kill()
        a.again()
        a.cancel("once", task)
        assert states(a.tree_when(task, lambda tree: "working" not in states(tree))) == ["canceled", "canceled"]
        (there,) = b.tasks("slow")
        assert b.ended("slow", there["id"])["status"]["state"] == "TASK_STATE_CANCELED"


def test_callers_that_are_killed_again_and_again_have_each_thing_done_once(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a = daemons.start("a", "--a2a-agent-concurrency", "4", "--delegation-remote-concurrency", "3")
        b = daemons.start("b")
        assert b.port is not None
        through(b.port, a, b, "nap", idempotent=True, on_lost="requeue")
        a.kill()
        a.again()
        tasks = [a.send("sure", f"n{number}", wait=False)["id"] for number in range(12)]
        for runs in (2, 6):
            daemons.ran(runs)
            a.kill()
            a.again()
        for number, task in enumerate(tasks):
            assert told(a.ended("sure", task)) == f"completed rested n{number}"
        there = b.tasks("nap")
        children = [child for task in tasks for child in a.tree(task)["children"]]
        assert [len(children), len(there)] == [12, 12]
        assert sorted(child["remote_task_id"] for child in children) == sorted(task["id"] for task in there)
        assert sorted(daemons.runs()) == sorted(f"b nap n{number}" for number in range(12))
