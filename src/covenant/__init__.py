"""Covenant: a durable exchange through which agents hand work to each other.

The names below are the public interface. Each is imported when it is first used, so that a command that needs none of
them starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covenant.agents.api import Agent as Agent
    from covenant.agents.api import SyncTurn as SyncTurn
    from covenant.agents.api import Turn as Turn
    from covenant.agents.runtime.agent_calls import Answer as Answer
    from covenant.agents.runtime.agent_calls import Call as Call
    from covenant.agents.runtime.agent_calls import CallLimit as CallLimit
    from covenant.agents.runtime.agent_calls import NotEnough as NotEnough
    from covenant.client import Client as Client
    from covenant.daemon.connect import connect as connect
    from covenant.mailbox import Mailbox as Mailbox
    from covenant.mailbox import local_agent as local_agent
    from covenant.model.agent_definition import Skill as Skill
    from covenant.model.content import Json as Json
    from covenant.model.content import Text as Text
    from covenant.model.ids import AgentId as AgentId
    from covenant.model.retry_policy import ForceError as ForceError
    from covenant.model.retry_policy import Requeue as Requeue
    from covenant.model.task import Hop as Hop
    from covenant.model.task import Idempotency as Idempotency
    from covenant.model.task import Result as Result
    from covenant.model.task import Task as Task
    from covenant.outbound.call_errors import RemoteError as RemoteError
    from covenant.outbound.remote.remote_client import Remote as Remote
    from covenant.outbound.remote.remote_task import Reply as Reply
    from covenant.worker import Worker as Worker

__version__ = "0.1.0"

_NAMES = {
    "covenant.agents.api": "Agent SyncTurn Turn",
    "covenant.agents.runtime.agent_calls": "Answer Call CallLimit NotEnough",
    "covenant.client": "Client",
    "covenant.daemon.connect": "connect",
    "covenant.mailbox": "Mailbox local_agent",
    "covenant.model.agent_definition": "Skill",
    "covenant.model.content": "Json Text",
    "covenant.model.ids": "AgentId",
    "covenant.model.retry_policy": "ForceError Requeue",
    "covenant.model.task": "Hop Idempotency Result Task",
    "covenant.outbound.call_errors": "RemoteError",
    "covenant.outbound.remote.remote_client": "Remote",
    "covenant.outbound.remote.remote_task": "Reply",
    "covenant.worker": "Worker",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_MODULES]  # noqa: PLE0604  (a list of strings, which the rule cannot see)


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'covenant' has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
