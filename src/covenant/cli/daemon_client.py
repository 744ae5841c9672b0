"""The CLI's end of the daemon's socket: connect, authenticate, ask.

Standard library only, so that commands start fast. Every wait is bounded. The first request of a command
opens its connection.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from covenant.cli.terminal import Failure, Unreachable
from covenant.daemon.environment import TOKEN_VARIABLE
from covenant.wire.ipc_frames import HEADER_BYTES, encode_frame, frame_length

ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest frame that a daemon can be set to send."""
ANSWER_S: Final = 30.0
"""How long an answer may take, in addition to the wait that the request itself asks for."""
CONNECT_S: Final = 5.0

Answer = dict[str, Any]


class DaemonClient:
    def __init__(self, home: Path, token: str) -> None:
        self._home = home
        self.token = token
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. The next request opens another one."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def ask(self, kind: str, *, within_s: float = ANSWER_S, **fields: Any) -> Answer:
        """Send one request; fields that are None are left out. Raises `Failure` with the daemon's refusal."""
        if self._socket is None:
            self._socket = self._open()
        request = {"kind": kind, **{name: value for name, value in fields.items() if value is not None}}
        answer = _exchange(self._socket, request, within_s)
        if answer.get("kind") == "error":
            raise Failure(str(answer.get("code", "error")), str(answer.get("message", "refused")))
        return answer

    def wait_closed(self, within_s: float) -> None:
        """Waits until the daemon closes the connection."""
        if self._socket is None:
            return
        self._socket.settimeout(within_s)
        try:
            while self._socket.recv(HEADER_BYTES):
                pass
        except TimeoutError:
            raise Unreachable("daemon_unreachable", f"the daemon has not stopped within {within_s:.0f} s") from None
        except OSError:
            pass  # closed, with an error

    def _open(self) -> socket.socket:
        opened = _connect(self._home)
        try:
            answer = _exchange(opened, {"kind": "authenticate", "token_b58": self.token}, ANSWER_S)
            if answer.get("kind") != "authenticated":
                reason = answer.get("reason") or answer.get("message") or "the token was not accepted"
                raise Failure(
                    "unknown_token",
                    f"{reason}; name a token with --token-file or COVENANT_TOKEN, or name none to be the operator",
                )
        except BaseException:
            opened.close()
            raise
        return opened


def read_token(home: Path, token_file: str | None, variables: Mapping[str, str]) -> str:
    """The named file's token, else the environment's, else the operator's."""
    if token_file is not None:
        path = Path(token_file).expanduser()
    elif variables.get(TOKEN_VARIABLE):
        return variables[TOKEN_VARIABLE].strip()
    else:
        path = home / "operator.token"
    if token_file is None and not path.exists() and not (home / "sock").exists():
        raise Unreachable(
            "daemon_unreachable", f"no daemon has run in {home}; start one with `covenant serve --home {home}`"
        )
    return read_token_file(path)


def read_token_file(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError as error:
        raise Failure("no_token", f"there is no token in {path}; name another with --token-file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise Failure("no_token", f"the token in {path} cannot be read: {error}") from error


def _exchange(opened: socket.socket, request: Mapping[str, Any], within_s: float) -> Answer:
    body = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
    opened.settimeout(within_s)
    try:
        # A daemon that refuses a frame closes early: its refusal is still there to be read.
        with suppress(BrokenPipeError, ConnectionResetError):
            opened.sendall(encode_frame(body))
        length = frame_length(_read(opened, HEADER_BYTES))
        if length > ANSWER_BYTES_MAX:
            raise Unreachable("daemon_unreachable", "the answer is larger than any answer of a daemon")
        answer = json.loads(_read(opened, length))
    except TimeoutError:
        raise Unreachable(
            "daemon_unreachable",
            f"no answer within {within_s:.0f} s; the request may still be carried out. Look before you repeat it",
        ) from None
    except (OSError, ValueError) as error:
        raise Unreachable(
            "daemon_unreachable", f"the daemon went away before it answered ({error}); start it with `covenant serve`"
        ) from error
    if not isinstance(answer, dict):
        raise Unreachable("daemon_unreachable", "the answer is no JSON object; is this a covenant daemon?")
    return answer


def _connect(home: Path) -> socket.socket:
    path = home / "sock"
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    opened.settimeout(CONNECT_S)
    try:
        opened.connect(str(path))
    except OSError as error:
        opened.close()
        raise Unreachable(
            "daemon_unreachable",
            f"no daemon answers on {path} ({error.strerror or error}); start it with `covenant serve --home {home}`",
        ) from error
    return opened


def _read(opened: socket.socket, length: int) -> bytes:
    parts: list[bytes] = []
    while length > 0:
        part = opened.recv(min(length, 1 << 20))
        if not part:
            raise ConnectionError("the connection was closed")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
