-- The parties of a task, live or finished: one small row, however large the task.
SELECT
    json_object(
        'sender', json_object('display', sender_display, 'pubkey', sender_pubkey),
        'recipient', json_object('display', recipient_display, 'pubkey', recipient_pubkey),
        'tenant', nullif(tenant_id, '')
    )
FROM a2a_tasks
WHERE task_no = (SELECT i.task_no FROM ids AS i WHERE i.task_id = :task_id)
