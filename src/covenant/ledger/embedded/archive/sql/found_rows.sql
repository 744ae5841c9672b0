-- The rows of a walk, in order.
SELECT {columns} FROM {source}
WHERE {bounds} AND {begin}
ORDER BY t.{moment} {way}, t.task_no {way}
LIMIT :scan OFFSET :skip
