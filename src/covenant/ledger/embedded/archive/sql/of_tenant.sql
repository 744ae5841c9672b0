-- The newest tasks of a tenant, in the order in which they were sent, for any of its agents.
SELECT
    json_group_array(
        json_object(
            'task_id', task_id,
            'agent_id', agent_id,
            'context_id', context_id,
            'origin', origin,
            'state', state,
            'created_at_ms', created_at,
            'updated_at_ms', updated_at,
            'generation', generation,
            'error_message', coalesce(json_text(result, 'error_message'), '')
        )
    )
FROM (
    SELECT
        task_id, agent_id, context_id, origin, state, created_at, updated_at, generation, result
    FROM a2a_tasks
    WHERE tenant_id <> '' AND tenant_id = :tenant AND {filters}
    ORDER BY created_at DESC, task_no DESC
    LIMIT :limit
)
