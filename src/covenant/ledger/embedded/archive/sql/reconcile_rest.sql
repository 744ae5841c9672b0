-- Afterwards: deletes updates beyond their task's generation and the audit beyond its head, and sets the counters.
DELETE FROM updates
WHERE (task_no, generation) IN (
    SELECT u.task_no, u.generation
    FROM known AS k
    CROSS JOIN a2a_tasks AS t ON t.task_no = (SELECT i.task_no FROM ids AS i WHERE i.task_id = k.task_id)
    CROSS JOIN updates AS u ON u.task_no = t.task_no AND u.generation > t.generation
);

DELETE FROM updates
WHERE task_no IN (SELECT task_no FROM removed WHERE task_no NOT IN (SELECT t.task_no FROM a2a_tasks AS t));

DELETE FROM audit WHERE idx > (SELECT audit_index FROM bounds);

DELETE FROM task_counts;

INSERT INTO task_counts
SELECT recipient_pubkey, recipient_display, tenant_id, ledger_state, state, count(*) FROM a2a_tasks
GROUP BY 1, 2, 3, 4, 5;

DELETE FROM stored_sizes;

INSERT INTO stored_sizes
SELECT tenant_id, count(*), sum(bytes) FROM kept_sizes
GROUP BY tenant_id;

-- The whole chain is verified again.
UPDATE meta SET value = (
    SELECT m.value FROM meta AS m WHERE m.key = replace(meta.key, 'verified', 'anchor')
)
WHERE key IN ('audit_verified_index', 'audit_verified_hash');

DROP TABLE removed;
DROP TABLE ended;
DROP TABLE known;
DROP TABLE bounds;
