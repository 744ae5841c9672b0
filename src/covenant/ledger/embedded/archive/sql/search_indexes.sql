-- For finding tasks: by the moment of their creation within each filter. Every task is in five of these. The others are
-- partial: open tasks, tasks that did not succeed, and tasks that have the filtered column at all. For tenant,
-- context and parent, the indexes of listings and trees serve.
CREATE INDEX found_created ON a2a_tasks (created_at);
CREATE INDEX found_moved ON a2a_tasks (updated_at);
CREATE INDEX found_by_agent ON a2a_tasks (recipient_display, created_at);
CREATE INDEX found_by_sender ON a2a_tasks (sender_display, created_at);
CREATE INDEX found_by_origin ON a2a_tasks (origin, created_at);
CREATE INDEX found_open ON a2a_tasks (ledger_state, created_at) WHERE ledger_state <> 'resolved';
CREATE INDEX found_open_by_agent ON a2a_tasks (recipient_display, ledger_state, created_at)
WHERE ledger_state <> 'resolved';
CREATE INDEX found_unsuccessful ON a2a_tasks (ending, created_at) WHERE ending <> 'completed';
CREATE INDEX found_unsuccessful_by_agent ON a2a_tasks (recipient_display, ending, created_at)
WHERE ending <> 'completed';
CREATE INDEX found_by_cause ON a2a_tasks (cause, created_at) WHERE cause <> 'result';
CREATE INDEX found_by_kind ON a2a_tasks (task_kind, created_at) WHERE task_kind IS NOT NULL;
CREATE INDEX found_by_key ON a2a_tasks (idempotency_key, created_at) WHERE idempotency_key IS NOT NULL;
CREATE INDEX found_retried ON a2a_tasks (created_at) WHERE attempt > 1;
