-- The generations of a task after a given one, in order, with what a watcher sees of each. Of a task outside the scope
-- nothing but its small row is read.
SELECT
    json_group_array(
        json_object(
            'generation', generation,
            'kind', kind,
            'ts_ms', ts_ms,
            'body', json(
                CASE kind
                    WHEN 'submitted' THEN (SELECT task FROM requests WHERE task_no = s.task_no)
                    WHEN 'settled' THEN json_object('ending', ending, 'cause', cause, 'result', json(result))
                    ELSE coalesce(body, '{}')
                END
            )
        )
    )
FROM (
    -- The result may be large, and belongs to one row.
    SELECT
        u.task_no, u.generation, u.kind, u.ts_ms, u.body, t.ending, t.cause,
        CASE u.kind WHEN 'settled' THEN t.result END AS result
    FROM a2a_tasks AS t CROSS JOIN updates AS u ON u.task_no = t.task_no
    WHERE
        t.task_no = (SELECT i.task_no FROM ids AS i WHERE i.task_id = :task_id)
        AND (:recipient IS NULL OR t.recipient_pubkey = :recipient)
        AND (:sender IS NULL OR t.sender_pubkey = :sender)
        AND (:tenant IS NULL OR t.tenant_id = :tenant)
        AND u.generation > :after
    ORDER BY u.generation
    LIMIT :limit
) AS s
