-- Queued tasks, newest first: as many as are requested, or as fit.
SELECT json_group_array(json(r.task)) FROM (
    SELECT
        c.task_no,
        sum(length(r.task)) OVER (ORDER BY c.place DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
    FROM (
        {parts}
        ORDER BY place DESC
        LIMIT :limit
    ) AS c CROSS JOIN requests AS r ON r.task_no = c.task_no
    ORDER BY c.place DESC
) AS w CROSS JOIN requests AS r ON r.task_no = w.task_no
WHERE coalesce(w.before, 0) < :bytes_max
