"""The keys in the home: the one that this instance is, and those that other instances seal to.

    identity/local.key       the identity key
    identity/prekeys.json    what others seal to, with the private halves
    identity/change.json     optional: an earlier key names this one as its successor, signed by both

With a passphrase, from COVENANT_PASSPHRASE or the file that COVENANT_PASSPHRASE_FILE names, the two secrets are locked
(`Locker`), and those that are not yet are locked in place. A key that is locked is never replaced for want of its
passphrase; prekeys that cannot be read are, since others find out by themselves. `relock` changes the passphrase.

Only whoever holds the home's lock writes; reading the key is for anybody. Unlocking takes half a second of a processor:
call it from a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from covenant.daemon.environment import PASSPHRASE_FILE_VARIABLE, PASSPHRASE_VARIABLE
from covenant.daemon.home import (
    KEY_NAME,
    LOCKED_MARK,
    LockedHome,
    UnsafeHome,
    drop_unfinished,
    make_key_file,
    parse_key,
    read_secret,
    read_secret_bytes,
    save_secret,
)
from covenant.exchange.access.principals import Principal
from covenant.ledger.contract.identities import IdentityLedger
from covenant.ledger.machine.identity_commands import Enroll, RevokeIdentity, RotateToken
from covenant.model.errors import SettingsError
from covenant.model.grant import Identity
from covenant.model.ids import AgentId
from covenant.model.peers.instance import IdentityChange, Prekey
from covenant.seal.identity import PrivatePrekey
from covenant.seal.keys import COST, TOKEN_PREFIX_LENGTH, KeyLocked, Locker, is_locked, new_token, token_hash

PREKEYS_NAME: Final = "identity/prekeys.json"
CHANGE_NAME: Final = "identity/change.json"
FILE_BYTES_MAX: Final = 32_768
PASSPHRASE_BYTES_MAX: Final = 4_096

log = logging.getLogger(__name__)


class _Kept(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    prekey: Prekey
    private_key: str
    """In hex."""


class _KeptPrekeys(msgspec.Struct, frozen=True):
    prekeys: tuple[_Kept, ...]


def find_passphrase(variables: Mapping[str, str]) -> str | None:
    """None if neither variable is set. Raises SettingsError and UnsafeHome."""
    said, named = variables.get(PASSPHRASE_VARIABLE, ""), variables.get(PASSPHRASE_FILE_VARIABLE, "")
    if said and named:
        raise SettingsError(f"{PASSPHRASE_VARIABLE} and {PASSPHRASE_FILE_VARIABLE} are both set; keep one")
    if not named:
        return said or None
    return read_passphrase(Path(named).expanduser(), PASSPHRASE_FILE_VARIABLE)


def read_passphrase(path: Path, named_by: str) -> str:
    """From a file for its owner alone. Raises SettingsError and UnsafeHome."""
    try:
        passphrase = read_secret_bytes(path, PASSPHRASE_BYTES_MAX).decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise SettingsError(f"{named_by}: {path} is not text in UTF-8") from None
    if not passphrase:
        raise SettingsError(f"{named_by}: {path} is empty; put the passphrase into it")
    return passphrase


class Keystore:
    def __init__(self, home: Path, passphrase: str | None, *, cost: int = COST) -> None:
        self._home = home
        self._cost = cost
        self._locker = _locker(passphrase, cost)

    @property
    def locked(self) -> bool:
        """Whether there is a key, and it needs a passphrase."""
        path = self._home / KEY_NAME
        return (path.exists() or path.is_symlink()) and LOCKED_MARK in read_secret(path)

    def read_key(self) -> bytes | None:
        """None if this home has none yet. Raises LockedHome and UnsafeHome."""
        path = self._home / KEY_NAME
        if not path.exists() and not path.is_symlink():
            return None
        text = read_secret(path)
        if self._locker is None:
            return parse_key(path, text)
        if LOCKED_MARK in text:
            return parse_key(path, _unlock(self._locker, path, text.encode()).decode("ascii", "replace"))
        return parse_key(path, text)

    def lock_key(self) -> bool:
        """Lock a key in place that is there without a lock, if there is a passphrase. Whether it was done."""
        path = self._home / KEY_NAME
        text = read_secret(path)
        if self._locker is None or LOCKED_MARK in text:
            return False
        self._save_key(parse_key(path, text))
        return True

    def relock(self, passphrase: str | None) -> bool:
        """Lock both secrets with this passphrase from now on, or with none. Raises LockedHome and UnsafeHome.

        False: the prekeys open with neither and stay as they are. They go first: cut off between the two, the key opens
        as before, and doing it again does the rest. Prekeys that do not open with their key's passphrase are made anew
        by the next start.
        """
        key = self.read_key()
        if key is None:
            raise UnsafeHome(f"{self._home / KEY_NAME} is not there; put it back from a backup")
        before, self._locker = self._locker, _locker(passphrase, self._cost)
        kept = self._relock_prekeys(before)
        self._save_key(key)
        return kept

    def _relock_prekeys(self, before: Locker | None) -> bool:
        path = self._home / PREKEYS_NAME
        if not path.exists() and not path.is_symlink():
            return True
        data = read_secret_bytes(path, FILE_BYTES_MAX)
        # With ours, if an earlier try came as far as this.
        for locker in (before, self._locker):
            with suppress(ValueError, LockedHome):
                self.save_prekeys(_open_prekeys(locker, path, data))
                drop_unfinished(path)
                return True
        return False

    def _save_key(self, key: bytes) -> None:
        path = self._home / KEY_NAME
        save_secret(path, key.hex() if self._locker is None else self._locked(key.hex()))
        # What was left half done by somebody who was cut off may be locked with less.
        drop_unfinished(path)

    def make_key(self, new_key: Callable[[], bytes]) -> bytes:
        """A first key. Only for a ledger that knows nobody yet: whatever was signed with another would be worthless."""
        made = new_key().hex()
        make_key_file(self._home, made if self._locker is None else self._locked(made))
        key = self.read_key()
        assert key is not None
        return key

    def read_prekeys(self) -> Sequence[PrivatePrekey]:
        """Raises UnsafeHome if somebody else could have been at them."""
        path = self._home / PREKEYS_NAME
        drop_unfinished(path)
        if not path.exists() and not path.is_symlink():
            return ()
        data = read_secret_bytes(path, FILE_BYTES_MAX)
        try:
            prekeys = _open_prekeys(self._locker, path, data)
        except (ValueError, LockedHome) as wrong:
            log.warning("keystore.prekeys_replaced", extra={"path": str(path), "reason": str(wrong)})
            return ()
        if self._locker is not None and not is_locked(data):
            self.save_prekeys(prekeys)
        return prekeys

    def check_prekeys(self) -> None:
        """Raises UnsafeHome if somebody else could have been at them. What cannot be read is made anew by a start."""
        path = self._home / PREKEYS_NAME
        if path.exists() or path.is_symlink():
            read_secret_bytes(path, FILE_BYTES_MAX)

    def save_prekeys(self, prekeys: Sequence[PrivatePrekey]) -> None:
        """In the place of those that were there, durably."""
        kept = _KeptPrekeys(tuple(_Kept(each.prekey, each.private_key.hex()) for each in prekeys))
        text = msgspec.json.encode(kept).decode()
        path = self._home / PREKEYS_NAME
        path.parent.mkdir(mode=0o700, exist_ok=True)
        save_secret(path, text if self._locker is None else self._locked(text))

    def read_change(self) -> IdentityChange | None:
        """From whom this identity took over. Whether it holds is looked at by whoever is shown it."""
        path = self._home / CHANGE_NAME
        try:
            return msgspec.json.decode(path.read_bytes()[:FILE_BYTES_MAX], type=IdentityChange)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as wrong:
            raise UnsafeHome(f"{path} holds no change of identity: {wrong}; remove it, or put it right") from None

    def _locked(self, text: str) -> str:
        assert self._locker is not None
        return self._locker.lock(text.encode()).decode().strip()


def _locker(passphrase: str | None, cost: int) -> Locker | None:
    return Locker(passphrase, cost=cost) if passphrase is not None else None


def _unlock(locker: Locker | None, path: Path, data: bytes) -> bytes:
    if locker is None:
        raise LockedHome(f"{path} is locked with a passphrase; set {PASSPHRASE_VARIABLE}")
    try:
        return locker.unlock(data)
    except KeyLocked as locked:
        raise LockedHome(
            f"{path} stays locked: {locked}; set the right {PASSPHRASE_VARIABLE}, or put back a backup of it"
        ) from None


def _open_prekeys(locker: Locker | None, path: Path, data: bytes) -> tuple[PrivatePrekey, ...]:
    """Raises LockedHome, and ValueError if they are none."""
    read = msgspec.json.decode(_unlock(locker, path, data) if is_locked(data) else data, type=_KeptPrekeys)
    return tuple(PrivatePrekey(each.prekey, bytes.fromhex(each.private_key)) for each in read.prekeys)


OPERATOR_DISPLAY: Final = "operator@local"


async def admit_operator(
    ledger: IdentityLedger, operator: AgentId, token: str, save: Callable[[str], None]
) -> Principal:
    """The operator's principal, after seeing to it that the ledger knows `token` as its one live token."""
    known = ledger.identity(token_hash(token))
    if known is not None and known.agent.pubkey != operator.pubkey:
        raise UnsafeHome(
            f"the token in operator.token belongs to {known.agent.display}, not to this home's operator: either "
            "operator.token or identity/local.key was exchanged; put the right ones back from a backup"
        )
    if known is not None and known.revoked_at_ms is not None:
        token = new_token()
        save(token)
        known = None
    live = [i for i in await ledger.identities() if i.operator and i.revoked_at_ms is None]
    _check_key(live, operator)
    old = [identity for identity in live if identity.token_sha256 != token_hash(token)]
    if known is None:
        if old:
            await _rotate(ledger, operator, old.pop(), token)
        else:
            await _enroll(ledger, operator, token)
    for identity in old:
        await ledger.commit(RevokeIdentity(by=operator, token_sha256=identity.token_sha256))
    return Principal(operator, operator=True, token_sha256=token_hash(token))


def _check_key(live: list[Identity], operator: AgentId) -> None:
    for identity in live:
        if identity.agent.pubkey != operator.pubkey:
            raise UnsafeHome(
                f"identity/local.key is not the key this home was made with ({identity.agent.pubkey}); "
                "put that one back from a backup"
            )


async def _rotate(ledger: IdentityLedger, operator: AgentId, old: Identity, token: str) -> None:
    await ledger.commit(
        RotateToken(
            by=operator,
            token_sha256=old.token_sha256,
            new_token_sha256=token_hash(token),
            new_token_prefix=token[:TOKEN_PREFIX_LENGTH],
        )
    )


async def _enroll(ledger: IdentityLedger, operator: AgentId, token: str) -> None:
    identity = Identity(
        agent=operator,
        token_sha256=token_hash(token),
        token_prefix=token[:TOKEN_PREFIX_LENGTH],
        registered_at_ms=ledger.now_ms(),
        operator=True,
    )
    await ledger.commit(Enroll(by=operator, identity=identity))
