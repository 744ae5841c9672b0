"""`decide`: from a command to events and an answer. The table below is the list of everything that can be asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from covenant.ledger.machine import (
    commands,
    leasing,
    peer_commands,
    peering,
    push_commands,
    pushing,
    registering,
    repairing,
    sending,
    settling,
    tenant_commands,
    tenanting,
    withdrawal,
)
from covenant.ledger.machine.commands import Command
from covenant.ledger.machine.decision import Decide, NewId
from covenant.ledger.machine.events import AnyEvent
from covenant.ledger.machine.view import View
from covenant.model.clock_steps import STEADY, Ages

A = TypeVar("A")

_DECISIONS: Final[dict[type[Any], Callable[[Decide, Any], Any]]] = {
    commands.Accept: sending.accept,
    commands.Take: leasing.take,
    commands.Renew: leasing.renew,
    commands.Release: leasing.release,
    commands.Interrupt: leasing.interrupt,
    commands.Report: leasing.report,
    commands.Advance: leasing.advance,
    commands.Continue: leasing.continue_,
    commands.Settle: settling.settle,
    commands.Cancel: settling.cancel,
    commands.Drain: settling.drain,
    commands.GiveBack: withdrawal.give_back,
    commands.Withdraw: withdrawal.withdraw,
    commands.Sweep: settling.sweep,
    commands.CancelOrphans: settling.cancel_orphans,
    commands.Repair: repairing.repair,
    commands.RetryStale: repairing.retry_stale,
    commands.Enroll: registering.enroll,
    commands.RevokeIdentity: registering.revoke_identity,
    commands.RotateToken: registering.rotate_token,
    commands.PurgeIdentities: registering.purge_identities,
    commands.MakeGrant: registering.make_grant,
    commands.RevokeGrant: registering.revoke_grant,
    commands.PurgeGrants: registering.purge_grants,
    tenant_commands.AddTenant: tenanting.add_tenant,
    tenant_commands.ChangeTenant: tenanting.change_tenant,
    tenant_commands.RotateTenant: tenanting.rotate_tenant,
    tenant_commands.PutAgent: tenanting.put_agent,
    tenant_commands.RemoveAgent: tenanting.remove_agent,
    push_commands.PutPush: pushing.put_push,
    push_commands.DropPush: pushing.drop_push,
    push_commands.MovePushes: pushing.move_pushes,
    push_commands.RetryPush: pushing.retry_push,
    peer_commands.AddPeer: peering.add_peer,
    peer_commands.ChangePeer: peering.change_peer,
    peer_commands.RemovePeer: peering.remove_peer,
    peer_commands.LearnPeer: peering.learn_peer,
    peer_commands.SucceedPeer: peering.succeed_peer,
    peer_commands.RevokeToken: peering.revoke_token,
    peer_commands.Tell: peering.tell,
    peer_commands.Hear: peering.hear,
    peer_commands.MoveParcels: peering.move_parcels,
    commands.PurgeAudit: registering.purge_audit,
    commands.Note: registering.note,
}


class Decision(msgspec.Struct, frozen=True):
    """What happened and what the caller is told, once the events are durable. No events: nothing happened."""

    events: list[AnyEvent]
    answer: Any


def decide(view: View, command: Command[A], now_ms: int, new_id: NewId, ages: Ages = STEADY) -> Decision:
    """Raises `Refused` instead when the command is not allowed or not possible."""
    deciding = Decide(view, now_ms, new_id, ages)
    answer = _DECISIONS[type(command)](deciding, command)
    return Decision(deciding.events, answer)
