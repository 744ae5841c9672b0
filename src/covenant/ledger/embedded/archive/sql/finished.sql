-- The ids of tasks that ended after a place, in the order in which they ended, and the place of the last.
SELECT json_array(json(json_group_array(task_id)), coalesce(max(settled_place), :after)) FROM (
    SELECT * FROM (
        SELECT task_id, settled_place FROM a2a_tasks
        WHERE settled_place > :after
        ORDER BY settled_place
        LIMIT :limit
    )
    UNION ALL
    SELECT * FROM (
        SELECT task_id, settled_place FROM aged_out
        WHERE settled_place > :after
        ORDER BY settled_place
        LIMIT :limit
    )
    ORDER BY settled_place
    LIMIT :limit
)
