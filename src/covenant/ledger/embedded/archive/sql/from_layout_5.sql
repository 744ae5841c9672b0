-- Up to layout 5 tasks had no idempotency key of their own, tasks of the mailbox no number of their context, and a tenant's
-- tasks were listed by their numbers. The indexes of listings are made anew.
ALTER TABLE a2a_tasks ADD COLUMN idempotency_key TEXT;
DROP INDEX listed;
DROP INDEX listed_by_state;
DROP INDEX listed_by_context;
DROP INDEX sent_by_tenant;
DROP INDEX simple_by_tenant;
