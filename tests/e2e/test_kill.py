"""A real daemon, killed again and again under real clients on both doors, and none of them any the wiser.

Senders, workers and drainers repeat whatever was not answered, under the same ids, and remember what was. In the end
every acknowledged task was handed out once, has one result, which was drained once, and tells its story without a gap.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlencode, urlsplit
from uuid import uuid4

import pytest

from covenant.ledger.machine.commands import GONE
from tests.cli.daemons import Daemon
from tests.doors.clients import Http, Ipc
from tests.waits import BOUND_S

SENDERS: Final = ("ann@host", "amy@host")
WORKERS: Final = ("will@host", "wendy@host", "walt@host")
WAIT_MS: Final = 500
PROGRESS: Final = (200, 80, 300, 120)
"""How many answers a daemon gives before it is killed, in turns."""


class NotAnswered(Exception):
    """The daemon is gone, or going: ask again, of the next one."""


class Talker(Protocol):
    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]: ...


class HttpTalker:
    ROUTES: Final = {
        "send_a2a_task": "/a2a/tasks",
        "try_recv_a2a_task": "/a2a/tasks/next",
        "post_a2a_result": "/a2a/results",
        "try_recv_a2a_result": "/a2a/results/next",
        "update_a2a_task": "/a2a/tasks/{task_id}/updates",
        "compact_a2a": "/a2a/compact",
    }

    def __init__(self, killed: "KilledDaemon", token: str) -> None:
        self._killed = killed
        self._token = token

    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        http = Http(self._killed.port, self._token)
        target = self.ROUTES[kind].format(task_id=fields.get("task_id"))
        try:
            if kind.startswith("try_recv"):
                reply = await http.ask("GET", f"{target}?{urlencode(fields)}")
            else:
                reply = await http.ask("POST", target, fields)
        except (OSError, EOFError, TimeoutError) as error:
            raise NotAnswered from error
        if reply.status == 503:
            raise NotAnswered
        assert reply.status == 200, reply
        answer: dict[str, Any] = reply.json
        return answer


class IpcTalker:
    """One connection, for as long as it lasts."""

    WRAPPED: Final = {"send_a2a_task": "task", "post_a2a_result": "result"}

    def __init__(self, killed: "KilledDaemon", token: str) -> None:
        self._killed = killed
        self._token = token
        self._connection: Ipc | None = None

    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        wrapped = self.WRAPPED.get(kind)
        try:
            if self._connection is None:
                connection = await Ipc(self._killed.daemon.home / "sock").__aenter__()
                self._connection = await connection.authenticate(self._token)
            answer = await self._connection.ask(kind, **({wrapped: fields} if wrapped else fields))
        except (OSError, EOFError, TimeoutError, TypeError) as error:
            answer = None
            cause: BaseException | None = error
        else:
            cause = None
        if answer is None or answer.get("code") in ("stopping", "storage_failed", "outcome_unknown"):
            await self.close()
            raise NotAnswered from cause
        assert answer["kind"] != "error", answer
        found: dict[str, Any] = answer
        return found

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.__aexit__(None, None, None)
        self._connection = None


class KilledDaemon:
    """The daemon of the moment, and what its clients know."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.daemon = Daemon(home, "--ledger-segment-bytes", "65536")
        self.changed = asyncio.Condition()
        self.boots = 1
        self.answers = 0
        self.compacted = 0
        self.sending = True
        self.sent: dict[str, str] = {}
        """Acknowledged tasks, and what each says."""
        self.handed_out: Counter[str] = Counter()
        self.leases: dict[str, str] = {}
        self.settled: set[str] = set()
        self.drained: Counter[str] = Counter()
        self.results: dict[str, str] = {}

    @property
    def port(self) -> int:
        port = urlsplit(self.daemon.url).port
        assert port is not None
        return port

    @property
    def operator_token(self) -> str:
        return (self.home / "operator.token").read_text().strip()

    async def until_answered(self, talker: Talker, kind: str, **fields: Any) -> dict[str, Any]:
        """Ask until somebody answers: this daemon or a later one."""
        while True:
            boot = self.boots
            try:
                answer = await talker.ask(kind, **fields)
            except NotAnswered:
                await self.next_boot(boot)
                continue
            async with self.changed:
                self.answers += 1
                self.changed.notify_all()
            return answer

    async def next_boot(self, boot: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.boots > boot)

    async def reach(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S), self.changed:
            await self.changed.wait_for(what)

    async def progress(self, answers: int) -> None:
        wanted = self.answers + answers
        await self.reach(lambda: self.answers >= wanted)

    async def end(self, number: int) -> None:
        """Kill or stop the daemon once it has done some work, and start the next."""
        await self.progress(PROGRESS[self.boots % len(PROGRESS)])
        code = await asyncio.to_thread(self.daemon.stop, number)
        assert code == (0 if number == signal.SIGTERM else -number)
        self.daemon = await asyncio.to_thread(Daemon, self.home, "--ledger-segment-bytes", "65536")
        async with self.changed:
            self.boots += 1
            self.changed.notify_all()


async def sender(killed: KilledDaemon, talker: Talker, name: str) -> None:
    number = 0
    while killed.sending:
        which, text = str(uuid4()), f"piece {number} of {name}"
        recipient = WORKERS[number % len(WORKERS)]
        await killed.until_answered(
            talker, "send_a2a_task", id=which, recipient={"display": recipient}, intent_text=text
        )
        killed.sent[which] = text
        number += 1
        # So many at once, and no more: the workers must be able to finish.
        await killed.reach(lambda: len(killed.sent) - len(killed.settled) < 40 or not killed.sending)


async def worker(killed: KilledDaemon, talker: Talker) -> None:
    while True:
        request = str(uuid4())
        answer = await killed.until_answered(talker, "try_recv_a2a_task", max=3, wait_ms=WAIT_MS, request_id=request)
        for each in answer["tasks"]:
            await work(killed, talker, each["task"], each["lease"])


async def work(killed: KilledDaemon, talker: Talker, task: dict[str, Any], lease: dict[str, Any]) -> None:
    which, lease_id = task["id"], lease["lease_id"]
    killed.handed_out[which] += 1
    killed.leases[which] = lease_id
    for number in (1, 2):
        update = {"type": "status", "text": f"step {number}"}
        await killed.until_answered(
            talker, "update_a2a_task", task_id=which, lease_id=lease_id, update=update, update_no=number
        )
    content = [{"type": "text", "text": f"done: {task['intent_text']}"}]
    await killed.until_answered(
        talker, "post_a2a_result", task_id=which, status="ok", content=content, lease_id=lease_id
    )
    killed.settled.add(which)


async def drainer(killed: KilledDaemon, talker: Talker) -> None:
    while True:
        request = str(uuid4())
        answer = await killed.until_answered(talker, "try_recv_a2a_result", max=5, wait_ms=WAIT_MS, request_id=request)
        for result in answer["results"]:
            killed.drained[result["task_id"]] += 1
            killed.results[result["task_id"]] = result["content"][0]["text"]


async def compacter(killed: KilledDaemon) -> None:
    """The operator, who compacts while all of this goes on, and is not always lucky."""
    while True:
        await killed.progress(50)
        await killed.until_answered(HttpTalker(killed, killed.operator_token), "compact_a2a")
        killed.compacted += 1


def enroll(daemon: Daemon) -> dict[str, str]:
    """Everybody's token."""
    tokens = {}
    for name in SENDERS:
        granted = [word for worker in WORKERS for word in ("--grant", f"a2a.send.{worker}")]
        tokens[name] = daemon.json("identities", "enroll", name, *granted)["token_b58"]
    for name in WORKERS:
        granted = [word for sender in SENDERS for word in ("--grant", f"a2a.respond.{sender}")]
        tokens[name] = daemon.json("identities", "enroll", name, *granted)["token_b58"]
    daemon.json("capabilities", "grant", "a2a.compact")
    return tokens


@asynccontextmanager
async def clients(killed: KilledDaemon, tokens: dict[str, str]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Each name over one door to send or work, and over the other to drain."""
    ann, amy = SENDERS
    will, wendy, walt = WORKERS
    ipc = {name: IpcTalker(killed, tokens[name]) for name in (ann, amy, will, walt)}
    async with asyncio.TaskGroup() as group:
        sending = [
            group.create_task(sender(killed, HttpTalker(killed, tokens[ann]), ann)),
            group.create_task(sender(killed, ipc[amy], amy)),
        ]
        others = [
            group.create_task(worker(killed, ipc[will])),
            group.create_task(worker(killed, HttpTalker(killed, tokens[wendy]))),
            group.create_task(worker(killed, ipc[walt])),
            group.create_task(compacter(killed)),
            group.create_task(drainer(killed, ipc[ann])),
            group.create_task(drainer(killed, HttpTalker(killed, tokens[amy]))),
        ]
        yield sending
        for task in others:
            task.cancel()
    for talker in ipc.values():
        await talker.close()


async def check(killed: KilledDaemon) -> None:
    """What the clients know, and what the daemon says of it."""
    assert set(killed.drained) == set(killed.sent), "acknowledged, and not drained; or drained, and never sent"
    assert set(killed.drained.values()) == {1}, "a result came twice"
    assert set(killed.handed_out.values()) == {1}, "work was handed out twice"
    assert {which: f"done: {text}" for which, text in killed.sent.items()} == killed.results
    operator = Http(killed.port, killed.operator_token)
    for which in killed.sent:
        shown = await operator.get(f"/a2a/tasks/{which}/show")
        assert [update["generation"] for update in shown["updates"]] == list(range(1, shown["generation"] + 1))
        kinds = [update["kind"] for update in shown["updates"]]
        assert kinds == ["submitted", "working", "status", "status", "settled"]
        *untold, told = shown["leases"]
        assert told["lease_id"] == killed.leases[which]
        # A stop that closes the door on a waiting worker gives back what it could not tell it of; a kill cannot.
        assert {(lease["outcome"], lease["reason"]) for lease in untold} <= {("released", GONE)}, untold
        assert shown["state"] == "resolved"
    queue = await operator.get("/a2a/queue?limit=10")
    assert (queue["tasks"], queue["results"]) == ([], [])
    assert killed.daemon.json("audit", "verify")["report"]["valid"] is True


async def survive(home: Path, rounds: int) -> None:
    killed = KilledDaemon(home)
    try:
        tokens = await asyncio.to_thread(enroll, killed.daemon)
        async with clients(killed, tokens) as sending:
            for number in range(rounds):
                await killed.end(signal.SIGTERM if number % 4 == 3 else signal.SIGKILL)
            killed.sending = False
            async with killed.changed:
                killed.changed.notify_all()
            await asyncio.gather(*sending)
            await killed.reach(lambda: len(killed.drained) >= len(killed.sent))
        await check(killed)
    finally:
        code = await asyncio.to_thread(killed.daemon.stop)
    assert code == 0


async def test_nothing_acknowledged_is_lost_or_repeated_when_the_daemon_is_killed_under_load(short_path: Path) -> None:
    await survive(short_path / "home", rounds=4)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_nothing_acknowledged_is_lost_or_repeated_over_many_kills(short_path: Path) -> None:
    await survive(short_path / "home", rounds=20)
