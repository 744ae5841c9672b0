"""Three daemons on one PostgreSQL behind a proxy: the rules of the compose file, and its commands run as they stand.

No container is started here. The commands run with their environments on a real PostgreSQL, on homes and ports of the
test's own. The proxy is nginx with the configuration that the compose file mounts, where there is an nginx; elsewhere
the daemons are asked in turn.
"""

import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import yaml

from covenant.daemon.home import TOKEN_NAME
from covenant.daemon.settings import DaemonSettings
from covenant.model.settings import A2aSettings
from tests.cli.daemons import COVENANT, covenant, environment, said_until
from tests.ledger_contract.postgres_server import Databases
from tests.places import free_port
from tests.waits import BOUND_S, until

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVICES: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.postgres.yaml").read_text(encoding="utf-8"))["services"]
PROXY = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
DAEMONS = ("one", "two", "three")
HOME = "/var/lib/covenant"
PASSPHRASE = "what the operator exports"
ECHO = "import json,sys;said=json.loads(sys.stdin.readline());print(json.dumps({'type':'result','text':'echoed'}))"
SLOW = "import os,signal;open({path!r},'w').write(str(os.getppid()));signal.alarm(120);signal.pause()"
"""Works until it is stopped; nobody stops it when its daemon is killed, so it ends by itself as well."""


def test_every_service_has_no_more_rights_than_it_needs() -> None:
    assert set(SERVICES) == {"prepare", "proxy", "database", *DAEMONS}
    for name in set(SERVICES) - {"database"}:
        service = SERVICES[name]
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name
        assert "no-new-privileges:true" in service["security_opt"]
    assert {name: service["ports"] for name, service in SERVICES.items() if "ports" in service} == {
        "proxy": ["127.0.0.1:8421:8421"]
    }
    assert SERVICES["database"]["networks"] == ["inside"]
    for name in DAEMONS:
        assert float(SERVICES[name]["stop_grace_period"].removesuffix("s")) > DaemonSettings().grace_ms / 1000


def test_the_daemons_differ_in_name_and_volume_alone_and_begin_when_the_ledger_is_prepared() -> None:
    for name in DAEMONS:
        service, first = SERVICES[name], SERVICES["one"]
        assert service["environment"] == {**first["environment"], "COVENANT_DAEMON_NODE": name}
        assert service["volumes"] == [f"covenant-{name}:{HOME}"]
        assert service["depends_on"] == {"prepare": {"condition": "service_completed_successfully"}}
    assert SERVICES["prepare"]["depends_on"] == {"database": {"condition": "service_healthy"}}
    shared = SERVICES["prepare"]["environment"].items() - {("COVENANT_DAEMON_NODE", "prepare")}
    assert shared <= SERVICES["one"]["environment"].items()
    for each in ("COVENANT_LEDGER_URL", "COVENANT_PASSPHRASE"):
        assert re.search(r"\$\{COVENANT_\w+:\?", SERVICES["one"]["environment"][each]), "no secret has a default"


def test_the_proxy_knows_the_daemons_passes_streams_on_and_waits_longer_than_they_do() -> None:
    assert tuple(re.findall(r"server (\w+):8421 ", PROXY)) == DAEMONS
    assert "proxy_buffering off;" in PROXY
    (read_s,) = re.findall(r"proxy_read_timeout (\d+)s;", PROXY)
    assert int(read_s) * 1000 > A2aSettings().blocking_ms_max


class Deployment:
    """What the compose file starts, outside of containers."""

    def __init__(self, folder: Path, database: str) -> None:
        self.folder = folder
        self.database = database
        self.ports = {name: free_port() for name in DAEMONS}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.begun = folder / "begun"
        """Where the slow agent writes which process has started it."""
        self._proxy: str | None = None
        self._turns = itertools.cycle(DAEMONS)

    def home(self, name: str) -> Path:
        return self.folder / name

    def variables(self, name: str) -> dict[str, str]:
        """What the compose file gives a service, but for the places of this test."""
        # The test's database syncs nothing.
        ours = {"COVENANT_LEDGER_URL": self.database, "COVENANT_LEDGER_DURABILITY": "os"}
        ours |= {"COVENANT_PASSPHRASE": PASSPHRASE}
        if name in DAEMONS:
            ours |= {"COVENANT_HOME": str(self.home(name)), "COVENANT_HTTP_PORT": str(self.ports[name])}
            ours |= {"COVENANT_HTTP_TRUSTED_PROXIES": "127.0.0.1"}
        return {**SERVICES[name]["environment"], **ours}

    def prepare(self) -> None:
        words = [word.replace("/tmp/home", str(self.folder / "prepare")) for word in SERVICES["prepare"]["command"]]
        ran = covenant(*words, env=self.variables("prepare"))
        assert ran.code == 0, ran.err

    def start(self, *names: str) -> None:
        for name in names:
            with (self.folder / f"{name}.log").open("ab") as log:
                self.running[name] = subprocess.Popen(
                    [str(COVENANT), "serve"],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment(**self.variables(name)),
                )
        for name in names:
            said_until(self.running[name], b"covenant listens on")

    @contextmanager
    def proxied(self) -> Iterator[None]:
        program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
        if program is None:
            yield
            return
        port, text = free_port(), PROXY.replace("/tmp/", f"{self.folder}/nginx-")
        for name in DAEMONS:
            text = text.replace(f"{name}:8421", f"127.0.0.1:{self.ports[name]}")
        path = self.folder / "nginx.conf"
        path.write_text(text.replace("listen 8421;", f"listen 127.0.0.1:{port};"))
        command = [word.replace("/etc/covenant/nginx.conf", str(path)) for word in SERVICES["proxy"]["command"]]
        with (self.folder / "nginx.log").open("ab") as log:
            proxy = subprocess.Popen([program, *command[1:]], stderr=log)
        self._proxy = f"http://127.0.0.1:{port}"
        try:
            until(lambda: self.answers("/healthz"))
            yield
        finally:
            proxy.terminate()
            proxy.wait(BOUND_S)

    def answers(self, path: str) -> bool:
        try:
            with urlopen(f"{self._proxy}{path}", timeout=BOUND_S) as answer:
                return bool(answer.status == 200)
        except URLError:
            return False

    def url(self) -> str:
        if self._proxy is not None:
            return self._proxy
        living = (name for name in self._turns if self.running[name].poll() is None)
        return f"http://127.0.0.1:{self.ports[next(living)]}"

    def call(self, agent: str, method: str, **params: Any) -> dict[str, Any]:
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
        headers = {"Content-Type": "application/json", "A2A-Version": "1.0"}
        headers["Authorization"] = f"Bearer {(self.home('one') / TOKEN_NAME).read_text().strip()}"
        with urlopen(Request(f"{self.url()}/v1/a2a/agents/{agent}", body, headers), timeout=BOUND_S) as answer:
            told: dict[str, Any] = json.loads(answer.read())
        found: dict[str, Any] = told["result"]
        return found

    def send(self, agent: str, *, waits: bool = True) -> dict[str, Any]:
        message = {"messageId": f"m-{free_port()}", "role": "ROLE_USER", "parts": [{"text": "go"}]}
        configuration = {"returnImmediately": not waits}
        task: dict[str, Any] = self.call(agent, "SendMessage", message=message, configuration=configuration)["task"]
        return task

    def holder(self) -> str:
        """The daemon that works on the slow task."""
        pid = int(self.begun.read_text())
        (found,) = [name for name, daemon in self.running.items() if daemon.pid == pid]
        return found

    def stop(self) -> None:
        for daemon in self.running.values():
            daemon.terminate()
        for daemon in self.running.values():
            daemon.communicate(timeout=BOUND_S)


@pytest.fixture
async def deployment(short_path: Path, databases: Databases) -> AsyncIterator[Deployment]:
    database = await databases.borrow()
    made = Deployment(short_path, database)
    made.prepare()
    for name in DAEMONS:
        folder = made.home(name) / "agents"
        folder.mkdir(mode=0o700, parents=True)
        made.home(name).chmod(0o700)
        for agent, source in (("echo", ECHO), ("slow", SLOW.format(path=str(made.begun)))):
            definition = {"kind": "process", "command": [sys.executable, "-c", source], "description": agent}
            (folder / f"{agent}.json").write_text(json.dumps(definition))
    try:
        made.start(*DAEMONS)
        with made.proxied():
            yield made
    finally:
        made.stop()
        await databases.give_back(database)


async def test_any_daemon_answers_and_a_killed_one_loses_nothing(deployment: Deployment) -> None:
    assert len({(deployment.home(name) / TOKEN_NAME).read_text() for name in DAEMONS}) == 1
    deployment.prepare()  # as each further `up` does
    done = [deployment.send("echo") for _ in range(9)]
    assert {task["status"]["state"] for task in done} == {"TASK_STATE_COMPLETED"}
    for task in done:
        assert deployment.call("echo", "GetTask", id=task["id"])["status"]["state"] == "TASK_STATE_COMPLETED"
    at_work = deployment.send("slow", waits=False)["id"]
    until(lambda: deployment.begun.exists() and deployment.begun.read_text())
    holder = deployment.holder()
    deployment.running[holder].send_signal(signal.SIGKILL)
    deployment.running[holder].communicate(timeout=BOUND_S)
    # The others tell the client, although none of them was restarted.
    until(_says(deployment, at_work, "interrupted: the daemon stopped while the agent worked"))
    assert [deployment.send("echo")["status"]["state"] for _ in range(6)] == ["TASK_STATE_COMPLETED"] * 6
    deployment.start(holder)
    assert deployment.call("slow", "GetTask", id=at_work)["status"]["state"] == "TASK_STATE_WORKING"


def _says(deployment: Deployment, task_id: str, words: str) -> Callable[[], bool]:
    def said() -> bool:
        status = deployment.call("slow", "GetTask", id=task_id)["status"]
        return "message" in status and str(status["message"]["parts"][0]["text"]).startswith(words)

    return said
