-- The number of an agent's tasks, in one state or in all.
SELECT coalesce(sum(tasks), 0) FROM task_counts
WHERE recipient_pubkey = :recipient AND tenant_id <> '' AND (:state IS NULL OR state = :state)
