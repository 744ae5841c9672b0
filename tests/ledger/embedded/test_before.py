"""What was written before tenants had more limits is read as it was meant: without limits of their own."""

from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.event_codec import decode_events
from covenant.model.settings import Limits
from covenant.model.tenants import TenantLimits

BEFORE = b"""[{"type":"tenant_put","tenant":{"name":"acme","token_sha256":"a","token_prefix":"b","created_at_ms":1,
"disabled_at_ms":null,"limits":{"concurrency":2,"rate_per_min":60,"burst":5}}}]"""


def test_a_tenant_that_was_written_before_has_the_limits_that_it_had() -> None:
    state = LedgerState(Limits())
    state.apply(decode_events(BEFORE), 1, 1)
    tenant = state.tenant("acme")
    assert tenant is not None
    assert tenant.limits == TenantLimits(concurrency=2, rate_per_min=60, burst=5)
    assert (tenant.limits.connections, tenant.limits.streams) == (0, 0)
    assert (tenant.limits.live_tasks, tenant.limits.queued_bytes) == (0, 0)
