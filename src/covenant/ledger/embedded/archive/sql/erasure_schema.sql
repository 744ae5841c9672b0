-- What the packed tasks of each tenant take, about: counted as they are packed and erased.
CREATE TABLE stored_sizes (
    tenant_id TEXT PRIMARY KEY,
    tasks INTEGER NOT NULL,
    bytes INTEGER NOT NULL
) WITHOUT ROWID;

INSERT INTO stored_sizes
SELECT t.tenant_id, count(*), sum(900 + length(p.pack))
FROM packs AS p CROSS JOIN a2a_tasks AS t ON t.task_no = p.task_no
GROUP BY t.tenant_id;

-- What is left of erased tasks, by where they ended. No task is sent under such an id again.
CREATE TABLE aged_out (
    settled_place INTEGER PRIMARY KEY,
    task_id TEXT NOT NULL
);
