INSERT INTO task_counts VALUES {rows}
ON CONFLICT (recipient_pubkey, state) DO UPDATE SET tasks = tasks + excluded.tasks
