-- The queue: live tasks, lost holders first, and undrained results; of each as many as are requested, or as fit.
WITH listed AS (
    {parts}
    ORDER BY rank, key, task_no
    LIMIT :limit
),

chosen AS (
    SELECT * FROM (
        SELECT
            c.*,
            sum(length(r.task)) OVER (
                ORDER BY c.rank, c.key, c.task_no ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS before
        FROM listed AS c CROSS JOIN requests AS r ON r.task_no = c.task_no
        ORDER BY c.rank, c.key, c.task_no
    )
    WHERE coalesce(before, 0) < :bytes_max
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
    SELECT json_group_array(json(t.result)) AS list FROM (
        SELECT
            task_no,
            sum(length(result)) OVER (
                ORDER BY settled_place ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS before
        FROM (
            SELECT task_no, settled_place, result FROM a2a_tasks
            WHERE ledger_state = 'result_pending' AND {sender}
            ORDER BY settled_place
            LIMIT :limit
        )
        ORDER BY settled_place
    ) AS w CROSS JOIN a2a_tasks AS t ON t.task_no = w.task_no
    WHERE coalesce(w.before, 0) < :bytes_max
)

SELECT json_object('tasks', json(tasks.list), 'results', json(results.list)) FROM tasks CROSS JOIN results
