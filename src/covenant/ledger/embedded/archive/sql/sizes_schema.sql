-- The approximate size of each finished task: its row, and its pack or unpacked parts.
CREATE VIEW kept_sizes AS
SELECT
    t.task_no,
    t.tenant_id,
    900 + coalesce(
        (SELECT length(p.pack) FROM packs AS p WHERE p.task_no = t.task_no),
        coalesce(length(cast(t.result AS BLOB)), 0)
        + (SELECT coalesce(sum(length(cast(r.task AS BLOB))), 0) FROM requests AS r WHERE r.task_no = t.task_no)
        + (SELECT coalesce(sum(length(cast(u.body AS BLOB))), 0) FROM updates AS u WHERE u.task_no = t.task_no)
        + (SELECT coalesce(sum(length(cast(h.lease AS BLOB))), 0) FROM handovers AS h WHERE h.task_no = t.task_no)
    ) AS bytes
FROM a2a_tasks AS t
WHERE t.ledger_state = 'resolved';

-- Up to layout 9 finished tasks that are not packed were not counted.
INSERT INTO stored_sizes
SELECT k.tenant_id, count(*), sum(k.bytes)
FROM requests AS r CROSS JOIN kept_sizes AS k ON k.task_no = r.task_no
WHERE true
GROUP BY k.tenant_id
ON CONFLICT (tenant_id) DO UPDATE SET tasks = tasks + excluded.tasks, bytes = bytes + excluded.bytes;
