-- The number of tasks, from the running totals.
SELECT coalesce(sum(tasks), 0) FROM task_counts WHERE {conditions}
