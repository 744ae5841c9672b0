-- Finding tasks, live and ended: walked in an order, a part at a time. What a row's columns do not tell is looked for in
-- the task itself; one that does not pass comes without it. JSON with a NUL cannot be looked into here, and passes.

-- :walk
SELECT
    x.*,
    CASE WHEN strpos(f.body, '\u0000') > 0 THEN f.body WHEN {hit} THEN f.body END AS task_body,
    e.body AS ended_body,
    x.state = 'leased' AND (
        x.interrupted OR (
            x.boot IS NOT NULL AND x.node IS NOT NULL
            AND NOT EXISTS (
                SELECT FROM nodes AS o WHERE o.node = x.node AND o.boot = x.boot AND o.lost_at_ms IS NULL
            )
        )
    ) AS holder_lost
FROM (
    SELECT * FROM (
        SELECT no, state, {moment} AS moment, interrupted, node, boot, rest, ended_n
        FROM live WHERE {conditions} {begin}
        ORDER BY {moment} {way}, no {way} LIMIT :count
    ) AS l
    UNION ALL
    SELECT * FROM (
        SELECT no, 'drained', {moment} AS moment, false, NULL, NULL, rest, ended_n
        FROM tasks WHERE {ended_conditions} {begin}
        ORDER BY {moment} {way}, no {way} LIMIT :count
    ) AS t
    ORDER BY moment {way}, no {way}
    LIMIT :count
) AS x
JOIN events AS f ON f.no = x.no AND f.n = 1
LEFT JOIN events AS e ON e.no = x.no AND e.n = x.ended_n
ORDER BY x.moment {way}, x.no {way}
