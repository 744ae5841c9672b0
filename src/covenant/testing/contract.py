"""The contract of a ledger as a suite: what `covenant.ledger.contract` promises, one named test for each sentence.

    class TestMyEngine(LedgerContract):                 # or DurableLedgerContract
        @pytest.fixture
        async def engine(self, tmp_path): ...           # yields an `Engine`, and closes what it opened

Needs pytest and pytest-asyncio in its automatic mode. Call `pytest.register_assert_rewrite("covenant.testing")` in a
conftest for failures that explain themselves.
"""

from __future__ import annotations

from covenant.testing.accounts import AccountKeepingSuite, AccountSuite
from covenant.testing.allowing import AllowingSuite
from covenant.testing.compacting import CompactingSuite
from covenant.testing.delegating import DelegatingSuite, DelegationKeepingSuite
from covenant.testing.expiring import ExpiringSuite
from covenant.testing.leasing import LeasingSuite
from covenant.testing.pushing import PushingSuite, PushKeepingSuite
from covenant.testing.repairing import RepairingSuite
from covenant.testing.reporting import ReportingSuite
from covenant.testing.sending import SendingSuite
from covenant.testing.settling import SettlingSuite
from covenant.testing.sharing import SharingSuite
from covenant.testing.surviving import SurvivingSuite
from covenant.testing.tenanting import TenantingSuite, TenantKeepingSuite
from covenant.testing.viewing import ViewingSuite
from covenant.testing.watching import WatchingSuite
from covenant.testing.withdrawal import WithdrawalKeepingSuite, WithdrawalSuite


class LedgerContract(
    SendingSuite,
    SharingSuite,
    LeasingSuite,
    SettlingSuite,
    ReportingSuite,
    RepairingSuite,
    AllowingSuite,
    TenantingSuite,
    AccountSuite,
    ExpiringSuite,
    ViewingSuite,
    WatchingSuite,
    PushingSuite,
    DelegatingSuite,
    WithdrawalSuite,
):
    """What every engine promises, in memory too."""


class DurableLedgerContract(
    SurvivingSuite,
    CompactingSuite,
    TenantKeepingSuite,
    AccountKeepingSuite,
    PushKeepingSuite,
    DelegationKeepingSuite,
    WithdrawalKeepingSuite,
    LedgerContract,
):
    """What an engine promises besides when its facts outlive the process."""
