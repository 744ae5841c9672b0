-- The places of the tasks of a walk that pass the other filters.
SELECT t.{moment}, t.task_no FROM (
    {rows}
) AS t
WHERE {rest}
LIMIT :most
