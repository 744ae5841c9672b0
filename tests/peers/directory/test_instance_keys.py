"""Our own keys: one new to seal to each day, two days of each, and nothing left of what is over."""

import msgspec
import pytest

from covenant.model.peers.instance import InstanceId, KeyPurpose
from covenant.peers.directory.instance_keys import BUNDLE_MS, PREKEYS_KEPT_MAX, InstanceKeys
from covenant.seal.envelope import Code, EnvelopeRefused
from covenant.seal.identity import (
    PREKEY_LIFE_MS,
    PREKEY_PERIOD_MS,
    SKEW_MS,
    PrivatePrekey,
    bundle_holds,
    new_prekey,
    prekey_to_use,
    sign_change,
)
from covenant.seal.keys import new_private_key
from covenant.seal.purpose_keys import KEY_PERIOD_MS, PurposeKeySet
from tests.seal.instances import Opened, open_

NOW = 1_800_000_000_000
HOUR = 3_600_000


class Saved:
    """What a disk would hold."""

    def __init__(self) -> None:
        self.prekeys: list[PrivatePrekey] = []
        self.times = 0

    def __call__(self, prekeys: object) -> None:
        self.prekeys = list(prekeys)  # type: ignore[call-overload]
        self.times += 1


def ring(now_ms: int = NOW) -> tuple[InstanceKeys, Saved]:
    saved = Saved()
    keyring = InstanceKeys(new_private_key(), (), saved)
    assert keyring.rotate(now_ms)
    return keyring, saved


def opened(recipient: InstanceKeys, sender: InstanceKeys, envelope: bytes, now_ms: int) -> Opened:
    return open_(
        envelope,
        us=recipient.id,
        now_ms=now_ms,
        known=lambda who: who == sender.id,
        seen=lambda _sender, _jti: False,
        prekey=recipient.prekey,
    )


def sealed(sender: InstanceKeys, recipient: InstanceKeys, now_ms: int, shown_ms: int | None = None) -> bytes:
    """As one would seal it who fetched the recipient's keys back then."""
    prekey = prekey_to_use(recipient.bundle(shown_ms or now_ms).prekeys, now_ms)
    assert prekey is not None
    return sender.seal(b"{}", typ="capability_query", to=recipient.id, prekey=prekey, now_ms=now_ms)


def test_a_new_ring_makes_a_prekey_saves_it_and_shows_it_signed() -> None:
    keyring, saved = ring()
    bundle = keyring.bundle(NOW)
    assert bundle_holds(bundle, keyring.id, NOW)
    assert [each.prekey for each in saved.prekeys] == list(bundle.prekeys)
    assert keyring.prekey(bundle.prekeys[0].kid) == saved.prekeys[0]
    assert keyring.prekey("pk_of_nobody") is None


def test_nothing_changes_and_nothing_is_saved_until_a_day_is_over() -> None:
    keyring, saved = ring()
    assert not keyring.rotate(NOW + PREKEY_PERIOD_MS - 1)
    assert saved.times == 1
    assert keyring.rotate(NOW + PREKEY_PERIOD_MS)
    assert (saved.times, len(saved.prekeys)) == (2, 2)


def test_what_was_sealed_to_yesterdays_key_still_opens_and_what_is_over_is_erased_everywhere() -> None:
    keyring, saved = ring()
    sender, _ = ring()
    first = keyring.bundle(NOW).prekeys[0]
    late = NOW + PREKEY_PERIOD_MS + HOUR
    keyring.rotate(late)
    old = sender.seal(b"{}", typ="capability_query", to=keyring.id, prekey=first, now_ms=late)
    assert opened(keyring, sender, old, late).body == b"{}"
    over = NOW + PREKEY_LIFE_MS + SKEW_MS + 1
    older = sender.seal(b"{}", typ="capability_query", to=keyring.id, prekey=first, now_ms=over)
    assert keyring.rotate(over)
    assert first.kid not in {each.prekey.kid for each in saved.prekeys}
    with pytest.raises(EnvelopeRefused) as refused:
        opened(keyring, sender, older, over)
    assert refused.value.code is Code.UNKNOWN_PREKEY


def test_a_ring_that_is_loaded_again_opens_what_was_sealed_before() -> None:
    keyring, saved = ring()
    sender, _ = ring()
    envelope = sealed(sender, keyring, NOW)
    kept = PurposeKeySet(keyring.purpose_keys())
    again = InstanceKeys(keyring.private_key, saved.prekeys, saved, purpose_keys=kept)
    assert again.id == keyring.id
    assert opened(again, sender, envelope, NOW).body == b"{}"
    assert not again.rotate(NOW + HOUR)


def test_a_bundle_is_kept_for_an_hour_and_signed_anew_after_it_or_when_keys_change() -> None:
    keyring, _ = ring()
    first = keyring.bundle(NOW)
    assert keyring.bundle(NOW + BUNDLE_MS - 1) is first
    assert keyring.bundle(NOW + BUNDLE_MS).issued_at_ms == NOW + BUNDLE_MS
    before = keyring.bundle(NOW + PREKEY_PERIOD_MS - 1)
    keyring.rotate(NOW + PREKEY_PERIOD_MS)
    after = keyring.bundle(NOW + PREKEY_PERIOD_MS)
    assert (len(before.prekeys), len(after.prekeys)) == (1, 2)


def test_a_bundle_always_has_a_key_that_can_be_used_even_if_nobody_has_rotated_for_days() -> None:
    keyring, _ = ring()
    later = NOW + 9 * PREKEY_PERIOD_MS
    bundle = keyring.bundle(later)
    assert bundle_holds(bundle, keyring.id, later)
    assert prekey_to_use(bundle.prekeys, later) is not None
    assert InstanceKeys(new_private_key(), (), Saved()).bundle(NOW).prekeys


def test_keys_from_a_time_when_the_clock_was_ahead_do_not_stand_before_those_of_now() -> None:
    keyring, _ = ring(NOW + 30 * PREKEY_PERIOD_MS)
    keyring.rotate(NOW + 31 * PREKEY_PERIOD_MS)
    assert keyring.rotate(NOW)
    bundle = keyring.bundle(NOW)
    assert prekey_to_use(bundle.prekeys, NOW) is not None
    assert bundle_holds(bundle, keyring.id, NOW)


def test_a_clock_that_jumps_to_and_fro_never_makes_more_keys_than_can_be_kept() -> None:
    keyring, saved = ring()
    for day in range(40, 0, -1):
        keyring.rotate(NOW + day * PREKEY_PERIOD_MS)
        keyring.rotate(NOW + day * PREKEY_PERIOD_MS - 3 * PREKEY_LIFE_MS)
    assert len(saved.prekeys) <= PREKEYS_KEPT_MAX


def test_a_key_that_cannot_be_saved_is_shown_to_nobody() -> None:
    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    keyring, saved = ring()
    shown = keyring.bundle(NOW)
    stuck = InstanceKeys(keyring.private_key, saved.prekeys, full)
    with pytest.raises(OSError, match="No space"):
        stuck.rotate(NOW + PREKEY_PERIOD_MS)
    assert stuck.bundle(NOW + PREKEY_PERIOD_MS).prekeys == shown.prekeys


def test_prekeys_of_another_identity_are_left_out() -> None:
    keyring = InstanceKeys(new_private_key(), [new_prekey(new_private_key(), NOW)], Saved())
    assert keyring.rotate(NOW)
    assert len(keyring.bundle(NOW).prekeys) == 1


def test_every_envelope_has_a_name_of_its_own() -> None:
    sender, _ = ring()
    recipient, _ = ring()
    names = {opened(recipient, sender, sealed(sender, recipient, NOW), NOW).header.jti for _ in range(50)}
    assert len(names) == 50


def test_a_ring_that_took_over_from_another_says_so_under_both_signatures() -> None:
    old, new = new_private_key(), new_private_key()
    keyring = InstanceKeys(new, (), Saved(), changes=(sign_change(old, new, NOW),))
    bundle = keyring.bundle(NOW)
    assert bundle_holds(bundle, InstanceId(bundle.id), NOW)
    assert bundle.change is not None
    assert bundle.change.new_id == keyring.id


def test_neither_ring_nor_key_shows_a_secret_when_printed() -> None:
    keyring, saved = ring()
    for shown in (repr(keyring), repr(saved.prekeys[0]), repr(keyring.identity)):
        assert keyring.private_key.hex() not in shown
        assert saved.prekeys[0].private_key.hex() not in shown
        assert repr(saved.prekeys[0].private_key) not in shown


def test_each_purpose_has_a_key_that_is_saved_before_it_signs_and_replaced_each_month() -> None:
    saved: list[PurposeKeySet] = []
    keyring = InstanceKeys(new_private_key(), (), Saved(), save_purpose_keys=saved.append)
    reader = InstanceKeys(new_private_key(), (), Saved()).bundle(NOW)
    keyring.rotate(NOW)
    first = keyring.signing(KeyPurpose.TOKENS, reader, NOW)
    assert [each.certificate.purpose for each in saved[-1].keys if each.certificate] == list(KeyPurpose)
    assert (first in saved[-1].keys, first.identity_key) == (True, keyring.key)
    assert keyring.signing(KeyPurpose.TOKENS, reader, NOW + KEY_PERIOD_MS - 1) == first
    assert keyring.signing(KeyPurpose.TOKENS, reader, NOW + KEY_PERIOD_MS) != first
    assert keyring.signing(KeyPurpose.TOKENS, msgspec.structs.replace(reader, versions=(2,)), NOW).certificate is None


def test_replaced_keys_that_cannot_be_saved_do_not_sign() -> None:
    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    keyring = InstanceKeys(new_private_key(), (), Saved())
    reader = keyring.bundle(NOW)
    stuck = InstanceKeys(
        keyring.private_key, (), Saved(), purpose_keys=PurposeKeySet(keyring.purpose_keys()), save_purpose_keys=full
    )
    with pytest.raises(OSError, match="No space"):
        stuck.replace_purpose_keys(NOW + HOUR, compromised=True)
    assert stuck.signing(KeyPurpose.PROOFS, reader, NOW) == keyring.signing(KeyPurpose.PROOFS, reader, NOW)
    assert stuck.void_before_ms == 0


def test_a_clock_that_is_set_back_after_keys_were_called_void_leaves_the_identity_to_sign() -> None:
    keyring = InstanceKeys(new_private_key(), (), Saved())
    reader = keyring.bundle(NOW)
    keyring.replace_purpose_keys(NOW + HOUR, compromised=True)
    assert keyring.sender(certified=True, now_ms=NOW + HOUR).certificate is not None
    assert keyring.sender(certified=True, now_ms=NOW).certificate is None
    assert keyring.signing(KeyPurpose.PROOFS, reader, NOW).certificate is None
    assert keyring.signing(KeyPurpose.PROOFS, reader, NOW + HOUR).certificate is not None
