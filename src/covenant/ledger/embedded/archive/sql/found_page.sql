-- Where those tasks stand in the order that the rest of the filters leaves of a walk.
SELECT t.{moment}, t.task_no FROM (
    {rows}
) AS t
WHERE {rest}
LIMIT :most
