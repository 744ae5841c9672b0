-- The numbers of what tasks refer to, by its text, with null for what has none. Each is asked for by itself: joined, the
-- view would be read as a whole.
WITH asked (name, named) AS (VALUES {rows})

SELECT
    json_group_array(
        json_array(
            a.name,
            coalesce(
                (SELECT 2 * i.task_no FROM ids AS i WHERE i.task_id = a.name),
                (SELECT 2 * i.task_no + 1 FROM ids AS i WHERE i.task_id = a.named)
            )
        )
    )
FROM asked AS a
