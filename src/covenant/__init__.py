"""Covenant: a durable exchange through which agents hand work to each other.

The names below are the public interface. Each is imported when it is first used, so that a command that needs none of
them starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covenant.agents.api import Agent as Agent
    from covenant.agents.api import Approval as Approval
    from covenant.agents.api import SyncTurn as SyncTurn
    from covenant.agents.api import Turn as Turn
    from covenant.agents.runtime.agent_calls import Answer as Answer
    from covenant.agents.runtime.agent_calls import Call as Call
    from covenant.agents.runtime.agent_calls import CallLimit as CallLimit
    from covenant.agents.runtime.agent_calls import NotEnough as NotEnough
    from covenant.agents.runtime.durable_step import StepError as StepError
    from covenant.agents.runtime.step_failures import StepFailed as StepFailed
    from covenant.client import Client as Client
    from covenant.client import Posted as Posted
    from covenant.client import Sent as Sent
    from covenant.client import Taken as Taken
    from covenant.daemon.connect import connect as connect
    from covenant.exchange.file_source import FileSource as FileSource
    from covenant.ledger.contract.task_query import FoundPage as FoundPage
    from covenant.ledger.contract.task_query import FoundTask as FoundTask
    from covenant.ledger.contract.tasks import QueueEntry as QueueEntry
    from covenant.ledger.contract.tasks import TaskDetail as TaskDetail
    from covenant.ledger.contract.tasks import TreeNode as TreeNode
    from covenant.ledger.machine.commands import Accepted as Accepted
    from covenant.ledger.machine.commands import Canceled as Canceled
    from covenant.ledger.machine.commands import LeasedTask as LeasedTask
    from covenant.ledger.machine.commands import Settled as Settled
    from covenant.mailbox import Mailbox as Mailbox
    from covenant.mailbox import local_agent as local_agent
    from covenant.model.agent_definition import Schedule as Schedule
    from covenant.model.agent_definition import Skill as Skill
    from covenant.model.content import Audio as Audio
    from covenant.model.content import Content as Content
    from covenant.model.content import Embedded as Embedded
    from covenant.model.content import File as File
    from covenant.model.content import Image as Image
    from covenant.model.content import Json as Json
    from covenant.model.content import Resource as Resource
    from covenant.model.content import ResourceLink as ResourceLink
    from covenant.model.content import Text as Text
    from covenant.model.errors import Conflict as Conflict
    from covenant.model.errors import CovenantError as CovenantError
    from covenant.model.errors import Damaged as Damaged
    from covenant.model.errors import Forbidden as Forbidden
    from covenant.model.errors import HomeLocked as HomeLocked
    from covenant.model.errors import HomeUnusable as HomeUnusable
    from covenant.model.errors import Invalid as Invalid
    from covenant.model.errors import NotFound as NotFound
    from covenant.model.errors import OverLimit as OverLimit
    from covenant.model.errors import Refusal as Refusal
    from covenant.model.errors import SettingsError as SettingsError
    from covenant.model.errors import TooLarge as TooLarge
    from covenant.model.errors import Unauthenticated as Unauthenticated
    from covenant.model.errors import Unavailable as Unavailable
    from covenant.model.errors import WrongType as WrongType
    from covenant.model.ids import AgentId as AgentId
    from covenant.model.ids import LeaseId as LeaseId
    from covenant.model.ids import PublicKey as PublicKey
    from covenant.model.ids import TaskId as TaskId
    from covenant.model.rate_limits import Backoff as Backoff
    from covenant.model.retry_policy import ForceError as ForceError
    from covenant.model.retry_policy import Posture as Posture
    from covenant.model.retry_policy import RepairCommand as RepairCommand
    from covenant.model.retry_policy import RepairOutcome as RepairOutcome
    from covenant.model.retry_policy import RepairRequest as RepairRequest
    from covenant.model.retry_policy import Requeue as Requeue
    from covenant.model.task import DuplicateSafety as DuplicateSafety
    from covenant.model.task import Hop as Hop
    from covenant.model.task import Idempotency as Idempotency
    from covenant.model.task import Lease as Lease
    from covenant.model.task import ReceivedTask as ReceivedTask
    from covenant.model.task import Result as Result
    from covenant.model.task import ResultStatus as ResultStatus
    from covenant.model.task import Task as Task
    from covenant.model.task_event import ArtifactUpdate as ArtifactUpdate
    from covenant.model.task_event import MessageUpdate as MessageUpdate
    from covenant.model.task_event import StatusUpdate as StatusUpdate
    from covenant.model.task_event import Update as Update
    from covenant.model.task_view import RemoteArtifact as RemoteArtifact
    from covenant.model.task_view import RemoteMessage as RemoteMessage
    from covenant.model.task_view import RemoteStatus as RemoteStatus
    from covenant.model.task_view import RemoteTask as RemoteTask
    from covenant.outbound.call_errors import AddressRefused as AddressRefused
    from covenant.outbound.call_errors import CallFailed as CallFailed
    from covenant.outbound.call_errors import NoCard as NoCard
    from covenant.outbound.call_errors import OutcomeUnknown as OutcomeUnknown
    from covenant.outbound.call_errors import RemoteError as RemoteError
    from covenant.outbound.call_errors import RemoteRefused as RemoteRefused
    from covenant.outbound.call_errors import RemoteTimedOut as RemoteTimedOut
    from covenant.outbound.remote.remote_client import Remote as Remote
    from covenant.outbound.remote.remote_task import Reply as Reply
    from covenant.simple import ExternalServiceError as ExternalServiceError
    from covenant.simple import NotFoundError as NotFoundError
    from covenant.simple import ValidationError as ValidationError
    from covenant.wire.a2a.card_codec import BadCard as BadCard
    from covenant.wire.mailbox import FindFilters as FindFilters
    from covenant.worker import Worker as Worker
    from covenant.worker import WorkerJob as WorkerJob

__version__ = "0.1.0"

_NAMES = {
    "covenant.agents.api": "Agent Approval SyncTurn Turn",
    "covenant.agents.runtime.agent_calls": "Answer Call CallLimit NotEnough",
    "covenant.agents.runtime.durable_step": "StepError",
    "covenant.agents.runtime.step_failures": "StepFailed",
    "covenant.client": "Client Posted Sent Taken",
    "covenant.daemon.connect": "connect",
    "covenant.exchange.file_source": "FileSource",
    "covenant.ledger.contract.task_query": "FoundPage FoundTask",
    "covenant.ledger.contract.tasks": "QueueEntry TaskDetail TreeNode",
    "covenant.ledger.machine.commands": "Accepted Canceled LeasedTask Settled",
    "covenant.mailbox": "Mailbox local_agent",
    "covenant.model.agent_definition": "Schedule Skill",
    "covenant.model.content": "Audio Content Embedded File Image Json Resource ResourceLink Text",
    "covenant.model.errors": "Conflict CovenantError Damaged Forbidden HomeLocked HomeUnusable Invalid "
    "NotFound OverLimit Refusal SettingsError TooLarge Unauthenticated Unavailable WrongType",
    "covenant.model.ids": "AgentId LeaseId PublicKey TaskId",
    "covenant.model.rate_limits": "Backoff",
    "covenant.model.retry_policy": "ForceError Posture RepairCommand RepairOutcome RepairRequest Requeue",
    "covenant.model.task": "DuplicateSafety Hop Idempotency Lease ReceivedTask Result ResultStatus Task",
    "covenant.model.task_event": "ArtifactUpdate MessageUpdate StatusUpdate Update",
    "covenant.model.task_view": "RemoteArtifact RemoteMessage RemoteStatus RemoteTask",
    "covenant.outbound.call_errors": "AddressRefused CallFailed NoCard OutcomeUnknown RemoteError "
    "RemoteRefused RemoteTimedOut",
    "covenant.outbound.remote.remote_client": "Remote",
    "covenant.outbound.remote.remote_task": "Reply",
    "covenant.simple": "ExternalServiceError NotFoundError ValidationError",
    "covenant.wire.a2a.card_codec": "BadCard",
    "covenant.wire.mailbox": "FindFilters",
    "covenant.worker": "Worker WorkerJob",
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
