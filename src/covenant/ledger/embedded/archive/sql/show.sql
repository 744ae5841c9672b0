-- Everything known of one task, if the viewer may see it, with the newest leases and updates, in order.
SELECT
    json_object(
        'task', json(coalesce(packed_task(p.pack), r.task)),
        'state', t.ledger_state,
        'a2a_state', t.state,
        'attempt', t.attempt,
        'turn', t.turn,
        'generation', t.generation,
        'created_at_ms', t.created_at,
        'updated_at_ms', t.updated_at,
        'leases', json((
            SELECT
                json_group_array(
                    json_object(
                        'lease_id', json_extract(lease, '$.lease_id'),
                        'leased_to', json(json_extract(lease, '$.leased_to')),
                        'leased_at_ms', json_extract(lease, '$.leased_at_ms'),
                        'turn', turn,
                        'attempt', json_extract(lease, '$.attempt'),
                        'ended_at_ms', ended_at_ms,
                        'outcome', outcome,
                        'reason', json(why)
                    )
                )
            FROM (
                SELECT
                    *,
                    count(*) OVER () - row_number() OVER (ORDER BY place) AS newer
                FROM (
                    SELECT
                        place,
                        event,
                        lease,
                        1 + sum(event = 'continued') OVER task AS turn,
                        lead(ts_ms) OVER task AS ended_at_ms,
                        lead(event) OVER task AS outcome,
                        lead(reason) OVER task AS why
                    FROM (
                        SELECT h.place, h.event, h.ts_ms, h.lease, h.reason FROM handovers AS h
                        WHERE h.task_no = t.task_no
                        UNION ALL
                        SELECT
                            json_extract(h.value, '$[0]'),
                            json_extract(h.value, '$[1]'),
                            json_extract(h.value, '$[2]'),
                            json_extract(h.value, '$[3]'),
                            json_extract(h.value, '$[4]')
                        FROM json_each(packed_handovers(p.pack)) AS h
                    )
                    WINDOW task AS (ORDER BY place)
                )
                WHERE event = 'leased'
                ORDER BY place
            )
            WHERE newer < :leases_max
        )),
        'updates', json((
            SELECT
                json_group_array(
                    json_object(
                        'generation', generation,
                        'kind', kind,
                        'ts_ms', ts_ms,
                        'body', json(
                            iif(
                                kind = 'settled',
                                json_object(
                                    'state', t.ending, 'result', json(coalesce(packed_result(p.pack), t.result))
                                ),
                                body
                            )
                        )
                    )
                )
            FROM (
                SELECT * FROM (
                    SELECT u.generation, u.kind, u.ts_ms, u.body FROM updates AS u
                    WHERE
                        u.task_no = t.task_no
                        AND u.generation > :after
                        AND (:until IS NULL OR u.generation <= :until)
                    UNION ALL
                    SELECT
                        json_extract(u.value, '$[0]'),
                        json_extract(u.value, '$[1]'),
                        json_extract(u.value, '$[2]'),
                        json_extract(u.value, '$[3]')
                    FROM json_each(packed_updates(p.pack)) AS u
                    WHERE
                        json_extract(u.value, '$[0]') > :after
                        AND (:until IS NULL OR json_extract(u.value, '$[0]') <= :until)
                    ORDER BY generation DESC
                    LIMIT :updates_max
                )
                ORDER BY generation
            )
        )),
        'result', json(coalesce(packed_result(p.pack), t.result)),
        'cause', t.cause,
        'holder_lost', json(
            iif(
                t.ledger_state = 'in_flight'
                AND (t.interrupted OR t.boot <> :boot),
                'true',
                'false'
            )
        )
    )
FROM a2a_tasks AS t
LEFT JOIN requests AS r ON r.task_no = t.task_no
LEFT JOIN packs AS p ON p.task_no = t.task_no
WHERE
    (r.task_no IS NOT NULL OR p.task_no IS NOT NULL)
    AND t.task_no = (SELECT i.task_no FROM ids AS i WHERE i.task_id = :task_id)
    AND (
        :viewer IS NULL
        OR t.sender_pubkey = :viewer
        OR t.recipient_pubkey = :viewer
        OR t.leased_to_pubkey = :viewer
    )
