"""Objects of an S3-compatible store: signatures, parts, ranges, and what goes wrong in between."""

import os
import random
import time
from collections.abc import AsyncIterator

import pytest

from covenant.model.errors import Unavailable
from covenant.model.rate_limits import Backoff
from covenant.outbound.address_guard import AddressGuard
from covenant.outbound.http_fetcher import Fetcher
from covenant.outbound.s3_objects import ATTEMPTS_MAX, NO_BODY, PART_BYTES, S3Credentials, S3Objects, signed_headers
from tests.matrices import first_of
from tests.outbound.http_servers import HERE, LIMITS, nobody
from tests.outbound.s3_server import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, Fault, S3Server, s3_server

CREDENTIALS = S3Credentials(access_key=ACCESS_KEY, secret_key=SECRET_KEY)
LARGE = random.Random(5).randbytes(2 * PART_BYTES + 77)


def objects_of(server: S3Server, **changed: object) -> S3Objects:
    guard = AddressGuard([HERE], resolver=nobody)  # type: ignore[arg-type]  # asks for no name
    given: dict[str, object] = {
        "credentials": CREDENTIALS,
        "region": REGION,
        "clock_s": time.time,
        "chance": random.random,
        "backoff": Backoff(0.001, 0.002),
        **changed,
    }
    return S3Objects(Fetcher(guard, LIMITS), server.url, BUCKET, "a/b", **given)  # type: ignore[arg-type]


@pytest.fixture
async def server() -> AsyncIterator[S3Server]:
    async with s3_server() as found:
        yield found


@pytest.fixture
async def objects(server: S3Server) -> AsyncIterator[S3Objects]:
    made = objects_of(server)
    yield made
    await made.close()


async def put(objects: S3Objects, upload_id: int, data: bytes) -> None:
    writer = objects.writer(upload_id)
    for start in range(0, len(data), 300_000):
        await writer.write(data[start : start + 300_000])
    await writer.finish()


async def get(objects: S3Objects, upload_id: int, start: int, stop: int) -> bytes:
    return b"".join([piece async for piece in objects.read(upload_id, start, stop)])


def test_a_request_is_signed_as_the_published_example_is() -> None:
    headers = signed_headers(
        "GET",
        "https://examplebucket.s3.amazonaws.com/test.txt",
        {"range": "bytes=0-9"},
        NO_BODY,
        credentials=S3Credentials(
            access_key="AKIAIOSFODNN7EXAMPLE", secret_key="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
        ),
        region="us-east-1",
        at_s=1369353600,
    )
    assert headers["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, len(LARGE)])
async def test_what_was_put_is_read_in_any_range_and_dropped(server: S3Server, objects: S3Objects, size: int) -> None:
    await objects.check()
    data = LARGE[:size]
    await put(objects, 7, data)
    assert server.objects == {"a/b/7": data}
    assert (await get(objects, 7, 0, size), server.uploads) == (data, {})
    for start, stop in ((size // 3, size // 2), (max(0, size - 5), size), (size, size)):
        assert await get(objects, 7, start, stop) == data[start:stop]
    assert await get(objects, 7, size, size + 10) == b""
    await objects.drop(7)
    await objects.drop(7)
    assert (server.objects, await get(objects, 7, 0, 10)) == ({}, b"")


FAULTS = [
    *(Fault("PUT", how) for how in (500, 503, "cut", "lost", "etag")),
    *(Fault("PUT", how, "partNumber=2") for how in (503, "lost", "etag")),
    *(Fault("POST", how, "uploads") for how in (503, "cut", "late")),
    *(Fault("POST", how, "uploadId") for how in (500, "cut", "lost", "late")),
    *(Fault("HEAD", how) for how in (500, "cut")),
    *(Fault("GET", how) for how in (503, "cut", "half")),
]


@pytest.mark.parametrize(
    "fault",
    first_of(sorted(FAULTS, key=FAULTS[::4].__contains__, reverse=True), 5),
    ids=lambda each: f"{each.method}-{each.query}-{each.how}",
)
async def test_what_passes_is_tried_again_and_the_bytes_are_right(
    server: S3Server, objects: S3Objects, fault: Fault
) -> None:
    # Two of them: the second attempt fails as well.
    server.faults = [fault, Fault(fault.method, fault.how, fault.query)]
    data = LARGE if fault.query or fault.method == "GET" else LARGE[:1000]
    await put(objects, 1, data)
    assert await get(objects, 1, 10, len(data)) == data[10:]
    assert (server.faults, server.objects["a/b/1"] == data) == ([], True)


async def test_a_store_that_stays_away_acknowledges_nothing(server: S3Server, objects: S3Objects) -> None:
    server.down = True
    with pytest.raises(Unavailable) as refused:
        await put(objects, 1, b"x")
    assert (refused.value.code, "503 SlowDown" in refused.value.message) == ("blobs_unavailable", True)
    assert server.asked == ["PUT"] * ATTEMPTS_MAX
    server.down = False
    await put(objects, 1, b"x")
    server.down = True
    with pytest.raises(Unavailable):
        await get(objects, 1, 0, 1)


async def test_another_hash_than_that_of_the_bytes_is_never_an_acknowledgement(
    server: S3Server, objects: S3Objects
) -> None:
    server.faults = [Fault("PUT", "etag") for _ in range(ATTEMPTS_MAX)]
    with pytest.raises(Unavailable):
        await put(objects, 1, b"x")


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"credentials": S3Credentials(access_key=ACCESS_KEY, secret_key="wrong")}, "SignatureDoesNotMatch"),
        ({"credentials": S3Credentials(access_key="AKIDOTHER", secret_key=SECRET_KEY)}, "InvalidAccessKeyId"),
        ({"region": "elsewhere-1"}, "InvalidAccessKeyId"),
        ({"clock_s": lambda: time.time() - 3600}, "RequestTimeTooSkewed"),
    ],
)
async def test_who_is_not_let_in_is_told_once_with_the_reason(
    server: S3Server, changed: dict[str, object], code: str
) -> None:
    objects = objects_of(server, **changed)
    with pytest.raises(Unavailable) as refused:
        await objects.check()
    await objects.close()
    assert (refused.value.code, len(server.asked)) == ("blobs_refused", 1)
    assert code in refused.value.message
    assert "wrong" not in refused.value.message + repr(changed)


async def test_what_was_sent_of_an_upload_that_was_never_whole_is_dropped(server: S3Server, objects: S3Objects) -> None:
    for upload_id in (1, 11):
        await objects.writer(upload_id).write(LARGE[: PART_BYTES + 1])
    assert len(server.uploads) == 2
    await objects.drop(1)
    assert [key for key, _ in server.uploads.values()] == ["a/b/11"]


async def test_a_session_token_is_sent_and_signed(server: S3Server) -> None:
    held = S3Credentials(access_key=ACCESS_KEY, secret_key=SECRET_KEY, session_token=os.urandom(8).hex())
    objects = objects_of(server, credentials=held)
    await put(objects, 1, b"x")
    await objects.close()
    assert held.session_token not in repr(held)
