-- Undrained results, the newest first.
SELECT json_group_array(json(result)) FROM (
    SELECT result FROM a2a_tasks
    WHERE ledger_state = 'result_pending' AND {sender}
    ORDER BY settled_place DESC
    LIMIT :limit
)
