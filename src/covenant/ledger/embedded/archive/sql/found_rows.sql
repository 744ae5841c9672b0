-- The rows that a walk comes past, in order.
SELECT {columns} FROM {source}
WHERE {bounds} AND {begin}
ORDER BY t.{moment} {way}, t.task_no {way}
LIMIT :scan OFFSET :skip
