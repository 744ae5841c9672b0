"""Python imports this at its start, in the scenario and in every process it starts: so faults are armed first."""

import os

from covenant.testing.faults import arm

arm(os.environ)
