-- A task as it was sent.
SELECT coalesce(r.task, packed_task(p.pack))
FROM (SELECT i.task_no FROM ids AS i WHERE i.task_id = :task_id LIMIT 1) AS i
LEFT JOIN requests AS r ON r.task_no = i.task_no
LEFT JOIN packs AS p ON p.task_no = i.task_no
WHERE r.task_no IS NOT NULL OR p.task_no IS NOT NULL
