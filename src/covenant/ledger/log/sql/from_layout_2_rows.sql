-- Then every row, and its id. Indexes and counters are made afterwards, from what is there.
INSERT INTO a2a_tasks (
    task_no, task_id, tenant_id, agent_id, context_id, created_at, updated_at, ledger_state, digest, sender_display,
    sender_pubkey, recipient_display, recipient_pubkey, parent, task_kind, deadline_ms, origin, place,
    settled_place, generation, turn, attempt, interrupted, interruption, lease_id, leased_to_display,
    leased_to_pubkey, leased_at_ms, renewed_at_ms, node, boot, ending, cause, result
)
SELECT
    task_no, task_id, tenant_id, agent_id, context_id, created_at, updated_at, ledger_state, digest, sender_display,
    sender_pubkey, recipient_display, recipient_pubkey, parent, task_kind, deadline_ms, origin, place,
    settled_place, generation, turn, attempt, interrupted, interruption, lease_id, leased_to_display,
    leased_to_pubkey, leased_at_ms, renewed_at_ms, node, boot, ending, cause, result
FROM tasks_before
ORDER BY task_no;

INSERT INTO ids_old SELECT task_id, task_no FROM tasks_before ORDER BY task_id;

DROP TABLE tasks_before;
