"""Real daemons on loopback, each with the same agents, that know each other by name and call each other."""

import http.client
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from tests.cli.daemons import Daemon
from tests.places import free_port
from tests.waits import BOUND_S

T = TypeVar("T")

LOOK_S: Final = 0.05

AGENTS: Final = '''
import asyncio, os, pathlib
from covenant import Agent

FOLDER = pathlib.Path(os.environ["DAEMONS_FOLDER"])
NODE = os.environ["DAEMONS_NODE"]

relay, hurried = Agent("relay"), Agent("hurried")
echo, slow = Agent("echo"), Agent("slow")
gated = Agent("gated", idempotent=True, on_lost="requeue")
held = Agent("held")
fan, race, vote = Agent("fan"), Agent("race"), Agent("vote")
steady = Agent("steady", idempotent=True, on_lost="requeue")
once, asker, passer = Agent("once"), Agent("asker"), Agent("passer")
late = Agent("late")
sleeper, payee, judge = Agent("sleeper"), Agent("payee"), Agent("judge")
talker = Agent("an-agent-that-was-named-after-its-team-and-after-its-purpose")
sure, nap = (Agent(name, idempotent=True, on_lost="requeue") for name in ("sure", "nap"))


def ran(turn, name):
    """Which work ran here, how often: the effect that must not be doubled."""
    with (FOLDER / "runs").open("a") as file:
        file.write(f"{NODE} {name} {turn.text}\\n")


async def gate(name):
    while not (FOLDER / name).exists():
        await asyncio.sleep(0.02)


@relay
async def pass_on(turn):
    """`b slow`: call b, and have it call slow."""
    words = turn.text.split()
    task = turn.task
    if words == ["."]:
        return f"end depth={task.depth} chain={len(task.chain)} deadline={task.deadline_ms}"
    answer = await turn.call(words[0], " ".join(words[1:]) or ".")
    return f"{NODE}>{answer.state}: {answer.text}"


@hurried
async def hurry(turn):
    """`500 b slow`"""
    timeout, first, *rest = turn.text.split()
    answer = await turn.call(first, " ".join(rest) or ".", timeout_ms=int(timeout))
    return f"{answer.state}: {answer.text}"


@echo
async def say(turn):
    ran(turn, "echo")
    turn.spend(7)
    return f"echo {turn.text}"


@slow
async def dawdle(turn):
    ran(turn, "slow")
    yield "begun"
    await asyncio.Event().wait()


@gated
async def wait_for_it(turn):
    ran(turn, "gated")
    yield "begun"
    await gate("open")
    (FOLDER / f"done-{turn.text}").touch()


@held
async def wait_and_tell(turn):
    ran(turn, "held")
    yield "begun "
    await gate("open")
    turn.spend(11)
    yield "ended"


@fan
async def fan_out(turn):
    answers = await turn.call_all([("echo", f"n{n}") for n in range(int(turn.text))])
    return " ".join(answer.text for answer in answers)


@race
async def first_one(turn):
    answer = await turn.call_first([("slow", "x"), ("echo", "y"), ("slow", "z")])
    return answer.text


@vote
async def two_of_three(turn):
    answers = await turn.call_quorum(2, [("slow", "x"), ("echo", "y"), ("echo", "z")])
    return " ".join(sorted(answer.text for answer in answers))


@steady
async def many_gated(turn):
    answers = await turn.call_all([("gated", f"g{n}") for n in range(6)] + [("echo", f"e{n}") for n in range(4)])
    return f"attempt {turn.attempt}: " + " ".join(f"{answer.state}" for answer in answers)


@once
async def call_once(turn):
    answer = await turn.call(turn.text, "the work")
    return f"attempt {turn.attempt}: {answer.state} {answer.text}"


@sure
async def ask_surely(turn):
    answer = await turn.call("far", turn.text, idempotent=True)
    return f"{answer.state} {answer.text}"


@nap
async def doze(turn):
    ran(turn, "nap")
    await asyncio.sleep(0.4)
    return f"rested {turn.text}"


@late
async def think_after(turn):
    answer = await turn.call(turn.text, "the work")
    yield f"heard {answer.text}; "
    if turn.attempt == 1:
        await asyncio.Event().wait()
    yield f"attempt {turn.attempt}"


@asker
async def ask(turn):
    turn.spend(100)
    if turn.turn == 1:
        yield turn.need_input("which one?")
    else:
        yield f"so it is {turn.text}"


@sleeper
async def sleep_long(turn):
    await turn.sleep(3_600)


@payee
async def wait_for_money(turn):
    return f"paid by {await turn.wait_for('paid')}"


@judge
async def ask_for_approval(turn):
    decision = await turn.approve(f"Pay {turn.text}?")
    return f"approved={bool(decision)} {decision.reason}"


@talker
async def talk(turn):
    for number in range(int(turn.text)):
        yield f"{number} "


@passer
async def ask_through(turn):
    answer = await turn.call(turn.text, "do it")
    assert answer.waits, answer
    answer = await turn.answer(answer, "the second")
    yield f"{answer.state}: {answer.text}"
'''


class LinkedDaemon:
    """One daemon, which can be killed and started again where it was."""

    def __init__(self, folder: Path, name: str, *flags: str) -> None:
        self.name = name
        self.home = folder / name
        self._folder = folder
        self._flags = flags
        (folder / "agents.py").write_text(AGENTS)
        self.port = free_port()
        self.daemon = self._start()

    def _start(self) -> Daemon:
        env = {"DAEMONS_FOLDER": str(self._folder), "DAEMONS_NODE": self.name}
        return Daemon(self.home, str(self._folder / "agents.py"), *self._flags, "--http-port", str(self.port), env=env)

    def kill(self) -> None:
        assert self.daemon.stop(signal.SIGKILL) == -signal.SIGKILL

    def again(self, *flags: str) -> None:
        self._flags = flags or self._flags
        self.daemon = self._start()

    @property
    def token(self) -> str:
        return (self.home / "operator.token").read_text().strip()

    def knows(self, **others: tuple["LinkedDaemon", str]) -> None:
        """By these names, an agent of each of these others."""
        agents = {
            name: {"url": f"{other.daemon.url}/v1/a2a/agents/{agent}", "auth": {"type": "bearer", "token": other.token}}
            for name, (other, agent) in others.items()
        }
        (self.home / "a2a_agents.json").write_text(json.dumps({"agents": agents}))

    def rpc(self, agent: str, method: str, **params: Any) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=BOUND_S)
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json", "A2A-Version": "1.0"}
        try:
            connection.request("POST", f"/v1/a2a/agents/{agent}", body, headers)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        assert "result" in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def send(self, agent: str, text: str, *, wait: bool = True, **more: Any) -> dict[str, Any]:
        message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": text}], **more}
        task: dict[str, Any] = self.rpc(
            agent, "SendMessage", message=message, configuration={"returnImmediately": not wait}
        )["task"]
        return task

    def ask(self, agent: str, text: str) -> str:
        """What the agent says in the end."""
        return told(self.send(agent, text))

    def ended(self, agent: str, task_id: str) -> dict[str, Any]:
        return until(lambda: self.rpc(agent, "GetTask", id=task_id), is_over)

    def cancel(self, agent: str, task_id: str) -> None:
        self.rpc(agent, "CancelTask", id=task_id)

    def tree(self, task_id: str) -> dict[str, Any]:
        tree: dict[str, Any] = self._get(f"/a2a/tasks/{task_id}/tree")["tree"]
        return tree

    def tree_when(self, task_id: str, met: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        return until(lambda: self.tree(task_id), met)

    def show(self, task_id: str) -> dict[str, Any]:
        return self.daemon.json("a2a", "show", task_id)

    def tasks(self, agent: str) -> list[dict[str, Any]]:
        """All that were ever sent to one of its agents, the oldest first."""
        found: list[dict[str, Any]] = self.rpc(agent, "ListTasks", pageSize=100).get("tasks", [])
        return found[::-1]

    def requeue(self, task_id: str) -> None:
        self.daemon.json("capabilities", "grant", "a2a.repair.requeue")
        words = (
            "a2a",
            "requeue",
            task_id,
            "--reason",
            "its daemon was killed",
            "--duplicate-risk",
            "operator-accepted",
        )
        ran = self.daemon.run(*words)
        assert ran.code == 0, ran

    def _get(self, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=BOUND_S)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
        finally:
            connection.close()


class LinkedDaemons:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, LinkedDaemon] = {}

    def start(self, name: str, *flags: str) -> LinkedDaemon:
        flags = ("--delegation-cooldown-ms", "0", *flags)
        self.daemons[name] = daemon = LinkedDaemon(self.folder, name, *flags)
        return daemon

    def runs(self) -> list[str]:
        path = self.folder / "runs"
        return path.read_text().splitlines() if path.exists() else []

    def open(self) -> None:
        """What waits at the gate goes on."""
        (self.folder / "open").touch()

    def ran(self, count: int) -> None:
        """Wait until so much work has begun."""
        until(self.runs, lambda runs: len(runs) >= count)

    def begun(self, line: str, count: int = 1) -> None:
        """Wait until this work has run so often."""
        until(self.runs, lambda runs: runs.count(line) >= count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for daemon in self.daemons.values():
            if daemon.daemon.process.poll() is None:
                daemon.daemon.stop(signal.SIGKILL)


@contextmanager
def open_linked_daemons(folder: Path) -> Iterator[LinkedDaemons]:
    with LinkedDaemons(folder) as made:
        yield made


def until(look: Callable[[], T], met: Callable[[T], bool]) -> T:
    """What is seen, as soon as it is so. Other processes have no events that a test could wait for."""
    end_s = time.monotonic() + BOUND_S
    while not met(seen := look()):
        assert time.monotonic() < end_s, f"never came: {seen}"
        time.sleep(LOOK_S)
    return seen


def told(task: dict[str, Any]) -> str:
    message: dict[str, Any] = task["status"].get("message", {"parts": []})
    return "".join(part["text"] for part in message["parts"])


def is_over(task: dict[str, Any]) -> bool:
    state: str = task["status"]["state"]
    return state.removeprefix("TASK_STATE_") in ("COMPLETED", "FAILED", "CANCELED", "REJECTED")


def states(node: dict[str, Any]) -> list[str]:
    """Of a tree, the root first."""
    return [node["a2a_state"], *(state for child in node["children"] for state in states(child))]
