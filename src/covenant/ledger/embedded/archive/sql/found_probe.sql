-- How many tasks a filter leaves, or that they are many.
SELECT count(*) FROM (SELECT 1 FROM {source} WHERE {bounds} LIMIT :most)
