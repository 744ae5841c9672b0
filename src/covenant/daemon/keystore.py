"""The keys in the home: the instance's own, and those that other instances seal to.

    identity/local.key       the identity key
    identity/prekeys.json    what others seal to, with the private halves
    identity/change.json     optional: an earlier key names this one as its successor, signed by both

With a passphrase (COVENANT_PASSPHRASE, or the file that COVENANT_PASSPHRASE_FILE names) the first two are locked, also
in place if they are not yet. A locked key is never replaced. Prekeys that cannot be read are.

Only the holder of the home's lock writes. Unlocking takes half a second of a processor: call it from a thread.
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
    is_there,
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
        self._key_path = home / KEY_NAME
        self._prekeys_path = home / PREKEYS_NAME
        self._change_path = home / CHANGE_NAME
        self._cost = cost
        self._locker = self._make_locker(passphrase)

    @property
    def locked(self) -> bool:
        """Whether there is a key that needs a passphrase."""
        return is_there(self._key_path) and LOCKED_MARK in read_secret(self._key_path)

    @property
    def has_passphrase(self) -> bool:
        return self._locker is not None

    def seal(self, text: str) -> str:
        """Locked with the passphrase, for keeping elsewhere."""
        assert self._locker is not None
        return self._sealed(text)

    def unseal(self, locked: str, named: str) -> bytes:
        """Raises LockedHome, which says what `named` needs."""
        return _unlock(self._locker, Path(named), locked.encode())

    def read_key(self) -> bytes | None:
        """None if this home has none yet. Raises LockedHome and UnsafeHome."""
        if not is_there(self._key_path):
            return None
        text = read_secret(self._key_path)
        if self._locker is not None and LOCKED_MARK in text:
            text = _unlock(self._locker, self._key_path, text.encode()).decode("ascii", "replace")
        return parse_key(self._key_path, text)

    def lock_key(self) -> bool:
        """Lock a key that is not locked yet, if there is a passphrase. Returns whether this was done."""
        text = read_secret(self._key_path)
        if self._locker is None or LOCKED_MARK in text:
            return False
        self._save_key(parse_key(self._key_path, text))
        return True

    def relock(self, passphrase: str | None) -> bool:
        """Lock both secrets with this passphrase from now on, or with none. Raises LockedHome and UnsafeHome.

        Returns False if the prekeys open with neither passphrase: they stay, and the next start makes new ones. They go
        first: if this is cut off between the two, the key opens as before, and doing it again does the rest.
        """
        key = self.read_key()
        if key is None:
            raise UnsafeHome(f"{self._key_path} is not there; put it back from a backup")
        before, self._locker = self._locker, self._make_locker(passphrase)
        kept = self._relock_prekeys(before)
        self._save_key(key)
        return kept

    def _relock_prekeys(self, before: Locker | None) -> bool:
        path = self._prekeys_path
        if not is_there(path):
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
        save_secret(self._key_path, self._sealed(key.hex()))
        # What an earlier try left may be locked with less.
        drop_unfinished(self._key_path)

    def make_key(self, new_key: Callable[[], bytes]) -> bytes:
        """A first key. Only for a ledger that knows nobody yet: what another key has signed would be worthless."""
        make_key_file(self._key_path, self._sealed(new_key().hex()))
        key = self.read_key()
        assert key is not None
        return key

    def read_prekeys(self) -> Sequence[PrivatePrekey]:
        """Raises UnsafeHome if others can read or replace them."""
        path = self._prekeys_path
        drop_unfinished(path)
        if not is_there(path):
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
        """Raises UnsafeHome if others can read or replace them. What cannot be read is made anew by a start."""
        if is_there(self._prekeys_path):
            read_secret_bytes(self._prekeys_path, FILE_BYTES_MAX)

    def save_prekeys(self, prekeys: Sequence[PrivatePrekey]) -> None:
        kept = _KeptPrekeys(tuple(_Kept(each.prekey, each.private_key.hex()) for each in prekeys))
        self._prekeys_path.parent.mkdir(mode=0o700, exist_ok=True)
        save_secret(self._prekeys_path, self._sealed(msgspec.json.encode(kept).decode()))

    def read_change(self) -> IdentityChange | None:
        """The change of identity that this key came by. Whoever is shown it checks its signatures."""
        path = self._change_path
        try:
            return msgspec.json.decode(path.read_bytes()[:FILE_BYTES_MAX], type=IdentityChange)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as wrong:
            raise UnsafeHome(f"{path} holds no change of identity: {wrong}; remove it, or put it right") from None

    def _make_locker(self, passphrase: str | None) -> Locker | None:
        return Locker(passphrase, cost=self._cost) if passphrase is not None else None

    def _sealed(self, text: str) -> str:
        """The text as it is kept: locked, if there is a passphrase."""
        return text if self._locker is None else self._locker.lock(text.encode()).decode().strip()


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
    """The operator's principal. Makes `token` the one live token that the ledger knows of it."""
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
        sha256, prefix = token_hash(token), token[:TOKEN_PREFIX_LENGTH]
        if old:
            replaced = old.pop().token_sha256
            await ledger.commit(
                RotateToken(by=operator, token_sha256=replaced, new_token_sha256=sha256, new_token_prefix=prefix)
            )
        else:
            now_ms = ledger.now_ms()
            identity = Identity(
                agent=operator, token_sha256=sha256, token_prefix=prefix, registered_at_ms=now_ms, operator=True
            )
            await ledger.commit(Enroll(by=operator, identity=identity))
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
