-- A finished task with all fields of its entry in memory, for commands that bring it back.
SELECT
    json_object(
        'digest', t.digest,
        'sender', json_object('display', t.sender_display, 'pubkey', t.sender_pubkey),
        'recipient', json_object('display', t.recipient_display, 'pubkey', t.recipient_pubkey),
        'leased_to', t.leased_to_pubkey,
        'ending', t.ending,
        'cause', t.cause,
        'result', json(coalesce(packed_result(p.pack), t.result)),
        'task', json(coalesce(packed_task(p.pack), r.task)),
        'generation', t.generation,
        'accepted_at_ms', t.created_at,
        'lease', json(
            iif(
                t.leased_to_pubkey IS NULL,
                'null',
                json_object(
                    'lease_id', t.lease_id,
                    'leased_to', json_object('display', t.leased_to_display, 'pubkey', t.leased_to_pubkey),
                    'leased_at_ms', t.leased_at_ms,
                    'attempt', t.attempt
                )
            )
        )
    )
FROM a2a_tasks AS t
LEFT JOIN requests AS r ON r.task_no = t.task_no
LEFT JOIN packs AS p ON p.task_no = t.task_no
WHERE
    t.task_no = (SELECT i.task_no FROM ids AS i WHERE i.task_id = :task_id)
    AND t.settled_place IS NOT NULL
    AND (r.task_no IS NOT NULL OR p.task_no IS NOT NULL)
