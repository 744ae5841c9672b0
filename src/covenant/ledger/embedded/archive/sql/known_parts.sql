-- The unpacked parts of tasks beside their rows, by number, unless they exceed the size of a pack.
WITH asked (task_no, bytes_max) AS (VALUES {rows})

SELECT
    json_group_array(
        json_array(
            t.task_no,
            (SELECT r.task FROM requests AS r WHERE r.task_no = t.task_no),
            t.result,
            json((
                SELECT json_group_array(json_array(u.generation, u.kind, u.ts_ms, u.body))
                FROM updates AS u WHERE u.task_no = t.task_no
            )),
            json((
                SELECT json_group_array(json_array(h.place, h.event, h.ts_ms, h.lease, h.reason))
                FROM handovers AS h WHERE h.task_no = t.task_no
            ))
        )
    )
FROM asked AS a CROSS JOIN a2a_tasks AS t ON t.task_no = a.task_no
WHERE
    (SELECT coalesce(sum(length(u.body)), 0) FROM updates AS u WHERE u.task_no = t.task_no) <= a.bytes_max
    AND (SELECT coalesce(max(length(r.task)), 0) FROM requests AS r WHERE r.task_no = t.task_no) <= a.bytes_max
