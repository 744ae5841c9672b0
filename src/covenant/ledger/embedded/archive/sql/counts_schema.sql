-- Counted as they move by whoever writes them, because counting a million rows for a page of fifty would not be flat.
CREATE TABLE task_counts (
    recipient_pubkey TEXT NOT NULL,
    state TEXT NOT NULL,
    tasks INTEGER NOT NULL,
    PRIMARY KEY (recipient_pubkey, state)
) WITHOUT ROWID;

INSERT INTO task_counts
SELECT recipient_pubkey, state, count(*) FROM a2a_tasks WHERE tenant_id <> '' GROUP BY 1, 2;
