"""Authentication by `Authorization: Bearer <token>`: an identity, or a tenant within its limits.

A token that is missing, unknown, revoked or of a disabled tenant gets one and the same 401, and is audited before the
caller is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from starlette.types import Scope

from covenant.doors.http.host_names import peer_address
from covenant.doors.http.responses import TRANSPORT
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.exchange.access.tenants import Caller, TenantAccess, TenantLimiter
from covenant.model.errors import Refusal
from covenant.seal.keys import new_token

RECOGNISED_MAX: Final = 256
"""The most credentials in the cache. It has only accepted ones, so that strangers cannot fill it."""
RECOGNISED_S: Final = 60.0
"""The cache is emptied after this time, since it has tokens in the clear; elsewhere they are kept only as hashes."""
_CERTIFICATE: Final = f"certificate {new_token()} ".encode()
"""The beginning of a certificate's credential. It is random in each process, so no client can forge one."""


def principal_of(identity_auth: IdentityAuth, credential: bytes | None) -> Principal | None:
    """The identity of this `Authorization` header's value."""
    if credential is None:
        return None
    token = token_in(credential)
    if token is not None:
        return identity_auth.recognise(token)
    names = certificate_names_in(credential)
    return identity_auth.recognise_certificate(names) if names else None


async def audit_refused_caller(
    identity_auth: IdentityAuth, scope: Scope, credential: bytes | None, tenancy: TenantAccess
) -> Refusal:
    """The refusal of a caller without an identity's token; it is audited first."""
    if credential is None:
        reason = "missing Authorization header"
    elif token_in(credential) is None:
        reason = "expected Authorization: Bearer <token>"
    else:
        reason = tenancy.refusal_reason(token_in(credential))
    return await identity_auth.audit_refused_caller(reason, transport=TRANSPORT, address=client_address(scope))


class TenantAuth:
    """Authenticates tenants, for every door that they use over HTTP."""

    transport = TRANSPORT
    """The transport's name in the audit."""

    def __init__(self, tenancy: TenantAccess, limiter: TenantLimiter) -> None:
        self.tenancy = tenancy
        self.limiter = limiter
        self.known = tenancy.by_credential
        """The cache: callers by the `Authorization` value that they were recognised by."""

    async def enter(self, scope: Scope) -> Caller:
        """The calling tenant, with one request of its rate spent."""
        caller = await self.caller(scope)
        self.limiter.admit(caller)
        return caller

    async def caller(self, scope: Scope) -> Caller:
        credential = credential_of(scope)
        caller = self.recognised(credential) if credential is not None else None
        if caller is None:
            token = bearer_token(scope)
            return await self.tenancy.authenticate(token, transport=self.transport, address=client_address(scope))
        return caller

    def recognised(self, credential: bytes) -> Caller | None:
        """The caller of this `Authorization` header's value.

        Most requests have a credential that came before. Its caller is cached until a register changes, so a revoked
        caller is refused at once.
        """
        known = self.known
        caller = known.get(credential)
        if caller is not None:
            return caller
        token = token_in(credential)
        if token is not None:
            caller = self.tenancy.recognise(token)
        else:
            names = certificate_names_in(credential)
            caller = self.tenancy.recognise_certificate(names) if names else None
        if caller is None:
            return None
        if len(known) >= RECOGNISED_MAX:
            known.clear()
        if not known:
            asyncio.get_running_loop().call_later(RECOGNISED_S, known.clear)
        known[credential] = caller
        return caller


def certificate_credential(names: Sequence[str]) -> bytes:
    """The `Authorization` value that stands for a caller whose certificate has these names."""
    return _CERTIFICATE + " ".join(names).encode()


def certificate_names_in(credential: bytes) -> tuple[str, ...]:
    """The names of the certificate that this credential stands for; empty if it stands for none."""
    if not credential.startswith(_CERTIFICATE):
        return ()
    return tuple(credential.removeprefix(_CERTIFICATE).decode().split(" "))


def bearer_token(scope: Scope) -> str | None:
    """The token of `Authorization: Bearer <token>`; None if there is no such header."""
    credential = credential_of(scope)
    return None if credential is None else token_in(credential)


def credential_of(scope: Scope) -> bytes | None:
    credential: bytes | None = scope[HEADERS_BY_NAME].get(b"authorization")
    return credential


def token_in(credential: bytes) -> str | None:
    """The token in the value of an `Authorization` header; None for another scheme."""
    scheme, _, token = credential.partition(b" ")
    token = token.strip()
    return token.decode("latin-1") if scheme.lower() == b"bearer" and token else None


def client_address(scope: Scope) -> str:
    return peer_address(scope) or "unknown"
