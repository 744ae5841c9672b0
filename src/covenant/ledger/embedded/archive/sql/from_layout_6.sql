-- Up to layout 6 only tenants' tasks were in the index by tenant.
DROP INDEX sent_by_tenant;
CREATE INDEX sent_by_tenant ON a2a_tasks (tenant_id, created_at);
