"""Bytes of uploads as objects in a bucket of an S3-compatible store, one object an upload.

Requests are signed with AWS Signature Version 4 over the hash of their body, so the store refuses bytes that changed on
the way. Up to one part is one PUT; more is a multipart upload, of which one part at a time is in memory. Every request
can be repeated: transient failures are tried again, after pauses. An object counts as stored when the store has
acknowledged it, with its size.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import html
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote, urlsplit

from covenant.model.errors import TooLarge, Unavailable
from covenant.model.rate_limits import Backoff
from covenant.outbound.call_errors import AddressRefused, CallFailed
from covenant.outbound.http_fetcher import Fetched, Fetcher

PART_BYTES: Final = 8 * 1024 * 1024
PARTS_MAX: Final = 10_000
"""The most parts that the protocol allows."""
ATTEMPTS_MAX: Final = 6
REQUEST_MS: Final = 300_000
BACKOFF: Final = Backoff(0.2, 5.0, jitter=0.3)
REFUSED: Final = "blobs_refused"
"""The code of failures that no later attempt can change."""
PASSING: Final = frozenset({408, 429, 500, 502, 503, 504})
NO_BODY: Final = hashlib.sha256(b"").hexdigest()
_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_MD5: Final = re.compile(r'"?([0-9a-f]{32})"?')
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9.]{1,80})</Code>")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Credentials:
    access_key: str
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)


def signed_headers(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body_sha256: str,
    *,
    credentials: S3Credentials,
    region: str,
    at_s: float,
) -> dict[str, str]:
    """The headers of a request, with those that sign it. The query of `url` is encoded and in order."""
    parts, moment = urlsplit(url), time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at_s))
    sent = {**headers, "x-amz-date": moment, "x-amz-content-sha256": body_sha256}
    if credentials.session_token:
        sent["x-amz-security-token"] = credentials.session_token
    covered = {name.lower(): " ".join(value.split()) for name, value in {**sent, "host": parts.netloc}.items()}
    names = ";".join(sorted(covered))
    lines = "".join(f"{name}:{covered[name]}\n" for name in sorted(covered))
    request = "\n".join((method, parts.path or "/", parts.query, lines, names, body_sha256))
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    text = "\n".join((_ALGORITHM, moment, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = b"AWS4" + credentials.secret_key.encode()
    for step in scope.split("/"):
        key = hmac.digest(key, step.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    sent["authorization"] = (
        f"{_ALGORITHM} Credential={credentials.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return sent


class S3Objects:
    def __init__(
        self,
        fetcher: Fetcher,
        endpoint: str,
        bucket: str,
        prefix: str,
        credentials: S3Credentials,
        *,
        region: str,
        clock_s: Callable[[], float],
        chance: Callable[[], float],
        backoff: Backoff = BACKOFF,
    ) -> None:
        """`fetcher` is closed with this."""
        self._fetcher = fetcher
        self._bucket_url = f"{endpoint.rstrip('/')}/{quote(bucket, safe='-_.~')}"
        self._prefix = prefix.strip("/")
        self._credentials = credentials
        self._region = region
        self._clock_s = clock_s
        self._chance = chance
        self._backoff = backoff

    async def check(self) -> None:
        """Raises Unavailable if the bucket cannot be used."""
        _expect(await self.ask("GET", "", {"list-type": "2", "max-keys": "1", "prefix": self._prefix}), 200)

    def writer(self, upload_id: int) -> ObjectWriter:
        return ObjectWriter(self, self._key(upload_id))

    async def read(self, upload_id: int, start: int, stop: int) -> AsyncIterator[bytes]:
        """Ends early if the object does. After a broken connection it continues behind the bytes that have come."""
        failures = 0
        while start < stop:
            before, reason = start, ""
            url, headers = self._signed("GET", self._key(upload_id), {}, {"range": f"bytes={start}-{stop - 1}"}, b"")
            try:
                async with self._fetcher.stream("GET", url, headers=headers, bytes_max=stop - start) as answer:
                    if answer.status in (404, 416):
                        return
                    if answer.status == 206:
                        async for piece in answer.pieces:
                            start += len(piece)
                            yield piece
                        return
                    reason = f"GET is answered with {answer.status}"
                    if answer.status not in PASSING:
                        raise _refused(reason)
            except (CallFailed, AddressRefused) as error:
                reason = str(error)
            failures = 1 if start > before else failures + 1
            await self._pause(failures, reason)

    async def drop(self, upload_id: int) -> None:
        """Drops the object, and the parts of an upload that was never completed."""
        key = self._key(upload_id)
        _expect(await self.ask("DELETE", key), 200, 204, 404)
        listed = await self.ask("GET", "", {"prefix": key, "uploads": ""})
        _expect(listed, 200, 404)
        for text in re.findall(r"<Upload>(.*?)</Upload>", listed.body.decode("utf-8", "replace"), re.DOTALL):
            if _member(text, "Key") == key:
                _expect(await self.ask("DELETE", key, {"uploadId": _member(text, "UploadId")}), 204, 404)

    async def close(self) -> None:
        await self._fetcher.close()

    def _key(self, upload_id: int) -> str:
        return f"{self._prefix}/{upload_id}" if self._prefix else str(upload_id)

    async def ask(self, method: str, key: str, query: Mapping[str, str] | None = None, body: bytes = b"") -> Fetched:
        """The answer, of any status that is not transient. Raises Unavailable."""
        failures = 0
        while True:
            # Signed again for each attempt: a signature contains the time.
            url, headers = self._signed(method, key, query or {}, {}, body)
            try:
                answer = await self._sent(method, url, headers, body)
            except (CallFailed, AddressRefused) as error:
                reason = str(error)
            else:
                if answer.status not in PASSING and _is_acknowledged(method, query, answer, body):
                    return answer
                reason = _describe(method, answer)
            failures += 1
            await self._pause(failures, reason)

    async def _sent(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Fetched:
        if method != "HEAD":
            return await self._fetcher.fetch(method, url, headers=headers, content=body, total_ms=REQUEST_MS)
        # The length is that of the object, not of the body of this answer.
        async with self._fetcher.stream(method, url, headers=headers) as answer:
            return Fetched(status=answer.status, headers=answer.headers, body=b"", url=url)

    async def _pause(self, failures: int, reason: str) -> None:
        if failures >= ATTEMPTS_MAX:
            raise Unavailable(
                "blobs_unavailable", f"the S3 store (blobs.url) cannot be used: {reason}; try again later"
            )
        await asyncio.sleep(self._backoff.pause(failures, self._chance()))

    def _signed(
        self, method: str, key: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> tuple[str, dict[str, str]]:
        path = f"{self._bucket_url}/{quote(key, safe='/-_.~')}" if key else self._bucket_url
        query_string = "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in sorted(query.items()))
        url = f"{path}?{query_string}" if query_string else path
        sha256 = hashlib.sha256(body).hexdigest() if body else NO_BODY
        credentials, region, at_s = self._credentials, self._region, self._clock_s()
        return url, signed_headers(method, url, headers, sha256, credentials=credentials, region=region, at_s=at_s)


class ObjectWriter:
    def __init__(self, store: S3Objects, key: str) -> None:
        self._store = store
        self._key = key
        self._buffer = bytearray()
        self._size = 0
        self._multipart = ""
        self._etags: list[str] = []

    async def write(self, data: bytes) -> None:
        self._buffer += data
        self._size += len(data)
        while len(self._buffer) > PART_BYTES:
            await self._put_part(bytes(self._buffer[:PART_BYTES]))
            del self._buffer[:PART_BYTES]

    async def finish(self) -> None:
        """When it returns, the store has acknowledged the object with all of its bytes."""
        if self._multipart:
            await self._put_part(bytes(self._buffer))
            await self._complete()
        else:
            _expect(await self._store.ask("PUT", self._key, body=bytes(self._buffer)), 200)
        head = await self._store.ask("HEAD", self._key)
        _expect(head, 200)
        if head.headers.get("content-length") != str(self._size):
            raise _refused("it has another number of bytes than were sent")

    async def _put_part(self, body: bytes) -> None:
        if not self._multipart:
            begun = await self._store.ask("POST", self._key, {"uploads": ""})
            _expect(begun, 200)
            self._multipart = _member(begun.body.decode("utf-8", "replace"), "UploadId")
        if len(self._etags) == PARTS_MAX:
            raise TooLarge("file_too_large", f"an S3 store takes at most {PARTS_MAX * PART_BYTES} bytes of a file")
        parameters = {"partNumber": str(len(self._etags) + 1), "uploadId": self._multipart}
        answer = await self._store.ask("PUT", self._key, parameters, body)
        _expect(answer, 200)
        self._etags.append(answer.headers.get("etag", ""))

    async def _complete(self) -> None:
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{html.escape(etag)}</ETag></Part>"
            for number, etag in enumerate(self._etags, 1)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        answer = await self._store.ask("POST", self._key, {"uploadId": self._multipart}, body)
        # 404: an earlier attempt, whose answer was lost, may have completed it. Its size shows which.
        _expect(answer, 200, 404)


def _is_acknowledged(method: str, query: Mapping[str, str] | None, answer: Fetched, body: bytes) -> bool:
    """Whether an acknowledgement is valid. A store can answer with 200 and then fail, or report another hash."""
    if method == "POST" and answer.status == 200:
        done = "<CompleteMultipartUploadResult" if query and "uploadId" in query else "<UploadId>"
        return done.encode() in answer.body
    if method != "PUT" or answer.status != 200:
        return True
    found = _MD5.fullmatch(answer.headers.get("etag", ""))
    # If the store encrypts with its own keys, the tag is not the MD5.
    other_encryption = answer.headers.get("x-amz-server-side-encryption", "AES256") != "AES256"
    return other_encryption or (found is not None and found[1] == hashlib.md5(body, usedforsecurity=False).hexdigest())


def _expect(answer: Fetched, *statuses: int) -> None:
    if answer.status not in statuses:
        raise _refused(_describe("the request", answer))


def _describe(what: str, answer: Fetched) -> str:
    code = _CODE.search(answer.body[:4_096].decode("utf-8", "replace"))
    return f"{what} is answered with {answer.status}{f' {code[1]}' if code else ''}"


def _refused(reason: str) -> Unavailable:
    return Unavailable(
        REFUSED,
        f"the S3 store refuses: {reason}; look at blobs.url, blobs.endpoint, blobs.region and the AWS_… credentials",
    )


def _member(text: str, name: str) -> str:
    found = re.search(rf"<{name}>([^<]{{1,2048}})</{name}>", text)
    if found is None:
        raise _refused(f"its answer has no {name}")
    return html.unescape(found[1])
