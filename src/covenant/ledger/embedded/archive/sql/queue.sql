-- The queue: what is live, lost holders first, and the results that wait.
WITH chosen AS (
    {parts}
    ORDER BY rank, key, task_no
    LIMIT :limit
),

tasks AS (
    SELECT
        json_group_array(
            json_object(
                'state', t.ledger_state,
                'task', json(r.task),
                'attempt', t.attempt,
                'created_at_ms', t.created_at,
                'lease_id', iif(c.rank < 2, t.lease_id, NULL),
                'leased_to', json(
                    iif(
                        c.rank < 2,
                        json_object('display', t.leased_to_display, 'pubkey', t.leased_to_pubkey),
                        NULL
                    )
                ),
                'leased_at_ms', iif(c.rank < 2, t.leased_at_ms, NULL),
                'renewed_at_ms', iif(c.rank < 2, nullif(t.renewed_at_ms, 0), NULL),
                'holder_lost', json(iif(c.rank = 0, 'true', 'false'))
            )
        ) AS list
    FROM chosen AS c
    CROSS JOIN a2a_tasks AS t ON t.task_no = c.task_no
    CROSS JOIN requests AS r ON r.task_no = c.task_no
),

results AS (
    SELECT json_group_array(json(result)) AS list FROM (
        SELECT result FROM a2a_tasks
        WHERE ledger_state = 'result_pending' AND {sender}
        ORDER BY settled_place
        LIMIT :limit
    )
)

SELECT json_object('tasks', json(tasks.list), 'results', json(results.list)) FROM tasks CROSS JOIN results
