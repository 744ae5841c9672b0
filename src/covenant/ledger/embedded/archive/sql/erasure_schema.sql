-- The approximate size of each tenant's finished tasks, updated when tasks finish and are erased.
CREATE TABLE stored_sizes (
    tenant_id TEXT PRIMARY KEY,
    tasks INTEGER NOT NULL,
    bytes INTEGER NOT NULL
) WITHOUT ROWID;

INSERT INTO stored_sizes
SELECT t.tenant_id, count(*), sum(900 + length(p.pack))
FROM packs AS p CROSS JOIN a2a_tasks AS t ON t.task_no = p.task_no
GROUP BY t.tenant_id;

-- The ids of erased tasks, by the place where they ended. No task is sent under such an id again.
CREATE TABLE aged_out (
    settled_place INTEGER PRIMARY KEY,
    task_id TEXT NOT NULL
);
