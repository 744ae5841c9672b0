-- Up to layout 2 there was an index over all ids, as part of the table of tasks; up to layout 3 contexts and parents had
-- no numbers. That table is rewritten. First, objects that conflict with the new one are dropped.
DROP INDEX IF EXISTS by_update;
DROP INDEX live;
DROP INDEX live_by_recipient;
DROP INDEX live_by_sender;
DROP INDEX live_by_lessee;
DROP INDEX pending;
DROP INDEX pending_by_sender;
DROP INDEX finished;
DROP INDEX children;
DROP INDEX IF EXISTS listed;
DROP INDEX IF EXISTS listed_by_state;
DROP INDEX IF EXISTS listed_by_context;
DROP INDEX IF EXISTS sent_by_tenant;
DROP INDEX IF EXISTS simple_by_tenant;
DROP TRIGGER IF EXISTS counted;
DROP TRIGGER IF EXISTS recounted;
DROP TABLE IF EXISTS task_counts;
ALTER TABLE a2a_tasks RENAME TO tasks_before;
