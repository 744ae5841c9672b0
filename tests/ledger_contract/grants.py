"""Giving capabilities, and asking for things as somebody who needs one."""

from __future__ import annotations

from covenant.ledger.machine.commands import Access
from covenant.ledger.machine.identity_commands import MakeGrant
from covenant.model.grant import Grant, respond_actions, send_actions
from covenant.model.ids import AgentId
from covenant.model.task import Task
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.samples import OPERATOR


async def give(driver: LedgerDriver, grant: Grant) -> Grant:
    return await driver.ledger.commit(MakeGrant(by=OPERATOR, grant=grant))


def sending(task: Task) -> Access:
    """What the sender of this task must show."""
    return Access(
        caller=task.sender,
        actions=send_actions(task.recipient),
        scope_id=f"a2a-send:{task.recipient.display}",
        what=f"a2a send to {task.recipient.display}",
        peer=task.recipient.pubkey,
        task_id=task.id,
    )


def responding(task: Task, caller: AgentId) -> Access:
    return Access(
        caller=caller,
        actions=respond_actions(task.sender),
        scope_id=f"a2a-respond:{task.id}",
        what=f"a2a respond to {task.sender.display}",
        peer=task.sender.pubkey,
        task_id=task.id,
    )
