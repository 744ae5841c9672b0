-- For listings of a tenant's tasks. Partial: a task of the mailbox, which has no tenant, pays for none of it.
CREATE INDEX listed ON a2a_tasks (recipient_pubkey, updated_at, task_no) WHERE tenant_id <> '';
CREATE INDEX listed_by_state ON a2a_tasks (recipient_pubkey, state, updated_at, task_no) WHERE tenant_id <> '';
CREATE INDEX listed_by_context ON a2a_tasks (recipient_pubkey, context_id, updated_at, task_no) WHERE tenant_id <> '';

-- As they were sent: all of a tenant's, and those of a door that few use, which must not look through the others.
CREATE INDEX sent_by_tenant ON a2a_tasks (tenant_id, task_no) WHERE tenant_id <> '';
CREATE INDEX simple_by_tenant ON a2a_tasks (tenant_id, task_no) WHERE origin = 'simple';

-- Counted as they move, because counting a million rows for a page of fifty would not be flat.
CREATE TABLE task_counts (
    recipient_pubkey TEXT NOT NULL,
    state TEXT NOT NULL,
    tasks INTEGER NOT NULL,
    PRIMARY KEY (recipient_pubkey, state)
) WITHOUT ROWID;

INSERT INTO task_counts
SELECT recipient_pubkey, state, count(*) FROM a2a_tasks WHERE tenant_id <> '' GROUP BY 1, 2;

CREATE TRIGGER counted AFTER INSERT ON a2a_tasks WHEN new.tenant_id <> '' BEGIN
    INSERT INTO task_counts VALUES (new.recipient_pubkey, new.state, 1)
    ON CONFLICT DO UPDATE SET tasks = tasks + 1;
END;

CREATE TRIGGER recounted AFTER UPDATE ON a2a_tasks WHEN new.tenant_id <> '' AND new.state <> old.state BEGIN
    INSERT INTO task_counts VALUES (new.recipient_pubkey, new.state, 1)
    ON CONFLICT DO UPDATE SET tasks = tasks + 1;
    UPDATE task_counts SET tasks = tasks - 1 WHERE recipient_pubkey = new.recipient_pubkey AND state = old.state;
END;
