"""A tenant that attacks: its own token, its agent, and A2A over JSON-RPC."""

from typing import Any, Final

from tests.cli.daemons import Daemon
from tests.hostile.client import Answer, operator_token, request

AGENT: Final = "desk"
DEFAULT: Final = "default"
"""The tenant that is there already: the operator speaks for it."""


class Tenant:
    """Added to a daemon, with one agent whose work an external worker does (or nobody)."""

    def __init__(self, daemon: Daemon, name: str = "acme", *limits: str) -> None:
        self.name = name
        self.daemon = daemon
        self.token: str = (
            operator_token(daemon.home) if name == DEFAULT else daemon.json("tenants", "add", name, *limits)["token"]
        )
        self._number = 0

    def add_worker_agent(self, agent: str = AGENT) -> None:
        self.daemon.json("agents", "add", agent, "--tenant", self.name)

    def enroll_worker(self, agent: str = AGENT) -> str:
        """The worker's token."""
        granted = f"a2a.respond.client@{self.name}"
        token: str = self.daemon.json("identities", "enroll", f"{agent}@{self.name}", "--grant", granted)["token_b58"]
        return token

    def call(self, method: str, params: Any, *, agent: str = AGENT, headers: dict[str, str] | None = None) -> Answer:
        self._number += 1
        body = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}
        return request(self.daemon.url, "POST", f"/v1/a2a/agents/{agent}", token=self.token, body=body, headers=headers)

    def send(self, text: str, *, agent: str = AGENT, task_id: str | None = None) -> Answer:
        """A message that is answered as soon as it is accepted."""
        return self.call("SendMessage", message(text, self._number, task_id), agent=agent)

    def sent(self, text: str, *, agent: str = AGENT) -> str:
        """The id of a task that was accepted."""
        answer = self.send(text, agent=agent)
        assert answer.status == 200, answer.body[:500]
        task_id: str = answer.json["result"]["task"]["id"]
        return task_id


def message(text: str, number: int, task_id: str | None = None) -> dict[str, Any]:
    said: dict[str, Any] = {"messageId": f"m{number}", "role": "ROLE_USER", "parts": [{"text": text}]}
    if task_id is not None:
        said["taskId"] = task_id
    return {"message": said, "configuration": {"returnImmediately": True}}


def lease(daemon: Daemon, token: str, count: int = 1) -> list[dict[str, Any]]:
    """What a worker is given, at most so many tasks."""
    answer = request(daemon.url, "GET", f"/a2a/tasks/next?max={count}", token=token)
    assert answer.status == 200, answer.body[:500]
    tasks: list[dict[str, Any]] = answer.json["tasks"]
    return tasks
