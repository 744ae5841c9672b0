"""URLs of files: signed, for a while, for one file of one task.

    /v1/files/<space>/<task id>/<sha256>?size=…&expires=…&signature=…

The signature covers all of the others. Whoever has the URL may read the file until it expires, without a token; the
key is derived from the instance's own, so that every daemon on a ledger makes and takes the same URLs. A file that was
uploaded, and that no task refers to yet, has `upload` in place of the task's id.
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
URL_CHARS_MAX: Final = 2_000
_PATH: Final = re.compile(FILES + r"/([0-9a-f]{32})/(upload|[0-9a-f-]{36})/([0-9a-f]{64})$")
_NUMBER: Final = re.compile(r"[0-9]{1,19}")
_MEMBERS: Final = {"size", "expires", "signature"}


class LinkedFile(NamedTuple):
    """What a URL names. `owner` is a task's id, or `upload`."""

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

    def url_of(self, file: File, base: str) -> str:
        return self.make(base, LinkedFile(file.space, file.task_id, file.sha256, file.size, self.expires_ms))

    @property
    def expires_ms(self) -> int:
        """Of a URL that is made now."""
        return self._now_ms() + self._link_ms

    def make(self, base: str, linked: LinkedFile) -> str:
        path = f"{FILES}/{linked.space}/{linked.owner}/{linked.sha256}"
        query = f"size={linked.size}&expires={linked.expires_ms}&signature={self._signature(linked)}"
        return f"{base.rstrip('/')}{path}?{query}"

    def read(self, url: str) -> LinkedFile | None:
        """What a URL of ours names, whichever host is in it; None for any other. Raises Forbidden if it is too old."""
        if FILES not in url or len(url) > URL_CHARS_MAX:
            return None
        try:
            split = urlsplit(url)
        except ValueError:
            return None
        return self.match(split.path, split.query)

    def match(self, path: str, query: str) -> LinkedFile | None:
        found = _PATH.search(path)
        given = dict(parse_qsl(query, max_num_fields=8)) if found is not None and query.count("&") < 8 else {}
        if found is None or given.keys() != _MEMBERS:
            return None
        if not all(_NUMBER.fullmatch(given[name]) for name in ("size", "expires")):
            return None
        linked = LinkedFile(found[1], found[2], found[3], int(given["size"]), int(given["expires"]))
        if not hmac.compare_digest(self._signature(linked).encode(), given["signature"].encode()):
            return None
        if linked.expires_ms < self._now_ms():
            raise Forbidden("link_expired", "this URL of a file has expired; read the task again for a fresh one")
        return linked

    def _signature(self, linked: LinkedFile) -> str:
        told = "\0".join(map(str, linked)).encode()
        return hmac.digest(self._secret, told, hashlib.sha256).hex()
