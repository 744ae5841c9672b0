-- The ids of all tasks, for layouts without a table of ids.
INSERT INTO ids_old SELECT task_id, task_no FROM tasks_before ORDER BY task_id;
