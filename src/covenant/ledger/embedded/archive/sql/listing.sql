-- A page of an agent's tasks, by their last change, newest first, each with its steps and the number of the next one.
-- The page ends when it has the requested length, or the largest size.
WITH RECURSIVE
listed (place, updated_at, task_no, next_no, steps, before) AS (
    SELECT
        0, 0, 0,
        (
            SELECT task_no FROM a2a_tasks
            WHERE
                tenant_id <> '' AND recipient_pubkey = :recipient AND {filters}
                AND (updated_at, task_no) < (:updated_at, :task_no)
            ORDER BY updated_at DESC, task_no DESC
            LIMIT 1
        ),
        '', 0
    UNION ALL
    SELECT
        listed.place + 1,
        p.updated_at,
        p.task_no,
        (
            SELECT task_no FROM a2a_tasks
            WHERE
                tenant_id <> '' AND recipient_pubkey = :recipient AND {filters}
                AND (updated_at, task_no) < (p.updated_at, p.task_no)
            ORDER BY updated_at DESC, task_no DESC
            LIMIT 1
        ),
        coalesce(
            (
                SELECT packed_steps(k.pack, 0, -1, :artifacts, json_array(p.ending, p.cause))
                FROM packs AS k WHERE k.task_no = p.task_no
            ),
            (
                SELECT
                    json_group_array(
                        json_object(
                            'generation', generation,
                            'kind', kind,
                            'ts_ms', ts_ms,
                            'body', json(
                                CASE kind
                                    WHEN 'submitted' THEN (SELECT task FROM requests WHERE task_no = p.task_no)
                                    WHEN 'settled' THEN json_object('ending', p.ending, 'cause', p.cause, 'result', json(p.result))
                                    ELSE coalesce(body, '{{}}')
                                END
                            )
                        )
                    )
                FROM updates
                WHERE task_no = p.task_no AND (:artifacts OR kind <> 'artifact')
            )
        ),
        listed.before + length(listed.steps)
    FROM listed CROSS JOIN a2a_tasks AS p ON p.task_no = listed.next_no
    WHERE listed.place < :limit AND listed.before + length(listed.steps) < :bytes_max
)

SELECT
    json_group_array(
        json_object('updated_at', updated_at, 'task_no', task_no, 'next_no', next_no, 'steps', json(steps))
    )
FROM (SELECT * FROM listed WHERE place > 0 ORDER BY place)
