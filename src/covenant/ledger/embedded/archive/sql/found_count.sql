-- How many of the tasks that a filter leaves pass the rest, and how many were looked at.
SELECT coalesce(sum({rest}), 0), count(*) FROM (SELECT {columns} FROM {source} WHERE {bounds} LIMIT :most) AS t
