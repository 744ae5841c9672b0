-- The rows of a walk, in order.
SELECT {columns} FROM {source}
WHERE {bounds} AND {begin}
ORDER BY t.{moment} {direction}, t.task_no {direction}
LIMIT :scan OFFSET :skip
