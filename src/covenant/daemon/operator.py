"""The operator's place in the ledger: whoever holds the token in the home's file is the operator.

The file is the root of trust. At each start the ledger is brought in line with it: a token that the ledger does not
know takes the place of the one it knew (a rotation may have died between the file and the record); one that was revoked
is never taken back, and a new one is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from covenant.daemon.home import UnsafeHome
from covenant.exchange.access.principals import Principal
from covenant.ledger.contract.identities import IdentityLedger
from covenant.ledger.machine.identity_commands import Enroll, RevokeIdentity, RotateToken
from covenant.model.grant import Identity
from covenant.model.ids import AgentId
from covenant.seal.keys import TOKEN_PREFIX_LENGTH, new_token, token_hash

OPERATOR_DISPLAY: Final = "operator@local"


async def admit_operator(
    ledger: IdentityLedger, operator: AgentId, token: str, save: Callable[[str], None]
) -> Principal:
    """The operator's principal, after seeing to it that the ledger knows `token` as its one live token."""
    known = ledger.identity(token_hash(token))
    if known is not None and known.agent.pubkey != operator.pubkey:
        raise UnsafeHome(
            f"the token in operator.token belongs to {known.agent.display}, not to this home's operator: either "
            "operator.token or identity/local.key was exchanged; put the right ones back from a backup"
        )
    if known is not None and known.revoked_at_ms is not None:
        token = new_token()
        save(token)
        known = None
    live = [i for i in await ledger.identities() if i.operator and i.revoked_at_ms is None]
    _check_key(live, operator)
    old = [identity for identity in live if identity.token_sha256 != token_hash(token)]
    if known is None:
        if old:
            await _rotate(ledger, operator, old.pop(), token)
        else:
            await _enroll(ledger, operator, token)
    for identity in old:
        await ledger.commit(RevokeIdentity(by=operator, token_sha256=identity.token_sha256))
    return Principal(operator, operator=True, token_sha256=token_hash(token))


def _check_key(live: list[Identity], operator: AgentId) -> None:
    for identity in live:
        if identity.agent.pubkey != operator.pubkey:
            raise UnsafeHome(
                f"identity/local.key is not the key this home was made with ({identity.agent.pubkey}); "
                "put that one back from a backup"
            )


async def _rotate(ledger: IdentityLedger, operator: AgentId, old: Identity, token: str) -> None:
    await ledger.commit(
        RotateToken(
            by=operator,
            token_sha256=old.token_sha256,
            new_token_sha256=token_hash(token),
            new_token_prefix=token[:TOKEN_PREFIX_LENGTH],
        )
    )


async def _enroll(ledger: IdentityLedger, operator: AgentId, token: str) -> None:
    identity = Identity(
        agent=operator,
        token_sha256=token_hash(token),
        token_prefix=token[:TOKEN_PREFIX_LENGTH],
        registered_at_ms=ledger.now_ms(),
        operator=True,
    )
    await ledger.commit(Enroll(by=operator, identity=identity))
