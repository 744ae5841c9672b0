"""Checks of a home without a daemon: what is wrong, and what to do about it. Changes nothing.

The files are read by the code that opens them at a start. A check that fails is a finding, never an exception. The
ledger's files are checked by `ledger_check`, unless a daemon is running.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from covenant.daemon.agent_files import list_agent_files, read_agent
from covenant.daemon.connect import open_outbound
from covenant.daemon.doctor.ledger_check import check_ledger
from covenant.daemon.doctor.ledger_repair import BACKUP, CheckFinding, Checkup, bad_finding
from covenant.daemon.environment import PASSPHRASE_VARIABLE, now_ms, program_environment
from covenant.daemon.home import (
    JOURNAL_NAME,
    KEY_NAME,
    LOST_COMMITS_NAME,
    OTHERS,
    SOCKET_NAME,
    TOKEN_NAME,
    LockedHome,
    UnsafeHome,
    is_there,
    read_token,
    url_files,
)
from covenant.daemon.keystore import Keystore, find_passphrase
from covenant.daemon.settings import Settings, ledger_limits
from covenant.daemon.settings_loader import load
from covenant.daemon.tls_files import key_is_exposed, open_tls
from covenant.daemon.watched_file import read_home_file
from covenant.daemon.wiring.core import PRICES_NAME, SERVERS_NAME
from covenant.daemon.wiring.postgres_storage import import_postgres
from covenant.ledger.embedded.disk import MIB, free_bytes
from covenant.ledger.embedded.journal.recovery import lock_home
from covenant.ledger.embedded.journal.segments import list_segments
from covenant.ledger.embedded.journal.shipped_segments import read_status
from covenant.ledger.embedded.moved_mark import IN_DATABASE, MARK_NAME, read_mark
from covenant.ledger.embedded.open import RESTORING_NAME
from covenant.model.errors import CovenantError, HomeLocked, HomeUnusable, Invalid, SettingsError
from covenant.model.mcp_servers import McpServer, read_mcp_servers
from covenant.model.model_prices import read_model_prices
from covenant.model.settings import Limits
from covenant.outbound.call_errors import AddressRefused, CallFailed
from covenant.outbound.http_fetcher import Fetcher
from covenant.outbound.outbound_settings import OutboundSettings
from covenant.outbound.remote.remote_registry import RemoteRegistry, host_and_port
from covenant.outbound.urls import InvalidUrl

SOCKET_PATH_BYTES_MAX: Final = 107
"""The limit of Linux. Other systems allow a few bytes less, and their error says so."""
TLS_DAYS_FEW: Final = 14
ROOM_BYTES_MIN: Final = 16 * MIB
"""A start rewrites the journal's last segment; this much room should be left beside it."""
ROOM_BYTES_FEW: Final = 256 * MIB
SERVERS_AT_ONCE: Final = 8
SERVER_ANSWER_S: Final = 5.0
CREDENTIALS_REFUSED: Final = frozenset({401, 403})
NOT_AT_ADDRESS: Final = frozenset({404, 410})


def check(home: Path, variables: Mapping[str, str]) -> Checkup:
    folder = list(_guarded(home, lambda: _home_folder(home)))
    if not all(finding.well for finding in folder):
        return Checkup(tuple(folder))
    settings, found = _settings(home, variables)
    findings = [*folder, *found]
    for part in (
        lambda: _permissions(home),
        lambda: _secrets(home, variables),
        lambda: _other_files(home, variables),
        lambda: check_mcp_servers(home, settings.outbound if settings is not None else OutboundSettings(), variables),
        lambda: _agent_files(home),
        lambda: _socket(home),
        lambda: _address(home),
        lambda: _room(home),
        lambda: _backup(home),
        lambda: _tls(settings),
        lambda: _database(home, settings),
    ):
        findings += _guarded(home, part)
    try:
        lock = lock_home(home)
    except HomeLocked as locked:
        way_out = "nothing is wrong with that; stop it to have the files checked too"
        return Checkup((*findings, CheckFinding(str(locked).partition("; ")[0], way_out=way_out)))
    except OSError as error:
        findings.append(_unusable(home, error))
        lock = None
    try:
        findings += _guarded(home, lambda: _port(settings))
        limits = ledger_limits(settings) if settings is not None else Limits()
        is_served = (home / MARK_NAME).exists() and not (home / JOURNAL_NAME).exists()
        ledger = Checkup(()) if is_served else check_ledger(home, variables, limits)
    except OSError as error:
        return Checkup((*findings, _unusable(home, error)))
    finally:
        if lock is not None:
            lock.close()
    return ledger._replace(findings=(*findings, *ledger.findings))


def _database(home: Path, settings: Settings | None) -> Iterator[CheckFinding]:
    """Checks the database that the settings name, or else the one that the home was served on last."""
    try:
        mark = read_mark(home)
    except HomeUnusable as error:
        yield bad_finding(str(error), BACKUP)
        return
    url = settings.ledger.url if settings is not None else ""
    if mark is not None:
        yield CheckFinding(f"the ledger is in {mark.database}" if mark.state in IN_DATABASE else "a move was cut off")
        url = url or mark.database
    if settings is None or not url:
        return
    try:
        admin = import_postgres("database_admin")
        durable = settings.ledger.durability == "fsync"
        served, lost_path = mark is not None and mark.state in IN_DATABASE, home / LOST_COMMITS_NAME
        finding = admin.find_troubles(url, durable=durable, served=served, lost_path=lost_path)
        level, troubles = asyncio.run(finding)
        newest = admin.LEVEL
    except CovenantError as error:
        way_out = "put ledger.url right, or the database"
        if not settings.ledger.url:
            way_out = f"name the database with its password: COVENANT_LEDGER_URL=… covenant doctor --home {home}"
        yield bad_finding(str(error), way_out)
        return
    for trouble in troubles:
        yield bad_finding(trouble.what, trouble.fix)
    if level > newest:
        yield bad_finding(
            f"the database is at level {level}", f"install the version of the other daemons: this knows {newest}"
        )
    elif not troubles:
        next_start = "" if level == newest else f"; the next start brings it to {newest}"
        yield CheckFinding(f"the database is at level {level} of {newest}{next_start}")


def _guarded(home: Path, part: Callable[[], Iterable[CheckFinding]]) -> Iterator[CheckFinding]:
    """Turns an error of the system into a finding."""
    try:
        yield from part()
    except OSError as error:
        yield _unusable(home, error)


def _unusable(home: Path, error: OSError) -> CheckFinding:
    named = error.filename if isinstance(error.filename, str) else str(home)
    way_out = f"run it as the owner of the home, and let the owner write there: chmod -R u+rwX {home}"
    return bad_finding(f"{named} cannot be used: {error.strerror or error}", way_out)


def _home_folder(home: Path) -> Iterator[CheckFinding]:
    try:
        found = home.stat()
    except FileNotFoundError:
        yield bad_finding(f"there is no home at {home}", "start one: covenant serve")
        return
    except NotADirectoryError:
        yield bad_finding(f"a part of {home} is a file", "choose another home with --home")
        return
    usable = os.access(home, os.R_OK | os.W_OK | os.X_OK)
    if not home.is_dir():
        yield bad_finding(f"{home} is not a folder", "choose another home with --home")
    elif found.st_uid != os.geteuid() and not (usable and os.geteuid() == 0):
        what = f"{home} belongs to {_user(found.st_uid)}, and this runs as {_user(os.geteuid())}"
        yield bad_finding(what, "run it as the owner, or choose another home with --home")
    elif not usable:
        yield bad_finding(
            f"{home} cannot be written to", f"chmod u+rwx {home}; if its file system is read-only, mount it for writing"
        )


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def _permissions(home: Path) -> Iterator[CheckFinding]:
    mode = home.stat().st_mode
    if mode & 0o022:
        yield bad_finding(f"others may write to {home}", f"chmod 700 {home}")
    elif mode & OTHERS:
        yield CheckFinding(f"others may look into {home}", way_out=f"if they should not: chmod 700 {home}")
    else:
        yield CheckFinding(f"{home} is for its owner alone")


def _secrets(home: Path, variables: Mapping[str, str]) -> Iterator[CheckFinding]:
    keystore = Keystore(home, None)
    for name, read in ((TOKEN_NAME, lambda: read_token(home / TOKEN_NAME)), (KEY_NAME, keystore.read_key)):
        path = home / name
        if not is_there(path):
            yield CheckFinding(f"{name} is not there", way_out="the next start makes one")
            continue
        try:
            read()
        except LockedHome:
            yield _locked(home, variables)
        except UnsafeHome as unsafe:
            yield _finding_of(unsafe)
        else:
            yield CheckFinding(f"{name} is there, for its owner alone")
    for read_other in (keystore.check_prekeys, keystore.read_past):
        try:
            read_other()
        except UnsafeHome as unsafe:
            yield _finding_of(unsafe)


def _finding_of(error: CovenantError) -> CheckFinding:
    """Splits the message of one of our errors: the text behind the semicolon says what to do."""
    what, _, fix = str(error).partition("; ")
    return bad_finding(what, fix or BACKUP)


def _locked(home: Path, variables: Mapping[str, str]) -> CheckFinding:
    try:
        passphrase = find_passphrase(variables)
    except (UnsafeHome, SettingsError):
        passphrase = None  # the check of other files reports it
    if passphrase is None:
        return CheckFinding(f"{KEY_NAME} is there, locked", way_out=f"a start needs its {PASSPHRASE_VARIABLE}")
    try:
        Keystore(home, passphrase).read_key()
    except UnsafeHome as error:
        return _finding_of(error)
    return CheckFinding(f"{KEY_NAME} is there, locked, and opens with the passphrase")


def _settings(home: Path, variables: Mapping[str, str]) -> tuple[Settings | None, list[CheckFinding]]:
    try:
        loaded = load({}, variables, home=home)
    except SettingsError as error:
        return None, [bad_finding(str(error), "change it; docs/settings.md lists what is allowed")]
    return loaded.settings, [CheckFinding("the settings can be used")]


def _other_files(home: Path, variables: Mapping[str, str]) -> Iterator[CheckFinding]:
    try:
        read_home_file(home / PRICES_NAME, read_model_prices)
    except SettingsError as error:
        yield bad_finding(str(error), "change it, or take the file away; a running daemon reads it again by itself")
    for problem in RemoteRegistry(home).problems.values():
        yield bad_finding(problem, "change it; a running daemon reads it again by itself")
    try:
        find_passphrase(variables)
    except (UnsafeHome, SettingsError) as error:
        yield _finding_of(error)


def _agent_files(home: Path) -> Iterator[CheckFinding]:
    """Checks the files alone: only a daemon knows whether their tenants exist."""
    good = 0
    for found in list_agent_files(home):
        try:
            read_agent(found)
            good += 1
        except Invalid as invalid:
            what = f"{found.path.relative_to(home)}: {invalid.message}"
            yield bad_finding(what, "change it; a running daemon reads it again by itself")
    if good:
        yield CheckFinding(f"{good} agent file(s) can be used")


def _socket(home: Path) -> Iterator[CheckFinding]:
    path = home / SOCKET_NAME
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        what = f"the socket's path is too long for this system: {path}"
        yield bad_finding(what, "choose a shorter home with --home, or move this one")
    elif path.exists() and not path.is_socket():
        yield bad_finding(f"{path} is in the way of the socket", f"move it away: {path}")


def _address(home: Path) -> Iterator[CheckFinding]:
    for path in url_files(home):
        if path.is_dir() and not path.is_symlink():
            what = f"{path} is a folder, in the way of the file with the daemon's URL"
            yield bad_finding(what, f"move it away: {path}")


def _room(home: Path) -> Iterator[CheckFinding]:
    free = free_bytes(home)
    if free is None:
        return
    folder = home / JOURNAL_NAME
    segments = list_segments(folder) if folder.is_dir() else []
    needed = ROOM_BYTES_MIN + (segments[-1].path.stat().st_size if segments else 0)
    text = f"{free / MIB:,.1f} MiB are free on the disk of {home}"
    if free < needed:
        way_out = f"make room: a start needs {needed / MIB:,.0f} MiB. journal.damaged-* and torn-*.bin may be moved"
        yield bad_finding(text, way_out)
    else:
        yield CheckFinding(text, way_out="that is not much for a journal that grows" if free < ROOM_BYTES_FEW else "")
    if os.statvfs(home).f_files and not os.statvfs(home).f_favail:
        yield bad_finding(f"the disk of {home} takes no more files", "remove some: it has no free inode")


def _backup(home: Path) -> Iterator[CheckFinding]:
    if os.path.lexists(home / RESTORING_NAME):
        yield bad_finding(f"a restore into {home} was cut off", "empty the folder, and restore again")
    status = read_status(home)
    if status.warning is not None:
        what, _, way_out = status.warning.rpartition("; ")
        yield bad_finding(what, way_out)
    elif status.shipped_seq:
        yield CheckFinding(f"segments through record {status.shipped_seq} were shipped")


def _tls(settings: Settings | None) -> Iterator[CheckFinding]:
    if settings is None:
        return
    try:
        files = open_tls(settings.http, now_ms)
    except SettingsError as error:
        yield _finding_of(error)
        return
    if files is None:
        return
    if key_is_exposed(settings.http.tls_key):
        yield bad_finding(f"others can read {settings.http.tls_key}", f"chmod 600 {settings.http.tls_key}")
    text = f"the certificate in {settings.http.tls_cert} is good for {files.days_left} days"
    yield CheckFinding(text, way_out="renew it soon" if files.days_left < TLS_DAYS_FEW else "")


def _port(settings: Settings | None) -> Iterator[CheckFinding]:
    if settings is None or not settings.http.port:
        return
    host, port = settings.http.bind_addr, settings.http.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, port))
        except OSError as error:
            what = f"HTTP cannot listen on {host} port {port} now: {error.strerror}"
            yield CheckFinding(
                what, way_out="stop what uses it, or choose another with --http-port or --http-bind-addr"
            )


def check_mcp_servers(home: Path, outbound: OutboundSettings, variables: Mapping[str, str]) -> Iterator[CheckFinding]:
    """Checks programs, addresses, and who may read the secrets.

    A remote server gets one request for its stream, with its credentials. Any answer shows that it is reachable.
    """
    path = home / SERVERS_NAME
    try:
        servers = read_home_file(path, read_mcp_servers) or {}
    except SettingsError as error:
        yield bad_finding(str(error), "change it, or take the file away; a running daemon reads it again by itself")
        return
    if any(server.has_secrets for server in servers.values()) and path.stat().st_mode & OTHERS:
        yield bad_finding(f"{SERVERS_NAME} has secrets, and others may read it", f"chmod 600 {path}")
    for name, server in servers.items():
        if server.command and shutil.which(server.command, path=program_environment().get("PATH")) is None:
            what = f"the program of the MCP server {name} is not there: {server.command}"
            yield bad_finding(what, f"install it, or change its command in {SERVERS_NAME}")
        if server.auth is not None and server.auth.secret(variables) is None:
            way_out = "set it where the daemon is started; without it the server is called without a token"
            yield CheckFinding(f"the MCP server {name} has no token here: {server.auth.token_env}", way_out=way_out)
    remote = {name: server for name, server in servers.items() if server.url}
    if remote:
        yield from asyncio.run(_check_remote_servers(remote, outbound, variables))


async def _check_remote_servers(
    servers: Mapping[str, McpServer], outbound: OutboundSettings, variables: Mapping[str, str]
) -> list[CheckFinding]:
    slots = asyncio.Semaphore(SERVERS_AT_ONCE)

    async def check_server(name: str, server: McpServer) -> CheckFinding:
        async with slots:
            fault = await _fault_of_server(fetcher, server, variables)
        if not fault:
            return CheckFinding(f"the MCP server {name} answers")
        return bad_finding(f"the MCP server {name} {fault}", f"start it, or change its entry in {SERVERS_NAME}")

    async with open_outbound(outbound) as (_, fetcher):
        return list(await asyncio.gather(*(check_server(name, server) for name, server in servers.items())))


async def _fault_of_server(fetcher: Fetcher, server: McpServer, variables: Mapping[str, str]) -> str:
    """What is wrong with the server; empty if it answers."""
    try:
        allowed = fetcher.allowing(host_and_port(server.url))
        headers = {**server.sent_headers(variables), "accept": "application/json, text/event-stream"}
        async with asyncio.timeout(SERVER_ANSWER_S), allowed.stream("GET", server.url, headers=headers) as answer:
            status = answer.status
    except TimeoutError:
        return f"does not answer within {SERVER_ANSWER_S:g} s"
    except (CallFailed, AddressRefused) as error:
        return f"cannot be reached: {error.detail}"
    except (Invalid, InvalidUrl) as error:
        return f"cannot be called: {error}"
    if status in CREDENTIALS_REFUSED:
        return f"refuses the daemon's credentials (HTTP {status})"
    return f"is not at this address (HTTP {status})" if status in NOT_AT_ADDRESS else ""
