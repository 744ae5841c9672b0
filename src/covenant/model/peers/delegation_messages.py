"""The nine messages of a delegation, their parts, and the proof that a result carries.

R, the requester, offers; P, the provider, works. Names on the wire are in camel case, as in the protocol's documents;
times are in milliseconds. A message may have fields that this version does not know: they are ignored. Parts that are
signed on their own (offer, transcript, proof, capability response) refuse unknown fields.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from covenant.model.content import SentContent
from covenant.model.peers.instance import Instance, KeyBundle, Prekey, Signature, Trust, Versions, Whole

TASK_CHARS_MAX: Final = 50_000
CONTEXT_CHARS_MAX: Final = 100_000
BUDGET_MAX: Final = 500_000
TIMEOUT_MS_MAX: Final = 600_000
DEPTH_MAX: Final = 10
RESULT_CHARS_MAX: Final = 4_000_000
TRANSCRIPT_MAX: Final = 10_000
PARTS_MAX: Final = 200
PROFILES_MAX: Final = 500
TREE_DEPTH_MAX: Final = 20
TREE_NODES_MAX: Final = 1_000
STATUS_TREE_MAX: Final = 100
"""The most sub-delegations in one status report, at all levels together: a report is repeated many times."""

DelegationStatus = Literal["pending", "running", "completed", "failed", "cancelled", "timeout"]
DelegationOutcome = Literal["completed", "failed", "cancelled", "timeout"]
RejectCode = Literal[
    "busy",
    "no_profile",
    "budget_too_low",
    "untrusted",
    "denied",
    "rate_limited",
    "version",
    "depth_exceeded",
    "expired",
    "invalid",
]

Uuid = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z")]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Line = Annotated[str, msgspec.Meta(max_length=500)]
Budget = Annotated[int, msgspec.Meta(ge=1, le=BUDGET_MAX)]
TimeoutMs = Annotated[int, msgspec.Meta(ge=1, le=TIMEOUT_MS_MAX)]
Depth = Annotated[int, msgspec.Meta(ge=0, le=DEPTH_MAX)]
Nonce = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{16,128}\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Parts = Annotated[tuple[SentContent, ...], msgspec.Meta(max_length=PARTS_MAX)]
Traceparent = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")]


class _Closed(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The base of structs that are signed on their own."""


class _Open(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The base of structs that may get further fields."""


class TokenUsage(_Closed, frozen=True, kw_only=True):
    prompt: Whole = 0
    completion: Whole = 0
    total: Whole = 0


def usage_amounts(usage: TokenUsage) -> dict[str, float]:
    """The usage under the names that agents report; empty if nothing was used."""
    amounts: dict[str, float] = {"tokens": usage.total, "input_tokens": usage.prompt, "output_tokens": usage.completion}
    if not usage.prompt:
        del amounts["output_tokens"]  # the report has only a total
    return {name: amount for name, amount in amounts.items() if amount}


class DelegationOffer(_Closed, frozen=True, kw_only=True):
    """R → P. An offer that is repeated keeps its `offer_id`, so that its work never begins twice."""

    offer_id: Uuid
    profile: Name
    task: Annotated[str, msgspec.Meta(min_length=1, max_length=TASK_CHARS_MAX)]
    max_token_budget: Budget
    timeout: TimeoutMs
    depth_remaining: Depth = 0
    context: Annotated[str, msgspec.Meta(max_length=CONTEXT_CHARS_MAX)] | None = None
    parts: Parts = ()
    deadline_ms: Whole | None = None
    traceparent: Traceparent | None = None
    parent_id: Uuid | None = None
    correlation_id: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    via: Annotated[tuple[Instance, ...], msgspec.Meta(max_length=DEPTH_MAX + 1)] = ()
    """The instances on whose behalf the work is done, the first one first. None of them accepts the offer."""
    token: Annotated[str, msgspec.Meta(max_length=8_192)] | None = None
    """The capability token that P gave R, narrowed to this offer."""
    assertion: Signature | None = None
    """R's signature over the other fields, `token` among them."""


class DelegationAccept(_Open, frozen=True, kw_only=True):
    """P → R. The agreed terms are at most the offered ones."""

    offer_id: Uuid
    delegation_id: Uuid
    max_token_budget: Budget
    timeout: TimeoutMs
    status_interval: Annotated[int, msgspec.Meta(ge=100, le=TIMEOUT_MS_MAX)] = 10_000


class DelegationReject(_Open, frozen=True, kw_only=True):
    offer_id: Uuid
    code: RejectCode
    reason: Line = ""
    retry_after: Whole | None = None
    versions: Versions | None = None
    """With the code `version`: the versions that P speaks."""


class SubDelegation(_Closed, frozen=True, kw_only=True):
    delegation_id: Uuid
    profile: Name
    status: DelegationStatus
    remote: bool = False
    provider: Instance | None = None
    token_usage: TokenUsage = TokenUsage()
    sub_delegations: Annotated[tuple[SubDelegation, ...], msgspec.Meta(max_length=TREE_NODES_MAX)] = ()


class StatusReport(_Open, frozen=True, kw_only=True):
    offer_id: Uuid
    delegation_id: Uuid
    seq: Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)]
    status: Literal["pending", "running", "input_required"]
    progress: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    message: Annotated[str, msgspec.Meta(max_length=4_000)] | None = None
    token_usage: TokenUsage = TokenUsage()
    question: Whole | None = None
    """With `input_required`: the number of the question. `message` and `parts` are its text."""
    parts: Parts = ()
    sub_delegations: (
        Annotated[tuple[SubDelegation, ...], msgspec.Meta(max_length=STATUS_TREE_MAX)] | msgspec.UnsetType
    ) = msgspec.UNSET
    """P's own delegations so far. Not set: none, or P does not report them."""


class DelegationInput(_Open, frozen=True, kw_only=True):
    """R → P. The answer to a question."""

    offer_id: Uuid
    delegation_id: Uuid
    question: Whole
    text: Annotated[str, msgspec.Meta(max_length=TASK_CHARS_MAX)] = ""
    parts: Parts = ()


class TranscriptEntry(_Closed, frozen=True, kw_only=True):
    """One line of the sealed conversation. Tool calls and their results are JSON as text.

    `salt` is random and only P knows it until it shows the line. Without it, the hash of a hidden line with a short
    text such as "yes" could be guessed.
    """

    seq: Annotated[int, msgspec.Meta(ge=1, le=TRANSCRIPT_MAX)]
    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, msgspec.Meta(max_length=RESULT_CHARS_MAX)]
    at_ms: Whole
    tool_calls: Annotated[str, msgspec.Meta(max_length=RESULT_CHARS_MAX)] | None = None
    tool_result: Annotated[str, msgspec.Meta(max_length=RESULT_CHARS_MAX)] | None = None
    token_count: Whole = 0
    salt: Annotated[str, msgspec.Meta(max_length=64)] = ""


Transcript = Annotated[tuple[TranscriptEntry, ...], msgspec.Meta(max_length=TRANSCRIPT_MAX)]


class Proof(_Closed, frozen=True, kw_only=True):
    """P's signed statement of the request, the conversation, the result and the cost."""

    delegation_id: Uuid
    offer_hash: Digest
    result_hash: Digest
    transcript_root: Digest
    entries: Annotated[int, msgspec.Meta(ge=0, le=TRANSCRIPT_MAX)]
    token_usage: TokenUsage
    provider: Instance
    requester: Instance
    provider_key: Annotated[str, msgspec.Meta(min_length=32, max_length=44)]
    issued_at_ms: Whole
    signature: Signature = ""


class DelegationResult(_Open, frozen=True, kw_only=True):
    """P → R, once. `transcript` is absent where only its root may leave P (`proof` still covers it)."""

    offer_id: Uuid
    delegation_id: Uuid
    profile: Name
    status: DelegationOutcome
    result: Annotated[str, msgspec.Meta(max_length=RESULT_CHARS_MAX)] | None = None
    parts: Parts = ()
    error: Annotated[str, msgspec.Meta(max_length=10_000)] | None = None
    error_code: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    token_usage: TokenUsage = TokenUsage()
    duration_ms: Whole = 0
    sub_delegations: Annotated[tuple[SubDelegation, ...], msgspec.Meta(max_length=TREE_NODES_MAX)] = ()
    transcript: Transcript | None = None
    proof: Proof | None = None


class DelegationCancel(_Open, frozen=True, kw_only=True):
    """R → P, answered by a result of status `cancelled`. R may cancel an offer before P's accept has come."""

    offer_id: Uuid
    delegation_id: Uuid | None = None
    reason: Line = ""


class CapabilityQuery(_Open, frozen=True, kw_only=True):
    """R → P. `nonce` is the challenge that P must repeat in its signed answer."""

    nonce: Nonce
    versions: Annotated[Versions, msgspec.Meta(min_length=1)]
    keys: KeyBundle | None = None
    """R's own keys, so that P can seal the answer even if it does not know R's address."""
    hybrid_prekey: Prekey | None = None
    """R's hybrid prekey, if its keys list the hybrid version: P seals the answer to it."""
    ledger_end: Whole | None = None
    """The number of records in R's ledger. The answer says how many it had when R last asked."""


class Profile(_Closed, frozen=True, kw_only=True):
    name: Name
    description: Line = ""
    max_token_budget: Budget
    price: Annotated[int, msgspec.Meta(ge=0, le=999_999_999)] | msgspec.UnsetType = msgspec.UNSET
    """The price of 1,000 tokens, in a unit that both agree on. Sent only to peers whose version has prices."""


class CapabilityResponse(_Closed, frozen=True, kw_only=True):
    """P → R. `audience` and `nonce` bind the response to one query of one requester."""

    provider: Instance
    audience: Instance
    nonce: Nonce
    versions: Annotated[Versions, msgspec.Meta(min_length=1)]
    profiles: Annotated[tuple[Profile, ...], msgspec.Meta(max_length=PROFILES_MAX)]
    active_delegations: Whole
    free_slots: Whole
    trust_level: Trust
    """How far the provider trusts the requester."""
    keys: KeyBundle
    issued_at_ms: Whole
    expires_at_ms: Whole
    token: Annotated[str, msgspec.Meta(max_length=8_192)] | None = None
    """A capability token for the requester, if the provider gives one."""
    known_end: Whole | msgspec.UnsetType = msgspec.UNSET
    """The records that the requester's ledger had before, as it reported. Sent if its query has `ledger_end`."""
    signature: Signature = ""


DelegationMessage = (
    DelegationOffer
    | DelegationAccept
    | DelegationReject
    | DelegationInput
    | StatusReport
    | DelegationResult
    | DelegationCancel
    | CapabilityQuery
    | CapabilityResponse
)
