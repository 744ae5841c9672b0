-- Whether a task with this id was erased.
SELECT 'true' FROM (SELECT i.task_no FROM ids AS i WHERE i.task_id = :task_id LIMIT 1) AS i
WHERE NOT EXISTS (SELECT 1 FROM a2a_tasks AS t WHERE t.task_no = i.task_no)
