"""What a command needs of the archive before it is decided: the finished tasks it names, if its caller has part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covenant.ledger.log.state import LedgerState
from covenant.ledger.machine.commands import Accept, Command, Drain, GiveBack, TaskCommand, Withdraw
from covenant.ledger.machine.peer_commands import Hear
from covenant.model.ids import PublicKey, TaskId


def named_tasks(command: Command[Any], state: LedgerState) -> Sequence[TaskId]:
    """The tasks that a command names, by id or by the request that was given them."""
    if isinstance(command, TaskCommand):
        return (command.task_id,)
    if isinstance(command, Accept):
        # An id that was made just now is nobody's yet.
        return () if command.minted else (command.task.id,)
    if isinstance(command, Hear):
        return () if command.accept is None else (command.accept.task.id,)
    if isinstance(command, Drain):
        if command.request_id is not None:
            again = state.remembered("drain", command.by.pubkey, command.request_id)
            if again is not None:
                return again.task_ids
        return (command.task_id,) if command.task_id is not None else ()
    if isinstance(command, Withdraw):
        drained = state.remembered("drain", command.by.pubkey, command.request_id)
        return drained.task_ids if drained is not None else ()
    return command.results if isinstance(command, GiveBack) else ()


def asked_by(command: Command[Any]) -> tuple[PublicKey | None, PublicKey | None]:
    """Who must have part in the tasks that a command names, and whose they must be; None: whoever, whosever."""
    if isinstance(command, TaskCommand):
        return command.viewer, command.recipient
    return (command.sender if isinstance(command, Drain) else None), None
