"""What is wrong with a home, found without a daemon: permissions, lock, settings, agents, journal, archive.

Nothing is changed. The files are judged by what opens them at a start, the journal on a copy, so that what is found
here is what a start would say. A home that a daemon has open is not looked into: its files change under one's hands.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from covenant.daemon.agent_files import look, read_agent
from covenant.daemon.environment import PASSPHRASE_VARIABLE
from covenant.daemon.home import (
    JOURNAL_NAME,
    KEY_NAME,
    OTHERS,
    TOKEN_NAME,
    LockedHome,
    UnsafeHome,
    read_key,
    read_token,
)
from covenant.daemon.keystore import Keystore, find_passphrase
from covenant.daemon.loading import load
from covenant.daemon.salvage import Salvage, plan
from covenant.ledger.log import snapshot
from covenant.ledger.log.archive import archived_through
from covenant.ledger.log.codec import decode_events
from covenant.ledger.log.opening import Torn, lock_home, open_journal
from covenant.ledger.log.record import Record
from covenant.ledger.log.state import LedgerState
from covenant.ledger.machine.entry import IllegalMoveError
from covenant.ledger.machine.view import Limits
from covenant.model.errors import CovenantError, Damaged, HomeLocked, Invalid, SettingsError

BACKUP = "put it back from a backup"


class Finding(NamedTuple):
    """`way_out` is empty where all is well."""

    what: str
    well: bool = True
    way_out: str = ""


class Checkup(NamedTuple):
    """`salvage` is there when the journal is damaged and something can be done about it."""

    findings: tuple[Finding, ...]
    salvage: Salvage | None = None

    @property
    def well(self) -> bool:
        return all(finding.well for finding in self.findings)


def check(home: Path, variables: Mapping[str, str]) -> Checkup:
    if not home.is_dir():
        return Checkup((Finding(f"there is no home at {home}", well=False, way_out="start one: covenant serve"),))
    findings = [*_permissions(home), *_secrets(home, variables), *_settings(home, variables), *_agent_files(home)]
    try:
        with lock_home(home):
            files, salvage = _files(home)
    except HomeLocked as locked:
        way_out = "nothing is wrong with that; stop it to have the files checked too"
        return Checkup((*findings, Finding(str(locked), way_out=way_out)))
    return Checkup((*findings, *files), salvage)


def _permissions(home: Path) -> Iterator[Finding]:
    mode = home.stat().st_mode
    if mode & 0o022:
        yield Finding(f"others may write to {home}", well=False, way_out=f"chmod 700 {home}")
    elif mode & OTHERS:
        yield Finding(f"others may look into {home}", way_out=f"if they should not: chmod 700 {home}")
    else:
        yield Finding(f"{home} is for its owner alone")


def _secrets(home: Path, variables: Mapping[str, str]) -> Iterator[Finding]:
    for name, read in ((TOKEN_NAME, _read_token), (KEY_NAME, read_key)):
        path = home / name
        if not path.exists() and not path.is_symlink():
            yield Finding(f"{name} is not there", way_out="the next start makes one")
            continue
        try:
            read(home)
        except LockedHome:
            yield _locked(home, variables)
        except UnsafeHome as unsafe:
            what, _, way_out = str(unsafe).partition("; ")
            yield Finding(what, well=False, way_out=way_out)
        else:
            yield Finding(f"{name} is there, for its owner alone")


def _locked(home: Path, variables: Mapping[str, str]) -> Finding:
    """Opened if there is a passphrase; what is locked is not changed by that."""
    try:
        passphrase = find_passphrase(variables)
        if passphrase is None:
            return Finding(f"{KEY_NAME} is there, locked", way_out=f"a start needs its {PASSPHRASE_VARIABLE}")
        Keystore(home, passphrase).read_key()
    except (UnsafeHome, SettingsError) as error:
        what, _, way_out = str(error).partition("; ")
        return Finding(what, well=False, way_out=way_out)
    return Finding(f"{KEY_NAME} is there, locked, and opens with the passphrase")


def _read_token(home: Path) -> str:
    return read_token(home / TOKEN_NAME)


def _settings(home: Path, variables: Mapping[str, str]) -> Iterator[Finding]:
    try:
        load({}, variables, home=home)
    except SettingsError as error:
        yield Finding(str(error), well=False, way_out="change it; docs/settings.md lists what is allowed")
    else:
        yield Finding("the settings can be used")


def _agent_files(home: Path) -> Iterator[Finding]:
    """Whether each says what it may; whether its tenant exists is known to a daemon alone."""
    good = 0
    for found in look(home):
        try:
            read_agent(found)
            good += 1
        except Invalid as invalid:
            what = f"{found.path.relative_to(home)}: {invalid.message}"
            yield Finding(what, well=False, way_out="change it; a running daemon reads it again by itself")
    if good:
        yield Finding(f"{good} agent file(s) can be used")


def _files(home: Path) -> tuple[list[Finding], Salvage | None]:
    """The ledger's files, as a start would open them."""
    folder, limits = home / JOURNAL_NAME, Limits()
    if not folder.exists():
        return [Finding("there is no ledger yet", way_out="the next start makes one")], None
    state, findings = LedgerState(limits), []
    try:
        found = snapshot.newest(folder)
        snapshot_seq = snapshot.load(found[1], state) if found is not None else 0
        findings.append(
            Finding(f"the snapshot holds records up to {snapshot_seq}" if found else "there is no snapshot")
        )
        archive = home / "archive.db"
        archived_seq = archived_through(archive) if archive.exists() else 0
        findings.append(Finding(f"the archive holds records up to {archived_seq}"))
    except (Damaged, CovenantError) as damaged:
        return [*findings, Finding(_told(damaged), well=False, way_out=BACKUP)], None
    try:
        torn = _open_copy(folder, state, snapshot_seq, archived_seq)
    except (Damaged, IllegalMoveError, LookupError) as damaged:
        salvage = plan(home, snapshot_seq=snapshot_seq, archived_seq=archived_seq, limits=limits)
        way_out = f"{BACKUP}, or give up what cannot be read: covenant doctor --accept-loss"
        return [*findings, Finding(f"the journal is damaged: {_told(damaged)}", well=False, way_out=way_out)], salvage
    if state.identities_by_token and not (home / KEY_NAME).exists():
        what = f"{KEY_NAME} is not there, and this home's grants are signed with it"
        findings.append(Finding(what, well=False, way_out=BACKUP))
    if torn is not None:
        what = f"the last {torn.length} bytes of the journal are torn, from record {torn.seq} on"
        findings.append(
            Finding(what, way_out="they were never acknowledged: the next start cuts them and keeps a copy")
        )
    else:
        findings.append(Finding("the journal is whole"))
    return findings, None


def _open_copy(folder: Path, state: LedgerState, snapshot_seq: int, archived_seq: int) -> Torn | None:
    def replay(record: Record) -> None:
        state.apply(decode_events(record.events), record.ts_ms, record.seq)

    with tempfile.TemporaryDirectory(prefix="covenant-") as place:
        copy = Path(place) / JOURNAL_NAME
        shutil.copytree(folder, copy)
        try:
            opened = open_journal(copy, snapshot_seq=snapshot_seq, archived_seq=archived_seq, now_ms=0, replay=replay)
        except Damaged as damaged:
            real = folder / Path(damaged.file).name
            raise Damaged(str(real), damaged.line, damaged.reason) from damaged
        return opened.torn


def _told(error: Exception) -> str:
    """What went wrong, without the advice to run what is running."""
    if isinstance(error, Damaged):
        return f"{error.file}, line {error.line}: {error.reason}"
    return str(error)
