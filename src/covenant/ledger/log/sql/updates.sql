-- The generations of a task after a given one, in order.
SELECT
    json_group_array(
        json_object(
            'generation', generation,
            'kind', kind,
            'ts_ms', ts_ms,
            'body', json(iif(kind = 'settled', json_object('state', ending, 'result', json(result)), body))
        )
    )
FROM (
    SELECT u.generation, u.kind, u.ts_ms, u.body, t.ending, t.result
    FROM a2a_tasks AS t CROSS JOIN updates AS u ON u.task_no = t.task_no
    WHERE t.task_id = :task_id AND u.generation > :after
    ORDER BY u.generation
    LIMIT :limit
)
