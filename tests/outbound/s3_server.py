"""A store that speaks the S3 protocol, on loopback, in memory. It believes no signature but one that it computes too.

What it checks of a request is AWS Signature Version 4 as it is published; none of it is shared with the client.
"""

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, unquote

from tests.outbound.http_servers import Request, http_server, reply

BUCKET, REGION = "files", "eu-test-1"
ACCESS_KEY, SECRET_KEY = "AKIDTEST", "a/secret+key"
SKEW_S = 15 * 60
PART_BYTES_MIN = 5 * 1024 * 1024
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/s3/aws4_request, SignedHeaders=([a-z0-9;-]+), "
    r"Signature=([0-9a-f]{64})"
)


class Denied(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


@dataclass
class Fault:
    """What goes wrong, once, with the next request that fits.

    `how`: a status; `cut`: the connection ends before anything is done; `lost`: it is done, and the answer never comes;
    `half`: half of the answer's body; `etag`: another hash; `late`: 200, and then an error.
    """

    method: str
    how: int | str
    query: str = ""
    """What the query has."""


@dataclass
class S3Server:
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, bytes]]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    down: bool = False
    url: str = ""

    async def answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        path, _, query = request.target.partition("?")
        self.asked.append(f"{request.method} {query.partition('=')[0]}".strip())
        fits = [each for each in self.faults if each.method == request.method and each.query in query]
        fault = fits[0] if fits else None
        if fault is not None:
            self.faults.remove(fault)
        how = 503 if self.down else fault.how if fault is not None else ""
        if how == "cut":
            writer.close()
            return
        if isinstance(how, int):
            writer.write(_error(how, {500: "InternalError", 503: "SlowDown"}[how]))
            return
        try:
            verify(request)
            told = self._do(request, unquote(path), dict(parse_qsl(query, keep_blank_values=True)))
        except Denied as denied:
            told = _error(denied.status, denied.code)
        if how == "lost":
            writer.close()
            return
        if how == "half":
            writer.write(told[: -len(told) // 2])
            await writer.drain()
            writer.close()
            return
        if how == "etag":
            told = re.sub(rb'etag: "[0-9a-f]+"', b'etag: "' + b"0" * 32 + b'"', told)
        if how == "late":
            told = reply(200, b"<Error><Code>InternalError</Code></Error>")
        writer.write(told)

    def _do(self, request: Request, path: str, query: dict[str, str]) -> bytes:
        _, bucket, *rest = path.split("/", 2)
        if bucket != BUCKET:
            raise Denied(404, "NoSuchBucket")
        key = rest[0] if rest else ""
        match request.method:
            case "PUT" if "uploadId" in query:
                upload = self._upload(query["uploadId"], key)
                upload[int(query["partNumber"])] = request.body
                return reply(200, etag=_etag(request.body))
            case "PUT":
                self.objects[key] = request.body
                return reply(200, etag=_etag(request.body))
            case "POST" if "uploads" in query:
                upload_id = f"u&{len(self.asked)}"
                self.uploads[upload_id] = (key, {})
                told = upload_id.replace("&", "&amp;")
                return reply(200, f"<Result><Key>{key}</Key><UploadId>{told}</UploadId></Result>".encode())
            case "POST":
                return self._complete(query["uploadId"], key, request.body.decode())
            case "DELETE" if "uploadId" in query:
                self._upload(query["uploadId"], key)
                del self.uploads[query["uploadId"]]
                return reply(204)
            case "DELETE":
                self.objects.pop(key, None)
                return reply(204)
            case "GET" if not key:
                return reply(200, self._listed(query).encode())
            case _:
                return self._read(request, key)

    def _upload(self, upload_id: str, key: str) -> dict[int, bytes]:
        found = self.uploads.get(upload_id)
        if found is None or found[0] != key:
            raise Denied(404, "NoSuchUpload")
        return found[1]

    def _complete(self, upload_id: str, key: str, body: str) -> bytes:
        parts = self._upload(upload_id, key)
        named = re.findall(r"<Part><PartNumber>(\d+)</PartNumber><ETag>(.*?)</ETag></Part>", body)
        numbers = [int(number) for number, _ in named]
        if not numbers or numbers != sorted(set(numbers)):
            raise Denied(400, "InvalidPartOrder")
        for number, etag in named:
            if int(number) not in parts or etag.replace("&quot;", '"') != _etag(parts[int(number)]):
                raise Denied(400, "InvalidPart")
        if any(len(parts[number]) < PART_BYTES_MIN for number in numbers[:-1]):
            raise Denied(400, "EntityTooSmall")
        self.objects[key] = b"".join(parts[number] for number in numbers)
        del self.uploads[upload_id]
        return reply(200, b"<CompleteMultipartUploadResult></CompleteMultipartUploadResult>")

    def _listed(self, query: dict[str, str]) -> str:
        if "uploads" not in query:
            assert query["list-type"] == "2"
            return "<ListBucketResult></ListBucketResult>"
        found = [(key, upload_id) for upload_id, (key, _) in self.uploads.items() if key.startswith(query["prefix"])]
        told = "".join(
            f"<Upload><Key>{key}</Key><UploadId>{upload_id.replace('&', '&amp;')}</UploadId></Upload>"
            for key, upload_id in found
        )
        return f"<ListMultipartUploadsResult>{told}</ListMultipartUploadsResult>"

    def _read(self, request: Request, key: str) -> bytes:
        if key not in self.objects:
            raise Denied(404, "NoSuchKey")
        data = self.objects[key]
        if request.method == "HEAD":
            return reply(200, content_length=str(len(data)), etag=_etag(data))
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if found is None:
            return reply(200, data)
        start, last = int(found[1]), int(found[2])
        if start >= len(data):
            raise Denied(416, "InvalidRange")
        return reply(206, data[start : last + 1])


def verify(request: Request) -> None:
    """Raises Denied unless the request is signed, now, by who has the secret key, over all that counts."""
    found = _AUTHORIZATION.fullmatch(request.headers.get("authorization", ""))
    if found is None:
        raise Denied(403, "AccessDenied")
    access_key, day, region, names, signature = found.groups()
    at = request.headers.get("x-amz-date", "")
    if not at.startswith(day) or abs(_seconds(at) - time.time()) > SKEW_S:
        raise Denied(403, "RequestTimeTooSkewed")
    if access_key != ACCESS_KEY or region != REGION:
        raise Denied(403, "InvalidAccessKeyId")
    signed = names.split(";")
    needed = {"host"} | {name for name in request.headers if name.startswith("x-amz-")}
    if signed != sorted(set(signed)) or not needed <= set(signed):
        raise Denied(403, "AccessDenied")
    body_sha256 = request.headers["x-amz-content-sha256"]
    if body_sha256 != hashlib.sha256(request.body).hexdigest():
        raise Denied(400, "XAmzContentSHA256Mismatch")
    path, _, query = request.target.partition("?")
    pairs = sorted((_encoded(name), _encoded(value)) for name, value in parse_qsl(query, keep_blank_values=True))
    canonical = [
        request.method,
        quote(unquote(path), safe="/-_.~"),
        "&".join(f"{name}={value}" for name, value in pairs),
        *(f"{name}:{request.headers[name].strip()}" for name in signed),
        "",
        names,
        body_sha256,
    ]
    told = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
    key = f"AWS4{SECRET_KEY}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    text = f"AWS4-HMAC-SHA256\n{at}\n{day}/{region}/s3/aws4_request\n{told}"
    if hmac.new(key, text.encode(), hashlib.sha256).hexdigest() != signature:
        raise Denied(403, "SignatureDoesNotMatch")


def _seconds(at: str) -> float:
    return datetime.strptime(at, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _encoded(text: str) -> str:
    return quote(text, safe="-_.~")


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _error(status: int, code: str) -> bytes:
    return reply(status, f"<Error><Code>{code}</Code></Error>".encode())


@asynccontextmanager
async def s3_server() -> AsyncIterator[S3Server]:
    store = S3Server()
    async with http_server(store.answer) as served:
        store.url = served.url("")
        yield store
