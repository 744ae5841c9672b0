-- Finished tasks that are not packed, and their tenants: too large ones, and those that an earlier version wrote.
SELECT r.task_no, t.tenant_id
FROM requests AS r CROSS JOIN a2a_tasks AS t ON t.task_no = r.task_no
WHERE r.task_no > :after AND t.ledger_state = 'resolved'
ORDER BY r.task_no
LIMIT :limit
