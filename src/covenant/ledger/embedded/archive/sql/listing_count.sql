-- The number of an agent's tasks that match, where there is no counter.
SELECT count(*) FROM a2a_tasks WHERE tenant_id <> '' AND recipient_pubkey = :recipient AND {filters}
