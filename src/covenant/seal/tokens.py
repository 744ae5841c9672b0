"""Capability tokens between instances: Biscuits that a provider issues, and that a requester can narrow by itself.

A token says who may use it, where, for which profiles, for how many tokens, how deep and until when. Each further block
can only add conditions. Its holder alone can use it: the sender of the envelope must be the one named.

The library would evaluate any rule that a block brings, and one rule can take all memory before a limit is looked at.
So a block with anything but conditions of the forms below is refused, and what they say is also compared here: both
readings must allow. The library's limit of 1 ms would refuse honest tokens on a busy machine; it is 100 ms here, and
passing it is no denial. The root is the provider's identity key. What a Biscuit signs begins with a byte that nothing
else begins with that this key signs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

import msgspec
from biscuit_auth import (
    Algorithm,
    AuthorizationError,
    AuthorizerBuilder,
    Biscuit,
    BiscuitBlockError,
    BiscuitBuilder,
    BiscuitSerializationError,
    BiscuitValidationError,
    BlockBuilder,
    DataLogError,
    PrivateKey,
)
from biscuit_auth import PublicKey as RootKey

from covenant.model.errors import Forbidden, Invalid, Unavailable
from covenant.model.ids import PublicKey, from_base58
from covenant.model.peers.instance import WHOLE_MAX, InstanceId
from covenant.seal.identity import instance_id
from covenant.seal.keys import public_key

TOKEN_CHARS_MAX: Final = 8_192
BLOCKS_MAX: Final = 8
CONDITIONS_MAX: Final = 16
EVALUATION_MS_MAX: Final = 100
PROFILES_MAX: Final = 64

_NAME = r"[A-Za-z0-9_.\-]{1,128}"
_NUMBER = re.compile(r"check if (now|budget|depth)\(\$\1\), \$\1 <= ([0-9]{1,16});").fullmatch
_WORD = re.compile(rf'check if (holder|audience|offer)\("({_NAME})"\);').fullmatch
_SET = re.compile(
    rf'check if profile\(\$profile\), \{{("{_NAME}"(?:, "{_NAME}")*)\}}\.contains\(\$profile\);'
).fullmatch
_IS_NAME = re.compile(_NAME).fullmatch


class Narrowing(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Conditions. None is no condition; several blocks together allow what each of them allows."""

    profiles: frozenset[str] | None = None
    budget: int | None = None
    """Tokens of a language model, for one delegation."""
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
    """Who sent the envelope that the token came in."""
    profile: str
    budget: int
    depth: int
    offer_id: str


def issue(private_key: bytes, holder: InstanceId, terms: Narrowing) -> str:
    """Made by the provider, for one holder. `expires_at_ms` must be given: nothing is allowed for ever."""
    if terms.expires_at_ms is None:
        raise ValueError("a token must expire")
    source, values = _conditions(terms)
    words = {"holder": _named(holder), "audience": instance_id(public_key(private_key))}
    builder = BiscuitBuilder(
        f'right("delegate"); check if holder({{holder}}); check if audience({{audience}}); {source}',
        {**words, **values},
    )
    token: str = builder.build(_MAKE_PRIVATE(private_key, _ED25519)).to_base64()
    return token


def narrow(token: str, provider_key: PublicKey, further: Narrowing) -> str:
    """Made by the holder, who needs no secret for it. `Invalid` if it is no token of this provider."""
    biscuit = _read(token, provider_key)
    source, values = _conditions(further)
    if not source:
        return token
    narrowed: str = biscuit.append(BlockBuilder(source, values)).to_base64()
    if len(narrowed) > TOKEN_CHARS_MAX or biscuit.block_count() >= BLOCKS_MAX:
        raise Invalid("token_malformed", "the token cannot be narrowed any further")
    return narrowed


def authorize(
    token: str, provider_key: PublicKey, use: Use, *, now_ms: int, revoked: Callable[[str], bool]
) -> Narrowing:
    """What the token allows in all, if it allows this. `provider_key` is our own.

    `token_malformed`, `token_untrusted`, `token_revoked`, `token_denied`; or `token_unevaluated`, which is our fault.
    """
    with _contained():
        return _authorize(_read(token, provider_key), provider_key, use, now_ms, revoked)


def _authorize(
    biscuit: Biscuit, provider_key: PublicKey, use: Use, now_ms: int, revoked: Callable[[str], bool]
) -> Narrowing:
    if any(revoked(each) for each in biscuit.revocation_ids):
        raise Forbidden("token_revoked", "the token was revoked")
    terms, words = _terms(biscuit)
    wanted = {"holder": use.sender, "audience": instance_id(provider_key), "offer": use.offer_id}
    if any(wanted[name] != word for name, word in words):
        raise Forbidden("token_denied", "the token is for another holder, provider or offer")
    _compare(terms, use, now_ms)
    _evaluate(biscuit, use, wanted, now_ms)
    return terms


def token_ids(token: str, provider_key: PublicKey) -> tuple[str, ...]:
    """One for each block, the provider's first. Revoking one revokes all that was narrowed from there."""
    return tuple(_read(token, provider_key).revocation_ids)


def _read(token: str, provider_key: PublicKey) -> Biscuit:
    if not token or len(token) > TOKEN_CHARS_MAX or not token.isascii():
        raise Invalid("token_malformed", "not a token")
    try:
        biscuit = Biscuit.from_base64(token, _MAKE_ROOT(from_base58(provider_key), _ED25519))
    except (BiscuitValidationError, BiscuitSerializationError, BiscuitBlockError, ValueError):
        raise Forbidden("token_untrusted", "not a token of this provider") from None
    if biscuit.block_count() > BLOCKS_MAX:
        raise Invalid("token_malformed", f"narrowed more than {BLOCKS_MAX - 1} times")
    return biscuit


def _terms(biscuit: Biscuit) -> tuple[Narrowing, list[tuple[str, str]]]:
    """What all blocks say together. A block with anything that is not a condition of ours is refused, unevaluated."""
    terms, words = Narrowing(), list[tuple[str, str]]()
    for index in range(biscuit.block_count()):
        if biscuit.block_external_key(index) is not None:
            raise Invalid("token_malformed", "a block of a third party")
        lines = biscuit.block_source(index).split("\n")
        if index == 0:
            lines = [line for line in lines if line != 'right("delegate");']
        lines = [line for line in lines if line]
        if len(lines) > CONDITIONS_MAX:
            raise Invalid("token_malformed", "too many conditions")
        for line in lines:
            terms = _read_condition(line, terms, words)
    return terms, words


def _read_condition(line: str, terms: Narrowing, words: list[tuple[str, str]]) -> Narrowing:
    if (number := _NUMBER(line)) is not None:
        return terms.and_also(_BOUND[number[1]](int(number[2])))
    if (word := _WORD(line)) is not None:
        words.append((word[1], word[2]))
        return terms.and_also(Narrowing(offer_id=word[2])) if word[1] == "offer" else terms
    if (names := _SET(line)) is not None:
        return terms.and_also(Narrowing(profiles=frozenset(names[1].replace('"', "").split(", "))))
    raise Invalid("token_malformed", "a block has something other than conditions")


_BOUND: Final[dict[str, Callable[[int], Narrowing]]] = {
    "now": lambda bound: Narrowing(expires_at_ms=bound),
    "budget": lambda bound: Narrowing(budget=bound),
    "depth": lambda bound: Narrowing(depth=bound),
}


def _compare(terms: Narrowing, use: Use, now_ms: int) -> None:
    over = [
        said
        for said, holds in (
            ("it is over", terms.expires_at_ms is not None and now_ms <= terms.expires_at_ms),
            ("not for this profile", terms.profiles is None or use.profile in terms.profiles),
            ("not for so many tokens", terms.budget is None or use.budget <= terms.budget),
            ("not for this depth", terms.depth is None or use.depth <= terms.depth),
        )
        if not holds
    ]
    if over:
        raise Forbidden("token_denied", f"the token does not allow this: {', '.join(over)}")


def _evaluate(biscuit: Biscuit, use: Use, wanted: dict[str, str], now_ms: int) -> None:
    facts = {**wanted, "profile": use.profile, "budget": use.budget, "depth": use.depth, "now": now_ms}
    source = " ".join(f"{name}({{{name}}});" for name in facts)
    try:
        builder: Any = AuthorizerBuilder(f'{source} allow if right("delegate");', facts)
        limits = builder.limits()  # not in the library's stubs
        limits.max_time = timedelta(milliseconds=EVALUATION_MS_MAX)
        builder.set_limits(limits)
        builder.build(biscuit).authorize()
    except AuthorizationError as refused:
        if "limits" in str(refused):
            raise Unavailable("token_unevaluated", "the token could not be evaluated in time; try again") from None
        raise Forbidden("token_denied", "the token does not allow this") from None
    except (DataLogError, TypeError, ValueError):  # a fact that it has no words for
        raise Forbidden("token_denied", "the token does not allow this") from None


def _conditions(terms: Narrowing) -> tuple[str, dict[str, Any]]:
    sources: list[str] = []
    values: dict[str, Any] = {}
    numbers = {"now": terms.expires_at_ms, "budget": terms.budget, "depth": terms.depth}
    for name, bound in numbers.items():
        if bound is not None:
            if not 0 <= bound <= WHOLE_MAX:
                raise ValueError(f"{name} cannot be {bound}")
            sources.append(f"check if {name}(${name}), ${name} <= {{{name}}};")
            values[name] = bound
    if terms.profiles is not None:
        if not 0 < len(terms.profiles) <= PROFILES_MAX:
            raise ValueError("a token is for one profile at least, and for a bounded number of them")
        sources.append("check if profile($profile), {profiles}.contains($profile);")
        values["profiles"] = set(map(_named, terms.profiles))
    if terms.offer_id is not None:
        sources.append("check if offer({offer});")
        values["offer"] = _named(terms.offer_id)
    return " ".join(sources), values


def _named(name: str) -> str:
    # The library prints texts without escaping them; these need none.
    if _IS_NAME(name) is None:
        raise ValueError(f"a token cannot name {name[:80]!r}")
    return name


def _least(*bounds: int | None) -> int | None:
    return min((each for each in bounds if each is not None), default=None)


# Its stubs know neither the algorithms nor that a key needs one.
_ED25519: Final[Any] = getattr(Algorithm, "Ed25519")  # noqa: B009
_MAKE_PRIVATE: Final[Any] = PrivateKey.from_bytes
_MAKE_ROOT: Final[Any] = RootKey.from_bytes


@contextlib.contextmanager
def _contained() -> Iterator[None]:
    """The library is native code: where it gives up on a block that was made to break it, only the block is refused."""
    try:
        yield
    except BaseException as broken:
        # Not an `Exception`, and not exported: left alone it would end the daemon.
        if type(broken).__name__ != "PanicException":
            raise
        raise Invalid("token_malformed", "the token cannot be read") from None
