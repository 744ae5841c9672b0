"""The Helm chart. Helm itself is not run: its values are put in by hand, and what comes out is checked as YAML.

What the container runs is run with its environment, outside a container.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
import yaml

import covenant
from covenant.daemon.settings import DaemonSettings
from tests.certificates import Authority
from tests.cli.daemons import environment, said_until
from tests.waits import BOUND_S

CHART = Path(__file__).parents[2] / "deploy" / "helm"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
PLACE = re.compile(r"\{\{ \.(Values|Release)\.(\w+) \}\}")


def rendered(name: str, **values: str) -> dict[str, Any]:
    text = (CHART / "templates" / name).read_text(encoding="utf-8")

    def value(found: re.Match[str]) -> str:
        return str((VALUES | values)[found[2]]) if found[1] == "Values" else "covenant"

    made = PLACE.sub(value, text)
    assert "{{" not in made, "a template uses what is not known here"
    read = yaml.safe_load(made)
    assert isinstance(read, dict)
    return read


POD = rendered("statefulset.yaml")["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def test_the_chart_names_itself_and_every_value_is_used() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["apiVersion"], chart["name"]) == ("v2", "covenant")
    assert (chart["version"], chart["appVersion"]) == (covenant.__version__, covenant.__version__)
    used = {name for path in (CHART / "templates").iterdir() for _, name in PLACE.findall(path.read_text())}
    assert used == {*VALUES, "Name"}


def test_kubernetes_takes_what_the_chart_makes(tmp_path: Path) -> None:
    """By the schemas of its API, in which every field is known."""
    checker = str(Path(sys.executable).with_name("kubernetes-validate"))

    def checked(text: str) -> subprocess.CompletedProcess[str]:
        made = tmp_path / "made.yaml"
        made.write_text(text, encoding="utf-8")
        return subprocess.run([checker, "--strict", str(made)], capture_output=True, text=True, check=False)

    for name in ("statefulset.yaml", "service.yaml"):
        text = yaml.safe_dump(rendered(name))
        done = checked(text)
        assert done.returncode == 0, done.stdout + done.stderr
        assert checked(text.replace("selector:", "selectr:")).returncode != 0


def test_one_daemon_has_the_volume_no_root_and_time_to_stop() -> None:
    spec = rendered("statefulset.yaml")["spec"]
    assert spec["replicas"] == 1
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"] is True
    assert CONTAINER["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert POD["terminationGracePeriodSeconds"] > DaemonSettings().grace_ms / 1000
    assert [each["metadata"]["name"] for each in spec["volumeClaimTemplates"]] == ["home"]
    service = rendered("service.yaml")["spec"]
    assert service["selector"].items() <= spec["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("scheme", ["HTTP", "HTTPS"])
def test_what_the_container_runs_passes_its_own_probes(short_path: Path, scheme: str) -> None:
    (container,) = rendered("statefulset.yaml", scheme=scheme)["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in CONTAINER["env"]}
    variables |= {"COVENANT_HOME": str(short_path / "home"), "COVENANT_HTTP_PORT": "0"}
    authority = Authority(short_path / "certificates")
    if scheme == "HTTPS":
        pair = authority.issue("127.0.0.1")
        (short_path / "home").mkdir(mode=0o700)
        settings = f'[http]\ntls_cert = "{pair.cert}"\ntls_key = "{pair.key}"\n'
        (short_path / "home" / "settings.toml").write_text(settings)
    program = Path(sys.executable).with_name("covenant")
    daemon = subprocess.Popen(
        [str(program), *CONTAINER["args"]],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(**variables),
    )
    try:
        said = said_until(daemon, b"\n")
        port = urlsplit(said.split()[3]).port
        for probe in ("livenessProbe", "readinessProbe"):
            asked = container[probe]["httpGet"]
            url = f"{asked['scheme'].lower()}://127.0.0.1:{port}{asked['path']}"
            with urlopen(url, timeout=BOUND_S, context=authority.client()) as answer:
                assert answer.status == 200
    finally:
        daemon.terminate()
        daemon.communicate(timeout=BOUND_S)
    assert daemon.returncode == 0
