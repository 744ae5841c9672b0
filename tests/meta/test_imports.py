"""Imports point down, pure packages stay pure, and the checker that says so can fail."""

from pathlib import Path

import pytest

from tests.meta.directions import LEVEL, PACKAGE, violations

SRC = Path(__file__).parents[2] / "src"


def test_the_package_keeps_its_import_rules() -> None:
    assert [str(violation) for violation in violations(SRC)] == []


def test_every_package_that_exists_has_a_level() -> None:
    packages = {path.parent.name for path in (SRC / PACKAGE).glob("*/__init__.py")}
    assert packages <= set(LEVEL)
    assert {"model", "wire", "seal", "ledger", "exchange", "doors", "daemon", "cli"} <= packages


def rules_broken(src: Path, modules: dict[str, str]) -> set[str]:
    """Writes a made-up package, and names the rules it breaks."""
    for name, text in modules.items():
        path = src / PACKAGE / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return {violation.rule for violation in violations(src)}


def test_a_tree_whose_imports_point_down_is_accepted(tmp_path: Path) -> None:
    broken = rules_broken(
        tmp_path,
        {
            "model/task": "import msgspec\nfrom dataclasses import dataclass\nfrom uuid import UUID\n",
            "wire/frame": "import json\nimport urllib.parse\nfrom covenant.model.task import Task\n",
            "seal/keys": "from cryptography import exceptions\nfrom covenant.model import task\n",
            "seal/tokens": "import rfc8785\nfrom datetime import timedelta\n",
            "ledger/machine/decide": "import hashlib\nfrom covenant.ledger.machine.entry import Entry\n",
            "ledger/log/journal": "import os\nimport time\nfrom covenant.ledger.machine import decide\n",
            "exchange/accept": "import asyncio\nfrom covenant.ledger.contract.ledger import Ledger\n",
            "doors/http": "from covenant import exchange\nfrom covenant.model.task import Task\n",
            "daemon/settings": "import os\nHOME = os.environ['HOME']\nfrom covenant.doors import http\n",
            "cli/main": "import importlib\nserve = importlib.import_module('covenant.daemon.settings')\n",
            "mailbox": "from covenant.daemon import settings\n",
        },
    )
    assert broken == set()


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("model/task", "from covenant.wire import frame\n"),
        ("seal/keys", "import covenant.wire.frame\n"),
        ("ledger/contract", "from covenant.exchange import accept\n"),
        ("exchange/accept", "from covenant.outbound import client\n"),
        ("outbound/client", "from covenant import exchange\n"),
        ("doors/http", "from covenant.agents import function\n"),
        ("agents/function", "from covenant.peers import outbox\n"),
        ("doors/http", "from covenant.daemon import settings\n"),
        ("doors/http", "from covenant import Mailbox\n"),
        ("doors/http", "import covenant\n"),
        ("daemon/wiring", "from covenant.cli import main\n"),
        ("mailbox", "from covenant.cli import main\n"),
        ("exchange/accept", "from ..doors import http\n"),
        ("ledger/log/journal", "from ...exchange import accept\n"),
        ("ledger/__init__", "from ..exchange import accept\n"),
        ("exchange/accept", "def late() -> None:\n    from covenant.doors import http\n"),
        (
            "exchange/accept",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from covenant.doors import http\n",
        ),
        ("exchange/accept", "import importlib\nhttp = importlib.import_module('covenant.doors.http')\n"),
    ],
)
def test_an_import_that_does_not_point_down_is_found(tmp_path: Path, module: str, text: str) -> None:
    assert rules_broken(tmp_path, {module: text}) == {"upward import"}


CLOCK_CHANCE_OR_IO = """
    time datetime random secrets uuid os os.path io pathlib socket asyncio threading subprocess sqlite3
    logging tempfile shutil urllib.request starlette
    """.split()


@pytest.mark.parametrize("module", ["model/task", "wire/frame", "ledger/machine/decide"])
@pytest.mark.parametrize(
    "text",
    [
        *(f"import {name}\n" for name in CLOCK_CHANCE_OR_IO),
        "from uuid import uuid4\n",
        "from time import monotonic\n",
        "def late() -> None:\n    import time\n",
        "lines = open('journal')\n",
    ],
)
def test_a_clock_chance_or_io_in_a_pure_package_is_found(tmp_path: Path, module: str, text: str) -> None:
    broken = rules_broken(tmp_path, {module: text})
    assert broken in ({"impure import"}, {"impure call"})


def test_the_machine_needs_nothing_of_the_engine_around_it(tmp_path: Path) -> None:
    broken = rules_broken(tmp_path, {"ledger/machine/decide": "from covenant.ledger.embedded import journal\n"})
    assert broken == {"impure import"}


@pytest.mark.parametrize("library", ["cryptography.fernet", "joserfc", "rfc8785", "biscuit_auth", "nacl.signing"])
@pytest.mark.parametrize("module", ["exchange/accept", "daemon/wiring", "cli/main"])
def test_a_crypto_library_outside_seal_is_found(tmp_path: Path, module: str, library: str) -> None:
    assert rules_broken(tmp_path, {module: f"import {library}\n"}) == {"crypto outside seal"}


@pytest.mark.parametrize("text", ["import secrets\n", "from os import urandom\n", "import random\n"])
def test_chance_in_seal_from_elsewhere_than_the_crypto_library_is_found(tmp_path: Path, text: str) -> None:
    assert rules_broken(tmp_path, {"seal/keys": text}) == {"chance in seal"}


@pytest.mark.parametrize("name", ["time", "datetime", "os", "pathlib", "socket", "asyncio", "logging", "starlette"])
def test_a_clock_or_io_in_seal_is_found(tmp_path: Path, name: str) -> None:
    assert rules_broken(tmp_path, {"seal/keys": f"import {name}\n"}) == {"impure import"}


@pytest.mark.parametrize(
    "text",
    [
        "import os\nhome = os.environ['HOME']\n",
        "import os as system\nhome = system.getenv('HOME')\n",
        "from os import environ\n",
        "from os import getenv as read\n",
        "import click\noption = click.option('--home', envvar='HOME')\n",
    ],
)
@pytest.mark.parametrize("module", ["cli/main", "ledger/log/journal", "mailbox"])
def test_reading_the_environment_outside_the_daemon_is_found(tmp_path: Path, module: str, text: str) -> None:
    assert rules_broken(tmp_path, {module: text}) == {"environment outside daemon"}


def test_a_pure_package_that_imports_a_neighbour_breaks_both_rules(tmp_path: Path) -> None:
    broken = rules_broken(tmp_path, {"wire/frame": "from covenant.seal import keys\n"})
    assert broken == {"upward import", "impure import"}


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("prove/rows", "import click\n"),
        ("prove/rows", "from cryptography import exceptions\n"),
        ("doors/http", "from covenant.prove import runner\n"),
        ("mailbox", "from covenant.prove import runner\n"),
    ],
)
def test_a_kit_that_is_not_apart_is_found(tmp_path: Path, module: str, text: str) -> None:
    assert "kit apart" in rules_broken(tmp_path, {module: text})


@pytest.mark.parametrize("package", ["model.task", "wire.sse", "daemon.settings", "cli.main"])
def test_a_kit_that_imports_the_rest_is_found(tmp_path: Path, package: str) -> None:
    assert rules_broken(tmp_path, {"prove/rows": f"import covenant.{package}\n"}) == {"upward import"}


def test_the_kit_may_use_an_http_client_and_the_command_line_the_kit(tmp_path: Path) -> None:
    kit = {"prove/rows": "import asyncio\nimport httpx2\nimport msgspec\nfrom covenant.prove import protocol\n"}
    assert rules_broken(tmp_path, {**kit, "cli/prove": "from covenant.prove import rows\n"}) == set()


def test_a_package_without_a_level_is_found(tmp_path: Path) -> None:
    assert rules_broken(tmp_path, {"plumbing/__init__": ""}) == {"no level"}


def test_a_violation_names_file_line_and_import(tmp_path: Path) -> None:
    rules_broken(tmp_path, {"exchange/accept": "import asyncio\nfrom covenant.doors import http\n"})
    expected = "covenant/exchange/accept.py:2: upward import: exchange imports covenant.doors.http"
    assert [str(violation) for violation in violations(tmp_path)] == [expected]
