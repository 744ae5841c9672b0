-- How many tasks of an agent the filters leave, where no counter says it.
SELECT count(*) FROM a2a_tasks WHERE tenant_id <> '' AND recipient_pubkey = :recipient AND {filters}
