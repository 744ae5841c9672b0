"""Agents from files: what is read, what is reported, and what becomes of an agent whose file changes or goes."""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from covenant.daemon.agent_files import AgentFiles, list_agent_files, read_definition
from covenant.daemon.telemetry import Log
from covenant.exchange.catalogue import Catalogue
from covenant.ledger.embedded.open import memory_ledger
from covenant.ledger.machine.identity_commands import AddTenant
from covenant.model.agent_definition import AgentDefinition
from covenant.model.errors import Invalid
from covenant.model.tenants import DEFAULT, Tenant
from covenant.seal.keys import new_private_key
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.samples import OPERATOR


class Place:
    """A home's `agents` folder beside a catalogue."""

    def __init__(self, home: Path, catalogue: Catalogue) -> None:
        self.home = home
        self.catalogue = catalogue
        self.files = AgentFiles(home, catalogue, Log())
        self._writes = 0

    def write(self, name: str, content: str | dict[str, Any]) -> Path:
        path = self.home / "agents" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        # Two writes within one tick of the file system's clock are two all the same.
        self._writes += 1
        os.utime(path, ns=(0, self._writes * 1_000_000_000))
        return path

    def ids(self, tenant: str = DEFAULT) -> list[str]:
        self.files.refresh()
        return [agent.id for agent in self.catalogue.agents(tenant)]

    def problem(self, path: Path) -> str:
        self.files.refresh()
        return self.files.problems[path]

    def goal(self, agent_id: str) -> str:
        agent = self.catalogue.agent(DEFAULT, agent_id)
        assert agent is not None
        return agent.definition.goal


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    tmp_path.chmod(0o700)
    ledger = await memory_ledger(clock=FakeClock())
    await ledger.commit(AddTenant(by=OPERATOR, tenant=Tenant(name=DEFAULT)))
    yield Place(tmp_path, Catalogue(ledger, new_private_key()))
    await ledger.close()


async def add_tenant(place: Place, name: str) -> None:
    await place.catalogue._ledger.commit(AddTenant(by=OPERATOR, tenant=Tenant(name=name)))


async def test_without_a_folder_there_is_nothing(place: Place) -> None:
    assert place.ids() == ["index"]


async def test_json_and_toml_are_read_and_a_file_names_its_agent_unless_it_says_another(place: Place) -> None:
    place.write("writer.json", {"kind": "process", "command": ["cat"]})
    place.write("second.toml", 'id = "adviser"\nkind = "worker"\n[advisor]\nmodel = "m"\nmode = "gate"\n')
    place.write("notes.txt", "no agent")
    place.write(".hidden.json", "{")
    assert place.ids() == ["index", "adviser", "writer"]
    agent = place.catalogue.agent(DEFAULT, "adviser")
    assert agent is not None
    assert agent.source == "file"
    assert agent.definition.advisor is not None
    assert agent.definition.advisor.mode == "gate"
    assert place.files.problems == {}


async def test_a_changed_file_changes_its_agent_and_one_that_goes_takes_it_along(place: Place) -> None:
    path = place.write("writer.json", {"goal": "old"})
    assert place.ids() == ["index", "writer"]
    place.write("writer.json", {"goal": "new"})
    place.files.refresh()
    assert place.goal("writer") == "new"
    place.write("writer.json", {"id": "renamed"})
    assert place.ids() == ["index", "renamed"]
    path.unlink()
    assert place.ids() == ["index"]


async def test_a_bad_file_is_reported_by_its_key_and_stops_nothing(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.write("good.json", {})
    bad = place.write("bad.json", {"colour": "red"})
    worse = place.write("worse.toml", "id = ")
    for _ in range(3):
        assert place.ids() == ["index", "good"]
    assert place.problem(bad) == "unknown key /colour"
    assert place.problem(worse).startswith("not TOML: ")
    assert sum(record.message == "agents.bad_file" for record in caplog.records) == 2, "once each"
    place.write("bad.json", {})
    assert place.ids() == ["index", "bad", "good"]
    assert bad not in place.files.problems


async def test_an_agent_whose_file_was_spoilt_stays_as_it_was(place: Place) -> None:
    path = place.write("writer.json", {"goal": "old"})
    place.files.refresh()
    place.write("writer.json", {"goal": "new", "brevity": "long"})
    assert place.problem(path).startswith("/brevity: ")
    assert place.goal("writer") == "old"


async def test_a_folder_is_for_the_tenant_of_its_name_once_there_is_one(place: Place) -> None:
    path = place.write("acme/writer.json", {})
    assert place.problem(path) == "no tenant is called 'acme'"
    await add_tenant(place, "acme")
    assert place.ids("acme") == ["index", "writer"]
    assert place.ids() == ["index"]
    assert place.files.problems == {}


async def test_of_two_files_for_one_agent_the_first_counts_until_it_goes(place: Place) -> None:
    first, second = place.write("a.json", {"id": "writer"}), place.write("b.json", {"id": "writer"})
    assert place.problem(second) == "/id: 'writer' is declared in agents/a.json already"
    first.unlink()
    place.files.refresh()
    assert place.ids() == ["index", "writer"]
    assert place.files.problems == {}


async def test_what_is_not_a_plain_file_is_not_opened(place: Place) -> None:
    (place.home / "agents").mkdir()
    path = place.home / "agents" / "pipe.json"
    os.mkfifo(path)
    (place.home / "agents" / "nowhere.json").symlink_to("nothing")
    assert place.problem(path) == "is not a plain file"
    assert place.ids() == ["index"]


async def test_a_file_that_others_may_write_runs_nothing(place: Place) -> None:
    place.home.chmod(0o755)
    path = place.write("writer.json", {"kind": "process", "command": ["cat"]})
    path.chmod(0o664)
    assert "chmod go-w" in place.problem(path)
    assert place.ids() == ["index"]
    place.home.chmod(0o700)
    assert not list_agent_files(place.home)[0].problem, "nobody else can reach it now"


def test_a_definition_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b" " * 300_000)
    with pytest.raises(Invalid, match="at most"):
        read_definition(path)
    path.write_bytes(b"[" * 100_000)
    with pytest.raises(Invalid, match="not JSON"):
        read_definition(path)


async def test_a_file_takes_no_agent_away_from_a_python_file_and_is_used_once_that_agent_is_gone(place: Place) -> None:
    place.catalogue.add_resident(DEFAULT, AgentDefinition(id="greeter", goal="from code"), "code")
    path = place.write("greeter.json", {"goal": "from a file"})
    assert "served from a Python file" in place.problem(path)
    assert place.goal("greeter") == "from code"
    path.unlink()
    assert place.ids() == ["index", "greeter"]
    path = place.write("greeter.json", {"goal": "from a file"})
    assert place.ids() == ["index", "greeter"]
    place.catalogue.remove_resident(DEFAULT, "greeter")
    place.files.refresh()
    assert place.goal("greeter") == "from a file"


async def test_a_python_file_takes_the_agent_of_a_file_and_the_file_goes_without_it(place: Place) -> None:
    path = place.write("greeter.json", {"goal": "from a file"})
    place.files.refresh()
    place.catalogue.add_resident(DEFAULT, AgentDefinition(id="greeter", goal="from code"), "code")
    assert "served from a Python file" in place.problem(path)
    path.unlink()
    place.files.refresh()
    assert place.goal("greeter") == "from code"
