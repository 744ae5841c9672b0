"""Queued work cannot kill the daemon: its bodies stay on disk, also over restarts."""

import random
import signal

import pytest

from tests.cli.daemons import Daemon
from tests.hostile.client import operator_token, request, resident_bytes
from tests.hostile.conftest import StartDaemon
from tests.hostile.tenant import Tenant, lease

MIB = 1024 * 1024
BODY_BYTES = 1_000_000
GROWTH_MAX = 64 * MIB
"""How much more memory a daemon may have with queued bodies than without: the 32 MiB of large bodies that may wait for
the archive, and what a few requests of a megabyte each leave behind. The bodies together are half as much again."""


def text(number: int) -> str:
    return random.Random(number).randbytes(BODY_BYTES // 2).hex()


@pytest.mark.parametrize("count", [96, pytest.param(200, marks=pytest.mark.slow)])
def test_queued_bodies_stay_on_disk_and_leases_are_given_theirs(start_daemon: StartDaemon, count: int) -> None:
    daemon = start_daemon()
    tenant = Tenant(daemon)
    tenant.add_worker_agent()
    idle = resident_bytes(daemon.process.pid)
    sent = {tenant.sent(text(number)): number for number in range(count)}
    grown = {"sent": resident_bytes(daemon.process.pid) - idle}

    daemon.stop(signal.SIGKILL)
    daemon = start_daemon()
    grown["killed"] = resident_bytes(daemon.process.pid) - idle

    daemon.json("capabilities", "grant", "a2a.compact", "--to", "operator@local")
    assert request(daemon.url, "POST", "/a2a/compact", token=operator_token(daemon.home), body={}).status == 200
    grown["compacted"] = resident_bytes(daemon.process.pid) - idle
    daemon.stop(signal.SIGKILL)
    daemon = start_daemon()
    grown["killed after a compaction"] = resident_bytes(daemon.process.pid) - idle
    assert max(grown.values()) < GROWTH_MAX, {when: size // MIB for when, size in grown.items()}

    tenant.daemon = daemon
    _check_leases(daemon, tenant, sent)
    assert resident_bytes(daemon.process.pid) - idle < GROWTH_MAX


def _check_leases(daemon: Daemon, tenant: Tenant, sent: dict[str, int]) -> None:
    token = tenant.enroll_worker()
    left = dict(sent)
    while left:
        leased = lease(daemon, token, 100)
        assert leased, f"{len(left)} tasks are not given out"
        for each in leased:
            number = left.pop(each["task"]["id"])
            same = each["task"]["intent_text"] == text(number)
            assert same, f"task {number} was given another body"
