-- The numbers under which tasks refer to a text: as a task's id, and as a name.
SELECT
    (SELECT 2 * i.task_no FROM ids AS i WHERE i.task_id = :id),
    (SELECT 2 * i.task_no + 1 FROM ids AS i WHERE i.task_id = :name)
