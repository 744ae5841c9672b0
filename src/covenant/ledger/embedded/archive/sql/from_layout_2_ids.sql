-- The ids of every task, where there was no table of them.
INSERT INTO ids_old SELECT task_id, task_no FROM tasks_before ORDER BY task_id;
