"""Tokens that no builder would make: a holder has what it takes to sign any document as the next block of its token."""

import json
from typing import Any

from covenant.seal.keys import base64url, canonical, from_base64url, new_private_key, public_key, sign_document
from covenant.seal.tokens import TOKEN_START

Chain = dict[str, Any]


def opened(token: str) -> Chain:
    chain: Chain = json.loads(from_base64url(token.removeprefix(TOKEN_START)))
    return chain


def written(chain: Chain, *, data: bytes | None = None) -> str:
    return TOKEN_START + base64url(canonical(chain) if data is None else data)


def signed_block(
    private_key: bytes, fields: dict[str, Any], *, after: str, kind: str = "token-block"
) -> dict[str, Any]:
    return {**fields, "signature": sign_document(private_key, kind, {**fields, "after": after})}


def append_crafted(token: str, fields: dict[str, Any]) -> str:
    """The token with one more block of these fields, under signatures that hold."""
    chain, following = opened(token), new_private_key()
    fields = {"nextKey": public_key(following), **fields}
    block = signed_block(from_base64url(chain["secret"]), fields, after=chain["blocks"][-1]["signature"])
    return written({"blocks": [*chain["blocks"], block], "secret": base64url(following)})
