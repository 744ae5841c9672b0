"""Capability tokens: issued by the provider, narrowed by the holder, of use to nobody else, revocable; never wider."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.errors import Forbidden, Invalid, Refusal
from covenant.model.ids import PublicKey
from covenant.seal.keys import base64url, canonical, document_holds, from_base64url, new_private_key, public_key
from covenant.seal.purpose_keys import PurposeKey
from covenant.seal.tokens import (
    BLOCKS_MAX,
    PROFILES_MAX,
    TOKEN_CHARS_MAX,
    TOKEN_START,
    Narrowing,
    Use,
    authorize,
    is_token,
    issue,
    narrow,
    token_ids,
)
from tests.seal.crafted import append_crafted, opened, signed_block, written
from tests.seal.instances import NOW, OFFER_ID, Instance

P, R, MALLORY = Instance(), Instance(), Instance()
TERMS = Narrowing(profiles=frozenset({"coder", "analyst"}), budget=50_000, depth=3, expires_at_ms=NOW + 60_000)
TOKEN = issue(PurposeKey(P.private_key), R.id, TERMS)
FORGED = issue(PurposeKey(MALLORY.private_key), R.id, TERMS)


def use(**changes: Any) -> Use:
    given: dict[str, Any] = {
        "sender": R.id,
        "profile": "coder",
        "budget": 50_000,
        "depth": 3,
        "offer_id": OFFER_ID,
    }
    return Use(**{**given, **changes})


def allowed(token: str = TOKEN, wanted: Use | None = None, now_ms: int = NOW) -> Narrowing:
    return authorize(token, P.identity.key, wanted or use(), now_ms=now_ms, revoked=lambda _: False)


def code(attempt: Callable[[], object]) -> str:
    with pytest.raises(Refusal) as refused:
        attempt()
    return refused.value.code


def test_a_token_allows_its_holder_what_it_says() -> None:
    assert allowed() == TERMS
    assert allowed(wanted=use(profile="analyst", budget=1, depth=0)) == TERMS
    assert len(TOKEN) < 1_024


@pytest.mark.parametrize(
    "changes",
    [{"sender": MALLORY.id}, {"profile": "root"}, {"budget": 50_001}, {"depth": 4}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_token_allows_nothing_more_and_nobody_else(changes: dict[str, Any]) -> None:
    assert code(lambda: allowed(wanted=use(**changes))) == "token_denied"


def test_a_token_ends() -> None:
    assert allowed(now_ms=NOW + 60_000) == TERMS
    assert code(lambda: allowed(now_ms=NOW + 60_001)) == "token_denied"
    with pytest.raises(ValueError, match="expire"):
        issue(PurposeKey(P.private_key), R.id, Narrowing(budget=1))


def test_a_token_without_profiles_is_for_all_of_them() -> None:
    token = issue(PurposeKey(P.private_key), R.id, Narrowing(expires_at_ms=NOW))
    assert allowed(token, use(profile="whoever", budget=10**9, depth=10)) == Narrowing(expires_at_ms=NOW)


def test_somebody_elses_token_is_not_trusted() -> None:
    assert code(lambda: allowed(FORGED)) == "token_untrusted"


def test_a_token_is_for_the_provider_that_issued_it() -> None:
    """Also where one key should ever stand for two: the id is in the token."""
    attempt = lambda: authorize(TOKEN, MALLORY.identity.key, use(), now_ms=NOW, revoked=lambda _: False)  # noqa: E731
    assert code(attempt) == "token_untrusted"


def test_a_holder_narrows_a_token_to_one_offer_without_a_secret() -> None:
    narrowed = narrow(TOKEN, P.identity.key, Narrowing(profiles=frozenset({"coder"}), budget=10, offer_id=OFFER_ID))
    assert allowed(narrowed, use(budget=10)) == Narrowing(
        profiles=frozenset({"coder"}), budget=10, depth=3, expires_at_ms=NOW + 60_000, offer_id=OFFER_ID
    )
    for changes in ({"budget": 11}, {"profile": "analyst", "budget": 1}, {"offer_id": "another", "budget": 1}):
        wanted = use(**changes)
        assert code(partial(allowed, narrowed, wanted)) == "token_denied"
    assert allowed(wanted=use()) == TERMS, "the token itself is what it was"


def test_nothing_to_narrow_leaves_the_token_as_it_is() -> None:
    assert narrow(TOKEN, P.identity.key, Narrowing()) == TOKEN


LIMITS = st.builds(
    Narrowing,
    profiles=st.none() | st.frozensets(st.sampled_from(["coder", "analyst", "root"]), min_size=1),
    budget=st.none() | st.integers(0, 100_000),
    depth=st.none() | st.integers(0, 10),
    expires_at_ms=st.none() | st.integers(NOW - 10, NOW + 100_000),
    offer_id=st.none() | st.sampled_from([OFFER_ID, "another"]),
)
USES = st.builds(
    use,
    profile=st.sampled_from(["coder", "analyst", "root"]),
    budget=st.integers(0, 100_000),
    depth=st.integers(0, 10),
    sender=st.sampled_from([R.id, MALLORY.id]),
)


def allows(token: str, wanted: Use, now_ms: int) -> bool:
    try:
        allowed(token, wanted, now_ms)
    except Forbidden:
        return False
    return True


@given(first=LIMITS, second=LIMITS, wanted=USES, now_ms=st.integers(NOW, NOW + 100_000))
def test_narrowing_only_shrinks(first: Narrowing, second: Narrowing, wanted: Use, now_ms: int) -> None:
    once = narrow(TOKEN, P.identity.key, first)
    twice = narrow(once, P.identity.key, second)
    allowed_now = [allows(token, wanted, now_ms) for token in (TOKEN, once, twice)]
    assert allowed_now == sorted(allowed_now, reverse=True)


def test_a_revoked_token_is_refused_with_all_that_was_narrowed_from_it() -> None:
    narrowed = narrow(TOKEN, P.identity.key, Narrowing(budget=5))
    (issued,) = token_ids(TOKEN, P.identity.key)
    own = token_ids(narrowed, P.identity.key)[1]

    def with_revoked(revoked_id: str, token: str) -> Callable[[], object]:
        revoked = lambda each: each == revoked_id  # noqa: E731
        return lambda: authorize(token, P.identity.key, use(budget=5), now_ms=NOW, revoked=revoked)

    assert code(with_revoked(issued, TOKEN)) == code(with_revoked(issued, narrowed)) == "token_revoked"
    assert code(with_revoked(own, narrowed)) == "token_revoked"
    with_revoked(own, TOKEN)()


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"right": "delegate"}, id="a right"),
        pytest.param({"rule": "budget($x) <- depth($x)"}, id="a rule"),
        pytest.param({"holder": MALLORY.id}, id="another holder"),
        pytest.param({"holder": R.id}, id="the same holder"),
        pytest.param({"audience": MALLORY.id}, id="another audience"),
        pytest.param({"externalKey": MALLORY.identity.key}, id="a third party"),
        pytest.param({"budget": None}, id="a condition that is none"),
        pytest.param({"budget": -1}, id="less than nothing"),
        pytest.param({"budget": 4.5}, id="a fraction"),
        pytest.param({"budget": "5"}, id="a number as text"),
        pytest.param({"budget": True}, id="a truth"),
        pytest.param({"depth": [3]}, id="a list"),
        pytest.param({"offerId": "a b"}, id="a name with a space"),
        pytest.param({"offerId": "a\n"}, id="a name with a newline"),
        pytest.param({"offerId": ""}, id="an empty name"),
        pytest.param({"profiles": []}, id="no profile"),
        pytest.param({"profiles": "coder"}, id="a profile without a list"),
        pytest.param({"profiles": [f"p{n}" for n in range(PROFILES_MAX + 1)]}, id="too many profiles"),
        pytest.param({"profiles": [["coder"]]}, id="nested"),
    ],
)
def test_a_block_with_anything_but_our_conditions_is_refused(fields: dict[str, Any]) -> None:
    assert code(lambda: allowed(append_crafted(TOKEN, fields))) == "token_malformed"


def test_a_crafted_block_with_our_conditions_is_one_that_holds() -> None:
    """So the refusals above are of what the blocks say."""
    token = append_crafted(TOKEN, {"budget": 5, "profiles": ["coder"], "offerId": OFFER_ID})
    assert allowed(token, use(budget=5)).budget == 5
    assert code(lambda: allowed(token, use(budget=6))) == "token_denied"
    assert code(lambda: allowed(append_crafted(TOKEN, {"offerId": "mine"}))) == "token_denied"


def test_a_block_that_allows_more_allows_nothing_more() -> None:
    token = append_crafted(TOKEN, {"budget": 10**9, "depth": 99, "expiresAtMs": NOW * 2, "profiles": ["coder", "root"]})
    assert allowed(token) == Narrowing(
        profiles=frozenset({"coder"}), budget=50_000, depth=3, expires_at_ms=NOW + 60_000
    )
    for changes in ({"budget": 50_001}, {"depth": 4}, {"profile": "root"}, {"profile": "analyst"}):
        assert code(partial(allowed, token, use(**changes))) == "token_denied"


def test_two_offers_in_one_token_allow_neither() -> None:
    token = narrow(narrow(TOKEN, P.identity.key, Narrowing(offer_id="a")), P.identity.key, Narrowing(offer_id="b"))
    for offer_id in ("a", "b"):
        assert code(partial(allowed, token, use(offer_id=offer_id))) == "token_denied"


NARROWED = narrow(narrow(TOKEN, P.identity.key, Narrowing(budget=5)), P.identity.key, Narrowing(depth=1))
SEALED = narrow(TOKEN, P.identity.key, Narrowing(budget=5), sealed=True)


def test_a_block_cannot_be_cut_off_or_moved() -> None:
    """The last secret does not fit an earlier block, and a signature holds after one other signature only."""
    whole, sealed = opened(NARROWED), opened(SEALED)
    first, second, third = whole["blocks"]
    for blocks in ([first, second], [first], [first, third], [first, third, second], [first, second, third, third]):
        cut = written({**whole, "blocks": blocks})
        assert code(partial(allowed, cut, use(budget=1, depth=0))) == "token_untrusted"
    for blocks in ([second, third], [third], [first, first]):
        cut = written({**whole, "blocks": blocks})
        assert code(partial(allowed, cut, use(budget=1, depth=0))) == "token_malformed"
    assert not allows(written({**sealed, "blocks": sealed["blocks"][:1]}), use(budget=1), NOW)
    assert not allows(written({"blocks": whole["blocks"], "seal": sealed["seal"]}), use(budget=1), NOW)


def test_a_token_ends_with_the_secret_of_its_last_key_or_a_seal_and_with_one_of_them() -> None:
    whole, sealed = opened(NARROWED), opened(SEALED)
    blocks = whole["blocks"]
    assert code(lambda: allowed(written({"blocks": blocks}))) == "token_malformed"
    assert code(lambda: allowed(written({**whole, "seal": sealed["seal"]}))) == "token_malformed"
    for secret in ("", "AA", base64url(bytes(32)), opened(TOKEN)["secret"]):
        assert code(partial(allowed, written({"blocks": blocks, "secret": secret}))) == "token_untrusted"
    assert code(lambda: allowed(written({**whole, "more": 1}))) == "token_malformed"
    assert code(lambda: allowed(written({**whole, "blocks": []}))) == "token_malformed"


def test_a_block_of_another_token_of_the_same_holder_does_not_fit() -> None:
    other = opened(narrow(issue(PurposeKey(P.private_key), R.id, TERMS), P.identity.key, Narrowing(budget=50_000)))
    mixed = {"blocks": [opened(TOKEN)["blocks"][0], other["blocks"][1]], "secret": other["secret"]}
    assert code(lambda: allowed(written(mixed))) == "token_untrusted"


def test_a_changed_condition_breaks_the_signature() -> None:
    for at, name, value in ((0, "budget", 50_001), (0, "holder", MALLORY.id), (1, "budget", 6), (2, "depth", 2)):
        chain = opened(NARROWED)
        chain["blocks"][at][name] = value
        assert code(partial(allowed, written(chain), use(budget=1, depth=0))) == "token_untrusted"
    chain = opened(NARROWED)
    del chain["blocks"][2]["depth"]
    assert code(lambda: allowed(written(chain))) == "token_untrusted"


def test_a_sealed_token_is_of_use_and_cannot_be_narrowed() -> None:
    assert allowed(SEALED, use(budget=5)).budget == 5
    assert "secret" not in opened(SEALED)
    assert code(lambda: narrow(SEALED, P.identity.key, Narrowing(budget=1))) == "token_malformed"
    assert allowed(narrow(TOKEN, P.identity.key, Narrowing(), sealed=True)) == TERMS


def test_a_first_block_without_holder_audience_or_end_is_refused_though_the_provider_signed_it() -> None:
    whole = {"holder": R.id, "audience": P.id, "expiresAtMs": NOW}
    following = new_private_key()
    for without in (None, *whole):
        fields = {"nextKey": public_key(following), **{name: value for name, value in whole.items() if name != without}}
        block = signed_block(P.private_key, fields, after="")
        token = written({"blocks": [block], "secret": base64url(following)})
        if without is None:
            assert allowed(token).expires_at_ms == NOW
        else:
            assert code(partial(allowed, token)) == "token_malformed"


def test_a_token_names_the_provider_that_it_is_for() -> None:
    following = new_private_key()
    fields = {"nextKey": public_key(following), "holder": R.id, "audience": MALLORY.id, "expiresAtMs": NOW}
    token = written({"blocks": [signed_block(P.private_key, fields, after="")], "secret": base64url(following)})
    assert code(lambda: allowed(token)) == "token_denied"


def test_a_signature_of_another_kind_is_none_of_a_block() -> None:
    following = new_private_key()
    fields = {"nextKey": public_key(following), "holder": R.id, "audience": P.id, "expiresAtMs": NOW}
    for kind, valid in (("token-block", True), ("token-seal", False), ("offer", False)):
        block = signed_block(P.private_key, fields, after="", kind=kind)
        token = written({"blocks": [block], "secret": base64url(following)})
        assert allows(token, use(), NOW) is valid


def test_a_key_for_which_every_signature_holds_ends_no_chain() -> None:
    """With a key of small order anybody could make the seal, and so cut off what follows."""
    chain = opened(TOKEN)
    fields = {"nextKey": "1" * 32, "budget": 5}
    block = signed_block(from_base64url(chain["secret"]), fields, after=chain["blocks"][0]["signature"])
    header = base64url(canonical({"alg": "Ed25519", "kid": "1" * 32, "typ": "covenant-token-seal"}))
    for value in (bytes(64), b"\1" + bytes(63)):
        token = written({"blocks": [*chain["blocks"], block], "seal": f"{header}..{base64url(value)}"})
        assert code(partial(allowed, token, use(budget=1))) == "token_untrusted"


def test_there_is_one_text_for_a_token() -> None:
    """What is revoked or compared by its text has no other spelling."""
    chain, data = opened(NARROWED), from_base64url(NARROWED.removeprefix(TOKEN_START))
    assert written(chain) == NARROWED
    for other in (
        json.dumps(chain).encode(),
        json.dumps(chain, sort_keys=True, separators=(",", ":")).encode() + b"\n",
        data.replace(b'{"blocks"', b'{"secret":"","blocks"', 1),
        data.replace(b'"depth":1', b'"depth":2,"depth":1', 1),
        data.replace(b"coder", b"c\\u006fder", 1),
    ):
        assert code(partial(allowed, written(chain, data=other), use(budget=1, depth=0))) == "token_malformed"
    assert code(lambda: allowed(NARROWED + "=")) == "token_malformed"


def test_the_longest_token_that_a_provider_gives_can_be_narrowed_to_an_offer() -> None:
    terms = Narrowing(
        profiles=frozenset(f"{n:064d}" for n in range(PROFILES_MAX)), budget=1, depth=1, expires_at_ms=NOW
    )
    further = Narrowing(
        profiles=frozenset({f"{0:064d}"}), budget=500_000, depth=10, expires_at_ms=NOW * 2, offer_id=OFFER_ID
    )
    token = narrow(issue(PurposeKey(P.private_key), R.id, terms), P.identity.key, further, sealed=True)
    assert len(token) <= TOKEN_CHARS_MAX
    assert allowed(token, use(profile=f"{0:064d}", budget=1, depth=1)).depth == 1


def test_a_token_that_is_full_cannot_be_narrowed() -> None:
    long = frozenset(f"{n:0100d}" for n in range(PROFILES_MAX))
    whole = issue(PurposeKey(P.private_key), R.id, Narrowing(expires_at_ms=NOW))
    assert code(lambda: narrow(whole, P.identity.key, Narrowing(profiles=long))) == "token_malformed"


def test_what_had_another_form_is_no_token() -> None:
    assert is_token(TOKEN)
    for text in (None, "", "EroBCk8KBXJpZ2h0", "nonsense"):
        assert not is_token(text)


def test_a_token_is_narrowed_a_bounded_number_of_times() -> None:
    token = TOKEN
    for n in range(BLOCKS_MAX - 1):
        token = narrow(token, P.identity.key, Narrowing(budget=100 - n))
    assert allowed(token, use(budget=1)).budget == 100 - BLOCKS_MAX + 2
    assert code(lambda: narrow(token, P.identity.key, Narrowing(budget=1))) == "token_malformed"


def test_a_token_narrowed_too_often_by_others_means_is_refused() -> None:
    token = TOKEN
    for _ in range(BLOCKS_MAX):
        token = append_crafted(token, {"budget": 5})
    assert code(lambda: allowed(token, use(budget=1))) == "token_malformed"


def test_no_more_signatures_are_checked_than_there_may_be_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a stranger sends: what is too long is refused before the first signature is looked at."""
    checked: list[str] = []

    def counted(key: PublicKey, kind: str, *rest: Any) -> bool:
        checked.append(kind)
        return document_holds(key, kind, *rest)

    token = TOKEN
    for _ in range(BLOCKS_MAX - 2):
        token = append_crafted(token, {"budget": 5})
    longest = narrow(token, P.identity.key, Narrowing(budget=5), sealed=True)
    longer = append_crafted(append_crafted(token, {"budget": 5}), {"budget": 5})
    for module in ("tokens", "purpose_keys"):
        monkeypatch.setattr(f"covenant.seal.{module}.document_holds", counted)
    assert allowed(longest, use(budget=1)).budget == 5
    assert checked == ["token-block"] * BLOCKS_MAX + ["token-seal"]
    checked.clear()
    assert code(lambda: allowed(longer, use(budget=1))) == "token_malformed"
    assert checked == []


@pytest.mark.parametrize("terms", [Narrowing(budget=-1), Narrowing(profiles=frozenset()), Narrowing(offer_id='x"y')])
def test_what_a_token_cannot_say_is_not_issued(terms: Narrowing) -> None:
    with pytest.raises(ValueError, match=r"cannot|one profile"):
        narrow(TOKEN, P.identity.key, terms)


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda data: data.decode("latin-1")))
def test_what_is_no_token_is_refused(text: str) -> None:
    assert code(lambda: allowed(text)) in {"token_malformed", "token_untrusted"}


@given(at=st.integers(0, len(TOKEN) - 1), character=st.sampled_from("AZaz09-_=+/ "))
def test_a_token_with_another_character_is_refused(at: int, character: str) -> None:
    changed = TOKEN[:at] + character + TOKEN[at + 1 :]
    if changed.rstrip("=") != TOKEN.rstrip("="):
        assert code(lambda: allowed(changed)) in {"token_malformed", "token_untrusted"}


def test_a_token_over_its_bound_is_refused() -> None:
    token = append_crafted(TOKEN, {"profiles": [f"{n:0128d}" for n in range(PROFILES_MAX - 1)] + ["coder"]})
    assert len(token) > TOKEN_CHARS_MAX
    assert code(lambda: allowed(token)) == "token_malformed"


def test_the_root_is_the_providers_identity_key() -> None:
    (block,) = opened(TOKEN)["blocks"]
    signature = block.pop("signature")
    assert document_holds(P.identity.key, "token-block", {**block, "after": ""}, signature)
    assert not document_holds(MALLORY.identity.key, "token-block", {**block, "after": ""}, signature)


def test_a_malformed_token_is_no_matter_of_trust() -> None:
    with pytest.raises(Invalid):
        allowed("")
