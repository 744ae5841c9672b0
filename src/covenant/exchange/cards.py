"""Makes an agent's card from the catalogue: on demand, signed once, and kept until the agent changes.

`agent_card` needs only the agent and the URL by which callers reach this daemon. `CardFeatures` says which features are
switched on: a card promises nothing that the daemon does not do.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from ipaddress import ip_address
from typing import Final, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from covenant.exchange.access.tenants import Caller
from covenant.model import agent_definition as written
from covenant.model.agent_card import (
    GRPC,
    HTTP_JSON,
    JSONRPC,
    AgentCard,
    Capabilities,
    CardSkill,
    Extension,
    HttpAuth,
    Interface,
    Provider,
    Scopes,
    SecurityRequirement,
    SecurityScheme,
    Signature,
)
from covenant.model.agent_definition import INDEX, AgentDefinition, CatalogueAgent
from covenant.model.mcp_servers import Tool, tools_for
from covenant.model.peers.instance import HYBRID_SUITE, HYBRID_VERSIONS, SUITE, SUPPORTED_VERSIONS
from covenant.model.tenants import DEFAULT
from covenant.seal.cards import CardSigner
from covenant.wire.a2a.card_codec import card_fields
from covenant.wire.peers import IDENTITY_PATH, POLL_PATH, RECEIVE_PATH, SEALED_DELEGATION

MCP: Final = "/mcp"
ASK: Final = "/ask"
ABILITIES: Final = (
    *("/agent", "/parallel", "/a2a", MCP, "/fetch", "/search", "/mem", "/advise"),
    *("/write", "/read", "/list", ASK),
)
"""The commands that have a tool. A definition may name other commands, which nobody can carry out."""
ROUTING: Final = frozenset({"/agent"})
"""Commands that the master can carry out without a model."""
BUNDLES: Final = {"web": ("/fetch", "/search"), "delegation": ("/agent", "/parallel")}
"""Names for several commands at once. Any command may be written without its slash."""
GENERAL: Final = ("general",)
_JSON: Final = ("application/json",)
_JSON_AND_TEXT: Final = ("application/json", "text/plain")

CHAT: Final = CardSkill(id="chat", name="chat", description="Ask in plain text, and get an answer.", tags=("text",))

CAPABILITIES: Final = {
    "/fetch": ("fetch-url", "Fetch a web address and read what is there."),
    "/search": ("web-search", "Search the web."),
    "/browse": ("browse-page", "Open a web page and read it as a person would."),
    "/exec": ("shell-exec", "Run a command in a shell."),
    "/write": ("write-file", "Write a file."),
    "/read": ("read-file", "Read a file."),
    "/list": ("list-files", "List files."),
    "/map": ("workspace-map", "Give an overview of a workspace."),
    MCP: ("mcp-tools", "Call tools of MCP servers."),
    "/a2a": ("remote-agents", "Hand work to agents elsewhere, over A2A."),
    "/agent": ("delegate", "Hand work to another agent."),
    "/parallel": ("parallel-fanout", "Hand work to several agents at once."),
    "/advise": ("advisor-consult", "Ask an advisor before answering."),
    "/todo": ("todos", "Keep a list of what is to be done."),
    "/schedule": ("schedule", "Do something at a later time."),
    "/lesson": ("lessons", "Remember what was learned from mistakes."),
    "/mem": ("memory", "Remember facts between tasks."),
}
AGENTS_PATH: Final = "/v1/a2a/agents"
A2A_PATH: Final = "/v1/a2a"
KEYS_PATH: Final = "/.well-known/jwks.json"
CARDS_CACHED_MAX: Final = 4_096
"""The most signed cards in memory; a card beyond that is signed again on demand."""
LIMITS_URI: Final = "urn:covenant:limits"
INPUT_MODES: Final = ("text/plain",)
OUTPUT_MODES: Final = ("text/plain", "application/json")
_SCHEMES: Final = {"bearer": SecurityScheme(http_auth_security_scheme=HttpAuth(scheme="bearer"))}
_REQUIRED: Final = (SecurityRequirement(schemes={"bearer": Scopes()}),)
_DISCOVER: Final = CardSkill(
    id="discover",
    name="discover",
    description="Authenticate with a tenant's bearer token, then fetch the card of one agent.",
    tags=("discovery", "auth-required"),
)


class _TagRule(msgspec.Struct, frozen=True):
    words: frozenset[str]
    tags: tuple[str, ...]


class _ToolNames(msgspec.Struct, frozen=True):
    """`tool_tags.json`: how people write the names of well-known tools, and the tags of their skills."""

    prefixes: tuple[str, ...]
    spellings: dict[str, str]
    tags: dict[str, tuple[str, ...]]
    families: dict[str, tuple[_TagRule, ...]]
    """Rules by the first word of a name; the first rule that has another word of the name applies."""


@cache
def _tool_names() -> _ToolNames:
    data = files("covenant.exchange").joinpath("tool_tags.json").read_bytes()
    return msgspec.json.decode(data, type=_ToolNames)


def skills_of(
    definition: AgentDefinition, tools: Sequence[Tool] = (), abilities: frozenset[str] | None = None
) -> tuple[CardSkill, ...]:
    """`abilities`: the commands that models can carry out here; empty without a model.

    None: unknown; the card then follows the definition.
    """
    usable_here = usable_tools(definition, tools)
    if abilities is None or not definition.kind_rules.needs_model:
        own = _capability_skills(definition)
    elif not abilities and definition.id != INDEX:
        # No model runs this agent, so its card must promise nothing.
        return ()
    else:
        commands = usable(definition, abilities or ROUTING)
        own = (_command_skill(command) for command in commands if command != ASK)
        usable_here = usable_here if MCP in commands else ()
    return _distinct((CHAT, *own, *map(_declared_skill, definition.skills), *_tool_skills(usable_here)))


def _command_skill(command: str) -> CardSkill:
    name, about = CAPABILITIES[command]
    return CardSkill(id=name, name=name, description=about, tags=(command,))


def usable(definition: AgentDefinition, abilities: Iterable[str]) -> tuple[str, ...]:
    """The commands that this agent may use, of those that exist: an allow-list, in the order of the table.

    An empty list allows everything; a list with only unknown words allows nothing.
    """
    there = [command for command in ABILITIES if command in set(abilities)]
    if not definition.capabilities:
        return tuple(there)
    allowed: set[str] = set()
    for capability in definition.capabilities:
        word = (capability.split() or [""])[0].removeprefix("/").lower()
        allowed.update(BUNDLES.get(word, (f"/{word}",)))
    return tuple(command for command in there if command in allowed)


def usable_tools(definition: AgentDefinition, tools: Sequence[Tool]) -> Sequence[Tool]:
    allowed = definition.mcp_tool_permissions
    if definition.kind_rules.needs_model:
        if not usable(definition, (MCP,)):
            return ()
        if allowed is None:
            return tools
    return [tool for tool in tools if allowed is not None and (tool.name in allowed or tool.full_name in allowed)]


def _capability_skills(definition: AgentDefinition) -> Iterator[CardSkill]:
    given = definition.capabilities if definition.kind_rules.needs_model else ()
    for capability in map(str.strip, given):
        if capability in CAPABILITIES:
            yield _command_skill(capability)
        elif capability != ASK:  # asking the user is no skill that a caller could request
            name = _one_word(capability.removeprefix("/"), "capability")
            yield CardSkill(
                id=name, name=name, description=f"Capability: {capability or name}", tags=(capability or name,)
            )


def _declared_skill(skill: written.Skill) -> CardSkill:
    name = skill.name or skill.id
    return CardSkill(
        id=_one_word(skill.id, "skill"),
        name=name,
        description=skill.description or name,
        tags=skill.tags or GENERAL,
        examples=skill.examples,
        input_modes=skill.input_modes,
        output_modes=skill.output_modes,
    )


def _tool_skills(tools: Sequence[Tool]) -> Iterator[CardSkill]:
    """The skills of tools. If two servers have tools of one name, the second gets its server's name, too."""
    seen: set[str] = set()
    for tool in tools:
        yield CardSkill(
            id=tool.full_name if tool.name in seen else tool.name,
            name=tool_title(tool.name),
            description=tool.description or f"Tool: {tool.name}",
            tags=tool_tags(tool.name),
            input_modes=_JSON,
            output_modes=_JSON_AND_TEXT,
        )
        seen.add(tool.name)


def tool_title(name: str) -> str:
    """The name as people would write it: `covenant_github_list_prs` becomes GitHub List PRs."""
    spellings = _tool_names().spellings
    words = filter(None, _plain(name).split("_"))
    return " ".join(spellings.get(word, word[:1].upper() + word[1:]) for word in words) or name


def tool_tags(name: str) -> tuple[str, ...]:
    known, plain = _tool_names(), _plain(name)
    family, _, rest = plain.partition("_")
    if family in known.families and rest:
        words = set(plain.split("_"))
        return next((rule.tags for rule in known.families[family] if rule.words & words), (family,))
    return known.tags.get(plain, GENERAL)


def _plain(name: str) -> str:
    for prefix in _tool_names().prefixes:
        name = name.removeprefix(prefix)
    return name


def _one_word(text: str, otherwise: str) -> str:
    return re.sub(r"[^\w.]+", "-", text).strip("-") or otherwise


def _distinct(skills: Iterable[CardSkill]) -> tuple[CardSkill, ...]:
    kept: dict[str, CardSkill] = {}
    for skill in skills:
        kept.setdefault(skill.id, skill)
    return tuple(kept.values())


Anonymous = Literal["never", "loopback", "anywhere"]


class CardFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """The features that are switched on. A provider without a URL gets this daemon's."""

    provider: Provider | None = None
    documentation_url: str | None = None
    push_notifications: bool = False
    grpc_port: int | None = None
    grpc_address: str = ""
    """The address by which callers reach that port; empty: the host of HTTP."""
    published: str = ""
    """The agent of the tenant `default` for calls that name no agent: gRPC in A2A 0.3 has no field for a name."""
    tools: tuple[Tool, ...] = ()
    abilities: frozenset[str] | None = None
    """The commands that model agents can carry out here. None: as their definitions say."""
    mcp_tenants: frozenset[str] = frozenset({DEFAULT})
    """The tenants whose agents have an MCP server."""
    remote_tenants: frozenset[str] = frozenset({DEFAULT})
    """The tenants whose agents may call registered remote agents."""
    peer_profiles: tuple[str, ...] | None = None
    """The agents that peers may delegate to, as the settings name them. None: this daemon has no peers."""
    peer_suites: tuple[str, ...] = (SUITE,)


def agent_card(
    agent: CatalogueAgent, base_url: str, features: CardFeatures | None = None, *, token_needed: bool = True
) -> AgentCard:
    """An unsigned card. Without `token_needed` the card says that anybody may call."""
    features = features or CardFeatures()
    definition = agent.definition
    return AgentCard(
        name=definition.name or definition.id,
        description=_description(definition),
        supported_interfaces=_interfaces(f"{base_url}{AGENTS_PATH}/{definition.id}", agent, features),
        provider=_provider(features, base_url),
        version=_version(agent),
        documentation_url=features.documentation_url,
        capabilities=Capabilities(
            streaming=True,
            push_notifications=features.push_notifications,
            # A caller without a token is unknown, and has no extended card.
            extended_agent_card=token_needed,
            extensions=(
                *(Extension(uri=uri, required=True) for uri in definition.extensions),
                *_sealed_delegation(agent, base_url, features),
            ),
        ),
        security_schemes=_SCHEMES,
        security_requirements=_REQUIRED if token_needed else (),
        default_input_modes=definition.input_modes or INPUT_MODES,
        default_output_modes=definition.output_modes or OUTPUT_MODES,
        skills=skills_of(definition, tools_for(agent.tenant, features.tools), _abilities(agent, features)),
    )


def takes_sealed(agent: CatalogueAgent, peer_profiles: tuple[str, ...] | None) -> bool:
    """Whether peers may delegate to the agent. Only peers of its tenant may."""
    return peer_profiles is not None and agent.offered_to_peers(peer_profiles)


def _sealed_delegation(agent: CatalogueAgent, base_url: str, features: CardFeatures) -> tuple[Extension, ...]:
    if not takes_sealed(agent, features.peer_profiles):
        return ()
    params = {
        "profile": agent.id,
        "identity": base_url + IDENTITY_PATH,
        "receive": base_url + RECEIVE_PATH,
        "poll": base_url + POLL_PATH,
        "versions": list(HYBRID_VERSIONS if HYBRID_SUITE in features.peer_suites else SUPPORTED_VERSIONS),
        "suites": list(features.peer_suites),
    }
    return (Extension(uri=SEALED_DELEGATION, description="Takes this work in sealed envelopes too", params=params),)


def stub_card(base_url: str, features: CardFeatures | None = None) -> AgentCard:
    """The card for callers without a token: how to authenticate, and the address of `index`, which every tenant has."""
    features = features or CardFeatures()
    return AgentCard(
        name="covenant",
        description="Agents behind a token: authenticate, then fetch the card of one of them.",
        supported_interfaces=(
            Interface(url=f"{base_url}{A2A_PATH}/agents/{INDEX}", protocol_binding=JSONRPC, protocol_version="1.0"),
        ),
        provider=_provider(features, base_url),
        version="stub",
        documentation_url=features.documentation_url,
        capabilities=Capabilities(streaming=True, push_notifications=False, extended_agent_card=False),
        security_schemes=_SCHEMES,
        security_requirements=_REQUIRED,
        default_input_modes=INPUT_MODES,
        default_output_modes=OUTPUT_MODES,
        skills=(_DISCOVER,),
    )


def _abilities(agent: CatalogueAgent, features: CardFeatures) -> frozenset[str] | None:
    """The commands that this agent's tenant may use: MCP servers and registered agents belong to some tenants."""
    if features.abilities is None:
        return None
    missing = {
        command
        for command, tenants in ((MCP, features.mcp_tenants), ("/a2a", features.remote_tenants))
        if agent.tenant not in tenants
    }
    return features.abilities - missing


def _provider(features: CardFeatures, base_url: str) -> Provider | None:
    provider = features.provider
    return provider if provider is None or provider.url else msgspec.structs.replace(provider, url=base_url)


def _description(definition: AgentDefinition) -> str:
    summary = " — ".join(text for text in (definition.role, definition.goal) if text)
    return summary or definition.description or f"Covenant agent {definition.id}"


def _version(agent: CatalogueAgent) -> str:
    """Changes with the agent, and only then: an agent from code or a file has the same version after each start."""
    if agent.id == INDEX:
        return INDEX
    if agent.source == "stored":
        return str(agent.updated_at_ms)
    return hashlib.sha256(msgspec.json.encode(agent.definition)).hexdigest()[:12]


def _interfaces(url: str, agent: CatalogueAgent, features: CardFeatures) -> tuple[Interface, ...]:
    """The preferred interface comes first. A2A 0.3 has the same addresses, and comes last."""
    found = [
        Interface(url=url, protocol_binding=JSONRPC, protocol_version="1.0"),
        Interface(url=url, protocol_binding=HTTP_JSON, protocol_version="1.0"),
    ]
    old = [
        Interface(url=url, protocol_binding=JSONRPC, protocol_version="0.3"),
        Interface(url=url, protocol_binding=HTTP_JSON, protocol_version="0.3"),
    ]
    if features.grpc_port is not None:
        host = urlsplit(url).hostname or "localhost"
        at_host = f"[{host}]:{features.grpc_port}" if ":" in host else f"{host}:{features.grpc_port}"
        address = features.grpc_address or at_host
        found.append(Interface(url=address, protocol_binding=GRPC, protocol_version="1.0", tenant=agent.id))
        if (agent.tenant, agent.id) == (DEFAULT, features.published):
            old.append(Interface(url=address, protocol_binding=GRPC, protocol_version="0.3"))
    return (*found, *old)


class _Key(NamedTuple):
    tenant: str
    agent_id: str
    base_url: str
    kind: str


class Cards:
    """Signed cards; unsigned without a signer."""

    def __init__(self, features: Callable[[], CardFeatures], signer: CardSigner | None = None) -> None:
        """`features` returns the features that are switched on now."""
        self.features = features
        self._signer = signer
        self._cache: dict[_Key, tuple[object, AgentCard]] = {}

    def card(self, agent: CatalogueAgent, base_url: str, *, token_needed: bool = True) -> AgentCard:
        key = _Key(agent.tenant, agent.id, base_url, "own" if token_needed else "open")
        return self._signed(key, agent, lambda: agent_card(agent, base_url, self.features(), token_needed=token_needed))

    def stub(self, base_url: str) -> AgentCard:
        return self._signed(_Key("", "", base_url, "stub"), None, lambda: stub_card(base_url, self.features()))

    def extended_card(self, caller: Caller, agent: CatalogueAgent, base_url: str) -> AgentCard:
        """The card for one tenant's callers, with their limits. The agent must be the caller's own tenant's."""
        limits = {
            name: value
            for name, value in {
                "concurrency": caller.tenant.limits.concurrency,
                "ratePerMinute": caller.tenant.limits.rate_per_min,
                "burst": caller.tenant.limits.burst,
                "turnTimeoutMs": agent.definition.timeout_ms,
            }.items()
            if value
        }

        def make() -> AgentCard:
            card = agent_card(agent, base_url, self.features())
            if not limits:
                return card
            extension = Extension(uri=LIMITS_URI, description="What callers with this token may use", params=limits)
            extensions = (*card.capabilities.extensions, extension)
            capabilities = msgspec.structs.replace(card.capabilities, extensions=extensions)
            return msgspec.structs.replace(card, capabilities=capabilities)

        return self._signed(_Key(agent.tenant, agent.id, base_url, "extended"), (agent, limits), make)

    def key_set(self) -> dict[str, object]:
        return self._signer.key_set() if self._signer is not None else {"keys": []}

    def _signed(self, key: _Key, made_of: object, make: Callable[[], AgentCard]) -> AgentCard:
        # The daemon's features may change while it runs: an MCP server's tools are known only after its first start.
        made_of = (made_of, self.features())
        known = self._cache.get(key)
        if known is not None and known[0] == made_of:
            return known[1]
        card = self._sign(make(), key.base_url)
        # The oldest card makes room: callers choose the host in a URL, and must not choose how much is kept.
        if key not in self._cache and len(self._cache) >= CARDS_CACHED_MAX:
            del self._cache[next(iter(self._cache))]
        self._cache[key] = (made_of, card)
        return card

    def _sign(self, card: AgentCard, base_url: str) -> AgentCard:
        if self._signer is None:
            return card
        signed = self._signer.sign(card_fields(card), keys_url=f"{base_url}{KEYS_PATH}")
        return msgspec.structs.replace(card, signatures=tuple(Signature(protected=p, signature=s) for p, s in signed))


def admits_anonymous(mode: Anonymous, *, bind_addr: str, peer: str | None, forwarded: bool, foreign_page: bool) -> bool:
    """Whether a caller without a token may use the published agent.

    `loopback` means callers on this machine: HTTP listens on a loopback address, the caller has one, no proxy forwarded
    the request (`forwarded`: it has a proxy's headers), and no foreign web page makes a browser on this machine send it
    (`foreign_page`).
    """
    if mode == "loopback":
        return _loopback(bind_addr) and _loopback(peer) and not forwarded and not foreign_page
    return mode == "anywhere"


def _loopback(address: str | None) -> bool:
    try:
        found = ip_address(address or "")
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback
