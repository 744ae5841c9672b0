-- Tasks that the snapshot lacks were resolved by then. Without a result in the archive, they get one that says so.
CREATE TEMP TABLE ended AS
SELECT task_no, task_id, generation + 1 AS generation
FROM a2a_tasks
WHERE
    settled_place IS NULL AND task_no < (SELECT after_place FROM bounds)
    AND task_id NOT IN (SELECT k.task_id FROM known AS k);

INSERT OR REPLACE INTO updates
SELECT e.task_no, e.generation, 'settled', t.updated_at, NULL
FROM ended AS e CROSS JOIN a2a_tasks AS t ON t.task_no = e.task_no;

INSERT OR REPLACE INTO handovers
SELECT e.task_no, (SELECT after_place FROM bounds) - 1, 'settled', t.updated_at, NULL, NULL
FROM ended AS e CROSS JOIN a2a_tasks AS t ON t.task_no = e.task_no;

UPDATE a2a_tasks SET
    ledger_state = 'resolved',
    state = 'failed',
    interrupted = 0,
    interruption = NULL,
    settled_place = (SELECT after_place FROM bounds) - 1,
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
