"""Envelopes between instances: what opens, and every known way to cheat, each refused under its own code."""

import json
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covenant.model.ids import base58
from covenant.model.peers.instance import SUITE, InstanceId
from covenant.seal.envelope import (
    BODY_BYTES_MAX,
    ENVELOPE_BYTES_MAX,
    RELAYED_LIFE_MS_MAX,
    Code,
    EnvelopeRefused,
    check,
    open_checked,
    peer_refusal,
    remember_until_ms,
)
from covenant.seal.identity import ENVELOPE_LIFE_MS_MAX, PREKEY_LIFE_MS, SKEW_MS, new_prekey
from covenant.seal.keys import base64url
from tests.seal.instances import JTI, NOW, Instance, envelope, parts, rewritten

A, B, MALLORY = Instance(), Instance(), Instance()
SEALED = A.seal(B, seq=7)


def refusal(opening: Callable[[], object]) -> EnvelopeRefused:
    with pytest.raises(EnvelopeRefused) as refused:
        opening()
    return refused.value


def code(data: bytes, by: Instance = B, now_ms: int = NOW) -> Code:
    return refusal(lambda: by.open(data, now_ms=now_ms)).code


def test_an_envelope_opens_for_its_recipient_with_its_header_proven() -> None:
    header, body = B.open(SEALED)
    assert body == b'{"canary":1}'
    assert (header.sender, header.to, header.typ, header.jti, header.seq) == (A.id, B.id, "delegation_offer", JTI, 7)
    assert (header.iat, header.exp, header.suite, header.v) == (NOW, NOW + ENVELOPE_LIFE_MS_MAX, SUITE, 2)
    assert remember_until_ms(header) == NOW + ENVELOPE_LIFE_MS_MAX + SKEW_MS


def test_nothing_of_the_body_is_in_the_envelope_and_no_two_envelopes_are_alike() -> None:
    body = b"the canary sings" * 20
    made = [A.seal(B, body) for _ in range(20)]
    assert not any(piece in data for data in made for piece in (b"canary", base64url(body).encode()[:40]))
    ephemeral = {parts(data)["ciphertext"][:32] for data in made}
    assert len(ephemeral) == len(made)


@pytest.mark.parametrize("size", [0, 1, BODY_BYTES_MAX])
def test_bodies_of_every_size_up_to_the_greatest_pass(size: int) -> None:
    sealed = A.seal(B, bytes(size))
    assert len(sealed) <= ENVELOPE_BYTES_MAX
    assert len(B.open(sealed).body) == size


def test_a_body_over_the_bound_or_a_life_over_the_bound_is_not_sealed() -> None:
    with pytest.raises(ValueError, match="too large"):
        A.seal(B, bytes(BODY_BYTES_MAX + 1))
    with pytest.raises(ValueError, match="too long"):
        A.seal(B, life_ms=RELAYED_LIFE_MS_MAX + 1)


@pytest.mark.parametrize("changes", [{"typ": "Offer!"}, {"jti": ""}, {"jti": "x" * 65}, {"seq": 0}])
def test_a_header_that_nobody_would_take_is_not_sealed(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Expected"):
        A.seal(B, **changes)


def test_nothing_is_sealed_under_a_suite_that_is_not_ours() -> None:
    with pytest.raises(ValueError, match="no suite none"):
        A.seal(B, prekey=msgspec.structs.replace(B.prekey.prekey, suite="none"))


@pytest.mark.parametrize("raw", [bytes(32), b"\1" + bytes(31), bytes(31)], ids=["zero", "one", "short"])
def test_nothing_is_sealed_to_a_prekey_that_is_no_key(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"shared key|32 bytes"):
        A.seal(B, prekey=msgspec.structs.replace(B.prekey.prekey, public_key=base58(raw)))


def test_a_replayed_envelope_is_refused_by_what_was_seen_of_its_sender() -> None:
    taken: set[tuple[InstanceId, str]] = set()
    header = B.open(SEALED, seen=lambda sender, jti: (sender, jti) in taken).header
    taken.add((InstanceId(header.sender), header.jti))
    again = refusal(lambda: B.open(SEALED, seen=lambda sender, jti: (sender, jti) in taken))
    assert (again.code, peer_refusal(again).status) == (Code.REPLAYED, 409)
    # Another sender's envelope under the same id is another envelope: nobody can block somebody else's.
    assert B.open(MALLORY.seal(B), seen=lambda sender, jti: (sender, jti) in taken).header.sender == MALLORY.id


def test_somebody_elses_ciphertext_signed_as_ones_own_does_not_open() -> None:
    """Re-attribution: Mallory takes A's ciphertext, names herself, signs: that holds, the seal does not."""
    stolen = rewritten(SEALED, MALLORY.identity, **{"from": MALLORY.id, "skid": MALLORY.identity.key})
    assert code(stolen) is Code.CANNOT_OPEN


def test_a_sender_that_shows_another_key_is_a_mismatch() -> None:
    assert code(rewritten(SEALED, MALLORY.identity, skid=MALLORY.identity.key)) is Code.HEADER_MISMATCH
    assert code(rewritten(SEALED, MALLORY.identity)) is Code.BAD_SIGNATURE


HEADER_CHANGES: dict[str, Any] = {
    "to": MALLORY.id,
    "typ": "delegation_cancel",
    "jti": "another",
    "iat": NOW + 1,
    "exp": NOW + 1,
    "seq": 8,
    "kid": "pk_another",
}


@pytest.mark.parametrize("field", HEADER_CHANGES)
def test_a_changed_header_does_not_carry_the_signature(field: str) -> None:
    assert code(rewritten(SEALED, **{field: HEADER_CHANGES[field]})) is Code.BAD_SIGNATURE


@pytest.mark.parametrize("field", sorted(HEADER_CHANGES.keys() - {"to", "kid"}))
def test_a_header_changed_and_signed_again_by_its_own_sender_does_not_open(field: str) -> None:
    """The key is bound to the header, not only the signature."""
    assert code(rewritten(SEALED, A.identity, **{field: HEADER_CHANGES[field]})) is Code.CANNOT_OPEN


def test_an_envelope_for_somebody_else_is_refused_and_so_is_one_turned_to_us() -> None:
    assert code(SEALED, by=MALLORY) is Code.WRONG_RECIPIENT
    assert code(rewritten(SEALED, A.identity, to=MALLORY.id), by=MALLORY) is Code.UNKNOWN_PREKEY


def test_an_envelope_sent_back_to_its_sender_is_known_as_its_own() -> None:
    assert code(SEALED, by=A) is Code.REFLECTED
    assert code(A.seal(A), by=A) is Code.REFLECTED


@pytest.mark.parametrize(
    ("now_ms", "expected"),
    [
        (NOW - SKEW_MS, None),
        (NOW - SKEW_MS - 1, Code.FROM_FUTURE),
        (NOW + ENVELOPE_LIFE_MS_MAX + SKEW_MS, None),
        (NOW + ENVELOPE_LIFE_MS_MAX + SKEW_MS + 1, Code.STALE),
    ],
)
def test_an_envelope_is_taken_within_its_time_and_the_skew_of_clocks(now_ms: int, expected: Code | None) -> None:
    if expected is None:
        assert B.open(SEALED, now_ms=now_ms).body
    else:
        assert code(SEALED, now_ms=now_ms) is expected


@pytest.mark.parametrize("exp", [NOW - 1, NOW, NOW + ENVELOPE_LIFE_MS_MAX + 1, 2**53 - 1])
def test_a_sender_cannot_give_itself_a_longer_life(exp: int) -> None:
    assert code(rewritten(SEALED, A.identity, exp=exp)) is Code.BAD_LIFETIME


@pytest.mark.parametrize("suite", ["", "none", "X25519-HKDF-SHA256-AES128GCM-Ed25519", "x" * 65, None])
def test_a_suite_talked_down_is_refused(suite: str | None) -> None:
    assert code(rewritten(SEALED, A.identity, suite=suite)) is Code.SUITE_NOT_SUPPORTED


def test_a_suite_other_than_that_of_the_prekey_is_refused() -> None:
    held = B.prekey._replace(prekey=msgspec.structs.replace(B.prekey.prekey, suite="another"))
    checked = check(SEALED, us=B.id, now_ms=NOW, known=lambda _: True)
    assert refusal(lambda: open_checked(checked, held, now_ms=NOW)).code is Code.SUITE_NOT_SUPPORTED


@pytest.mark.parametrize("version", [0, 1, 3, 2**40])
def test_another_version_is_refused_before_anything_else_is_read(version: int) -> None:
    assert code(rewritten(SEALED, A.identity, v=version, novelty=[1])) is Code.VERSION_NOT_SUPPORTED


def test_a_stranger_is_refused_though_its_signature_holds() -> None:
    refused = refusal(lambda: B.open(SEALED, known=lambda _: False))
    assert (refused.code, refused.sender) == (Code.UNKNOWN_SENDER, None)


def test_a_prekey_that_is_unknown_or_over_is_refused_and_its_sender_is_told_what_to_do() -> None:
    elsewhere = refusal(lambda: B.open(A.seal(B, prekey=new_prekey(B.private_key, NOW).prekey)))
    assert (elsewhere.code, elsewhere.sender) == (Code.UNKNOWN_PREKEY, A.id)
    late = NOW + PREKEY_LIFE_MS + SKEW_MS
    over = refusal(lambda: B.open(A.seal(B, now_ms=late), now_ms=late))
    assert (over.code, over.sender) == (Code.PREKEY_EXPIRED, A.id)
    assert "ask for our keys again" in peer_refusal(over).message


def test_the_wrong_private_key_does_not_open() -> None:
    held = B.prekey._replace(private_key=MALLORY.prekey.private_key)
    checked = check(SEALED, us=B.id, now_ms=NOW, known=lambda _: True)
    assert refusal(lambda: open_checked(checked, held, now_ms=NOW)).code is Code.CANNOT_OPEN


def test_the_signature_is_checked_before_a_key_is_looked_for() -> None:
    asked: list[str] = []

    def told_of(sender: InstanceId) -> bool:
        asked.append(sender)
        return True

    assert refusal(lambda: B.open(rewritten(SEALED, jti="x"), known=told_of)).code is Code.BAD_SIGNATURE
    assert asked == []


def test_a_key_of_small_order_signs_for_nobody() -> None:
    """With the neutral element as key, a signature of neutral element and zero holds for every message."""
    key = base58(b"\1" + bytes(31))
    made = parts(rewritten(SEALED, skid=key))
    assert code(envelope(made["protected"], made["ciphertext"], b"\1" + bytes(63))) is Code.HEADER_MISMATCH


def header_bytes(text: str) -> bytes:
    made = parts(SEALED)
    signed = A.identity.sign(
        b"covenant.envelope.signature.v2\n" + struct.pack(">I", len(text.encode())) + text.encode() + bytes(32)
    )
    return envelope(text.encode(), made["ciphertext"], signed)


HEADER: dict[str, object] = json.loads(parts(SEALED)["protected"])


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(HEADER),
        json.dumps(HEADER, separators=(",", ":")) + " ",
        json.dumps(dict(reversed(HEADER.items())), separators=(",", ":")),
        json.dumps({**HEADER, "crit": 1}, separators=(",", ":"), sort_keys=True),
        json.dumps({**HEADER, "seq": 0}, separators=(",", ":"), sort_keys=True),
        json.dumps({**HEADER, "seq": True}, separators=(",", ":"), sort_keys=True),
        json.dumps({**HEADER, "iat": 2**53}, separators=(",", ":"), sort_keys=True),
        json.dumps({**HEADER, "typ": "../x"}, separators=(",", ":"), sort_keys=True),
        json.dumps({**HEADER, "from": "frd1_x"}, separators=(",", ":"), sort_keys=True),
        json.dumps(HEADER, separators=(",", ":"), sort_keys=True)[:-1] + ',"v":2}',
        "[" * 2_000,
        "null",
        "",
    ],
)
def test_a_header_that_is_not_the_one_way_to_say_it_is_malformed(text: str) -> None:
    assert code(header_bytes(text)) is Code.MALFORMED


def test_a_header_or_an_envelope_over_its_bound_is_too_large() -> None:
    made = parts(SEALED)
    assert code(envelope(b"{" * 3_000, made["ciphertext"], made["signature"])) is Code.TOO_LARGE
    assert code(b" " * (ENVELOPE_BYTES_MAX + 1)) is Code.TOO_LARGE


@pytest.mark.parametrize("part", ["protected", "ciphertext", "signature"])
@pytest.mark.parametrize("kept", [0, 1, 31, 47, -1])
def test_a_truncated_part_is_refused(part: str, kept: int) -> None:
    made = parts(SEALED)
    made[part] = made[part][:kept]
    assert code(envelope(**made)) in {Code.MALFORMED, Code.BAD_SIGNATURE}


def test_a_truncated_ciphertext_signed_again_does_not_open() -> None:
    made = parts(A.seal(B, b"x" * 100))
    cut = rewritten(envelope(made["protected"], made["ciphertext"][:-16], made["signature"]), A.identity)
    assert code(cut) is Code.CANNOT_OPEN


@given(at=st.integers(0, len(SEALED) - 1), flipped=st.integers(1, 255))
@example(at=len(SEALED) - 3, flipped=1)
def test_one_changed_byte_is_refused_with_a_code(at: int, flipped: int) -> None:
    changed = SEALED[:at] + bytes([SEALED[at] ^ flipped]) + SEALED[at + 1 :]
    assert code(changed) in Code


def test_every_bit_of_every_part_matters() -> None:
    made = parts(SEALED)
    for part, data in made.items():
        for at in range(len(data)):
            changed = {**made, part: data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]}
            assert code(envelope(**changed)) in Code


@given(st.binary(max_size=400) | st.text(max_size=400).map(str.encode))
def test_anything_at_all_is_refused_and_nothing_else_is_raised(data: bytes) -> None:
    assert code(data) in Code


@given(
    st.dictionaries(st.sampled_from(["protected", "ciphertext", "signature", "x"]), st.text(max_size=80) | st.none())
)
def test_anything_in_the_form_of_an_envelope_is_refused(parts_given: dict[str, str | None]) -> None:
    assert code(json.dumps(parts_given).encode()) in Code


def test_a_stranger_hears_one_and_the_same_whatever_was_wrong() -> None:
    heard = {
        (peer_refusal(refused).code, peer_refusal(refused).message, peer_refusal(refused).status)
        for refused in (
            refusal(lambda: B.open(SEALED, known=lambda _: False)),
            refusal(lambda: B.open(b"{")),
            refusal(lambda: B.open(rewritten(SEALED, jti="x"))),
            refusal(lambda: B.open(rewritten(SEALED, A.identity, v=9))),
            refusal(lambda: B.open(rewritten(SEALED, A.identity, suite="none"))),
            refusal(lambda: A.open(SEALED)),
            refusal(lambda: B.open(bytes(ENVELOPE_BYTES_MAX + 1))),
        )
    }
    assert len(heard) == 1
    assert {code for code, *_ in heard} == {"refused"}


def test_a_peer_that_has_proven_itself_hears_what_was_wrong() -> None:
    refused = refusal(lambda: B.open(SEALED, now_ms=NOW + 10_000_000))
    assert (peer_refusal(refused).code, peer_refusal(refused).status) == ("stale", 400)
