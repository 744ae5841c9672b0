"""From an agent to its card: names, versions, skills, interfaces, and what is kept and signed."""

from typing import Any

import msgspec
import pytest

from covenant.exchange.access.tenants import Caller
from covenant.exchange.cards import (
    CAPABILITIES,
    CARDS_CACHED_MAX,
    LIMITS_URI,
    Anonymous,
    CardFeatures,
    Cards,
    admits_anonymous,
    agent_card,
    stub_card,
    tool_tags,
    tool_title,
)
from covenant.model.agent_card import Provider
from covenant.model.agent_definition import INDEX_DEFINITION, AgentSource, CatalogueAgent, read_agent_definition
from covenant.model.errors import Invalid
from covenant.model.mcp_servers import Tool, read_mcp_servers, tools_of
from covenant.model.tenants import Tenant, TenantLimits
from covenant.seal.cards import CardSigner
from covenant.seal.keys import new_private_key
from covenant.wire.a2a.card_codec import card_fields

BASE = "https://agents.example"
TOOLS = (Tool("github", "corvid_github_list_prs"), Tool("web", "web_search", "Looks it up"), Tool("web", "fetch"))


def agent(source: AgentSource = "stored", updated_at_ms: int = 17, **fields: Any) -> CatalogueAgent:
    definition = read_agent_definition({"id": "summarizer", **fields})
    return CatalogueAgent(tenant="default", definition=definition, updated_at_ms=updated_at_ms, source=source)


INDEX = CatalogueAgent(tenant="default", definition=INDEX_DEFINITION, source="builtin")


def ids(found: CatalogueAgent, tools: tuple[Tool, ...] = ()) -> list[str]:
    return [skill.id for skill in agent_card(found, BASE, CardFeatures(tools=tools)).skills]


def test_an_agent_without_a_name_is_called_by_its_id() -> None:
    assert agent_card(agent(name="Summarizer"), BASE).name == "Summarizer"
    assert agent_card(agent(), BASE).name == "summarizer"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"role": "reader", "goal": "say what matters"}, "reader — say what matters"),
        ({"role": "reader", "description": "unused"}, "reader"),
        ({"goal": "say what matters"}, "say what matters"),
        ({"description": "Summarises a text"}, "Summarises a text"),
        ({}, "Covenant agent summarizer"),
    ],
)
def test_the_description_is_role_and_goal_or_the_next_best(fields: dict[str, Any], said: str) -> None:
    assert agent_card(agent(**fields), BASE).description == said


def test_the_version_of_a_stored_agent_is_when_it_was_updated_and_the_master_says_index() -> None:
    assert agent_card(agent(updated_at_ms=1_760_000_000_000), BASE).version == "1760000000000"
    assert agent_card(INDEX, BASE).version == "index"


@pytest.mark.parametrize("source", ["code", "file"])
def test_the_version_of_a_declared_agent_changes_with_its_text_and_not_with_a_start(source: AgentSource) -> None:
    first = agent_card(agent(source, 1, role="reader"), BASE).version
    assert agent_card(agent(source, 2, role="reader"), BASE).version == first
    assert agent_card(agent(source, 1, role="writer"), BASE).version != first


def test_the_urls_are_those_of_the_agent_under_the_base_url() -> None:
    url = f"{BASE}/v1/a2a/agents/summarizer"
    found = [
        (one.protocol_binding, one.protocol_version, one.url) for one in agent_card(agent(), BASE).supported_interfaces
    ]
    assert found == [
        ("JSONRPC", "1.0", url),
        ("HTTP+JSON", "1.0", url),
        ("JSONRPC", "0.3", url),
        ("HTTP+JSON", "0.3", url),
    ]


@pytest.mark.parametrize(
    ("base", "address"),
    [(BASE, "agents.example:8431"), ("http://[::1]:8421", "[::1]:8431"), ("http://127.0.0.1:1", "127.0.0.1:8431")],
)
def test_grpc_is_named_with_the_agent_as_its_tenant_where_it_is_on(base: str, address: str) -> None:
    (found,) = [
        one
        for one in agent_card(agent(), base, CardFeatures(grpc_port=8431)).supported_interfaces
        if one.protocol_binding == "GRPC"
    ]
    assert (found.url, found.tenant, found.protocol_version) == (address, "summarizer", "1.0")


def test_grpc_of_0_3_is_named_for_the_published_agent_alone() -> None:
    """It has no place for the name of an agent."""

    def named(published: str) -> list[tuple[str, str]]:
        offer = CardFeatures(grpc_port=8431, published=published)
        interfaces = agent_card(agent(), BASE, offer).supported_interfaces
        return [(one.protocol_version, one.url) for one in interfaces if one.protocol_binding == "GRPC"]

    assert named("other") == [("1.0", "agents.example:8431")]
    assert named("summarizer") == [("1.0", "agents.example:8431"), ("0.3", "agents.example:8431")]


def test_modes_are_the_agents_own_or_the_usual_ones() -> None:
    card = agent_card(agent(), BASE)
    assert (card.default_input_modes, card.default_output_modes) == (
        ("text/plain",),
        ("text/plain", "application/json"),
    )
    card = agent_card(agent(input_modes=["image/png"], output_modes=["text/html"]), BASE)
    assert (card.default_input_modes, card.default_output_modes) == (("image/png",), ("text/html",))


def test_what_is_switched_on_is_said_and_nothing_else() -> None:
    plain = agent_card(agent(), BASE)
    assert (plain.capabilities.push_notifications, plain.provider, plain.documentation_url) == (False, None, None)
    provider = Provider(organization="Example", url="https://example.com")
    offered = agent_card(
        agent(),
        BASE,
        CardFeatures(provider=provider, documentation_url="https://docs.example", push_notifications=True),
    )
    assert offered.capabilities.push_notifications
    assert (offered.provider, offered.documentation_url) == (provider, "https://docs.example")


def test_a_provider_without_a_url_has_that_of_the_daemon() -> None:
    card = agent_card(agent(), BASE, CardFeatures(provider=Provider(organization="Example", url="")))
    assert card.provider == Provider(organization="Example", url=BASE)


def test_extensions_that_callers_must_declare_are_required_in_the_card() -> None:
    (extension,) = agent_card(agent(extensions=["urn:x"]), BASE).capabilities.extensions
    assert (extension.uri, extension.required) == ("urn:x", True)


def test_every_agent_has_the_skill_to_chat_first() -> None:
    for kind in ("model", "function", "worker", "remote", "peer"):
        (chat, *_) = agent_card(agent(kind=kind), BASE).skills
        assert (chat.id, chat.name, chat.tags) == ("chat", "chat", ("text",))


@pytest.mark.parametrize(("capability", "skill"), [(name, skill) for name, (skill, _) in CAPABILITIES.items()])
def test_each_capability_is_a_skill_by_the_table(capability: str, skill: str) -> None:
    _, found = agent_card(agent(capabilities=[capability]), BASE).skills
    assert (found.id, found.name, found.tags) == (skill, skill, (capability,))


def test_skill_ids_have_no_spaces_and_no_duplicates() -> None:
    given = [
        "/write --persist",
        "/mem shared",
        "/fetch",
        "/fetch",
        "fetch-url",
        "/",
        "  ",
        "/pane",
        "chat",
        "/öl & gas",
    ]
    found = ids(agent(capabilities=given, skills=["two words", "two words", "chat"]))
    assert found == [
        "chat",
        "write-persist",
        "mem-shared",
        "fetch-url",
        "capability",
        "pane",
        "öl-gas",
        "two-words",
    ]


@pytest.mark.parametrize("kind", ["function", "worker", "remote", "peer"])
def test_an_agent_that_cannot_use_slash_commands_does_not_advertise_them(kind: str) -> None:
    assert ids(agent(kind=kind, capabilities=["/fetch", "/exec"])) == ["chat"]


def test_declared_skills_keep_what_their_author_said() -> None:
    skill = {"id": "sum", "name": "Sum up", "description": "Shortens", "tags": ["text"], "examples": ["Shorten this"]}
    *_, full, bare = agent_card(agent(kind="function", skills=[skill, "bare"]), BASE).skills
    assert (full.name, full.description, full.tags, full.examples) == (
        "Sum up",
        "Shortens",
        ("text",),
        ("Shorten this",),
    )
    assert (bare.id, bare.name, bare.description, bare.tags) == ("bare", "bare", "bare", ("general",))


def test_all_registered_tools_are_skills_of_the_master_and_of_agents_without_permissions() -> None:
    for found in (INDEX, agent(), agent(capabilities=["/mcp"])):
        assert ids(found, TOOLS)[-3:] == ["corvid_github_list_prs", "web_search", "fetch"]


def test_with_permissions_only_those_tools_are_skills() -> None:
    assert ids(agent(mcp_tool_permissions=["web_search", "unregistered"]), TOOLS) == ["chat", "web_search"]
    assert ids(agent(mcp_tool_permissions=["web.fetch"]), TOOLS) == ["chat", "fetch"]
    assert ids(agent(mcp_tool_permissions=[]), TOOLS) == ["chat"]


def test_a_tool_is_not_advertised_by_an_agent_that_cannot_call_it() -> None:
    assert ids(agent(capabilities=["/fetch"]), TOOLS) == ["chat", "fetch-url"]
    assert ids(agent(kind="function"), TOOLS) == ["chat"]
    assert ids(agent(kind="worker", mcp_tool_permissions=["fetch"]), TOOLS) == ["chat", "fetch"]


def test_tools_of_one_name_are_told_apart_by_their_server() -> None:
    assert ids(agent(), (Tool("a", "run"), Tool("b", "run")))[1:] == ["run", "b.run"]


def test_a_tool_is_described_by_its_server_or_by_its_name() -> None:
    skills = {skill.id: skill for skill in agent_card(agent(), BASE, CardFeatures(tools=TOOLS)).skills}
    assert skills["web_search"].description == "Looks it up"
    assert skills["fetch"].description == "Tool: fetch"
    assert skills["fetch"].input_modes == ("application/json",)
    assert skills["fetch"].output_modes == ("application/json", "text/plain")


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("corvid_send_message", "Send Message"),
        ("covenant_github_list_prs", "GitHub List PRs"),
        ("github_get_pr_diff", "GitHub Get PR Diff"),
        ("invoke_a2a_api", "Invoke A2A API"),
        ("readFile", "ReadFile"),
        ("corvid_", "corvid_"),
    ],
)
def test_tools_are_named_as_people_would_write_them(name: str, title: str) -> None:
    assert tool_title(name) == title


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("corvid_send_message", "messaging communication"),
        ("recall_memory", "memory blockchain"),
        ("corvid_grant_credits", "credits billing admin"),
        ("corvid_github_star_repo", "github social"),
        ("corvid_github_fork_repo", "github repository"),
        ("corvid_github_repo_info", "github repository"),
        ("corvid_github_create_pr", "github pull-requests"),
        ("corvid_github_review_pr", "github pull-requests review"),
        ("corvid_github_get_pr_diff", "github pull-requests review"),
        ("corvid_github_comment_on_pr", "github pull-requests communication"),
        ("corvid_github_list_issues", "github issues"),
        ("github_whatever", "github"),
        ("whatever", "general"),
    ],
)
def test_tools_have_the_tags_of_the_table(name: str, tags: str) -> None:
    assert tool_tags(name) == tuple(tags.split())


def test_mcp_servers_are_read_with_their_defaults_and_their_tools() -> None:
    servers = read_mcp_servers(
        {
            "servers": {
                "web": {"command": "run", "tools": ["fetch", {"name": "web_search", "description": "Looks it up"}]}
            }
        }
    )
    assert (servers["web"].init_timeout_ms, servers["web"].call_timeout_ms) == (60_000, 30_000)
    assert tools_of(servers) == (Tool("web", "fetch"), Tool("web", "web_search", "Looks it up"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "object"),
        ({}, "/servers: must be given"),
        ({"servers": {}, "more": 1}, "unknown key /more"),
        ({"servers": {"web": {}}}, "/servers/web: give either `command` or `url`"),
        ({"servers": {"web": []}}, "/servers/web: Expected `object`"),
        ({"servers": {"two words": {"command": "x"}}}, "/servers/two words: a server's name"),
        ({"servers": {"a": {"command": "x"}, "b~/": {}}}, "/servers/b~0~1: a server's name"),
        ({"servers": []}, "/servers: must be an object"),
        ({"servers": {"web": {"command": "x", "colour": 1}}}, "unknown key /servers/web/colour"),
        ({"servers": {"web": {"command": "x", "tools": [{"name": "a", "b": 1}]}}}, "key /servers/web/tools/0/b"),
        ({"servers": {"web": {"command": "x", "tools": ["two words"]}}}, "/servers/web/tools/0/name: "),
        ({"servers": {"web": {"command": ""}}}, "/servers/web: give either `command` or `url`"),
        ({"servers": {"web": {"command": "x", "call_timeout_ms": 0}}}, "/servers/web/call_timeout_ms: "),
    ],
)
def test_mcp_servers_that_are_wrong_are_refused_with_a_pointer(given: object, said: str) -> None:
    with pytest.raises(Invalid) as refused:
        read_mcp_servers(given)
    assert said in refused.value.message


def test_the_stub_says_how_to_authenticate_and_names_no_agent() -> None:
    card = stub_card(BASE)
    assert (card.name, card.version) == ("covenant", "stub")
    assert [one.url for one in card.supported_interfaces] == [f"{BASE}/v1/a2a/agents/index"]
    (skill,) = card.skills
    assert (skill.id, skill.tags) == ("discover", ("discovery", "auth-required"))
    assert card_fields(card)["securityRequirements"] == [{"schemes": {"bearer": {}}}]


class CountingSigner(CardSigner):
    count = 0

    def sign(self, card: Any, *, keys_url: str) -> Any:
        self.count += 1
        return super().sign(card, keys_url=keys_url)


def test_a_card_is_signed_once_for_each_version_of_its_agent() -> None:
    signer = CountingSigner(new_private_key())
    cards = Cards(CardFeatures, signer)
    first = cards.card(agent(updated_at_ms=1), BASE)
    assert cards.card(agent(updated_at_ms=1), BASE) is first
    assert signer.count == 1
    second = cards.card(agent(updated_at_ms=2, role="reader"), BASE)
    assert (second.description, signer.count) == ("reader", 2)
    assert first.signatures != second.signatures


def test_equally_named_agents_of_two_tenants_have_cards_of_their_own() -> None:
    cards = Cards(CardFeatures, CardSigner(new_private_key()))
    mine, theirs = (
        msgspec.structs.replace(agent(role=role), tenant=tenant) for role, tenant in (("a", "mine"), ("b", "theirs"))
    )
    assert [cards.card(one, BASE).description for one in (mine, theirs, mine)] == ["a", "b", "a"]


def test_no_more_cards_are_kept_than_the_limit() -> None:
    cards = Cards(CardFeatures)
    found = agent()
    for number in range(CARDS_CACHED_MAX + 10):
        cards.card(found, f"http://host-{number}")
    assert len(cards._cache) == CARDS_CACHED_MAX


def caller(**limits: int) -> Caller:
    return Caller(Tenant(name="default", limits=TenantLimits(**limits)), "", operator=False, name="client@default")


def test_the_extended_card_says_what_its_caller_may_use() -> None:
    cards = Cards(CardFeatures, CardSigner(new_private_key()))
    found = agent(timeout_ms=60_000, extensions=["urn:x"])
    required, told = cards.extended_card(caller(concurrency=4, rate_per_min=60), found, BASE).capabilities.extensions
    assert required.uri == "urn:x"
    assert (told.uri, told.params) == (LIMITS_URI, {"concurrency": 4, "ratePerMinute": 60, "turnTimeoutMs": 60_000})
    again = cards.extended_card(caller(concurrency=5), found, BASE)
    assert again.capabilities.extensions[-1].params == {"concurrency": 5, "turnTimeoutMs": 60_000}


def test_the_extended_card_of_a_caller_without_limits_has_no_more_than_the_card() -> None:
    cards = Cards(CardFeatures)
    assert cards.extended_card(caller(), agent(), BASE) == cards.card(agent(), BASE)


def test_without_a_signer_cards_are_unsigned_and_there_are_no_keys() -> None:
    cards = Cards(CardFeatures)
    assert cards.card(agent(), BASE).signatures == ()
    assert cards.key_set() == {"keys": []}


def test_a_card_that_needs_no_token_says_so() -> None:
    cards = Cards(CardFeatures)
    assert cards.card(agent(), BASE, token_needed=False).security_requirements == ()
    assert cards.card(agent(), BASE).security_requirements != ()


LOCAL = {"bind_addr": "127.0.0.1", "peer": "127.0.0.1", "forwarded": False, "foreign_page": False}


@pytest.mark.parametrize(
    ("mode", "changed", "admitted"),
    [
        ("never", {}, False),
        ("loopback", {}, True),
        ("loopback", {"bind_addr": "::1", "peer": "::1"}, True),
        ("loopback", {"peer": "::ffff:127.0.0.1"}, True),
        ("loopback", {"peer": "10.0.0.1"}, False),
        ("loopback", {"peer": None}, False),
        ("loopback", {"peer": "localhost"}, False),
        ("loopback", {"bind_addr": "0.0.0.0"}, False),
        ("loopback", {"forwarded": True}, False),
        ("loopback", {"foreign_page": True}, False),
        ("anywhere", {"peer": "10.0.0.1", "bind_addr": "0.0.0.0", "forwarded": True, "foreign_page": True}, True),
    ],
)
def test_anonymous_callers_are_admitted_from_here_alone_unless_forced(
    mode: Anonymous, changed: dict[str, Any], admitted: bool
) -> None:
    assert admits_anonymous(mode, **{**LOCAL, **changed}) is admitted


EVERYTHING = frozenset({"/agent", "/parallel", "/a2a", "/mcp", "/fetch", "/mem", "/write"})


@pytest.mark.parametrize(
    ("capabilities", "abilities", "found"),
    [
        ([], EVERYTHING, "delegate parallel-fanout remote-agents mcp-tools fetch-url memory write-file"),
        ([], {"/mem"}, "memory"),
        (["/mem", "/fetch"], EVERYTHING, "fetch-url memory"),
        (["/write --persist", "mem"], EVERYTHING, "memory write-file"),
        (["delegation", "web"], EVERYTHING, "delegate parallel-fanout fetch-url"),
        (["/exec", "/pane"], EVERYTHING, ""),
        (["/mem"], {"/fetch"}, ""),
    ],
)
def test_a_model_agents_card_says_what_it_may_use_of_what_there_is(
    capabilities: list[str], abilities: set[str], found: str
) -> None:
    offer = CardFeatures(abilities=frozenset(abilities))
    skills = agent_card(agent(capabilities=capabilities), BASE, offer).skills
    assert [skill.id for skill in skills] == ["chat", *found.split()]


def test_tools_are_skills_only_where_models_can_call_them() -> None:
    with_mcp, without = (
        CardFeatures(tools=TOOLS, abilities=frozenset({"/mcp"})),
        CardFeatures(tools=TOOLS, abilities=frozenset({"/mem"})),
    )
    assert len(agent_card(agent(), BASE, with_mcp).skills) == 2 + len(TOOLS)
    assert [skill.id for skill in agent_card(agent(), BASE, without).skills] == ["chat", "memory"]


def test_without_a_model_only_the_master_and_agents_of_other_kinds_have_skills() -> None:
    nothing = CardFeatures(tools=TOOLS, abilities=frozenset())
    assert [skill.id for skill in agent_card(INDEX, BASE, nothing).skills] == ["chat", "delegate"]
    assert agent_card(agent(skills=["think"], capabilities=["/mem"]), BASE, nothing).skills == ()
    assert [skill.id for skill in agent_card(agent(kind="worker", skills=["dig"]), BASE, nothing).skills] == [
        "chat",
        "dig",
    ]


def test_registered_remote_agents_are_for_the_first_tenant_alone() -> None:
    offer, found = CardFeatures(abilities=frozenset({"/a2a", "/mem"})), agent()
    assert [skill.id for skill in agent_card(found, BASE, offer).skills] == ["chat", "remote-agents", "memory"]
    foreign = msgspec.structs.replace(found, tenant="acme")
    assert [skill.id for skill in agent_card(foreign, BASE, offer).skills] == ["chat", "memory"]
