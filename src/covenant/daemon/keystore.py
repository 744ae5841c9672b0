"""The keys in the home: the instance's own, and those that other instances seal to.

    identity/local.key       the home's own key: it signs grants, and the keys of agents follow from it
    identity/instance.key    the key that other instances know; where it is missing, local.key is that key
    identity/prekeys.json    what others seal to, with the private halves
    identity/changes.json    optional: who this instance was before, each change signed by both keys; and dead keys

With a passphrase (COVENANT_PASSPHRASE, or the file that COVENANT_PASSPHRASE_FILE names) the first three are locked,
also in place if they are not yet. A locked key is never replaced. Prekeys that cannot be read are.

An identity is changed in two steps: the signed change is saved, then the new key. Until the key is there, the change
was not made: what the file says beyond the present key is left out.

Only the holder of the home's lock writes. Unlocking takes half a second of a processor: call it from a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

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
from covenant.ledger.embedded.disk import make_owned_folder
from covenant.ledger.machine.identity_commands import Enroll, RevokeIdentity, RotateToken
from covenant.model.errors import SettingsError
from covenant.model.grant import Identity
from covenant.model.ids import AgentId
from covenant.model.peers.instance import (
    CHANGES_MAX,
    HYBRID_SUITE,
    SUITE,
    IdentityChange,
    InstanceId,
    KeyRevocation,
    Prekey,
)
from covenant.seal.identity import PrivatePrekey, instance_id, new_prekey, prekey_of, sign_bundle, sign_change
from covenant.seal.identity_chain import chain_to, sign_revocation
from covenant.seal.keys import (
    COST,
    TOKEN_PREFIX_LENGTH,
    KeyLocked,
    Locker,
    is_locked,
    new_private_key,
    new_token,
    public_key,
    token_hash,
)
from covenant.seal.suites import SUITES
from covenant.wire.peers import Introduction

PREKEYS_NAME: Final = "identity/prekeys.json"
INSTANCE_NAME: Final = "identity/instance.key"
CHANGES_NAME: Final = "identity/changes.json"
CHANGE_NAME: Final = "identity/change.json"
"""What earlier releases read: one change, that somebody made by hand."""
FILE_BYTES_MAX: Final = 32_768
PASSPHRASE_BYTES_MAX: Final = 4_096

D = TypeVar("D", bound=msgspec.Struct)

log = logging.getLogger(__name__)


class _Kept(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    prekey: Prekey
    private_key: str
    """In hex."""


class _KeptHybrid(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Without what follows from the seed, which is long."""

    seed: str
    """In hex."""
    not_before_ms: int
    not_after_ms: int
    signature: str


class _KeptPrekeys(msgspec.Struct, frozen=True, omit_defaults=True):
    prekeys: tuple[_Kept, ...]
    hybrid: tuple[_KeptHybrid, ...] = ()
    """Apart, since earlier releases read the file too and know no others than the first."""


class PastIdentities(msgspec.Struct, frozen=True):
    """`changes`: the newest last. `revocations`: keys that are dead."""

    changes: tuple[IdentityChange, ...] = ()
    revocations: tuple[KeyRevocation, ...] = ()


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
        self._instance_path = home / INSTANCE_NAME
        self._changes_path = home / CHANGES_NAME
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
        return self._read(self._key_path)

    def read_instance_key(self) -> bytes | None:
        """The key that other instances know. None if it is that of the home."""
        return self._read(self._instance_path)

    def _read(self, path: Path) -> bytes | None:
        if not is_there(path):
            return None
        text = read_secret(path)
        if self._locker is not None and LOCKED_MARK in text:
            text = _unlock(self._locker, path, text.encode()).decode("ascii", "replace")
        return parse_key(path, text)

    def lock_key(self) -> bool:
        """Lock the keys that are not locked yet, if there is a passphrase. Returns whether one was."""
        if self._locker is None:
            return False
        unlocked = [
            path
            for path in (self._key_path, self._instance_path)
            if is_there(path) and LOCKED_MARK not in read_secret(path)
        ]
        for path in unlocked:
            self._save_key(parse_key(path, read_secret(path)), path)
        return bool(unlocked)

    def relock(self, passphrase: str | None) -> bool:
        """Lock both secrets with this passphrase from now on, or with none. Raises LockedHome and UnsafeHome.

        Returns False if the prekeys open with neither passphrase: they stay, and the next start makes new ones. They go
        first: if this is cut off between the two, the key opens as before, and doing it again does the rest.
        """
        key = self.read_key()
        if key is None:
            raise UnsafeHome(f"{self._key_path} is not there; put it back from a backup")
        before, self._locker = self._locker, self._make_locker(passphrase)
        self._relock_instance(before)
        kept = self._relock_prekeys(before)
        self._save_key(key, self._key_path)
        return kept

    def _relock_instance(self, before: Locker | None) -> None:
        path = self._instance_path
        if not is_there(path):
            return
        text = read_secret(path)
        if LOCKED_MARK in text:
            try:
                text = _unlock(before, path, text.encode()).decode("ascii", "replace")
            except LockedHome:  # an earlier try came as far as this
                text = _unlock(self._locker, path, text.encode()).decode("ascii", "replace")
        self._save_key(parse_key(path, text), path)

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

    def _save_key(self, key: bytes, path: Path) -> None:
        save_secret(path, self._sealed(key.hex()))
        # What an earlier try left may be locked with less.
        drop_unfinished(path)

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
        kept = _KeptPrekeys(
            tuple(_Kept(each.prekey, each.private_key.hex()) for each in prekeys if each.prekey.suite == SUITE),
            tuple(_kept_hybrid(each) for each in prekeys if each.prekey.suite == HYBRID_SUITE),
        )
        make_owned_folder(self._prekeys_path.parent, exist_ok=True)
        save_secret(self._prekeys_path, self._sealed(msgspec.json.encode(kept).decode()))

    def make_instance_key(self, new_key: Callable[[], bytes]) -> bytes:
        """A key of its own for this instance, unless there is one. Only where no other instance knows the home's."""
        make_key_file(self._instance_path, self._sealed(new_key().hex()))
        key = self.read_instance_key()
        assert key is not None
        return key

    def read_past(self) -> PastIdentities:
        """Whom this instance has been. Whoever is shown it checks its signatures."""
        past = self._read_document(self._changes_path, PastIdentities)
        if past is None:
            change = self._read_document(self._change_path, IdentityChange)
            past = PastIdentities(changes=(change,) if change is not None else ())
        return past

    def _read_document(self, path: Path, kind: type[D]) -> D | None:
        try:
            return msgspec.json.decode(path.read_bytes()[:FILE_BYTES_MAX], type=kind)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as wrong:
            raise UnsafeHome(f"{path} holds no change of identity: {wrong}; remove it, or put it right") from None

    def save_identity(self, past: PastIdentities, new_key: bytes) -> None:
        """Durably, the new key last: before it is there, this instance is who it was."""
        drop_unfinished(self._changes_path)
        drop_unfinished(self._instance_path)
        save_secret(self._changes_path, msgspec.json.encode(past).decode())
        self._save_key(new_key, self._instance_path)

    def _make_locker(self, passphrase: str | None) -> Locker | None:
        return Locker(passphrase, cost=self._cost) if passphrase is not None else None

    def _sealed(self, text: str) -> str:
        """The text as it is kept: locked, if there is a passphrase."""
        return text if self._locker is None else self._locker.lock(text.encode()).decode().strip()


def change_identity(keystore: Keystore, now_ms: int, *, compromised: bool) -> tuple[InstanceId, InstanceId]:
    """Another identity key, which the present one names as its successor. Who this instance was, and who it is."""
    key, past = _identity_key(keystore), keystore.read_past()
    before = instance_id(public_key(key))
    new_key = new_private_key()
    changes = (*chain_to(past.changes, before), sign_change(key, new_key, now_ms))
    revocations = (*past.revocations, *((sign_revocation(key, now_ms),) if compromised else ()))
    keystore.save_identity(PastIdentities(changes[-CHANGES_MAX:], revocations[-CHANGES_MAX:]), new_key)
    return before, instance_id(public_key(new_key))


def write_revocation(keystore: Keystore, now_ms: int) -> tuple[InstanceId, str]:
    """This instance's id, and what anybody can show a peer of it when its key is dead."""
    key = _identity_key(keystore)
    shown = sign_bundle(key, (new_prekey(key, now_ms).prekey,), now_ms)
    said = Introduction(keys=shown, revocations=(sign_revocation(key, now_ms),))
    return InstanceId(shown.id), msgspec.json.encode(said).decode()


def _identity_key(keystore: Keystore) -> bytes:
    key = keystore.read_instance_key() or keystore.read_key()
    if key is None:
        raise UnsafeHome("this home has no key yet; the first start makes one")
    return key


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
    hybrid = read.hybrid if HYBRID_SUITE in SUITES else ()
    return (
        *(PrivatePrekey(each.prekey, bytes.fromhex(each.private_key)) for each in read.prekeys),
        *(
            prekey_of(bytes.fromhex(each.seed), HYBRID_SUITE, each.not_before_ms, each.not_after_ms, each.signature)
            for each in hybrid
        ),
    )


def _kept_hybrid(made: PrivatePrekey) -> _KeptHybrid:
    prekey = made.prekey
    return _KeptHybrid(made.private_key.hex(), prekey.not_before_ms, prekey.not_after_ms, prekey.signature)


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
