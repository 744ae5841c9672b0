"""Signed grants: what exactly the operator's signature covers.

In this order: a context line, the subject's key, the action, the scope as given, the grantor's key, the expiry
(0 for none), when it was granted and a nonce. Variable parts carry their length, so no two grants sign alike.
"""

from __future__ import annotations

import struct

from covenant.model.grant import Grant
from covenant.model.ids import from_base58
from covenant.seal.keys import sign, verify

_CONTEXT = b"covenant.grant.v1\n"


def signed_bytes(grant: Grant) -> bytes:
    return b"".join(
        (
            _CONTEXT,
            from_base58(grant.subject.pubkey),
            _sized(grant.action.encode()),
            _sized(grant.scope_json.encode()),
            from_base58(grant.granted_by.pubkey),
            struct.pack(">?QQ", grant.expires_at is not None, grant.expires_at or 0, grant.granted_at_ms),
            _sized(grant.nonce.encode()),
        )
    )


def sign_grant(private_key: bytes, grant: Grant) -> str:
    return sign(private_key, signed_bytes(grant))


def verify_grant(grant: Grant) -> bool:
    return verify(grant.granted_by.pubkey, signed_bytes(grant), grant.signature_b58)


def _sized(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data
