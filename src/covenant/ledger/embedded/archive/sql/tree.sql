-- The tasks under a root, level by level, through tasks that the viewer may see; cut where the tree gets too large. A
-- parent may name any id, its own descendants too: `depth` ends such circles, and the reader takes the first of each.
WITH RECURSIVE walk (task_id, task_no, depth) AS (
    SELECT :root, (SELECT i.task_no FROM ids AS i WHERE i.task_id = :root), 0
    UNION
    SELECT t.task_id, t.task_no, w.depth + 1
    FROM walk AS w
    CROSS JOIN a2a_tasks AS t
        ON t.parent_no IN (
            2 * w.task_no,
            (SELECT 2 * i.task_no + 1 FROM ids AS i WHERE i.task_id = CAST('>' || w.task_id AS BLOB))
        )
    WHERE
        w.depth < :depth_max
        AND (
            :viewer IS NULL
            OR t.sender_pubkey = :viewer
            OR t.recipient_pubkey = :viewer
            OR t.leased_to_pubkey = :viewer
        )
    LIMIT :nodes_max
)

SELECT
    json_group_array(
        json_object(
            'task_id', task_id,
            'parent', parent,
            'task', json(task),
            'state', ledger_state,
            'attempt', attempt,
            'created_at_ms', created_at,
            'updated_at_ms', updated_at,
            'result_status', json_extract(whole_result, '$.status'),
            'a2a_state', state,
            'holder_lost', json(iif(
                ledger_state = 'in_flight'
                AND (interrupted OR boot <> :boot),
                'true', 'false'
            )),
            'notes', json(json_extract(whole_result, '$.metadata')),
            'remote', json(remote),
            -- The id of the task at the remote agent: noted when it was learned, and again in each turn.
            'remote_note', json(CASE WHEN remote IS NOT NULL THEN (
                SELECT json_extract(body, '$.metadata."covenant.remote"')
                FROM (
                    SELECT u.generation, u.body FROM updates AS u
                    WHERE u.task_no = no AND u.kind = 'status'
                    UNION ALL
                    SELECT json_extract(u.value, '$[0]'), json_extract(u.value, '$[3]')
                    FROM json_each(packed_updates(pack)) AS u
                    WHERE json_extract(u.value, '$[1]') = 'status'
                )
                WHERE json_extract(body, '$.metadata."covenant.remote"') IS NOT NULL
                ORDER BY generation DESC
                LIMIT 1
            ) END)
        )
    )
FROM (
    SELECT
        *,
        CASE
            -- Earlier versions had the target in the request metadata.
            WHEN origin = 'delegation'
                THEN coalesce(
                    json_extract(task, '$.target'), json_extract(task, '$.request_metadata."covenant.remote"')
                )
        END AS remote,
        sum(length(task)) OVER (ROWS UNBOUNDED PRECEDING) AS size
    FROM (
        SELECT
            t.*, t.task_no AS no, p.pack,
            coalesce(packed_task(p.pack), r.task) AS task,
            coalesce(packed_result(p.pack), t.result) AS whole_result
        FROM walk AS w
        CROSS JOIN a2a_tasks AS t ON t.task_no = w.task_no
        LEFT JOIN requests AS r ON r.task_no = t.task_no
        LEFT JOIN packs AS p ON p.task_no = t.task_no
        WHERE
            (r.task_no IS NOT NULL OR p.task_no IS NOT NULL)
            AND (
                :viewer IS NULL
                OR t.sender_pubkey = :viewer
                OR t.recipient_pubkey = :viewer
                OR t.leased_to_pubkey = :viewer
            )
    )
)
WHERE size <= :bytes_max
