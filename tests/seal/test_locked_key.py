"""Private keys under a passphrase."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.seal.keys import COST, COST_MIN, KeyLocked, Locker, is_locked, new_private_key

KEY = new_private_key()
LOCKED = Locker("correct horse", cost=COST_MIN).lock(KEY)


def code(locked: bytes, passphrase: str = "correct horse") -> str:
    with pytest.raises(KeyLocked) as kept:
        Locker(passphrase).unlock(locked)
    return kept.value.code


def test_a_key_comes_back_with_its_passphrase_and_is_not_in_the_file() -> None:
    locked = Locker("correct horse").lock(KEY)
    assert Locker("correct horse").unlock(locked) == KEY
    assert KEY not in locked
    assert KEY.hex().encode() not in locked
    assert json.loads(locked)["cost"] == COST >= 17
    assert is_locked(locked)
    assert not is_locked(KEY)


def test_another_passphrase_does_not_unlock() -> None:
    assert code(LOCKED, "correct horse ") == "wrong_passphrase"


def test_one_passphrase_typed_in_two_ways_is_one() -> None:
    assert Locker("cafe\u0301").unlock(Locker("caf\u00e9", cost=COST_MIN).lock(KEY)) == KEY


def test_the_same_key_locked_twice_looks_different() -> None:
    first, second = (json.loads(Locker("x", cost=COST_MIN).lock(KEY)) for _ in range(2))
    assert all(first[part] != second[part] for part in ("salt", "nonce", "ciphertext"))


@pytest.mark.parametrize(
    "change",
    [{"cost": 40}, {"cost": 1}, {"kdf": "none"}, {"format": "x"}, {"salt": "AA"}, {"nonce": ""}, {"more": 1}],
)
def test_parameters_out_of_bounds_are_malformed_and_cost_nothing(change: dict[str, object]) -> None:
    assert code(json.dumps({**json.loads(LOCKED), **change}).encode()) == "malformed"


def test_parameters_are_bound_to_the_key() -> None:
    assert code(json.dumps({**json.loads(LOCKED), "cost": COST_MIN + 1}).encode()) == "wrong_passphrase"


@given(at=st.integers(0, len(LOCKED) - 2), flipped=st.integers(1, 255))
def test_one_changed_byte_keeps_it_locked(at: int, flipped: int) -> None:
    assert code(LOCKED[:at] + bytes([LOCKED[at] ^ flipped]) + LOCKED[at + 1 :]) in {"malformed", "wrong_passphrase"}


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b"x" * 20_000])
def test_what_is_no_locked_key_is_malformed(data: bytes) -> None:
    assert code(data) == "malformed"


def test_an_empty_passphrase_or_key_is_not_locked() -> None:
    with pytest.raises(ValueError, match="empty"):
        Locker("")
    with pytest.raises(ValueError, match="a key to lock must have"):
        Locker("x").lock(b"")
