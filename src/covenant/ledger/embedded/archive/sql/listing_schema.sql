-- For listings of a tenant's tasks. Partial: a task of the mailbox, which has no tenant, pays for none of it.
CREATE INDEX listed ON a2a_tasks (recipient_pubkey, updated_at, task_no) WHERE tenant_id <> '';
CREATE INDEX listed_by_state ON a2a_tasks (recipient_pubkey, state, updated_at, task_no) WHERE tenant_id <> '';
CREATE INDEX listed_by_context ON a2a_tasks (recipient_pubkey, context_no, updated_at, task_no) WHERE tenant_id <> '';

-- As they were sent: all of a tenant's, and those of a door that few use, which must not look through the others.
CREATE INDEX sent_by_tenant ON a2a_tasks (tenant_id, task_no) WHERE tenant_id <> '';
CREATE INDEX simple_by_tenant ON a2a_tasks (tenant_id, task_no) WHERE origin = 'simple';

-- Counted as they move by whoever writes them, because counting a million rows for a page of fifty would not be flat.
CREATE TABLE task_counts (
    recipient_pubkey TEXT NOT NULL,
    state TEXT NOT NULL,
    tasks INTEGER NOT NULL,
    PRIMARY KEY (recipient_pubkey, state)
) WITHOUT ROWID;

INSERT INTO task_counts
SELECT recipient_pubkey, state, count(*) FROM a2a_tasks WHERE tenant_id <> '' GROUP BY 1, 2;
