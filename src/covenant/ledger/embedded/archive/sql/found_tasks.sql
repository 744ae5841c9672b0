-- Tasks by their numbers, in the given order, as a query returns them.
SELECT
    json_group_array(
        json_object(
            'task_id', task_id,
            'parent', parent,
            'context_id', nullif(beginning(context_id, :name_chars), ''),
            'tenant', nullif(tenant_id, ''),
            'agent', recipient_display,
            'sender', sender_display,
            'task_kind', beginning(task_kind, :name_chars),
            'key', beginning(idempotency_key, :name_chars),
            'origin', origin,
            'state', iif(ledger_state = 'resolved', 'done', ledger_state),
            'a2a_state', state,
            'attempt', attempt,
            'created_at_ms', created_at,
            'updated_at_ms', updated_at,
            -- A column has at most 63 bits: only the task itself has a later deadline.
            'deadline_ms', json(
                iif(deadline_ms = 9223372036854775807, task -> '$.deadline_ms', coalesce(deadline_ms, 'null'))
            ),
            'outcome', ending,
            'cause', cause,
            'lease_id', iif(ledger_state = 'in_flight', lease_id, NULL),
            'leased_to', iif(ledger_state = 'in_flight', leased_to_display, NULL),
            'leased_at_ms', iif(ledger_state = 'in_flight', leased_at_ms, NULL),
            'holder_lost', json(
                iif(
                    ledger_state = 'in_flight'
                    AND (interrupted OR boot <> :boot),
                    'true',
                    'false'
                )
            ),
            'intent', beginning(json_text(task, 'intent_text'), :chars),
            'error_message', nullif(beginning(json_text(result, 'error_message'), :chars), ''),
            'remote', json(iif(json_extract(task, '$.target') IS NULL, 'false', 'true'))
        )
    )
FROM (
    SELECT t.*, coalesce(r.task, packed_task(p.pack)) AS task
    FROM json_each(:numbers) AS n
    CROSS JOIN a2a_tasks AS t ON t.task_no = n.value
    LEFT JOIN requests AS r ON r.task_no = n.value
    LEFT JOIN packs AS p ON p.task_no = n.value
    ORDER BY n.key
)
