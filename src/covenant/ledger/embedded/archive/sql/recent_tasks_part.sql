-- The newest queued tasks of one role.
SELECT * FROM (
    SELECT task_no, place FROM a2a_tasks
    WHERE settled_place IS NULL AND ledger_state = 'queued' AND {role}
    ORDER BY place DESC
    LIMIT :limit
)
