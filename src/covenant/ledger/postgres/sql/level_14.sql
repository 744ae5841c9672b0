-- A task without a context of its own is in one that is called like itself, and is found by its id. So only the others
-- need an entry: entries of chosen names go anywhere, and each touches a page that is in nobody's cache.
DROP INDEX tasks_in_context;
CREATE INDEX tasks_in_context ON tasks (left(context_id, 200), recipient, updated_at_ms, no)
WHERE context_id <> '' AND context_id <> task_id;
