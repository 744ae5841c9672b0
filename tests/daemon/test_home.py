"""The home: made for its owner alone, and refused when others could have been at its secrets."""

import os
import stat
from pathlib import Path

import pytest

from covenant.daemon.home import (
    KEY_NAME,
    TOKEN_NAME,
    UnsafeHome,
    make_home,
    read_or_make_token,
    save_token,
)
from covenant.daemon.keystore import Keystore
from covenant.seal.keys import new_private_key, new_token


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_home_and_its_secrets_are_for_their_owner_alone(tmp_path: Path) -> None:
    home = tmp_path / "deep" / "home"
    old = os.umask(0)
    try:
        make_home(home)
        assert Keystore(home, None).read_key() is None
        key = Keystore(home, None).make_key(new_private_key)
        token = read_or_make_token(home, new_token)
    finally:
        os.umask(old)
    assert (mode(home), mode(home / TOKEN_NAME), mode(home / KEY_NAME), mode(home / "identity")) == (
        0o700,
        0o600,
        0o600,
        0o700,
    )
    assert Keystore(home, None).read_key() == key
    assert read_or_make_token(home, new_token) == token
    assert sorted(path.name for path in home.rglob("*")) == ["identity", "local.key", "operator.token"]


def test_a_home_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(UnsafeHome, match="chmod 700"):
        make_home(tmp_path)


def test_a_home_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsafeHome, match="cannot be made"):
        make_home(tmp_path / "file" / "home")


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o610, 0o666])
def test_a_token_that_others_can_read_is_refused_with_the_chmod_to_run(tmp_path: Path, bits: int) -> None:
    read_or_make_token(tmp_path, new_token)
    (tmp_path / TOKEN_NAME).chmod(bits)
    with pytest.raises(UnsafeHome, match=f"chmod 600 {tmp_path / TOKEN_NAME}"):
        read_or_make_token(tmp_path, new_token)


@pytest.mark.parametrize("name", [TOKEN_NAME, KEY_NAME])
def test_a_secret_that_is_a_symbolic_link_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "identity").mkdir()
    real = tmp_path / "elsewhere"
    real.write_text(new_token())
    real.chmod(0o600)
    (tmp_path / name).symlink_to(real)
    with pytest.raises(UnsafeHome, match="symbolic link"):
        read_or_make_token(tmp_path, new_token) if name == TOKEN_NAME else Keystore(tmp_path, None).read_key()


def test_a_dangling_link_is_not_followed_into_making_a_token(tmp_path: Path) -> None:
    (tmp_path / TOKEN_NAME).symlink_to(tmp_path / "nowhere")
    with pytest.raises(UnsafeHome, match="symbolic link"):
        read_or_make_token(tmp_path, new_token)
    assert not (tmp_path / "nowhere").exists()


def test_a_secret_that_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / TOKEN_NAME, 0o600)
    with pytest.raises(UnsafeHome, match="not a plain file"):
        read_or_make_token(tmp_path, new_token)


@pytest.mark.parametrize("text", ["", "\n", "0OIl", "abc", "é" * 10])
def test_a_file_without_a_token_is_refused_rather_than_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / TOKEN_NAME
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UnsafeHome, match="holds no token"):
        read_or_make_token(tmp_path, new_token)
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["", "zz", "ab" * 31])
def test_a_file_without_a_key_is_refused_rather_than_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / KEY_NAME
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UnsafeHome, match="holds no key"):
        Keystore(tmp_path, None).read_key()


def test_a_first_key_never_takes_the_place_of_another(tmp_path: Path) -> None:
    first = Keystore(tmp_path, None).make_key(new_private_key)
    assert Keystore(tmp_path, None).make_key(new_private_key) == first


def test_a_rotated_token_takes_the_place_of_the_old_one_and_stays_private(tmp_path: Path) -> None:
    read_or_make_token(tmp_path, new_token)
    fresh = new_token()
    save_token(tmp_path, fresh)
    assert read_or_make_token(tmp_path, new_token) == fresh
    assert [path.name for path in tmp_path.iterdir()] == [TOKEN_NAME]
    assert mode(tmp_path / TOKEN_NAME) == 0o600


def test_of_two_first_starts_one_makes_the_token_and_both_use_it(tmp_path: Path) -> None:
    other = new_token()

    def slow_token() -> str:
        # Between looking for the file and making it, somebody else has made it.
        save_token(tmp_path, other)
        return new_token()

    assert read_or_make_token(tmp_path, slow_token) == other
