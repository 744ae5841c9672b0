"""`covenant files`: files of the blob store, in and out.

The daemon says over its socket where its HTTP server is. The bytes go there in pieces, so a file of any size passes.
Both ends hash the bytes on the way.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import SplitResult, urlsplit

import click

from covenant.cli.daemon_client import Invocation, check_output, daemon_command
from covenant.cli.options import CommandGroup, file_argument, limit_option, replace_option
from covenant.cli.terminal import Failure, Unreachable, ago, clock_time, complete_file, print_table, put, say

PIECE_BYTES: Final = 256 * 1024
REFUSAL_BYTES_MAX: Final = 64 * 1024
ROWS_MAX: Final = 200
WAIT_S: Final = 60.0
"""How long either end may be silent. The daemon limits the time of a whole transfer (blobs.upload_ms_max)."""
UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")

files: Final = CommandGroup(
    "files", help="Files of tasks: put them into the blob store, get them out, list them.", no_args_is_help=True
)
tenant_option: Final = click.option(
    "--tenant",
    help="The tenant whose files are meant, for the operator. Default: default. Other callers see their own files.",
)


@daemon_command(files, "put", "file_stored", "sha256", "size", "url", "expires_at_ms")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
def put_file(call: Invocation, *, file: str) -> None:
    """Store FILE, or standard input for `-`, and print its URL. A message names the file by this URL.

    \b
        url=$(covenant files put film.mp4)
    """
    answer = call.ask("list_stored_files", limit=1)
    with _opened(file) as (source, size):
        progress, hashed = TransferProgress("stored", size), hashlib.sha256()
        sent = _send(answer["upload_url"], call.client.token, _pieces(source, size, hashed, progress), size)
    progress.end()
    if sent["sha256"] != hashed.hexdigest():
        raise Failure("wrong_hash", "the daemon stored other bytes than were sent; put the file once more")
    until = f"the URL can be used until {clock_time(sent['expires_at_ms'])[:8]} (blobs.link_ms)"
    call.show(sent, sent["url"], f"stored {_size(sent['size'])}, SHA-256 {sent['sha256']}; {until}")


@daemon_command(files, "get", "file_read", "sha256", "size", "file")
@click.argument("sha256")
@file_argument
@replace_option
@tenant_option
def get_file(call: Invocation, *, sha256: str, file: str | None, replace: bool, tenant: str | None) -> None:
    """Write the file whose SHA-256 begins with SHA256 to FILE, or to standard output.

    FILE appears once all of its bytes have arrived and match the hash.
    """
    check_output(call, file, replace=replace)
    found = call.ask("list_stored_files", sha256=sha256, tenant=tenant, limit=2)["files"]
    if len(found) != 1:
        several = "several files have a SHA-256 that begins with this; give more of its digits"
        none = "there is no such file; `covenant files list` lists the files (--tenant: those of another tenant)"
        raise Failure("ambiguous_file" if found else "unknown_file", several if found else none)
    (stored,) = found
    progress = TransferProgress("read", stored["size"])
    if file is None:
        _receive(stored, sys.stdout.buffer, progress)
    else:
        with complete_file(Path(file)) as target:
            _receive(stored, target, progress)
    progress.end()
    if file is not None and not call.answer({"sha256": stored["sha256"], "size": stored["size"], "file": file}):
        put(f"wrote {_size(stored['size'])} to {file}")


@daemon_command(files, "list", "file_list", "files", "count", "bytes", "next")
@limit_option(50, ROWS_MAX)
@click.option("--after", default="", metavar="SHA256", help="Continue after this hash.")
@tenant_option
def list_files(call: Invocation, *, limit: int, after: str, tenant: str | None) -> None:
    """List files by their SHA-256, with the number of tasks that refer to each."""
    answer = call.ask("list_stored_files", tenant=tenant, after=after, limit=limit)
    if call.answer({name: answer[name] for name in ("files", "count", "bytes", "next")}):
        return
    if answer["files"]:
        print_table(("sha256", "size", "tasks", "the first", "stored"), map(_row, answer["files"]))
    say(f"{answer['count']} file(s), {_size(answer['bytes'])} in all")
    if answer["next"]:
        say(f"there may be more: --after {answer['next']}")


def _row(file: Mapping[str, Any]) -> tuple[str, ...]:
    first = file["tasks"][0] if file["tasks"] else ""
    style = "" if file["references"] else "dim"
    return style, file["sha256"], _size(file["size"]), str(file["references"]), first, ago(file["stored_at_ms"])


class TransferProgress:
    """Shows the progress of a transfer in one line, on a terminal."""

    def __init__(self, verb: str, size: int | None) -> None:
        self._verb, self._size, self._done, self._shown = verb, size, 0, -1
        self._watched = sys.stderr.isatty()

    def add(self, count: int) -> None:
        self._done += count
        step = self._done * 100 // self._size if self._size else self._done // (16 * 1024 * 1024)
        if self._watched and step != self._shown:
            self._shown = step
            share = f" of {_size(self._size)}, {step} %" if self._size else ""
            click.echo(f"\r\033[K{self._verb} {_size(self._done)}{share}", err=True, nl=False)

    def end(self) -> None:
        if self._shown >= 0:
            click.echo("\r\033[K", err=True, nl=False)


@contextmanager
def _opened(file: str) -> Iterator[tuple[IO[bytes], int | None]]:
    """The file and its size; None: the size is not known in advance."""
    if file == "-":
        yield sys.stdin.buffer, None
        return
    try:
        with Path(file).open("rb", buffering=0) as source:
            regular = Path(file).is_file()
            yield source, os.fstat(source.fileno()).st_size if regular else None
    except OSError as error:
        raise Failure("cannot_read", f"{file}: {error.strerror or error}") from error


def _pieces(source: IO[bytes], size: int | None, hashed: Any, progress: TransferProgress) -> Iterator[bytes]:
    """Reads as many bytes as were announced, even if the file grows meanwhile."""
    left = size
    while piece := source.read(PIECE_BYTES if left is None else min(PIECE_BYTES, left)):
        left = None if left is None else left - len(piece)
        hashed.update(piece)
        yield piece
        progress.add(len(piece))
    if left:
        raise Failure("file_changed", "the file became shorter while it was read; put it when nobody writes to it")


def _send(url: str, token: str, pieces: Iterator[bytes], size: int | None) -> dict[str, Any]:
    place = urlsplit(url)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/octet-stream"}
    if size is not None:
        headers["Content-Length"] = str(size)
    with _connected(place) as connection:
        # A daemon that refuses an upload may not read all of it: its refusal is still there to be read.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", place.path, pieces, headers, encode_chunked=size is None)
        answer = connection.getresponse()
        body = answer.read(REFUSAL_BYTES_MAX)
    if answer.status != 201:
        raise _refusal(answer.status, body)
    stored: dict[str, Any] = json.loads(body)
    return stored


def _receive(stored: Mapping[str, Any], target: IO[bytes], progress: TransferProgress) -> None:
    place, hashed = urlsplit(stored["url"]), hashlib.sha256()
    with _connected(place) as connection:
        connection.request("GET", f"{place.path}?{place.query}")
        answer = connection.getresponse()
        if answer.status != 200:
            raise _refusal(answer.status, answer.read(REFUSAL_BYTES_MAX))
        while piece := answer.read(PIECE_BYTES):
            hashed.update(piece)
            try:
                target.write(piece)
            except OSError as error:
                raise Failure("cannot_write", f"the bytes cannot be written: {error.strerror or error}") from error
            progress.add(len(piece))
    if hashed.hexdigest() != stored["sha256"]:
        raise Failure("wrong_hash", "the received bytes differ from the stored ones; run `covenant doctor`")


@contextmanager
def _connected(place: SplitResult) -> Iterator[http.client.HTTPConnection]:
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    connection = kind(place.hostname or "", place.port, timeout=WAIT_S, blocksize=PIECE_BYTES)
    try:
        yield connection
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unreachable(
            "transfer_failed",
            f"the transfer with {place.scheme}://{place.netloc} broke off ({error}); look at the daemon's HTTP "
            "(http.bind_addr, http.tls_cert) and repeat the command: a partial file is not kept",
        ) from error
    finally:
        connection.close()


def _refusal(status: int, body: bytes) -> Failure:
    try:
        refusal = json.loads(body)
        return Failure(str(refusal["code"]), str(refusal["error"]))
    except (ValueError, KeyError, TypeError):
        return Failure("refused", f"the daemon's HTTP answered {status}; is another program at its address?")


def _size(count: int) -> str:
    size = float(count)
    for unit in UNITS:
        if size < 1024 or unit == UNITS[-1]:
            break
        size /= 1024
    return f"{count} bytes" if count < 1024 else f"{size:.1f} {unit}"
