-- Up to layout 8 no index had the doors that tasks came by.
CREATE INDEX found_by_origin ON a2a_tasks (origin, created_at);
