-- A writer's row is changed by every batch. While somebody holds a snapshot all its versions stay, and whoever looks for
-- the newest by a key that never changes walks over them: `part` changes from time to time.
ALTER TABLE writers ADD COLUMN part bigint GENERATED ALWAYS AS (seq / 64) STORED;
CREATE INDEX writers_by_part ON writers (part);

-- One index for an id and for its beginning, and one for the tasks of a context: their entries go anywhere, so that each
-- touches a page that is in nobody's cache.
ALTER TABLE ids ALTER COLUMN task_id SET NOT NULL;
CREATE UNIQUE INDEX ids_by_id ON ids (task_id text_pattern_ops);
ALTER TABLE ids DROP CONSTRAINT ids_pkey;
DROP INDEX ids_by_prefix, tasks_by_context, tasks_in_context;
CREATE INDEX tasks_in_context ON tasks (left(context_id, 200), recipient, updated_at_ms, no) WHERE context_id <> '';
