"""The certificate, its key and the authority for clients, as files that may change while the daemon runs.

New connections get the certificate that was read last; open connections go on as they are. Files that cannot be used
stop a start, and change nothing in a daemon that runs.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from covenant.daemon.settings import HttpSettings
from covenant.daemon.telemetry import Log
from covenant.daemon.watched_file import FileStamp, file_stamp
from covenant.model.errors import SettingsError
from covenant.seal.certificates import validity_of_pem

FILE_BYTES_MAX: Final = 1 << 20
POLL_S: Final = 1.0
DAY_MS: Final = 86_400_000


class TlsPair(NamedTuple):
    """The contents of the files, as PEM. `client_ca` is empty if none is named."""

    certificate: bytes
    key: bytes
    client_ca: bytes
    until_ms: int


class _CurrentContext(ssl.SSLContext):
    """Gives each new connection the current context."""

    current: ssl.SSLContext

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        return self.current.wrap_bio(*arguments, **named)


class TlsFiles:
    """A scheduler: reads the files again when one of them has changed."""

    def __init__(self, settings: HttpSettings, now_ms: Callable[[], int]) -> None:
        """Raises SettingsError if the files cannot be used."""
        self._settings = settings
        self._now_ms = now_ms
        self._log = Log()
        self._stamps = self._file_stamps()
        self.pair, current = self._load()
        self.context = _CurrentContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.current = current

    @property
    def client_required(self) -> bool:
        return self._settings.tls_client_auth == "required"

    @property
    def days_left(self) -> int:
        return (self.pair.until_ms - self._now_ms()) // DAY_MS

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.step()

    async def step(self) -> None:
        """Reads the files if one has changed since the last step. If they cannot be used, the old ones stay in use."""
        before, self._stamps = self._stamps, await asyncio.to_thread(self._file_stamps)
        if before == self._stamps:
            return
        try:
            self.pair, self.context.current = await asyncio.to_thread(self._load)
        except SettingsError as error:
            self._log.warning("tls.not_reloaded", why=str(error))
        else:
            self._log.info("tls.reloaded", days_left=self.days_left)

    def _file_stamps(self) -> tuple[FileStamp | None, ...]:
        named = self._settings.tls_cert, self._settings.tls_key, self._settings.tls_client_ca
        return tuple(file_stamp(Path(name).expanduser()) if name else None for name in named)

    def _load(self) -> tuple[TlsPair, ssl.SSLContext]:
        settings = self._settings
        certificate, key = _read("http.tls_cert", settings.tls_cert), _read("http.tls_key", settings.tls_key)
        client_ca = _read("http.tls_client_ca", settings.tls_client_ca) if settings.tls_client_ca else b""
        try:
            validity = validity_of_pem(certificate)
        except ValueError:
            raise SettingsError(
                f"http.tls_cert: {settings.tls_cert} holds no certificate in PEM; "
                "name the file that begins with -----BEGIN CERTIFICATE-----"
            ) from None
        if validity.until_ms <= self._now_ms():
            raise SettingsError(f"http.tls_cert: the certificate in {settings.tls_cert} has expired; renew it")
        return TlsPair(certificate, key, client_ca, validity.until_ms), _context(settings)


def _context(settings: HttpSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    certificate, key = Path(settings.tls_cert).expanduser(), Path(settings.tls_key).expanduser()
    try:
        context.load_cert_chain(certificate, key, password=_refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            fault = f"the key in {key} does not belong to the certificate in {certificate}"
        else:
            fault = f"{key} holds no key in PEM for the certificate in {certificate} ({error.reason or error})"
        raise SettingsError(f"http.tls_key: {fault}") from None
    except OSError as error:
        raise SettingsError(f"http.tls_key: {key} cannot be read: {error.strerror}") from error
    if settings.tls_client_ca:
        try:
            context.load_verify_locations(Path(settings.tls_client_ca).expanduser())
        except (ssl.SSLError, OSError) as error:
            fault = f"{settings.tls_client_ca} holds no certificate of an authority in PEM ({error})"
            raise SettingsError(f"http.tls_client_ca: {fault}") from None
        required = settings.tls_client_auth == "required"
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    return context


def _refuse_passphrase() -> str:
    raise SettingsError("http.tls_key: the key is locked with a passphrase; keep one that is not, for its owner alone")


def _read(named_by: str, name: str) -> bytes:
    path = Path(name).expanduser()
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX)
    except OSError as error:
        raise SettingsError(f"{named_by}: {path} cannot be read: {error.strerror}") from error


def key_is_exposed(name: str) -> bool:
    """Whether others than the owner of the key's file can read it."""
    try:
        return bool(os.stat(Path(name).expanduser()).st_mode & (stat.S_IRGRP | stat.S_IROTH))  # noqa: PTH116
    except OSError:
        return False


def open_tls(settings: HttpSettings, now_ms: Callable[[], int]) -> TlsFiles | None:
    """None: HTTP and gRPC speak without TLS. Raises SettingsError."""
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise SettingsError("http.tls_cert and http.tls_key belong together; name both, or neither")
    if settings.tls_client_ca and not settings.tls_cert:
        raise SettingsError("http.tls_client_ca needs http.tls_cert and http.tls_key; name both, or remove it")
    if not settings.tls_cert:
        return None
    return TlsFiles(settings, now_ms)
