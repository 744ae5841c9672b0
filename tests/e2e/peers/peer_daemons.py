"""Real daemons that know each other as peers: processes, sockets, keys and files of their own.

A `Node` keeps its home, port and settings when it is killed and started again. What a test waits for it looks for in
the daemon's own answers, within `BOUND_S`.
"""

import http.client
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from covenant.daemon.keystore import Keystore, decode_purpose_keys
from covenant.daemon.wiring.peer_keys import PURPOSES
from covenant.seal.keys import COST_MIN, Locker, derived_secret
from covenant.seal.purpose_keys import PurposeKeySet
from tests.cli.daemons import Daemon, Ran, covenant
from tests.e2e.peers.proxy import Proxy
from tests.engine_under_test import ON_POSTGRES, database_of, dump, ledger_settings, restore_dump, shared_secret
from tests.places import free_port
from tests.waits import BOUND_S

T = TypeVar("T")

LOOK_S: Final = 0.03
API: Final = "/api/v1/a2a"
ENDED: Final = frozenset({"completed", "failed", "cancelled", "timeout", "rejected"})
QUICK: Final = {
    "enabled": "1",
    "status_interval_ms": "300",
    "retry_first_ms": "50",
    "retry_max_ms": "250",
    "timeout_ms": "200000",
}
"""Settings of `[peers]` that make what is repeated come soon."""


@dataclass(frozen=True)
class Answer:
    """What a daemon said over HTTP."""

    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        found = json.loads(self.raw)
        assert isinstance(found, dict), self
        return found

    @property
    def code(self) -> str | None:
        """Why it refused."""
        return self.body.get("code")


def until(look: Callable[[], T], met: Callable[[T], Any], bound_s: float = BOUND_S) -> T:
    """What is seen, as soon as it is so. Other processes have no events that a test could wait for."""
    end_s = time.monotonic() + bound_s
    while not met(seen := look()):
        assert time.monotonic() < end_s, f"never came: {seen}"
        time.sleep(LOOK_S)
    return seen


def call(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    *,
    token: str | None = None,
    source: str = "127.0.0.1",
    within_s: float = BOUND_S,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """`body`: bytes go as they are, everything else as JSON. `source`: from which address on loopback."""
    said = {"Content-Type": "application/json", **(headers or {})}
    if token:
        said["Authorization"] = f"Bearer {token}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=within_s, source_address=(source, 0))
    try:
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, sent, said)
        response = connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


class Node:
    """One daemon. `settings` are those of `[peers]`; `env` is what it is started with besides."""

    def __init__(
        self,
        folder: Path,
        name: str,
        agents: str,
        settings: dict[str, str],
        env: dict[str, str],
        *flags: str,
        port: int | None = None,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        self.name = name
        self.folder = folder
        self.home = folder / name
        self.port = port or free_port()
        self.settings = {**QUICK, "name": name, **settings}
        self.env = env
        self.flags = flags
        self._constants = constants
        self._agents = folder / f"{name}_agents.py"
        self._agents.write_text(agents)
        self.daemon = self.start()

    # Its life

    def start(self) -> Daemon:
        settings = {f"COVENANT_PEERS_{name.upper()}": value for name, value in self.settings.items()}
        ledger = {f"COVENANT_LEDGER_{name.upper()}": str(value) for name, value in ledger_settings(self.home).items()}
        env = {"NODE": self.name, "FOLDER": str(self.folder), **ledger, **settings, **self.env}
        self.daemon = Daemon(
            self.home,
            str(self._agents),
            "--delegation-cooldown-ms",
            "0",
            *self.flags,
            "--http-port",
            str(self.port),
            env=env,
            constants=self._constants,
        )
        return self.daemon

    @property
    def runs(self) -> bool:
        return self.daemon.process.poll() is None

    def stop(self) -> None:
        """As an operator stops it."""
        assert self.daemon.stop() == 0, self.log

    def kill(self) -> None:
        """Without a warning: SIGKILL."""
        assert self.daemon.stop(signal.SIGKILL) == -signal.SIGKILL

    def again(self, **settings: str) -> None:
        """Where it was, with these settings changed."""
        self.settings |= settings
        if self.runs:
            self.stop()
        self.start()

    def back_up(self) -> Path:
        """The home, or its database, as it is now, in one file."""
        file = self.folder / f"{self.name}-{len(list(self.folder.glob('*.backup')))}.backup"
        if ON_POSTGRES:
            dump(self.home, file)
            return file
        ran = covenant("--home", str(self.home), "backup", str(file))
        assert ran.code == 0, ran
        return file

    def restore(self, file: Path) -> None:
        """Everything since is lost with the disk: the ledger is made from the backup, and the daemon started on it."""
        if self.runs:
            self.kill()
        if ON_POSTGRES:
            restore_dump(self.home, file)
            ran = covenant("ledger", "restored", "--home", str(self.home), "--ledger", database_of(self.home))
            assert ran.code == 0, ran
            self.start()
            return
        self.home.rename(self.folder / f"{self.name}-{len(list(self.folder.iterdir()))}.lost")
        ran = covenant("--home", str(self.home), "restore", str(file))
        assert ran.code == 0, ran
        self.start()

    def purpose_keys(self) -> PurposeKeySet:
        """As its home has them; or, where several daemons could share its ledger, as that has them."""
        store = Keystore(self.home, None)
        if not ON_POSTGRES:
            return store.read_purpose_keys()
        home_key = store.read_key()
        assert home_key is not None
        locker = Locker(derived_secret(home_key, "shared keys").hex(), cost=COST_MIN)
        return decode_purpose_keys(locker.unlock(shared_secret(self.home, PURPOSES).encode()))

    @property
    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text()

    # Asking it

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def token(self) -> str:
        return (self.home / "operator.token").read_text().strip()

    @property
    def id(self) -> str:
        found: str = call(self.port, "GET", f"{API}/identity").body["keys"]["id"]
        return found

    def call(self, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        """As its operator. `path` goes on from `/api/v1/a2a`, unless it is a whole one."""
        whole = path if path.startswith(("/a2a/", "/api/", "/v1/", "/audit/")) else f"{API}{path}"
        return call(self.port, method, whole, body, token=self.token, **more)

    def ask(self, method: str, path: str, body: Any = None, *, status: int | None = None) -> dict[str, Any]:
        """The answer's body; anything but success, or but `status`, fails the test."""
        answer = self.call(method, path, body)
        expected = (200, 201) if status is None else (status,)
        assert answer.status in expected, (self.name, method, path, answer)
        return answer.body

    def get(self, path: str, status: int | None = None) -> dict[str, Any]:
        return self.ask("GET", path, status=status)

    def post(self, path: str, body: Any = None, status: int | None = None) -> dict[str, Any]:
        return self.ask("POST", path, body if body is not None else {}, status=status)

    def receive(self, envelope: bytes, *, source: str = "127.0.0.1", at: str = "receive") -> Answer:
        """As anybody: hand it an envelope."""
        return call(self.port, "POST", f"{API}/{at}", envelope, source=source)

    def run(self, *words: str, stdin: str = "") -> Ran:
        """The CLI."""
        return covenant("--home", str(self.home), *words, stdin=stdin)

    def cli(self, *words: str, code: int = 0) -> dict[str, Any]:
        """The CLI's `--json`."""
        ran = self.run(*words, "--json")
        assert ran.code == code, ran
        return ran.json

    # Peers and delegations

    def peer(self, named: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/peers/{named}")["peer"]
        return found

    def add(self, url: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.post("/peers", {"url": url, "name": name})["peer"]
        return found

    def delegate(self, task: str, profile: str, peer: str | None = None, **more: Any) -> str:
        """Its id here."""
        named = {"peerId": peer} if peer is not None else {}
        found: str = self.post("/delegate", {"task": task, "profile": profile, **named, **more})["delegationId"]
        return found

    def delegation(self, named: str) -> dict[str, Any]:
        """`delegation`, and `result` or `error` once there is one."""
        return self.get(f"/delegations/{named}")

    def delegations(self, **query: str) -> list[dict[str, Any]]:
        words = "&".join(f"{name}={value}" for name, value in {"limit": "100", **query}.items())
        found: list[dict[str, Any]] = self.get(f"/delegations?{words}")["delegations"]
        return found

    def stands(self, named: str, *states: str) -> dict[str, Any]:
        """The answer of `delegation`, once it is in one of these states; `ended`: in any that it stays in."""
        wanted = ENDED if states == ("ended",) else frozenset(states)

        def look() -> Answer:
            return self.call("GET", f"/delegations/{named}")

        def met(answer: Answer) -> bool:
            # Before the task here has been begun there is no delegation.
            return answer.status == 200 and answer.body["delegation"]["state"] in wanted

        return until(look, met).body

    def ended(self, named: str) -> dict[str, Any]:
        """Once both the delegation and its task here are over: with what came of it."""
        self.stands(named, "ended")
        return until(lambda: self.delegation(named), lambda found: "result" in found or "error" in found)

    def tree(self, named: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/delegations/{named}/tree")["tree"]
        return found

    def task(self, task_id: str) -> dict[str, Any]:
        """Its task here, with every update."""
        return self.get(f"/a2a/tasks/{task_id}/show")

    def audit(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What was written down, the newest first; `kind` is that of the row."""
        rows: list[dict[str, Any]] = self.get("/audit/recent?limit=200")["events"]
        found = [row["kind"] for row in rows]
        return [row for row in found if kind in (None, row["type"])]


class PeerDaemons:
    """Nodes in one folder. Whatever still runs at the end is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, Node] = {}
        self.proxies: list[Proxy] = []

    def proxy(self, node: Node) -> Proxy:
        """A line to this node on which the test sits: give others its `url`."""
        made = Proxy(node.port)
        self.proxies.append(made)
        return made

    def node(
        self,
        name: str,
        agents: str,
        *flags: str,
        env: dict[str, str] | None = None,
        port: int | None = None,
        constants: Mapping[str, float] | None = None,
        **settings: str | int,
    ) -> Node:
        """`settings` of `[peers]`, by their names. `constants`: as a `Daemon` has them."""
        told = {key: str(value) for key, value in settings.items()}
        self.nodes[name] = made = Node(
            self.folder, name, agents, told, env or {}, *flags, port=port, constants=constants
        )
        return made

    def touch(self, name: str) -> None:
        """For agents that wait for a file of this name in `FOLDER`."""
        (self.folder / name).touch()

    def lines(self, name: str) -> list[str]:
        """What agents have written to the file of this name."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def wrote(self, name: str, line: str, count: int = 1) -> None:
        """Wait until agents have written this line so often."""
        until(lambda: self.lines(name), lambda lines: lines.count(line) >= count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for proxy in self.proxies:
            proxy.close()
        for node in self.nodes.values():
            if node.runs:
                node.daemon.stop(signal.SIGKILL)


@contextmanager
def open_peer_daemons(folder: Path) -> Iterator[PeerDaemons]:
    with PeerDaemons(folder) as made:
        yield made


def introduce(a: Node, b: Node, *, a_calls: str | None = None, b_calls: str | None = None) -> None:
    """Each adds the other under its name, and both are verified. `a_calls`: where a calls b, if not at its own port."""
    a.add(a_calls or b.url, b.name)
    b.add(b_calls or a.url, a.name)
    for one, other in ((a, b), (b, a)):
        until(
            lambda one=one, other=other: _verified(one, other),  # type: ignore[misc]
            lambda trust: trust in ("verified", "trusted"),
        )


def _verified(one: Node, other: Node) -> str:
    answer = one.call("POST", f"/peers/{other.name}/verify", {})
    trust: str = (answer.body["peer"] if answer.status == 200 else one.peer(other.name))["trustLevel"]
    return trust
