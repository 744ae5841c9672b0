-- Tasks of a tenant, oldest first, live ones among them: at most the given number.
SELECT
    t.task_no, t.created_at, t.updated_at, t.ledger_state, t.task_id, t.settled_place, t.state, t.recipient_pubkey,
    t.recipient_display, t.sender_pubkey, t.context_id, t.context_no, t.parent, t.parent_no,
    (SELECT k.bytes FROM kept_sizes AS k WHERE k.task_no = t.task_no)
FROM a2a_tasks AS t
WHERE
    t.tenant_id = :tenant
    AND t.created_at < :until_ms
    AND (t.created_at, t.task_no) > (:after_ms, :after_no)
ORDER BY t.created_at, t.task_no
LIMIT :limit
