-- Queued tasks, the newest first.
SELECT json_group_array(json(r.task)) FROM (
    {parts}
    ORDER BY place DESC
    LIMIT :limit
) AS c CROSS JOIN requests AS r ON r.task_no = c.task_no
