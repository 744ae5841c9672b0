-- A task as it was sent.
SELECT r.task FROM requests AS r
WHERE r.task_no = (SELECT i.task_no FROM ids AS i WHERE i.task_id = :task_id)
