"""The keys in the home: the instance's own, and those that other instances encrypt to.

    identity/local.key       the home's own key: it signs grants, and the keys of agents follow from it
    identity/instance.key    the key that other instances know; where it is missing, local.key is that key
    identity/prekeys.json    what others seal to, with the private halves
    identity/purposes.json   what signs envelopes, proofs and tokens, each certified by the key that others know
    identity/changes.json    optional: who this instance was before, each change signed by both keys; and dead keys

With a passphrase (COVENANT_PASSPHRASE, or the file that COVENANT_PASSPHRASE_FILE names) the first four are locked,
and files that are not locked yet are locked in place. A locked key is never replaced. Prekeys and purpose keys that
cannot be read are replaced by new ones.

An identity is changed in two steps: the signed change is saved, then the new key. Until the key is saved, the change
does not count: changes in the file beyond the present key are ignored.

Only the holder of the home's lock writes. Unlocking takes half a second of a processor: call it from a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from covenant.daemon.environment import PASSPHRASE_FILE_VARIABLE, PASSPHRASE_VARIABLE
from covenant.daemon.home import (
    KEY_NAME,
    LockedHome,
    UnsafeHome,
    drop_unfinished,
    is_there,
    make_key_file,
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
    KeyCertificate,
    KeyRevocation,
    Prekey,
)
from covenant.seal.identity import (
    PrivatePrekey,
    chain_to,
    instance_id,
    new_prekey,
    prekey_of,
    sign_bundle,
    sign_change,
    sign_revocation,
)
from covenant.seal.keys import (
    COST,
    TOKEN_PREFIX_LENGTH,
    KeyLocked,
    Locker,
    new_private_key,
    new_token,
    public_key,
    token_hash,
)
from covenant.seal.purpose_keys import PurposeKey, PurposeKeySet
from covenant.seal.suites import SUITES
from covenant.wire.peers import Introduction

PREKEYS_NAME: Final = "identity/prekeys.json"
PURPOSES_NAME: Final = "identity/purposes.json"
INSTANCE_NAME: Final = "identity/instance.key"
CHANGES_NAME: Final = "identity/changes.json"
CHANGE_NAME: Final = "identity/change.json"
"""The file of earlier releases: one change, made by hand."""
FILE_BYTES_MAX: Final = 32_768
KEY_BYTES: Final = 32
LOCKED_MARK: Final = b"covenant-locked-key-"
"""A part of every secret that is locked with a passphrase, in any version of the format."""
PASSPHRASE_BYTES_MAX: Final = 4_096

D = TypeVar("D", bound=msgspec.Struct)
T = TypeVar("T")

log = logging.getLogger(__name__)
OPERATOR_DISPLAY: Final = "operator@local"


class _StoredPrekey(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    prekey: Prekey
    private_key: str
    """In hex."""


class _StoredHybridPrekey(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Without the expanded key, which is long and derived from the seed."""

    seed: str
    """In hex."""
    not_before_ms: int
    not_after_ms: int
    signature: str


class _StoredPrekeys(msgspec.Struct, frozen=True, omit_defaults=True):
    prekeys: tuple[_StoredPrekey, ...]
    hybrid: tuple[_StoredHybridPrekey, ...] = ()
    """A field of its own, since earlier releases read the file, too, and know only the first suite."""


class _StoredPurpose(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    certificate: KeyCertificate
    private_key: str
    """In hex."""


class _StoredPurposes(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    keys: tuple[_StoredPurpose, ...]
    void_before_ms: int = 0


class PastIdentities(msgspec.Struct, frozen=True, omit_defaults=True):
    """`changes`: the newest last. `revocations`: keys that are dead. `noted`: the last id that the audit knows of."""

    changes: tuple[IdentityChange, ...] = ()
    revocations: tuple[KeyRevocation, ...] = ()
    noted: str | None = None


def find_passphrase(variables: Mapping[str, str]) -> str | None:
    """None if neither variable is set. Raises SettingsError and UnsafeHome."""
    passphrase, named = variables.get(PASSPHRASE_VARIABLE, ""), variables.get(PASSPHRASE_FILE_VARIABLE, "")
    if passphrase and named:
        raise SettingsError(f"{PASSPHRASE_VARIABLE} and {PASSPHRASE_FILE_VARIABLE} are both set; keep one")
    if not named:
        return passphrase or None
    return read_passphrase(Path(named).expanduser(), PASSPHRASE_FILE_VARIABLE)


def read_passphrase(path: Path, named_by: str) -> str:
    """From a file for its owner alone. Raises SettingsError and UnsafeHome."""
    if not is_there(path):
        raise SettingsError(f"{named_by}: there is no file {path}; name the file that has the passphrase")
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
        self._purposes_path = home / PURPOSES_NAME
        self._instance_path = home / INSTANCE_NAME
        self._changes_path = home / CHANGES_NAME
        self._change_path = home / CHANGE_NAME
        self._cost = cost
        self._locker = self._make_locker(passphrase)

    @property
    def locked(self) -> bool:
        """Whether a key in the home needs a passphrase."""
        return is_there(self._key_path) and _is_locked(read_secret_bytes(self._key_path, FILE_BYTES_MAX))

    @property
    def has_passphrase(self) -> bool:
        return self._locker is not None

    def seal(self, text: str) -> str:
        """Encrypts a text with the passphrase, to be stored outside of the home."""
        assert self._locker is not None
        return self._sealed(text)

    def unseal(self, locked: str, named: str) -> bytes:
        """Unlocks a text. Raises LockedHome, which says what `named` needs."""
        return _unlock(Path(named), locked.encode(), self._locker)

    def read_key(self) -> bytes | None:
        """None if this home has none yet. Raises LockedHome and UnsafeHome."""
        return self._read_key(self._key_path)

    def read_instance_key(self) -> bytes | None:
        """The key that other instances know. None if it is that of the home."""
        return self._read_key(self._instance_path)

    def _read_key(self, path: Path, *lockers: Locker | None) -> bytes | None:
        """By default with the passphrase in use."""
        if not is_there(path):
            return None
        data = _unlock(path, read_secret_bytes(path, FILE_BYTES_MAX), *(lockers or (self._locker,)))
        try:
            key = bytes.fromhex(data.decode())
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise UnsafeHome(f"{path} holds no key of {KEY_BYTES} bytes in hex; put it back from a backup")
        return key

    def lock_key(self) -> bool:
        """Locks the keys that are not locked yet, if there is a passphrase. Returns whether it locked any."""
        if self._locker is None:
            return False
        unlocked = [
            path
            for path in (self._key_path, self._instance_path)
            if is_there(path) and not _is_locked(read_secret_bytes(path, FILE_BYTES_MAX))
        ]
        for path in unlocked:
            if (key := self._read_key(path)) is not None:
                self._save(path, key.hex())
        return bool(unlocked)

    def relock(self, passphrase: str | None) -> bool:
        """Locks all secrets with this passphrase from now on, or with none. Raises LockedHome and UnsafeHome.

        Returns False if the prekeys open with neither passphrase: they stay, and the next start makes new ones. Prekeys
        are changed first: if this is interrupted between the two, the key opens as before, and a repeated call does the
        rest: an earlier try that was interrupted may have locked a file with the new passphrase already.
        """
        key = self.read_key()
        if key is None:
            raise UnsafeHome(f"{self._key_path} is not there; put it back from a backup")
        lockers = (self._locker, self._make_locker(passphrase))
        self._locker = lockers[1]
        own, kept = self._read_key(self._instance_path, *lockers), True
        if own is not None:
            self._save(self._instance_path, own.hex())
        for path, decode in ((self._prekeys_path, decode_prekeys), (self._purposes_path, decode_purpose_keys)):
            if not is_there(path):
                continue
            try:
                data = _unlock(path, read_secret_bytes(path, FILE_BYTES_MAX), *lockers)
                decode(data)
            except (ValueError, LockedHome):
                kept = False
            else:
                self._save(path, data.decode())
        self._save(self._key_path, key.hex())
        return kept

    def make_key(self, new_key: Callable[[], bytes]) -> bytes:
        """Makes the first key. Only for a ledger without identities: signatures of another key would be worthless."""
        return self._make_key(self._key_path, new_key)

    def make_instance_key(self, new_key: Callable[[], bytes]) -> bytes:
        """Makes a key for the instance, unless there is one. Only if no other instance knows the home's key yet."""
        return self._make_key(self._instance_path, new_key)

    def _make_key(self, path: Path, new_key: Callable[[], bytes]) -> bytes:
        make_key_file(path, self._sealed(new_key().hex()))
        key = self._read_key(path)
        assert key is not None
        return key

    def read_prekeys(self) -> Sequence[PrivatePrekey]:
        """Raises UnsafeHome if others can read or replace them. A start replaces prekeys that it cannot read."""
        return self._read_replaceable(self._prekeys_path, decode_prekeys, "keystore.prekeys_replaced") or ()

    def read_purpose_keys(self) -> PurposeKeySet:
        """Raises UnsafeHome if others can read or replace them. A start replaces purpose keys that it cannot read."""
        event = "keystore.purpose_keys_replaced"
        return self._read_replaceable(self._purposes_path, decode_purpose_keys, event) or PurposeKeySet()

    def _read_replaceable(self, path: Path, decode: Callable[[bytes], T], event: str) -> T | None:
        """None if there are no keys, or none that can be read: that is logged as `event`. Locks unlocked keys."""
        drop_unfinished(path)
        if not is_there(path):
            return None
        data = read_secret_bytes(path, FILE_BYTES_MAX)
        try:
            keys = decode(_unlock(path, data, self._locker))
        except (ValueError, LockedHome) as wrong:
            log.warning(event, extra={"path": str(path), "reason": str(wrong)})
            return None
        if self._locker is not None and not _is_locked(data):
            self._save(path, data.decode())
        return keys

    def check_prekeys(self) -> None:
        """Raises UnsafeHome if others can read or replace the prekeys or the purpose keys."""
        for path in (self._prekeys_path, self._purposes_path):
            if is_there(path):
                read_secret_bytes(path, FILE_BYTES_MAX)

    def save_prekeys(self, prekeys: Sequence[PrivatePrekey]) -> None:
        self._save(self._prekeys_path, encode_prekeys(prekeys))

    def save_purpose_keys(self, kept: PurposeKeySet) -> None:
        self._save(self._purposes_path, encode_purpose_keys(kept))

    def drop_prekeys(self) -> None:
        """Erases the prekeys: they were moved elsewhere, together with the ledger whose messages they open."""
        drop_unfinished(self._prekeys_path)
        self._prekeys_path.unlink(missing_ok=True)

    def read_past(self) -> PastIdentities:
        """The instance's former identities. Peers that are shown them check the signatures."""
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
        """Saves durably, the new key last: until that is saved, the instance keeps its identity."""
        drop_unfinished(self._changes_path)
        save_secret(self._changes_path, msgspec.json.encode(past).decode())
        self._save(self._instance_path, new_key.hex())

    def note_identity(self, past: PastIdentities) -> None:
        """Notes that the audit has the present identity."""
        save_secret(self._changes_path, msgspec.json.encode(past).decode())

    def _make_locker(self, passphrase: str | None) -> Locker | None:
        return Locker(passphrase, cost=self._cost) if passphrase is not None else None

    def _save(self, path: Path, text: str) -> None:
        make_owned_folder(path.parent, exist_ok=True)
        save_secret(path, self._sealed(text))
        # Unfinished files of an earlier try may be locked less safely.
        drop_unfinished(path)

    def _sealed(self, text: str) -> str:
        """The text as it is saved: locked if there is a passphrase."""
        return text if self._locker is None else self._locker.lock(text.encode()).decode().strip()


def change_identity(keystore: Keystore, now_ms: int, *, compromised: bool) -> tuple[InstanceId, InstanceId]:
    """Makes a new identity key, which the present key names as its successor. Returns the old id and the new one."""
    key, past = _identity_key(keystore), keystore.read_past()
    before = instance_id(public_key(key))
    new_key = new_private_key()
    changes = (*chain_to(past.changes, before), sign_change(key, new_key, now_ms))
    revocations = (*past.revocations, *((sign_revocation(key, now_ms),) if compromised else ()))
    kept = PastIdentities(changes[-CHANGES_MAX:], revocations[-CHANGES_MAX:], past.noted)
    keystore.save_identity(kept, new_key)
    return before, instance_id(public_key(new_key))


def write_revocation(keystore: Keystore, now_ms: int) -> tuple[InstanceId, str]:
    """The instance's id, and a signed revocation that anybody can show to its peers."""
    key = _identity_key(keystore)
    shown = sign_bundle(key, (new_prekey(key, now_ms).prekey,), now_ms)
    introduction = Introduction(keys=shown, revocations=(sign_revocation(key, now_ms),))
    return InstanceId(shown.id), msgspec.json.encode(introduction).decode()


def _identity_key(keystore: Keystore) -> bytes:
    key = keystore.read_instance_key() or keystore.read_key()
    if key is None:
        raise UnsafeHome("this home has no key yet; the first start makes one")
    return key


def _is_locked(data: bytes) -> bool:
    return LOCKED_MARK in data


def _unlock(path: Path, data: bytes, *lockers: Locker | None) -> bytes:
    """The secret, by the first of the lockers that opens it; as it is if it is not locked. Raises LockedHome."""
    if not _is_locked(data):
        return data.strip()
    why = ""
    for locker in filter(None, lockers):
        try:
            return locker.unlock(data)
        except KeyLocked as locked:
            why = (
                why or f"{path} stays locked: {locked}; set the right {PASSPHRASE_VARIABLE}, or put back a backup of it"
            )
    way_out = f"set {PASSPHRASE_VARIABLE}, or {PASSPHRASE_FILE_VARIABLE} to where it is"
    raise LockedHome(why or f"{path} is locked with a passphrase; {way_out}")


def encode_prekeys(prekeys: Sequence[PrivatePrekey]) -> str:
    kept = _StoredPrekeys(
        tuple(_StoredPrekey(each.prekey, each.private_key.hex()) for each in prekeys if each.prekey.suite == SUITE),
        tuple(_stored_hybrid(each) for each in prekeys if each.prekey.suite == HYBRID_SUITE),
    )
    return msgspec.json.encode(kept).decode()


def decode_prekeys(data: bytes) -> tuple[PrivatePrekey, ...]:
    """Raises ValueError if the bytes are no prekeys."""
    read = msgspec.json.decode(data, type=_StoredPrekeys)
    hybrid = read.hybrid if HYBRID_SUITE in SUITES else ()
    return (
        *(PrivatePrekey(each.prekey, bytes.fromhex(each.private_key)) for each in read.prekeys),
        *(
            prekey_of(bytes.fromhex(each.seed), HYBRID_SUITE, each.not_before_ms, each.not_after_ms, each.signature)
            for each in hybrid
        ),
    )


def encode_purpose_keys(kept: PurposeKeySet) -> str:
    keys = tuple(_StoredPurpose(each.certificate, each.private_key.hex()) for each in kept.keys if each.certificate)
    return msgspec.json.encode(_StoredPurposes(keys, kept.void_before_ms)).decode()


def decode_purpose_keys(data: bytes) -> PurposeKeySet:
    """Raises ValueError if the bytes are no purpose keys."""
    read = msgspec.json.decode(data, type=_StoredPurposes)
    keys = tuple(PurposeKey(bytes.fromhex(each.private_key), each.certificate) for each in read.keys)
    if any(public_key(key) != certificate.key for key, certificate in keys if certificate is not None):
        raise ValueError("a certificate is of another key")
    return PurposeKeySet(keys, read.void_before_ms)


def _stored_hybrid(private: PrivatePrekey) -> _StoredHybridPrekey:
    prekey = private.prekey
    return _StoredHybridPrekey(private.private_key.hex(), prekey.not_before_ms, prekey.not_after_ms, prekey.signature)


async def admit_operator(
    ledger: IdentityLedger, operator: AgentId, token: str, save: Callable[[str], None]
) -> Principal:
    """The operator's principal. Makes `token` the operator's only live token in the ledger."""
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
