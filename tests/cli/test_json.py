"""Every command with --json: exactly the object that its help documents."""

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from covenant.cli.main import command as root
from scripts.generate_docs import leaves
from tests.cli.daemons import Daemon
from tests.waits import BOUND_S

SHAPE = re.compile(r'With (?:(?:--next|filters) and )?--json: \{"kind": "([a-z0-9_]+)"((?:, [a-z0-9_]+\??)*)\}')
COMMANDS = {" ".join(path): command for path, command in leaves(root)}


def shapes(name: str) -> dict[str, tuple[set[str], set[str]]]:
    """Kind, fields that are always there, fields that may be left out; as the command's help says."""
    found = {}
    for kind, listed in SHAPE.findall(COMMANDS[name].epilog or ""):
        fields = [field for field in listed.split(", ") if field]
        optional = {field.removesuffix("?") for field in fields if field.endswith("?")}
        found[kind] = ({field for field in fields if not field.endswith("?")}, optional)
    return found


def send(daemon: Daemon, *more: str) -> str:
    task_id = daemon.json("a2a", "send", "--to", "bob@host", "paint the fence", *more)["task_id"]
    assert isinstance(task_id, str)
    return task_id


def as_bob(daemon: Daemon) -> list[str]:
    return ["--token-file", str(daemon.home / "bob.token")]


def lease(daemon: Daemon) -> tuple[str, str]:
    """A task of its own and its lease: whatever else is queued for bob is answered first."""
    task_id = send(daemon)
    while True:
        answer = daemon.json("a2a", "next", *as_bob(daemon))
        lease_id = answer["lease"]["lease_id"]
        if answer["task"]["id"] == task_id:
            return task_id, lease_id
        daemon.json("a2a", "respond", answer["task"]["id"], "--lease-id", lease_id, "done", *as_bob(daemon))


def grant(daemon: Daemon) -> str:
    signature = daemon.json("capabilities", "grant", "a2a.send.somebody@else")["signature_b58"]
    assert isinstance(signature, str)
    return signature


def enroll(daemon: Daemon) -> str:
    display = f"agent-{uuid4().hex[:8]}@host"
    daemon.json("identities", "enroll", display)
    return display


def tenant(daemon: Daemon) -> str:
    name = f"t-{uuid4().hex[:8]}"
    daemon.json("tenants", "add", name)
    return name


def new_agent_id() -> str:
    return f"a-{uuid4().hex[:8]}"


def agent(daemon: Daemon) -> str:
    agent_id = new_agent_id()
    daemon.json("agents", "add", agent_id)
    return agent_id


def scheduled(daemon: Daemon) -> list[str]:
    """A stored agent, and a schedule of it."""
    agent_id = agent(daemon)
    daemon.json("schedules", "add", agent_id, "yearly", "--cron", "0 0 1 1 *", "--time-zone", "Europe/Berlin")
    return [agent_id, "yearly"]


def answering(daemon: Daemon) -> str:
    """The URL of an agent that has an answer to everything."""
    agent_id = new_agent_id()
    said = json.dumps({"type": "assistant", "text": "yes"})
    daemon.json("agents", "add", agent_id, "--command", f"printf '%s\\n' '{said}'")
    return f"{daemon.url}/v1/a2a/agents/{agent_id}"


def waiting(daemon: Daemon) -> str:
    """A task that waits for its sender."""
    agent_id = new_agent_id()
    asks = json.dumps({"type": "approval_request", "text": "may I?"})
    daemon.json("agents", "add", agent_id, "--command", f"printf '%s\\n' '{asks}'")
    daemon.run("call", agent_id, "go")
    (task,) = daemon.json("a2a", "list", "--agent", agent_id)["tasks"]
    assert task["a2a_state"] == "input-required"
    return str(task["task_id"])


def pushed(daemon: Daemon) -> list[str]:
    """A task with a webhook that nobody listens at: its id, and the configuration's."""
    agent_id = agent(daemon)
    token = (daemon.home / "operator.token").read_text().strip()
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "go"}]}
    hook = {"id": "hook", "url": "https://example.com/hook"}
    configuration = {"returnImmediately": True, "taskPushNotificationConfig": hook}
    request = urllib.request.Request(
        f"{daemon.url}/v1/a2a/agents/{agent_id}/message:send",
        json.dumps({"message": message, "configuration": configuration}).encode(),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=BOUND_S) as answer:
        return [json.load(answer)["task"]["id"], "hook"]


def settled(daemon: Daemon) -> str:
    task_id, lease_id = lease(daemon)
    daemon.json("a2a", "respond", task_id, "--lease-id", lease_id, "done", *as_bob(daemon))
    return task_id


def _leased(daemon: Daemon) -> list[str]:
    task_id, lease_id = lease(daemon)
    return [task_id, "--lease-id", lease_id]


def backed_up(daemon: Daemon) -> str:
    file = str(daemon.home.parent / f"{uuid4()}.backup")
    daemon.json("backup", file)
    return file


def stored(daemon: Daemon) -> str:
    """The hash of a file that is there."""
    file = daemon.home.parent / str(uuid4())
    file.write_text(file.name)
    return str(daemon.json("files", "put", str(file))["sha256"])


def after(_: str, *words: str) -> list[str]:
    """The words, once something is there for the command to find."""
    return list(words)


Words = Callable[[Daemon], list[str]]
# What to say after each command's name, so that it is answered with its object.
RUNS: dict[str, list[Words]] = {
    "a2a status": [lambda _: [], lambda _: ["--limit", "3", "--state", "in-flight", "--min-lease-age-ms", "5"]],
    "a2a watch": [lambda _: ["--once"]],
    "a2a requeue": [
        lambda d: [lease(d)[0], "--reason", "it is gone", "--duplicate-risk", "operator-accepted"],
        lambda d: after(lease(d)[0], "--agent", "bob@host", "--reason", "gone", "--duplicate-risk", "idempotent"),
    ],
    "a2a cancel": [
        lambda d: [lease(d)[0], "--reason", "not needed"],
        lambda d: after(lease(d)[0], "--state", "in-flight", "--reason", "not needed"),
    ],
    "a2a approve": [lambda d: [waiting(d), "--answer-id", "a"]],
    "a2a deny": [lambda d: [waiting(d), "too dear"]],
    "a2a answer": [lambda d: [waiting(d), "blue"]],
    "a2a signal": [lambda d: [lease(d)[0], "approval", '{"by": "ann"}']],
    "a2a release": [lambda d: [*_leased(d), "--reason", "not begun", *as_bob(d)]],
    "a2a renew": [lambda d: [*_leased(d), *as_bob(d)]],
    "a2a force-error": [
        lambda d: [lease(d)[0], "--reason", "it is gone", "--message", "sorry"],
        lambda d: after(lease(d)[0], "--state", "in-flight", "--reason", "it is gone", "--message", "sorry"),
    ],
    "a2a retry-stale": [lambda _: [], lambda _: ["--enable", "--min-lease-age-ms", "1", "--max-requeues", "0"]],
    "a2a compact": [lambda d: after(send(d))],
    "a2a send": [
        lambda _: ["--to", "bob@host", "hello", "--kind", "greeting", "--key", "k", "--deadline-in", "1h"],
        lambda _: ["--to", "bob@host", "hello", "--parent", str(uuid4()), "--key", "same", "--idempotent"],
    ],
    "a2a next": [lambda d: after(send(d), *as_bob(d)), lambda d: ["--wait-ms", "1", "--max", "9", *as_bob(d)]],
    "a2a respond": [
        lambda d: [*lease(d)[:1], "done", *as_bob(d)],
        lambda d: [*lease(d)[:1], "--error", "no paint", *as_bob(d)],
        lambda d: [*lease(d)[:1], "--partial", "half of it", *as_bob(d)],
    ],
    "a2a results": [
        lambda d: after(settled(d)),
        lambda d: after(settled(d), "--next", "--wait-ms", "1", "--max", "2"),
    ],
    "a2a show": [lambda d: [settled(d)]],
    "a2a frames": [lambda d: [settled(d)]],
    "a2a tree": [lambda d: [send(d)], lambda _: [str(uuid4())]],
    "a2a list": [lambda _: ["--limit", "3"], lambda _: ["--count"]],
    "a2a export": [lambda d: [str(d.home / "tasks.jsonl")]],
    "logs": [lambda d: [settled(d)]],
    "attention": [lambda _: []],
    "completion": [lambda _: ["bash"], lambda _: ["fish"]],
    "capabilities recent": [lambda d: after(grant(d), "-n", "5")],
    "capabilities grant": [
        lambda _: ["a2a.repair.requeue", "--to", "bob@host", "--scope", '{"max_uses": 1}', "--expires-at", "9" * 13],
    ],
    "capabilities revoke": [lambda d: [grant(d)], lambda _: ["z" * 88]],
    "capabilities purge": [lambda _: ["--before-ms", "1"], lambda _: ["--older-than-ms", "100000"]],
    "audit recent": [lambda _: ["-n", "3", "--since-ms", "1"], lambda _: ["--type", "capability_granted"]],
    "audit export": [lambda d: [str(d.home / "audit.jsonl"), "--issuer", "operator"]],
    "audit verify": [lambda _: []],
    "audit purge": [lambda _: ["--before-ms", "1"]],
    "identities enroll": [lambda _: [f"a-{uuid4().hex[:8]}@host", "--grant", "a2a.send.bob@host"]],
    "identities list": [lambda _: ["--limit", "2", "--live-only"], lambda _: ["--prefix", "bob@"]],
    "identities revoke": [lambda d: [enroll(d)]],
    "identities rotate": [lambda d: [enroll(d)], lambda _: []],
    "identities purge": [lambda _: ["--before-ms", "1"]],
    "tenants add": [lambda _: [f"t-{uuid4().hex[:8]}", "--concurrency", "2", "--rate-per-min", "60", "--burst", "5"]],
    "tenants list": [lambda _: []],
    "tenants limit": [lambda d: [tenant(d), "--burst", "5"]],
    "a2a push list": [lambda _: [], lambda _: ["--limit", "1"]],
    "a2a push retry": [pushed],
    "tenants remove": [lambda d: [tenant(d), "--dry-run"], lambda d: [tenant(d), "--reason", "over", "--yes"]],
    "tenants traces": [lambda d: [f"gone-{uuid4().hex[:8]}"]],
    "tenants disable": [lambda d: [tenant(d)]],
    "tenants enable": [lambda d: [tenant(d)]],
    "tenants rotate": [lambda d: [tenant(d)], lambda _: ["default"]],
    "agents add": [
        lambda d: [new_agent_id(), "--tenant", tenant(d), "--name", "n", "--description", "d", "--skill", "s"],
        lambda d: [agent(d), "--kind", "model", "--replace"],
        lambda _: [new_agent_id(), "--command", "cat -u"],
    ],
    "agents list": [lambda _: [], lambda d: ["--tenant", tenant(d)]],
    "agents show": [lambda d: [agent(d)], lambda _: ["index"]],
    "agents remove": [lambda d: [agent(d)]],
    "schedules list": [lambda d: ["--agent", scheduled(d)[0]], lambda _: []],
    "schedules show": [scheduled],
    "schedules add": [lambda d: [agent(d), "often", "--every", "1h", "--text", "now", "--catch-up", "5m"]],
    "schedules pause": [scheduled],
    "schedules resume": [scheduled],
    "schedules run-now": [scheduled],
    "schedules remove": [scheduled],
    "files put": [lambda d: [str(d.home / "operator.token")]],
    "files get": [lambda d: [stored(d), str(d.home.parent / str(uuid4()))]],
    "files list": [lambda d: after(stored(d), "--limit", "1"), lambda d: ["--tenant", tenant(d)]],
    "call": [lambda d: [answering(d), "go", "--token-file", str(d.home / "operator.token")]],
    "card get": [lambda d: [answering(d), "--token-file", str(d.home / "operator.token")]],
    "init": [lambda d: [str(d.home / "agents.py")]],
    "settings show": [lambda _: [], lambda _: ["--files"]],
    "ui": [lambda _: ["--print"]],
    "version": [lambda _: []],
    "ledger nodes": [lambda _: []],
    "doctor": [lambda _: []],
    "backup": [lambda d: [str(d.home.parent / f"{uuid4()}.backup")]],
    "restore": [lambda d: [backed_up(d), "--home", str(d.home.parent / str(uuid4()))]],
}


def test_every_command_is_run_here_but_the_daemon_itself() -> None:
    # Those of peers need two daemons: tests/e2e/peers has them. A passphrase is changed while none runs. The kit starts
    # servers of its own: tests/prove. A drain ends the daemon: test_drain. A database: tests/e2e/test_shared_ledger.
    of_peers = {name for name in COMMANDS if name.startswith("peers ")}
    assert COMMANDS.keys() - RUNS.keys() - of_peers == {
        *("serve", "drain", "mcp", "passphrase", "prove"),
        *("ledger init", "ledger migrate", "ledger move", "ledger restored"),
    }
    assert RUNS.keys() <= COMMANDS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_a_command_answers_with_the_object_that_its_help_documents(daemon: Daemon, name: str) -> None:
    documented = shapes(name)
    answered = set()
    for words in RUNS[name]:
        answer = daemon.json(*name.split(), *words(daemon))
        always, optional = documented[answer["kind"]]
        assert always <= answer.keys() - {"kind"} <= always | optional
        answered.add(answer["kind"])
    assert answered == documented.keys()


def test_status_is_one_object_with_its_nulls(daemon: Daemon) -> None:
    ran = daemon.run("a2a", "status", "--min-lease-age-ms", "300000", "--json")
    assert list(json.loads(ran.out)) == [
        "kind",
        "limit",
        "min_lease_age_ms",
        "deadline_within_ms",
        "state_filter",
        "tasks",
        "results",
    ]
    assert ran.json | {"tasks": [], "results": []} == {
        "kind": "a2a_status",
        "limit": 10,
        "min_lease_age_ms": 300_000,
        "deadline_within_ms": None,
        "state_filter": None,
        "tasks": [],
        "results": [],
    }


def test_status_tells_how_much_there_is_of_everything_if_asked_to(daemon: Daemon) -> None:
    lease(daemon)
    counts = daemon.json("a2a", "status", "--counts")["counts"]
    names = {
        "queued",
        "in_flight",
        "parked",
        "following",
        "result_pending",
        "cached",
        "holders_lost",
        "delegations_lost",
    }
    assert set(counts) == names
    assert counts["in_flight"] >= 1
    assert daemon.run("a2a", "status", "--counts", "--json", *as_bob(daemon)).json["counts"] is None
    # Other tests' tasks are on the move in this daemon; the one that was leased here stays.
    assert re.search(r"\b[1-9]\d* in flight", daemon.run("a2a", "status").out)


@pytest.mark.parametrize("spelling", ["in_flight", "in-flight"])
def test_both_spellings_of_a_state_are_one_filter(daemon: Daemon, spelling: str) -> None:
    lease(daemon)
    answer = daemon.json("a2a", "status", "--state", spelling)
    assert answer["state_filter"] == "in_flight"
    assert {entry["state"] for entry in answer["tasks"]} == {"in_flight"}


@pytest.mark.parametrize("spelling", ["idempotent", "operator-accepted", "operator_accepted"])
def test_requeue_takes_every_spelling_of_its_posture(daemon: Daemon, spelling: str) -> None:
    task_id, lease_id = lease(daemon)
    repaired = daemon.json(
        "a2a", "requeue", task_id, "--reason", "r", "--duplicate-risk", spelling, "--lease-id", lease_id
    )
    assert repaired["outcome"] == {"task_id": task_id, "action": "requeued", "state": "queued", "attempt": 1}


def test_a_dry_retry_says_what_it_would_do_and_does_not_do_it(daemon: Daemon) -> None:
    task_id = send(daemon, "--key", str(uuid4()), "--idempotent")
    while daemon.json("a2a", "next", *as_bob(daemon))["task"]["id"] != task_id:
        pass
    wide = ["--min-lease-age-ms", "0", "--max-requeues", "100"]
    report = daemon.json("a2a", "retry-stale", *wide)["report"]
    assert report["requeued"] == []
    assert task_id in {each["task_id"] for each in report["would_requeue"]}
    done = daemon.json("a2a", "retry-stale", "--enable", *wide)["report"]
    assert task_id in {each["task_id"] for each in done["requeued"]}


def test_a_rotated_operator_token_is_used_by_the_next_command(daemon: Daemon) -> None:
    rotated = daemon.json("identities", "rotate")
    assert rotated["display"] == "operator@local"
    assert (daemon.home / "operator.token").read_text().strip() == rotated["token_b58"]
    assert daemon.json("a2a", "status")["kind"] == "a2a_status"


def test_the_settings_are_those_of_the_running_daemon_and_those_of_the_files_without_one(short_path: Path) -> None:
    daemon = Daemon(short_path / "settings", "--http-keep-alive-ms", "123000")
    name, given = "http.keep_alive_ms", {"COVENANT_HTTP_PORT": "99"}

    def shown(*words: str) -> tuple[Any, ...]:
        answer = daemon.run("settings", "show", "--json", *words, env=given).json
        rows = {row["name"]: row for row in answer["settings"]}
        return answer["shown_from"], rows[name]["value"], rows[name]["source"], rows["http.port"]["value"]

    try:
        source, value, origin, port = shown()
        assert (source, value, origin) == ("daemon", 123_000, "flag")
        assert port != 99
        assert shown("--files")[::3] == ("files", 99)
        worker = daemon.json("identities", "enroll", "bob@host")["token_b58"]
        refused = daemon.run("settings", "show", env={"COVENANT_TOKEN": worker})
        assert (refused.code, "requires the operator's token" in refused.err) == (1, True)
    finally:
        daemon.stop()
    assert (*shown()[::3], shown()[2]) == ("files", 99, "default")


def test_settings_tell_value_source_and_meaning(daemon: Daemon) -> None:
    ran = daemon.run("settings", "show", "--files", "--json", env={"COVENANT_HTTP_PORT": "99"})
    rows = {row["name"]: row for row in ran.json["settings"]}
    assert (rows["http.port"]["value"], rows["http.port"]["source"]) == (99, "environment")
    assert rows["home"] | {"meaning": ""} == {
        "name": "home",
        "value": str(daemon.home),
        "default": "",
        "source": "flag",
        "variable": "COVENANT_HOME",
        "meaning": "",
    }


def test_a_command_answers_with_its_own_kind_whatever_the_daemon_calls_it(short_path: Path) -> None:
    """A daemon with `legacy_kinds` answers `a2_a_…` on its socket."""
    old = Daemon(short_path / "legacy", "--doors-legacy-kinds", "true")
    try:
        assert old.json("a2a", "next")["kind"] == "a2a_task_opt"
        assert old.json("a2a", "results", "--next")["kind"] == "a2a_result_opt"
        assert old.json("a2a", "status")["kind"] == "a2a_status"
    finally:
        assert old.stop() == 0
