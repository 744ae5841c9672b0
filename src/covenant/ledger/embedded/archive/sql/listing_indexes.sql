-- For listings of a tenant's tasks. Partial: a task of the mailbox, which has no tenant, pays for none of it, unless it
-- has a context.
CREATE INDEX listed ON a2a_tasks (recipient_pubkey, updated_at, task_no) WHERE tenant_id <> '';
CREATE INDEX listed_by_state ON a2a_tasks (recipient_pubkey, state, updated_at, task_no) WHERE tenant_id <> '';
CREATE INDEX listed_by_context ON a2a_tasks (context_no, recipient_pubkey, updated_at, task_no)
WHERE context_no IS NOT NULL;

-- In the order of sending: the tasks of a tenant or of none; those of a rarely used door must not scan the others.
CREATE INDEX sent_by_tenant ON a2a_tasks (tenant_id, created_at);
CREATE INDEX simple_by_tenant ON a2a_tasks (tenant_id, created_at) WHERE origin = 'simple';
