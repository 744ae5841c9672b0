"""The container image, the compose file and the systemd unit: their rules, and their commands run as they stand.

No container is started here. What the image runs is run with its environment, on a home and a port of the test's own.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from covenant.daemon.settings import DaemonSettings
from tests.certificates import Authority
from tests.cli.daemons import Daemon, environment, said_until
from tests.places import free_port
from tests.waits import BOUND_S

ROOT = Path(__file__).parents[2]
STAGES = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").split("\nFROM ")
SERVICE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["covenant"]
UNIT = ROOT / "deploy" / "covenant.service"
EXPOSURE_MAX = 20
"""In tenths, as systemd counts: below 2.0 is what it calls OK."""
HOME = "/var/lib/covenant"


def instructions(stage: str, word: str) -> list[str]:
    return [" ".join(found.split()) for found in re.findall(rf"^{word} (.*)$", stage, re.MULTILINE)]


def only(stage: str, word: str) -> str:
    (found,) = instructions(stage, word)
    return found


IMAGE = STAGES[-1]


def test_the_image_runs_without_root_and_keeps_everything_in_one_volume() -> None:
    user = only(IMAGE, "USER")
    assert user.isdecimal()
    assert int(user) > 0
    assert f"--uid {user}" in only(IMAGE, "RUN")
    assert only(IMAGE, "VOLUME") == HOME
    assert f"COVENANT_HOME={HOME}" in only(IMAGE, "ENV")


def test_the_image_installs_what_is_pinned_by_hash() -> None:
    assert len(STAGES) == 3
    build = STAGES[1]
    assert all((ROOT / lock).is_file() for lock in re.findall(r"requirements/\w+\.lock", only(build, "ARG")))
    locked, ours = instructions(build, "RUN")
    assert "--require-hashes" in locked
    assert "--no-deps" in ours
    copied = [word for line in instructions(build, "COPY") for word in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    let_in = {line.strip("!").split("/")[0] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    assert let_in == set(copied)


def linted(*words: str, given: str | None = None) -> str:
    """What a linter of dev.lock says; it ends with an error if something is wrong."""
    program, *rest = words
    command = [str(Path(sys.executable).with_name(program)), *rest]
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=ROOT, timeout=BOUND_S, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_linters_find_nothing_wrong_with_the_image_and_the_composed_services() -> None:
    compose = ("check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    assert linted("hadolint", "Dockerfile") == ""
    assert linted(*compose, "compose.yaml", "deploy/compose.postgres.yaml") == ""


def test_linters_find_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text((ROOT / "compose.yaml").read_text().replace("read_only:", "readonly:"))
    schema = ("check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    assert "readonly" in linted(*schema, str(tmp_path / "compose.yaml"))
    assert "DL3007" in linted("hadolint", "-", given="FROM python:latest\n")


@pytest.mark.parametrize("tls", [False, True])
def test_what_the_image_runs_is_healthy_by_its_own_check_and_stops_at_its_signal(short_path: Path, tls: bool) -> None:
    variables = dict(word.split("=", 1) for word in shlex.split(only(IMAGE, "ENV")))
    del variables["PATH"]
    home, port = str(short_path / "home"), str(free_port())
    env = environment(**{**variables, "COVENANT_HOME": home, "COVENANT_HTTP_PORT": port})
    if tls:
        pair = Authority(short_path / "certificates").issue("127.0.0.1")
        env |= {"COVENANT_HTTP_TLS_CERT": str(pair.cert), "COVENANT_HTTP_TLS_KEY": str(pair.key)}
        env |= {"COVENANT_HTTP_TLS_CLIENT_CA": str(pair.cert), "COVENANT_HTTP_TLS_CLIENT_AUTH": "required"}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = json.loads(only(IMAGE, "ENTRYPOINT")) + json.loads(only(IMAGE, "CMD"))
    check = json.loads(only(IMAGE, "HEALTHCHECK").partition(" CMD ")[2])
    assert only(IMAGE, "EXPOSE") == "8421"
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, cwd=short_path)
    try:
        said_until(daemon, b"covenant listens on")
        assert subprocess.run(check, env=env, timeout=BOUND_S, check=False, capture_output=True).returncode == 0
        assert only(IMAGE, "STOPSIGNAL") == "SIGTERM"
    finally:
        daemon.terminate()
        daemon.communicate(timeout=BOUND_S)
    assert daemon.returncode == 0
    gone = subprocess.run(check, env=env, timeout=BOUND_S, check=False, capture_output=True)
    assert gone.returncode != 0, "the check fails where no daemon is"


def test_the_composed_daemon_has_no_more_rights_than_it_needs() -> None:
    assert SERVICE["read_only"] is True
    assert SERVICE["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in SERVICE["security_opt"]
    assert SERVICE["ports"] == ["127.0.0.1:8421:8421"]
    assert [each.partition(":")[2] for each in SERVICE["volumes"]] == [HOME]


def unit_values() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_waits_longer_for_a_stop_than_the_daemon_takes() -> None:
    grace_s = DaemonSettings().grace_ms / 1000
    assert float(unit_values()["TimeoutStopSec"][0]) > grace_s
    assert float(SERVICE["stop_grace_period"].removesuffix("s")) > grace_s


def test_systemd_takes_the_unit_and_finds_it_closed(tmp_path: Path) -> None:
    values = unit_values()
    assert (values["Type"], values["DynamicUser"], values["ProtectSystem"]) == (["notify"], ["yes"], ["strict"])
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return  # a machine without systemd has nothing that could read the unit
    program = Path(sys.executable).with_name("covenant")
    copy = tmp_path / "covenant.service"
    copy.write_text(UNIT.read_text().replace("/opt/covenant/bin/covenant", str(program)))
    done = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    threshold = ["security", "--offline=true", f"--threshold={EXPOSURE_MAX}", str(copy)]
    assert subprocess.run([analyze, *threshold], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_the_service_manager_is_told_when_it_serves_and_when_it_stops(short_path: Path, kind: str) -> None:
    path = str(short_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path if kind == "path" else f"\0{path}")
        manager.settimeout(BOUND_S)
        named = path if kind == "path" else f"@{path}"
        daemon = Daemon(short_path / "home", env={"NOTIFY_SOCKET": named})
        try:
            assert manager.recv(100) == b"READY=1"
        finally:
            assert daemon.stop() == 0
        assert manager.recv(100) == b"STOPPING=1"


def test_a_service_manager_that_is_gone_stops_nothing(short_path: Path) -> None:
    daemon = Daemon(short_path / "home", env={"NOTIFY_SOCKET": str(short_path / "nobody")})
    daemon.json("a2a", "status")
    log = daemon.log
    assert daemon.stop() == 0
    assert "service.not_notified" in log
