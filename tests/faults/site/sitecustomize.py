"""Python imports this at its start, in the scenario and in every process it starts: so faults are armed first."""

import os

from tests.ledger_contract.fault_injection import arm

arm(os.environ)
