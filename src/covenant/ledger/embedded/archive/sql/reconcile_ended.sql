-- Tasks that the snapshot lacks were resolved by then. Without a result in the archive, they get one that says so. Each
-- gets a place of its own below `free_place`: pages of finished tasks, and the ids of erased ones, go by these places.
CREATE TEMP TABLE ended (
    task_no INTEGER PRIMARY KEY,
    task_id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    settled_place INTEGER NOT NULL
);

INSERT INTO ended
SELECT
    task_no, task_id, generation + 1,
    (SELECT free_place FROM bounds) - row_number() OVER (ORDER BY task_no)
FROM a2a_tasks
WHERE
    settled_place IS NULL AND task_no < (SELECT after_place FROM bounds)
    AND task_id NOT IN (SELECT k.task_id FROM known AS k);

INSERT OR REPLACE INTO updates
SELECT e.task_no, e.generation, 'settled', t.updated_at, NULL
FROM ended AS e CROSS JOIN a2a_tasks AS t ON t.task_no = e.task_no;

INSERT OR REPLACE INTO handovers
SELECT e.task_no, e.settled_place, 'settled', t.updated_at, NULL, NULL
FROM ended AS e CROSS JOIN a2a_tasks AS t ON t.task_no = e.task_no;

UPDATE a2a_tasks SET
    ledger_state = 'resolved',
    state = 'failed',
    interrupted = 0,
    interruption = NULL,
    settled_place = (SELECT e.settled_place FROM ended AS e WHERE e.task_no = a2a_tasks.task_no),
    generation = generation + 1,
    ending = 'failed',
    cause = 'force_error',
    result = json_object(
        'task_id', task_id, 'status', 'error', 'content', json('[]'),
        'error_message', 'this task has ended, and the record of how it ended was lost'
    )
WHERE task_no IN (SELECT task_no FROM ended);

UPDATE a2a_tasks SET ledger_state = 'resolved'
WHERE
    ledger_state = 'result_pending' AND task_no < (SELECT after_place FROM bounds)
    AND task_id NOT IN (SELECT k.task_id FROM known AS k);
