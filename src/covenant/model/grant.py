"""Grants: a capability (action + scope) given to an identity by the operator."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from covenant.model.errors import Invalid, did_you_mean
from covenant.model.ids import KEY_BYTES, AgentId, PublicKey, base58_size, check_display

REQUEUE_ACTION: Final = "a2a.repair.requeue"
FORCE_ERROR_ACTION: Final = "a2a.repair.force_error"
COMPACT_ACTION: Final = "a2a.compact"
VIEW_ACTION: Final = "ui.view"
"""Allows reading everything on the dashboard and changing nothing."""

ACTION_LENGTH_MAX: Final = 256

_WHOLE: Final = (REQUEUE_ACTION, FORCE_ERROR_ACTION, COMPACT_ACTION, VIEW_ACTION)
_WITH_AGENT: Final = ("a2a.send.", "a2a.respond.", "a2a.recv.")
"""Prefixes of actions that end in the display name or the public key of the other agent."""
PINS: Final = ("peer_pubkey_b58", "task_id", "lease_id", "duplicate_risk")
_SCOPE_FIELDS: Final = ("version", *PINS, "max_uses")
FINDINGS_MAX: Final = 100


class Scope(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The conditions of a grant. A request must match each field that is set; an absent field matches anything."""

    peer_pubkey_b58: str | None = None
    task_id: str | None = None
    lease_id: str | None = None
    duplicate_risk: str | None = None


class Grant(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`signature_b58` is the operator's signature over the whole grant, and serves as the grant's id."""

    signature_b58: str
    subject: AgentId
    action: str
    granted_by: AgentId
    granted_at_ms: int
    nonce: str
    """Distinguishes two otherwise equal grants, so that each has its own signature."""
    scope_json: str = "{}"
    """The scope as the operator wrote and signed it. Old grants may have fields without a meaning."""
    pins: Scope = Scope()
    expires_at: int | None = None
    max_uses: int | None = None
    used: int = 0
    revoked_at_ms: int | None = None

    def live(self, now_ms: int) -> bool:
        return (
            self.revoked_at_ms is None
            and (self.expires_at is None or now_ms <= self.expires_at)
            and (self.max_uses is None or self.used < self.max_uses)
        )


def check_action(action: str) -> str:
    """Refuses an action that no mailbox verb asks for: such a grant would silently allow nothing."""
    if len(action) <= ACTION_LENGTH_MAX:
        if action in _WHOLE:
            return action
        for prefix in _WITH_AGENT:
            if action.startswith(prefix):
                return _check_agent(action, prefix)
    tail = ".".join(action[:ACTION_LENGTH_MAX].split(".")[2:])
    meant = did_you_mean(action, (*_WHOLE, *(f"{prefix}{tail}" for prefix in _WITH_AGENT if tail)))
    there = "; there are a2a.send.NAME@HOST, a2a.respond.NAME@HOST, a2a.recv.NAME@HOST, " + ", ".join(_WHOLE)
    raise Invalid("invalid_action", f"{action[:80]!r} is not an action{meant or there}")


def _check_agent(action: str, prefix: str) -> str:
    other = action.removeprefix(prefix)
    if base58_size(other) != KEY_BYTES:
        try:
            check_display(other)
        except Invalid:
            raise Invalid(
                "invalid_action", f"{action[:80]!r}: write NAME@HOST or a whole pubkey after {prefix}"
            ) from None
    return action


def send_actions(recipient: AgentId) -> tuple[str, str]:
    """The actions that allow sending to this recipient: by display name, which error messages show, and by key."""
    return f"a2a.send.{recipient.display}", f"a2a.send.{recipient.pubkey}"


def respond_actions(sender: AgentId) -> tuple[str, str]:
    return f"a2a.respond.{sender.display}", f"a2a.respond.{sender.pubkey}"


def recv_actions(sender: AgentId) -> tuple[str, str]:
    return f"a2a.recv.{sender.display}", f"a2a.recv.{sender.pubkey}"


def read_scope(scope: dict[str, Any]) -> tuple[Scope, int | None]:
    """The pins and `max_uses` of a scope as the operator wrote it. A refusal names the field that is wrong.

    An unknown field is refused: a misspelt pin would pin nothing, and the grant would be wider than meant.
    """
    if not scope:
        return Scope(), None
    for field, value in scope.items():
        if field not in _SCOPE_FIELDS:
            known = ", ".join(_SCOPE_FIELDS)
            meant = did_you_mean(field, _SCOPE_FIELDS) or f"; a scope has {known}"
            raise Invalid("invalid_scope", f"scope.{field[:80]} is not a field of a scope{meant}")
        if value is None:
            raise Invalid("invalid_scope", f"scope.{field} is null, which pins nothing; leave it out if that is meant")
    version = scope.get("version", 1)
    if isinstance(version, bool) or version != 1:
        raise Invalid("invalid_scope", "scope.version must be the integer 1")
    pins: dict[str, str] = {}
    for field in PINS:
        if field not in scope:
            continue
        value = scope[field]
        if not isinstance(value, str) or not value:
            raise Invalid("invalid_scope", f"scope.{field} must be a non-empty string")
        pins[field] = value
    risk = pins.get("duplicate_risk")
    if risk is not None:
        pins["duplicate_risk"] = risk = risk.replace("-", "_")
        if risk not in ("idempotent", "operator_accepted"):
            raise Invalid("invalid_scope", "scope.duplicate_risk must be idempotent or operator_accepted")
    max_uses = scope.get("max_uses")
    if max_uses is not None and (not isinstance(max_uses, int) or isinstance(max_uses, bool) or max_uses < 1):
        raise Invalid("invalid_scope", "scope.max_uses must be a positive integer")
    return Scope(**pins), max_uses


class Identity(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A token holder. Only the SHA-256 of its token is stored; people tell tokens apart by `token_prefix`."""

    agent: AgentId
    token_sha256: str
    token_prefix: str
    registered_at_ms: int
    operator: bool = False
    revoked_at_ms: int | None = None

    @property
    def pubkey(self) -> PublicKey:
        return self.agent.pubkey


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    timestamp_ms: int
    issuer: AgentId
    kind: dict[str, Any] | msgspec.Raw
    """`type` and the fields of that type, as docs/formats/audit.md lists them; nulls are always present.

    Raw if it is already encoded."""


class AuditHead(msgspec.Struct, frozen=True, gc=False):
    """The newest row: its index (the number of rows so far) and the chain's hash. A cut chain ends before it."""

    index: int = 0
    chain_hash: str = "0" * 64


GENESIS: Final = AuditHead()


def link(head: AuditHead, row_text: str) -> AuditHead:
    row_hash = hashlib.sha256(row_text.encode()).hexdigest()
    chained = hashlib.sha256(f"{head.chain_hash}\n{row_hash}".encode()).hexdigest()
    return AuditHead(head.index + 1, chained)


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a verification. `valid` is false when `failures` is not empty."""

    events: int
    anchors: int
    valid: bool
    root_hash_hex: str
    failures: tuple[str, ...] = ()


class StoredRow(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One row as it is stored, the hash in hexadecimal. `coherent` is false if a column contradicts the text."""

    index: int
    row_hex: str
    chain_hash_hex: str
    coherent: bool


class AuditVerification:
    """Verifies rows that are fed in order, from the one after `start`, up to `head`, the ledger's newest row."""

    def __init__(self, start: AuditHead, head: AuditHead) -> None:
        self._start = start
        self._head = head
        self._at = start
        self._rows = 0
        self._findings: list[str] = []

    def add_finding(self, finding: str) -> None:
        self._findings.append(finding)

    def add_rows(self, stored: Iterable[StoredRow]) -> None:
        for row in stored:
            self._verify_row(row.index, bytes.fromhex(row.row_hex), row.chain_hash_hex, coherent=row.coherent)

    def _verify_row(self, index: int, row: bytes, chain_hash_hex: str, *, coherent: bool) -> None:
        self._rows += 1
        chain_hash = bytes.fromhex(chain_hash_hex).decode(errors="replace")
        if index > self._at.index + 1:
            self.add_finding(f"{_audit_rows(self._at.index + 1, index - 1)} missing")
        elif not _follows(self._at, row, chain_hash):
            anchored = self._rows == 1 and index > 1
            self.add_finding(f"row {index} was changed" + (", or the anchor before it" if anchored else ""))
        elif not coherent:
            self.add_finding(f"row {index} has another issuer or time than its text says")
        self._at = AuditHead(index, chain_hash)
        if index == self._head.index and chain_hash != self._head.chain_hash:
            self.add_finding(f"row {index} is not the last one that the ledger wrote")

    def report(self) -> AuditReport:
        if self._at.index < self._head.index:
            self.add_finding(f"{_audit_rows(self._at.index + 1, self._head.index)} missing: the end was cut off")
        findings = self._findings[:FINDINGS_MAX]
        if len(self._findings) > FINDINGS_MAX:
            findings.append(f"and {len(self._findings) - FINDINGS_MAX} more")
        return AuditReport(
            events=self._rows,
            anchors=max(self._head.index, self._at.index) - self._start.index,
            valid=not findings,
            root_hash_hex=self._at.chain_hash,
            failures=tuple(findings),
        )


def _follows(at: AuditHead, row: bytes, chain_hash: str) -> bool:
    try:
        return link(at, row.decode()).chain_hash == chain_hash
    except UnicodeDecodeError:
        return False


def _audit_rows(first: int, last: int) -> str:
    return f"row {first} is" if first == last else f"rows {first} to {last} are"
