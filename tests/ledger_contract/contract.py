"""The contract of a ledger as a suite: what `covenant.ledger.contract.ledger` promises, one named test for each
sentence.

    class TestMyEngine(LedgerContract):                 # or DurableLedgerContract
        @pytest.fixture
        async def engine(self, tmp_path): ...           # yields an `Engine`, and closes what it opened

Needs pytest-asyncio in its automatic mode. `tests/conftest.py` has pytest rewrite the assertions of these modules, so
that failures explain themselves.
"""

from __future__ import annotations

from tests.ledger_contract.acceptance import AcceptanceSuite
from tests.ledger_contract.accounts import AccountDurabilitySuite, AccountSuite
from tests.ledger_contract.capabilities import CapabilitySuite
from tests.ledger_contract.compaction import CompactionSuite
from tests.ledger_contract.delegations import DelegationDurabilitySuite, DelegationSuite
from tests.ledger_contract.durability import DurabilitySuite
from tests.ledger_contract.erasure import ErasureDurabilitySuite, ErasureSuite
from tests.ledger_contract.expiry import ExpirySuite
from tests.ledger_contract.idempotency import IdempotencySuite
from tests.ledger_contract.leases import LeaseSuite
from tests.ledger_contract.push import PushDurabilitySuite, PushSuite
from tests.ledger_contract.queries import LargePageSuite, QuerySuite
from tests.ledger_contract.removal import RemovalDurabilitySuite, RemovalSuite
from tests.ledger_contract.repair import RepairSuite
from tests.ledger_contract.results import ResultSuite
from tests.ledger_contract.searches import SearchSuite
from tests.ledger_contract.suspensions import SuspensionDurabilitySuite, SuspensionSuite
from tests.ledger_contract.tenants import TenantDurabilitySuite, TenantSuite
from tests.ledger_contract.updates import UpdateSuite
from tests.ledger_contract.watches import WatchSuite
from tests.ledger_contract.withdrawal import WithdrawalDurabilitySuite, WithdrawalSuite


class LedgerContract(
    AcceptanceSuite,
    IdempotencySuite,
    LeaseSuite,
    ResultSuite,
    UpdateSuite,
    RepairSuite,
    CapabilitySuite,
    TenantSuite,
    AccountSuite,
    ExpirySuite,
    QuerySuite,
    LargePageSuite,
    SearchSuite,
    WatchSuite,
    PushSuite,
    DelegationSuite,
    WithdrawalSuite,
    ErasureSuite,
    RemovalSuite,
    SuspensionSuite,
):
    """What every engine promises, in memory too."""


class DurableLedgerContract(
    DurabilitySuite,
    CompactionSuite,
    TenantDurabilitySuite,
    AccountDurabilitySuite,
    PushDurabilitySuite,
    DelegationDurabilitySuite,
    WithdrawalDurabilitySuite,
    ErasureDurabilitySuite,
    RemovalDurabilitySuite,
    SuspensionDurabilitySuite,
    LedgerContract,
):
    """What an engine promises besides when its facts outlive the process."""
