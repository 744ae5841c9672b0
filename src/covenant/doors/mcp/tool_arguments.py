"""The tools: their names, arguments and descriptions. The schemas for clients are made from these.

Arguments are read strictly: an unknown argument is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

import msgspec

from covenant.model.agent_definition import explain_invalid
from covenant.model.errors import Invalid

MESSAGE_MAX: Final = 1024 * 1024
TIMEOUT_MINUTES: Final = 5.0
TIMEOUT_MINUTES_MAX: Final = 24 * 60.0
WAIT_S_MAX: Final = 600.0
LIMIT: Final = 20

Trust = Literal["untrusted", "low", "medium", "high", "verified"]
TRUST_LEVELS: Final[tuple[Trust, ...]] = get_args(Trust)

Url = Annotated[str, msgspec.Meta(min_length=1, max_length=2_048)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
MessageText = Annotated[str, msgspec.Meta(min_length=1, max_length=MESSAGE_MAX)]
TaskName = Annotated[str, msgspec.Meta(min_length=1, max_length=64, description="A task's id, from an earlier answer.")]
IdempotencyKey = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=256,
        description="Makes a repeat safe: the same key with the same message finds the same task and starts nothing.",
    ),
]


class _Arguments(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """The base of each tool's arguments: unknown fields are refused."""


class DiscoverAgentArguments(_Arguments, frozen=True, kw_only=True):
    url: Annotated[
        Url, msgspec.Meta(description="The agent's address, its host's, or that of its card.", examples=["https://h/a"])
    ]


class InvokeRemoteAgentArguments(_Arguments, frozen=True, kw_only=True):
    agent_url: Annotated[Url, msgspec.Meta(description="The agent's address, its host's, or that of its card.")]
    message: Annotated[MessageText, msgspec.Meta(description="The message for the agent. Nothing else is sent.")]
    skill: Annotated[Name, msgspec.Meta(description="The skill to use, by its id or name.")] | None = None
    timeout_minutes: Annotated[float, msgspec.Meta(gt=0, le=TIMEOUT_MINUTES_MAX)] = TIMEOUT_MINUTES
    min_trust: Annotated[Trust, msgspec.Meta(description="The least trust that the agent needs.")] = "low"
    idempotency_key: IdempotencyKey | None = None


class ListAgentsArguments(_Arguments, frozen=True, kw_only=True):
    pass


class SendTaskArguments(_Arguments, frozen=True, kw_only=True):
    agent: Annotated[Name, msgspec.Meta(description="The agent's id, from list_agents.")]
    message: Annotated[MessageText, msgspec.Meta(description="The task in words.")]
    wait: Annotated[
        bool, msgspec.Meta(description="Wait for the end and report progress; otherwise answer with the task's id.")
    ] = True
    task_id: (
        Annotated[TaskName, msgspec.Meta(description="Continue this task, whose agent asked something.")] | None
    ) = None
    idempotency_key: IdempotencyKey | None = None
    not_before_ms: (
        Annotated[
            int,
            msgspec.Meta(
                ge=0, description="Begin at this moment, in epoch milliseconds. The answer has the task's id."
            ),
        ]
        | None
    ) = None


class GetTaskArguments(_Arguments, frozen=True, kw_only=True):
    task_id: TaskName
    wait_seconds: Annotated[
        float, msgspec.Meta(ge=0, le=WAIT_S_MAX, description="How long to wait for the task's end, if it runs.")
    ] = 0


class CancelTaskArguments(_Arguments, frozen=True, kw_only=True):
    task_id: TaskName


class QueueStatusArguments(_Arguments, frozen=True, kw_only=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=100, description="The most tasks to list.")] = LIMIT


Arguments = (
    DiscoverAgentArguments
    | InvokeRemoteAgentArguments
    | ListAgentsArguments
    | SendTaskArguments
    | GetTaskArguments
    | CancelTaskArguments
    | QueueStatusArguments
)


class ToolRow(NamedTuple):
    name: str
    arguments_type: type[Arguments]
    description: str
    read_only: bool = True
    """Changes nothing, neither here nor in a remote system."""
    open_world: bool = False
    """Contacts systems other than this daemon."""
    idempotent: bool = True
    """Calling the tool twice has the same effect as calling it once."""

    @property
    def schema(self) -> dict[str, Any]:
        (schema,), components = msgspec.json.schema_components([self.arguments_type], ref_template="#/$defs/{name}")
        own: dict[str, Any] = components[self.arguments_type.__name__] if "$ref" in schema else schema
        return {name: value for name, value in own.items() if name not in ("title", "description")}


TOOLS: Final = (
    ToolRow(
        "discover_agent",
        DiscoverAgentArguments,
        "Find an A2A agent's card by its URL: its description, skills and interfaces.",
        open_world=True,
    ),
    ToolRow(
        "invoke_remote_agent",
        InvokeRemoteAgentArguments,
        "Send a message to a remote A2A agent and wait for its answer. The call is a task: get_task finds it later.",
        read_only=False,
        open_world=True,
        idempotent=False,
    ),
    ToolRow("list_agents", ListAgentsArguments, "The agents of this exchange that you can send tasks to."),
    ToolRow(
        "send_task",
        SendTaskArguments,
        "Give an agent of this exchange a task. Once its id is reported it is durable: it goes on if you disconnect.",
        read_only=False,
        idempotent=False,
    ),
    ToolRow("get_task", GetTaskArguments, "The state of a task, and its output so far."),
    ToolRow("cancel_task", CancelTaskArguments, "Cancel a task that has not ended.", read_only=False),
    ToolRow("queue_status", QueueStatusArguments, "Tasks that are queued, in flight or waiting for their sender."),
)

BY_NAME: Final[Mapping[str, ToolRow]] = {tool.name: tool for tool in TOOLS}


def read_arguments(name: str, given: Mapping[str, Any] | None) -> Arguments:
    tool = BY_NAME.get(name)
    if tool is None:
        raise Invalid("unknown_tool", f"there is no tool {name[:100]!r}; the tools are {', '.join(BY_NAME)}")
    try:
        return msgspec.convert(given or {}, tool.arguments_type)
    except msgspec.ValidationError as error:
        raise Invalid("invalid_arguments", explain_invalid(str(error), tool.arguments_type)) from None
