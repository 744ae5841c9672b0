-- When a node's run began, by the database's clock.

ALTER TABLE nodes ADD COLUMN started_ms bigint NOT NULL DEFAULT 0;
UPDATE nodes SET started_ms = seen_ms;
