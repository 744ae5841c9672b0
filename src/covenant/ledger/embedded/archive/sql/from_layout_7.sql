-- Up to layout 7 only the tasks of tenants were counted.
DROP TABLE task_counts;
