"""An agent definition: an agent's description, behaviour and permissions, as its author wrote them.

Decoding is strict: an unknown key, a wrong type or a forbidden value is refused, and the refusal names the key by its
JSON pointer (`/advisor/mode: …`, `unknown key /colour`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec

from covenant.model.errors import Invalid, did_you_mean
from covenant.model.kinds import KINDS, AgentKind, KindRules

DEFINITION_BYTES_MAX: Final = 256 * 1024
INDEX: Final = "index"
"""The master agent of every tenant. It is built in and cannot be changed or deleted."""
RESERVED: Final = frozenset({INDEX, "client", "anonymous", "conversations"})
"""`client@<tenant>` sends the tasks of a tenant's callers; `conversations@<tenant>` keeps their conversations."""

_KEY_FORM: Final = "[A-Za-z0-9_-]{1,64}"

OnLost = Literal["hold", "fail", "requeue"]
AgentSource = Literal["stored", "file", "code", "builtin"]

AgentKey = Annotated[str, msgspec.Meta(pattern=rf"\A{_KEY_FORM}\Z")]
Line = Annotated[str, msgspec.Meta(max_length=1_000)]
Prose = Annotated[str, msgspec.Meta(max_length=32_000)]
Lines = Annotated[tuple[Line, ...], msgspec.Meta(max_length=200)]
Rules = Annotated[tuple[Prose, ...], msgspec.Meta(max_length=200)]
Arguments = Annotated[tuple[Prose, ...], msgspec.Meta(max_length=200)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
CATCH_UP_S_MAX: Final = 31 * 86_400
SCHEDULES_MAX: Final = 100
IGNORED_KEYS: Final = ("event_types", "memory", "intent")
"""Keys that are read and stored, but that no code acts on."""
# msgspec puts the place last. The place has no backtick, so the pattern never backtracks over a definition's text.
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `([^`]*+)`)?", re.DOTALL).fullmatch
_MISSING = re.compile(r"Object missing required field `(.*?)`(?: - at `([^`]*+)`)?", re.DOTALL).fullmatch
_PLACED = re.compile(r"(.*?)(?: - at `([^`]*+)`)?", re.DOTALL).fullmatch
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_MESSAGE_LENGTH_MAX: Final = 200


class _Part(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """The base of every struct of a definition: unknown fields are refused."""


class Advisor(_Part, frozen=True, gc=False, kw_only=True):
    model: Line
    fallback_models: Annotated[tuple[Line, ...], msgspec.Meta(max_length=4)] = ()
    prompt: Prose = ""
    mode: Literal["off", "consult", "gate"] = "consult"
    max_redirects: Annotated[int, msgspec.Meta(ge=0, le=100)] = 2
    malformed_halts: bool = True


class MemoryOptions(_Part, frozen=True, gc=False, kw_only=True):
    search_expand: bool = False
    auto_tag: bool = False
    auto_supersede: bool = False
    intent_routing: bool = True
    age_decay: bool = True
    age_half_life_days: Annotated[float, msgspec.Meta(gt=0, le=100_000)] = 90.0
    age_floor: Share = 0.5


class IntentOptions(_Part, frozen=True, gc=False, kw_only=True):
    mode: Literal["off", "heuristic", "hybrid", "llm"] = "off"
    min_confidence: Share = 0.8
    apply_routing: bool = True
    model: Line = ""


class Skill(_Part, frozen=True, gc=False, kw_only=True):
    """A skill on the agent's card. A plain string in the definition is a skill with that id."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    name: Line = ""
    description: Prose = ""
    tags: Lines = ()
    examples: Lines = ()
    input_modes: Lines = ()
    output_modes: Lines = ()


class Schedule(_Part, frozen=True, gc=False, kw_only=True):
    """A schedule creates tasks for its agent: at the times of `cron` in a time zone, or every `every_s` seconds."""

    id: AgentKey
    cron: Line = ""
    every_s: Annotated[int, msgspec.Meta(ge=0, le=366 * 86_400)] = 0
    time_zone: Line = "UTC"
    text: Prose = ""
    """The text of each task. Empty: the schedule's id."""
    catch_up_s: Annotated[int, msgspec.Meta(ge=0, le=CATCH_UP_S_MAX)] = 0
    """A missed run is made up for if it is no older than this."""


RetryReason = Literal[
    "rate_limited", "overloaded", "unreachable", "timed_out", "provider_error", "not_started", "exited", "failed"
]
"""Why an attempt failed: the first five reasons are a model's, the others a program's."""
Pause = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class RetryPauses(_Part, frozen=True, gc=False, kw_only=True):
    """Pauses in seconds: each is `factor` times the one before, changed by chance by up to `jitter` of itself."""

    first: Pause = 1.0
    longest: Pause = 300.0
    factor: Annotated[float, msgspec.Meta(ge=1, le=100)] = 2.0
    jitter: Share = 0.2


class Retries(_Part, frozen=True, gc=False, kw_only=True):
    """How often the daemon begins a failed turn again, after which pauses and for which failures."""

    attempts: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    """The number of attempts at a turn, counting the first one and those that a program asks for."""
    backoff: RetryPauses = RetryPauses()
    retry_on: Annotated[tuple[RetryReason, ...], msgspec.Meta(max_length=20)] = ()


class AgentDefinition(_Part, frozen=True, gc=False, kw_only=True):
    id: AgentKey
    name: Line = ""
    role: Line = ""
    personality: Prose = ""
    goal: Prose = ""
    description: Prose = ""
    rules: Rules = ()
    capabilities: Lines = ()
    """The tools that the agent may use. Empty: all of them."""
    event_types: Lines = ()
    model: Line = ""
    """The language model of the agent. Empty: the setting `model.name`."""
    fallback_models: Annotated[tuple[Line, ...], msgspec.Meta(max_length=4)] = ()
    """Models that are tried in this order when `model` cannot answer."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 1024
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.3
    brevity: Literal["lite", "full", "ultra"] = "full"
    mode: Literal["", "standard", "conversational", "spoken", "writer", "planner"] = ""
    channel: Literal["text", "voice"] | None = None
    advisor: Advisor | None = None
    memory: MemoryOptions = MemoryOptions()
    intent: IntentOptions = IntentOptions()

    kind: AgentKind = "model"
    """The kind decides how the agent's work is done. The default kind runs on a language model."""
    default_project: Line = ""
    """The simple door gives its tasks to the first agent that has a default project."""
    mcp_tool_permissions: Lines | None = None
    """The registered MCP tools that the agent may use. None: all of them."""
    needs_approval: Lines = ()
    """Tools whose calls a person approves: `fetch`, `/mcp` for a model's whole MCP, `files.write` for one MCP tool."""
    timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=7 * 24 * 3_600_000)] | None = None
    """The time limit of a turn. None: the limit of the agent's kind."""
    idempotent: bool = False
    """Whether running the same task twice does no harm. Only then may lost work be requeued without an operator."""
    on_lost: OnLost = "hold"
    input_modes: Lines = ()
    """Media types that the agent accepts. Empty: any."""
    output_modes: Lines = ()
    """Media types that the agent may answer with. Empty: any."""
    command: Arguments = ()
    url: Annotated[str, msgspec.Meta(max_length=2_000)] = ""
    """The address of a remote agent or of its card. Empty: the one in `a2a_agents.json` under the agent's id."""
    peer: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """The peer that does a peer agent's work: its name or id, then `/` and the profile if it is not this agent's id.

    Empty: any peer that offers this agent's id as a profile."""
    skills: Annotated[tuple[Skill, ...], msgspec.Meta(max_length=200)] = ()
    extensions: Lines = ()
    """A2A extensions that a caller must declare, by URI."""
    concurrency: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    """The most tasks at once. 0: the limit of the agent's kind."""
    rate_per_min: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    """The most turns that begin in a minute; further turns wait in the queue. 0: no limit."""
    schedules: Annotated[tuple[Schedule, ...], msgspec.Meta(max_length=SCHEDULES_MAX)] = ()
    retries: Retries | None = None

    @property
    def kind_rules(self) -> KindRules:
        return KINDS[self.kind]

    @property
    def turn_timeout_ms(self) -> int | None:
        """The time limit of a turn: the definition's own, or else that of its kind. None: no limit."""
        return self.timeout_ms or KINDS[self.kind].timeout_ms


class CatalogueAgent(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An agent in a tenant's catalogue. `source` says where its definition is stored and can be changed."""

    tenant: str
    definition: AgentDefinition = msgspec.field(name="constitution")
    """The encoded name is `constitution`: journals and archives of earlier versions have it."""
    created_at_ms: int = 0
    updated_at_ms: int = 0
    source: AgentSource = "stored"

    @property
    def id(self) -> str:
        return self.definition.id

    def offered_to_peers(self, named: Collection[str]) -> bool:
        """Whether peers may use this agent. `named`: agents that they may use; empty: all local ones but `index`."""
        return self.definition.kind_rules.offered_to_peers and (self.id in named if named else self.id != INDEX)


INDEX_DEFINITION: Final = AgentDefinition(
    id=INDEX,
    name=INDEX,
    role="orchestrator",
    goal="Route each turn to the agent that can do it best.",
    mode="conversational",
    brevity="lite",
    temperature=0.45,
    max_tokens=2048,
    intent=IntentOptions(mode="hybrid"),
)


_PLAIN: Final = AgentDefinition(id="plain")


def ignored_keys(definition: AgentDefinition) -> tuple[str, ...]:
    """The keys of this definition that have no effect. The answer to storing the definition lists them."""
    return tuple(key for key in IGNORED_KEYS if getattr(definition, key) != getattr(_PLAIN, key))


def read_agent_definition(given: object) -> AgentDefinition:
    """Returns the definition from decoded JSON or TOML. A refusal names the key that is wrong and says why."""
    if not isinstance(given, dict):
        raise _wrong("the agent definition must be an object")
    fields = dict(given)
    fields["advisor"] = _advisor(fields)
    if isinstance(skills := fields.get("skills"), (list, tuple)):
        fields["skills"] = [{"id": skill} if isinstance(skill, str) else skill for skill in skills]
    try:
        made = msgspec.convert(fields, AgentDefinition)
    except msgspec.ValidationError as wrong:
        raise _wrong(explain_invalid(str(wrong), AgentDefinition)) from None
    _check_whole(made)
    return made


def _advisor(fields: dict[Any, Any]) -> object:
    """The advisor as an object: it may be given as the name of its model, or under the old key `advisor_model`."""
    given = fields.pop("advisor", None)
    if "advisor_model" in fields:
        if given is not None:
            raise _wrong("/advisor_model: give either advisor or advisor_model")
        given = fields.pop("advisor_model")
    return {"model": given} if isinstance(given, str) else given


def _check_whole(made: AgentDefinition) -> None:
    """Checks the rules that involve several keys, which no field's type can express."""
    if made.id in RESERVED:
        raise _wrong(f"/id: {made.id!r} is reserved")
    if made.on_lost == "requeue" and not made.idempotent:
        raise _wrong('/on_lost: "requeue" needs "idempotent": true, since the work may have been done')
    if made.retries is not None and not made.kind_rules.retried:
        raise _wrong(f"/retries: an agent of the kind {made.kind!r} cannot have it; its own program or code retries")
    if made.retries is not None and made.retries.retry_on and not made.idempotent:
        raise _wrong('/retries/retry_on: needs "idempotent": true, since the failed attempt may have done its work')
    for kind, rules in KINDS.items():
        given = bool(rules.key and getattr(made, rules.key))
        if given and kind != made.kind:
            raise _wrong(f'/{rules.key}: only a "{kind}" agent has one')
        if rules.key_required and kind == made.kind and not given:
            raise _wrong(f"/{rules.key}: a {kind} agent needs a {rules.key}")
    if made.url and not made.url.startswith(("https://", "http://")):
        raise _wrong("/url: must be an http or https URL")
    if len(msgspec.json.encode(made)) > DEFINITION_BYTES_MAX:
        raise _wrong(f"an agent definition may have at most {DEFINITION_BYTES_MAX} bytes")


def _wrong(message: str) -> Invalid:
    return Invalid("invalid_agent", message)


def explain_invalid(message: str, kind: type[msgspec.Struct], under: str = "") -> str:
    """The decoder's message with a JSON pointer to the wrong key, and the nearest known key or the allowed values.

    `under`: the JSON pointer to the decoded value, if that is a part of a larger document.
    """
    if (unknown := _UNKNOWN(message)) is not None:
        key, where = unknown[1], json_pointer(unknown[2])
        meant = did_you_mean(key, _keys(kind, where.split("/")[1:]))
        return f"unknown key {under}{where}/{escaped_key(key)[:_MESSAGE_LENGTH_MAX]}{meant}"
    if (missing := _MISSING(message)) is not None:
        return f"{under}{json_pointer(missing[2])}/{escaped_key(missing[1])}: must be given"
    placed = _PLACED(message)
    assert placed is not None
    explanation, where = placed[1][:_MESSAGE_LENGTH_MAX], json_pointer(placed[2])
    if _KEY_FORM in explanation:
        explanation = "must have 1 to 64 letters, digits, `_` or `-`"
    if allowed := _allowed(kind, where.split("/")[1:]):
        explanation = f"{explanation}; give one of {', '.join(map(repr, allowed))}"
    return f"{under}{where}: {explanation}" if under or where else explanation


def json_pointer(path: str | None) -> str:
    """Turns the decoder's path `$.skills[0].id` into the JSON pointer `/skills/0/id`."""
    return "".join(f"/{escaped_key(step[1] or step[2])}" for step in _STEP.finditer(path or ""))


def escaped_key(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _allowed(kind: Any, steps: list[str]) -> tuple[Any, ...]:
    kind = _kind_at(kind, steps)
    return tuple(value for each in _alternatives(kind) if get_origin(each) is Literal for value in get_args(each))


def _keys(kind: Any, steps: list[str]) -> tuple[str, ...]:
    return tuple(_hints(_kind_at(kind, steps)))


def _kind_at(kind: Any, steps: list[str]) -> Any:
    for step in steps:
        if step != "..." and not step.isdigit():
            kind = _hints(kind).get(step)
        else:
            items = get_args(kind)[0] if get_origin(kind) is Annotated else kind
            kind = next(iter(get_args(items)), None)
    return kind


def _hints(kind: Any) -> dict[str, Any]:
    for each in _alternatives(kind):
        if isinstance(each, type) and issubclass(each, msgspec.Struct):
            return {field.name: field.type for field in msgspec.structs.fields(each)}
    return {}


def _alternatives(kind: Any) -> tuple[Any, ...]:
    if kind is None:
        return ()
    if get_origin(kind) is Annotated:
        return _alternatives(get_args(kind)[0])
    return (kind,) if get_origin(kind) is Literal or isinstance(kind, type) else get_args(kind)
