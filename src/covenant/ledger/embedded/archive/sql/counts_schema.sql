-- The writer updates the counts with each change, because counting a million rows for a page of fifty is too slow.
CREATE TABLE task_counts (
    recipient_pubkey TEXT NOT NULL,
    recipient_display TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    ledger_state TEXT NOT NULL,
    state TEXT NOT NULL,
    tasks INTEGER NOT NULL,
    PRIMARY KEY (recipient_pubkey, recipient_display, tenant_id, ledger_state, state)
) WITHOUT ROWID;

INSERT INTO task_counts
SELECT recipient_pubkey, recipient_display, tenant_id, ledger_state, state, count(*) FROM a2a_tasks
GROUP BY 1, 2, 3, 4, 5;
