"""The archive's writer as a process of its own, so that what it costs is not taken from the loop.

    python -m covenant.ledger.embedded.archive.writer_process <archive> <journal folder>

`WriterProcess` starts it, asks it and ends it; each question and each answer is one line of JSON. It reads the
journal's segments itself, but no further than it is told: what is not durable does not exist for it. It has nothing
of its own to
lose: a new one goes on from what the archive says. So one that dies is an error like any other, shown as the archive's
`failure` and tried again. It ends when its input does, which is also when the process that started it is gone.
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
from covenant.ledger.embedded.archive.archive import CLOSE_S_MAX, LocalWriter
from covenant.ledger.embedded.archive.writer_roles import ArchiveSource
from covenant.ledger.embedded.journal.segments import Cursor, Lines, SegmentReader, cursor_after
from covenant.model.errors import CovenantError

# Whoever waits for an answer goes first, and so does whoever is woken by one: beside a writer of the same rank, two
# cores and 64 connections, every second request was interrupted.
NICE: Final = 10


class SegmentedSource(Protocol):
    """A source that is a folder of segments; `Journal` is one."""

    @property
    def folder(self) -> Path: ...
    @property
    def end(self) -> Cursor: ...


class ApplyNext(msgspec.Struct, frozen=True, tag="apply"):
    """The next batch, of what is durable up to `end`."""

    end: Cursor


class Checkpoint(msgspec.Struct, frozen=True, tag="checkpoint"):
    pass


class PackOlder(msgspec.Struct, frozen=True, tag="pack"):
    after_no: int


WriterQuestion = ApplyNext | Checkpoint | EraseTasks | Scrub | PackOlder


class WriterAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the archive is. `error` is why it is no further, and the last word."""

    seq: int
    done: bool = True
    rejected: int = 0
    erased: Erased | None = None
    after_no: int | None = None
    error: str | None = None


_encode: Final = msgspec.json.Encoder().encode
_question: Final = msgspec.json.Decoder(WriterQuestion).decode
_answer: Final = msgspec.json.Decoder(WriterAnswer).decode


class WriterProcess:
    """The writer in another process."""

    def __init__(self, path: Path, source: SegmentedSource) -> None:
        self._source = source
        command = [sys.executable, "-m", __name__, str(path), str(source.folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603  ourselves
        try:
            said = self._hear()
            self.archived_seq, self.rejected = said.seq, said.rejected
        except BaseException:
            self.close()
            raise

    def apply_next(self) -> int:
        said = self._ask(ApplyNext(self._source.end))
        self.archived_seq, self.rejected = said.seq, said.rejected
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
        with suppress(OSError):  # it is gone already
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
        return self._hear()

    def _hear(self) -> WriterAnswer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CovenantError("the archive's writer has died")
        said = _answer(line)
        if said.error is not None:
            raise CovenantError(said.error)
        return said


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
        """Segments go when a compaction drops them."""

    def release(self) -> None:
        self._reader.close()


def serve_writer(path: Path, folder: Path, questions: BinaryIO, answers: BinaryIO) -> None:
    """Until there are no more questions, or the first error."""

    def say(said: WriterAnswer) -> None:
        answers.write(_encode(said) + b"\n")
        answers.flush()

    segments = _Segments(folder)
    seq = 0
    try:
        writer = LocalWriter(path, segments, lasting=True)
        seq = writer.archived_seq
        say(WriterAnswer(seq, rejected=writer.rejected))
        for line in questions:
            asked: WriterQuestion = _question(line)
            match asked:
                case ApplyNext():
                    segments.end = asked.end
                    seq = writer.apply_next()
                    say(WriterAnswer(seq, rejected=writer.rejected))
                case Checkpoint():
                    say(WriterAnswer(seq, done=writer.checkpoint(), rejected=writer.rejected))
                case EraseTasks() | Scrub():
                    say(WriterAnswer(seq, rejected=writer.rejected, erased=writer.erase(asked)))
                case PackOlder():
                    after_no = writer.pack_older(asked.after_no)
                    say(WriterAnswer(seq, rejected=writer.rejected, after_no=after_no))
        writer.close()
    except BrokenPipeError:
        return  # nobody listens any more
    except Exception as error:  # noqa: BLE001  whoever asked tells it, and starts another
        with suppress(BrokenPipeError):
            say(WriterAnswer(seq, error=str(error) or repr(error)))


def main(arguments: list[str]) -> int:
    path, folder = arguments
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the daemon, which still has something to archive then
    os.nice(NICE)
    serve_writer(Path(path), Path(folder), sys.stdin.buffer, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
