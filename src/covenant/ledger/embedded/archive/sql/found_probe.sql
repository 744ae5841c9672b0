-- The number of tasks that a filter leaves, up to a bound.
SELECT count(*) FROM (SELECT 1 FROM {source} WHERE {bounds} LIMIT :most)
