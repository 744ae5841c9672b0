-- Then the contexts and parents that were no task's id when they were first named, and every row with its references:
-- the same numbers as if each had been applied by itself (see `apply_batch`). Indexes and counters are made afterwards.
INSERT INTO ids_old
SELECT CAST('@' || t.context_id AS BLOB), min(t.task_no)
FROM tasks_before AS t
WHERE
    t.tenant_id <> '' AND t.context_id <> t.task_id
    AND NOT EXISTS (SELECT 1 FROM ids AS i WHERE i.task_id = t.context_id AND i.task_no <= t.task_no)
GROUP BY t.context_id
ORDER BY 1;

INSERT INTO ids_old
SELECT CAST('>' || t.parent AS BLOB), min(t.task_no)
FROM tasks_before AS t
WHERE
    t.parent IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM ids AS i WHERE i.task_id = t.parent AND i.task_no <= t.task_no)
GROUP BY t.parent
ORDER BY 1;

INSERT INTO a2a_tasks (
    task_no, task_id, tenant_id, agent_id, context_id, context_no, parent, parent_no, created_at, updated_at,
    ledger_state, state, digest, sender_display, sender_pubkey, recipient_display, recipient_pubkey, task_kind,
    deadline_ms, origin, place, settled_place, generation, turn, attempt, interrupted, interruption, lease_id,
    leased_to_display, leased_to_pubkey, leased_at_ms, renewed_at_ms, node, boot, ending, cause, result
)
SELECT
    task_no, task_id, tenant_id, agent_id, context_id,
    CASE
        WHEN tenant_id = '' THEN NULL
        WHEN context_id = task_id THEN 2 * task_no
        ELSE coalesce(
            (SELECT 2 * i.task_no FROM ids AS i WHERE i.task_id = t.context_id AND i.task_no <= t.task_no),
            (SELECT 2 * i.task_no + 1 FROM ids AS i WHERE i.task_id = CAST('@' || t.context_id AS BLOB))
        )
    END,
    parent,
    CASE
        WHEN parent IS NOT NULL THEN coalesce(
            (SELECT 2 * i.task_no FROM ids AS i WHERE i.task_id = t.parent AND i.task_no <= t.task_no),
            (SELECT 2 * i.task_no + 1 FROM ids AS i WHERE i.task_id = CAST('>' || t.parent AS BLOB))
        )
    END,
    created_at, updated_at,
    ledger_state, state, digest, sender_display, sender_pubkey, recipient_display, recipient_pubkey, task_kind,
    deadline_ms, origin, place, settled_place, generation, turn, attempt, interrupted, interruption, lease_id,
    leased_to_display, leased_to_pubkey, leased_at_ms, renewed_at_ms, node, boot, ending, cause, result
FROM tasks_before AS t
ORDER BY task_no;

DROP TABLE tasks_before;
