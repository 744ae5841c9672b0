"""Checks of a ledger's files: snapshot, archive, journal, and whether they agree. Changes nothing.

The journal is read as a start reads it. SQLite checks the archive's pages for a bounded time.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

import msgspec

from covenant.daemon.doctor.ledger_repair import BACKUP, CheckFinding, Checkup, bad_finding, plan
from covenant.daemon.home import JOURNAL_NAME, KEY_NAME, UnsafeHome
from covenant.daemon.keystore import OPERATOR_DISPLAY, Keystore, find_passphrase
from covenant.exchange.access.identities import operator_agent
from covenant.ledger.embedded.archive.apply_batch import RejectedRecord, count_rejects, read_rejects
from covenant.ledger.embedded.archive.archive_file import (
    ARCHIVE_NAME,
    LAYOUTS,
    SCHEMA_VERSION,
    archived_seq_of,
    missing_parts,
)
from covenant.ledger.embedded.archive.task_packs import archived_texts
from covenant.ledger.embedded.blob_folder import BYTES, all_places, fault_at, size_at
from covenant.ledger.embedded.blob_folder import FOLDER_NAME as BLOBS_NAME
from covenant.ledger.embedded.disk import MIB
from covenant.ledger.embedded.journal import snapshot
from covenant.ledger.embedded.journal.record import Record
from covenant.ledger.embedded.journal.recovery import JournalReport, examine_journal
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.event_codec import decode_events
from covenant.ledger.machine.events import TaskFollowed, TaskSent
from covenant.model.content import File
from covenant.model.errors import Damaged, SettingsError
from covenant.model.ids import TaskId
from covenant.model.settings import Limits
from covenant.seal.keys import verify_grant

PAGES_CHECKED_S: Final = 30.0
"""How long the archive's pages are checked, which is enough for some gigabytes. The finding says if not all were."""
STEPS_BETWEEN: Final = 100_000
FAULTS_SHOWN: Final = 3
REJECTS_SHOWN: Final = 5
FILE_MARK: Final = '"type":"file"'
"""Part of the JSON of every block with a file."""

ACCEPT: Final = f"{BACKUP}, or give up what cannot be read: covenant doctor --accept-loss"
REBUILD: Final = "make the archive from the journal again: covenant doctor --rebuild-archive"


class _Archive(NamedTuple):
    """`lost`: why the archive cannot be used."""

    findings: tuple[CheckFinding, ...]
    archived_seq: int = 0
    lost: str = ""
    usable: bool = True
    rejects: tuple[RejectedRecord, ...] = ()


class _Journal(NamedTuple):
    examined: JournalReport
    before: LedgerState
    after: LedgerState
    begun: tuple[TaskId, ...]
    """Tasks of records that the archive does not have yet."""


def check_ledger(home: Path, variables: Mapping[str, str], limits: Limits) -> Checkup:
    """The caller holds the home's lock."""
    folder, findings = home / JOURNAL_NAME, list[CheckFinding]()
    special = tuple(_special_files(home, folder))
    if special:
        return Checkup(special)
    before = LedgerState(limits)
    try:
        newest = snapshot.newest(folder)
        snapshot_seq = snapshot.load(newest[1], before) if newest is not None else 0
    except Damaged as damaged:
        return Checkup((bad_finding(f"the snapshot is damaged: {_describe(damaged)}"),))
    archive = _check_archive(home / ARCHIVE_NAME)
    if not folder.exists() and not archive.archived_seq and not archive.lost:
        return Checkup((*archive.findings, CheckFinding("there is no ledger yet", way_out="the next start makes one")))
    findings.append(
        CheckFinding(f"the snapshot holds records up to {snapshot_seq}" if newest else "there is no snapshot")
    )
    findings += archive.findings
    if not archive.usable:
        return Checkup(tuple(findings))
    if not folder.exists():
        text = f"{folder} is gone, and with it all that was live: the archive holds records up to"
        findings.append(bad_finding(f"{text} {archive.archived_seq}", ACCEPT))
        return Checkup(
            tuple(findings),
            plan(home, archived_seq=archive.archived_seq, limits=limits, archive_lost=archive.lost),
        )
    try:
        journal = _read_journal(folder, before, snapshot_seq, archive.archived_seq, limits)
    except Damaged as damaged:
        findings.append(bad_finding(f"the journal is damaged: {_describe(damaged)}", ACCEPT))
        repair_plan = plan(home, archived_seq=archive.archived_seq, limits=limits, archive_lost=archive.lost)
        return Checkup(tuple(findings), repair_plan)
    findings += _report_journal(journal)
    findings += _check_keys(home, variables, journal.after)
    findings += _check_files(home / BLOBS_NAME, journal.after, None if archive.lost else home / ARCHIVE_NAME)
    contradictions: tuple[CheckFinding, ...] = ()
    if archive.archived_seq:
        try:
            contradictions = tuple(_contradictions(home / ARCHIVE_NAME, archive, journal, snapshot_seq))
        except sqlite3.Error as error:  # beyond the pages that were checked
            archive = _lost(home / ARCHIVE_NAME, str(error))
            findings += archive.findings
    if archive.lost:
        repair_plan = plan(home, archived_seq=0, limits=limits, archive_lost=archive.lost)
        return Checkup(tuple(findings), repair_plan)
    return Checkup((*findings, *contradictions), rebuild=bool(contradictions or archive.rejects))


def _special_files(home: Path, folder: Path) -> Iterator[CheckFinding]:
    """Finds pipes, folders and dangling links in the place of the ledger's files: to open a pipe waits for ever."""
    archive = (home / f"{ARCHIVE_NAME}{suffix}" for suffix in ("", "-wal", "-shm"))
    for path in (*archive, *(folder.glob("*.jsonl") if folder.is_dir() else ())):
        if not path.is_file() and (path.exists() or path.is_symlink()):
            way_out = f"move it away, or put the file back from a backup: {path}"
            yield bad_finding(f"{path} is not a file", way_out)


def _read_journal(folder: Path, before: LedgerState, snapshot_seq: int, archived_seq: int, limits: Limits) -> _Journal:
    after = LedgerState(limits)
    newest = snapshot.newest(folder)
    if newest is not None:
        snapshot.load(newest[1], after)
    begun: list[TaskId] = []

    def replay(record: Record) -> None:
        events = decode_events(record.events)
        after.apply(events, record.ts_ms, record.seq)
        if record.seq > archived_seq:
            begun.extend(event.task_id for event in events if isinstance(event, (TaskSent, TaskFollowed)))

    examined = examine_journal(folder, snapshot_seq=snapshot_seq, archived_seq=archived_seq, replay=replay)
    return _Journal(examined, before, after, tuple(begun))


def _report_journal(journal: _Journal) -> Iterator[CheckFinding]:
    bad = journal.examined.bad
    if bad is None:
        yield CheckFinding("the journal is whole")
        return
    what = f"the last {journal.examined.torn_bytes} bytes of the journal are torn, from record {bad.seq} on"
    yield CheckFinding(what, way_out="they were never acknowledged: the next start cuts them and keeps a copy")


def _check_keys(home: Path, variables: Mapping[str, str], state: LedgerState) -> Iterator[CheckFinding]:
    if not state.identities_by_token:
        return
    if not (home / KEY_NAME).exists():
        what = f"{KEY_NAME} is not there, and this home's grants are signed with it"
        yield bad_finding(what)
        return
    try:
        key = Keystore(home, find_passphrase(variables)).read_key()
    except (UnsafeHome, SettingsError):
        return  # the check of secrets reports it
    if key is None:
        return
    ours = operator_agent(OPERATOR_DISPLAY, key).pubkey
    for identity in state.identities_by_token.values():
        if identity.operator and identity.revoked_at_ms is None and identity.agent.pubkey != ours:
            what = f"{KEY_NAME} is not the key this home was made with ({identity.agent.pubkey})"
            yield bad_finding(what, "put the journal and identity/ back from one backup")
            return
    forged = [
        grant
        for grant in state.grants_by_signature.values()
        if grant.revoked_at_ms is None and not (grant.granted_by.pubkey == ours and verify_grant(grant))
    ]
    if forged:
        named = ", ".join(f"{grant.subject.display} {grant.action}" for grant in forged[:FAULTS_SHOWN])
        what = f"{len(forged)} grant(s) are not signed by {KEY_NAME}: {named}"
        yield bad_finding(what, "put the journal and identity/ back from one backup")


def _check_files(folder: Path, state: LedgerState, archive: Path | None) -> Iterator[CheckFinding]:
    """Reads every file of the blob store, and checks that those that tasks refer to are there."""
    yield from _check_live(folder, state)
    with closing(_open(archive)) if archive is not None and archive.exists() else nullcontext() as db:
        # The next start brings an older layout up to date.
        current = db is not None and db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
        yield from _check_stored(folder, state, db if current else None)
        if db is not None and current:
            try:
                yield from _check_finished(folder, db)
            except (sqlite3.Error, msgspec.MsgspecError, zlib.error) as error:
                yield bad_finding(f"the files of finished tasks cannot be checked: {error}", REBUILD)


def _check_stored(folder: Path, state: LedgerState, db: sqlite3.Connection | None) -> Iterator[CheckFinding]:
    count = size = orphans = 0
    for place in all_places(folder):
        fault, count, size = fault_at(place, hashes=True), count + 1, size + (size_at(place) or 0)
        if fault is not None:
            yield bad_finding(f"the file {place.relative_to(folder.parent)} is broken ({fault.kind}): {fault.what}")
        elif db is not None:
            tasks = [TaskId(each.name) for each in place.iterdir() if each.name != BYTES]
            orphans += not any(task in state.entries or _number_of(db, task) is not None for task in tasks)
    if count:
        yield CheckFinding(f"{count} files of tasks have {size / MIB:,.1f} MiB")
    if orphans:
        yield CheckFinding(f"no task refers to {orphans} of them: each is deleted once it is older than blobs.kept_ms")


def _check_finished(folder: Path, db: sqlite3.Connection) -> Iterator[CheckFinding]:
    lost: dict[str, str] = {}
    for text in archived_texts(db):
        value = msgspec.json.decode(text) if FILE_MARK in text else None
        # Only blocks of tasks, updates and results count; the contents of a block are user data.
        blocks = (value.get("parts") or value.get("content") or ()) if isinstance(value, dict) else ()
        for block in blocks:
            if block.get("type") == "file" and "space" in block:
                file = msgspec.convert(block, File)
                if size_at(folder / file.space / file.sha256[:2] / file.sha256) != file.size:
                    lost[file.sha256] = file.task_id
    if lost:
        shown = ", ".join(f"{sha256} of {task_id}" for sha256, task_id in list(lost.items())[:FAULTS_SHOWN])
        way_out = f"put {folder.name}/ back from a backup"
        yield bad_finding(f"{len(lost)} file(s) of finished tasks are missing: {shown}", way_out)


def _check_live(folder: Path, state: LedgerState) -> Iterator[CheckFinding]:
    for entry in state.entries.values():
        for part in entry.task.parts:
            if isinstance(part, File):
                place = folder / part.space / part.sha256[:2] / part.sha256
                if (found := size_at(place)) != part.size:
                    text = "is missing" if found is None else f"has {found} bytes instead of {part.size}"
                    yield bad_finding(f"the file {part.sha256} of the live task {entry.task.id} {text}")


def _check_archive(path: Path) -> _Archive:
    if not path.exists():
        return _Archive((CheckFinding("there is no archive", way_out="the next start makes one"),))
    try:
        with closing(_open(path)) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in LAYOUTS:
                what = f"the archive has layout {version}, and this program knows {SCHEMA_VERSION}"
                way_out = "run the version that wrote it"
                return _Archive((bad_finding(what, way_out),), usable=False)
            faults, finished = _check_pages(db)
            faults = faults or _faults_of_layout(db, version)
            if faults:
                return _lost(path, "; ".join(faults))
            archived_seq = archived_seq_of(db) if version else 0
            findings = [CheckFinding(f"the archive holds records up to {archived_seq}")]
            if not finished:
                text = f"its pages were checked for {PAGES_CHECKED_S:g} s without a fault, not all of them"
                findings.append(
                    CheckFinding(text, way_out="sqlite3 archive.db 'PRAGMA integrity_check' checks the rest")
                )
            rejects = tuple(read_rejects(db, REJECTS_SHOWN)) if _has_rejects(db) else ()
            if rejects:
                findings += _report_rejects(rejects, count_rejects(db))
            return _Archive(tuple(findings), archived_seq, rejects=rejects)
    except (sqlite3.Error, TypeError, ValueError) as error:
        return _lost(path, str(error))


def _open(path: Path) -> sqlite3.Connection:
    """Opens the archive for reading. On a read-only disk, without its write-ahead log."""
    uri = path.absolute().as_uri()
    db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=1.0, isolation_level=None)
    try:
        db.execute("PRAGMA schema_version").fetchone()
    except sqlite3.OperationalError:
        db.close()
        db = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True, isolation_level=None)
    except BaseException:
        db.close()
        raise
    return db


def _lost(path: Path, why: str) -> _Archive:
    way_out = f"{BACKUP}, or give up the history that is only there: covenant doctor --accept-loss"
    what = f"the archive is damaged: {path}: {why}"
    return _Archive((bad_finding(what, way_out),), lost=why)


def _check_pages(db: sqlite3.Connection) -> tuple[list[str], bool]:
    """The faults, and whether all pages were checked. `quick_check` would not compare indexes with their tables."""
    until_s = monotonic() + PAGES_CHECKED_S
    db.set_progress_handler(lambda: monotonic() > until_s, STEPS_BETWEEN)
    try:
        found = [str(row[0]) for row in db.execute(f"PRAGMA integrity_check({FAULTS_SHOWN})")]
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
            return [], False
        raise
    finally:
        db.set_progress_handler(None, 0)
    return [fault for fault in found if fault != "ok"], True


def _faults_of_layout(db: sqlite3.Connection, version: int) -> list[str]:
    """What is missing in the archive's present layout. A start brings an earlier layout up to date."""
    if version == SCHEMA_VERSION:
        return [f"{part} is missing" for part in missing_parts(db)[:FAULTS_SHOWN]]
    if version == 0 and db.execute("SELECT 1 FROM sqlite_schema").fetchone() is not None:
        return ["it has tables, but user_version, the number of its layout, is 0"]
    return []


def _has_rejects(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'rejects'").fetchone() is not None


def _report_rejects(rejects: tuple[RejectedRecord, ...], count: int) -> Iterator[CheckFinding]:
    shown = "; ".join(f"record {reject.seq}: {reject.error}" for reject in rejects)
    more = f"; and {count - len(rejects)} more" if count > len(rejects) else ""
    what = f"the archive has set aside {count} record(s) that it could not take: {shown}{more}"
    yield bad_finding(what, f"{REBUILD}. It tries them again, and keeps a copy of them")


def _contradictions(path: Path, archive: _Archive, journal: _Journal, snapshot_seq: int) -> Iterator[CheckFinding]:
    """Finds where the archive contradicts the journal: the next start would set records aside."""
    known = journal.after.entries
    with closing(_open(path)) as db:
        if db.execute("PRAGMA user_version").fetchone()[0] != SCHEMA_VERSION:
            return  # brought up to date by the next start
        live = [row[0] for row in db.execute("SELECT task_id FROM a2a_tasks WHERE settled_place IS NULL")]
        stray = [task_id for task_id in live if task_id not in known]
        twice = [task_id for task_id in journal.begun if _number_of(db, task_id) is not None]
        # The archive has every task that began before, unless it is behind the snapshot or has set records aside.
        covers = archive.archived_seq >= snapshot_seq and not archive.rejects
        expected = known.keys() - set(journal.begun) if covers else ()
        absent = [task_id for task_id in expected if not _is_archived(db, task_id)]
    for which, what in (
        (stray, "the archive has {n} live task(s) that the journal does not know"),
        (twice, "the archive already has {n} task(s) whose records it has not applied yet"),
        (absent, "the archive does not have {n} task(s) whose records it has applied"),
    ):
        if which:
            shown = ", ".join(map(str, which[:FAULTS_SHOWN]))
            yield CheckFinding(f"{what.format(n=len(which))}: {shown}", well=False, way_out=REBUILD)


def _number_of(db: sqlite3.Connection, task_id: TaskId) -> int | None:
    found = db.execute("SELECT task_no FROM ids WHERE task_id = ?", (task_id,)).fetchone()
    return None if found is None else int(found[0])


def _is_archived(db: sqlite3.Connection, task_id: TaskId) -> bool:
    number = _number_of(db, task_id)
    return db.execute("SELECT 1 FROM a2a_tasks WHERE task_no = ?", (number,)).fetchone() is not None


def _describe(error: Damaged) -> str:
    return f"{error.file}, line {error.line}: {error.reason}"
