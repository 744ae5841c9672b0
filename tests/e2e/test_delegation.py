"""Real daemons that call each other: chains end, time shrinks, cancels go down, and crashes lose nothing."""

import asyncio
from pathlib import Path
from typing import Any

from covenant.worker import Worker, WorkerJob
from tests.e2e.linked_daemons import LinkedDaemons, open_linked_daemons, states, told, until
from tests.waits import BOUND_S, LONGER_S


def pair(daemons: LinkedDaemons, *flags: str) -> tuple[Any, Any]:
    a, b = daemons.start("a", *flags), daemons.start("b", *flags)
    a.knows(b=(b, "relay"), held_b=(b, "held"), asker_b=(b, "asker"), echo_b=(b, "echo"))
    b.knows(a=(a, "relay"))
    return a, b


def test_a_chain_that_comes_back_is_stopped_and_both_trees_say_so(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a, b = pair(daemons)
        task = a.send("relay", "b a .")
        assert "is in this chain of calls already" in told(task)
        (child,) = a.tree(task["id"])["children"]
        (there,) = b.tasks("relay")
        assert (child["remote"], child["remote_task_id"]) == (True, there["id"])
        assert child["url"] == f"{b.daemon.url}/v1/a2a/agents/relay"
        tree = b.tree(there["id"])
        assert states(tree) == ["completed", "failed"]
        assert tree["children"][0]["remote"] is True
        assert len(a.tasks("relay")) == 1
        assert f" b ⇄ {b.daemon.url}/v1/a2a/agents/relay (" in a.daemon.run("a2a", "tree", task["id"]).out
        # An agent that calls itself, or one that calls it back here, is stopped before anything is sent.
        assert "failed" in a.send("relay", "relay .")["status"]["state"].lower()


def test_depth_is_counted_over_three_daemons_and_time_only_shrinks(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a, b = pair(daemons)
        c = daemons.start("c")
        b.knows(c=(c, "relay"))
        said = a.ask("relay", "b c .")
        assert said == "a>completed: b>completed: end depth=2 chain=2 deadline=None"
        task = a.send("hurried", "90000 b c .")
        (here,) = a.tree(task["id"])["children"]
        deadline = here["task"]["deadline_ms"]
        there, beyond = b.tasks("relay")[-1], c.tasks("relay")[-1]
        assert b.show(there["id"])["task"]["deadline_ms"] == deadline
        assert c.show(beyond["id"])["task"]["deadline_ms"] == deadline
        assert c.show(beyond["id"])["task"]["timeout_ms"] <= 90_000
        assert told(task).endswith(f"deadline={deadline}")
        c.kill()
        c.again("--delegation-depth-max", "1")
        assert "2 deep in a chain of calls; at most 1 are allowed" in a.ask("relay", "b c .")
        assert len(c.tasks("relay")) == 2


def test_a_call_whose_time_is_over_ends_on_both_sides(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a, b = pair(daemons)
        for seconds in LONGER_S:
            task = a.send("hurried", f"{int(seconds * 1000)} b slow")
            assert told(task).startswith(("canceled", "failed"))
            if daemons.runs():  # it came as far as that
                break
        there = b.tasks("relay")[-1]
        tree = b.tree_when(there["id"], lambda tree: not {"working", "submitted"} & set(states(tree)))
        assert tree["children"][0]["a2a_state"] in ("canceled", "failed")


def test_a_cancel_goes_down_through_both_daemons(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a, b = pair(daemons)
        task = a.send("relay", "b slow", wait=False)
        daemons.begun("b slow .")
        a.cancel("relay", task["id"])
        assert states(a.tree_when(task["id"], lambda tree: "working" not in states(tree))) == ["canceled", "canceled"]
        (there,) = b.tasks("relay")
        tree = b.tree_when(there["id"], lambda tree: "working" not in states(tree))
        assert states(tree) == ["canceled", "canceled"]


def test_a_question_from_elsewhere_is_answered_and_one_that_nobody_answers_is_called_off(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a, b = pair(daemons)
        assert a.ask("passer", "asker_b") == "completed: so it is the second"
        task = a.send("relay", "asker_b")
        assert told(task) == "a>input-required: which one?"
        # The parent has ended, and so has its question, here and there.
        tree = a.tree_when(task["id"], lambda tree: "input-required" not in states(tree))
        assert states(tree) == ["completed", "canceled"]
        asked = b.tasks("asker")[-1]
        assert b.ended("asker", asked["id"])["status"]["state"] == "TASK_STATE_CANCELED"


def test_what_an_agent_elsewhere_used_in_several_turns_is_counted_once(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a, b = pair(daemons)
        task = a.send("passer", "asker_b")
        (there,) = b.tasks("asker")
        assert b.tree(there["id"])["usage_total"] == {"tokens": 200}
        assert a.tree(task["id"])["usage_total"] == {"tokens": 200}


def test_a_killed_caller_finds_what_it_had_asked_for_and_asks_nobody_twice(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a, b = pair(daemons)
        task = a.send("once", "held_b", wait=False)
        daemons.begun("b held the work")
        (child,) = a.tree_when(task["id"], lambda tree: bool(tree["children"][0].get("remote_task_id")))["children"]
        a.kill()
        daemons.open()
        (there,) = b.tasks("held")
        assert told(b.ended("held", there["id"])) == "begun ended"
        a.again()
        tree = a.tree(task["id"])
        assert [tree["holder_lost"], tree["children"][0]["holder_lost"]] == [True, True]
        # In either order: the caller begins again and waits for the call that is there, which follows its task there.
        a.requeue(task["id"])
        a.requeue(child["task_id"])
        assert told(a.ended("once", task["id"])) == "attempt 2: completed begun ended"
        tree = a.tree(task["id"])
        assert (states(tree), [tree["attempt"], tree["children"][0]["attempt"]]) == (["completed"] * 2, [2, 2])
        assert (tree["usage_total"], tree["children"][0]["remote_task_id"]) == ({"tokens": 11}, there["id"])
        assert daemons.runs() == ["b held the work"]
        assert len(b.tasks("held")) == 1


def test_a_killed_callee_is_waited_for_and_its_answer_comes_when_it_is_repaired(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a, b = pair(daemons)
        task = a.send("once", "held_b", wait=False)
        daemons.begun("b held the work")
        a.tree_when(task["id"], lambda tree: bool(tree["children"][0].get("remote_task_id")))
        b.kill()
        b.again()
        (there,) = b.tasks("held")
        assert b.tree(there["id"])["holder_lost"] is True
        daemons.open()
        b.requeue(there["id"])
        assert told(a.ended("once", task["id"])) == "attempt 1: completed begun ended"
        assert states(a.tree(task["id"])) == ["completed", "completed"]
        assert len(b.tasks("held")) == 1


def test_both_killed_at_once_leave_nothing_lost_and_nothing_doubled(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a, b = pair(daemons)
        task = a.send("once", "held_b", wait=False)
        daemons.begun("b held the work")
        (child,) = a.tree_when(task["id"], lambda tree: bool(tree["children"][0].get("remote_task_id")))["children"]
        a.kill()
        b.kill()
        b.again()
        a.again()
        daemons.open()
        (there,) = b.tasks("held")
        b.requeue(there["id"])
        b.ended("held", there["id"])
        a.requeue(child["task_id"])
        a.requeue(task["id"])
        assert told(a.ended("once", task["id"])) == "attempt 2: completed begun ended"
        assert daemons.runs() == ["b held the work"] * 2
        assert len(b.tasks("held")) == 1


def test_a_parent_that_was_canceled_by_a_daemon_that_died_takes_its_calls_with_it_after_the_restart(
    short_path: Path,
) -> None:
    with open_linked_daemons(short_path) as daemons:
        a = daemons.start("a")
        task = a.send("relay", "slow", wait=False)
        daemons.begun("a slow .")
        a.kill()
        a.again()
        assert a.tree(task["id"])["holder_lost"] is True
        a.cancel("relay", task["id"])
        a.kill()
        a.again()
        tree = a.tree_when(task["id"], lambda tree: "working" not in states(tree))
        assert states(tree) == ["canceled", "canceled"]


def test_fifty_calls_at_once_a_race_and_a_vote(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a = daemons.start("a")
        task = a.send("fan", "50")
        assert told(task) == " ".join(f"echo n{n}" for n in range(50))
        tree = a.tree(task["id"])
        assert (len(tree["children"]), tree["usage_total"]) == (50, {"tokens": 350})
        assert task["metadata"]["covenant.usage"] == {"tokens": 350}
        task = a.send("race", "go")
        assert told(task) == "echo y"
        assert sorted(states(a.tree(task["id"]))) == ["canceled", "canceled", "completed", "completed"]
        task = a.send("vote", "go")
        assert told(task) == "echo y echo z"
        assert sorted(states(a.tree(task["id"]))) == ["canceled", "completed", "completed", "completed"]
        assert told(a.send("fan", "101")) == "the agent failed"
        assert "INVOCATION_LIMIT" in a.daemon.log


def test_a_fan_out_survives_a_kill_and_runs_only_what_had_not_ended(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a = daemons.start("a")
        task = a.send("steady", "go", wait=False)
        until(daemons.runs, lambda runs: len(runs) >= 10)
        a.tree_when(task["id"], lambda tree: states(tree).count("completed") == 4)
        a.kill()
        daemons.open()
        a.again()
        assert told(a.ended("steady", task["id"])) == "attempt 2: " + " ".join(["completed"] * 10)
        tree = a.tree(task["id"])
        assert (tree["attempt"], len(tree["children"])) == (2, 10)
        runs = daemons.runs()
        assert sorted(runs) == sorted([f"a echo e{n}" for n in range(4)] + [f"a gated g{n}" for n in range(6)] * 2)


def test_a_caller_that_was_killed_after_the_answer_hears_it_again_without_asking(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a, _ = pair(daemons)
        tasks = {name: a.send("late", name, wait=False)["id"] for name in ("echo", "echo_b")}
        for task in tasks.values():
            a.tree_when(task, lambda tree: states(tree) == ["working", "completed"])
        a.kill()
        a.again()
        for name, task in tasks.items():
            a.requeue(task)
            assert told(a.ended("late", task)) == "heard echo the work; attempt 2", name
            assert states(a.tree(task)) == ["completed", "completed"]
        assert sorted(daemons.runs()) == ["a echo the work", "b echo the work"]


async def test_a_worker_outside_is_called_as_any_other_agent(short_path: Path) -> None:
    with open_linked_daemons(short_path) as daemons:
        a = daemons.start("a")
        a.daemon.json("agents", "add", "helper", "--kind", "worker")
        token = a.daemon.json("identities", "enroll", "helper@default")["token_b58"]
        worker = Worker(a.daemon.url, token)

        @worker
        async def shout(job: WorkerJob) -> str:
            return f"{job.text.upper()}!"

        running = asyncio.create_task(worker.run())
        try:
            said = await asyncio.to_thread(a.ask, "relay", "helper hello")
        finally:
            worker.stop()
            async with asyncio.timeout(BOUND_S):
                await running
        assert said == "a>completed: HELLO!"
