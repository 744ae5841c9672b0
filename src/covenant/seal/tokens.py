"""Capability tokens between instances: a chain of signed blocks. A provider issues one; its holder can only narrow it.

A token limits who may use it, where, for which profiles, for how many tokens, how deep and until when. The provider's
identity key, or a key that it certified for tokens, signs the first block. Each block names a new key, and that key
signs the next block, so a holder adds conditions without a secret of the provider. The token ends with the private half
of the last key, or with a seal made by it: without either, nobody could tell whether blocks were cut off at the end.

A block has conditions and nothing else. They are the fields of `_Block`, read by fixed rules: there is no language to
interpret. Checking the longest token costs `BLOCKS_MAX + 2` signatures: those of its blocks, of a certificate and of
the seal. A block is signed as a document of its own kind, together with the signature before it, so it is valid at one
place of one token.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from typing import Annotated, Any, Final

import msgspec

from covenant.model.errors import Forbidden, Invalid
from covenant.model.ids import PublicKey
from covenant.model.peers.instance import WHOLE_MAX, Instance, InstanceId, Key, Signature, Whole
from covenant.seal.identity import instance_id
from covenant.seal.keys import (
    base64url,
    canonical,
    digest,
    document_holds,
    from_base64url,
    new_private_key,
    public_key,
    sign_document,
)
from covenant.seal.purpose_keys import PurposeKey, signed_by_instance

TOKEN_START: Final = "cvt1."  # noqa: S105  (a token's prefix)
TOKEN_CHARS_MAX: Final = 8_192
BLOCKS_MAX: Final = 8
PROFILES_MAX: Final = 64

_BLOCK: Final = "token-block"
_SEAL: Final = "token-seal"
_NAME: Final = r"[A-Za-z0-9_.\-]{1,128}"
_IS_NAME: Final = re.compile(_NAME).fullmatch
_Name = Annotated[str, msgspec.Meta(pattern=rf"\A{_NAME}\Z")]


class Narrowing(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Conditions. None is no condition; a use must meet the conditions of every block."""

    profiles: frozenset[str] | None = None
    budget: int | None = None
    """The language model's tokens that one delegation may use."""
    depth: int | None = None
    expires_at_ms: int | None = None
    offer_id: str | None = None

    def and_also(self, other: Narrowing) -> Narrowing:
        profiles = [each for each in (self.profiles, other.profiles) if each is not None]
        return Narrowing(
            profiles=frozenset.intersection(*profiles) if profiles else None,
            budget=_least(self.budget, other.budget),
            depth=_least(self.depth, other.depth),
            expires_at_ms=_least(self.expires_at_ms, other.expires_at_ms),
            offer_id=self.offer_id or other.offer_id,
        )


class Use(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    sender: InstanceId
    """The sender of the envelope with the token."""
    profile: str
    budget: int
    depth: int
    offer_id: str


class _Block(
    msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename="camel"
):
    next_key: Key
    signature: Signature = ""
    """Made by the key that the block before names, over the other fields and that block's signature."""
    holder: Instance | None = None
    """Only the first block has `holder` and `audience`."""
    audience: Instance | None = None
    profiles: Annotated[tuple[_Name, ...], msgspec.Meta(min_length=1, max_length=PROFILES_MAX)] | None = None
    budget: Whole | None = None
    depth: Whole | None = None
    expires_at_ms: Whole | None = None
    offer_id: _Name | None = None

    def terms(self) -> Narrowing:
        return Narrowing(
            profiles=frozenset(self.profiles) if self.profiles is not None else None,
            budget=self.budget,
            depth=self.depth,
            expires_at_ms=self.expires_at_ms,
            offer_id=self.offer_id,
        )


class _Chain(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    blocks: Annotated[tuple[_Block, ...], msgspec.Meta(min_length=1, max_length=BLOCKS_MAX)]
    secret: Annotated[str, msgspec.Meta(max_length=43)] | None = None
    """The private half of the last key, with which the holder narrows the token."""
    seal: Signature | None = None
    """Made by the last key over the last signature, in place of `secret`: nobody can narrow the token further."""


def issue(key: PurposeKey, holder: InstanceId, terms: Narrowing) -> str:
    """Issues a token for one holder. `expires_at_ms` is required: no token is valid for ever."""
    if terms.expires_at_ms is None:
        raise ValueError("a token must expire")
    next_private_key = new_private_key()
    audience = instance_id(key.identity_key)
    first = msgspec.structs.replace(_conditions(terms, next_private_key), holder=holder, audience=audience)
    return _write((_signed(key, first, after=""),), next_private_key)


def narrow(token: str, provider_key: PublicKey, further: Narrowing, *, sealed: bool = False) -> str:
    """Adds a block to a token; the holder needs no secret of the provider. `sealed`: nobody can narrow the result.

    `token_malformed` if the token is sealed or has no room for a block; otherwise refused as `authorize` refuses it.
    """
    chain = _read(token, provider_key)
    if chain.secret is None:
        raise Invalid(
            "token_malformed", "the token is sealed, so it cannot be narrowed; narrow the one that the provider gave"
        )
    if further == Narrowing() and not sealed:
        return token
    if len(chain.blocks) >= BLOCKS_MAX:
        raise Invalid("token_malformed", "the token cannot be narrowed any further")
    next_private_key = new_private_key()
    last = PurposeKey(from_base64url(chain.secret))
    block = _signed(last, _conditions(further, next_private_key), after=chain.blocks[-1].signature)
    narrowed = _write((*chain.blocks, block), next_private_key, sealed=sealed)
    if len(narrowed) > TOKEN_CHARS_MAX:
        raise Invalid("token_malformed", "the token cannot be narrowed any further")
    return narrowed


def authorize(
    token: str,
    provider_key: PublicKey,
    use: Use,
    *,
    now_ms: int,
    revoked: Callable[[str], bool],
    void_before_ms: int = 0,
) -> Narrowing:
    """The combined conditions of the token, if they allow this use. `provider_key` is our own identity key.

    `void_before_ms`: our declaration about earlier certificates.

    Refuses with `token_malformed`, `token_untrusted`, `token_revoked` or `token_denied`.
    """
    chain = _read(token, provider_key, at_ms=now_ms, void_before_ms=void_before_ms)
    if any(map(revoked, _ids(chain))):
        raise Forbidden(
            "token_revoked", "the token was revoked; ask the provider for its capabilities, which brings a new one"
        )
    terms = reduce(Narrowing.and_also, (block.terms() for block in chain.blocks))
    first = chain.blocks[0]
    failed = [
        claim
        for claim, holds in (
            ("it is for another holder", first.holder == use.sender),
            ("it is for another provider", first.audience == instance_id(provider_key)),
            ("it is for another offer", all(each.offer_id in (None, use.offer_id) for each in chain.blocks)),
            ("it has expired", terms.expires_at_ms is not None and now_ms <= terms.expires_at_ms),
            ("it is not for this profile", terms.profiles is None or use.profile in terms.profiles),
            ("it is not for so many tokens", terms.budget is None or use.budget <= terms.budget),
            ("it is not for this depth", terms.depth is None or use.depth <= terms.depth),
        )
        if not holds
    ]
    if failed:
        raise Forbidden("token_denied", f"the token does not allow this: {', '.join(failed)}")
    return terms


def token_ids(token: str, provider_key: PublicKey) -> tuple[str, ...]:
    """An id for each block, the provider's first. Revoking one revokes every token narrowed from that block."""
    return _ids(_read(token, provider_key))


def token_parties(token: str) -> tuple[str, str]:
    """The holder and the audience that an unverified token names; empty if it names none."""
    try:
        first = _DECODER.decode(from_base64url(token[:TOKEN_CHARS_MAX].removeprefix(TOKEN_START))).blocks[0]
    except ValueError:
        return "", ""
    return first.holder or "", first.audience or ""


def is_token(text: str | None) -> bool:
    """Whether `text` has the form of a token. A holder replaces an earlier form at its next query to the provider."""
    return text is not None and text.startswith(TOKEN_START)


def _read(token: str, provider_key: PublicKey, *, at_ms: int | None = None, void_before_ms: int = 0) -> _Chain:
    """Decodes the chain and checks every signature, but none of its conditions."""
    if not is_token(token) or len(token) > TOKEN_CHARS_MAX:
        raise Invalid("token_malformed", "not a token")
    try:
        data = from_base64url(token.removeprefix(TOKEN_START))
        chain = _DECODER.decode(data)
        canonical_data = canonical(msgspec.to_builtins(chain))
    except ValueError:
        raise Invalid("token_malformed", "not a token") from None
    # One text for each token: a repeated field, another order or a written default would be another text.
    if data != canonical_data or (chain.secret is None) == (chain.seal is None):
        raise Invalid("token_malformed", "not a token in canonical form")
    first, *others = chain.blocks
    if None in (first.holder, first.audience, first.expires_at_ms):
        raise Invalid("token_malformed", "the first block lacks a holder, an audience or an end")
    if any(each.holder is not None or each.audience is not None for each in others):
        raise Invalid("token_malformed", "a further block names a holder or an audience")
    if not _is_issued(first, provider_key, at_ms, void_before_ms) or not _blocks_hold(chain):
        raise Forbidden("token_untrusted", "not a token of this provider")
    return chain


def _is_issued(first: _Block, provider_key: PublicKey, at_ms: int | None, void_before_ms: int) -> bool:
    """Whether the provider's identity key signed the block, or a key that it certified for tokens."""
    document = _document(first, "")
    return signed_by_instance(
        provider_key, _BLOCK, document, first.signature, at_ms=at_ms, void_before_ms=void_before_ms
    )


def _blocks_hold(chain: _Chain) -> bool:
    """Whether each later block is signed by the key that the block before names, and the end by the last key."""
    key, after = PublicKey(chain.blocks[0].next_key), chain.blocks[0].signature
    for block in chain.blocks[1:]:
        if not document_holds(key, _BLOCK, _document(block, after), block.signature):
            return False
        key, after = PublicKey(block.next_key), block.signature
    if chain.seal is not None:
        return document_holds(key, _SEAL, {"after": after}, chain.seal)
    try:
        return public_key(from_base64url(chain.secret or "")) == key
    except ValueError:
        return False


def _document(block: _Block, after: str) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(block)
    document.pop("signature", None)
    return {**document, "after": after}


def _ids(chain: _Chain) -> tuple[str, ...]:
    signatures = ("", *(each.signature for each in chain.blocks))
    return tuple(digest(_document(block, after)) for block, after in zip(chain.blocks, signatures, strict=False))


def _signed(key: PurposeKey, block: _Block, *, after: str) -> _Block:
    return msgspec.structs.replace(block, signature=key.sign_document(_BLOCK, _document(block, after)))


def _write(blocks: tuple[_Block, ...], last_key: bytes, *, sealed: bool = False) -> str:
    if sealed:
        chain = _Chain(blocks=blocks, seal=sign_document(last_key, _SEAL, {"after": blocks[-1].signature}))
    else:
        chain = _Chain(blocks=blocks, secret=base64url(last_key))
    return TOKEN_START + base64url(canonical(msgspec.to_builtins(chain)))


def _conditions(terms: Narrowing, next_private_key: bytes) -> _Block:
    for name, bound in (("expiry", terms.expires_at_ms), ("budget", terms.budget), ("depth", terms.depth)):
        if bound is not None and not 0 <= bound <= WHOLE_MAX:
            raise ValueError(f"{name} cannot be {bound}")
    if terms.profiles is not None and not 0 < len(terms.profiles) <= PROFILES_MAX:
        raise ValueError("a token is for one profile at least, and for a bounded number of them")
    for name in (*(terms.profiles or ()), *([terms.offer_id] if terms.offer_id is not None else ())):
        if _IS_NAME(name) is None:
            raise ValueError(f"a token cannot name {name[:80]!r}")
    return _Block(
        next_key=public_key(next_private_key),
        profiles=tuple(sorted(terms.profiles)) if terms.profiles is not None else None,
        budget=terms.budget,
        depth=terms.depth,
        expires_at_ms=terms.expires_at_ms,
        offer_id=terms.offer_id,
    )


def _least(*bounds: int | None) -> int | None:
    return min((each for each in bounds if each is not None), default=None)


_DECODER: Final = msgspec.json.Decoder(_Chain)
