"""The socket in the home: who may connect (the owner of the home), how many, and how it all ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from pathlib import Path
from typing import Final

from covenant.doors.ipc_session import HANDSHAKE_BYTES_MAX, HANDSHAKE_S, FrameStream, IpcContext, IpcSession
from covenant.doors.operator_api.answers import ErrorAnswer, encode
from covenant.doors.operator_api.operation import ApiContext
from covenant.model.errors import SettingsError
from covenant.wire.ipc_frames import FRAME_BYTES_MAX

CONNECTIONS_MAX: Final = 1_024
BACKLOG: Final = 1_024


class IpcServer:
    """Used on the loop it is started on."""

    def __init__(
        self,
        path: Path,
        api: ApiContext,
        *,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        connections_max: int = CONNECTIONS_MAX,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self._path = path
        self._connections_max = connections_max
        self._meter = api.meter
        self._context = IpcContext(api, frame_bytes_max=frame_bytes_max, handshake_s=handshake_s)
        self._open: dict[FrameStream, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        sock = _bound(self._path)
        try:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(self._accept, sock=sock, backlog=BACKLOG)
        except BaseException:
            sock.close()
            raise

    def _accept(self) -> FrameStream:
        return _Connection(self)

    def opened(self, stream: FrameStream) -> None:
        dialogue = self._converse(stream) if len(self._open) < self._connections_max else self._refuse(stream)
        self._open[stream] = asyncio.ensure_future(dialogue)
        self._meter.connections = len(self._open)

    def lost(self, stream: FrameStream) -> None:
        # The dialogue notices by itself and ends; until then it still counts.
        task = self._open.get(stream)
        if task is not None:
            task.add_done_callback(lambda _: self._forget(stream))

    def _forget(self, stream: FrameStream) -> None:
        self._open.pop(stream, None)
        self._meter.connections = len(self._open)

    async def _converse(self, stream: FrameStream) -> None:
        await IpcSession(self._context, stream).run()

    async def _refuse(self, stream: FrameStream) -> None:
        message = f"{self._connections_max} connections are open already; close some, or raise ipc.connections_max"
        await stream.write(encode(ErrorAnswer(code="too_many_connections", message=message)))
        stream.close()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Take no more connections, let answers under way finish, then close. The socket's file goes too."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
        open_now = dict(self._open)
        for stream in open_now:
            stream.cut_off()
        if open_now:
            await asyncio.wait(open_now.values(), timeout=grace_s)
        for stream, task in open_now.items():
            task.cancel()
            stream.abort()
        await asyncio.gather(*open_now.values(), return_exceptions=True)


class _Connection(FrameStream):
    def __init__(self, server: IpcServer) -> None:
        super().__init__(HANDSHAKE_BYTES_MAX)
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.lost(self)


def _bound(path: Path) -> socket.socket:
    """A socket at this path that only its owner may connect to. Nobody can before it listens, so there is no gap."""
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(os.fspath(path))
        path.chmod(0o600)
        sock.setblocking(False)
    except OSError as failed:
        sock.close()
        if failed.errno is None or failed.errno == errno.ENAMETOOLONG:
            raise SettingsError(
                f"the socket's path is too long for this system: {path}; choose a shorter home"
            ) from None
        raise
    return sock


def _remove_stale(path: Path) -> None:
    """What an earlier daemon left. The home's lock says that it is not running."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SettingsError(f"{path} exists and is not a socket; move it away")
    path.unlink()
