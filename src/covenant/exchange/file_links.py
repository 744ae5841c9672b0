"""URLs of files: signed, valid for a while, for one file of one task.

    /v1/files/<space>/<task id>/<sha256>?size=…&expires=…&signature=…

The signature covers all the other values. Anybody who has the URL may read the file until it expires, without a token.
The key is derived from the instance's own, so that every daemon on a ledger makes and accepts the same URLs. An
uploaded file that no task refers to yet has `upload` in place of the task's id. The signature begins with a mark of the
instance, which distinguishes a changed URL of ours from a URL of another instance.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from covenant.model.content import File
from covenant.model.errors import Forbidden

FILES: Final = "/v1/files"
UPLOAD: Final = "upload"
LINK_EXPIRED: Final = "link_expired"
URL_CHARS_MAX: Final = 2_000
_PATH: Final = re.compile(FILES + r"/([0-9a-f]{32})/(upload|[0-9a-f-]{36})/([0-9a-f]{64})$")
_NUMBER: Final = re.compile(r"[0-9]{1,19}")
_SIGNATURE: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{80}")
"""Without a mark, as earlier versions made it, or with one."""
_MEMBERS: Final = {"size", "expires", "signature"}


class LinkedFile(NamedTuple):
    """The parts of a file's URL. `owner` is a task's id, or `upload`."""

    space: str
    owner: str
    sha256: str
    size: int
    expires_ms: int


class FileLinks:
    """`secret` signs; `link_ms` is how long a URL works."""

    def __init__(self, secret: bytes, now_ms: Callable[[], int], link_ms: int) -> None:
        self._secret = secret
        self._now_ms = now_ms
        self._link_ms = link_ms
        self._mark = hmac.digest(secret, b"file links", hashlib.sha256).hex()[:16]

    def url_of(self, file: File, base: str) -> str:
        return self.make(base, LinkedFile(file.space, file.task_id, file.sha256, file.size, self.expires_ms))

    @property
    def expires_ms(self) -> int:
        """The expiry of a URL that is made now."""
        return self._now_ms() + self._link_ms

    def make(self, base: str, linked: LinkedFile) -> str:
        path = f"{FILES}/{linked.space}/{linked.owner}/{linked.sha256}"
        query = f"size={linked.size}&expires={linked.expires_ms}&signature={self._mark}{self._signature(linked)}"
        return f"{base.rstrip('/')}{path}?{query}"

    def read(self, url: str, *, expired: bool = False) -> LinkedFile | None:
        """The file that a URL of ours names, at any host; None for any other URL. Raises Forbidden if it has expired.

        `expired`: an expired URL is read all the same. A URL of ours that was changed is refused (`link_changed`).
        """
        if FILES not in url or len(url) > URL_CHARS_MAX:
            return None
        try:
            split = urlsplit(url)
        except ValueError:
            return None
        linked = self.match(split.path, split.query, expired=expired)
        if linked is None and _PATH.search(split.path) and not self._is_foreign(split.query):
            raise Forbidden("link_changed", "this file's URL was changed; use it exactly as it was given out")
        return linked

    def _is_foreign(self, query: str) -> bool:
        """Whether the URL may be another instance's: it has a signature without our mark."""
        given = dict(parse_qsl(query, max_num_fields=8)) if query.count("&") < 8 else {}
        signature = given.get("signature", "")
        return _SIGNATURE.fullmatch(signature) is not None and not signature.startswith(self._mark)

    def match(self, path: str, query: str, *, expired: bool = False) -> LinkedFile | None:
        found = _PATH.search(path)
        given = dict(parse_qsl(query, max_num_fields=8)) if found is not None and query.count("&") < 8 else {}
        if found is None or given.keys() != _MEMBERS:
            return None
        if not all(_NUMBER.fullmatch(given[name]) for name in ("size", "expires")):
            return None
        linked = LinkedFile(found[1], found[2], found[3], int(given["size"]), int(given["expires"]))
        # URLs of earlier versions have no mark.
        signature = given["signature"].removeprefix(self._mark).encode()
        if not hmac.compare_digest(self._signature(linked).encode(), signature):
            return None
        if linked.expires_ms < self._now_ms() and not expired:
            raise Forbidden(LINK_EXPIRED, "this file's URL has expired; read the task again for a fresh one")
        return linked

    def _signature(self, linked: LinkedFile) -> str:
        signed = "\0".join(map(str, linked)).encode()
        return hmac.digest(self._secret, signed, hashlib.sha256).hex()
