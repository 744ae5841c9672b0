-- Undrained results, newest first: as many as are requested, or as fit.
SELECT json_group_array(json(t.result)) FROM (
    SELECT
        task_no,
        sum(length(result)) OVER (
            ORDER BY settled_place DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS before
    FROM (
        SELECT task_no, settled_place, result FROM a2a_tasks
        WHERE ledger_state = 'result_pending' AND {sender}
        ORDER BY settled_place DESC
        LIMIT :limit
    )
    ORDER BY settled_place DESC
) AS w CROSS JOIN a2a_tasks AS t ON t.task_no = w.task_no
WHERE coalesce(w.before, 0) < :bytes_max
