"""Decisions: from a command to events and an answer, one module a noun. The table lists every command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from covenant.ledger.machine import commands, identity_commands, peer_commands
from covenant.ledger.machine.commands import Command
from covenant.ledger.machine.decisions import acceptance, identities, leases, peers, push, repairs, results, suspensions
from covenant.ledger.machine.decisions.context import CommandRefused, DecisionContext, NewId
from covenant.ledger.machine.events import AnyEvent
from covenant.ledger.machine.view import View
from covenant.model.clock_steps import STEADY, Ages
from covenant.model.errors import Refusal

A = TypeVar("A")

DECISIONS: Final[dict[type[Any], Callable[[DecisionContext, Any], Any]]] = {
    commands.Accept: acceptance.accept,
    commands.Take: leases.take,
    commands.Renew: leases.renew,
    commands.Release: leases.release,
    commands.Interrupt: leases.interrupt,
    commands.Report: leases.report,
    commands.Advance: leases.advance,
    commands.Continue: leases.continue_,
    commands.SignalTask: suspensions.send_signal,
    commands.Settle: results.settle,
    commands.Cancel: results.cancel,
    commands.Drain: results.drain,
    commands.GiveBack: leases.give_back,
    commands.Withdraw: leases.withdraw,
    commands.Sweep: results.sweep,
    commands.CancelOrphans: results.cancel_orphans,
    commands.Repair: repairs.repair,
    commands.RetryStale: repairs.retry_stale,
    identity_commands.Enroll: identities.enroll,
    identity_commands.RevokeIdentity: identities.revoke_identity,
    identity_commands.RotateToken: identities.rotate_token,
    identity_commands.PurgeIdentities: identities.purge_identities,
    identity_commands.MakeGrant: identities.make_grant,
    identity_commands.RevokeGrant: identities.revoke_grant,
    identity_commands.PurgeGrants: identities.purge_grants,
    identity_commands.AddTenant: identities.add_tenant,
    identity_commands.ChangeTenant: identities.change_tenant,
    identity_commands.RotateTenant: identities.rotate_tenant,
    identity_commands.BeginTenantRemoval: identities.begin_tenant_removal,
    identity_commands.EraseTenant: identities.erase_tenant,
    identity_commands.FinishTenantRemoval: identities.finish_tenant_removal,
    identity_commands.PauseSchedule: identities.pause_schedule,
    identity_commands.PutAgent: identities.put_agent,
    identity_commands.RemoveAgent: identities.remove_agent,
    commands.PutPush: push.put_push,
    commands.DropPush: push.drop_push,
    commands.MovePushes: push.move_pushes,
    commands.RetryPush: push.retry_push,
    peer_commands.AddPeer: peers.add_peer,
    peer_commands.ChangePeer: peers.change_peer,
    peer_commands.RemovePeer: peers.remove_peer,
    peer_commands.LearnPeer: peers.learn_peer,
    peer_commands.SucceedPeer: peers.succeed_peer,
    peer_commands.RevokeToken: peers.revoke_token,
    peer_commands.SendToPeer: peers.send_to_peer,
    peer_commands.ReceiveFromPeer: peers.receive_from_peer,
    peer_commands.MoveOutbox: peers.move_outbox,
    identity_commands.PurgeAudit: identities.purge_audit,
    identity_commands.WriteAuditRow: identities.write_audit_row,
}


class Decision(msgspec.Struct, frozen=True):
    """The events, and the caller's answer once they are durable. No events: nothing happened."""

    events: list[AnyEvent]
    answer: Any


def decide(view: View, command: Command[A], now_ms: int, new_id: NewId, ages: Ages = STEADY) -> Decision:
    """Decides a command. Raises `CommandRefused` if it is not allowed or not possible."""
    events: list[AnyEvent] = []
    context = DecisionContext(view, now_ms, new_id, ages, events, events.append)
    try:
        return Decision(events, DECISIONS[type(command)](context, command))
    except Refusal as refusal:
        raise CommandRefused(refusal, events) from None
