"""Keys in the home: for their owner alone, under a passphrase if there is one, and never lost half way."""

import json
import os
import stat
from pathlib import Path

import msgspec
import pytest

from covenant.daemon.home import KEY_NAME, LockedHome, UnsafeHome, _write_aside, save_secret
from covenant.daemon.keystore import CHANGE_NAME, INSTANCE_NAME, PREKEYS_NAME, Keystore, PastIdentities, find_passphrase
from covenant.model.errors import SettingsError
from covenant.model.peers.instance import HYBRID_SUITE, SUITE
from covenant.peers.directory.instance_keys import PREKEYS_KEPT_MAX, InstanceKeys
from covenant.seal.identity import PREKEY_PERIOD_MS, PrivatePrekey, new_prekey, sign_change
from covenant.seal.keys import COST_MIN, KEY_BYTES_MAX, KeyLocked, Locker, is_locked, new_private_key
from covenant.simple import A2ATaskDeps
from tests.cli.daemons import Daemon, covenant
from tests.places import short_folder

NOW = 1_800_000_000_000
PASSPHRASE = "correct horse ✓"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def keystore(home: Path, passphrase: str | None = PASSPHRASE) -> Keystore:
    return Keystore(home, passphrase, cost=COST_MIN)


def prekeys(private_key: bytes, count: int = 2) -> list[PrivatePrekey]:
    return [new_prekey(private_key, NOW + number * PREKEY_PERIOD_MS) for number in range(count)]


def names(home: Path) -> list[str]:
    return sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file())


class TestPassphrase:
    def test_it_comes_from_a_variable_or_from_a_file_for_its_owner_alone(self, tmp_path: Path) -> None:
        file = tmp_path / "passphrase"
        file.write_text(f"{PASSPHRASE}\n")
        file.chmod(0o600)
        assert find_passphrase({}) is None
        assert find_passphrase({"COVENANT_PASSPHRASE": ""}) is None
        assert find_passphrase({"COVENANT_PASSPHRASE": PASSPHRASE}) == PASSPHRASE
        assert find_passphrase({"COVENANT_PASSPHRASE_FILE": str(file)}) == PASSPHRASE

    def test_one_that_others_can_read_or_that_is_said_twice_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "passphrase"
        file.write_text(PASSPHRASE)
        file.chmod(0o644)
        with pytest.raises(UnsafeHome, match="chmod 600"):
            find_passphrase({"COVENANT_PASSPHRASE_FILE": str(file)})
        with pytest.raises(SettingsError, match="keep one"):
            find_passphrase({"COVENANT_PASSPHRASE": "a", "COVENANT_PASSPHRASE_FILE": str(file)})

    @pytest.mark.parametrize(("content", "said"), [(b"\n", "is empty"), (b"\xff\xfe", "UTF-8")])
    def test_a_file_without_one_is_refused(self, tmp_path: Path, content: bytes, said: str) -> None:
        file = tmp_path / "passphrase"
        file.write_bytes(content)
        file.chmod(0o600)
        with pytest.raises(SettingsError, match=said):
            find_passphrase({"COVENANT_PASSPHRASE_FILE": str(file)})


class TestTheKey:
    def test_a_first_key_is_made_locked_and_read_again(self, tmp_path: Path) -> None:
        assert keystore(tmp_path).read_key() is None
        key = keystore(tmp_path).make_key(new_private_key)
        assert keystore(tmp_path).read_key() == key
        data = (tmp_path / KEY_NAME).read_bytes()
        assert is_locked(data)
        assert key.hex().encode() not in data
        assert mode(tmp_path / KEY_NAME) == 0o600

    def test_a_key_without_a_lock_is_locked_in_place_and_stays_the_key(self, tmp_path: Path) -> None:
        key = Keystore(tmp_path, None).make_key(new_private_key)
        old = os.umask(0)
        try:
            assert keystore(tmp_path).read_key() == key
            assert Keystore(tmp_path, None).read_key() == key, "reading changes nothing"
            assert keystore(tmp_path).lock_key()
        finally:
            os.umask(old)
        assert not keystore(tmp_path).lock_key()
        assert keystore(tmp_path).read_key() == key
        assert (mode(tmp_path / KEY_NAME), names(tmp_path)) == (0o600, [KEY_NAME])
        assert key.hex().encode() not in (tmp_path / KEY_NAME).read_bytes()

    def test_without_a_passphrase_nothing_is_locked(self, tmp_path: Path) -> None:
        key = Keystore(tmp_path, None).make_key(new_private_key)
        assert not keystore(tmp_path, None).lock_key()
        assert keystore(tmp_path, None).read_key() == key

    def test_a_locked_key_without_its_passphrase_says_what_to_set(self, tmp_path: Path) -> None:
        keystore(tmp_path).make_key(new_private_key)
        before = (tmp_path / KEY_NAME).read_bytes()
        with pytest.raises(LockedHome, match="set COVENANT_PASSPHRASE"):
            keystore(tmp_path, None).read_key()
        with pytest.raises(LockedHome, match="the passphrase is wrong"):
            keystore(tmp_path, "battery staple").read_key()
        assert (tmp_path / KEY_NAME).read_bytes() == before

    def test_a_crash_before_the_locked_key_has_its_name_loses_nothing_and_leaves_nothing_open(
        self, tmp_path: Path
    ) -> None:
        key = Keystore(tmp_path, None).make_key(new_private_key)
        left = _write_aside(tmp_path / KEY_NAME, key.hex())
        left = left.rename(left.with_name(".local.key.999999.tmp"))
        assert keystore(tmp_path).read_key() == key
        assert keystore(tmp_path).lock_key()
        assert (keystore(tmp_path).read_key(), names(tmp_path)) == (key, [KEY_NAME])

    def test_a_locked_file_that_holds_something_else_is_no_key(self, tmp_path: Path) -> None:
        (tmp_path / "identity").mkdir()
        path = tmp_path / KEY_NAME
        path.write_bytes(Locker(PASSPHRASE, cost=COST_MIN).lock(b"not a key"))
        path.chmod(0o600)
        with pytest.raises(UnsafeHome, match="no key of 32 bytes"):
            keystore(tmp_path).read_key()


class TestPrekeys:
    @pytest.mark.parametrize("passphrase", [None, PASSPHRASE])
    def test_they_are_saved_for_their_owner_alone_and_read_again(self, tmp_path: Path, passphrase: str | None) -> None:
        private_key = new_private_key()
        saved = prekeys(private_key)
        assert list(keystore(tmp_path, passphrase).read_prekeys()) == []
        keystore(tmp_path, passphrase).save_prekeys(saved)
        assert list(keystore(tmp_path, passphrase).read_prekeys()) == saved
        data = (tmp_path / PREKEYS_NAME).read_bytes()
        assert (is_locked(data), mode(tmp_path / PREKEYS_NAME)) == (passphrase is not None, 0o600)
        assert (saved[0].private_key.hex().encode() in data) == (passphrase is None)

    def test_as_many_as_there_can_be_can_be_locked(self, tmp_path: Path) -> None:
        key = new_private_key()
        saved = prekeys(key, PREKEYS_KEPT_MAX)
        saved += [new_prekey(key, each.prekey.not_before_ms, HYBRID_SUITE) for each in saved]
        keystore(tmp_path, None).save_prekeys(saved)
        assert (tmp_path / PREKEYS_NAME).stat().st_size < KEY_BYTES_MAX
        keystore(tmp_path).save_prekeys(saved)
        assert list(keystore(tmp_path).read_prekeys()) == saved

    def test_hybrid_ones_are_kept_where_earlier_releases_do_not_look(self, tmp_path: Path) -> None:
        key = new_private_key()
        saved = [*prekeys(key), new_prekey(key, NOW, HYBRID_SUITE)]
        keystore(tmp_path, None).save_prekeys(saved)
        written = json.loads((tmp_path / PREKEYS_NAME).read_bytes())
        assert {each["prekey"]["suite"] for each in written["prekeys"]} == {SUITE}
        assert list(keystore(tmp_path, None).read_prekeys()) == saved
        store = keystore(tmp_path, None)
        keyring = InstanceKeys(key, store.read_prekeys(), store.save_prekeys, hybrid=True)
        assert keyring.hybrid_prekey(NOW) == saved[-1].prekey

    def test_those_without_a_lock_are_locked_when_they_are_read_with_a_passphrase(self, tmp_path: Path) -> None:
        saved = prekeys(new_private_key())
        keystore(tmp_path, None).save_prekeys(saved)
        assert list(keystore(tmp_path).read_prekeys()) == saved
        assert is_locked((tmp_path / PREKEYS_NAME).read_bytes())

    def test_those_that_cannot_be_read_are_given_up_and_made_anew(self, tmp_path: Path) -> None:
        private_key = new_private_key()
        keystore(tmp_path).save_prekeys(prekeys(private_key))
        for store in (keystore(tmp_path, None), keystore(tmp_path, "battery staple")):
            assert list(store.read_prekeys()) == []
        store = keystore(tmp_path, None)
        keyring = InstanceKeys(private_key, store.read_prekeys(), store.save_prekeys)
        assert keyring.rotate(NOW)
        assert [each.prekey for each in store.read_prekeys()] == list(keyring.bundle(NOW).prekeys)

    def test_those_that_others_could_read_are_refused(self, tmp_path: Path) -> None:
        keystore(tmp_path, None).save_prekeys(prekeys(new_private_key()))
        (tmp_path / PREKEYS_NAME).chmod(0o640)
        with pytest.raises(UnsafeHome, match="chmod 600"):
            keystore(tmp_path, None).read_prekeys()

    def test_a_crash_while_they_are_saved_leaves_the_old_ones(self, tmp_path: Path) -> None:
        saved = prekeys(new_private_key())
        store = keystore(tmp_path, None)
        store.save_prekeys(saved)
        _write_aside(tmp_path / PREKEYS_NAME, '{"prekeys": [{"pre')
        assert (list(store.read_prekeys()), names(tmp_path)) == (saved, [PREKEYS_NAME])


class TestAnotherPassphrase:
    @pytest.mark.parametrize(("before", "after"), [(None, "new"), ("old", "new"), ("old", None), ("old", "old")])
    def test_both_secrets_open_with_the_new_one_alone_and_are_what_they_were(
        self, tmp_path: Path, before: str | None, after: str | None
    ) -> None:
        key = keystore(tmp_path, before).make_key(new_private_key)
        saved = prekeys(key)
        keystore(tmp_path, before).save_prekeys(saved)
        _write_aside(tmp_path / PREKEYS_NAME, "left by somebody who was cut off")
        assert keystore(tmp_path, before).relock(after)
        now = keystore(tmp_path, after)
        assert (now.read_key(), list(now.read_prekeys()), now.locked) == (key, saved, after is not None)
        for name in (KEY_NAME, PREKEYS_NAME):
            path = tmp_path / name
            assert (is_locked(path.read_bytes()), mode(path)) == (after is not None, 0o600)
        assert names(tmp_path) == [KEY_NAME, PREKEYS_NAME]
        if before not in (None, after) and after is not None:
            with pytest.raises(LockedHome):
                keystore(tmp_path, before).read_key()

    @pytest.mark.parametrize(("before", "after"), [(None, "new"), ("old", "new"), ("old", None)])
    def test_the_identitys_own_key_is_locked_with_the_others_also_if_a_try_was_cut_off(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, after: str | None
    ) -> None:
        keystore(tmp_path, before).make_key(new_private_key)
        own = keystore(tmp_path, before).make_instance_key(new_private_key)

        def cut_off(path: Path, text: str) -> None:
            if path.name == Path(KEY_NAME).name:
                raise OSError("no space left on device")
            save_secret(path, text)

        with monkeypatch.context() as patched:
            patched.setattr("covenant.daemon.keystore.save_secret", cut_off)
            with pytest.raises(OSError, match="no space"):
                keystore(tmp_path, before).relock(after)
        assert keystore(tmp_path, before).relock(after)
        assert keystore(tmp_path, after).read_instance_key() == own
        assert is_locked((tmp_path / INSTANCE_NAME).read_bytes()) == (after is not None)

    def test_keys_that_are_not_locked_yet_are_locked_in_place(self, tmp_path: Path) -> None:
        keystore(tmp_path, None).make_key(new_private_key)
        own = keystore(tmp_path, None).make_instance_key(new_private_key)
        assert keystore(tmp_path).lock_key()
        assert not keystore(tmp_path).lock_key()
        assert is_locked((tmp_path / INSTANCE_NAME).read_bytes())
        assert keystore(tmp_path).read_instance_key() == own

    def test_a_wrong_one_changes_nothing(self, tmp_path: Path) -> None:
        keystore(tmp_path).save_prekeys(prekeys(keystore(tmp_path).make_key(new_private_key)))
        before = [(tmp_path / name).read_bytes() for name in (KEY_NAME, PREKEYS_NAME)]
        for wrong in ("battery staple", None):
            with pytest.raises(LockedHome):
                keystore(tmp_path, wrong).relock("new")
        assert [(tmp_path / name).read_bytes() for name in (KEY_NAME, PREKEYS_NAME)] == before

    @pytest.mark.parametrize(("before", "after"), [(None, "new"), ("old", "new"), ("old", None)])
    def test_cut_off_half_way_the_old_one_opens_the_key_and_the_next_try_loses_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, after: str | None
    ) -> None:
        key = keystore(tmp_path, before).make_key(new_private_key)
        saved = prekeys(key)
        keystore(tmp_path, before).save_prekeys(saved)

        def cut_off(path: Path, text: str) -> None:
            if path.name == Path(KEY_NAME).name:
                raise OSError("no space left on device")
            save_secret(path, text)

        with monkeypatch.context() as patched:
            patched.setattr("covenant.daemon.keystore.save_secret", cut_off)
            with pytest.raises(OSError, match="no space"):
                keystore(tmp_path, before).relock(after)
        assert keystore(tmp_path, before).read_key() == key
        assert is_locked((tmp_path / PREKEYS_NAME).read_bytes()) == (after is not None)
        assert keystore(tmp_path, before).relock(after)
        now = keystore(tmp_path, after)
        assert (now.read_key(), list(now.read_prekeys())) == (key, saved)

    def test_prekeys_that_open_with_neither_are_left_to_the_next_start(self, tmp_path: Path) -> None:
        key = keystore(tmp_path).make_key(new_private_key)
        keystore(tmp_path, "of somebody else").save_prekeys(prekeys(key))
        before = (tmp_path / PREKEYS_NAME).read_bytes()
        assert not keystore(tmp_path).relock("new")
        assert keystore(tmp_path, "new").read_key() == key
        assert (tmp_path / PREKEYS_NAME).read_bytes() == before
        assert list(keystore(tmp_path, "new").read_prekeys()) == []


class TestLocker:
    def test_what_is_locked_by_one_has_one_salt_and_never_one_nonce(self) -> None:
        locker = Locker(PASSPHRASE, cost=COST_MIN)
        locked = [locker.lock(b"secret") for _ in range(20)]
        assert len({each.split(b'"nonce"')[0] for each in locked}) == 1
        assert len(set(locked)) == 20
        again = Locker(PASSPHRASE, cost=COST_MIN)
        assert [again.unlock(each) for each in locked] == [b"secret"] * 20
        assert again.lock(b"x").split(b'"nonce"')[0] == locked[0].split(b'"nonce"')[0]

    def test_what_was_locked_at_less_cost_is_locked_anew_at_ours(self) -> None:
        cheap = Locker(PASSPHRASE, cost=COST_MIN).lock(b"secret")
        dear = Locker(PASSPHRASE, cost=COST_MIN + 1)
        assert dear.unlock(cheap) == b"secret"
        assert f'"cost":{COST_MIN + 1}'.encode() in dear.lock(b"secret")

    def test_another_passphrase_opens_nothing(self) -> None:
        with pytest.raises(KeyLocked):
            Locker("another", cost=COST_MIN).unlock(Locker(PASSPHRASE, cost=COST_MIN).lock(b"secret"))


def test_a_change_of_identity_is_read_where_there_is_one(tmp_path: Path) -> None:
    store = keystore(tmp_path, None)
    assert store.read_past() == PastIdentities()
    (tmp_path / "identity").mkdir()
    change = sign_change(new_private_key(), new_private_key(), NOW)
    (tmp_path / CHANGE_NAME).write_bytes(msgspec.json.encode(change))
    assert store.read_past().changes == (change,)
    (tmp_path / CHANGE_NAME).write_text("{}")
    with pytest.raises(UnsafeHome, match="remove it"):
        store.read_past()


async def test_the_library_keeps_a_home_under_a_passphrase_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVENANT_PASSPHRASE", PASSPHRASE)
    async with A2ATaskDeps.open(tmp_path / "home"):
        pass
    assert is_locked((tmp_path / "home" / KEY_NAME).read_bytes())
    async with A2ATaskDeps.open(tmp_path / "home"):
        pass


def test_a_daemon_locks_its_key_at_the_first_start_with_a_passphrase_and_needs_it_from_then_on() -> None:
    with short_folder() as folder:
        home = folder / "home"
        assert Daemon(home).stop() == 0
        key = Keystore(home, None).read_key()
        locked = Daemon(home, env={"COVENANT_PASSPHRASE": PASSPHRASE})
        listed = locked.run("identities", "list")
        assert (locked.stop(), listed.code) == (0, 0), listed
        assert key is not None
        assert Keystore(home, PASSPHRASE).read_key() == key
        refused = covenant("serve", "--home", str(home), "--http-port", "0")
        assert (refused.code != 0, "set COVENANT_PASSPHRASE" in refused.err) == (True, True)
        wrong = covenant("serve", "--home", str(home), "--http-port", "0", env={"COVENANT_PASSPHRASE": "x"})
        assert (wrong.code != 0, "passphrase is wrong" in wrong.err) == (True, True)
        assert "opens with the passphrase" in doctor(home, PASSPHRASE)
        assert "a start needs its COVENANT_PASSPHRASE" in doctor(home, "")
        assert "the passphrase is wrong" in doctor(home, "x")


def doctor(home: Path, passphrase: str) -> str:
    ran = covenant("doctor", "--home", str(home), env={"COVENANT_PASSPHRASE": passphrase})
    return ran.out + ran.err
