-- When the database was last restored, so that daemons which have seen a later moment know that this is meant.

ALTER TABLE registers ADD COLUMN restored_at_ms bigint NOT NULL DEFAULT 0;
