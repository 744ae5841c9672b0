"""A page of the audit is found after a bounded look, and says where to go on."""

from pathlib import Path

import msgspec
import pytest

from covenant.exchange import audit_search
from covenant.exchange.audit_search import AuditFilter, find_audit
from covenant.ledger.contract.identities import LAST
from covenant.model.errors import Invalid
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test


async def enroll(daemon: DaemonUnderTest, count: int) -> None:
    for number in range(count):
        await daemon.identities.enroll(daemon.operator, f"worker{number}@test")


async def test_a_rare_kind_is_found_behind_many_others_page_by_page(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_search, "CHUNK_ROWS", 2)
    monkeypatch.setattr(audit_search, "CHUNKS_MAX", 2)
    async with open_daemon_under_test(short_path / "home") as daemon:
        await daemon.identities.enroll(daemon.operator, "eve@test", actions=("ui.view",))
        await enroll(daemon, 9)
        ledger, asked = daemon.daemon.base.storage.ledger, AuditFilter(type="capability_granted")
        found, looks, below = [], 0, LAST
        while True:
            page = await find_audit(ledger, daemon.operator, asked, 10, below)
            found += [msgspec.json.decode(record.row)["kind"]["action"] for record in page.records]
            looks += 1
            if page.next is None:
                break
            assert page.next < below
            below = page.next
        assert found == ["ui.view"]
        assert looks > 2, "no page looks at more than its bound"


@pytest.mark.parametrize("limit", [0, -1, 1_001])
async def test_a_page_has_a_bounded_size(short_path: Path, limit: int) -> None:
    async with open_daemon_under_test(short_path / "home") as daemon:
        with pytest.raises(Invalid, match="limit must be"):
            await find_audit(daemon.daemon.base.storage.ledger, daemon.operator, AuditFilter(), limit)


async def test_whoever_is_not_the_operator_finds_its_own_rows(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home") as daemon:
        bob = await daemon.identities.enroll(daemon.operator, "bob@test")
        await enroll(daemon, 3)
        rows = (await daemon.ask("GET", "/audit/recent?issuer=operator", token=bob.token)).json()["events"]
        assert rows == []
