"""Capability tokens: issued by the provider, narrowed by the holder, of use to nobody else, revocable; never wider."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from biscuit_auth import Algorithm, Biscuit, BlockBuilder, KeyPair, PrivateKey, PublicKey
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.errors import Forbidden, Invalid, Refusal, Unavailable
from covenant.model.ids import from_base58
from covenant.seal.tokens import (
    _ED25519,
    _MAKE_PRIVATE,
    BLOCKS_MAX,
    TOKEN_CHARS_MAX,
    Narrowing,
    Use,
    _contained,
    _evaluate,
    _read,
    authorize,
    issue,
    narrow,
    token_ids,
)
from tests.seal.crafted import append_crafted
from tests.seal.instances import NOW, OFFER_ID, Instance

P, R, MALLORY = Instance(), Instance(), Instance()
TERMS = Narrowing(profiles=frozenset({"coder", "analyst"}), budget=50_000, depth=3, expires_at_ms=NOW + 60_000)
TOKEN = issue(P.private_key, R.id, TERMS)
FORGED = issue(MALLORY.private_key, R.id, TERMS)


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
        issue(P.private_key, R.id, Narrowing(budget=1))


def test_a_token_without_profiles_is_for_all_of_them() -> None:
    token = issue(P.private_key, R.id, Narrowing(expires_at_ms=NOW))
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


def appended(source: str) -> str:
    make: Any = PublicKey.from_bytes
    ed25519: Any = getattr(Algorithm, "Ed25519")  # noqa: B009
    biscuit = Biscuit.from_base64(TOKEN, make(from_base58(P.identity.key), ed25519))
    return biscuit.append(BlockBuilder(source)).to_base64()


@pytest.mark.parametrize(
    "source",
    [
        'budget(1); profile("root");',
        'right("delegate");',
        pytest.param(f'holder("{MALLORY.id}");', id="another holder"),
        "check if true;",
        "check if budget($b), $b <= 99999999;",
        "check if budget($budget), $budget <= 5 or true;",
        "check all budget($budget), $budget <= 5;",
        "reject if budget($budget), $budget <= 5;",
        "budget($x) <- depth($x);",
        "check if budget($budget), $budget <= 5 trusting previous;",
        'check if profile($profile), $profile.matches("(a+)+$");',
        'check if offer("a b");',
        "" + "".join(f"check if budget($budget), $budget <= {n};" for n in range(17)),
    ],
)
def test_a_block_with_anything_but_our_conditions_is_refused(source: str) -> None:
    assert code(lambda: allowed(appended(source))) == "token_malformed"


def test_a_block_that_would_take_all_memory_is_never_evaluated() -> None:
    """A join of three over 300 facts is 27 million rows; the library looks at its limits only afterwards."""
    source = "".join(f"f({n});" for n in range(300)) + " g($a, $b, $c) <- f($a), f($b), f($c);"
    assert code(lambda: allowed(appended(source))) == "token_malformed"


CRAFTED: list[tuple[str, dict[str, str]]] = [
    ("aaa($x) <- bbb($x);", {"aaa": 'check if offer("a");\ncheck if offer', "bbb": "ccc"}),
    ("aaa($x) <- bbb($x);", {"aaa": 'check if offer("a");\n', "bbb": '\ncheck if offer("a");'}),
    ("check if aaa($x), aaa($y), aaa($z);", {"aaa": 'offer("a");\ncheck if offer'}),
    ('aaa("b"); check if aaa($x), aaa($y);', {"aaa": "check if offer", "b": "o"}),
    ('check if aaa("b") or true;', {"aaa": 'offer("a");\ncheck if offer'}),
    ('check if "aaa" == "bbb";', {"aaa": '");\ncheck if offer("a'}),
]


@pytest.mark.parametrize(("source", "names"), CRAFTED)
def test_names_made_to_look_like_conditions_hide_nothing(source: str, names: dict[str, str]) -> None:
    token = append_crafted(_read(TOKEN, P.identity.key), source, names)
    assert code(lambda: allowed(token)) == "token_malformed"


def test_a_fact_made_to_look_like_a_condition_is_one() -> None:
    """What it says is held against it, and what it is changes nothing."""
    token = append_crafted(_read(TOKEN, P.identity.key), 'aaa("bbb");', {"aaa": "check if offer", "bbb": "mine"})
    assert _read(token, P.identity.key).block_source(1) == 'check if offer("mine");\n'
    assert code(lambda: allowed(token)) == "token_denied"
    assert allowed(token, use(offer_id="mine")).offer_id == "mine"


def test_a_third_partys_block_is_refused() -> None:
    make: Any = PublicKey.from_bytes
    ed25519: Any = getattr(Algorithm, "Ed25519")  # noqa: B009
    biscuit = Biscuit.from_base64(TOKEN, make(from_base58(P.identity.key), ed25519))
    other = KeyPair()
    block = biscuit.third_party_request().create_block(other.private_key, BlockBuilder('check if offer("x");'))
    token = biscuit.append_third_party(other.public_key, block).to_base64()
    assert code(lambda: allowed(token)) == "token_malformed"


def test_a_token_is_narrowed_a_bounded_number_of_times() -> None:
    token = TOKEN
    for n in range(BLOCKS_MAX - 1):
        token = narrow(token, P.identity.key, Narrowing(budget=100 - n))
    assert allowed(token, use(budget=1)).budget == 100 - BLOCKS_MAX + 2
    assert code(lambda: narrow(token, P.identity.key, Narrowing(budget=1))) == "token_malformed"


def test_a_token_narrowed_too_often_by_others_means_is_refused() -> None:
    token = TOKEN
    for _ in range(BLOCKS_MAX):
        token = _read(token, P.identity.key).append(BlockBuilder("check if budget($budget), $budget <= 5;")).to_base64()
    assert code(lambda: allowed(token, use(budget=1))) == "token_malformed"


def test_both_readings_must_allow() -> None:
    """The library's own reading, asked alone: it denies what ours would never have let it see."""
    wanted = {"holder": R.id, "audience": P.id, "offer": OFFER_ID}
    biscuit = _read(TOKEN, P.identity.key)
    _evaluate(biscuit, use(), wanted, NOW)
    assert code(lambda: _evaluate(biscuit, use(budget=50_001), wanted, NOW)) == "token_denied"
    assert code(lambda: _evaluate(biscuit, use(), {**wanted, "holder": MALLORY.id}, NOW)) == "token_denied"
    assert code(lambda: _evaluate(biscuit, use(budget=2**70), wanted, NOW)) == "token_denied"


def test_taking_too_long_is_our_fault_and_no_denial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covenant.seal.tokens.EVALUATION_MS_MAX", 0.001)
    with pytest.raises(Unavailable) as refused:
        allowed()
    assert (refused.value.code, refused.value.status) == ("token_unevaluated", 503)


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
    assert code(lambda: allowed("A" * (TOKEN_CHARS_MAX + 1))) == "token_malformed"


def test_the_library_giving_up_refuses_the_token_and_nothing_else_is_hidden() -> None:
    class PanicException(BaseException):
        pass

    def panics(kind: type[BaseException]) -> None:
        with _contained():
            raise kind

    assert code(lambda: panics(PanicException)) == "token_malformed"
    with pytest.raises(KeyboardInterrupt):
        panics(KeyboardInterrupt)


def test_the_root_is_the_providers_identity_key() -> None:
    key = _MAKE_PRIVATE(P.private_key, _ED25519)
    assert isinstance(key, PrivateKey)
    assert bytes(KeyPair.from_private_key(key).public_key.to_bytes()) == from_base58(P.identity.key)


def test_a_malformed_token_is_no_matter_of_trust() -> None:
    with pytest.raises(Invalid):
        allowed("")
