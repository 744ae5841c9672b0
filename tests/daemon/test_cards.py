"""Cards of a real daemon: what its settings, its key and the home's MCP servers make of them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from a2a.client.card_resolver import parse_agent_card
from a2a.utils.signing import create_signature_verifier
from jwt.api_jwk import PyJWK

from covenant.doors.a2a.cards import DESCRIBED as CARDS
from covenant.doors.a2a.http_bindings import REST_V03, REST_V1
from tests.cli.daemons import Daemon, covenant
from tests.places import short_folder
from tests.waits import BOUND_S

WELL_KNOWN = "/.well-known/agent-card.json"
INDEX = "/v1/a2a/agents/index/agent-card.json"


@pytest.fixture
def home(short_path: Path) -> Path:
    made = short_path / "home"
    made.mkdir(mode=0o700)
    return made


def get(daemon: Daemon, path: str, **headers: str) -> httpx.Response:
    return httpx.get(daemon.url + path, headers=headers, timeout=BOUND_S)


def own(daemon: Daemon, path: str, **headers: str) -> dict[str, Any]:
    token = (daemon.home / "operator.token").read_text().strip()
    found: dict[str, Any] = get(daemon, path, Authorization=f"Bearer {token}", **headers).raise_for_status().json()
    return found


@pytest.fixture(scope="module")
def behind_tls() -> Iterator[Daemon]:
    """One for all tests that ask it for its cards: it loads a model's library."""
    env = {"A2A_PROVIDER_ORG": "Example", "A2A_DOCS_URL": "https://docs.example", "COVENANT_MODEL_NAME": "test"}
    servers = {"servers": {"hub": {"command": "unused", "tools": ["corvid_github_list_prs"]}}}
    with short_folder() as folder:
        home = folder / "home"
        home.mkdir(mode=0o700)
        (home / "mcp_servers.json").write_text(json.dumps(servers))
        daemon = Daemon(home, "--public-base-url", "https://agents.example/", env=env)
        try:
            yield daemon
        finally:
            assert daemon.stop() == 0


def test_a_card_is_also_where_older_clients_look_for_it(behind_tls: Daemon) -> None:
    assert own(behind_tls, "/api/agents/index/agent-card") == own(behind_tls, INDEX)
    assert get(behind_tls, "/api/agents/index/agent-card").status_code == 401
    token = (behind_tls.home / "operator.token").read_text().strip()
    nobody = get(behind_tls, "/api/agents/nobody/agent-card", Authorization=f"Bearer {token}")
    assert nobody.status_code == 404


def test_openapi_has_every_route_of_a2a_and_mcp(behind_tls: Daemon) -> None:
    """A route that is described is served: without a token it answers 401, and not 404."""
    paths = get(behind_tls, "/openapi.json").json()["paths"]
    agent = "/v1/a2a/agents/{agent_id}"
    described = {(method, path) for path, methods in paths.items() for method in methods if path.startswith(agent)}
    places = {
        (method.lower(), f"{agent}/{rest.prefix}{place}")
        for rest in (REST_V1, REST_V03)
        for place, rows in rest.routes.items()
        for method in rows
    }
    assert {(method, re.sub(r"\{(task|config)_id\}", "{}", path)) for method, path in described} == {
        *places,
        ("post", agent),
        *(("get", each.path) for each in CARDS if each.path.startswith(agent)),
    }
    for method, path in sorted({*described, ("post", "/mcp")}):
        assert paths[path][method]["security"] == [{"token": []}]
        address = re.sub(r"\{\w+\}", "index", path)
        answer = httpx.request(method, behind_tls.url + address, timeout=BOUND_S)
        assert answer.status_code == 401, (method, path, answer.text)


def test_a_card_says_the_url_of_the_flag_and_what_the_environment_and_the_home_declare(behind_tls: Daemon) -> None:
    card = own(behind_tls, INDEX)
    assert card["url"] == "https://agents.example/v1/a2a/agents/index"
    assert card["provider"] == {"organization": "Example", "url": "https://agents.example"}
    assert card["documentationUrl"] == "https://docs.example"
    assert [(skill["id"], skill["name"]) for skill in card["skills"]] == [
        ("chat", "chat"),
        ("delegate", "delegate"),
        ("parallel-fanout", "parallel-fanout"),
        ("mcp-tools", "mcp-tools"),
        ("fetch-url", "fetch-url"),
        ("memory", "memory"),
        ("write-file", "write-file"),
        ("corvid_github_list_prs", "GitHub List PRs"),
    ]


def test_a_card_promises_nothing_that_needs_a_model_where_there_is_none(home: Path) -> None:
    (home / "mcp_servers.json").write_text(json.dumps({"servers": {"hub": {"command": "unused", "tools": ["dig"]}}}))
    agents = home / "agents"
    agents.mkdir()
    (agents / "bot.json").write_text(json.dumps({"kind": "model", "capabilities": ["/mem"], "skills": ["think"]}))
    daemon = Daemon(home)
    try:
        assert [skill["id"] for skill in own(daemon, INDEX)["skills"]] == ["chat", "delegate"]
        assert own(daemon, INDEX.replace("index", "bot"))["skills"] == []
    finally:
        assert daemon.stop() == 0


def test_a_daemons_cards_are_signed_with_its_own_key_and_stay_so(behind_tls: Daemon) -> None:
    (key,) = get(behind_tls, "/.well-known/jwks.json").json()["keys"]
    verify = create_signature_verifier(lambda kid, _: PyJWK(key) if kid == key["kid"] else b"", ["EdDSA"])
    for card in (
        own(behind_tls, INDEX),
        own(behind_tls, INDEX, **{"A2A-Version": "1.0"}),
        get(behind_tls, WELL_KNOWN).json(),
    ):
        verify(parse_agent_card(card))


def test_the_published_card_is_the_agents_and_what_is_asked_for_in_the_environment(home: Path) -> None:
    daemon = Daemon(home, env={"COVENANT_PUBLIC_BASE_URL": "https://agents.example", "COVENANT_A2A_PUBLISH": "index"})
    try:
        card = get(daemon, WELL_KNOWN).json()
        assert (card["name"], card["version"]) == ("index", "index")
        assert card["supportedInterfaces"][0]["url"] == "https://agents.example/v1/a2a/agents/index"
    finally:
        assert daemon.stop() == 0


def test_cards_do_not_change_over_a_restart(home: Path) -> None:
    tags = []
    for _ in range(2):
        daemon = Daemon(home, "--public-base-url", "https://agents.example")
        try:
            tags.append(get(daemon, WELL_KNOWN).headers["etag"])
        finally:
            assert daemon.stop() == 0
    assert tags[0] == tags[1]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{", "not JSON"),
        ('{"servers": {"hub": {"command": "x", "colour": 1}}}', "unknown key /servers/hub/colour"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_mcp_servers_that_cannot_be_used_refuse_to_start(home: Path, written: str, said: str) -> None:
    (home / "mcp_servers.json").write_text(written)
    ran = covenant("serve", "--home", str(home), "--http-port", "0")
    assert ran.code == 1
    assert f"{home / 'mcp_servers.json'}: {said}" in ran.err
