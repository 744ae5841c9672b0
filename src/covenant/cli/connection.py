"""The CLI's end of the socket: connect, authenticate, ask. Standard library only; one connection a command.

A frame is a 4-byte big-endian length and that many bytes of JSON. Every wait is bounded.
"""

from __future__ import annotations

import json
import socket
import struct
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from covenant.cli.failures import Refused, Unreachable

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
ANSWER_S: Final = 30.0
"""How long an answer may take, besides what the request itself asks to wait."""
CONNECT_S: Final = 5.0


class Connection:
    def __init__(self, home: Path, token: str) -> None:
        self._home = home
        self._token = token
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def ask(self, kind: str, *, within_s: float = ANSWER_S, **fields: Any) -> dict[str, Any]:
        """Send one request; fields that are None are left out. Raises Refused with what the daemon said."""
        if self._socket is None:
            self._socket = self._open()
        request = {"kind": kind, **{name: value for name, value in fields.items() if value is not None}}
        answer = self._exchange(self._socket, request, within_s)
        if answer.get("kind") == "error":
            raise Refused(str(answer.get("code", "error")), str(answer.get("message", "refused")))
        answer["kind"] = str(answer.get("kind", "")).replace("a2_a", "a2a")
        return answer

    def _open(self) -> socket.socket:
        opened = _connect(self._home / "sock", self._home)
        try:
            answer = self._exchange(opened, {"kind": "authenticate", "token_b58": self._token}, ANSWER_S)
            if answer.get("kind") != "authenticated":
                reason = answer.get("reason") or answer.get("message") or "the token was not accepted"
                raise Refused(
                    "unknown_token",
                    f"{reason}; name a token with --token-file or COVENANT_TOKEN, or neither to be the operator",
                )
        except BaseException:
            opened.close()
            raise
        return opened

    def _exchange(self, opened: socket.socket, request: dict[str, Any], within_s: float) -> dict[str, Any]:
        body = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
        opened.settimeout(within_s)
        try:
            # A daemon that refuses a frame closes early: what it said is still there to be read.
            with suppress(BrokenPipeError, ConnectionResetError):
                opened.sendall(struct.pack(">I", len(body)) + body)
            (length,) = struct.unpack(">I", _read(opened, 4))
            if length > FRAME_BYTES_MAX:
                raise Unreachable("daemon_unreachable", "the answer is too large to be an answer")
            answer = json.loads(_read(opened, length))
        except TimeoutError:
            raise Unreachable(
                "daemon_unreachable", f"no answer within {within_s:.0f} s; it may still happen. Look, then repeat"
            ) from None
        except (OSError, ValueError) as error:
            raise Unreachable(
                "daemon_unreachable",
                f"the daemon went away before it answered ({error}); start it with `covenant serve`",
            ) from error
        if not isinstance(answer, dict):
            raise Unreachable("daemon_unreachable", "the answer is no JSON object; is this a covenant daemon?")
        return answer


def _connect(path: Path, home: Path) -> socket.socket:
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
