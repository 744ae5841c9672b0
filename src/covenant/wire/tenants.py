"""What the operator asks about tenants and their agents."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from covenant.model.tenant import DEFAULT, LIMIT_BYTES_MAX, LIMIT_MAX
from covenant.wire.mailbox import Request, Strict

Bound = Annotated[int, msgspec.Meta(ge=0, le=LIMIT_MAX)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=LIMIT_BYTES_MAX)]


class WireLimits(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """0: the daemon's own default."""

    concurrency: Bound = 0
    rate_per_min: Bound = 0
    burst: Bound = 0
    connections: Bound = 0
    streams: Bound = 0
    live_tasks: Bound = 0
    queued_bytes: Bytes = 0


class AddTenant(Strict, frozen=True, kw_only=True):
    name: str
    limits: WireLimits | None = None


class ListTenants(Request, frozen=True, kw_only=True):
    pass


class TenantRequest(Strict, frozen=True, kw_only=True):
    name: str = ""


class ChangeTenant(TenantRequest, frozen=True, kw_only=True):
    """What is left out stays as it is; limits change together."""

    disabled: bool | None = None
    limits: WireLimits | None = None


class RotateTenant(TenantRequest, frozen=True, kw_only=True):
    pass


class ListAgents(Request, frozen=True, kw_only=True):
    tenant: str = DEFAULT


class AgentRequest(Request, frozen=True, kw_only=True):
    tenant: str = DEFAULT
    agent_id: str = ""


class ShowAgent(AgentRequest, frozen=True, kw_only=True):
    pass


class RemoveAgent(AgentRequest, frozen=True, kw_only=True):
    pass


class AddAgent(Strict, frozen=True, kw_only=True):
    """`agent_def` is the constitution. With `replace` it takes the place of the stored one with its id."""

    agent_def: dict[str, Any]
    tenant: str = DEFAULT
    replace: bool | None = None
