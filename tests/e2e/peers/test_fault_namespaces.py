"""Daemons on two machines, as far as the kernel is concerned: namespaces with a cable between them that can be pulled.

They find each other by mDNS, or by a domain that lists them; and go on when the cable is back, when one of them alone
is not heard, and when the line is so narrow that packets are lost on it.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from covenant.model.ids import PublicKey
from covenant.seal.identity import fingerprint
from tests.cli.daemons import Daemon, covenant, environment, said_until
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.faults import STEADY
from tests.e2e.peers.peer_daemons import ENDED, QUICK, until
from tests.peers.discovery.zones import DOMAIN
from tests.places import short_folder
from tests.waits import BOUND_S

pytestmark = pytest.mark.root

PORT: Final = 8421
CABLE: Final = "cable"
SILENT: Final = {"silence_ms": "1000", "status_interval_ms": "300"}
ROOT: Final = Path(__file__).parents[3]
GUIDE: Final = (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
(GUIDE_AGENTS,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=BOUND_S)


class Machine:
    """A daemon in a namespace of its own. The operator's socket is a file, and files are shared."""

    def __init__(self, folder: Path, name: str, space: str, address: str) -> None:
        self.name = name
        self.space = space
        self.address = address
        self.folder = folder
        self.home = folder / name
        self._agents = folder / f"{name}_agents.py"
        self._agents.write_text(AGENTS + STEADY)
        self._daemon: Daemon | None = None

    @property
    def inside(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.space)

    @property
    def url(self) -> str:
        return f"http://{self.address}:{PORT}"

    @property
    def id(self) -> str:
        found: str = self.cli("peers", "config")["id"]
        return found

    def start(self, env: dict[str, str] | None = None, **settings: str) -> None:
        ours = {**QUICK, "name": self.name, **SILENT, **settings}
        variables = {f"COVENANT_PEERS_{name.upper()}": value for name, value in ours.items()}
        self._daemon = Daemon(
            self.home,
            *(str(self._agents), "--http-bind-addr", self.address, "--http-port", str(PORT)),
            env={"NODE": self.name, "FOLDER": str(self.folder), **variables, **(env or {})},
            inside=self.inside,
        )

    def kill(self) -> None:
        if self._daemon is not None:
            self._daemon.stop(signal.SIGKILL)
            self._daemon = None

    def cli(self, *words: str) -> dict[str, Any]:
        ran = covenant("--home", str(self.home), *words, "--json")
        assert ran.code == 0, (self.name, words, ran)
        return ran.json

    def add(self, other: "Machine", url: str | None = None) -> None:
        self.cli("peers", "add", url or other.url, "--id", other.id, "--name", other.name)

    def delegate(self, profile: str, text: str, peer: str) -> str:
        found: str = self.cli("peers", "delegate", profile, text, "--peer", peer, "--no-wait")["delegationId"]
        return found

    def delegation(self, which: str) -> dict[str, Any]:
        found: dict[str, Any] = self.cli("peers", "delegations", which)["delegation"]
        return found

    def stands(self, which: str, *states: str) -> dict[str, Any]:
        return until(lambda: self.delegation(which), lambda found: found["state"] in states)

    def discovered(self, source: str, instance_id: str) -> dict[str, Any]:
        """What is found of this instance in this way, once it is."""

        def look() -> list[dict[str, Any]]:
            found = self.cli("peers", "discover", "--wait-ms", "1000")["discovered"]
            return [each for each in found if (each["source"], each["instanceId"]) == (source, instance_id)]

        (found,) = until(look, bool)
        return found


class TwoMachines(NamedTuple):
    alice: Machine
    bob: Machine
    folder: Path

    def meet(self) -> None:
        for one, other in ((self.alice, self.bob), (self.bob, self.alice)):
            one.add(other)
        self.acquainted()

    def acquainted(self) -> None:
        for one, other in ((self.alice, self.bob), (self.bob, self.alice)):
            until(
                lambda one=one, other=other: one.cli("peers", "verify", other.name)["peer"]["trustLevel"],  # type: ignore[misc]
                lambda level: level == "verified",
            )

    def begun(self, name: str) -> int:
        return (self.folder / "runs").read_text().splitlines().count(f"bob steady {name}")

    def completed(self, which: str) -> None:
        found = self.alice.stands(which, *ENDED)
        assert (found["state"], found["proven"]) == ("completed", True), found


@pytest.fixture
def pair() -> Iterator[TwoMachines]:
    one, two = (f"covp{os.getpid()}{letter}" for letter in "ab")
    made: list[str] = []
    machines: list[Machine] = []
    try:
        with short_folder() as folder:
            for space in (one, two):
                ip("netns", "add", space)
                made.append(space)
                ip("-n", space, "link", "set", "lo", "up")
            ip("link", "add", CABLE, "netns", one, "type", "veth", "peer", "name", CABLE, "netns", two)
            for name, space, address in (("alice", one, "10.78.0.1"), ("bob", two, "10.78.0.2")):
                ip("-n", space, "address", "add", f"{address}/24", "dev", CABLE)
                ip("-n", space, "link", "set", CABLE, "up")
                machines.append(Machine(folder, name, space, address))
            try:
                yield TwoMachines(machines[0], machines[1], folder)
            finally:
                for machine in machines:
                    machine.kill()
    finally:
        for space in made:
            ip("netns", "delete", space)


def test_daemons_find_each_other_by_mdns_and_delegate(pair: TwoMachines) -> None:
    alice, bob = pair.alice, pair.bob
    for machine in (alice, bob):
        machine.start(mdns="true", mdns_interfaces=CABLE)
    for one, other in ((alice, bob), (bob, alice)):
        found = one.discovered("mdns", other.id)
        assert (found["url"], found["name"].split()[0]) == (other.url, other.name)
        one.add(other, found["url"])
    pair.acquainted()
    answer = alice.cli("peers", "delegate", "echo", "over the cable", "--peer", "bob")
    assert answer["result"] == "echo over the cable"


@contextmanager
def listed(at: Machine, other: Machine) -> Iterator[int]:
    """A name server beside one machine that lists the other: its port."""
    host = f"{other.name}.{DOMAIN}"
    shown = fingerprint(PublicKey(_key_of(other)))
    process = subprocess.Popen(
        [
            *(*at.inside, sys.executable, "-m", "tests.e2e.peers.zone_process"),
            *(other.name, host, other.address, str(PORT), other.id, shown),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        yield int(said_until(process, b"\n"))
    finally:
        process.communicate(timeout=BOUND_S)


def _key_of(machine: Machine) -> str:
    """What it shows as its key, seen from its own machine."""
    script = "import json,sys,urllib.request as u; print(json.load(u.urlopen(sys.argv[1]))['keys']['identityKey'])"
    shown = subprocess.run(
        [*machine.inside, sys.executable, "-c", script, f"{machine.url}/api/v1/a2a/identity"],
        capture_output=True,
        text=True,
        check=True,
        timeout=BOUND_S,
    )
    return shown.stdout.strip()


def test_a_daemon_finds_another_in_a_domain_that_lists_it_and_calls_it_by_its_name(pair: TwoMachines) -> None:
    alice, bob = pair.alice, pair.bob
    bob.start({"COVENANT_HTTP_ALLOWED_HOSTS": f"bob.{DOMAIN}"})
    alice.start()
    with listed(alice, bob) as port:
        alice.kill()
        alice.start(
            {"COVENANT_OUTBOUND_NAME_SERVERS": f"127.0.0.1:{port}"},
            dns_domains=DOMAIN,
            dns_servers=f"127.0.0.1:{port}",
        )
        found = alice.discovered("dns", bob.id)
        assert found["url"] == f"http://bob.{DOMAIN}:{PORT}"
        alice.add(bob, found["url"])
        bob.add(alice)
        pair.acquainted()
        answer = alice.cli("peers", "delegate", "echo", "by name", "--peer", "bob")
        assert answer["result"] == "echo by name"


def test_a_cable_that_is_pulled_loses_a_delegation_until_it_is_back(pair: TwoMachines) -> None:
    alice, bob = pair.alice, pair.bob
    alice.start()
    bob.start()
    pair.meet()
    which = alice.delegate("steady", "go-on", "bob")
    alice.stands(which, "running")
    ip("-n", bob.space, "link", "set", CABLE, "down")
    alice.stands(which, "lost")
    assert alice.cli("peers", "delegations")["delegations"][0]["id"] == which
    (pair.folder / "go-on").touch()
    until(lambda: bob.cli("peers", "delegations")["delegations"][0]["state"], lambda state: state == "completed")
    ip("-n", bob.space, "link", "set", CABLE, "up")
    pair.completed(which)
    assert pair.begun("go-on") == 1
    until(lambda: bob.cli("peers", "show", "alice")["peer"]["waiting"], lambda waiting: waiting == {})


def test_one_that_is_not_heard_and_hears_goes_on_when_it_is_heard_again(pair: TwoMachines) -> None:
    """Packets from bob to alice vanish; those from her to him arrive."""
    alice, bob = pair.alice, pair.bob
    alice.start()
    bob.start()
    pair.meet()
    which = alice.delegate("steady", "go-again", "bob")
    alice.stands(which, "running")
    ip("-n", bob.space, "route", "add", "blackhole", f"{alice.address}/32")
    alice.stands(which, "lost")
    alice.cli("peers", "offer-again", which)
    ip("-n", bob.space, "route", "delete", "blackhole", f"{alice.address}/32")
    (pair.folder / "go-again").touch()
    pair.completed(which)
    assert pair.begun("go-again") == 1


def lost_on(machine: Machine) -> int:
    """How many packets the machine could not send."""
    told = subprocess.run(
        ["tc", "-s", "-j", "-n", machine.space, "qdisc", "show", "dev", CABLE],
        capture_output=True,
        check=True,
        timeout=BOUND_S,
    )
    return sum(int(each["drops"]) for each in json.loads(told.stdout))


def test_a_line_that_loses_packets_costs_time_and_nothing_else(pair: TwoMachines) -> None:
    alice, bob = pair.alice, pair.bob
    alice.start()
    bob.start()
    pair.meet()
    for machine in (alice, bob):
        # No more than two packets fit into what waits for the line; others are lost.
        shape = ("rate", "256kbit", "burst", "1600", "limit", "3200")
        subprocess.run(
            ["tc", "-n", machine.space, "qdisc", "add", "dev", CABLE, "root", "tbf", *shape],
            check=True,
            timeout=BOUND_S,
        )
    text = "x" * 20_000
    made = [alice.delegate("echo", f"{number} {text}", "bob") for number in range(5)]
    for which in made:
        pair.completed(which)
    assert all(lost_on(machine) > 0 for machine in (alice, bob))
    runs = (pair.folder / "runs").read_text()
    assert [runs.count(f"bob echo {number} ") for number in range(5)] == [1] * 5


def test_daemons_on_two_machines_meet_as_it_is_written(pair: TwoMachines) -> None:
    """Each line is run on a machine of its own, as far as the kernel is concerned."""
    agents = pair.folder / "agents.py"
    agents.write_text(GUIDE_AGENTS)
    (lines,) = [block for block in re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL) if "--http-bind-addr" in block]
    addresses = {"192.0.2.1": pair.alice.address, "192.0.2.2": pair.bob.address}
    serving: list[subprocess.Popen[bytes]] = []
    try:
        for line, machine in zip(lines.strip().splitlines(), (pair.bob, pair.alice), strict=True):
            for written, address in addresses.items():
                line = line.replace(written, address)  # noqa: PLW2901
            serving.append(
                subprocess.Popen(
                    [*machine.inside, "bash", "-c", f"exec env {line}"],
                    cwd=pair.folder,
                    env=environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        lab, office = pair.folder / "lab", pair.folder / "office"
        for home in (lab, office):
            until(lambda at=home: covenant("--home", str(at), "peers", "config").code, lambda code: code == 0)  # type: ignore[misc]
        asked = ("peers", "add", f"http://{pair.bob.address}:9102", "--name", "lab")
        assert covenant("--home", str(office), *asked).code == 0
        asked = ("peers", "add", f"http://{pair.alice.address}:9101", "--name", "office")
        assert covenant("--home", str(lab), *asked).code == 0
        # Straight away: the introduction is waited for.
        did = covenant("--home", str(office), "peers", "delegate", "researcher", "the tides", "--peer", "lab")
        assert (did.code, "All there is about the tides." in did.out) == (0, True), did
    finally:
        for process in serving:
            process.terminate()
            process.wait(BOUND_S)
