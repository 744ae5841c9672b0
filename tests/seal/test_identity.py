"""Ids that prove their keys, prekeys that come and go, bundles, and the way from one identity to the next."""

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from joserfc import jws
from joserfc.jwk import OKPKey

from covenant.model.errors import Invalid
from covenant.model.ids import PublicKey, base58, from_base58
from covenant.model.peers.instance import IdentityChange, KeyBundle, Prekey, Trust, negotiate, parse_instance_id
from covenant.seal.identity import (
    ENVELOPE_LIFE_MS_MAX,
    PREKEY_LIFE_MS,
    PREKEY_PERIOD_MS,
    SKEW_MS,
    InstanceIdentity,
    PrivatePrekey,
    bundle_holds,
    change_holds,
    fingerprint,
    instance_id,
    is_key_of,
    new_prekey,
    prekey_due,
    prekey_holds,
    prekey_opens,
    prekey_over,
    prekey_to_use,
    sign_bundle,
    sign_change,
)
from covenant.seal.keys import (
    base64url,
    canonical,
    checked_key,
    document_holds,
    from_base64url,
    new_private_key,
    public_key,
    sign_document,
)
from tests.seal.instances import NOW, Instance

replace: Callable[..., Any] = msgspec.structs.replace
A, MALLORY = Instance(), Instance()


def test_an_id_is_made_from_the_key_alone_and_stays_the_same() -> None:
    key = PublicKey(base58(bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")))
    assert instance_id(key) == "frd1_eh7ddx5bksrgcytl7bkai36se4nxx3klnk7elksy"
    assert parse_instance_id(instance_id(key)) == instance_id(key)
    assert InstanceIdentity(A.private_key).id == A.id == instance_id(A.identity.key)
    assert fingerprint(key) == hashlib.sha256(from_base58(key)).hexdigest()[:16]


@pytest.mark.parametrize("text", ["", "frd1_", "frd2_" + "a" * 40, "frd1_" + "A" * 40, "frd1_" + "a" * 39 + "\n"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="frd1_"):
        parse_instance_id(text)


def test_somebody_elses_key_is_not_the_key_of_an_id() -> None:
    assert is_key_of(A.identity.key, A.id)
    assert not is_key_of(MALLORY.identity.key, A.id)
    assert not is_key_of(PublicKey("0OIl"), A.id)


@pytest.mark.parametrize("sign_bit", [0, 0x80])
@pytest.mark.parametrize(
    "head", ["00", "01", "ec", "ed", "ee"], ids=["order 4", "neutral", "order 2", "0 + p", "1 + p"]
)
def test_a_key_that_proves_nothing_is_no_identity(head: str, sign_bit: int) -> None:
    body = bytes.fromhex(head) + (bytes(31) if head < "20" else b"\xff" * 30 + b"\x7f")
    with pytest.raises(ValueError, match="not a usable"):
        checked_key(PublicKey(base58(body[:31] + bytes([body[31] | sign_bit]))))


def test_private_halves_are_in_no_representation() -> None:
    shown = repr(A.identity) + repr(A.prekey)
    assert A.prekey.private_key.hex() not in shown
    assert repr(A.prekey.private_key) not in shown


def test_a_prekey_holds_for_its_owner_and_for_nobody_else() -> None:
    assert prekey_holds(A.identity.key, A.prekey.prekey)
    assert not prekey_holds(MALLORY.identity.key, A.prekey.prekey)


@pytest.mark.parametrize(
    "change",
    [
        {"public_key": MALLORY.prekey.prekey.public_key},
        {"public_key": MALLORY.prekey.prekey.public_key, "kid": MALLORY.prekey.prekey.kid},
        {"kid": "pk_x"},
        {"suite": "none"},
        {"not_before_ms": 0},
        {"not_after_ms": NOW + 10 * PREKEY_LIFE_MS},
        {"signature": MALLORY.prekey.prekey.signature},
        {"signature": ""},
        {"public_key": "0"},
    ],
)
def test_a_changed_prekey_does_not_hold(change: dict[str, Any]) -> None:
    assert not prekey_holds(A.identity.key, replace(A.prekey.prekey, **change))


def rotated(days: int) -> list[PrivatePrekey]:
    return [new_prekey(A.private_key, NOW + day * PREKEY_PERIOD_MS) for day in range(days)]


def test_prekeys_rotate_daily_and_overlap_for_a_day() -> None:
    first, second = (each.prekey for each in rotated(2))
    assert prekey_due([], NOW)
    assert not prekey_due([first], NOW + PREKEY_PERIOD_MS - 1)
    assert prekey_due([first], NOW + PREKEY_PERIOD_MS)
    later = NOW + PREKEY_PERIOD_MS
    assert not prekey_due([first, second], later)
    assert prekey_to_use([first, second], later) == second
    assert prekey_to_use([first], later) == first, "a sender with yesterday's bundle is still understood"
    assert prekey_opens(first, later)
    assert prekey_opens(second, later)


def test_a_prekey_is_used_no_longer_than_what_is_sealed_to_it_can_be_opened() -> None:
    prekey = rotated(1)[0].prekey
    last_use = prekey.not_after_ms - ENVELOPE_LIFE_MS_MAX
    assert prekey_to_use([prekey], last_use) == prekey
    assert prekey_to_use([prekey], last_use + 1) is None
    assert prekey_opens(prekey, last_use + ENVELOPE_LIFE_MS_MAX + SKEW_MS)
    assert not prekey_over(prekey, prekey.not_after_ms + SKEW_MS)
    assert prekey_over(prekey, prekey.not_after_ms + SKEW_MS + 1)
    assert not prekey_opens(prekey, prekey.not_after_ms + SKEW_MS + 1)


def test_a_prekey_from_the_future_neither_serves_nor_stops_rotation() -> None:
    future = new_prekey(A.private_key, NOW + 10 * PREKEY_PERIOD_MS).prekey
    assert prekey_to_use([future], NOW) is None
    assert prekey_due([future], NOW)


def test_a_bundle_holds_for_its_id_while_it_lasts() -> None:
    bundle = sign_bundle(A.private_key, [A.prekey.prekey], NOW)
    assert bundle_holds(bundle, A.id, NOW)
    assert not bundle_holds(bundle, MALLORY.id, NOW)
    assert not bundle_holds(bundle, A.id, NOW - SKEW_MS - 1)
    assert not bundle_holds(bundle, A.id, NOW + PREKEY_LIFE_MS + SKEW_MS)
    again = msgspec.json.decode(msgspec.json.encode(bundle), type=KeyBundle)
    assert bundle_holds(again, A.id, NOW)


def test_a_bundle_shows_the_two_newest_prekeys_and_none_that_is_over() -> None:
    prekeys = [each.prekey for each in rotated(5)]
    shown = sign_bundle(A.private_key, prekeys, NOW + 4 * PREKEY_PERIOD_MS).prekeys
    assert shown == (prekeys[4], prekeys[3])


def test_a_bundle_without_a_prekey_that_lasts_is_not_signed() -> None:
    with pytest.raises(ValueError, match="needs a prekey"):
        sign_bundle(A.private_key, [A.prekey.prekey], NOW + PREKEY_LIFE_MS)


@pytest.mark.parametrize(
    "change",
    [
        {"prekeys": (MALLORY.prekey.prekey,)},
        {"versions": (1,)},
        {"versions": (1, 2)},
        {"identity_key": MALLORY.identity.key},
        {"identity_key": MALLORY.identity.key, "id": MALLORY.id},
        {"expires_at_ms": NOW + 100 * PREKEY_LIFE_MS},
        {"signature": ""},
        {"change": sign_change(new_private_key(), A.private_key, NOW)},
    ],
)
def test_a_changed_bundle_does_not_hold(change: dict[str, Any]) -> None:
    """Swapped keys, versions talked down, a life made longer, a past made up."""
    bundle = replace(sign_bundle(A.private_key, [A.prekey.prekey], NOW), **change)
    assert not bundle_holds(bundle, A.id, NOW)
    assert not bundle_holds(bundle, MALLORY.id, NOW)


def test_a_bundle_with_a_field_that_nobody_knows_is_refused() -> None:
    fields = msgspec.to_builtins(sign_bundle(A.private_key, [A.prekey.prekey], NOW))
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({**fields, "more": 1}, KeyBundle)


def test_an_identity_changes_when_the_old_key_and_the_new_one_say_so() -> None:
    new = new_private_key()
    change = sign_change(A.private_key, new, NOW)
    assert change_holds(change)
    assert (change.old_id, change.new_id) == (A.id, InstanceIdentity(new).id)
    prekey = new_prekey(new, NOW).prekey
    assert bundle_holds(sign_bundle(new, [prekey], NOW, change=change), InstanceIdentity(new).id, NOW)
    other = sign_change(A.private_key, MALLORY.private_key, NOW)
    assert not bundle_holds(sign_bundle(new, [prekey], NOW, change=other), InstanceIdentity(new).id, NOW)


def test_nobody_can_make_himself_or_somebody_else_a_successor() -> None:
    honest = sign_change(A.private_key, MALLORY.private_key, NOW)
    own = sign_change(MALLORY.private_key, new_private_key(), NOW)
    assert not change_holds(replace(honest, old_signature=own.old_signature))
    assert not change_holds(replace(honest, new_signature=""))
    assert not change_holds(replace(honest, issued_at_ms=NOW + 1))
    assert not change_holds(replace(own, old_id=A.id, old_key=A.identity.key))
    assert not change_holds(sign_change(A.private_key, A.private_key, NOW))
    assert isinstance(honest, IdentityChange)


def test_a_signed_document_is_a_detached_jws_that_others_can_check() -> None:
    document = {"b": 1, "a": "€"}
    header, _, value = sign_document(A.private_key, "bundle", document).partition("..")
    whole = f"{header}.{base64url(canonical(document))}.{value}"
    key = OKPKey.import_key({"kty": "OKP", "crv": "Ed25519", "x": base64url(from_base58(A.identity.key))})
    read = jws.deserialize_compact(whole, key, algorithms=["Ed25519"])
    assert read.headers() == {"alg": "Ed25519", "kid": A.identity.key, "typ": "covenant-bundle"}


def test_a_signature_of_one_kind_or_algorithm_is_none_of_another() -> None:
    document = {"a": 1}
    signature = sign_document(A.private_key, "prekey", document)
    assert document_holds(A.identity.key, "prekey", document, signature)
    assert not document_holds(A.identity.key, "bundle", document, signature)
    assert not document_holds(A.identity.key, "prekey", {"a": 2}, signature)
    assert not document_holds(public_key(MALLORY.private_key), "prekey", document, signature)
    none = base64url(canonical({"alg": "none", "kid": A.identity.key, "typ": "covenant-prekey"}))
    assert not document_holds(A.identity.key, "prekey", document, f"{none}..")
    assert not document_holds(A.identity.key, "prekey", document, signature + "=")
    assert not document_holds(A.identity.key, "prekey", {"a": 2**60}, signature)


@pytest.mark.parametrize("text", ["AB", "A", "AA==", "A A", "AA\n", "+/AA", "Ä"])
def test_base64url_has_one_form(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (any reason will do)
        from_base64url(text)


def test_the_highest_version_that_both_speak_is_spoken() -> None:
    assert negotiate([1, 2, 9]) == 2
    assert negotiate([2, 3, 9]) == 3
    assert negotiate([1, 9]) is None
    assert negotiate([]) is None
    assert negotiate([2, 3, 4], [3, 4, 5]) == 4


def test_trust_covers_what_needs_less() -> None:
    assert [[have.covers(needed) for needed in Trust] for have in Trust] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


def test_a_prekey_on_the_wire_is_itself_again() -> None:
    assert msgspec.json.decode(msgspec.json.encode(A.prekey.prekey), type=Prekey) == A.prekey.prekey
