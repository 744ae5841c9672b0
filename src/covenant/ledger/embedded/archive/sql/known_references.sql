-- The numbers of the texts that tasks refer to; null for a text without one. Each is looked up by itself: a join would
-- read the whole view.
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
