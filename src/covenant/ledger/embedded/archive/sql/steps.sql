-- The steps of a task after a generation, in order, as watchers see them. Of a task outside the scope only its small
-- row is read.
SELECT
    coalesce(
        (
            SELECT packed_steps(p.pack, :after, :limit, 1, json_array(t.ending, t.cause))
            FROM packs AS p WHERE p.task_no = t.task_no
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
                                WHEN 'submitted' THEN (SELECT r.task FROM requests AS r WHERE r.task_no = t.task_no)
                                WHEN 'settled'
                                    THEN json_object('ending', t.ending, 'cause', t.cause, 'result', json(t.result))
                                ELSE coalesce(body, '{}')
                            END
                        )
                    )
                )
            FROM (
                SELECT u.generation, u.kind, u.ts_ms, u.body FROM updates AS u
                WHERE u.task_no = t.task_no AND u.generation > :after
                ORDER BY u.generation
                LIMIT :limit
            )
        )
    )
FROM a2a_tasks AS t
WHERE
    t.task_no = (SELECT i.task_no FROM ids AS i WHERE i.task_id = :task_id)
    AND (:recipient IS NULL OR t.recipient_pubkey = :recipient)
    AND (:sender IS NULL OR t.sender_pubkey = :sender)
    AND (:tenant IS NULL OR t.tenant_id = :tenant)
