"""The repository as a thing to read and run: pins, targets, sizes, names. Each check is shown to fail too."""

import subprocess
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.meta.tidiness import (
    FUNCTION_LINES_MAX,
    MODULE_LINES_MAX,
    REGISTRIES,
    empty_names,
    kept_files,
    lock_entries,
    loose_pins,
    machine_traces,
    make_targets,
    oversize,
    unnamed_subjects,
)

ROOT = Path(__file__).parents[2]
TARGETS = {"help", "setup", "run", "test", "test-all", "test-pythons", "check", "fmt", "docs", "bench", "prove"}


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


HASH = "--hash=sha256:" + "0" * 64


def pins(name: str) -> dict[str, str]:
    return dict(pin.split("==") for pin, _ in lock_entries(ROOT / "requirements" / f"{name}.lock"))


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(line) for line in project["dependencies"]]


def test_no_file_names_a_registry_or_a_path_of_one_machine() -> None:
    assert list(machine_traces(ROOT)) == []


def test_kept_files_are_those_of_the_repository_and_not_its_surroundings() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in kept_files(ROOT)}
    assert {"Makefile", ".ci/run", ".gitignore", "tests/meta/test_repository.py"} <= names
    assert not any(name.startswith((".git/", ".venv/")) or "__pycache__" in name for name in names)


@pytest.mark.parametrize(
    "text",
    [
        *(f"see {host} for it" for host in REGISTRIES),
        *(f"home = '/{place}/someone'" for place in ("home", "Users", "root", "work")),
        "pip install --" + "index-url somewhere",
    ],
)
def test_a_trace_of_a_machine_is_found(tmp_path: Path, text: str) -> None:
    write(tmp_path, "docs/guide.md", text)
    assert list(machine_traces(tmp_path))


def test_ordinary_paths_and_addresses_are_no_traces(tmp_path: Path) -> None:
    write(tmp_path, "docs/guide.md", "`~/.covenant`, docs/work/it, http://127.0.0.1:8421/work/x, $HOME/root/x")
    assert list(machine_traces(tmp_path)) == []


def test_every_lock_entry_is_an_exact_pin_with_hashes() -> None:
    assert {path.name for path in (ROOT / "requirements").iterdir()} == {
        "runtime.lock",
        "extras.lock",
        "dev.lock",
        "bench.lock",
        "prove.lock",
        "browser.lock",
    }
    assert list(loose_pins(ROOT)) == []


@pytest.mark.parametrize(
    "line",
    [
        f"click>=8 \\\n    {HASH}",
        "click",
        "click==8.*",
        "click==8.5.1",
        "click==8.5.1 --hash=sha256:0",
        "click==8.5.1 \\\n    --hash=sha256:0",
        f"click==8.5.1 \\\n    {HASH} \\\n    --hash=md5:0",
        f"click==8.5.1 \\\n    {HASH} \\\n    --pre",
        "click @ git+ssh://host/click",
        "-r runtime.lock",
        "--pre",
        "Click==8.5.1",
        "",
        f"rich==15.0.0 \\\n    {HASH}\nclick==8.5.1 \\\n    {HASH}",
        f"click==8.5.1 \\\n    {HASH}\nclick==8.5.1 \\\n    {HASH}",
    ],
)
def test_a_lock_line_that_is_no_pin_is_found(tmp_path: Path, line: str) -> None:
    write(tmp_path, "requirements/runtime.lock", f"# comment\n{line}\n")
    assert list(loose_pins(tmp_path))


def test_a_pin_with_its_hashes_is_in_order(tmp_path: Path) -> None:
    write(tmp_path, "requirements/runtime.lock", f"# comment\nclick==8.5.1 \\\n    {HASH} \\\n    {HASH}\n")
    assert list(loose_pins(tmp_path)) == []


def test_the_environments_are_installed_by_hash() -> None:
    made = (ROOT / "Makefile").read_text(encoding="utf-8")
    installs = [
        line
        for line in made.splitlines()
        if ("pip install" in line or "call install" in line) and "LOCK" in line.upper()
    ]
    assert len(installs) == 5
    assert all("--require-hashes" in line for line in installs)


@pytest.mark.parametrize("requirement", declared(), ids=lambda requirement: requirement.name)
def test_a_declared_dependency_is_pinned_within_its_bounds(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins("runtime")[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("lock", [("runtime",), ("runtime", "extras"), ("runtime", "extras", "dev")], ids="+".join)
def test_a_lock_pins_what_its_distributions_need(lock: tuple[str, ...]) -> None:
    pinned = {name for part in lock for name in pins(part)}
    needed = {
        canonicalize_name(requirement.name)
        for name in pinned
        for requirement in map(Requirement, requires(name) or ())
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    assert needed - pinned == set()


def test_no_pin_is_in_two_locks_of_one_environment() -> None:
    names = [name for lock in ("runtime", "extras", "dev") for name in pins(lock)]
    assert len(names) == len(set(names))


def test_the_runtime_lock_holds_the_core_and_nothing_else() -> None:
    found = {"setuptools"} | {canonicalize_name(requirement.name) for requirement in declared()}
    todo = list(found)
    while todo:
        for requirement in map(Requirement, requires(todo.pop()) or ()):
            name = canonicalize_name(requirement.name)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and name not in found:
                found.add(name)
                todo.append(name)
    assert set(pins("runtime")) == found


def test_make_run_installs_the_runtime_lock_alone() -> None:
    planned = subprocess.run(
        ["make", "--no-print-directory", "-n", "-C", str(ROOT), "VENV=.venv-none", "run"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "requirements/runtime.lock" in planned
    assert "extras.lock" not in planned
    assert "dev.lock" not in planned


def test_the_makefile_documents_its_targets() -> None:
    assert make_targets(ROOT).keys() >= TARGETS


def test_an_interpreter_that_is_not_here_is_left_out_by_name() -> None:
    said = subprocess.run(
        ["make", "--no-print-directory", "-C", str(ROOT), "test-pythons", "PYTHONS=3.0"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert said == "python3.0 is not here: left out\n"


def test_make_alone_lists_every_documented_target() -> None:
    listing = subprocess.run(
        ["make", "--no-print-directory", "-C", str(ROOT)], check=True, capture_output=True, text=True
    ).stdout
    for target, purpose in make_targets(ROOT).items():
        assert f"make {target} " in listing
        assert purpose in listing


def test_a_target_without_a_comment_is_not_documented(tmp_path: Path) -> None:
    write(tmp_path, "Makefile", "run: setup ## start it\n\ttrue\ntest: setup\n\ttrue\n")
    assert make_targets(tmp_path) == {"run": "start it"}


def test_modules_and_functions_stay_within_their_bounds() -> None:
    assert list(oversize(ROOT)) == []


@pytest.mark.parametrize("extra", [0, 1], ids=["at the bound", "over the bound"])
def test_a_module_over_the_bound_is_found(tmp_path: Path, extra: int) -> None:
    write(tmp_path, "src/covenant/task.py", "pass\n" * (MODULE_LINES_MAX + extra))
    assert len(list(oversize(tmp_path))) == extra


@pytest.mark.parametrize("extra", [0, 1], ids=["at the bound", "over the bound"])
@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_a_function_over_the_bound_is_found(tmp_path: Path, keyword: str, extra: int) -> None:
    body = "    pass\n" * (FUNCTION_LINES_MAX - 1 + extra)
    write(tmp_path, "src/covenant/task.py", f"{keyword} settle():\n{body}")
    assert len(list(oversize(tmp_path))) == extra


def test_modules_are_named_after_what_they_are() -> None:
    assert list(empty_names(ROOT)) == []


@pytest.mark.parametrize(
    "name",
    ["utils", "common", "helpers", "shared", "base", "task_manager", "handlers", "processor", "task_v2"],
)
def test_a_name_that_says_nothing_is_found(tmp_path: Path, name: str) -> None:
    write(tmp_path, f"src/covenant/{name}.py", "")
    write(tmp_path, f"src/covenant/{name}/__init__.py", "")
    assert len(list(empty_names(tmp_path))) == 2


def test_a_telling_name_is_accepted(tmp_path: Path) -> None:
    write(tmp_path, "src/covenant/seal/base58.py", "")
    assert list(empty_names(tmp_path)) == []


def test_sentences_name_their_subject() -> None:
    assert list(unnamed_subjects(ROOT)) == []


@pytest.mark.parametrize("line", ["Whoever asks is told.", "# it goes to whomever it is for"])
@pytest.mark.parametrize("name", ["README.md", "docs/formats/a.md", "src/a.py"])
def test_a_relative_clause_as_a_subject_is_found(tmp_path: Path, name: str, line: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"\n{line}\n")
    assert [found.rpartition(":")[0] for found in unnamed_subjects(tmp_path)] == [f"{name}:2"]
