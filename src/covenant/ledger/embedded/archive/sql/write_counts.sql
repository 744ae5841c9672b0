INSERT INTO task_counts VALUES {rows}
ON CONFLICT (recipient_pubkey, recipient_display, tenant_id, ledger_state, state)
DO UPDATE SET tasks = tasks + excluded.tasks
