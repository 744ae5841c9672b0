"""Writers of the archive: in this process, or in one of its own.

    python -m covenant.ledger.embedded.archive.archive_writer <archive> <journal folder>

An `ArchiveWriter` has the file open for writing, and gets records from an `ArchiveSource`. One thread uses them.
Nothing here needs a loop, so that a process that writes the archive starts quickly.

`WriterProcess` starts such a process, asks it and ends it, so that its work does not burden the loop. Each question and
each answer is one line of JSON. The process reads the journal's segments itself, but only up to the durable end that it
is told. It has no state of its own: a new one continues from the archive. So its death is an error like any other,
shown as the archive's `failure` and retried. It ends when its input does, which also happens when the process that
started it is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import msgspec

from covenant.ledger.contract.retention import Erased, EraseTasks, Scrub
from covenant.ledger.embedded.archive.apply_batch import LiveRows, apply_or_reject, count_rejects
from covenant.ledger.embedded.archive.archive_file import archived_seq_of, erase_batch, open_writer, pack_batch
from covenant.ledger.embedded.disk import sync_dir
from covenant.ledger.embedded.journal.segments import Cursor, Lines, SegmentReader, cursor_after
from covenant.model.errors import CovenantError

BATCH_BYTES: Final = 1 << 20
CLOSE_S_MAX: Final = 10.0
# Callers that wait for an answer go first: with a writer of the same rank, on two cores with 64 connections, every
# second request was interrupted.
NICE: Final = 10
_encode: Final = msgspec.json.Encoder().encode


class ArchiveSource(Protocol):
    """The source of durable records. Used by one thread other than the loop's; `Journal` is one."""

    def cursor(self, after_seq: int) -> Cursor: ...
    def read(self, cursor: Cursor, max_bytes: int) -> Lines: ...
    def trim(self, seq: int) -> None: ...
    def release(self) -> None:
        """Releases resources: nothing more is read for now."""


class ArchiveWriter(Protocol):
    """Has the archive open for writing. For one thread; after an exception only `close` may be called."""

    archived_seq: int
    rejected: int
    """The number of records that are set aside."""

    def apply_next(self) -> int:
        """Applies the next batch of durable records. Returns the archive's new seq."""

    def checkpoint(self) -> bool:
        """Syncs everything applied so far; False if a reader blocks it."""

    def erase(self, which: EraseTasks | Scrub) -> Erased: ...
    def pack_older(self, after_no: int) -> int | None:
        """Packs some finished tasks after a number. Returns where to go on, or None if there are no more."""

    def close(self) -> None: ...


class LocalWriter:
    """The writer in the calling thread."""

    def __init__(self, path: Path, source: ArchiveSource, *, lasting: bool) -> None:
        self._db = open_writer(path, lasting=lasting)
        self._folder = path.parent if lasting else None
        self._source = source
        self._cursor: Cursor | None = None
        self._live = LiveRows()
        self.archived_seq = archived_seq_of(self._db)
        self.rejected = count_rejects(self._db)

    def apply_next(self) -> int:
        if self._cursor is None:
            self._cursor = self._source.cursor(self.archived_seq)
        lines = self._source.read(self._cursor, BATCH_BYTES)
        if not lines.data:
            raise CovenantError(f"record {self.archived_seq + 1} is durable, but the journal does not have it")
        self.rejected += apply_or_reject(self._db, lines, self.archived_seq, self._live)
        self._cursor = lines.cursor
        self.archived_seq = lines.last_seq
        self._source.trim(lines.last_seq)
        return lines.last_seq

    def checkpoint(self) -> bool:
        busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(FULL)").fetchone()
        if self._folder is not None:
            sync_dir(self._folder)
        return not busy

    def erase(self, which: EraseTasks | Scrub) -> Erased:
        return erase_batch(self._db, which)

    def pack_older(self, after_no: int) -> int | None:
        return pack_batch(self._db, after_no)

    def close(self) -> None:
        self._db.close()
        self._source.release()


class SegmentedSource(Protocol):
    """A source that is a folder of segments; `Journal` is one."""

    @property
    def folder(self) -> Path: ...
    @property
    def end(self) -> Cursor: ...


class ApplyNext(msgspec.Struct, frozen=True, tag="apply"):
    """Applies the next batch, of records that are durable up to `end`."""

    end: Cursor


class Checkpoint(msgspec.Struct, frozen=True, tag="checkpoint"):
    pass


class PackOlder(msgspec.Struct, frozen=True, tag="pack"):
    after_no: int


WriterQuestion = ApplyNext | Checkpoint | EraseTasks | Scrub | PackOlder


class WriterAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The archive's seq. `error` is why it got no further; no answer follows it."""

    seq: int
    done: bool = True
    rejected: int = 0
    erased: Erased | None = None
    after_no: int | None = None
    error: str | None = None


_question: Final = msgspec.json.Decoder(WriterQuestion).decode
_answer: Final = msgspec.json.Decoder(WriterAnswer).decode


class WriterProcess:
    """The writer in another process."""

    def __init__(self, path: Path, source: SegmentedSource) -> None:
        self._source = source
        command = [sys.executable, "-m", __name__, str(path), str(source.folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603  ourselves
        try:
            answer = self._read_answer()
            self.archived_seq, self.rejected = answer.seq, answer.rejected
        except BaseException:
            self.close()
            raise

    def apply_next(self) -> int:
        answer = self._ask(ApplyNext(self._source.end))
        self.archived_seq, self.rejected = answer.seq, answer.rejected
        return self.archived_seq

    def checkpoint(self) -> bool:
        return self._ask(Checkpoint()).done

    def erase(self, which: EraseTasks | Scrub) -> Erased:
        erased = self._ask(which).erased
        assert erased is not None
        return erased

    def pack_older(self, after_no: int) -> int | None:
        return self._ask(PackOlder(after_no)).after_no

    def close(self) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):  # the process is gone already
            process.stdin.close()
        try:
            process.wait(CLOSE_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _ask(self, question: WriterQuestion) -> WriterAnswer:
        assert self._process.stdin is not None
        self._process.stdin.write(_encode(question) + b"\n")
        self._process.stdin.flush()
        return self._read_answer()

    def _read_answer(self) -> WriterAnswer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CovenantError("the archive's writer has died")
        answer = _answer(line)
        if answer.error is not None:
            raise CovenantError(answer.error)
        return answer


class _Segments(ArchiveSource):
    """The journal as this process may see it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = SegmentReader(folder)
        self.end = Cursor(0, 0, 0)

    def cursor(self, after_seq: int) -> Cursor:
        return cursor_after(self._folder, after_seq)

    def read(self, cursor: Cursor, max_bytes: int) -> Lines:
        return self._reader.read(cursor, self.end, max_bytes)

    def trim(self, seq: int) -> None:
        """Does nothing: a compaction drops the segments."""

    def release(self) -> None:
        self._reader.close()


def serve_writer(path: Path, folder: Path, questions: BinaryIO, answers: BinaryIO) -> None:
    """Serves until there are no more questions, or the first error."""

    def send_answer(answer: WriterAnswer) -> None:
        answers.write(_encode(answer) + b"\n")
        answers.flush()

    segments = _Segments(folder)
    seq = 0
    try:
        writer = LocalWriter(path, segments, lasting=True)
        seq = writer.archived_seq
        send_answer(WriterAnswer(seq, rejected=writer.rejected))
        for line in questions:
            question: WriterQuestion = _question(line)
            match question:
                case ApplyNext():
                    segments.end = question.end
                    seq = writer.apply_next()
                    send_answer(WriterAnswer(seq, rejected=writer.rejected))
                case Checkpoint():
                    send_answer(WriterAnswer(seq, done=writer.checkpoint(), rejected=writer.rejected))
                case EraseTasks() | Scrub():
                    send_answer(WriterAnswer(seq, rejected=writer.rejected, erased=writer.erase(question)))
                case PackOlder():
                    after_no = writer.pack_older(question.after_no)
                    send_answer(WriterAnswer(seq, rejected=writer.rejected, after_no=after_no))
        writer.close()
    except BrokenPipeError:
        return  # the daemon is gone
    except Exception as error:  # noqa: BLE001  the caller reports it, and starts another writer
        with suppress(BrokenPipeError):
            send_answer(WriterAnswer(seq, error=str(error) or repr(error)))


def main(arguments: list[str]) -> int:
    path, folder = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # for the daemon, which then still archives
    os.nice(NICE)
    serve_writer(Path(path), Path(folder), sys.stdin.buffer, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
