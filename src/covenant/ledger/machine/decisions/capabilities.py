"""Authorisation, decided with the action it allows, so that a use is counted and audited in the same record.

Denied by default. One live grant for one of the actions whose pins the request meets is enough. A pinned field
that the request leaves out fails. A use of `max_uses` is spent only by a request that is allowed.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from covenant.ledger.machine.commands import Access
from covenant.ledger.machine.decisions.context import CommandRefused, DecisionContext
from covenant.ledger.machine.events import GrantUsed
from covenant.model.errors import Forbidden
from covenant.model.grant import PINS, Grant, Scope

_encode = msgspec.json.Encoder().encode


def authorize(decide: DecisionContext, access: Access | None) -> None:
    """Add the audit row of a check that passed, or refuse with the row of one that did not."""
    if access is None:
        return
    live, expiry_ms = False, decide.expiry_ms
    for action in access.actions:
        for grant in decide.view.grants(access.caller.pubkey, action):
            if not grant.live(expiry_ms):
                continue
            live = True
            if _pins_met(grant.pins, access):
                if grant.max_uses is not None:
                    decide.add(GrantUsed(grant.signature_b58))
                decide.audit(access.caller, _passed(access.scope_id, access.actions[0], grant))
                return
    if live:
        _refuse_scope(decide, access)
    _refuse_missing(decide, access)


class BulkAuthorization:
    """Authorisation of one pass over many tasks: each is covered by a grant or left alone, and each costs a use.

    Opening it needs some live grant, whatever that is pinned to, and leaves the row of that check. A dry one only says
    what an earnest pass would be allowed; somebody without any grant is told what the pass itself would do.
    """

    def __init__(self, decide: DecisionContext, access: Access | None, *, dry: bool) -> None:
        self._decide = decide
        self._dry = dry
        self._uses: dict[str, int] = {}
        self._grants: tuple[Grant, ...] | None = None
        if access is None:
            return
        view, expiry_ms = decide.view, decide.expiry_ms
        grants = [grant for action in access.actions for grant in view.grants(access.caller.pubkey, action)]
        live = tuple(grant for grant in grants if grant.live(expiry_ms))
        if live:
            self._grants = live
        if not dry:
            if not live:
                _refuse_missing(decide, access)
            decide.audit(access.caller, _passed(access.scope_id, access.actions[0], live[0]))

    def covers(self, asked: Access) -> bool:
        """Whether a grant covers this one; if so, a use of it is spent."""
        if self._grants is None:
            return True
        for grant in self._grants:
            used = grant.used + self._uses.get(grant.signature_b58, 0)
            if _pins_met(grant.pins, asked) and (grant.max_uses is None or used < grant.max_uses):
                self._spend(grant)
                return True
        return False

    def _spend(self, grant: Grant) -> None:
        if grant.max_uses is None:
            return
        self._uses[grant.signature_b58] = self._uses.get(grant.signature_b58, 0) + 1
        if not self._dry:
            self._decide.add(GrantUsed(grant.signature_b58))


def _pins_met(pins: Scope, access: Access) -> bool:
    return (
        (pins.peer_pubkey_b58 is None or pins.peer_pubkey_b58 == access.peer)
        and (pins.task_id is None or pins.task_id == access.task_id)
        and (pins.lease_id is None or pins.lease_id == access.lease_id)
        and (pins.duplicate_risk is None or pins.duplicate_risk == access.duplicate_risk)
    )


def _passed(scope_id: str, action: str, grant: Grant) -> msgspec.Raw:
    return _encoded_pass(scope_id, action, grant.action, grant.granted_by.display, grant.signature_b58)


@lru_cache(maxsize=4_096)
def _encoded_pass(scope_id: str, action: str, granted: str, by: str, signature_b58: str) -> msgspec.Raw:
    """Encoded once: whoever sends much is allowed the same again and again."""
    authorized_by = {"action": granted, "granted_by_display": by, "signature_b58": signature_b58}
    kind = {
        "type": "capability_check",
        "agent_id": scope_id,
        "required_actions": [action],
        "missing_actions": [],
        "passed": True,
        "authorized_by": [authorized_by],
    }
    return msgspec.Raw(_encode(kind))


def _refuse_missing(decide: DecisionContext, access: Access) -> None:
    spent = next(
        (
            grant
            for action in access.actions
            for grant in decide.view.grants(access.caller.pubkey, action)
            if grant.max_uses is not None and grant.used >= grant.max_uses and grant.revoked_at_ms is None
        ),
        None,
    )
    if spent is not None:
        decide.audit(
            access.caller,
            {
                "type": "capability_budget_exhausted",
                "signature_b58": spent.signature_b58,
                "action": spent.action,
                "max_uses": spent.max_uses,
                "used": spent.used,
            },
        )
    action = access.actions[0]
    decide.audit(
        access.caller,
        {
            "type": "capability_check",
            "agent_id": access.scope_id,
            "required_actions": [action],
            "missing_actions": [action],
            "passed": False,
            "authorized_by": [],
        },
    )
    raise CommandRefused(
        Forbidden(
            "capability_missing",
            f"{access.what} requires capability {action!r}. "
            f"The operator grants it with: covenant capabilities grant {action} --to {access.caller.display}",
        ),
        decide.events,
    )


def _refuse_scope(decide: DecisionContext, access: Access) -> None:
    pinned: set[str] = set()
    for action in access.actions:
        for grant in decide.view.grants(access.caller.pubkey, action):
            if grant.live(decide.expiry_ms):
                pinned.update(name for name in PINS if getattr(grant.pins, name) not in (None, _given(access, name)))
    reason = f"{' or '.join(sorted(pinned))} does not match capability scope"
    decide.audit(
        access.caller,
        {
            "type": "capability_scope_rejected",
            "agent_id": access.scope_id,
            "action": access.actions[0],
            "reason": reason,
        },
    )
    raise CommandRefused(
        Forbidden("scope_rejected", f"{access.what} rejected by capability scope: {reason}"), decide.events
    )


def _given(access: Access, pin: str) -> str | None:
    given: str | None = getattr(access, "peer" if pin == "peer_pubkey_b58" else pin)
    return given
