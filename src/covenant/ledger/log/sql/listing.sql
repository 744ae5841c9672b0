-- A page of an agent's tasks, the one that moved last first, each with what a watcher saw of it.
SELECT
    json_group_array(
        json_object(
            'updated_at', updated_at,
            'task_no', task_no,
            'steps', json((
                SELECT
                    json_group_array(
                        json_object(
                            'generation', generation,
                            'kind', kind,
                            'ts_ms', ts_ms,
                            'body', json(
                                CASE kind
                                    WHEN 'submitted' THEN (SELECT task FROM requests WHERE task_no = p.task_no)
                                    WHEN 'settled' THEN json_object('ending', p.ending, 'result', json(p.result))
                                    ELSE coalesce(body, '{{}}')
                                END
                            )
                        )
                    )
                FROM updates
                WHERE task_no = p.task_no AND (:artifacts OR kind <> 'artifact')
            ))
        )
    )
FROM (
    SELECT task_no, updated_at, ending, result FROM a2a_tasks
    WHERE
        tenant_id <> '' AND recipient_pubkey = :recipient AND {filters}
        AND (updated_at, task_no) < (:updated_at, :task_no)
    ORDER BY updated_at DESC, task_no DESC
    LIMIT :limit
) AS p
