-- Of the tasks that a filter leaves: how many pass the other filters, and how many were looked at.
SELECT coalesce(sum({rest}), 0), count(*) FROM (SELECT {columns} FROM {source} WHERE {bounds} LIMIT :most) AS t
