-- Idempotency keys from the requests, and the contexts of the mailbox's tasks, with the same numbers as if each had
-- been applied by itself (see `apply_batch`).
UPDATE a2a_tasks SET idempotency_key = (
    SELECT json_extract(r.task, '$.idempotency.key') FROM requests AS r WHERE r.task_no = a2a_tasks.task_no
)
WHERE task_no IN (SELECT r.task_no FROM requests AS r WHERE instr(r.task, '"idempotency":{') > 0);

UPDATE a2a_tasks SET idempotency_key = (
    SELECT json_extract(packed_task(p.pack), '$.idempotency.key') FROM packs AS p WHERE p.task_no = a2a_tasks.task_no
)
WHERE task_no IN (SELECT p.task_no FROM packs AS p WHERE instr(packed_task(p.pack), '"idempotency":{') > 0);

INSERT OR IGNORE INTO ids_old
SELECT CAST('@' || t.context_id AS BLOB), min(t.task_no)
FROM a2a_tasks AS t
WHERE
    t.tenant_id = '' AND t.context_id <> '' AND t.context_id <> t.task_id
    AND NOT EXISTS (SELECT 1 FROM ids AS i WHERE i.task_id = t.context_id AND i.task_no <= t.task_no)
    AND NOT EXISTS (SELECT 1 FROM ids AS i WHERE i.task_id = CAST('@' || t.context_id AS BLOB))
GROUP BY t.context_id
ORDER BY 1;

UPDATE a2a_tasks SET context_no = iif(
    context_id = task_id,
    2 * task_no,
    coalesce(
        (SELECT 2 * i.task_no FROM ids AS i WHERE i.task_id = a2a_tasks.context_id AND i.task_no <= a2a_tasks.task_no),
        (SELECT 2 * i.task_no + 1 FROM ids AS i WHERE i.task_id = CAST('@' || a2a_tasks.context_id AS BLOB))
    )
)
WHERE tenant_id = '' AND context_id <> '';
