"""Frames: length, kinds in every spelling, and what comes wrapped."""

import msgspec
import pytest

from covenant.doors.operator_api.operation_table import BY_KIND, OPERATIONS
from covenant.wire.ipc_frames import canonical_kind, encode_frame, frame_length
from covenant.wire.mailbox import PostResult, RetryStaleRequest, WrappedPolicy, WrappedResult


def test_a_frame_is_its_length_and_its_body() -> None:
    assert encode_frame(b"{}") == b"\x00\x00\x00\x02{}"
    assert frame_length(encode_frame(b"x" * 70_000)) == 70_000


@pytest.mark.parametrize(
    ("spellings", "kind"),
    [
        (("SendA2ATask", "send_a2_a_task"), "send_a2a_task"),
        (("TryRecvA2ATask", "try_recv_a2_a_task"), "try_recv_a2a_task"),
        (("RecentA2ATasks", "recent_a2_a_tasks"), "recent_a2a_tasks"),
        (("PostA2AResult", "post_a2_a_result"), "post_a2a_result"),
        (("TryRecvA2AResult", "try_recv_a2_a_result"), "try_recv_a2a_result"),
        (("RecentA2AResults", "recent_a2_a_results"), "recent_a2a_results"),
        (("A2AQueue", "a2_a_queue"), "a2a_queue"),
        (("RepairA2ATask", "repair_a2_a_task"), "repair_a2a_task"),
        (("RetryA2AStale", "retry_a2_a_stale"), "retry_a2a_stale"),
        (("CompactA2A", "compact_a2_a"), "compact_a2a"),
    ],
)
def test_every_spelling_of_a_kind_is_understood(spellings: tuple[str, ...], kind: str) -> None:
    for spelling in (*spellings, kind):
        assert BY_KIND[canonical_kind(spelling)].kind == kind


def test_no_two_kinds_are_spelled_alike() -> None:
    assert len(BY_KIND) == len(OPERATIONS)


def test_a_lease_id_may_stand_in_the_result_or_beside_it() -> None:
    for data in (
        b'{"result":{"task_id":"t","status":"ok","lease_id":"l"}}',
        b'{"result":{"task_id":"t","status":"ok"},"lease_id":"l"}',
    ):
        request = msgspec.json.decode(data, type=WrappedResult).request()
        assert isinstance(request, PostResult)
        assert request.lease_id == "l"


def test_a_policy_may_be_left_out() -> None:
    assert msgspec.json.decode(b"{}", type=WrappedPolicy).request() == RetryStaleRequest()
