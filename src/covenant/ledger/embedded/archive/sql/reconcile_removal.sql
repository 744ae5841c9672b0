-- Removes rows that the archive must not hold, given `known` (the ids that the state has): tasks that the journal has
-- from their beginning, since they are applied again, and tasks that began after the snapshot, have not ended, and are
-- unknown to the state. Ended tasks stay, whatever the journal has lost: their history is nowhere else.
CREATE TEMP TABLE removed AS
SELECT i.task_no, k.task_id, 1 AS known
FROM known AS k CROSS JOIN ids_new AS i ON i.task_id = k.task_id
WHERE NOT k.in_snapshot
UNION
SELECT i.task_no, k.task_id, 1
FROM known AS k CROSS JOIN ids_recent AS i ON i.task_id = k.task_id
WHERE NOT k.in_snapshot
UNION
SELECT i.task_no, k.task_id, 1
FROM known AS k CROSS JOIN ids_old AS i ON i.task_id = k.task_id
WHERE NOT k.in_snapshot
UNION
SELECT t.task_no, t.task_id, t.task_id IN (SELECT k.task_id FROM known AS k)
FROM a2a_tasks AS t
WHERE
    t.task_no >= (SELECT after_place FROM bounds)
    AND (t.ledger_state <> 'resolved' OR t.task_id IN (SELECT k.task_id FROM known AS k));

DELETE FROM a2a_tasks WHERE task_no IN (SELECT task_no FROM removed);
DELETE FROM packs WHERE task_no IN (SELECT task_no FROM removed);
DELETE FROM requests WHERE task_no IN (SELECT task_no FROM removed);
DELETE FROM handovers WHERE task_no IN (SELECT task_no FROM removed);
DELETE FROM ids_new WHERE task_id IN (SELECT task_id FROM removed);
DELETE FROM ids_recent WHERE task_id IN (SELECT task_id FROM removed);
DELETE FROM ids_old WHERE task_id IN (SELECT task_id FROM removed);

-- Updates of a task that is applied again are overwritten. Those whose record is lost between intact ones stay.
DELETE FROM updates WHERE task_no IN (SELECT task_no FROM removed WHERE NOT known);

-- Remaining tasks may refer to a removed one: then it is a name for them, and gets the number of a name.
INSERT INTO ids_new
SELECT CAST('@' || r.task_id AS BLOB), r.task_no
FROM removed AS r
WHERE
    NOT r.known
    AND NOT EXISTS (SELECT 1 FROM ids AS i WHERE i.task_id = CAST('@' || r.task_id AS BLOB));

INSERT INTO ids_new
SELECT CAST('>' || r.task_id AS BLOB), r.task_no
FROM removed AS r
WHERE
    NOT r.known
    AND NOT EXISTS (SELECT 1 FROM ids AS i WHERE i.task_id = CAST('>' || r.task_id AS BLOB));

UPDATE a2a_tasks SET
    context_no = 1 + 2 * (SELECT i.task_no FROM ids AS i WHERE i.task_id = CAST('@' || a2a_tasks.context_id AS BLOB))
WHERE context_no IN (SELECT 2 * task_no FROM removed WHERE NOT known);

UPDATE a2a_tasks SET
    parent_no = 1 + 2 * (SELECT i.task_no FROM ids AS i WHERE i.task_id = CAST('>' || a2a_tasks.parent AS BLOB))
WHERE parent_no IN (SELECT 2 * task_no FROM removed WHERE NOT known);

UPDATE shelves SET
    held = iif(shelf = 'new', (SELECT count(*) FROM ids_new), (SELECT count(*) FROM ids_recent));
