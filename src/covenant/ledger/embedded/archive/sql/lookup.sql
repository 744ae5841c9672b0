-- A finished task, for a caller that repeats a command about it, if that caller may see it: otherwise nothing of it is
-- read.
SELECT
    json_object(
        'digest', digest,
        'sender', json_object('display', sender_display, 'pubkey', sender_pubkey),
        'recipient', json_object('display', recipient_display, 'pubkey', recipient_pubkey),
        'leased_to', leased_to_pubkey,
        'ending', ending,
        'cause', cause,
        'result', json(
            coalesce((SELECT packed_result(p.pack) FROM packs AS p WHERE p.task_no = a2a_tasks.task_no), result)
        )
    )
FROM a2a_tasks
WHERE
    task_no = (SELECT i.task_no FROM ids AS i WHERE i.task_id = :task_id)
    AND settled_place IS NOT NULL
    AND (
        :viewer IS NULL
        OR sender_pubkey = :viewer
        OR recipient_pubkey = :viewer
        OR leased_to_pubkey = :viewer
    )
    AND (:recipient IS NULL OR recipient_pubkey = :recipient)
