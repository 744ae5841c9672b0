"""The files that are published: they build, hold what they should, and an empty environment runs the wheel.

The packages come from where pip is configured to find them, as `make` gets them. Without that, these tests fail.
"""

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

import covenant
from tests.cli.daemons import environment, said_until
from tests.waits import BOUND_S

ROOT = Path(__file__).parents[2]
CORE_MB_MAX = 55
INSTALL_S_MAX = 200
PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.15")
URL = re.compile(r"http://[^ ]+:\d+")


def run(*words: str, cwd: Path | None = None, within_s: float = INSTALL_S_MAX) -> str:
    env = environment(PIP_DISABLE_PIP_VERSION_CHECK="1")
    env.pop("PYTHONPATH", None)
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=within_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the repository's files, and the wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("built")
    copy = folder / "source"
    names = run(
        "git", "ls-files", "-co", "--exclude-standard", "src", "README.md", "LICENSE", "pyproject.toml", cwd=ROOT
    )
    for name in filter(lambda name: (ROOT / name).is_file(), names.splitlines()):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(copy))
    return folder / "dist"


def one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def metadata(built: Path) -> Message:
    with zipfile.ZipFile(one(built, "*.whl")) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(wheel.read(name))


def test_twine_finds_nothing_wrong(built: Path) -> None:
    said = run(sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir()))
    assert said.count("PASSED") == 2


def test_the_metadata_is_complete(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("covenant-a2a", covenant.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    for field in ("Summary", "Keywords", "Author", "Description-Content-Type", "License-File"):
        assert metadata[field], field
    classifiers = metadata.get_all("Classifier") or []
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(classifiers)
    assert set(metadata.get_all("Provides-Extra") or ()) == {"grpc", "mcp", "model", "otel", "peers", "postgres"}


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(one(built, "*.whl")) as wheel:
        names = wheel.namelist()
    info = f"covenant_a2a-{covenant.__version__}.dist-info/"
    assert {name.partition("/")[0] + "/" for name in names} == {"covenant/", info}
    there = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "covenant").rglob("*.py")}
    assert there <= set(names)
    assert "covenant/py.typed" in names
    kept = {path.suffix for path in (ROOT / "src" / "covenant").rglob("*.sql")}
    assert kept <= {Path(name).suffix for name in names}


def test_the_sdist_holds_what_builds_the_wheel(built: Path) -> None:
    with tarfile.open(one(built, "*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/covenant/__init__.py"} <= names


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel, and what pip brought along."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"))
    run(*pip, "install", "--quiet", "--no-compile", str(one(built, "*.whl")))
    return folder / "bin"


@pytest.mark.matrix
@pytest.mark.parametrize("python", PYTHONS)
def test_every_locked_package_has_a_wheel_for_each_python(tmp_path: Path, python: str) -> None:
    """Also for interpreters that are not here: an install there compiles nothing."""
    locks = [word for name in ("runtime", "extras") for word in ("-r", str(ROOT / "requirements" / f"{name}.lock"))]
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed")
    run(*pip, "--only-binary", ":all:", "--python-version", python, "--target", str(tmp_path), *locks)


def test_the_core_is_small(installed: Path) -> None:
    (libraries,) = (installed.parent / "lib").glob("python3*/site-packages")
    size = sum(path.stat().st_size for path in libraries.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert size / 2**20 <= CORE_MB_MAX


@pytest.fixture
def served(installed: Path, short_path: Path) -> Iterator[Path]:
    """A folder in which the installed wheel has made its first files, and serves them."""
    run(str(installed / "covenant"), "--home", "home", "init", cwd=short_path)
    daemon = subprocess.Popen(
        [installed / "covenant", "--home", "home", "serve", "agents.py", "--http-port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=short_path,
        env=environment(),
    )
    try:
        said_until(daemon, b"/agents/hello\n")
        yield short_path
    finally:
        daemon.terminate()
        daemon.communicate(timeout=BOUND_S)


def test_the_wheel_in_an_empty_environment_makes_a_first_exchange(installed: Path, served: Path) -> None:
    said = run(str(installed / "covenant"), "--home", "home", "call", "hello", "world", cwd=served, within_s=BOUND_S)
    assert said == "Hello, world!\n"
    where = "import covenant; print(covenant.__file__)"
    assert run(str(installed / "python"), "-c", where, cwd=served).startswith(str(installed.parent) + os.sep)


@pytest.mark.matrix
def test_make_names_each_package_as_it_comes(tmp_path: Path) -> None:
    """On a copy: the environment of the tests stays as it is."""
    copy = tmp_path / "clone"
    names = run(
        "git", "ls-files", "src", "requirements", "README.md", "LICENSE", "pyproject.toml", "Makefile", cwd=ROOT
    )
    for name in filter(lambda name: (ROOT / name).is_file(), names.splitlines()):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    said = run("make", "--no-print-directory", ".venv/.runtime", f"PYTHON={sys.executable}", cwd=copy).splitlines()
    pins = re.findall(r"^(\S+)==", (ROOT / "requirements" / "runtime.lock").read_text(encoding="utf-8"), re.MULTILINE)
    assert said[0].startswith("making .venv for Python 3.")
    assert f"installing the {len(pins)} packages of requirements/runtime.lock" in said
    named = [line.strip().replace("-", "_") for line in said]
    assert [pin for pin in pins if not any(line.startswith(pin.replace("-", "_")) for line in named)] == []
    assert said[-1] == "installing covenant from this folder"
    assert run(str(copy / ".venv" / "bin" / "covenant"), "--version").strip().endswith(covenant.__version__)
