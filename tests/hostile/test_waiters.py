"""Hundreds of receivers that wait for one identity at a real daemon: a task wakes one of them, and there are bounds."""

import selectors
import uuid
from contextlib import ExitStack
from pathlib import Path

from tests.cli.daemons import Daemon
from tests.hostile.client import RawConnection, operator_token, request
from tests.hostile.conftest import StartDaemon
from tests.waits import BOUND_S

RECEIVERS = 300
WAIT_MS = 55_000


def worker(daemon: Daemon) -> str:
    """A token of an identity to whom the operator may send."""
    operator = operator_token(daemon.home)
    request(daemon.url, "POST", "/capabilities/grant", token=operator, body={"action": "a2a.send.worker@test"})
    enrolled = request(daemon.url, "POST", "/identities/enroll", token=operator, body={"display": "worker@test"})
    token: str = enrolled.json["token_b58"]
    return token


def long_poll(daemon: Daemon, token: str) -> RawConnection:
    connection = RawConnection(daemon.url)
    head = f"GET /a2a/tasks/next?wait_ms={WAIT_MS} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n\r\n"
    connection.send(head.encode())
    return connection


def send(daemon: Daemon, home: Path) -> str:
    task_id = str(uuid.uuid4())
    task = {"id": task_id, "recipient": {"display": "worker@test"}, "intent_text": "work"}
    answer = request(daemon.url, "POST", "/a2a/tasks", token=operator_token(home), body=task)
    assert answer.status < 300, answer
    return task_id


def answered(connections: list[RawConnection], count: int) -> list[int]:
    """Which of them have an answer, once so many have, and for a moment no more."""
    found: set[int] = set()
    with selectors.DefaultSelector() as selector:
        for index, connection in enumerate(connections):
            selector.register(connection.socket, selectors.EVENT_READ, index)
        while events := selector.select(BOUND_S if len(found) < count else 0.5):
            found |= {key.data for key, _ in events}
            for key, _ in events:
                selector.unregister(key.fileobj)
    return sorted(found)


def test_each_task_ends_the_wait_of_one_of_hundreds(daemon: Daemon) -> None:
    token = worker(daemon)
    with ExitStack() as stack:
        waiting = [stack.enter_context(long_poll(daemon, token)) for _ in range(RECEIVERS)]
        # What is answered after all of them were sent shows that they have been read.
        assert request(daemon.url, "GET", "/readyz").status == 200
        first, second = send(daemon, daemon.home), send(daemon, daemon.home)
        answers = [waiting[index].read_answer() for index in answered(waiting, 2)]
        assert sorted(each.json["task"]["id"] for each in answers) == sorted((first, second))


def test_a_receiver_that_leaves_takes_no_wake_with_it(daemon: Daemon) -> None:
    token = worker(daemon)
    with ExitStack() as stack:
        leaving = [long_poll(daemon, token) for _ in range(20)]
        staying = stack.enter_context(long_poll(daemon, token))
        assert request(daemon.url, "GET", "/readyz").status == 200
        for connection in leaving:
            connection.close()
        task_id = send(daemon, daemon.home)
        taken = staying.read_answer().json
        assert taken["task"]["id"] == task_id


def test_one_caller_may_only_let_so_many_requests_wait(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(env={"COVENANT_LIMITS_WAITS_PER_CALLER_MAX": "3", "COVENANT_LIMITS_WAITS_MAX": "4"})
    token, operator = worker(daemon), operator_token(daemon.home)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(long_poll(daemon, token))
        assert request(daemon.url, "GET", "/readyz").status == 200
        refused = request(daemon.url, "GET", f"/a2a/tasks/next?wait_ms={WAIT_MS}", token=token)
        assert (refused.status, refused.json["code"]) == (429, "too_many_waits")
        assert int(refused.headers["retry-after"]) >= 1
        assert request(daemon.url, "GET", "/a2a/tasks/next", token=token).json["task"] is None
        stack.enter_context(long_poll(daemon, operator))
        assert request(daemon.url, "GET", "/readyz").status == 200
        crowded = request(daemon.url, "GET", f"/a2a/tasks/next?wait_ms={WAIT_MS}", token=operator)
        assert (crowded.status, crowded.json["code"]) == (429, "too_many_waits")
